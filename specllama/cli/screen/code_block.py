"""The code of the fenced blocks of an answer, while it streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specllama.chat.stream import StopWatch, TextStream
from specllama.cli.screen.markdown import AnswerReading, Blocks, Shown
from specllama.core.types import PieceOf


class CodeBlock:
    """The first code block of an answer; those in the model's thinking do not count."""

    def __init__(self, *, starts_thinking: bool = False) -> None:
        """`starts_thinking`: the chat template has written `<think>` already."""
        self._reading = AnswerReading(starts_thinking=starts_thinking)
        self._blocks = Blocks()

    @property
    def found(self) -> bool:
        """True if the line of the opening fence is complete."""
        return self._blocks.n_fences > 0

    @property
    def closed(self) -> bool:
        """True if the line of the closing fence is complete."""
        return self._blocks.n_fences > 1

    def feed(self, text: str) -> str:
        """Take text of the answer; returns the code that is now certain."""
        return self._first(self._reading.feed(text, ""))

    def finish(self) -> str:
        """The rest of a block that the end of the answer cuts or closes."""
        return self._first(self._reading.finish())

    def _first(self, letters: Iterable[Shown]) -> str:
        return "".join(char for number, char in self._blocks.take(letters) if number == 0)


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
