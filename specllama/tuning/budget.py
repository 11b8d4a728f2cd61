"""The time of a tuning or a search, shared among pieces of work as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specllama.base.child import Tell
from specllama.base.clock import perf_counter


class Budget:
    """Gives each piece of work its share of the time that is left, and shows all pieces in one bar that only rises.

    A piece that takes longer or shorter than its share changes the shares of those after it.
    """

    def __init__(self, seconds: float, tell: Tell, clock: Callable[[], float] = perf_counter) -> None:
        self._end, self._tell, self._clock = clock() + seconds, tell, clock
        self._ahead = 0.0  # weights of the pieces to come
        self._shown = 0.0

    @property
    def left(self) -> float:
        """Seconds; below 0 if the pieces took longer than they should."""
        return self._end - self._clock()

    def plan(self, weight: float) -> None:
        """Expect a piece of this weight; a negative one gives a piece up."""
        self._ahead += weight

    @contextmanager
    def part(self, weight: float) -> Iterator[bool]:
        """A block that does pieces of this weight together; False if no time is left for it.

        Weights that the block did not use, also because of an error, are given up.
        """
        ahead = self._ahead - weight
        try:
            yield self.left > 0.0
        finally:
            self._ahead = ahead

    def piece(self, weight: float) -> tuple[float, Tell]:
        """(seconds, progress) of the piece that begins now."""
        part = weight / max(self._ahead, weight)
        begin, width = self._shown, (1.0 - self._shown) * part
        self._ahead -= weight

        def tell(what: str, share: float) -> None:
            self._shown = max(self._shown, begin + width * min(share, 1.0))
            self._tell(what, self._shown)

        return max(self.left, 0.0) * part, tell
