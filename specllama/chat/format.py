"""The format of an answer: a JSON schema, a grammar or a regular expression, checked before a model is loaded.

llguidance recurses without a limit through references and rules, which can end the process, and works for minutes on
some formats without a look at signals. So a format of more than `_MAX_SMALL` bytes is checked in a child process first.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specllama.base import child
from specllama.base.errors import BackendError, UsageError
from specllama.base.signals import held
from specllama.base.text import counted, decoded, figure
from specllama.chat.endless import Lark, endless_schema

if TYPE_CHECKING:
    from llguidance import LLTokenizer

JSON_SCHEMA, GRAMMAR, REGEX = "json-schema", "grammar", "regex"
KINDS = (JSON_SCHEMA, GRAMMAR, REGEX)
MAX_BYTES = 256 * 1024
# Too short to fill 1 MB of stack: a reference in a chain has at least 24 bytes and takes 7 KB, a rule 6 and 2 KB.
_MAX_SMALL = 2048
_MAX_SECONDS = 10.0
_MAX_MEMORY = 1_000_000_000  # bytes, where the system enforces it
# Less than a thread of the parent has, which compiles the format again: 8 MB on Linux and macOS, 2 MB on Windows.
_STACK = 1_000_000 if sys.platform == "win32" else 4_000_000
SHOWN = 40  # characters, where a format is named
# As `json.dumps` writes it. Free whitespace would leave little to force, and need not end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HINTS = {
    JSON_SCHEMA: "see docs/guide.md for the keywords that work",
    GRAMMAR: "GBNF begins with `root ::=`, a Lark grammar with `start:`",
    REGEX: "without look-around and back references; it must match the whole answer",
}

_SOURCES = {
    JSON_SCHEMA: ("a JSON schema or the file of one", "schema.json"),
    GRAMMAR: ("the file of a GBNF or Lark grammar", "grammar.gbnf"),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer must look like. Made by `format_of`, which checks it."""

    kind: str  # one of KINDS
    text: str  # the schema, the grammar or the expression itself
    rules: str  # the same for llguidance

    def to_json(self) -> dict[str, str]:
        """As in records and saved chats."""
        return {self.kind.replace("-", "_"): self.text}

    def fits(self, text: str) -> bool:
        """Is `text` a whole answer in this format? One that was cut usually is not."""
        from llguidance import LLMatcher

        matcher = LLMatcher(_byte_tokenizer(), self.rules, log_level=0, limits=limits())
        data = list(text.encode("utf-8", "surrogatepass"))
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    def __str__(self) -> str:
        """On one line; a long text is cut."""
        text = " ".join(self.text.split())
        return f"{self.kind} {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


@lru_cache(maxsize=64)  # a check can take seconds, and many answers share a format
def format_of(kind: str, text: str, name: str = "") -> AnswerFormat:
    """A checked format; `name` is that of the option.

    Raises UsageError if it is no schema, grammar or expression, uses what is not supported, or fits no text at all.
    """
    name = name or kind
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise UsageError(
            f"{name} has {counted(size, 'byte')}, expected at most {figure(MAX_BYTES)}",
            hint="shorten it: repeated parts of a schema can stand in $defs once",
        )
    if size > _MAX_SMALL:
        return _checked_apart(kind, text, name)
    with held():  # llguidance calls our tokenizer, and takes what a handler raises there for a bad format
        return _checked(kind, text, name)


def _checked_apart(kind: str, text: str, name: str) -> AnswerFormat:
    """`_checked` in a child process, whose end is a fault of the format."""
    try:
        return child.run(partial(_checked_within, _MAX_SECONDS, kind, text, name), lambda *_: None)
    except BackendError:
        raise UsageError(
            f"{name} takes too much work (expected at most {_MAX_SECONDS:g} seconds, "
            f"{_MAX_MEMORY // 1_000_000_000} GB of memory and shallow recursion)",
            hint="simplify it: fewer optional parts, and shorter chains of references or rules",
        ) from None


