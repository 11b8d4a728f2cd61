"""A chat that a signal ends: the conversation is saved, and the next chat tells where."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from platformdirs import user_state_path

from specllama.base.disk import new_file
from specllama.chat import saved as chat_file
from specllama.cli.chat.answering import ChatState
from specllama.cli.screen.ending import endings, handling
from specllama.cli.screen.output import Output, TerminalGone


def kept_file() -> Path:
    """The file for a conversation that was cut off."""
    return user_state_path("specllama") / "cut_off_chat.json"


@contextlib.contextmanager
def kept_on_hangup(talk: ChatState, *, wanted: bool) -> Iterator[None]:
    """SIGHUP and SIGTERM stop the answer and raise SystemExit(128 + signal); `wanted` saves the conversation."""

    def end(number: int, _frame: FrameType | None) -> None:
        again, talk.ended = bool(talk.ended), 128 + number
        talk.cancel.set()
        if again or not talk.answering:
            raise SystemExit(talk.ended)

    with handling([number for number in endings() if number != signal.SIGINT], end):
        try:
            yield
        except (SystemExit, TerminalGone):
            if wanted and talk.session.turns:
                _keep(talk)
            raise


def _keep(talk: ChatState) -> None:
    """Save the conversation so that only its owner can read it. Errors are ignored: the terminal is closed."""
    with contextlib.suppress(OSError):
        data = chat_file.packed(talk.session, talk.opened.names).encode("utf-8")
        with new_file(kept_file(), 0o600) as file:
            file.write(data)


def tell_of_kept(output: Output) -> None:
    """Print once where the last cut-off conversation is."""
    with contextlib.suppress(OSError):
        told = kept_file().rename(kept_file().with_name("last_cut_off_chat.json"))
        output.note(f"the last chat was cut off; to continue it: /load {told}")
