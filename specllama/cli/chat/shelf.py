"""Conversations of persons are kept by themselves: one private file each, in the state folder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

from specllama.base.disk import new_file
from specllama.base.errors import ConversationError
from specllama.chat import saved as chat_file
from specllama.chat.saved import Saved
from specllama.chat.session import ChatSession


def shelf_folder() -> Path:
    """The folder of the kept conversations."""
    return user_state_path("specllama") / "chats"


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A kept conversation."""

    path: Path
    changed_s: float  # since the epoch
    saved: Saved

    @property
    def title(self) -> str:
        """The first message in one line."""
        return " ".join(self.saved.turns[0].user.split())

    def holds(self, words: str) -> bool:
        """True if its messages hold each of `words`, in any case."""
        text = "\n".join(f"{turn.user}\n{turn.answer}" for turn in self.saved.turns).casefold()
        return all(word in text for word in words.casefold().split())


def kept_chats() -> Iterator[KeptChat]:
    """The kept conversations, the newest first; damaged files are left out."""
    ages = dict[Path, float]()
    for path in shelf_folder().glob("*.json"):
        with suppress(OSError):  # another chat may have renamed it
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=lambda path: -ages[path]):
        with suppress(ConversationError):
            saved = chat_file.load(path)
            if saved.turns:
                yield KeptChat(path, ages[path], saved)


class Shelf:
    """Keeps the conversation of one chat. Two chats never write the same file: each has a name of its own."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.path: Path | None = None  # of the conversation so far
        self._kept: object = None  # what the file holds
        self._has_failed = False

    def begin(self) -> None:
        """The next conversation is another one."""
        self.path, self._kept = None, None

    def take(self, path: Path) -> None:
        """Continue the kept conversation `path` under a name of its own, so that another chat with it keeps its own."""
        self.begin()
        own = self._new_path()
        if self.wanted:
            with suppress(OSError):  # another chat has taken it: then this one writes a second file
                path.rename(own)
                self.path = own

    def keep(self, session: ChatSession, models: Mapping[str, object]) -> str:
        """Write the conversation if it has changed; returns what to say if that fails for the first time."""
        state = (tuple(session.turns), session.system)
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
