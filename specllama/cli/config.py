"""`specllama config`, and the user's `config.toml`: defaults of `run`, `chat` and `batch`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from platformdirs import user_config_path

from specllama.base.errors import ConfigError, UsageError
from specllama.base.ranges import Check, sound
from specllama.chat.settings import on_off
from specllama.cli.args.completing import Offer, completer
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import (
    COLOR,
    PAIR,
    SYSTEM_PROMPT,
    Color,
    DraftOptions,
    HardwareOptions,
    SamplingOptions,
)
from specllama.cli.screen.look import LOOKS, AnswerLook
from specllama.cli.screen.output import open_output
from specllama.files import models_toml


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of `config.toml`; `parameter` of the commands is empty for a look, which has no option."""

    check: Check
    help: str
    parameter: str = ""


def _of_options() -> Iterator[tuple[str, ConfigKey]]:
    """The options that say how to answer, except repeatable ones."""
    found: list[tuple[str, Option]] = [("pair", PAIR), ("system_prompt", SYSTEM_PROMPT), ("color", COLOR)]
    for group in (DraftOptions, SamplingOptions, HardwareOptions):
        hints = get_type_hints(group, include_extras=True)
        kinds = ((field.name, *get_args(hints[field.name])[:2]) for field in fields(group))
        found += [(name, option) for name, kind, option in kinds if list[str] not in get_args(kind)]
    for name, option in found:
        yield option.long_name[2:], ConfigKey(option.check or sound, option.help, name)


KEYS: dict[str, ConfigKey] = {
    **{name: ConfigKey(look.check, look.help) for name, look in LOOKS.items()},
    **dict(_of_options()),
    "history": ConfigKey(on_off, "keep the messages and conversations of chats", "history"),
}


def config_path() -> Path:
    """The user's own file."""
    return user_config_path("specllama") / "config.toml"


def _known(name: str) -> str:
    """`name`, if it is a key. Raises UsageError with a similar one."""
    if name not in KEYS:
        near = get_close_matches(name, KEYS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(KEYS))}"
        raise UsageError(f"unknown setting {name}", hint=hint)
    return name


def load() -> dict[str, Any]:
    """The checked values of `config.toml`. Raises ConfigError."""
    path = config_path()
    if not path.exists():
        return {}
    values = models_toml.load(path)
    for name, value in values.items():
        try:
            if not isinstance(value, (str, int, float)):
                raise UsageError(f"{name} is a {type(value).__name__}, expected one value")
            check = KEYS[_known(name)].check
            # A bool of TOML is a value of switches alone; Python would write it as True.
            check(name, str(value).lower() if isinstance(value, bool) and check is not on_off else value)
        except UsageError as error:
            raise ConfigError(f"{path}: {error}", hint=error.hint or f"specllama config --unset {name}") from None
    return values


def defaults() -> dict[str, Any]:
    """The values of `config.toml` by parameter of the commands. Raises ConfigError."""
    found = {KEYS[name].parameter: value for name, value in load().items() if KEYS[name].parameter}
    return found if "history" not in found else {**found, "history": on_off("history", found["history"])}


def look() -> AnswerLook:
    """The look that `config.toml` asks for."""
    return AnswerLook.of(load())


def put(name: str, text: str | None) -> None:
    """Set a value, or remove it if `text` is None. Raises UsageError, ConfigError, DiskFull.

    The other values of the file are not checked.
    """
    path = config_path()
    before = models_toml.text_of(path) if path.exists() else ""
    if text is None:
        if name not in models_toml.parse(before, path):
            _known(name)
            return
        value = None
    else:
        value = KEYS[_known(name)].check(name, text)
        if not isinstance(value, (int, float)):  # such as a draft length: the text gives it again
            value = text
    models_toml.write(path, models_toml.edited(before, path, {(name,): value}))


def _offered(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The values of the setting that is typed before."""
    name = str(ctx.params.get("name"))
    complete = completer(f"--{name}", KEYS[name].check) if name in KEYS else None
    return complete(incomplete) if complete else []


@with_options
def config(
    name: Annotated[
        str | None, typer.Argument(metavar="SETTING", help="A long option of run, chat and batch, or a look.")
    ] = None,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="The new value.", autocompletion=_offered)
    ] = None,
    unset: Annotated[bool, Option("--unset", "Remove the value: the default holds again.")] = False,
    color: Color = "auto",
) -> None:
    """Show and change settings that stay: defaults of run, chat and batch, in config.toml.

    Options by their long names (temp, ctx-size, pair), and the look of answers (colors, strip, fold).
    """
    output = open_output(color=color)
    if unset and (name is None or value is not None):
        raise UsageError("--unset takes a setting alone", hint="specllama config --unset SETTING")
    if value == "" and name != "system-prompt":
        raise UsageError(f"{name} is empty", hint=f"to remove it: specllama config --unset {name}")
    if name is None:
        values = load()
        for key in sorted(values):
            output.line(f"{key:<18} {_text(values[key])}")
        output.note(f"{'from' if values else 'no settings in'} {config_path()}")
        if not values:
            output.note("hint: specllama config colors full")
    elif value is not None or unset:
        put(name, value)
    else:
        values = load()
        if _known(name) in values:
            output.line(_text(values[name]))
        else:
            output.note(f"{name} is not set: {KEYS[name].help}")


def _text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
