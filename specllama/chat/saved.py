"""Conversations as JSON files: written in one step, and checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from specllama.base.disk import read_bytes, write_text
from specllama.base.errors import ConversationError, UsageError
from specllama.base.jsonable import parsed
from specllama.base.ranges import sound
from specllama.base.text import decoded
from specllama.chat import settings as setting_table
from specllama.chat.session import ChatSession, Turn
from specllama.chat.settings import MAX_SEED, Settings
from specllama.core.events import Reason

SCHEMA = "specllama.chat"
VERSION = 1
_REASONS = get_args(Reason)
_EXPECTED = "expected a file that `/save FILE` wrote in a chat"


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a file."""

    system: str
    turns: tuple[Turn, ...]
    settings: Settings
    models: Mapping[str, object]  # names, for information only


def packed(session: ChatSession, models: Mapping[str, object]) -> str:
    """The conversation as the text of a file."""
    messages: list[dict[str, object]] = []
    if session.system:
        messages.append({"role": "system", "content": session.system})
    for turn in session.turns:
        answer = {"role": "assistant", "content": turn.answer, "seed": turn.seed, "finish_reason": turn.reason}
        messages += [{"role": "user", "content": turn.user}, answer]
    data = {
        "schema": {"name": SCHEMA, "version": VERSION},
        "models": dict(models),
        "settings": setting_table.to_json(session.settings),
        "messages": messages,
    }
    text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    return text.encode("utf-8", "replace").decode()  # the name of a model file may hold any bytes


def save(path: Path, session: ChatSession, models: Mapping[str, object]) -> None:
    """Write the conversation; an existing file is replaced in one step. Raises ConversationError."""
    try:
        if not path.parent.is_dir():
            raise ConversationError(f"the folder {path.parent} does not exist")
        write_text(path, packed(session, models))
    except OSError as error:
        raise ConversationError(f"{path} cannot be written: {error.strerror}") from None


def load(path: Path) -> Saved:
    """Read a file. Raises ConversationError with the place of the error."""
    try:
        return _saved(parsed(decoded(read_bytes(path), str(path), ConversationError)))
    except OSError as error:
        raise ConversationError(
            f"{path} cannot be read: {error.strerror}", hint="" if path.exists() else "is the name right?"
        ) from None
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except (ValueError, UsageError) as error:
        reason = str(error)
    raise ConversationError(f"{path} is damaged or not a saved chat: {reason}", hint=_EXPECTED)


def _saved(data: object) -> Saved:
    top = _typed(data, dict, "the file", "a conversation")
    schema = _typed(top.get("schema"), dict, "schema", "its name and version")
    if schema.get("name") != SCHEMA:
        raise UsageError(f"schema.name is {schema.get('name')!r}, expected {SCHEMA!r}")
    if schema.get("version") != VERSION:
        raise UsageError(f"schema.version is {schema.get('version')!r}, expected {VERSION}")
    system, turns = _turns(_typed(top.get("messages"), list, "messages", "a list"))
    models = _typed(top.get("models", {}), dict, "models", "names")
    return Saved(system, tuple(turns), _settings(_typed(top.get("settings"), dict, "settings", "values")), models)


def _typed(value: object, kind: type, where: str, expected: str) -> Any:
    """`value`. Raises UsageError if it is not a `kind`."""
    if not isinstance(value, kind):
        raise UsageError(f"{where} is {_short(value)}, expected {expected}")
    return value


def _short(value: object) -> str:
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _settings(data: Mapping[str, object]) -> Settings:
    settings = Settings()
    for name, value in data.items():
        try:
            settings = setting_table.from_json({name: value}, settings)
        except UsageError as error:
            raise UsageError(f"settings.{name}: {error}") from None
    return settings


def _turns(messages: Sequence[object]) -> tuple[str, list[Turn]]:
    """The system prompt, and the pairs of user message and answer after it."""
    entries = [_typed(message, dict, f"messages[{i}]", "a message") for i, message in enumerate(messages)]
    first = 1 if entries and entries[0].get("role") == "system" else 0
    roles = ["system"] * first + ["user", "assistant"] * ((len(entries) - first + 1) // 2)
    for i, (entry, role) in enumerate(zip(entries, roles, strict=False)):
        if entry.get("role") != role:
            raise UsageError(f"messages[{i}].role is {_short(entry.get('role'))}, expected {json.dumps(role)}")
        where = f"messages[{i}].content"
        sound(where, _typed(entry.get("content"), str, where, "text"))
    if (len(entries) - first) % 2:
        raise UsageError(f"messages[{len(entries) - 1}] has no answer after it")
    turns = [_turn(entries[i]["content"], entries[i + 1], f"messages[{i + 1}]") for i in range(first, len(entries), 2)]
    return (entries[0]["content"] if first else ""), turns


def _turn(user: str, answer: Mapping[str, object], where: str) -> Turn:
    seed = answer.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise UsageError(f"{where}.seed is {_short(seed)}, expected a whole number from 0 to {MAX_SEED}")
    reason = answer.get("finish_reason", "stop")
    if reason not in _REASONS:
        raise UsageError(f"{where}.finish_reason is {_short(reason)}, expected one of {', '.join(_REASONS)}")
    return Turn(user, str(answer["content"]), seed, cast("Reason", reason))
