"""Prompt templates: files for `run --template`, and `specllama templates`, which lists, shows and edits them."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_config_path

from specllama.base.disk import meant
from specllama.base.errors import ConfigError, UsageError
from specllama.base.jsonable import shown
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color
from specllama.cli.screen.editor import edited, editor
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.tables import draw_table
from specllama.files import models_toml

INPUT = "input"  # the variable for stdin, --file and PROMPT
_NAME = re.compile(r"\w[\w.-]*")  # of a file in our folder
_SHOWN = 100  # characters of a template in the list
_KEYS = ("prompt", "system", "defaults")
_NEW = '''# `specllama run --template {name} --param tone=dry "..."`
# $input is the prompt, --file or stdin; without it, that follows the template. $$ is a dollar sign.

# system = "You are an editor."

prompt = """
Rewrite in a $tone tone:

$input
"""

[defaults]
tone = "friendly"
'''


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt and a system prompt with variables such as $name."""

    name: str
    path: Path
    prompt: str  # may be empty: the input alone
    system: str | None
    defaults: Mapping[str, str]

    @property
    def variables(self) -> list[str]:
        """Their names, in the order of the text. Raises ConfigError for a $ without one."""
        found: dict[str, None] = {}
        for match in string.Template.pattern.finditer(f"{self.system or ''}\n{self.prompt}"):
            if match["invalid"] is not None:
                raise ConfigError(f"template {self.name} has a $ without a name", hint="write $$ for a dollar sign")
            if name := match["named"] or match["braced"]:
                found[name] = None
        return list(found)

    def filled(self, text: str, values: Mapping[str, str], *, joint: str = "\n\n") -> tuple[str, str | None]:
        """Prompt and system prompt with these values; `text` is the input, which follows `joint` if $input is missing.

        Raises UsageError for a variable without a value and for a value without a variable.
        """
        names = self.variables
        given = {**self.defaults, **values}
        if text or INPUT not in given:
            given[INPUT] = text
        if missing := next((name for name in names if name not in given), None):
            raise UsageError(f"template {self.name} needs {missing}", hint=f"--param {missing}=VALUE")
        if unused := next((name for name in values if name not in names), None):
            there = f"it has {', '.join(names)}" if names else "it has no variables"
            raise UsageError(f"template {self.name} has no variable {unused}", hint=there)
        if not given[INPUT].strip() and (INPUT in names or not self.prompt):
            raise UsageError(
                f"template {self.name} needs a prompt", hint=f'specllama run --template {self.name} "PROMPT"'
            )
        prompt, system = (string.Template(each or "").substitute(given) for each in (self.prompt, self.system))
        if INPUT not in names:
            prompt = joint.join(filter(None, (prompt, given[INPUT])))
        return prompt, system or None


def folder() -> Path:
    """The place of the user's templates, each NAME.toml."""
    return user_config_path("specllama") / "templates"


def template_names() -> list[str]:
    """The templates in `folder`."""
    return sorted(path.stem for path in folder().glob("*.toml") if _NAME.fullmatch(path.stem))


def find(name: str) -> PromptTemplate:
    """The template of this name, or of this file. Raises UsageError, ConfigError."""
    for path in [_path(name)] * bool(_NAME.fullmatch(name)) + [meant(name)]:
        if os.path.isfile(path):  # also False for a name that is too long
            return _read(name, path)
    near = get_close_matches(name, template_names(), 1)
    make = f"to make it: specllama templates {name} --edit" if _NAME.fullmatch(name) else "check the path"
    hint = f"did you mean {near[0]}?" if near else make
    raise UsageError(f"there is no template {name}", hint=hint)


def _path(name: str) -> Path:
    return folder() / f"{name}.toml"


def _read(name: str, path: Path) -> PromptTemplate:
    data = models_toml.load(path)
    if unknown := next((key for key in data if key not in _KEYS), None):
        raise ConfigError(f"{path} has the key {unknown}, expected {', '.join(_KEYS)}")
    defaults = data.get("defaults", {})
    texts = [("prompt", data.get("prompt", "")), ("system", data.get("system", ""))]
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path}: defaults is {shown(defaults)}, expected a table")
    for key, value in [*texts, *((f"defaults.{key}", _text(value)) for key, value in defaults.items())]:
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {key} is {shown(value)}, expected a text")
    if not any(text.strip() for _, text in texts):
        raise ConfigError(f"{path} has neither prompt nor system")
    system = data.get("system")
    template = PromptTemplate(
        name,
        path,
        data.get("prompt", "").strip("\n"),
        system and system.strip("\n"),
        {key: _text(value) for key, value in defaults.items()},
    )
    if unused := next((key for key in defaults if key not in {*template.variables, INPUT}), None):
        raise ConfigError(f"{path}: defaults.{unused} is no variable of the template")
    return template


def _text(value: Any) -> Any:
    """A number as text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def values_of(params: Iterable[str]) -> dict[str, str]:
    """The values of `--param KEY=VALUE`. Raises UsageError."""
    values: dict[str, str] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name:
            raise UsageError(f"--param is {param}, expected KEY=VALUE")
        if name == INPUT:
            raise UsageError(f"{INPUT} is the prompt itself", hint='specllama run --template NAME "PROMPT"')
        values[name] = value
    return values


@with_options
def templates(
    name: Annotated[str | None, typer.Argument(metavar="TEMPLATE", help="A template by name.")] = None,
    edit: Annotated[bool, Option("--edit", "Make or change it in $VISUAL or $EDITOR.")] = False,
    color: Color = "auto",
) -> None:
    """List, show and edit prompt templates for `run --template`.

    A template is a TOML file with a prompt, a system prompt, or both. Variables such as $name take their values from
    --param name=VALUE or from its table of defaults; $input is the prompt.
    """
    output = open_output(color=color)
    if edit:
        if name is None:
            raise UsageError("--edit takes a name", hint="specllama templates NAME --edit")
        _edit(name, output)
    elif name is None:
        _list(output)
    else:
        output.text(models_toml.text_of(find(name).path).rstrip("\n"))


def _list(output: Output) -> None:
    names, rows = template_names(), list[tuple[str, str, str]]()
    for name in names:
        try:
            template = find(name)
        except (ConfigError, UsageError) as error:
            output.warn(str(error), error.hint)
            continue
        variables = " ".join(f"${each}" for each in template.variables)
        begin = " ".join((template.prompt or template.system or "").split())
        rows.append((name, variables, begin if len(begin) <= _SHOWN else begin[: _SHOWN - 3] + "..."))
    if rows and output.out.steerable:
        draw_table(output, ("name", "variables", "text"), rows, prose="text")
    else:
        for row in rows:
            output.row(*row)
    output.note(f"{'from' if names else 'no templates in'} {folder()}")
    if not names:
        output.note("hint: specllama templates NAME --edit")


def _edit(name: str, output: Output) -> None:
    """Edit a template, or a new one; it is written as it is, and then checked."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name} is no name, expected letters, digits, dots, dashes and underscores")
    path = _path(name)
    before = models_toml.text_of(path) if path.exists() else _NEW.format(name=name)
    if not editor():
        raise UsageError("there is no editor", hint=f"set VISUAL or EDITOR, or write {path}")
    with edited(before, f"{name}.toml") as after:
        if after == before:
            output.note("nothing was changed")
            return
        models_toml.write(path, after)
    _read(name, path)
    output.note(f"saved {path}")
