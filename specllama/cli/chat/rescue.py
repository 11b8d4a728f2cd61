"""A chat that a signal ends: the conversation is kept, and the next chat tells of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from specllama.cli.chat.answering import ChatState
from specllama.cli.chat.shelf import shelf_folder
from specllama.cli.screen.ending import endings, handling
from specllama.cli.screen.output import TerminalGone


def _mark() -> Path:
    """A file that says that the last chat was cut off."""
    return shelf_folder() / "cut_off"


@contextlib.contextmanager
def kept_on_hangup(talk: ChatState) -> Iterator[None]:
    """SIGHUP and SIGTERM stop the answer and raise SystemExit(128 + signal); what was said of it is kept."""

    def end(number: int, _frame: FrameType | None) -> None:
        again, talk.ended = bool(talk.ended), 128 + number
        talk.cancel.set()
        if again or not talk.answering:
            raise SystemExit(talk.ended)

    with handling([number for number in endings() if number != signal.SIGINT], end):
        try:
            yield
        except (SystemExit, TerminalGone):
            talk.shelf.keep(talk.session, talk.opened.names)
            if talk.shelf.path is not None:
                with contextlib.suppress(OSError):  # the terminal is closed
                    _mark().touch()
            raise


def tell_of_kept(talk: ChatState) -> None:
    """Say once that the last chat was cut off, unless this one continues a conversation."""
    with contextlib.suppress(OSError):
        _mark().unlink()
        if not talk.session.turns:
            talk.output.note("the last chat was cut off; to continue it: /chats 1")
