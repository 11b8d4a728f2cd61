"""Finds the first fenced code block of an answer while it streams."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specllama.chat.session import END_THINK, THINK
from specllama.chat.stream import StopWatch, TextStream
from specllama.core.types import PieceOf

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_OPENS = re.compile(r"( *)(`{3,}|~{3,})([^\n]*)")
_MAY_CLOSE = re.compile(r" *(`*|~*) *\r?")  # a line that can still become the closing fence


class CodeBlock:
    """The first code block between fences; those in the model's thinking do not count.

    The fences are not part of the code. Code in an indented block, as in a list, loses the indentation of its fence.
    """

    def __init__(self, *, starts_thinking: bool = False) -> None:
        """`starts_thinking`: the chat template has written `<think>` already."""
        self.found = False
        self.closed = False
        self._thinks = starts_thinking
        self._begun = starts_thinking  # the answer has more than white space
        self._line = ""  # the part of the current line that was not released
        self._at_start = True  # of a line: nothing of it was released
        self._indent, self._fence = 0, ""

    def feed(self, text: str) -> str:
        """Take text of the answer; returns the code that is now certain."""
        return "".join(map(self._take, _LINES.findall(text)))

    def _take(self, text: str) -> str:
        """Take the rest of a line, or a part of it."""
        if self.closed:
            return ""
        self._line += text
        if not self.found:
            if self._line.endswith("\n"):
                self._outside(self._line.rstrip("\r\n"))
                self._line = ""
            return ""
        if self._at_start and _MAY_CLOSE.fullmatch(self._line.removesuffix("\n")):
            return self._end_of_line() if self._line.endswith("\n") else ""
        return self._release()

    def _outside(self, line: str) -> None:
        """A whole line that is not in the block."""
        if not self._begun and line.strip():
            self._begun = True
            self._thinks = line.lstrip().startswith(THINK)
        if self._thinks:
            self._thinks = END_THINK not in line
            return
        opens = _OPENS.fullmatch(line)
        if opens and not (opens[2][0] == "`" and "`" in opens[3]):  # that is inline code
            self.found, self._indent, self._fence = True, len(opens[1]), opens[2]

    def _end_of_line(self) -> str:
        """The current line can be the closing fence, and is complete."""
        if self._line.strip().startswith(self._fence):
            self.closed = True
            return ""
        return self._release()

    def _release(self) -> str:
        """The current line as code."""
        text, self._line = self._line, ""
        if self._at_start:
            text = text[min(self._indent, len(text) - len(text.lstrip(" "))) :]
        self._at_start = text.endswith("\n")
        return text

    def finish(self) -> str:
        """The rest of a block that the end of the answer cuts or closes."""
        return self._end_of_line() if self.found and not self.closed else ""


class BlockWatch:
    """The engine's `Stopper` that ends an answer after its first code block, or at a stop string."""

    def __init__(self, stops: Sequence[str], piece: PieceOf, *, starts_thinking: bool) -> None:
        self._stops = StopWatch(stops, piece)
        self._stream = TextStream(piece)
        self._block = CodeBlock(starts_thinking=starts_thinking)

    def push(self, token: int) -> bool:
        """True if this token completes a stop string, or the line of the closing fence."""
        for span in self._stream.push(token):
            self._block.feed(span.text)
        return self._stops.push(token) or self._block.closed
