"""Separates what a chat template wrote from what people and models wrote, in one rendered text.

The `<|im_end|>` of a template is a control token; the same letters typed by a person are plain text. After rendering
both look alike. So the template is rendered a second time with stand-ins: every letter of a message that can be part of
a special token's text is replaced by a character that occurs nowhere else. The template may trim, cut or join the text,
but each character still shows who wrote it. If the letters, put back, give the plain rendering, then the special tokens
of the rendering with stand-ins are exactly the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from specllama.base.errors import TemplateError
from specllama.chat.template import HINT

_FIRST_STAND_IN, _LAST_STAND_IN = 0x100000, 0x10FFFD  # a private use plane, without meaning to tokenizers
_WHITE_SPACE = frozenset(" \t\r\n")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The text of a special token at [start, end) of a longer text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation, and the same with stand-ins for the text of messages; both have one length."""

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
        """Letters such that every text has one of them. No white space if possible, because templates trim it."""
        return frozenset().union(*(frozenset(text) - _WHITE_SPACE or frozenset(text) for text in self._texts))

    def everywhere(self, text: str) -> Iterator[Occurrence]:
        """All occurrences in `text`, also overlapping ones."""
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths[match.group()]:
                found = text[start : start + length]
                if found in self._texts:
                    yield Occurrence(start, start + length, found)

    def may_join(self, text: str) -> bool:
        """True if `text` holds a special text, or could be part of one together with its neighbours."""
        if self.find(text) or any(text in special for special in self._texts):
            return True
        return any(text[:n] in self._ends or text[-n:] in self._beginnings for n in range(1, len(text)))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._texts for n in range(1, len(text) + 1))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self._texts for n in range(len(text)))

    def find(self, text: str) -> list[Occurrence]:
        """The occurrences that llama.cpp turns into tokens, in order; it takes the longest, then the leftmost."""
        taken = bytearray(len(text))
        found = []
        for special in sorted(self.everywhere(text), key=lambda special: (-len(special.text.encode()), special.start)):
            if not any(taken[special.start : special.end]):
                taken[special.start : special.end] = b"\1" * len(special.text)
                found.append(special)
        return sorted(found, key=lambda special: special.start)

    def texts_in(self, text: str) -> list[str]:
        return [special.text for special in self.find(text)]


class _StandIns:
    """One replacement character for each letter of special texts; none of them occurs in `seen`."""

    def __init__(self, letters: frozenset[str], seen: set[str]) -> None:
        free = (char for char in map(chr, range(_FIRST_STAND_IN, _LAST_STAND_IN + 1)) if char not in seen)
        stand_ins = dict(zip(sorted(letters), free, strict=False))
        self._hide = str.maketrans(stand_ins)
        self._show = str.maketrans({char: letter for letter, char in stand_ins.items()})

    def hide(self, text: str, keep: re.Pattern[str]) -> str:
        """`text` with stand-ins, except where it matches `keep`."""
        chars = list(text.translate(self._hide))
        for match in keep.finditer(text):
            chars[match.start() : match.end()] = match.group()
        return "".join(chars)

    def show(self, text: str) -> str:
        """The reverse of `hide`."""
        return text.translate(self._show)


def _words(literals: Iterable[str], contents: Sequence[str], special: SpecialTexts) -> re.Pattern[str]:
    """Matches the words of messages that a template may look for, except those that may join to a special text."""
    found = [word for word in literals if any(word in content for content in contents) and not special.may_join(word)]
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or "(?!)")


def tell_apart(
    render: Callable[[list[str]], str], contents: Sequence[str], special: SpecialTexts, literals: Iterable[str]
) -> Rendering:
    """Render a conversation so that the text of a special token in a message never becomes that token.

    `render` makes the text from the contents of the messages. `literals` are the words that the template may look for
    in them; they stay visible, so that the template takes the same branches with stand-ins as without. If it does not,
    the plain rendering is used where no message holds a special text and both have the same special tokens. Otherwise
    the rendering with stand-ins is used: its layout may differ, but it is safe. Raises TemplateError.
    """
    plain = render(list(contents))
    stand_ins = _StandIns(special.letters, seen={*plain, *"".join(contents), *"".join(literals)})
    words = _words(literals, contents, special)
    try:
        hidden = render([stand_ins.hide(content, words) for content in contents])
    except TemplateError as error:
        raise TemplateError("the chat template depends on single letters of the messages", hint=HINT) from error
    if stand_ins.show(hidden) == plain:
        return Rendering(plain, hidden)
    if special.texts_in(hidden) == special.texts_in(plain) and not any(map(special.texts_in, contents)):
        return Rendering(plain, plain)
    return Rendering(stand_ins.show(hidden), hidden)
