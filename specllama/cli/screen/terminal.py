"""Text that only grows on a terminal, with a few live lines below it.

The cursor stays at the end of the text. Live lines are drawn below it and erased from the cursor down. So neither an
answer taller than the window nor a resize leaves remains: one erase removes all rows below, and the text is never
written twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.cells import get_character_cell_size

from specllama.base.errors import SpecllamaError
from specllama.cli.screen.ending import ON_TERMINAL
from specllama.cli.screen.output import Stream
from specllama.cli.screen.visible import N_BEFORE, Raw, visible

if TYPE_CHECKING:
    from specllama.cli.screen.wrapping import Wrapper

SAVE_CURSOR, RESTORE_CURSOR = Raw("\x1b7"), Raw("\x1b8")
DOWN_SCROLLING = Raw("\x1bD")  # index: one row down in the same column; scrolls at the bottom
UP = Raw("\x1b[A")
# Erases from the next row on: some terminals treat an erase at the top left as 'clear the screen' and copy what was
# there to their scrollback.
ERASE_BELOW = DOWN_SCROLLING + SAVE_CURSOR + Raw("\r\x1b[J") + RESTORE_CURSOR + UP
NEXT_ROW = Raw("\r\n")
NO_WRAP, WRAP = Raw("\x1b[?7l"), Raw("\x1b[?7h")
FRAME, END_FRAME = Raw("\x1b[?2026h"), Raw("\x1b[?2026l")  # synchronized output, where the terminal supports it
TAB = 8


def size_of(stream: Stream) -> tuple[int, int]:
    """The current columns and rows of the terminal behind `stream`; 80 and 24 if unknown."""
    try:
        size = os.get_terminal_size(stream.file.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return size.columns or 80, size.lines or 24  # some terminals report 0


def column_after(text: str, column: int, width: int) -> int:
    """The column after writing `text` at `column`; `width` itself means 'at the margin, wrap pending'."""
    return _place_after(text, column, width)[1]


def _place_after(text: str, column: int, width: int) -> tuple[int, int]:
    """The rows down and the column after writing `text` at `column`, see `column_after`."""
    row = 0
    for char in text:
        if char == "\n":
            row, column = row + 1, 0
        elif char == "\t":
            column = min(column - column % TAB + TAB, width - 1)
        else:
            n_cells = get_character_cell_size(char)
            if column + n_cells > width:
                row, column = row + 1, 0
            column += n_cells
    return row, column


@dataclass(frozen=True, slots=True)
class StyledText:
    """Text and the codes that switch its style on and off."""

    text: str
    on: str = ""
    off: str = ""

    def __str__(self) -> str:
        return "".join((self.on, self.text, self.off))  # `Raw` + text would spell it out, also on a pipe


class Screen:
    """Append-only text on one stream and live lines below it on another, both on the same terminal.

    The terminal wraps lines, or `breaks` does, which may hold text until `finish`.

    Invariant: after `draw` the cursor is right behind the text, and not at the margin, where terminals differ in what
    the next character does. A character that would end at the margin waits for the next one, or for `clear`.
    """

    def __init__(
        self,
        text: Stream,
        live: Stream,
        size: Callable[[Stream], tuple[int, int]] = size_of,
        breaks: Wrapper | None = None,
    ) -> None:
        self._text = text
        self._live = live
        self._size = size
        self._breaks = breaks
        self._before = ""  # the end of the text as it came, which decides what is shown of the next
        self._added: list[StyledText] = []  # not yet wrapped
        self._waiting: list[StyledText] = []  # wrapped, not yet written
        self._line = ""  # the unfinished last line, as written
        self._column = 0  # its end
        self._width = 0  # the width for which `_column` is right
        self._is_reflowed = False  # the width has changed since the line began
        self._drawn = False
        ON_TERMINAL[self] = None

    def suspend(self) -> None:
        """See `OnTerminal`: erase the live lines."""
        if self._drawn:
            self._drawn = False
            with suppress(OSError, ValueError, SpecllamaError, RuntimeError):  # in the middle of another write
                self._live.write(ERASE_BELOW)

    def resume(self) -> None:
        """The text goes on in a new line."""
        if self._text.is_terminal:
            self._line, self._column = "", 0

    @property
    def size(self) -> tuple[int, int]:
        """The current columns and rows."""
        return self._size(self._text if self._text.is_terminal else self._live)

    @property
    def mid_line(self) -> bool:
        """True if the text does not end with a newline."""
        return bool(self._line)

    def add(self, piece: StyledText) -> None:
        """Queue text for the next `draw`; what reaches a terminal becomes visible."""
        text = piece.text
        if self._text.reaches_a_terminal:
            text = visible(text, self._before)
            self._before = (self._before + piece.text)[-N_BEFORE:]
        if text:
            self._added.append(replace(piece, text=text))

    def draw(self, lines: Sequence[str]) -> None:
        """Write the queued text, and below it as many of `lines` as fit into half of the window."""
        width, height = self.size
        lines = lines[: height // 2]
        self._live.write(FRAME + (ERASE_BELOW if self._drawn else Raw()))
        self._write_waiting(width, leave_margin=True)
        reserve = [DOWN_SCROLLING] * len(lines) + [UP] * len(lines)
        below = [NEXT_ROW + line for line in lines]
        self._live.write(Raw().join([*reserve, SAVE_CURSOR, NO_WRAP, *below, WRAP, RESTORE_CURSOR, END_FRAME]))
        self._drawn = bool(lines)

    def clear(self) -> None:
        """Erase the live lines and write the queued text, except an unfinished word that may still wrap."""
        if self._drawn:
            self._live.write(ERASE_BELOW)
            self._drawn = False
        self._write_waiting(self.size[0], leave_margin=False)

    def repaint(self, pieces: Sequence[StyledText]) -> None:
        """Write the unfinished last line again in other styles. Does nothing if it is not `pieces`, or moved."""
        self.clear()
        width, height = self.size
        rows = _place_after(self._line, 0, width)[0]
        text = "".join(piece.text for piece in pieces)
        is_in_reach = rows < height - height // 2  # `draw` may have scrolled the rows above to the scrollback
        if self._text.steerable and text == self._line and is_in_reach and not self._is_reflowed:
            self._text.write(Raw("\r" + UP * rows + "".join(map(str, pieces))))

    def finish(self) -> None:
        """`clear`, and write an unfinished word as well."""
        self.clear()
        if self._breaks is not None:
            self._waiting += self._breaks.finish(self._column, self._width)
            self._write_waiting(self._width, leave_margin=False)

    def _write_waiting(self, width: int, *, leave_margin: bool) -> None:
        """Write what waits; `leave_margin`: except a last character that would end at the margin."""
        if width != self._width:  # the terminal has wrapped the rows anew
            self._is_reflowed = self.mid_line
            self._column, self._width = column_after(self._line, 0, width), width
        pieces, self._waiting, added, self._added = self._waiting, [], self._added, []
        if self._breaks is not None:
            held_back = "".join(piece.text for piece in pieces)
            added = self._breaks.feed(added, column_after(held_back, self._column, width), width)
        pieces += added
        column = column_after("".join(piece.text for piece in pieces), self._column, width)
        if leave_margin and pieces and column == width:
            last = pieces.pop()
            pieces.append(replace(last, text=last.text[:-1]))
            self._waiting = [replace(last, text=last.text[-1])]
        plain = "".join(piece.text for piece in pieces)
        if plain:
            self._text.write(Raw("".join(str(piece) for piece in pieces if piece.text)))
            self._column = column_after(plain, self._column, width)
            self._is_reflowed = self._is_reflowed and "\n" not in plain
            self._line = (self._line + plain).rpartition("\n")[2]
