"""A held keyboard restores the terminal in every case."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.cli.screen import ending, keyboard
from specllama.cli.screen.ending import ending_in_order
from specllama.cli.screen.output import Stream

termios = pytest.importorskip("termios")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal that this process may change."""
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: os.getpgrp())
    other, ours = os.openpty()
    yield ours
    os.close(ours)
    os.close(other)


def test_a_ctrl_c_while_the_keyboard_is_being_taken_gives_it_back(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell without echo, because Ctrl-C came at the start of a chat."""
    shown = io.StringIO()
    take, before = keyboard.Keyboard._set, termios.tcgetattr(ours)

    def interrupted(held: keyboard.Keyboard, *args: Any, **how: bool) -> None:
        take(held, *args, **how)
        assert termios.tcgetattr(ours) != before
        monkeypatch.setattr(keyboard.Keyboard, "_set", take)
        raise KeyboardInterrupt

    monkeypatch.setattr(keyboard.Keyboard, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt), keyboard.held_keyboard(*terminal(ours, shown)):
        pass
    assert termios.tcgetattr(ours) == before
    assert shown.getvalue() == keyboard.PASTE_AS_ONE + keyboard.PASTE_AS_TYPED


def terminal(fd: int, shown: io.StringIO) -> tuple[Any, Stream]:
    return SimpleNamespace(fileno=lambda: fd), Stream(shown, True, True, True, True)


@pytest.fixture
def stopped(ours: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of the terminal at each time that the process is stopped; it continues at once."""
    settings = list[Any]()
    monkeypatch.setattr(signal, "raise_signal", lambda _number: settings.append(termios.tcgetattr(ours)))
    monkeypatch.setattr(ending, "ON_TERMINAL", ending.WeakKeyDictionary())
    monkeypatch.setattr(keyboard, "ON_TERMINAL", ending.ON_TERMINAL)
    return settings


@pytest.mark.parametrize(("by_key", "is_lent"), [(True, False), (True, True), (False, False)])
def test_ctrl_z_leaves_the_terminal_to_the_shell_and_takes_it_again(
    ours: int, stopped: list[Any], by_key: bool, is_lent: bool
) -> None:
    """A shell without echo or working Enter after Ctrl-Z, or an editor whose settings a chat changes."""
    shown, before = io.StringIO(), termios.tcgetattr(ours)
    with ending_in_order():
        stop = signal.getsignal(signal.SIGTSTP)
        assert callable(stop)
        with keyboard.held_keyboard(*terminal(ours, shown), by_key=by_key) as held:
            assert held is not None
            with held.lent() if is_lent else nullcontext():
                now, said = termios.tcgetattr(ours), shown.getvalue()
                assert is_lent is (now == before)
                stop(signal.SIGTSTP, None)
                assert signal.getsignal(signal.SIGTSTP) is stop
                assert (stopped, termios.tcgetattr(ours)) == ([before], now)
                added = "" if is_lent or not by_key else keyboard.PASTE_AS_TYPED + keyboard.PASTE_AS_ONE
                assert shown.getvalue() == f"{said}{added}"
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    assert termios.tcgetattr(ours) == before


def test_ctrl_z_in_an_answer_of_a_chat_restores_what_the_shell_had(ours: int, stopped: list[Any]) -> None:
    """Prevents: a shell without echo, because chat and answer both hold the keyboard."""
    before = termios.tcgetattr(ours)
    chat, answer = (keyboard.held_keyboard(*terminal(ours, io.StringIO()), by_key=by_key) for by_key in (True, False))
    with chat, answer:
        now = termios.tcgetattr(ours)
        ending.stop(signal.SIGTSTP)
        assert (stopped, termios.tcgetattr(ours)) == ([before], now)


def test_ctrl_c_in_a_chat_leaves_what_was_typed(ours: int) -> None:
    """Prevents: a message typed during an answer that Ctrl-C discards; the terminal does so by itself."""
    with keyboard.held_keyboard(*terminal(ours, io.StringIO())):
        assert termios.tcgetattr(ours)[3] & termios.NOFLSH
    assert not termios.tcgetattr(ours)[3] & termios.NOFLSH


def test_a_screen_that_is_being_written_to_does_not_keep_the_terminal(ours: int) -> None:
    """A third Ctrl-C in the middle of a line, after which the process hangs."""

    class Busy(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    before = termios.tcgetattr(ours)
    held = keyboard.Keyboard(*terminal(ours, Busy()))
    held.hold()
    assert termios.tcgetattr(ours) != before
    held.restore()
    assert termios.tcgetattr(ours) == before
