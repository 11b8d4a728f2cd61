"""The class of every command: pages of help, hidden aliases, and a check for ambiguous words."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from specllama.base.disk import require_home
from specllama.base.errors import UsageError
from specllama.cli.pages import PAGES, Page
from specllama.cli.screen.ending import ending_in_order
from specllama.cli.screen.output import Stream, stream_of

HELP_WIDTH = 100  # longest line of help
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
CONTEXT = {"help_option_names": [*HELP], "max_content_width": HELP_WIDTH}

REST = "Options"  # the section of options without a panel
_ASKED = "specllama.help"  # in a context: the title of the one section to show, or HELP_ALL

# Hidden names, those of other tools, as (long name of the option, hidden name): a hidden -r of one command is shown in
# another. `Option.typed` in grouping.py fills it.
SILENT: set[tuple[str, str]] = set()

_NEGATIVE = re.compile(r"-\.?\d[\d.]*")

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
    left = ", ".join(stream.paint(name, bold=True) for name in names)
    if not param.is_flag:
        left += f" {metavar}"
    right = param.help or ""
    if not param.is_flag and param.default is not None:
        right += f" [{param.default}]"
    return left, right


def page_of(ctx: Any) -> Page:
    """The first page of the help of a command."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return PAGES.get(" ".join(names), Page(()))


def _rows(command: Any, ctx: Any) -> Iterator[tuple[frozenset[str], str, tuple[str, str]]]:
    """Names, section and columns of every shown option and argument, in the order of declaration."""
    stream = stream_of(sys.stdout)
    for param in command.get_params(ctx):
        if param.hidden:
            continue
        if isinstance(param, TyperOption):
            row = _record(param, param.metavar or param.display_type(ctx), stream)
            names, rest = frozenset((*param.opts, *param.secondary_opts)), REST
        else:
            name = param.metavar or param.name
            row = (stream.paint(name, bold=True), param.help or "")
            names, rest = frozenset([name]), "Arguments"
        yield names, param.rich_help_panel or rest, row


def _topics(command: Any, ctx: Any) -> dict[str, str]:
    """The sections of a command, by the first words of their titles."""
    return {title.split()[0].lower(): title for _, title, _ in _rows(command, ctx) if title != REST}


def _takes_value(arg: str, options: Mapping[str, TyperOption]) -> bool:
    return arg in options and not options[arg].is_flag


def _numbers_last(args: list[str], options: Mapping[str, TyperOption]) -> list[str]:
    """`args` with negative numbers that are arguments behind a `--`: the parser takes -1 for an option."""
    words, numbers = list[str](), list[str]()
    for before, arg in zip(["", *args], args, strict=False):
        is_number = _NEGATIVE.fullmatch(arg) and not _takes_value(before, options)
        (numbers if is_number else words).append(arg)
    return [*words, "--", *numbers] if numbers and "--" not in args else args


def _asked_page(args: Sequence[str], options: Mapping[str, TyperOption], topics: Mapping[str, str]) -> str | None:
    """The page that the words ask for: HELP_ALL, the title of a section, "" for the first page; None for no help."""
    before = ""
    for i, arg in enumerate(args):
        if arg == "--":
            break
        if arg in (*HELP, HELP_ALL) and not _takes_value(before, options):
            return HELP_ALL if arg == HELP_ALL else topics.get("".join(args[i + 1 : i + 2]).lower(), "")
        before = arg
    return None


def _write_sections(command: Any, ctx: Any, formatter: Any, page: Page) -> None:
    """Write the options by section, or the common ones together; `--help` and similar options come last."""
    stream, asked = stream_of(sys.stdout), ctx.meta.get(_ASKED)
    sections: dict[str, list[tuple[str, str]]] = {}
    for names, title, row in _rows(command, ctx):
        if not asked and page.common is not None:
            title = REST if names & set(page.common) else ""
        if asked in ("", None, HELP_ALL, title) and title:
            sections.setdefault(title, []).append(row)
    for title in sorted(sections, key=lambda title: title == REST):
        with formatter.section(stream.paint(title, bold=True)):
            formatter.write_dl(sections[title], col_max=34)


def _write_paragraph(text: str, formatter: Any) -> None:
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text)


class _Paged:
    """The help of a command or group: examples first, then what most people need; the rest on other pages."""

    def get_params(self: Any, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        more = copy(self.get_help_option(ctx))
        more.hidden = page_of(ctx).common is None
        more.name, more.opts, more.help = "help_all", [HELP_ALL], "Show all options and exit."
        return [*params, more]

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        page, asked = page_of(ctx), ctx.meta.get(_ASKED)
        self.format_usage(ctx, formatter)
        if not asked or asked == HELP_ALL:
            text = inspect.cleandoc(self.help or "")
            _write_paragraph(text if asked else text.partition("\n\n")[0], formatter)
            with formatter.section(stream_of(sys.stdout).paint("Examples", bold=True)):
                for example in page.examples:
                    formatter.write(f"  {example}\n")
        self.format_options(ctx, formatter)
        if not asked and page.common and (topics := list(_topics(self, ctx))):
            _write_paragraph(
                f"All options: {HELP_ALL}. By topic, such as --help {topics[0]}: {', '.join(topics)}.", formatter
            )
        if asked == HELP_ALL:
            self.format_epilog(ctx, formatter)

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        _write_sections(self, ctx, formatter, page_of(ctx))


def write_commands(rows: Sequence[tuple[str, str]], formatter: Any) -> None:
    """Write the section of the commands and their summaries."""
    stream = stream_of(sys.stdout)
    with formatter.section(stream.paint("Commands", bold=True)):
        formatter.write_dl([(stream.paint(name, bold=True), summary) for name, summary in rows])


class CommandWithHelp(_Paged, TyperCommand):
    """A command that refuses words with two meanings, and that a signal ends in order."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for completion
            return super().parse_args(ctx, args)
        options = _declared(self.params)
        refuse_misread(args, options)
        ctx.meta[_ASKED] = _asked_page(args, options, _topics(self, ctx))
        if ctx.meta[_ASKED] is not None:
            return super().parse_args(ctx, ["--help"])
        if callable(ctx.default_map):
            ctx.default_map = ctx.default_map()
        return super().parse_args(ctx, _numbers_last(args, options))

    def invoke(self, ctx: Any) -> Any:
        gc.enable()  # see __main__.py
        require_home()
        with ending_in_order():
            return super().invoke(ctx)


class Group(_Paged, TyperGroup):
    """A group of commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_all = args[:1] == [HELP_ALL]
        ctx.meta[_ASKED] = HELP_ALL if is_all else None
        return super().parse_args(ctx, ["--help"] if is_all else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=1000)))
        write_commands(rows, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def adopt(app: typer.Typer) -> None:
    """Give the commands of `app` the classes of this module and its settings.

    The first context of a command names its --help for good, so each has the names of its own.
    """
    app.rich_markup_mode = None
    app.info.cls = Group
    app.info.context_settings = {**CONTEXT, **(app.info.context_settings or {})}
    for info in app.registered_commands:
        info.cls = CommandWithHelp
        info.context_settings = {**CONTEXT, **(info.context_settings or {})}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            adopt(group.typer_instance)
