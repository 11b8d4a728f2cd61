"""Options as values, option groups, and the commands that take them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specllama.base.errors import UsageError
from specllama.base.ranges import Check, several
from specllama.cli.args.completing import completer
from specllama.cli.command import LONG_SHORT, SILENT

# Options that exclude each other, and why.
EXCLUSIVE = (
    (("named", "pair", "model", "hf_repo"), "each names a target"),
    (("named", "pair", "model_draft", "hf_repo_draft"), "each names a draft"),
    (("tree", "spec_type"), "--tree is --spec-type tree"),
    (("tree", "spec_draft_n_max"), "each is the size of a draft"),
    (("tree", "spec_draft_p_min"), "a tree has no p-min"),
    (("json", "jsonl"), "stdout holds one object, or one event a line"),
    (("scan", "hub"), "each names a place to search"),
    (("load", "resume"), "each names a conversation"),
    (("system_prompt", "system_prompt_file"), "each gives the system prompt"),
    (("template", "system_prompt"), "a template has its own system prompt"),
    (("template", "system_prompt_file"), "a template has its own system prompt"),
    (("json_schema", "grammar", "regex", "extract"), "each says what the answer is"),
    (("raw", "system_prompt"), "a system prompt needs the chat template"),
    (("raw", "system_prompt_file"), "a system prompt needs the chat template"),
    (("raw", "chat_template"), "--raw uses no chat template"),
    (("extract", "json"), "stdout holds the code, or JSON"),
    (("extract", "jsonl"), "stdout holds the code, or JSON"),
    (("dry_run", "extract"), "--dry-run gives no answer"),
    (("dry_run", "jsonl"), "--dry-run gives no answer"),
)


_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")  # of a value, the nearest first; the last is `config.toml`

_MAY_BE_EMPTY = ("PROMPT", "VALUE", "--system-prompt", "--summary")


def _empty(name: str) -> UsageError:
    """The error for an empty value, which would silently mean the default."""
    default = "leave it out for the default, or " if name.startswith("--") else ""
    return UsageError(f"{name} is empty", hint=f"{default}check for an unset shell variable")


def _checked(check: Check, name: str, text: object) -> Any:
    if text == "" and name not in _MAY_BE_EMPTY:
        raise _empty(name)
    return check(name, text)


@dataclass(frozen=True, slots=True)
class Option:
    """One option, for the annotation of every parameter or field that takes it.

    `names` are separated by spaces, with the metavar last: "-n --predict N". `also` has names of other tools, which
    work but are not shown. The environment variable is SPECLLAMA_<FIRST LONG NAME>.
    """

    names: str
    help: str
    check: Check | None = None
    also: str = ""

    def __post_init__(self) -> None:
        words = f"{self.names} {self.also}".split()
        LONG_SHORT.update(word for word in words if word[0] == "-" and word[1] != "-" and len(word) > 2)

    @property
    def long_name(self) -> str:
        """The first name with two dashes."""
        return next(name for name in self.names.split() if name.startswith("--")).partition("/")[0]

    def many(self, help: str, check: Check | None = None) -> Option:
        """The same option with several values separated by commas; its value is a tuple."""
        check = check or self.check
        assert check is not None
        return replace(self, names=self.names + ",...", help=help, check=several(check))

    def typed(self, panel: str | None) -> Any:
        """The option for typer; `panel` is its section in the help text."""
        shown = [word for word in self.names.split() if word.startswith("-")]
        metavar = " ".join(word for word in self.names.split() if not word.startswith("-"))
        long_name = self.long_name
        silent = self.also.split()
        SILENT.update((long_name, name) for name in silent)
        return typer.Option(
            *shown,
            *silent,
            help=self.help,
            metavar=metavar or None,
            parser=partial(_checked, self.check, long_name) if self.check else None,
            autocompletion=completer("" if metavar == "TEXT" else long_name, self.check),
            envvar="SPECLLAMA_" + long_name[2:].upper().replace("-", "_"),
            rich_help_panel=panel,
        )


def _parameter(name: str, annotation: Any, default: Any, panel: str | None) -> inspect.Parameter:
    kind, about = get_args(annotation)[:2]
    if isinstance(about, Option):
        about = about.typed(panel)
    else:
        about.rich_help_panel = panel or about.rich_help_panel
        about.autocompletion = about.autocompletion or completer(about.metavar)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _spoken(ctx: typer.Context, name: str) -> str:
    """The name of a parameter on the command line: `pair` is PAIR in some commands, --pair in others."""
    param = next(each for each in ctx.command.params if each.name == name)
    long_name = next((each for each in param.opts if each.startswith("--")), "")
    return long_name or getattr(param, "metavar", None) or name.upper()


def _settle(ctx: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """`values` without those that a nearer source excludes. Raises UsageError if two options of one source conflict.

    A typed option wins over the environment, and that over `config.toml`: otherwise a variable set once would make
    every use of the option fail.
    """
    settled, defaults = dict(values), {param.name: param.default for param in ctx.command.params}
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in values}
    for names, reason in EXCLUSIVE:
        given = [name for name in names if settled.get(name) not in (None, False, names[0])]  # such as spec_type=tree
        given = [name for name in given if sources[name] in _SOURCES and settled[name] != defaults[name]]
        nearest = next((source for source in _SOURCES if source in [sources[name] for name in given]), "")
        chosen = [name for name in given if sources[name] == nearest]
        settled.update({name: defaults[name] for name in given if name not in chosen})
        if len(chosen) > 1:
            first, second = (_spoken(ctx, name) for name in chosen[:2])
            raise UsageError(f"{first} and {second} exclude each other: {reason}", hint="leave one of them out")
    return settled


def _refuse_empty(ctx: typer.Context, values: dict[str, Any]) -> None:
    """Raises UsageError for an empty value, alone or among several."""
    for name, value in values.items():
        is_empty = value == "" or (isinstance(value, (list, tuple)) and "" in value)
        if is_empty and (spoken := _spoken(ctx, name)) not in _MAY_BE_EMPTY:
            raise _empty(spoken)


def typed(ctx: typer.Context) -> frozenset[str]:
    """The parameters that the command line gives, not the environment or `config.toml`."""
    sources = {str(param.name): ctx.get_parameter_source(str(param.name)) for param in ctx.command.params}
    return frozenset(name for name, source in sources.items() if getattr(source, "name", "") == _SOURCES[0])


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` for typer. Its parameters are option groups (dataclasses) or annotated with one option each, or `ctx`.

    Typer reads options from a function's signature; this spreads the groups out into one.
    """
    hints = get_type_hints(command, include_extras=True)
    declared = dict(inspect.signature(command).parameters)
    takes_ctx = declared.pop("ctx", None) is not None
    groups: dict[str, Any] = {name: hints[name] for name in declared if dataclasses.is_dataclass(hints[name])}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in declared.items():
        if (group := groups.get(name)) is None:
            parameters.append(_parameter(name, hints[name], parameter.default, None))
            continue
        of_fields = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(_parameter(field.name, of_fields[field.name], default, group.title))

    def flat(ctx: typer.Context, **values: Any) -> None:
        _refuse_empty(ctx, values)
        settled = _settle(ctx, values)
        packed = {
            name: group(**{field.name: settled[field.name] for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        if takes_ctx:
            packed["ctx"] = ctx
        command(**packed, **{name: settled[name] for name in declared if name not in groups})

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    return flat
