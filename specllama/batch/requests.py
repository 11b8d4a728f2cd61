"""The requests of a file, one at a time: JSON lines, lines of text, or the rows of a CSV table."""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from string import Formatter
from typing import Any, BinaryIO, TypeAlias

from specllama.base.disk import size_text
from specllama.base.errors import PromptError, SpecllamaError, UsageError, error_of_request
from specllama.base.jsonable import not_json, parsed, shown
from specllama.base.ranges import sound
from specllama.base.text import counted, decoded
from specllama.chat.conversation import Message
from specllama.chat.format import KINDS, AnswerFormat, given_format
from specllama.chat.settings import MAX_SEED, OTHER_NAMES, SETTINGS, Settings

JSONL, TEXT, CSV = "jsonl", "text", "csv"
INPUT_FORMATS = (JSONL, TEXT, CSV)
ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".txt": TEXT, ".csv": CSV}
MOST_BYTES = 16 << 20  # of a line or row: millions of tokens, more than any context holds

RequestId: TypeAlias = str | int
Value: TypeAlias = tuple[int, bytes, object]  # the number of a line, its bytes, and what it says, or an error

_AFTER_CR = re.compile(rb"(?<=\r)(?=[^\n])")
_FIELDS = ("id", "prompt", "messages", "system", "raw", "params")
_TEXT_FIELDS = ("text", "prompt")  # of a line that is a text, for a template
_FORMATS = tuple(kind.replace("-", "_") for kind in KINDS)
# The keywords of the Python API; other names of these settings work as well.
_PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "repeat_last_n", "logit_bias", "seed", "seed_mode", "max_tokens", "stop", *_FORMATS,
)  # fmt: skip
_SETTING_OF = {name: OTHER_NAMES.get(plain, plain) for name in _PARAMS if (plain := name.replace("_", "-"))}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    n_line: int  # of its first line, from 1
    id: RequestId  # the number of the line if the request has no id
    messages: tuple[Message, ...]
    raw: bool  # the only message is a text to continue, without a chat template
    settings: Settings
    digest: str  # of the prompt and the settings that the request itself names


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request."""

    n_line: int
    error: SpecllamaError
    digest: str  # of its bytes
    id: RequestId | None = None  # as `Asked.id`; None if the line has none that can be used


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """A prompt with the fields of a row in braces, such as "Translate: {text}"."""

    text: str
    parts: tuple[tuple[str, str | None], ...]  # text, and the field that follows it

    @classmethod
    def check(cls, name: str, text: object) -> RowTemplate:
        """The template of an option; a `base.ranges.Check`."""
        text = sound(name, text)
        try:
            found = list(Formatter().parse(text))
        except ValueError as error:
            raise UsageError(f"{name} is {text}: {error}", hint="write {{ and }} for braces") from None
        if not any(field for _, field, *_ in found) or any(form or change for *_, form, change in found):
            raise UsageError(
                f"{name} is {text}, expected a text with fields in braces",
                hint=f'for example {name} "Translate: {{text}}"',
            )
        return cls(text, tuple((literal, field) for literal, field, *_ in found))

    @property
    def fields(self) -> list[str]:
        """The names of its fields, without repeats."""
        return list(dict.fromkeys(field for _, field in self.parts if field is not None))

    def filled(self, row: Mapping[str, object]) -> str:
        """The prompt for a row. Raises UsageError for a field that is missing or no text."""
        texts = []
        for literal, field in self.parts:
            value = "" if field is None else row.get(field)
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                what = f"no field {field}" if value is None else f"{field} is {shown(value)}"
                raise UsageError(f"{what} (expected text or a number, for the template)")
            texts += [literal, str(value)]
        return "".join(texts)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Turns the lines of a file into requests."""

    kind: str  # one of INPUT_FORMATS
    settings: Settings  # of a request that names none; with a seed, line n has that seed plus n - 1
    system: str | None = None  # the system prompt of a request without one
    raw: bool = False
    template: RowTemplate | None = None  # makes the prompt of a row; rows then name settings only in `params`

    def read(self, file: BinaryIO, name: str) -> Iterator[Asked | BadLine]:
        """The requests of a file; empty lines are left out. `name`: of the file, for messages.

        Raises UsageError for a table without the columns that are needed, for a template with another field than
        those of lines of text, and for a file in UTF-16.
        """
        fields = self.template.fields if self.kind == TEXT and self.template is not None else ()
        if missing := next((field for field in fields if field not in _TEXT_FIELDS), None):
            raise UsageError(f"a line of text has no field {missing}", hint=f"it has: {', '.join(_TEXT_FIELDS)}")
        line_of: dict[RequestId, int] = {}
        for n_line, data, value in self._values(file, name):
            own: RequestId | None = None
            try:
                if isinstance(value, SpecllamaError):
                    raise value
                row = self._row(value)
                given = row.get("id", n_line)
                found = n_line if given == "" and self._has_rows else _id(given)
                if found in line_of:
                    raise UsageError(
                        f"the id {shown(found)} is already that of line {line_of[found]}",
                        hint="give every request its own id; without one, the number of its line is the id",
                    )
                own, line_of[found] = found, n_line
                asked = self._asked(n_line, found, row)
            except Exception as error:
                yield BadLine(n_line, error_of_request(error), _digest(data), own)
            else:
                yield asked

    def _values(self, file: BinaryIO, name: str) -> Iterator[Value]:
        lines = _lines(file, name)
        if self.kind == CSV:
            return self._rows(lines, name)
        return _texts(lines) if self.kind == TEXT else _objects(lines)

    def _rows(self, lines: Iterable[tuple[int, bytes]], name: str) -> Iterator[Value]:
        """The rows of a table as objects; lines end with LF, CRLF or CR.

        After a row with an error, reading goes on with the next line. A quote that is not closed takes the lines up to
        the next quote, the end or MOST_BYTES into its row.
        """
        csv.field_size_limit(3 * MOST_BYTES)  # more than a row can have
        ends = (piece for _, line in lines for piece in ([line] if len(line) > MOST_BYTES else _AFTER_CR.split(line)))
        waiting = bytearray()  # the lines of the next row

        def text() -> str:
            """The next line. An error here does not end the iterator, as it would end a generator."""
            if len(waiting) > MOST_BYTES:
                raise csv.Error(f"a quote is not closed within {size_text(MOST_BYTES)}")
            line = next(ends, b"")
            waiting.extend(line)
            return line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")

        table, header = csv.reader(iter(text, ""), strict=True), list[str]()
        while True:
            first = table.line_num + 1
            waiting.clear()
            cells, wrong = list[str](), ""
            try:
                cells = next(table)
            except StopIteration:
                return
            except csv.Error as error:
                wrong = "a quote is not closed" if str(error) == "unexpected end of data" else str(error)
            data, last = bytes(waiting), table.line_num
            if len(data) > MOST_BYTES and (last == first or not wrong):
                wrong = str(_too_long())
            if wrong and not header:
                raise UsageError(f"the first line of {name} is not CSV: {wrong}")
            if wrong:
                what = "not CSV" if last == first else f"lines {first} to {last} are no row of CSV"
                yield first, data, PromptError(f"{what}: {wrong}")
            elif not cells:  # an empty line
                continue
            elif not header:
                header = self._header(cells, name)
            elif len(cells) != len(header):
                found = counted(len(cells), "cell")
                yield first, data, PromptError(f"{found}, expected {len(header)} as in the first line")
            else:
                yield first, data, dict(zip(header, cells, strict=True))

    def _header(self, cells: list[str], name: str) -> list[str]:
        """The columns of a table. Raises UsageError."""
        columns = [sound(f"the first line of {name}", cell).strip() for cell in cells]
        if twice := next((column for column in columns if columns.count(column) > 1), None):
            raise UsageError(f"{name} has two columns {twice}, expected different names in its first line")
        needed = ["prompt"] if self.template is None else self.template.fields
        if missing := next((column for column in needed if column not in columns), None):
            hint = f"it has: {', '.join(columns)}"
            if self.template is None:
                hint += f'; to make prompts of them: --template "Translate: {{{columns[0]}}}"'
            raise UsageError(f"{name} has no column {missing}", hint=hint)
        return columns

    @property
    def _has_rows(self) -> bool:
        """True if requests are rows of data, not objects with settings."""
        return self.template is not None or self.kind == CSV

    def _row(self, value: object) -> dict[str, object]:
        """The fields that a value has. Raises PromptError."""
        if isinstance(value, str):
            return dict.fromkeys(("prompt",) if self.template is None else _TEXT_FIELDS, value)
        if not isinstance(value, dict):
            raise PromptError(f"found {shown(value)}, expected a text or an object")
        return {key: item for key, item in value.items() if item is not None}

    def _asked(self, n_line: int, id_: RequestId, row: dict[str, object]) -> Asked:
        """The request that fields say. Raises SpecllamaError."""
        params = row.pop("params", {}) if self.kind == JSONL else {}
        if not isinstance(params, dict):
            raise PromptError(f"params is {shown(params)}, expected an object")
        if misplaced := next((name for name in _FIELDS if name in params), None):
            raise UsageError(
                f"params has the field {misplaced}, expected settings", hint=f"write {misplaced} beside params"
            )
        inner = frozenset(params)
        if self.template is not None:
            row = {**row, "prompt": self.template.filled(row)}
            row.pop("messages", None)
        asked = {name: row.pop(name) for name in _FIELDS if name in row}
        if self._has_rows:
            asked = {name: asked[name] for name in ("prompt", "system") if asked.get(name, "") != ""}
        else:
            params = {**row, **params}
        messages = _messages(asked)
        raw = self.raw if "raw" not in asked else _typed("raw", asked["raw"], bool, "true or false")
        system = messages[0].role == "system"
        if raw and (len(messages) > 1 or messages[0].role != "user"):
            raise PromptError("a raw request has a system prompt or several messages, expected one text")
        if not raw and not system and self.system is not None:
            messages = (Message("system", self.system), *messages)
        own = self.settings
        if own.seed >= 0:
            own = replace(own, seed=(own.seed + n_line - 1) % (MAX_SEED + 1))
        key = json.dumps([[(each.role, each.content) for each in messages], raw, params], sort_keys=True, default=str)
        return Asked(n_line, id_, messages, raw, _changed(own, params, inner), _digest(key.encode()))


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines and their numbers from 1, with their ends; of a longer line than MOST_BYTES, one byte more."""
    n_line = 0
    while line := file.readline(MOST_BYTES + 1):
        n_line += 1
        if n_line == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            decoded(line, name, UsageError)
        yield n_line, line
        while len(line) > MOST_BYTES and not line.endswith(b"\n"):  # the rest of a line that is too long
            line = file.readline(MOST_BYTES + 1)


def _texts(lines: Iterable[tuple[int, bytes]]) -> Iterator[Value]:
    """The text of each line that is not empty."""
    for n_line, data in lines:
        value: object
        try:
            value = _too_long() if len(data) > MOST_BYTES else decoded(data.rstrip(b"\r\n"), "the line", PromptError)
        except PromptError as error:
            value = error
        if isinstance(value, SpecllamaError) or str(value).strip():
            yield n_line, data, value


def _objects(lines: Iterable[tuple[int, bytes]]) -> Iterator[Value]:
    """The JSON value of each line that is not empty."""
    for n_line, data, text in _texts(lines):
        value = text
        if isinstance(text, str):
            try:
                value = parsed(text)
            except json.JSONDecodeError as error:
                value = PromptError(not_json(error))
            except ValueError:  # nested too deeply; a number with more digits than Python reads
                value = PromptError("not JSON that can be read")
        yield n_line, data, value


def _too_long() -> PromptError:
    return PromptError(f"the line has more than {size_text(MOST_BYTES)} (expected a text that fits a context)")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _typed(name: str, value: object, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise PromptError(f"{name} is {shown(value)}, expected {expected}")
    return value


def _id(value: object) -> RequestId:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PromptError(f"id is {shown(value)}, expected text or a whole number")
    return sound("id", value) if isinstance(value, str) else value


def _messages(asked: Mapping[str, object]) -> tuple[Message, ...]:
    """The messages of a request, its system prompt first. Raises PromptError and UsageError."""
    if ("prompt" in asked) == ("messages" in asked):
        found = "prompt and messages" if "prompt" in asked else "neither prompt nor messages"
        raise PromptError(f"found {found}, expected one of them")
    system = [Message("system", _typed("system", asked["system"], str, "text"))] if "system" in asked else []
    if "prompt" in asked:
        prompt = _typed("prompt", asked["prompt"], str, "text")
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        return (*system, Message("user", prompt))
    listed = _typed("messages", asked["messages"], list, "a list of messages")
    for each in listed:
        if not isinstance(each, dict) or sorted(each) != ["content", "role"]:
            raise PromptError(f'a message is {shown(each)}, expected {{"role": ..., "content": ...}}')
    if not listed:
        raise PromptError("messages is empty, expected at least one message")
    return (*system, *(Message(each["role"], each["content"]) for each in listed))


def _changed(settings: Settings, params: Mapping[str, object], inner: frozenset[str]) -> Settings:
    """`settings` with those of a request, checked as the options are. Raises UsageError. `inner`: names in `params`."""
    given = {name: value for name, value in params.items() if value is not None}
    forms = {name: given.pop(name) for name in _FORMATS if name in given}
    if forms:
        form = _known_format(json.dumps(forms))
        if isinstance(form, UsageError):
            raise form.with_traceback(None)
        settings = replace(settings, format=form)
    for name, value in given.items():
        plain = name.replace("_", "-")
        known = OTHER_NAMES.get(plain, plain)
        if known not in _SETTING_OF.values():
            names = _PARAMS if name in inner else (*_FIELDS, *_PARAMS)
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise UsageError(f"unknown {'setting' if name in inner else 'field'} {name}", hint=hint)
        if known == "stop" and isinstance(value, str):  # JSON has its own escape sequences
            value = [value]
        settings = SETTINGS[known].put(settings, SETTINGS[known].check(name, value))
    return settings


@lru_cache(maxsize=64)
def _known_format(text: str) -> AnswerFormat | UsageError | None:
    """`given_format` of JSON, or its error: requests mostly share a format, and an error takes up to 10 seconds."""
    try:
        return given_format(json.loads(text))
    except UsageError as error:
        return error
