"""An orderly end on SIGTERM and SIGHUP: no child process and no half-written file stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from specllama.cli.codes import INTERRUPTED


def endings() -> list[int]:
    """SIGTERM and SIGHUP, unless the process ignores them: nohup ignores SIGHUP, and Windows has none."""
    numbers = [int(getattr(signal, name)) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set `handler` for these signals, and restore the old handlers afterwards."""
    before: list[Any] = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def leave_at_once(restore: Callable[[], None]) -> NoReturn:
    """End the process as interrupted, without waiting for threads or children."""
    restore()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit(128 + signal), so that every `finally` runs. A second one kills."""
    if threading.current_thread() is not threading.main_thread():  # `main` was called as a function
        yield
        return
    numbers = [number for number in endings() if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise SystemExit(128 + number)

    with handling(numbers, end):
        yield
