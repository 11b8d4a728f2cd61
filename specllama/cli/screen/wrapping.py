"""Word wrap for text that streams: what is written stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TypeAlias

from rich.cells import get_character_cell_size

from specllama.cli.screen.fences import Fences
from specllama.cli.screen.terminal import StyledText, column_after

_Letter: TypeAlias = tuple[str, tuple[str, str]]  # a character, and the codes around it
# The indentation of wrapped lines: that of the line, and the width of its list mark.
_HANGS = re.compile(r"[ \t]*(?:(?:[-*+•]|\d{1,3}[.)])[ \t]+)?")
_MAX_HANG = 0.4  # of the width; a line with more indentation continues at the margin
# Closing marks never begin a line and opening marks never end one, in scripts without spaces.
_CLOSES = frozenset("、。，．・：；？！」』）〕］｝〉》】々ー…‥)]}.,:;!?%’”")
_OPENS = frozenset("「『（〔［｛〈《【([{‘“")
_JOINER = "\u200d"  # joins two emoji into one


class Wrapper:
    """Wraps styled text between words. A word is held until it ends, except the first of a line.

    Spaces before a word are held with it, and dropped where the line breaks. The terminal breaks words wider than a
    line, and everything inside a fenced code block.
    """

    def __init__(self) -> None:
        self._spaces: list[_Letter] = []  # before the word
        self._word: list[_Letter] = []
        self._line = ""  # as it came, without the held part
        self._fences = Fences()
        self._flows = False  # the word begins its line or is wider than a line: it is not held
        self._out: list[_Letter] = []
        self._column = self._width = 0

    def feed(self, pieces: Iterable[StyledText], column: int, width: int) -> list[StyledText]:
        """The part of the held text and `pieces` that can be written now, from `column` on."""
        self._column, self._width = column, width
        for piece in pieces:
            for char in piece.text:
                self._take(char, (piece.on, piece.off))
        return self._written()

    def finish(self, column: int, width: int) -> list[StyledText]:
        """The held text, at the end of the answer."""
        self._column, self._width = column, width
        self._end_word()
        self._emit(self._spaces)
        return self._written()

    def _written(self) -> list[StyledText]:
        out, self._out = self._out, []
        return [
            StyledText("".join(char for char, _ in group), *style) for style, group in groupby(out, lambda one: one[1])
        ]

    def _take(self, char: str, style: tuple[str, str]) -> None:
        if char == "\n":
            self._end_word()
            self._end_line(style)
        elif self._fences.mark:
            self._emit([(char, style)])
        elif char in " \t":
            self._end_word()
            self._spaces.append((char, style))
        else:
            before = self._word[-1][0] if self._word else self._line[-1:] if self._flows else ""
            if before and self._may_break(before, char):
                self._end_word()
            self._flows = self._flows or not (self._line or self._spaces or self._word)
            self._word.append((char, style))
            if self._flows or self._cells(self._word) > self._width:
                self._flows = True
                self._write_word()

    @staticmethod
    def _cells(letters: Iterable[_Letter]) -> int:
        return sum(get_character_cell_size(char) for char, _ in letters)

    @staticmethod
    def _may_break(before: str, after: str) -> bool:
        """True between two characters if one is wide: such scripts have no spaces."""
        sizes = get_character_cell_size(before), get_character_cell_size(after)
        return 2 in sizes and sizes[1] > 0 and before != _JOINER and after not in _CLOSES and before not in _OPENS

    def _end_word(self) -> None:
        """Write the complete word, here or on the next line."""
        if self._word and not self._flows:
            spaces = "".join(char for char, _ in self._spaces)
            start = column_after(spaces, self._column, self._width)
            fits = self._column <= start <= self._width - self._cells(self._word)
            if not fits and self._line.strip():
                self._break()
            elif not fits:
                self._spaces = []  # an indentation that leaves no room for the word
        self._write_word()
        self._flows = False

    def _break(self) -> None:
        """Continue in the next line, with the indentation of this one."""
        begins = _HANGS.match(self._line)
        hang = column_after(begins[0], 0, self._width) if begins else 0
        if hang > _MAX_HANG * self._width or hang + self._cells(self._word) > self._width:
            hang = 0
        self._line += "".join(char for char, _ in self._spaces)
        self._spaces = []
        self._out.append(("\n", ("", "")))
        self._out += [(" ", ("", ""))] * hang
        self._column = hang

    def _write_word(self) -> None:
        if self._word:
            self._emit(self._spaces)
            self._emit(self._word)
            self._spaces, self._word = [], []

    def _emit(self, letters: list[_Letter]) -> None:
        text = "".join(char for char, _ in letters)
        self._out += letters
        self._line += text
        self._column = column_after(text, self._column, self._width)

    def _end_line(self, style: tuple[str, str]) -> None:
        """Write trailing spaces if they fit, and open or close a fence."""
        spaces = "".join(char for char, _ in self._spaces)
        if self._column + len(spaces) < self._width or not self._line.strip():
            self._emit(self._spaces)
        self._spaces = []
        self._fences.take(self._line)
        self._line = ""
        self._out.append(("\n", style))
        self._column = 0
