"""A chat that is ended from outside: what was said is kept, nothing is printed, and the next chat says where it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from platformdirs import user_state_path

from specllama.base.errors import ConversationError
from specllama.chat import saved as chat_file
from specllama.cli.chat.answering import ChatState
from specllama.cli.screen.ending import endings, handling
from specllama.cli.screen.output import Output

HUNG_UP, TERMINATED = 129, 143  # 128 and the numbers of SIGHUP and SIGTERM, as a shell would report them


def kept_file() -> Path:
    """Where a conversation is kept whose terminal closed, or that was told to end."""
    return user_state_path("specllama") / "cut_off_chat.json"


def is_gone() -> bool:
    """True where stdin was a terminal and is closed now: the end of what is typed is no wish to leave then."""
    try:
        import termios

        termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, ValueError):
        return False
    except (OSError, termios.error):
        return True
    return False


@contextlib.contextmanager
def kept_on_hangup(talk: ChatState, *, wanted: bool) -> Iterator[None]:
    """SIGHUP and SIGTERM stop the answer and leave, with HUNG_UP and TERMINATED; if `wanted`, the conversation is kept.

    A SIGHUP that is ignored stays ignored: that is what nohup is for.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        again, talk.ended = bool(talk.ended), 128 + number
        talk.cancel.set()
        if again or not talk.answering:
            raise SystemExit(talk.ended)

    with handling(endings(), end):
        try:
            yield
        except SystemExit as leaving:
            if leaving.code in (HUNG_UP, TERMINATED) and wanted and talk.session.turns:
                _keep(talk)
            raise


def _keep(talk: ChatState) -> None:
    """Write the conversation where only its owner may read it. There is nobody to tell what goes wrong."""
    path = kept_file()
    with contextlib.suppress(OSError, ConversationError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
        chat_file.save(path, talk.session, talk.opened.names)


def tell_of_kept(output: Output) -> None:
    """Say once that there is such a conversation."""
    with contextlib.suppress(OSError):
        told = kept_file().rename(kept_file().with_name("last_cut_off_chat.json"))
        output.note(f"the last chat was cut off; to go on with it: /load {told}")
