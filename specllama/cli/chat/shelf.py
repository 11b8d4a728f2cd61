"""Conversations of persons are kept by themselves: one private file each, in the state folder."""

from __future__ import annotations

import json
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

from specllama.base.disk import new_file, read_bytes
from specllama.base.errors import ConversationError
from specllama.chat import saved as chat_file
from specllama.chat.saved import Saved
from specllama.chat.session import ChatSession


def shelf_folder() -> Path:
    """The folder of the kept conversations."""
    return user_state_path("specllama") / "chats"


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A kept conversation in a list. It has no messages: another chat may write more of them at any time."""

    path: Path
    changed_s: float  # since the epoch
    title: str  # the first message in one line
    n_turns: int


def kept_files() -> dict[Path, float]:
    """When each kept conversation was written, in seconds since the epoch, the newest first; reads no file."""
    ages = dict[Path, float]()
    for path in shelf_folder().glob("*.json"):
        with suppress(OSError):  # another chat may have renamed it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):  # a pipe or a device has no end
                ages[path] = status.st_mtime
    return dict(sorted(ages.items(), key=lambda item: -item[1]))


def kept_chats(files: Mapping[Path, float], words: str = "") -> Iterator[KeptChat]:
    """Those of `files` whose messages hold each of `words`, in any case; damaged files are left out."""
    wanted = words.casefold().split()
    escaped = [json.dumps(word, ensure_ascii=False)[1:-1] for word in wanted]
    for path, changed_s in files.items():
        with suppress(ConversationError, OSError):
            if wanted:  # reading takes 0.1 ms a file, checking it 2 ms
                raw = read_bytes(path).decode("utf-8", "replace").casefold()
                if not all(word in raw for word in escaped):
                    continue
            turns = chat_file.load(path).turns
            text = "\n".join(f"{turn.user}\n{turn.answer}" for turn in turns).casefold() if wanted else ""
            if turns and all(word in text for word in wanted):
                yield KeptChat(path, changed_s, " ".join(turns[0].user.split()), len(turns))


class Shelf:
    """Keeps the conversation of one chat. Two chats never write the same file: each has a name of its own."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.path: Path | None = None  # of the conversation so far
        self._kept: object = None  # what the file holds
        self._has_failed = False

    def begin(self, path: Path | None = None) -> None:
        """The next conversation is another one, which `path` keeps."""
        self.path, self._kept = path, None

    def take(self, path: Path) -> tuple[Path | None, Saved]:
        """Where the kept conversation `path` is from now on, for `begin`, and what it holds. Raises ConversationError.

        It gets a new name before it is read: what another chat with it writes later is in a file of its own.
        """
        own: Path | None = None
        if self.wanted:
            with suppress(OSError):  # also of a folder that cannot be written
                own = path.rename(self._new_path())
        if own is None and not path.exists():
            raise ConversationError(
                "the conversation was continued or removed by another chat", hint="/chats lists the conversations"
            )
        return own, chat_file.load(own or path)

    def keep(self, session: ChatSession, models: Mapping[str, object]) -> str:
        """Write the conversation if it has changed; returns what to say if that fails for the first time.

        The file of a conversation whose only turn was removed goes with it.
        """
        state = (tuple(session.turns), session.system)
        if self.wanted and self.path is not None and not session.turns:
            with suppress(OSError):
                self.path.unlink()
            self.begin()
        if not self.wanted or not session.turns or state == self._kept:
            return ""
        path = self.path or self._new_path()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new_file(path, 0o600) as file:
                file.write(chat_file.packed(session, models).encode("utf-8"))
        except OSError as error:
            told, self._has_failed = self._has_failed, True
            return "" if told else f"the conversation is not kept: {path.parent} cannot be written: {error.strerror}"
        self.path, self._kept = path, state
        return ""

    @staticmethod
    def _new_path() -> Path:
        return shelf_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.json"
