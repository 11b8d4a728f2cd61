"""Tells what a chat template wrote from what people and models wrote, in one rendered text.

A template's `<|im_end|>` is a control token, the same letters typed by a person are plain text, and after rendering
both look alike. So the template is rendered a second time with stand-ins: every letter of a message that could be part
of a special token's text is replaced by a character that occurs nowhere else. Whatever the template then trims, cuts or
joins, each character of the outcome still says who wrote it. If the letters, put back in place, give the plain
rendering, then the special tokens found among the stand-ins are the template's own, and there are no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from specllama.errors import TemplateError
from specllama.template import HINT

_FIRST_STAND_IN, _LAST_STAND_IN = 0x100000, 0x10FFFD  # a plane for private use: no tokenizer means anything by it
_WHITE_SPACE = frozenset(" \t\r\n")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The text of a special token at [start, end) of a longer text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation, and the same with stand-ins for what people and models wrote; equally long."""

    text: str
    hidden: str


class SpecialTexts:
    """The texts of a vocabulary's special tokens, and where they occur."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts) - {""}
        self._lengths: dict[str, set[int]] = {}  # of the texts, by first letter
        for text in self._texts:
            self._lengths.setdefault(text[0], set()).add(len(text))
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    @cached_property
    def letters(self) -> frozenset[str]:
        """Letters such that no text consists of others. White space only where needed, because templates trim it."""
        return frozenset().union(*(frozenset(text) - _WHITE_SPACE or frozenset(text) for text in self._texts))

    def everywhere(self, text: str) -> Iterator[Occurrence]:
        """All occurrences in `text`, those that overlap included."""
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths[match.group()]:
                found = text[start : start + length]
                if found in self._texts:
                    yield Occurrence(start, start + length, found)

    def find(self, text: str) -> list[Occurrence]:
        """The occurrences that llama.cpp turns into tokens, in order: it takes the longest first, then leftmost."""
        taken = bytearray(len(text))
        found = []
        for special in sorted(self.everywhere(text), key=lambda special: (-len(special.text.encode()), special.start)):
            if not any(taken[special.start : special.end]):
                taken[special.start : special.end] = b"\1" * len(special.text)
                found.append(special)
        return sorted(found, key=lambda special: special.start)

    def texts_in(self, text: str) -> list[str]:
        """The texts of the special tokens in `text`, in order."""
        return [special.text for special in self.find(text)]


class _StandIns:
    """Characters that stand in for the letters of special texts, one for one; none of them occurs in `seen`."""

    def __init__(self, special: SpecialTexts, seen: set[str]) -> None:
        free = (char for char in map(chr, range(_FIRST_STAND_IN, _LAST_STAND_IN + 1)) if char not in seen)
        stand_ins = dict(zip(sorted(special.letters), free, strict=False))
        self._special = special
        self._hide = str.maketrans(stand_ins)
        self._show = str.maketrans({char: letter for letter, char in stand_ins.items()})

    def hide(self, text: str) -> str:
        """`text` with stand-ins for its letters."""
        return text.translate(self._hide)

    def hide_around(self, text: str, literals: re.Pattern[str]) -> str:
        """The same, but what matches `literals` stays, unless it is part of a special token's text."""
        chars = list(self.hide(text))
        for match in literals.finditer(text):
            chars[match.start() : match.end()] = match.group()
        for special in self._special.everywhere(text):
            chars[special.start : special.end] = self.hide(special.text)
        return "".join(chars)

    def show(self, text: str) -> str:
        """`text` with the letters back in place."""
        return text.translate(self._show)


def tell_apart(
    render: Callable[[list[str]], str], contents: Sequence[str], special: SpecialTexts, literals: Iterable[str]
) -> Rendering:
    """Render a conversation so that no special token's text in a message can pass for the template's own.

    `render` gives the conversation for the contents of its messages; `literals` are the strings that the template may
    search them for. A template that looks at the letters of a message goes other ways when they are hidden. So, in
    this order: hide all letters; hide all but those that the template asks for; take the plain rendering if no message
    holds a special text and there are as many as the template writes for hidden ones; else take the hidden rendering,
    which may be laid out otherwise but is safe. Raises TemplateError as `render` does.
    """
    plain = render(list(contents))
    stand_ins = _StandIns(special, seen={*plain, *"".join(contents), *"".join(literals)})
    asked_for = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or "(?!)")
    guises = (stand_ins.hide, lambda text: stand_ins.hide_around(text, asked_for))
    safest: str | None = None
    for guise in guises:
        try:
            hidden = render([guise(content) for content in contents])
        except TemplateError:
            continue  # it wants to see letters that are hidden
        if safest is None:
            safest = hidden
        if stand_ins.show(hidden) == plain:
            return Rendering(plain, hidden)
    if safest is None:
        raise TemplateError("the chat template reads messages too closely to tell their text from its own", hint=HINT)
    if special.texts_in(plain) == special.texts_in(safest) and not any(map(special.texts_in, contents)):
        return Rendering(plain, plain)
    return Rendering(stand_ins.show(safest), safest)
