"""Options in groups: how a group's fields become a command's options, and which options exclude each other."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import typer

from specllama.base.errors import UsageError
from specllama.cli.args.values import Check
from specllama.cli.command import SILENT

# Options of which only one may be given, and why.
EXCLUSIVE = (
    (("pair", "model", "hf_repo"), "each names a target"),
    (("pair", "model_draft", "hf_repo_draft"), "each names a draft"),
    (("json", "jsonl"), "stdout holds one object, or one event a line"),
    (("scan", "hub"), "each says where to look"),
    (("raw", "system_prompt"), "without a template there is no place for a system prompt"),
)


def option(names: str, help: str, *, metavar: str | None = None, check: Check | None = None, also: str = "") -> Any:
    """A typer option that also reads SPECLLAMA_<FIRST LONG NAME>.

    `names` and `also` are separated by spaces; those in `also` work but are not shown.
    """
    shown, silent = names.split(), also.split()
    long_name = next(name for name in shown if name.startswith("--")).partition("/")[0]
    SILENT.update((long_name, name) for name in silent)

    def parse(text: object) -> Any:
        assert check is not None
        return check(long_name, text)

    return typer.Option(
        *shown,
        *silent,
        help=help,
        metavar=metavar,
        parser=parse if check else None,
        envvar="SPECLLAMA_" + long_name[2:].upper().replace("-", "_"),
    )


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    """The fields of an option group as keyword parameters; the group's `title` heads them in the help text."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        annotation = hints[field.name]
        annotation.__metadata__[0].rich_help_panel = group.title  # type: ignore[attr-defined]
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
        )


def _spoken(ctx: typer.Context, name: str) -> str:
    """What a parameter is called on the command line: PAIR is an argument of some commands, an option of others."""
    param = next(each for each in ctx.command.params if each.name == name)
    long_name = next((each for each in param.opts if each.startswith("--")), "")
    return long_name or getattr(param, "metavar", None) or name.upper()


def _settle(ctx: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """`values` without what a flag overrules; raises UsageError where two options exclude each other.

    A flag beats the environment: a variable set once must not make every use of another flag fail.
    """
    settled = dict(values)
    for names, reason in EXCLUSIVE:
        given = [name for name in names if settled.get(name) not in (None, False)]
        typed = [name for name in given if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
        if typed:
            settled.update({name: None if settled[name] is not True else False for name in given if name not in typed})
        excluded = typed or given
        if len(excluded) > 1:
            first, second = (_spoken(ctx, name) for name in excluded[:2])
            raise UsageError(f"{first} and {second} exclude each other: {reason}", hint="leave one of them out")
    return settled


# What may be empty: a prompt, which is answered in its own words, and what a model is told before it.
_MAY_BE_EMPTY = ("prompt", "system_prompt")


def _refuse_empty(ctx: typer.Context, values: dict[str, Any]) -> None:
    """Raises UsageError for an empty value, which would silently mean the default."""
    for param in ctx.command.params:
        if param.name in _MAY_BE_EMPTY or values.get(param.name or "") != "":
            continue
        raise UsageError(
            f"{_spoken(ctx, param.name or '')} is empty",
            hint="an unset shell variable? leave it out to get the default",
        )


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose parameters are option groups, as a function of the groups' fields.

    Typer reads options from a function's signature. Written out, every command would list fifty parameters and pack
    them into the same groups; this does it once.
    """
    groups: dict[str, type] = {name: hint for name, hint in get_type_hints(command).items() if name != "return"}

    def flat(ctx: typer.Context, **values: Any) -> None:
        _refuse_empty(ctx, values)
        settled = _settle(ctx, values)
        packed = {
            name: group(**{field.name: settled[field.name] for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**packed)

    ctx = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    fields = [parameter for group in groups.values() for parameter in _parameters(group)]
    flat.__signature__ = inspect.Signature([ctx, *fields])  # type: ignore[attr-defined]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    return flat
