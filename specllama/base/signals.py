"""The signals that end a process, and how they wait for the end of a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# SIGINT is the first. Windows has no SIGHUP.
ENDING = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def held() -> Iterator[None]:
    """The handlers of the signals of ENDING run at the end of the block, each of them, before its error is raised.

    For libraries that call Python and take what a handler raises there for a failure of their own. Outside the main
    thread, where no handler runs, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = list[int]()

    def hold(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    try:
        with ExitStack() as restoring:  # SIGINT last: a Ctrl-C must not raise in between
            for number in ENDING:
                if callable(old := signal.getsignal(number)):
                    restoring.callback(signal.signal, number, old)
                    signal.signal(number, hold)
            yield
    finally:
        with ExitStack() as raising:  # the next handler runs also if one raises
            for number in reversed(received):
                raising.callback(signal.raise_signal, number)
