"""Turns tokens into text as they come: whole characters, stop strings cut off, and who wrote each piece."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specllama.base.errors import UsageError

PieceOf = Callable[[int], bytes]  # the bytes that a token shows; none for control tokens


def _encoded(stop: str) -> bytes:
    """The bytes of a stop string; raises UsageError where it has none.

    A byte of the command line that is not UTF-8 reached Python as a lone surrogate, and is that byte again.
    """
    if not stop:
        raise UsageError("a stop string is empty and would end every answer", hint="Leave it out.")
    try:
        return stop.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UsageError(f"the stop string {stop!r} is not text", hint="Write it as UTF-8.") from error


def _borders(stop: bytes) -> list[int]:
    """Per length n of a proper prefix of `stop`: how long its longest border is, a prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for n in range(1, len(stop) - 1):
        while length and stop[n] != stop[length]:
            length = borders[length]
        length += stop[n] == stop[length]
        borders[n + 1] = length
    return borders


class _StopAutomaton:
    """Finds stop strings in a stream of bytes, looking at each byte once per stop string.

    Invariant: `_matched[i]` is the length of the longest prefix of stop i that the stream now ends with.
    Source: Knuth, Morris and Pratt, SIAM J. Comput. 6 (1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise TypeError("stops is a sequence of strings, not one string")
        self._stops = [_encoded(stop) for stop in stops]
        self._borders = [_borders(stop) for stop in self._stops]
        self.reset()

    def reset(self) -> None:
        """Forget the stream so far."""
        self._matched = [0] * len(self._stops)

    @property
    def n_open(self) -> int:
        """How many of the last bytes may still become a stop string."""
        return max(self._matched, default=0)

    def push(self, data: bytes) -> int | None:
        """Where in `data` the earliest stop string that it completes starts, or None where it completes none.

        Negative where the stop string started in earlier data. What follows a completed one is not looked at.
        """
        starts = [start for i in range(len(self._stops)) if (start := self._advance(i, data)) is not None]
        return min(starts, default=None)

    def _advance(self, i: int, data: bytes) -> int | None:
        """Follow stop `i` through `data`, or up to where it is complete; then return where it started."""
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
    """The engine's `Stopper`: says which token completes a stop string, wherever the tokens split it."""

    def __init__(self, stops: Sequence[str], piece: PieceOf) -> None:
        self._piece = piece
        self._automaton = _StopAutomaton(stops)

    def push(self, token: int) -> bool:
        """True if this token completes a stop string."""
        return self._automaton.push(self._piece(token)) is not None

    def reset(self) -> None:
        """Forget the answer so far; the next token begins a new one."""
        self._automaton.reset()


@dataclass(frozen=True, slots=True)
class TaggedText:
    """A piece of text and the tag of the token that completed it."""

    text: str
    tag: str


class TextStream:
    """The answer as it may be shown: whole characters, nothing of a stop string, each piece with its token's tag.

    Text that may still become a stop string is held back until it is certain. Of several stop strings that one token
    completes, the one that starts first counts. `text` and `tokens` say what was released so far; after `finish` they
    are the answer. A character made of several tokens carries the tag of the last.
    """

    def __init__(self, piece: PieceOf, stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._automaton = _StopAutomaton(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[tuple[bytes, str, int]] = deque()  # bytes not yet decoded, tag, tokens up to theirs
        self._n_held = 0  # bytes in `_held`
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._decoded = ("", 0)  # tag and count of tokens, of the bytes that the decoder saw last
        self._n_shown = 0
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was completed; tokens pushed after that show nothing."""
        return self._stopped

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._texts)

    @property
    def tokens(self) -> list[int]:
        """The tokens up to the last that shows at least one byte of `text`; those in between that show none stay."""
        return self._tokens[: self._n_shown]

    @property
    def n_shown(self) -> int:
        """`len(tokens)`."""
        return self._n_shown

    def push(self, token: int, tag: str = "") -> list[TaggedText]:
        """Take the next token; return what may be shown now, in order, neighbours of one tag joined."""
        if self._stopped:
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
        self._stopped = True
        return self._release(self._n_held - len(data) + start, last=True)

    def finish(self) -> list[TaggedText]:
        """The answer is over: return what was held back. An incomplete character becomes one U+FFFD."""
        return [] if self._stopped else self._release(self._n_held, last=True)

    def _release(self, n_bytes: int, *, last: bool = False) -> list[TaggedText]:
        """Decode the first `n_bytes` held bytes; `last`: nothing follows, the rest is dropped."""
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
        """Add `text` to the answer and to `pieces`, under the tag of the bytes decoded last."""
        if not text:
            return
        tag, self._n_shown = self._decoded
        self._texts.append(text)
        if pieces and pieces[-1][1] == tag:
            pieces[-1] = (pieces[-1][0] + text, tag)
        else:
            pieces.append((text, tag))
