"""Benchmark prompts: the built-in ones of twelve classes, or a file of JSON Lines (ours or Spec-Bench's)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specllama.base.disk import read_bytes
from specllama.base.errors import PromptError, UsageError, unreadable
from specllama.base.jsonable import not_json, parsed, shown
from specllama.base.ranges import sound
from specllama.base.text import decoded

# The classes differ in how predictable their answers are, and so in their acceptance rate. The prompts were written for
# this program and have its licence. Each prompts/<class>.jsonl alternates English, Japanese and Chinese, so that its
# first three prompts, and each half, have every language.
CATEGORIES = (
    "coding", "math", "qa", "summarization", "rag", "translation",
    "reasoning", "writing", "roleplay", "extraction", "dialogue", "poem",
)  # fmt: skip
RESERVED = "all"  # the row of all classes in reports
UNSORTED = "other"  # the default class
UNKNOWN_LANGUAGE = "und"  # the default language, as in BCP 47
_MOST_CHARS = 80  # of an id, class or language, which are headings in tables

_FOLDER = resources.files("specllama") / "prompts"
_HINT = 'each line is {"id": ..., "category": ..., "language": ..., "turns": [...]}, {"prompt": ...}, or Spec-Bench\'s'

# The prompts of `tune` and `check --probe`: the class in profiles -> the prompt's id. They are short because they are
# prefilled many times.
SAMPLES: Mapping[str, str] = {
    "code": "coding-en-1",
    "summary": "summarization-en-1",
    "story": "writing-en-1",
    "question": "qa-en-1",
}

# The prompts of the audit, by class and language, open questions first: more rejected tokens test more.
_AUDITED = (
    ("writing", "en"),
    ("qa", "ja"),
    ("coding", "en"),
    ("dialogue", "zh"),
    ("math", "en"),
    ("poem", "en"),
    ("reasoning", "zh"),
    ("qa", "en"),
    ("coding", "zh"),
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The turns of one user; the model answers each."""

    id: str  # unique in its file
    category: str
    language: str  # BCP 47: "en", "ja", "zh", "und"
    turns: tuple[str, ...]  # at least one, none empty


def built_in(categories: Sequence[str] | None = None) -> tuple[BenchPrompt, ...]:
    """The built-in prompts of these classes, in the order of CATEGORIES. Raises UsageError for an unknown class."""
    for name in categories or ():
        if name not in CATEGORIES:
            raise UsageError(f"the class is {name!r}, expected one of {', '.join(CATEGORIES)}")
    wanted = [name for name in CATEGORIES if categories is None or name in categories]
    return tuple(
        prompt
        for name in wanted
        for prompt in _prompts((_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8"), f"{name}.jsonl")
    )


def sample_prompts() -> Mapping[str, str]:
    """Class -> prompt, one of each of four classes."""
    first_turn = {prompt.id: prompt.turns[0] for prompt in built_in()}
    return {name: first_turn[id] for name, id in SAMPLES.items()}


def short_prompts(n_most: int) -> Mapping[str, str]:
    """Id -> prompt of at most `n_most` prompts: the shortest of each class and language."""
    prompts = built_in()
    found = {}
    for category, language in _AUDITED[:n_most]:
        fit = [each for each in prompts if (each.category, each.language) == (category, language)]
        shortest = min(fit, key=lambda each: len(each.turns[0]))
        found[shortest.id] = shortest.turns[0]
    return found


def sample_text() -> str:
    """Text of many kinds, for comparing tokenizers: code, prose, a chat, figures, lists, several languages."""
    return (_FOLDER / "sample.txt").read_text(encoding="utf-8")


def read(path: Path) -> tuple[BenchPrompt, ...]:
    """The prompts of a file. Empty lines and unknown keys are ignored. Raises PromptError with the line number."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise unreadable(path, error, PromptError) from None
    prompts = _prompts(decoded(data, str(path), PromptError), str(path))
    if not prompts:
        raise PromptError(f"{path} has no prompts", hint=_HINT)
    return prompts


def _prompts(text: str, name: str) -> tuple[BenchPrompt, ...]:
    prompts: list[BenchPrompt] = []
    line_of: dict[str, int] = {}
    for n_line, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(line, n_line)
            if prompt.id in line_of:
                raise _BadLine(f"the id {shown(prompt.id)} is already in line {line_of[prompt.id]}")
        except _BadLine as error:
            raise PromptError(f"{name}, line {n_line}: {error}", hint=_HINT) from None
        line_of[prompt.id] = n_line
        prompts.append(prompt)
    return tuple(prompts)


class _BadLine(Exception):
    """A line is invalid; the message says why."""


def _prompt(line: str, n_line: int) -> BenchPrompt:
    try:
        data = parsed(line)
    except json.JSONDecodeError as error:
        raise _BadLine(not_json(error)) from None
    except ValueError:  # nested too deeply; a number with more digits than Python reads
        raise _BadLine("not JSON that can be read") from None
    if not isinstance(data, dict):
        raise _BadLine(f"found {shown(data)}, expected an object")
    number = data.get("question_id", f"line-{n_line}")  # Spec-Bench's name of the id
    found = {"id": str(number) if type(number) is int else number, "category": UNSORTED, "language": UNKNOWN_LANGUAGE}
    name, category, language = (_word(key, data.get(key, other)) for key, other in found.items())
    if category == RESERVED:
        raise _BadLine(f"category is {RESERVED!r}, which is reserved")
    return BenchPrompt(name, category, language, _turns(data))


def _word(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _MOST_CHARS:
        raise _BadLine(f"{key} is {shown(value)}, expected one short line of text")
    return value.strip()


def _turns(data: dict[str, Any]) -> tuple[str, ...]:
    if "prompt" in data:
        if "turns" in data:
            raise _BadLine("both prompt and turns, expected one of them")
        return (_text(data["prompt"], "prompt"),)
    turns = data.get("turns")
    if not isinstance(turns, list) or not turns:
        raise _BadLine(f"turns is {shown(turns)}, expected a list of texts")
    return tuple(_text(turn, f"turns[{i}]") for i, turn in enumerate(turns))


def _text(value: object, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise _BadLine(f"{where} is {shown(value)}, expected text")
    try:
        return sound(where, value)
    except UsageError as error:
        raise _BadLine(str(error)) from None
