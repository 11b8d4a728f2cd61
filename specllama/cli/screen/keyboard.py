"""Keyboard input while the program does not read it: it is not echoed, and waits for the next reader.

prompt_toolkit's raw mode turns Ctrl-C and Ctrl-Z into keys, which nothing reads while models load or an answer runs.
Here both stay signals.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from specllama.base.errors import SpecllamaError
from specllama.cli.screen.ending import ON_TERMINAL
from specllama.cli.screen.output import Stream
from specllama.cli.screen.visible import Raw

PASTE_AS_ONE, PASTE_AS_TYPED = Raw("\x1b[?2004h"), Raw("\x1b[?2004l")  # bracketed paste on and off
_MOST_EARLY = 1 << 16  # bytes; a terminal keeps no more than some thousand


class Keyboard:
    """A terminal's keyboard without echo, until `restore`. Ctrl-C and Ctrl-Z still send their signals.

    `by_key`: keys wait unchanged for an editor that reads keys, and a paste is one block. In line mode the terminal
    turns Enter into a newline and interprets Ctrl-D itself.
    """

    def __init__(self, file: TextIO, screen: Stream, *, by_key: bool = True) -> None:
        """Raises ImportError, ValueError or OSError if `file` is not such a terminal."""
        import termios

        self._by_key = by_key
        self._screen = screen
        self._meanwhile: list[Any] | None = None  # the settings to come back to after Ctrl-Z
        self._fd = file.fileno()
        try:
            self._before: list[Any] = termios.tcgetattr(self._fd)
        except termios.error as error:
            raise OSError(*error.args) from None
        iflag, oflag, cflag, lflag, ispeed, ospeed, cc = self._before
        lflag &= ~termios.ECHO
        if by_key:
            lflag |= termios.NOFLSH  # Ctrl-C stops an answer; what was typed meanwhile stays
            iflag &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
            lflag &= ~termios.ICANON
            cc = list(cc)
            cc[termios.VMIN], cc[termios.VTIME] = 1, 0
        self._held = [iflag, oflag, cflag, lflag, ispeed, ospeed, cc]

    def _set(self, settings: list[Any], paste: str, *, and_forget: bool = False) -> None:
        import termios

        with contextlib.suppress(termios.error, OSError):
            if os.tcgetpgrp(self._fd) == os.getpgrp():  # the system stops a background job that tries
                termios.tcsetattr(self._fd, termios.TCSAFLUSH if and_forget else termios.TCSADRAIN, settings)
        # The screen may be closed, and a signal handler may interrupt another write to it.
        with contextlib.suppress(OSError, ValueError, SpecllamaError, RuntimeError):
            if self._by_key:
                self._screen.write(paste)

    def hold(self) -> None:
        """Hold the keyboard, also again after another reader."""
        ON_TERMINAL[self] = None
        self._set(self._held, PASTE_AS_ONE)

    def restore(self, *, and_forget: bool = False) -> None:
        """Restore the terminal; `and_forget` discards what was typed, which the shell would run as a command."""
        ON_TERMINAL.pop(self, None)
        self._set(self._before, PASTE_AS_TYPED, and_forget=and_forget)

    def early(self) -> str:
        """What was typed before `hold`, with Enter as a carriage return."""
        data = b""
        with contextlib.suppress(OSError, ValueError):
            while len(data) < _MOST_EARLY and select.select([self._fd], [], [], 0)[0]:
                if not (piece := os.read(self._fd, _MOST_EARLY)):
                    break
                data += piece
        return data.decode("utf-8", "replace").replace("\n", "\r")

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Restore the terminal while another program reads it."""
        self.restore()
        try:
            yield
        finally:
            self.hold()

    def suspend(self) -> None:
        """See `OnTerminal`. The settings may be those of an editor, which takes the keyboard for each line."""
        import termios

        self._meanwhile = None
        with contextlib.suppress(termios.error, OSError):
            self._meanwhile = termios.tcgetattr(self._fd)
            self._set(self._before, PASTE_AS_TYPED)

    def resume(self) -> None:
        if self._meanwhile is not None:
            self._set(self._meanwhile, PASTE_AS_ONE)


@contextlib.contextmanager
def held_keyboard(file: TextIO, screen: Stream, *, by_key: bool = True) -> Iterator[Keyboard | None]:
    """Hold the keyboard of `file`; None if that is not possible."""
    keyboard: Keyboard | None = None
    with contextlib.suppress(ImportError, ValueError, OSError):
        keyboard = Keyboard(file, screen, by_key=by_key)
    if keyboard is None:
        yield None
        return
    try:
        keyboard.hold()
        yield keyboard
    except BaseException:
        keyboard.restore(and_forget=by_key)
        raise
    keyboard.restore()


@contextlib.contextmanager
def silent_keyboard(screen: Stream) -> Iterator[Callable[[], None]]:
    """Turn the echo off while text streams to `screen`; yields a function that restores it at once.

    Does nothing if `screen` is not a terminal: the reader of the pipe, such as a pager, may use the keyboard.
    """
    if not screen.is_terminal:
        yield lambda: None
        return
    with held_keyboard(screen.file, screen, by_key=False) as keyboard:
        yield (lambda: None) if keyboard is None else keyboard.restore
