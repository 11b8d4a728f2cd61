"""Signals that wait for the end of a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def held() -> Iterator[None]:
    """The handlers of SIGINT, SIGTERM and SIGHUP run at the end of the block, before its error is raised.

    For libraries that call Python and take what a handler raises there for a failure of their own. Outside the main
    thread, where no handler runs, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = list[int]()

    def hold(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: old for number in ENDING if callable(old := signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        for number in received:
            signal.raise_signal(number)
