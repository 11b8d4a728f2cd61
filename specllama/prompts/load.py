"""Prompts to measure with: our own for twelve classes, or those of a file; our JSON Lines and Spec-Bench's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specllama.base.disk import read_bytes
from specllama.base.errors import PromptError, UsageError
from specllama.base.jsonable import parsed

# The classes differ in how predictable their answers are, and so in how much of a draft is accepted. The prompts were
# written for this program and are under its licence: prompts/<class>.jsonl, in English, Japanese and Chinese by turns,
# so that the first three of a class and either half of it hold every language.
CATEGORIES = (
    "coding",
    "math",
    "qa",
    "summarization",
    "rag",
    "translation",
    "reasoning",
    "writing",
    "roleplay",
    "extraction",
    "dialogue",
    "poem",
)
RESERVED = "all"  # reports call all classes together so
UNSORTED = "other"  # the class of a prompt whose file names none
UNKNOWN_LANGUAGE = "und"  # as BCP 47 has it
_MOST_CHARS = 80  # of an id, class or language: they head the rows of tables

_HINT = 'each line is {"id": ..., "category": ..., "language": ..., "turns": [...]}, {"prompt": ...}, or Spec-Bench\'s'


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What one user asks, turn by turn; the answers between them are the model's own."""

    id: str  # unique in its file
    category: str
    language: str  # BCP 47: "en", "ja", "zh"; "und" where the file does not say
    turns: tuple[str, ...]  # at least one, none of them empty


def built_in(categories: Sequence[str] | None = None) -> tuple[BenchPrompt, ...]:
    """Our own prompts of these classes, in the order of CATEGORIES whatever order they are asked for in.

    Raises UsageError for a class that there is none of.
    """
    for name in categories or ():
        if name not in CATEGORIES:
            raise UsageError(
                f"there is no class of prompts called {name!r}", hint=f"there are: {', '.join(CATEGORIES)}"
            )
    wanted = [name for name in CATEGORIES if categories is None or name in categories]
    folder = resources.files("specllama") / "prompts"
    return tuple(
        prompt
        for name in wanted
        for prompt in _prompts((folder / f"{name}.jsonl").read_text(encoding="utf-8"), f"{name}.jsonl")
    )


def read(path: Path) -> tuple[BenchPrompt, ...]:
    """The prompts of a file, in its order. Empty lines and keys that mean nothing here are passed over.

    Raises PromptError that names the line of what is wrong.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")  # some editors put a byte order mark before the first line
    except UnicodeDecodeError as error:
        n_line = data[: error.start].count(b"\n") + 1
        raise PromptError(f"{path}, line {n_line}: byte {error.start} is not UTF-8 text") from None
    prompts = _prompts(text, str(path))
    if not prompts:
        raise PromptError(f"{path} holds no prompt", hint=_HINT)
    return prompts


def _prompts(text: str, name: str) -> tuple[BenchPrompt, ...]:
    return tuple(_parsed(text, name))


def _parsed(text: str, name: str) -> Iterator[BenchPrompt]:
    line_of: dict[str, int] = {}
    for n_line, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(line, n_line)
            if prompt.id in line_of:
                raise _BadLine(f"the id {_short(prompt.id)} was given in line {line_of[prompt.id]} already")
        except _BadLine as error:
            raise PromptError(f"{name}, line {n_line}: {error}", hint=_HINT) from None
        line_of[prompt.id] = n_line
        yield prompt


class _BadLine(Exception):
    """Something in a line is not what it should be; the message says what."""


def _prompt(line: str, n_line: int) -> BenchPrompt:
    try:
        data = parsed(line)
    except json.JSONDecodeError as error:
        raise _BadLine(f"no JSON: {error.msg} at column {error.colno}") from None
    except ValueError:  # nested beyond reason; a number of more digits than Python reads
        raise _BadLine("no JSON that can be read") from None
    if not isinstance(data, dict):
        raise _BadLine(f"found {_short(data)}, expected an object")
    return BenchPrompt(_id(data, n_line), _category(data), _word(data, "language", UNKNOWN_LANGUAGE), _turns(data))


def _id(data: dict[str, Any], n_line: int) -> str:
    """The name of a prompt; Spec-Bench numbers its own; without either it is that of the line."""
    if "id" in data or "question_id" not in data:
        return _word(data, "id", f"line-{n_line}")
    number = data["question_id"]
    if isinstance(number, bool) or not isinstance(number, (int, str)):
        raise _BadLine(f"question_id is {_short(number)}, expected a number")
    return _word({"question_id": str(number)}, "question_id", "")


def _category(data: dict[str, Any]) -> str:
    name = _word(data, "category", UNSORTED)
    if name == RESERVED:
        raise _BadLine(f"category is {_short(name)}, which stands for all classes together")
    return name


def _word(data: dict[str, Any], key: str, default: str) -> str:
    """A name that can head a row of a table."""
    value = data.get(key, default)
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _MOST_CHARS:
        raise _BadLine(f"{key} is {_short(value)}, expected one short line of text")
    return value.strip()


def _turns(data: dict[str, Any]) -> tuple[str, ...]:
    if "prompt" in data:
        if "turns" in data:
            raise _BadLine("it has both prompt and turns, expected one of them")
        return (_text(data["prompt"], "prompt"),)
    turns = data.get("turns")
    if not isinstance(turns, list) or not turns:
        raise _BadLine(f"turns is {_short(turns)}, expected a list of texts")
    return tuple(_text(turn, f"turns[{i}]") for i, turn in enumerate(turns))


def _text(value: object, where: str) -> str:
    """What a person may ask: some text, and such as can be written as UTF-8 (JSON can spell halves of characters)."""
    if not isinstance(value, str) or not value.strip():
        raise _BadLine(f"{where} is {_short(value)}, expected text")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise _BadLine(f"{where} holds half of a surrogate pair, which is no text")
    return value


def _short(value: object) -> str:
    """A value as it may stand in a message."""
    if isinstance(value, (list, dict)):
        kind = "list" if isinstance(value, list) else "object"
        return f"an empty {kind}" if not value else f"a{'n' * (kind == 'object')} {kind}"
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
