"""How SIGINT, SIGTERM and SIGHUP end a command, and SIGTSTP (Ctrl-Z) stops it for a while.

No child process and no half-written file stays behind an end, and a shell gets the terminal as it was.

`specllama/__main__.py` ends the process at once while no command is running: during imports, and after its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

from specllama.base.clock import standing_still
from specllama.base.signals import ENDING


class OnTerminal(Protocol):
    """Something that has changed the terminal. Both methods run in a signal handler."""

    def suspend(self) -> None:
        """Leave the terminal to the shell."""

    def resume(self) -> None:
        """Take it again. The cursor is at the beginning of a line."""


ON_TERMINAL: WeakKeyDictionary[OnTerminal, None] = WeakKeyDictionary()  # what Ctrl-Z suspends, the latest first


def endings() -> list[int]:
    """The signals of ENDING, unless the process ignores them: nohup ignores SIGHUP, a script's background job SIGINT.

    None outside the main thread, which alone can handle signals: a program may call `main` as a function.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Set `handler` for these signals, and restore the old handlers afterwards.

    A SIGHUP that is not the first signal is dropped: the shell and the system of a closing terminal send one each.
    """
    n_taken = 0

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal n_taken
        n_taken += 1
        if n_taken == 1 or number != getattr(signal, "SIGHUP", None):
            handler(number, frame)

    # Python's own handler stays as it is: asyncio, below the editor of `chat`, looks for it.
    taken = handler if handler is signal.default_int_handler else take
    before: list[Any] = [signal.signal(number, taken) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


_is_writing = False  # the main thread writes, maybe to a full pipe


@contextlib.contextmanager
def breakable() -> Iterator[None]:
    """A write that a second signal ends with ECANCELED, so that what it would have printed can be saved."""
    global _is_writing
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _is_writing = _is_writing, True
    try:
        yield
    finally:
        _is_writing = before


def break_a_write() -> None:
    """For signal handlers: raises OSError (ECANCELED) if the main thread is in a `breakable` block."""
    global _is_writing
    if _is_writing:
        _is_writing = False
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


def leave_at_once(number: int, restore: Callable[[], None] = lambda: None) -> NoReturn:
    """End the process as the signal does, without waiting for threads or children."""
    restore()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + number)


def leave_terminal() -> list[OnTerminal]:
    """Give the terminal to the shell. Returns what had changed it."""
    held = list(ON_TERMINAL)
    for each in reversed(held):
        each.suspend()
    return held


def stop(number: int, _frame: FrameType | None = None) -> None:
    """Handler of SIGTSTP: the shell gets a clean terminal, and the process goes on when the shell continues it."""
    held = leave_terminal()
    before = signal.signal(number, signal.SIG_DFL)
    with standing_still():
        signal.raise_signal(number)
    signal.signal(number, before)  # the process continues here
    for each in held:
        each.resume()


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, SIGTERM and SIGHUP SystemExit(128 + signal), so that every `finally` runs.

    A SIGTERM after one of the two ends the process at once. SIGTSTP stops it, see `stop`.
    """
    numbers = endings()
    interrupts = [number for number in numbers if number == signal.SIGINT]
    others = [number for number in numbers if number != signal.SIGINT]

    def end(number: int, _frame: FrameType | None) -> None:
        if signal.SIGTERM in others:
            signal.signal(signal.SIGTERM, lambda again, _frame: leave_at_once(again))
        raise SystemExit(128 + number)

    tstp = getattr(signal, "SIGTSTP", None)  # missing on Windows
    stops = [] if tstp is None or signal.getsignal(tstp) is not signal.SIG_DFL else [tstp]
    with handling(interrupts, signal.default_int_handler), handling(others, end), handling(stops, stop):
        yield


def hang_up() -> None:
    """Do as if a SIGHUP had come, if anything handles it."""
    if callable(signal.getsignal(signal.SIGHUP)):
        signal.raise_signal(signal.SIGHUP)


def is_hung_up(number: int) -> bool:
    """True if this descriptor is a terminal that was closed. It can be noticed before SIGHUP comes, or without one."""
    try:
        import termios

        termios.tcgetattr(number)
    except ImportError:  # Windows
        return False
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
