"""The style of an answer's characters, decided while it streams: Markdown, code, and the model's thinking.

A mark is held until the next characters decide what it means; then it is final. Every character stays in the text, so
that a copy of the screen is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

from specllama.chat.session import END_THINK, THINK
from specllama.cli.screen.fences import Fences

Kind = Literal["text", "heading", "bold", "code", "block", "fence", "mark", "think"]
Letter: TypeAlias = tuple[str, str]  # a character, and the tag of who wrote it
Shown: TypeAlias = tuple[str, str, Kind]  # a character, its tag, and how it looks

_HEADING = re.compile(r" {0,3}#{1,6}")


@dataclass(slots=True)
class Markdown:
    """Styles one answer. Unclosed bold and inline code end with their line."""

    fences: Fences = field(default_factory=Fences)
    _held: list[Letter] = field(default_factory=list)  # marks whose meaning the next character decides
    _at_start: bool = True  # of a line
    _whole: str = ""  # this line so far
    _line: Kind = "text"  # what the rest of this line is
    _bold: bool = False
    _code: int = 0  # backticks that opened inline code
    _after_space: bool = True

    def feed(self, letter: Letter) -> Iterator[Shown]:
        """Take one character; yields those whose style is now certain."""
        char = letter[0]
        if self._at_start:
            start = "".join(char for char, _ in self._held)
            may_be_heading = not self.fences.mark and _HEADING.fullmatch(start + char)
            if self.fences.may_be_fence(start + char) or may_be_heading:
                self._held.append(letter)
                return
            yield from self._begin_line(start, char)
            self._whole = start
        elif self._held and char != self._held[0][0]:
            yield from self._end_run(char)
        self._whole += char
        if char in "*`" and self._line == "text":
            self._held.append(letter)
            return
        yield (*letter, self._look)
        self._after_space = char.isspace()
        if char == "\n":
            if self._line != "fence":
                self.fences.take(self._whole[:-1])
            self._at_start, self._line, self._bold, self._code = True, "text", False, 0

    def finish(self) -> Iterator[Shown]:
        if self._at_start:
            yield from self._begin_line("".join(char for char, _ in self._held), "\n")
        yield from self._end_run("\n")

    @property
    def _look(self) -> Kind:
        return self._line if self._line != "text" else "code" if self._code else "bold" if self._bold else "text"

    def _begin_line(self, start: str, after: str) -> Iterator[Shown]:
        """`start` begins a line and `after` follows: say what the line is."""
        self._at_start = False
        if after == "\n" and self.fences.take(start):
            self._line = "fence"
            yield from self._release("fence")
        elif self.fences.mark:
            self._line = "block"
            yield from self._release("block")
        elif _HEADING.fullmatch(start) and after == " ":
            yield from self._release("mark")
            self._line = "heading"
        elif start.strip(" ")[:1] == "`":
            held, self._held = self._held, []
            for letter in held:
                if self._held and letter[0] != "`":
                    yield from self._end_run(letter[0])
                if letter[0] == "`":
                    self._held.append(letter)
                else:
                    yield (*letter, self._look)
            if after != "`":
                yield from self._end_run(after)
        else:
            yield from self._release("text")

    def _end_run(self, after: str) -> Iterator[Shown]:
        """Decide what a run of equal marks means, now that the character `after` it is known."""
        n_marks = len(self._held)
        if not n_marks:
            return
        if self._held[0][0] == "`":
            if self._code in (0, n_marks):
                self._code = 0 if self._code else n_marks
                yield from self._release("mark")
            else:
                yield from self._release("code")
        elif n_marks >= 2 and not self._code and (not self._after_space if self._bold else not after.isspace()):
            self._bold = not self._bold
            yield from self._release("mark")
        else:
            yield from self._release(self._look)
        self._after_space = False

    def _release(self, kind: Kind) -> Iterator[Shown]:
        held, self._held = self._held, []
        for letter in held:
            yield (*letter, kind)


class Thinking:
    """Finds the thinking at the beginning of an answer, from `<think>` to `</think>`.

    `starts_inside`: the template has written `<think>` already.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self.inside = starts_inside
        self._waits_for = END_THINK if starts_inside else THINK
        self._held: list[Letter] = []

    def feed(self, letter: Letter) -> Iterator[tuple[Letter, bool]]:
        """Take one character; yields (character, is thinking) for those that are now certain."""
        if not self._waits_for:
            yield letter, False
            return
        if not self._waits_for.startswith("".join(char for char, _ in self._held) + letter[0]):
            yield from self.finish()
            if not self.inside and not letter[0].isspace():
                self._waits_for = ""  # the answer has begun
            if not self._waits_for.startswith(letter[0]) or not self._waits_for:
                yield letter, self.inside
                return
        self._held.append(letter)
        if len(self._held) == len(self._waits_for):
            yield from self._switch()

    def _switch(self) -> Iterator[tuple[Letter, bool]]:
        """The mark is complete; it is part of the thinking."""
        held, self._held = self._held, []
        for letter in held:
            yield letter, True
        self._waits_for = "" if self.inside else END_THINK
        self.inside = not self.inside

    def finish(self) -> Iterator[tuple[Letter, bool]]:
        """Release what was held: it is not a mark."""
        held, self._held = self._held, []
        if held and not self.inside:
            self._waits_for = ""
        for letter in held:
            yield letter, self.inside


