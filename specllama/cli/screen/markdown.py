"""The style of an answer's characters, decided while it streams: Markdown, code, and the model's thinking.

A mark is held until the next characters decide what it means; then it is final. Every character stays in the text, so
that a copy of the screen is the answer.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

from specllama.chat.session import END_THINK, THINK

Kind = Literal["text", "heading", "bold", "code", "block", "mark", "think"]
Letter: TypeAlias = tuple[str, str]  # a character, and the tag of who wrote it
Shown: TypeAlias = tuple[str, str, Kind]  # a character, its tag, and how it looks

_OPEN_START = re.compile(r" {0,3}(`*|~*|#{1,6})")  # a line that can still become a fence or a heading
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}")


@dataclass(slots=True)
class Markdown:
    """Styles one answer. Unclosed bold and inline code end with their line."""

    info: str = ""  # what follows the fence of the last code block, such as its language
    _held: list[Letter] = field(default_factory=list)  # marks whose meaning the next character decides
    _at_start: bool = True  # of a line
    _fence: str = ""  # what closes the code block that is open
    _line: Kind = "text"  # what the rest of this line is
    _bold: bool = False
    _code: int = 0  # backticks that opened inline code
    _after_space: bool = True

    def feed(self, letter: Letter) -> Iterator[Shown]:
        """Take one character; yields those whose style is now certain."""
        char = letter[0]
        if self._at_start:
            start = "".join(char for char, _ in self._held)
            if _OPEN_START.fullmatch(start + char):
                self._held.append(letter)
                return
            yield from self._begin_line(start, char)
        elif self._held and char != self._held[0][0]:
            yield from self._end_run(char)
        if char in "*`" and self._line == "text" and not self._fence:
            self._held.append(letter)
            return
        if self._fence and self._line == "mark" and char != "\n":
            self.info += char
        yield (*letter, self._look)
        self._after_space = char.isspace()
        if char == "\n":
            self._at_start, self._line, self._bold, self._code = True, "text", False, 0

    def finish(self) -> Iterator[Shown]:
        if self._at_start:
            yield from self._begin_line("".join(char for char, _ in self._held), "\n")
        yield from self._end_run("\n")

    @property
    def _look(self) -> Kind:
        if self._fence and self._line == "text":
            return "block"
        return self._line if self._line != "text" else "code" if self._code else "bold" if self._bold else "text"

    def _begin_line(self, start: str, after: str) -> Iterator[Shown]:
        """`start` begins a line and `after` follows: say what the line is."""
        self._at_start = False
        fence = FENCE.fullmatch(start)
        if self._fence:
            closes = fence is not None and fence[1].startswith(self._fence) and after == "\n"
            yield from self._release("mark" if closes else "block")
            if closes:
                self._fence, self._line = "", "mark"
        elif fence:
            yield from self._release("mark")
            self._fence, self._line, self.info = fence[1], "mark", ""
        elif _HEADING.fullmatch(start) and after == " ":
            yield from self._release("mark")
            self._line = "heading"
        elif start.strip(" ")[:1] == "`":
            indent = len(start) - len(start.lstrip(" "))
            run, self._held = self._held[indent:], self._held[:indent]
            yield from self._release("text")
            self._held = run
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
        return self._markdown.info

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
        blocks = []
        for is_block, group in groupby(letters, lambda letter: letter[1] == "block"):
            if is_block:
                blocks.append(textwrap.dedent("".join(char for char, _ in group)))  # in a list it is indented
        return cls("".join(char for char, _ in letters).strip("\n"), tuple(blocks))
