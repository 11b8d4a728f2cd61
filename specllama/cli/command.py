"""The class of every command: help in sections, hidden aliases, and a check for ambiguous words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from specllama.base.disk import require_home
from specllama.base.errors import UsageError
from specllama.cli.screen.ending import ending_in_order
from specllama.cli.screen.output import Stream, stream_of

HELP_WIDTH = 100  # longest line of help
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}

REST = "Options"  # the section of options without a panel

# Hidden names, those of other tools, as (long name of the option, hidden name): a hidden -r of one command is shown in
# another. `Option.typed` in grouping.py fills it.
SILENT: set[tuple[str, str]] = set()

# Names such as -md of any command; where -m takes a value and -md is unknown, the parser would read -m d.
LONG_SHORT: set[str] = set()


def _declared(params: Iterable[Any]) -> dict[str, TyperOption]:
    """The option names of a command."""
    return {
        name: param
        for param in params
        if isinstance(param, TyperOption)
        for name in (*param.opts, *param.secondary_opts)
    }


def _long_name(param: TyperOption) -> str:
    return next((name for name in param.opts if name.startswith("--")), "")


def refuse_misread(args: Sequence[str], options: dict[str, TyperOption]) -> None:
    """Raises UsageError for words that the parser would silently read as something else.

    `-mdfile` would be `-m dfile`, also where -md is no option: a joined value needs a space or an equals sign. In
    `--stop -n 8`, -n would be the text to stop at: an option's name is a value only behind an equals sign.
    """
    waiting = ""  # the option before, whose value this word is
    for arg in args:
        if waiting:
            if arg in options:
                long_name = _long_name(options[waiting])
                hint = f"write {long_name}=TEXT; {long_name}={arg} if {arg} is meant" if long_name else ""
                raise UsageError(f"{waiting} has no value: the next word is the option {arg}", hint=hint)
            waiting = ""
            continue
        if arg == "--":
            return
        name, equals, _ = arg.partition("=")
        if name in options:
            waiting = "" if options[name].is_flag or equals else name
            continue
        if arg.startswith("--") or not arg.startswith("-"):
            continue
        if name in LONG_SHORT:
            raise UsageError(f"no such option: {name}")
        longer = [name for name in {*options, *LONG_SHORT} if name[1] != "-" and len(name) > 2 and arg.startswith(name)]
        known = max(longer, key=len, default="")
        meant = [f"{name} {arg[len(name) :]}" for name in (known, arg[:2]) if name in options]
        if known and meant:
            raise UsageError(
                f"{arg} is neither {known} nor {arg[:2]}: a value needs a space after the option",
                hint=f"write {' or '.join(meant)}",
            )


def _record(param: TyperOption, metavar: str, stream: Stream) -> tuple[str, str]:
    """The two columns of an option in the help text."""
    long_name = _long_name(param)
    names = [name for name in (*param.opts, *param.secondary_opts) if (long_name, name) not in SILENT]
    names.sort(key=lambda name: name.startswith("--"))  # stable: short names first
    left = ", ".join(stream.paint(name, fg="cyan", bold=True) for name in names)
    if not param.is_flag:
        left += f" {metavar}"
    right = param.help or ""
    if not param.is_flag and param.default is not None:
        right += f" [{param.default}]"
    return left, right


def _write_sections(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the options by panel, in the order of declaration; `--help` and similar options come last."""
    stream = stream_of(sys.stdout)
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if param.hidden:
            continue
        if isinstance(param, TyperOption):
            row = _record(param, param.metavar or param.display_type(ctx), stream)
        else:
            row = (stream.paint(param.metavar or param.name, fg="cyan", bold=True), param.help or "")
        rest = REST if isinstance(param, TyperOption) else "Arguments"
        sections.setdefault(param.rich_help_panel or rest, []).append(row)
    for title in sorted(sections, key=lambda title: title == REST):
        with formatter.section(stream.paint(title, bold=True)):
            formatter.write_dl(sections[title], col_max=34)


def write_commands(rows: Sequence[tuple[str, str]], formatter: Any) -> None:
    """Write the section of the commands and their summaries."""
    stream = stream_of(sys.stdout)
    with formatter.section(stream.paint("Commands", bold=True)):
        formatter.write_dl([(stream.paint(name, fg="cyan", bold=True), summary) for name, summary in rows])


class CommandWithHelp(TyperCommand):
    """A command with help in sections that refuses words with two meanings, and that a signal ends in order."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_misread(args, _declared(self.params))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        require_home()
        with ending_in_order():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands with the same help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=1000)))
        write_commands(rows, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_sections(self, ctx, formatter)


def adopt(app: typer.Typer) -> None:
    """Give the commands of `app` the classes of this module."""
    app.rich_markup_mode = None
    app.info.cls = Group
    for info in app.registered_commands:
        info.cls = CommandWithHelp
    for group in app.registered_groups:
        if group.typer_instance is not None:
            adopt(group.typer_instance)