class AnswerReading:
    """`Thinking` and `Markdown` on one answer."""

    def __init__(self, *, starts_thinking: bool = False) -> None:
        self._thinking = Thinking(starts_inside=starts_thinking)
        self._markdown = Markdown()
        self._thought: list[str] = []

    @property
    def info(self) -> str:
        """What follows the fence of the last code block, such as its language."""
        return self._markdown.fences.info

    @property
    def thought(self) -> str:
        """The thinking, without its marks."""
        return "".join(self._thought).removeprefix(THINK).removesuffix(END_THINK).strip()

    def feed(self, text: str, tag: str) -> Iterator[Shown]:
        """Take text; yields the characters whose style is certain."""
        for char in text:
            yield from self._sorted(self._thinking.feed((char, tag)))

    def finish(self) -> Iterator[Shown]:
        yield from self._sorted(self._thinking.finish())
        yield from self._markdown.finish()

    def _sorted(self, letters: Iterable[tuple[Letter, bool]]) -> Iterator[Shown]:
        for letter, thought in letters:
            if thought:
                self._thought.append(letter[0])
                yield (*letter, "think")
            else:
                yield from self._markdown.feed(letter)


@dataclass(slots=True)
class Blocks:
    """The code between fences. Code in an indented block, as in a list, loses the indentation of its fence."""

    n_fences: int = 0  # whole lines of fences so far
    _fence: str = ""  # the line so far, if it is one
    _indent: int = 0  # of the last fence
    _left: int = 0  # spaces that this line of code still loses

    def take(self, letters: Iterable[Shown]) -> Iterator[tuple[int, str]]:
        """Yields (number of the block from 0, character)."""
        for char, _, kind in letters:
            if kind == "fence":
                self._fence += char
                if char == "\n":
                    self._left = self._indent = len(self._fence) - len(self._fence.lstrip(" "))
                    self.n_fences, self._fence = self.n_fences + 1, ""
            elif kind == "block":
                if self._left and char == " ":
                    self._left -= 1
                    continue
                self._left = self._indent if char == "\n" else 0
                yield self.n_fences // 2, char


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A whole answer without its thinking, and the code of its fenced blocks."""

    text: str
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, answer: str, *, starts_thinking: bool = False) -> AnswerText:
        """`starts_thinking`: the template has written the mark already."""
        reading = AnswerReading(starts_thinking=starts_thinking)
        letters = [(char, kind) for char, _, kind in (*reading.feed(answer, ""), *reading.finish()) if kind != "think"]
        code = Blocks().take((char, "", kind) for char, kind in letters)
        blocks = ("".join(char for _, char in group) for _, group in groupby(code, lambda one: one[0]))
        return cls("".join(char for char, _ in letters).strip("\n"), tuple(blocks))
