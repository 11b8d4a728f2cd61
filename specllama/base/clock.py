"""A clock for speeds and budgets, which stands still while Ctrl-Z stops the process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_stopped_s = 0.0


def perf_counter() -> float:
    """As `time.perf_counter`, without the time in `standing_still`."""
    return time.perf_counter() - _stopped_s


@contextmanager
def standing_still() -> Iterator[None]:
    """Leaves out the time of the block. For a block that stops the whole process: no other thread reads the clock."""
    global _stopped_s
    start_s = time.perf_counter()
    try:
        yield
    finally:
        _stopped_s += time.perf_counter() - start_s
