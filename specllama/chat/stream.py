"""Turns tokens into text: whole characters, without stop strings, and with the origin of each piece."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specllama.core.types import PieceOf


def _borders(stop: bytes) -> list[int]:
    """For each length of a proper prefix of `stop`: the length of its longest border (prefix that is also suffix)."""
    borders = [0] * len(stop)
    length = 0
    for n in range(1, len(stop) - 1):
        while length and stop[n] != stop[length]:
            length = borders[length]
        length += stop[n] == stop[length]
        borders[n + 1] = length
    return borders


class _StopAutomaton:
    """Finds stop strings in a stream of bytes; reads each byte once per stop string.

    Invariant: `_matched[i]` is the length of the longest prefix of stop i at the end of the stream.
    Source: Knuth, Morris and Pratt, SIAM J. Comput. 6 (1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise TypeError("stops is a sequence of strings, not one string")
        self._stops = [stop.encode() for stop in stops]
        self._borders = [_borders(stop) for stop in self._stops]
        self.reset()

    def reset(self) -> None:
        """Begin a new stream."""
        self._matched = [0] * len(self._stops)

    @property
    def n_open(self) -> int:
        """How many of the last bytes can still become a stop string."""
        return max(self._matched, default=0)

    def push(self, data: bytes) -> int | None:
        """The start in `data` of the earliest stop string that it completes, or None.

        Negative if the stop string began in earlier data. Bytes after a completed one are not read.
        """
        starts = [start for i in range(len(self._stops)) if (start := self._advance(i, data)) is not None]
        return min(starts, default=None)

    def _advance(self, i: int, data: bytes) -> int | None:
        """Follow stop `i` through `data`; returns its start if it becomes complete."""
        stop, borders, matched = self._stops[i], self._borders[i], self._matched[i]
        for n_read, byte in enumerate(data, 1):
            while matched and byte != stop[matched]:
                matched = borders[matched]
            matched += byte == stop[matched]
            if matched == len(stop):
                self._matched[i] = 0
                return n_read - matched
        self._matched[i] = matched
        return None


class StopWatch:
    """The engine's `Stopper`: finds the token that completes a stop string across token boundaries."""

    def __init__(self, stops: Sequence[str], piece: PieceOf) -> None:
        self._piece = piece
        self._automaton = _StopAutomaton(stops)

    def push(self, token: int) -> bool:
        """True if this token completes a stop string."""
        return self._automaton.push(self._piece(token)) is not None

    def reset(self) -> None:
        """Begin a new answer."""
        self._automaton.reset()


@dataclass(frozen=True, slots=True)
class TaggedText:
    """Text and the tag of the token that completed it."""

    text: str
    tag: str


class TextStream:
    """The answer as it is shown: whole characters, without stop strings, each piece with its token's tag.

    Text that can still become a stop string is held back. If a token completes several stop strings, the one that
    starts first counts. `text` and `tokens` are what was released so far, and after `finish` the answer. A character
    of several tokens has the tag of the last. After a stop string, `stopped` is True and later tokens are ignored.
    """

    def __init__(self, piece: PieceOf, stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._automaton = _StopAutomaton(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[tuple[bytes, str, int]] = deque()  # bytes not yet decoded, tag, number of tokens so far
        self._n_held = 0  # bytes in `_held`
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._decoded = ("", 0)  # tag and number of tokens, of the bytes decoded last
        self._n_shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def tokens(self) -> list[int]:
        """The tokens up to the last with a byte in `text`, including those before it that show nothing."""
        return self._tokens[: self._n_shown]

    def push(self, token: int, tag: str = "") -> list[TaggedText]:
        """Take the next token; returns the text that can be shown now, with neighbours of one tag joined."""
        if self.stopped:
            return []
        self._tokens.append(token)
        data = self._piece(token)
        if not data:
            return []
        self._held.append((data, tag, len(self._tokens)))
        self._n_held += len(data)
        start = self._automaton.push(data)
        if start is None:
            return self._release(self._n_held - self._automaton.n_open)
        self.stopped = True
        return self._release(self._n_held - len(data) + start, last=True)

    def finish(self) -> list[TaggedText]:
        """The text still held back at the end of the answer. An incomplete character becomes one U+FFFD."""
        return [] if self.stopped else self._release(self._n_held, last=True)

    def _release(self, n_bytes: int, *, last: bool = False) -> list[TaggedText]:
        """Decode the first `n_bytes` held bytes; `last`: nothing follows, drop the rest."""
        pieces: list[tuple[str, str]] = []
        while n_bytes > 0:
            data, tag, n_tokens = self._held.popleft()
            if len(data) > n_bytes:
                self._held.appendleft((data[n_bytes:], tag, n_tokens))
                data = data[:n_bytes]
            n_bytes -= len(data)
            self._n_held -= len(data)
            self._decoded = (tag, n_tokens)
            self._show(self._decoder.decode(data), pieces)
        if last:
            self._held.clear()
            self._n_held = 0
            self._show(self._decoder.decode(b"", final=True), pieces)
        return [TaggedText(text, tag) for text, tag in pieces]

    def _show(self, text: str, pieces: list[tuple[str, str]]) -> None:
        """Add `text` to the answer and to `pieces`, with the tag of the bytes decoded last."""
        if not text:
            return
        tag, self._n_shown = self._decoded
        self._texts.append(text)
        if pieces and pieces[-1][1] == tag:
            pieces[-1] = (pieces[-1][0] + text, tag)
        else:
            pieces.append((text, tag))