def _checked_within(limit_s: float, kind: str, text: str, name: str, _tell: object) -> AnswerFormat:
    """`_checked`, which may end this process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the last words of a crash
    faulthandler.dump_traceback_later(limit_s, exit=True)  # needs no interpreter
    with suppress(ImportError, ValueError, OSError):  # no such limits, or lower ones already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    threading.stack_size(_STACK // 4096 * 4096)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_checked, kind, text, name).result()


def _checked(kind: str, text: str, name: str) -> AnswerFormat:
    try:
        rules = _RULES[kind](text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not valid: {_first_line(error)}", hint=_HINTS[kind]) from None
    _require_usable(name, kind, text, rules)
    return AnswerFormat(kind, text, rules)


def given_format(fields: Mapping[str, object]) -> AnswerFormat | None:
    """The format that the fields `json_schema`, `grammar` and `regex` give; other fields, and None, do not count.

    A schema is a text or the JSON itself. Raises UsageError for several of them, and as `format_of` does.
    """
    given = [(kind, kind.replace("-", "_")) for kind in KINDS if fields.get(kind.replace("-", "_")) is not None]
    if len(given) > 1:
        raise UsageError(f"{given[0][1]} and {given[1][1]} exclude each other", hint="give one of them")
    for kind, name in given:
        text = fields[name]
        if kind == JSON_SCHEMA and not isinstance(text, str):
            try:
                text = json.dumps(text)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{name} is no JSON: {error}") from None
        if not isinstance(text, str):
            raise UsageError(f"{name} is {text!r}, expected a text")
        return format_of(kind, text, name)
    return None


def read_format(kind: str, source: str, name: str = "") -> AnswerFormat:
    """A format from a file, or from `source` itself: an expression, or a schema that begins with a brace."""
    name = name or kind
    if kind == REGEX or (kind == JSON_SCHEMA and source.lstrip()[:1] in ("{", "[")):
        return format_of(kind, source, name)
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
            size = path.stat().st_size
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what, example = _SOURCES[kind]
        raise UsageError(
            f"{name} {source} cannot be read: {reason} (expected {what})", hint=f"for example: {name} {example}"
        ) from None
    if size > MAX_BYTES:
        raise UsageError(
            f"{name} {source} has {counted(size, 'byte')}, expected at most {figure(MAX_BYTES)}",
            hint="shorten it: repeated parts of a schema can stand in $defs once",
        )
    name = f"{name} {source}"
    return format_of(kind, decoded(data, name, UsageError), name)


def option_format(kind: str, name: str, value: object) -> AnswerFormat:
    """`read_format` as a `base.ranges.Check` of one kind."""
    return value if isinstance(value, AnswerFormat) else read_format(kind, str(value), name)


def check_format(name: str, value: object) -> AnswerFormat | None:
    """`none`, `KIND FILE-or-text` as typed, or the mapping of a file; a `base.ranges.Check`."""
    if value is None or isinstance(value, AnswerFormat):
        return value
    if isinstance(value, Mapping):
        kind, text = next(iter(value.items()), ("", ""))
        kind = str(kind).replace("_", "-")
        if len(value) == 1 and kind in KINDS and isinstance(text, str):
            return format_of(kind, text)
    elif str(value).strip() == "none":
        return None
    else:
        kind, _, source = str(value).strip().partition(" ")
        if kind in KINDS and source.strip():
            return read_format(kind, source.strip())
    raise UsageError(
        f"{name} is {value}, expected json-schema FILE, grammar FILE, regex R, or none",
        hint="for example: json-schema schema.json",
    )


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _json_rules(text: str) -> str:
    from llguidance import LLMatcher

    if not isinstance(json.loads(text), dict):
        raise ValueError("a schema is a JSON object")
    return LLMatcher.grammar_from_json_schema(text, _LAYOUT)  # type: ignore[arg-type]


def _grammar_rules(text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # of many kinds
        raise ValueError(str(error)) from None


def _dead_terminal(grammar: Lark) -> str:
    """A terminal that no text fits; an empty text without one."""
    from llguidance import LLMatcher

    rules = LLMatcher.grammar_from_lark(grammar.chooser())
    matcher = LLMatcher(_byte_tokenizer(), rules, log_level=0, limits=limits())
    for i, terminal in enumerate(grammar.used):
        matcher.reset()
        matcher.try_consume_tokens(list(f"{i:06}".encode()))
        matcher.compute_bitmask()
        if matcher.is_error():
            return terminal if "NoExtension" in matcher.get_error() else ""
    return ""


def _require_whole(name: str, kind: str, text: str) -> None:
    """Raises UsageError for a part that cannot end or a terminal that nothing fits, although other parts are well."""
    from llguidance.gbnf_to_lark import any_to_lark

    endless = dead = ""
    if kind == JSON_SCHEMA:
        endless = endless_schema(json.loads(text))
    elif kind == GRAMMAR:
        try:
            grammar = Lark(lark := any_to_lark(text))
        except ValueError as error:
            raise UsageError(f"{name} cannot be used: {error}", hint=_HINTS[kind]) from None
        endless, dead = grammar.endless, _dead_terminal(grammar)
        if endless == "start" and lark != text:  # its name in GBNF
            endless = "root"
    if endless:
        raise UsageError(
            f"{name} has a part that no text can end: {endless[:SHOWN]}",
            hint="give it an alternative without itself, or make it optional",
        )
    if dead:
        raise UsageError(
            f"{name} has a part that no text fits: {dead[:SHOWN]}",
            hint="look for expressions that contradict each other",
        )


def _regex_rules(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


_RULES: dict[str, Callable[[str], str]] = {JSON_SCHEMA: _json_rules, GRAMMAR: _grammar_rules, REGEX: _regex_rules}


class _Bytes:
    """A vocabulary of single bytes: shows without a model whether any text fits."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes((byte,)) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _require_usable(name: str, kind: str, text: str, rules: str) -> None:
    """Raises UsageError for rules that llguidance refuses or supports only in part, or that have no whole text."""
    from llguidance import LLMatcher

    _, found = LLMatcher.validate_grammar_with_warnings(rules, limits=limits())
    if found:  # warnings as well: an ignored keyword would not be enforced
        raise UsageError(f"{name} cannot be used: {_described(found[0])}", hint=_HINTS[kind])
    _require_whole(name, kind, text)
    matcher = LLMatcher(_byte_tokenizer(), rules, log_level=0, limits=limits())
    matcher.compute_bitmask()
    if not matcher.is_error() and (forced := matcher.compute_ff_bytes()):
        matcher.try_consume_tokens(list(forced))
        matcher.compute_bitmask()
    found_none = matcher.is_stopped() and not matcher.is_accepting() and not matcher.is_error()
    if found_none or "NoExtension" in matcher.get_error():
        raise UsageError(
            f"no text fits {name}, or it refers only to itself",
            hint="look for rules that contradict or require themselves",
        )
    if matcher.is_error():
        raise too_much_work(name, matcher.get_error())
    mask = int.from_bytes(matcher.compute_bitmask(), "little") % (1 << 256)
    if mask:  # some attributes of rules, such as max_tokens, exclude rollback, which drafts need
        matcher.try_consume_tokens([(mask & -mask).bit_length() - 1])
        if not matcher.rollback(1):
            raise UsageError(f"{name} cannot be used: {_described(matcher.get_error())}", hint=_HINTS[kind])


def too_much_work(name: str, found: str) -> UsageError:
    """The error for a matcher that stopped at a limit of llguidance, with what it says."""
    return UsageError(
        f"{name} takes too much work: {_described(found)}",
        hint="simplify it: fewer alternatives, and no long chains of optional parts",
    )


def _described(message: str) -> str:
    """The cause in a message of llguidance, without the excerpts of the grammar around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines or ["unknown"])[0][:200]


def limits() -> Any:
    """llguidance's own, with short messages."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)
