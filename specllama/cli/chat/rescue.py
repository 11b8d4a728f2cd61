"""A chat that a signal ends: the conversation is kept, and the next chat tells of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from specllama.base.disk import new_file
from specllama.cli.chat.answering import ChatState
from specllama.cli.chat.shelf import kept_chats, kept_files, shelf_folder
from specllama.cli.screen.ending import endings, handling
from specllama.cli.screen.output import TerminalGone


def _mark() -> Path:
    """A file with the name of the conversation of the last chat that was cut off."""
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
                with contextlib.suppress(OSError), new_file(_mark(), 0o600) as file:  # the terminal is closed
                    file.write(talk.shelf.path.name.encode())
            raise


def tell_of_kept(talk: ChatState) -> None:
    """Say once that the last chat was cut off, unless this one continues a conversation."""
    with contextlib.suppress(OSError):
        if not _mark().is_file():
            return
        name = _mark().read_text(encoding="utf-8", errors="replace")
        _mark().unlink()
        left = {path: changed_s for path, changed_s in kept_files().items() if path.name == name}
        if left and not talk.session.turns:
            talk.listed = list(kept_chats(left))  # so that number 1 is this one
            talk.output.note("the last chat was cut off; to continue it: /chats 1")
