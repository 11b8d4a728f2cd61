"""A chat whose terminal closes: what was said is kept, nothing is printed, and the next chat says where it is."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from platformdirs import user_state_path

from specllama import chat_file
from specllama.cli.chatting import Chat
from specllama.cli.output import Output
from specllama.errors import ConversationError

HUNG_UP = 129  # 128 and the number of SIGHUP, as a shell would report it


def kept_file() -> Path:
    """Where a conversation is kept whose terminal closed."""
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
def kept_on_hangup(talk: Chat, *, wanted: bool) -> Iterator[None]:
    """SIGHUP stops the answer, and leaves with exit code HUNG_UP; if `wanted`, the conversation is kept.

    A SIGHUP that is ignored stays ignored: that is what nohup is for.
    """

    def hang_up(_signal: int, _frame: FrameType | None) -> None:
        talk.hung_up = True
        talk.cancel.set()
        if not talk.answering:
            raise SystemExit(HUNG_UP)

    hangup: int | None = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN:
        hangup = None
    before = None if hangup is None else signal.signal(hangup, hang_up)
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == HUNG_UP and wanted and talk.session.turns:
            _keep(talk)
        raise
    finally:
        if hangup is not None:
            signal.signal(hangup, before)


def _keep(talk: Chat) -> None:
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
        output.note(f"the last chat was cut off with its terminal; to go on with it: /load {told}")
