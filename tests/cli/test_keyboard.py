"""The keyboard that is held while nobody reads it, by itself: whatever happens, the terminal is given back."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from specllama.cli import keyboard
from specllama.cli.output import Stream

termios = pytest.importorskip("termios")


def test_a_ctrl_c_while_the_keyboard_is_being_taken_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that shows no letter any more, because Ctrl-C came in the moment that a chat began."""
    other, ours = os.openpty()
    shown = io.StringIO()
    take, before = keyboard._set, termios.tcgetattr(ours)

    def interrupted(fd: int, settings: list[Any], **how: bool) -> None:
        take(fd, settings, **how)
        assert termios.tcgetattr(ours) != before
        monkeypatch.setattr(keyboard, "_set", take)
        raise KeyboardInterrupt

    monkeypatch.setattr(keyboard, "_in_foreground", lambda _fd: True)
    monkeypatch.setattr(keyboard, "_set", interrupted)
    with os.fdopen(ours, "rb", buffering=0) as file, os.fdopen(other, "rb"):
        screen = Stream(shown, True, True, True, True)
        with pytest.raises(KeyboardInterrupt), keyboard.held_keyboard(file, screen):  # type: ignore[arg-type]
            pass
        assert termios.tcgetattr(ours) == before
    assert shown.getvalue() == keyboard.PASTE_AS_TYPED
