"""Conversations as JSON files: written in one step, and checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Literal

from specllama.base.disk import read_bytes, write_text
from specllama.base.errors import ConversationError, ReportError, UsageError, unreadable
from specllama.base.jsonable import from_plain, parsed
from specllama.base.ranges import sound, whole
from specllama.base.text import decoded
from specllama.chat import settings as setting_table
from specllama.chat.session import ChatSession, Turn
from specllama.chat.settings import MAX_SEED, Settings
from specllama.core.events import Reason

SCHEMA = "specllama.chat"
VERSION = 1
_EXPECTED = "expected a file that `/save FILE` wrote in a chat"


@dataclass(frozen=True, slots=True)
class _Schema:
    name: Literal["specllama.chat"]
    version: Literal[1]


@dataclass(frozen=True, slots=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: str
    seed: int = 0  # of an answer, like the reason
    finish_reason: Reason = "stop"

    def __post_init__(self) -> None:
        sound("content", self.content)
        whole(0, MAX_SEED)("seed", self.seed)


@dataclass(frozen=True, slots=True)
class _File:
    schema: _Schema
    settings: Mapping[str, object]
    messages: tuple[_Message, ...]
    models: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a file."""

    system: str
    turns: tuple[Turn, ...]
    settings: Settings
    models: Mapping[str, object]  # names, for information only


def packed(system: str, turns: Iterable[Turn], settings: Settings, models: Mapping[str, object]) -> str:
    """A conversation as the text of a file."""
    messages: list[dict[str, object]] = []
    if system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        answer = {"role": "assistant", "content": turn.answer, "seed": turn.seed, "finish_reason": turn.reason}
        messages += [{"role": "user", "content": turn.user}, answer]
    data = {
        "schema": {"name": SCHEMA, "version": VERSION},
        "models": dict(models),
        "settings": setting_table.to_json(settings),
        "messages": messages,
    }
    text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    return text.encode("utf-8", "replace").decode()  # the name of a model file may hold any bytes


def save(path: Path, session: ChatSession, models: Mapping[str, object]) -> None:
    """Write the conversation; an existing file is replaced in one step. Raises ConversationError."""
    try:
        if not path.parent.is_dir():
            raise ConversationError(f"the folder {path.parent} does not exist", hint="make it, or name another file")
        write_text(path, packed(session.system, session.turns, session.settings, models))
    except OSError as error:
        raise ConversationError(f"{path} cannot be written: {error.strerror}", hint="name another file") from None


def load(path: Path) -> Saved:
    """Read a file. Raises ConversationError with the place of the error."""
    try:
        return _saved(parsed(decoded(read_bytes(path), str(path), ConversationError)))
    except OSError as error:
        raise unreadable(path, error, ConversationError, "a saved chat") from None
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}: {error.msg.removesuffix(' at')}"
    except (ValueError, UsageError, ReportError) as error:
        reason = str(error)
    raise ConversationError(f"{path} is damaged or not a saved chat: {reason}", hint=_EXPECTED)


def _saved(data: object) -> Saved:
    file = from_plain(_File, data, "the file")
    first = 1 if file.messages and file.messages[0].role == "system" else 0
    said = file.messages[first:]
    for i, (message, role) in enumerate(zip(said, cycle(("user", "assistant"))), first):
        if message.role != role:
            raise UsageError(f"messages[{i}].role is {message.role!r}, expected {role!r}")
    if len(said) % 2:
        raise UsageError(f"messages[{len(file.messages) - 1}] has no answer after it")
    turns = tuple(
        Turn(user.content, answer.content, answer.seed, answer.finish_reason)
        for user, answer in zip(said[::2], said[1::2], strict=True)
    )
    return Saved(file.messages[0].content if first else "", turns, _settings(file.settings), file.models)


def _settings(data: Mapping[str, object]) -> Settings:
    settings = Settings()
    for name, value in data.items():
        try:
            settings = setting_table.from_json({name: value}, settings)
        except UsageError as error:
            raise UsageError(f"settings.{name}: {error}") from None
    return settings
