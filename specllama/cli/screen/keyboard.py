"""The keyboard while nobody reads it: what is typed then does not show, and waits for who reads next."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from specllama.base.errors import SpecllamaError
from specllama.cli.screen.ending import handling
from specllama.cli.screen.output import Stream

PASTE_AS_ONE, PASTE_AS_TYPED = "\x1b[?2004h", "\x1b[?2004l"  # whether the terminal says where a paste begins and ends
_MOST_EARLY = 1 << 16  # bytes; a terminal keeps no more than some thousand


def _nothing() -> None:
    """Nothing to do."""


def _in_foreground(fd: int) -> bool:
    """True where this process may change the terminal; a background job that tries is stopped."""
    return os.tcgetpgrp(fd) == os.getpgrp()


def _set(fd: int, settings: list[Any], *, and_forget: bool = False) -> None:
    """Set the terminal; `and_forget` what was typed and not read."""
    import termios

    with contextlib.suppress(termios.error, OSError):
        if _in_foreground(fd):
            termios.tcsetattr(fd, termios.TCSAFLUSH if and_forget else termios.TCSADRAIN, settings)


@contextlib.contextmanager
def silent_keyboard(screen: Stream) -> Iterator[Callable[[], None]]:
    """While text streams onto `screen`, what is typed does not appear in it; yields what ends this at once.

    Nothing changes where `screen` is no terminal: its reader, a pager perhaps, may have the keyboard.
    """
    restore: Callable[[], None] = _nothing
    if screen.is_terminal:
        with contextlib.suppress(ImportError, ValueError, OSError):
            restore = _without_echo(screen.file.fileno())
    try:
        yield restore
    finally:
        restore()


def _without_echo(fd: int) -> Callable[[], None]:
    """Switch the echo of a terminal off; returns what switches it on again."""
    import termios

    before: list[Any] = termios.tcgetattr(fd)
    _set(fd, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    return lambda: _set(fd, before)


class Keyboard:
    """A terminal's keyboard that is held: every key waits as it is, for an editor that reads keys.

    A terminal that makes lines of them would turn Enter into a newline, and keep Ctrl-D and the like for itself.
    Ctrl-C and Ctrl-Z are heard all the same.
    """

    def __init__(self, file: TextIO, screen: Stream) -> None:
        """Raises ImportError, ValueError and OSError where `file` is no such terminal."""
        import termios

        self._screen = screen
        self._is_lent = False
        self._fd = file.fileno()
        try:
            self._before: list[Any] = termios.tcgetattr(self._fd)
        except termios.error as error:
            raise OSError(*error.args) from None
        iflag, oflag, cflag, lflag, ispeed, ospeed, cc = self._before
        iflag &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        lflag &= ~(termios.ECHO | termios.ICANON)
        cc = list(cc)
        cc[termios.VMIN], cc[termios.VTIME] = 1, 0
        self._held = [iflag, oflag, cflag, lflag, ispeed, ospeed, cc]

    def hold(self) -> None:
        """Hold it, or go on after somebody read. A paste is one block, not a message a line."""
        _set(self._fd, self._held)
        self._say(PASTE_AS_ONE)

    def _say(self, code: str) -> None:
        # It may be gone; and a signal may have come in the middle of writing to it.
        with contextlib.suppress(OSError, ValueError, SpecllamaError, RuntimeError):
            self._screen.write(code)

    def early(self) -> str:
        """What was typed before it was held: whole lines end in a newline, which was Enter."""
        data = b""
        with contextlib.suppress(OSError, ValueError):
            while len(data) < _MOST_EARLY and select.select([self._fd], [], [], 0)[0]:
                if not (piece := os.read(self._fd, _MOST_EARLY)):
                    break
                data += piece
        return data.decode("utf-8", "replace").replace("\n", "\r")

    def restore(self, *, and_forget: bool = False) -> None:
        """Leave the terminal as it was; `and_forget` what was typed: a message is no command for a shell."""
        _set(self._fd, self._before, and_forget=and_forget)
        self._say(PASTE_AS_TYPED)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Another program reads meanwhile, and finds the terminal as it was."""
        self.restore()
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            self.hold()

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell finds the terminal as it was, and this process finds it as it is now when it goes on."""
        import termios

        now: list[Any] | None = None
        if not self._is_lent:
            with contextlib.suppress(termios.error, OSError):
                now = termios.tcgetattr(self._fd)
                self.restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, self.stop)  # it goes on
        if now is not None:
            _set(self._fd, now)
            self._say(PASTE_AS_ONE)

    @contextlib.contextmanager
    def stopping_in_order(self) -> Iterator[None]:
        """Inside, `stop` hears Ctrl-Z, where that would stop the process."""
        is_ours = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGTSTP] if is_ours and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL else []
        with handling(numbers, self.stop):
            yield


@contextlib.contextmanager
def held_keyboard(file: TextIO, screen: Stream) -> Iterator[Keyboard | None]:
    """Hold the keyboard of `file`; None where that is no terminal whose keyboard can be held."""
    keyboard: Keyboard | None = None
    with contextlib.suppress(ImportError, ValueError, OSError):
        keyboard = Keyboard(file, screen)
    if keyboard is None:
        yield None
        return
    try:
        keyboard.hold()
        with keyboard.stopping_in_order():
            yield keyboard
    except BaseException:
        keyboard.restore(and_forget=True)
        raise
    keyboard.restore()
