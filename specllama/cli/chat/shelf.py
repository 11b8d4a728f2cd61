"""Conversations of persons are kept by themselves: one private file each, in the state folder."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from platformdirs import user_state_path

from specllama.base.disk import held, is_held, new_file, read_bytes
from specllama.base.errors import ConversationError
from specllama.chat import saved as chat_file
from specllama.chat.saved import Saved
from specllama.chat.session import ChatSession, Turn


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


@dataclass(frozen=True, slots=True)
class Taken:
    """A kept conversation that is continued."""

    path: Path | None  # where it is from now on; None if nothing is to be kept
    saved: Saved
    is_open: bool  # in another chat


class Shelf:
    """Keeps the conversation of one chat. Two chats never write the same file: each has a name of its own."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.path: Path | None = None  # of the conversation so far
        self._kept: tuple[Turn, ...] = ()  # the turns in the file
        self._system: str | None = None  # the system prompt in the file; None = not known
        self._lock: int | None = None  # of the file
        self._has_failed = False

    def begin(self, path: Path | None = None) -> None:
        """The next conversation is another one, which `path` keeps."""
        self._hold(None)
        self.path, self._kept, self._system = path, (), None
        if path is not None:
            with suppress(OSError), path.open("r+b") as file:
                self._hold(held(file))

    def take(self, path: Path) -> Taken:
        """Make the kept conversation `path` that of this chat, for `begin`. Raises ConversationError.

        It gets a new name before it is read: what another chat with it writes later is in a file of its own.
        """
        is_open, own = is_held(path), None
        if self.wanted:
            with suppress(OSError):  # also of a folder that cannot be written
                own = path.rename(self._new_path())
        if own is None and not path.exists():
            raise ConversationError(
                "the conversation was continued or removed by another chat", hint="/chats lists the conversations"
            )
        return Taken(own, chat_file.load(own or path), is_open)

    def keep(self, session: ChatSession, models: Mapping[str, object]) -> str:
        """Write the conversation if it has changed; returns what to say if that fails for the first time.

        Turns that were removed leave the file, also if nothing new is wanted; without turns there is no file.
        """
        turns, system = tuple(session.turns), session.system
        if not self.wanted:
            turns, system = _common(turns, self._kept), self._system or ""
        if self.path is not None and not turns and (self.wanted or self._kept):
            with suppress(OSError):
                self.path.unlink()
            self.begin()
        if not turns or (turns, system) == (self._kept, self._system):
            return ""
        path = self.path or self._new_path()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new_file(path, 0o600) as file:
                file.write(chat_file.packed(system, turns, session.settings, models).encode("utf-8"))
                self._hold(held(file))
        except OSError as error:
            told, self._has_failed = self._has_failed, True
            return "" if told else f"the conversation is not kept: {path.parent} cannot be written: {error.strerror}"
        self.path, self._kept, self._system = path, turns, system
        return ""

    def _hold(self, lock: int | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock

    @staticmethod
    def _new_path() -> Path:
        return shelf_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.json"


def _common(turns: tuple[Turn, ...], kept: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns at the beginning of both."""
    return tuple(turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], zip(turns, kept, strict=False)))
