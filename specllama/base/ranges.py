"""Checks of numbers and words from the command line, a chat, a saved file or the Python API.

A `Check` takes the value's name and its text or default. It returns the value, or raises a UsageError that names what
was found and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from specllama.base.errors import UsageError

AUTO = "auto"  # the program decides
ROLLBACKS = ("truncation", "window", "kept", "saved", "device")  # see llama/rollback.py

MAX_DRAFT = 64
MIN_CTX, MAX_CTX = 16, 2**31 - 1  # llama.cpp counts in 32 bits
MAX_MEMORY_GB = 4096

_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:(?P<port>[0-9]{1,5})")

Check: TypeAlias = Callable[[str, object], Any]


def _in_words(noun: str, low: float, high: float, open_low: bool) -> str:
    if low == -math.inf:
        return noun
    if high == math.inf:
        return f"{noun} above {low:g}" if open_low else f"{noun} of at least {low:g}"
    return f"{noun} from {low} to {high}"


def _number(
    kind: Callable[[Any], float], noun: str, low: float, high: float, open_low: bool, special: float | None
) -> Check:
    """A finite number in a range, or `special`."""
    allowed = _in_words(noun, low, high, open_low) + (f" or {special}" if special is not None else "")

    def check(name: str, text: object) -> float:
        try:
            value = kind(str(text))  # int(3.7) is 3 and int(True) is 1, int of their texts is an error
            is_finite = math.isfinite(value)  # OverflowError: a whole number of hundreds of digits
        except (ValueError, OverflowError):
            value, is_finite = math.nan, False
        inside = low < value <= high if open_low else low <= value <= high
        if value != special and not (inside and is_finite):
            raise UsageError(f"{name} is {text}, expected {allowed}")
        return value

    return check


def whole(low: int, high: float = math.inf, *, special: int | None = None) -> Check:
    """A whole number from `low` to `high`, or `special`."""
    return _number(int, "a whole number", low, high, False, special)


def real(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False) -> Check:
    """A number from `low` (or above it) to `high`."""
    return _number(float, "a number", low, high, open_low, None)


@dataclass(frozen=True, slots=True)
class Word:
    """A check for one of `words`."""

    words: tuple[str, ...]

    def __call__(self, name: str, text: object) -> str:
        if text not in self.words:
            raise UsageError(f"{name} is {text}, expected one of {', '.join(self.words)}")
        return str(text)


def word(*words: str) -> Word:
    """One of `words`."""
    return Word(words)


def sound(name: str, text: object) -> str:
    """Text that UTF-8 can write.

    An argument that Python could not decode has surrogates for its bytes; they are decoded if they are UTF-8. JSON and
    escape sequences allow halves of surrogate pairs.
    """
    try:
        return str(text).encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{name} is not UTF-8 text", hint="check the encoding of its source") from None


def address(name: str, text: object) -> str:
    """HOST:PORT."""
    match = _ADDRESS.fullmatch(str(text))
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(f"{name} is {text}, expected HOST:PORT")
    return str(text)


def either(other: str, meaning: object, check: Check) -> Check:
    """A value that `check` allows, or `other`, the word for `meaning`, or `meaning` itself."""

    def checked(name: str, text: object) -> Any:
        if text in (meaning, other):
            return meaning
        try:
            return check(name, text)
        except UsageError as error:
            raise UsageError(f"{error}, or {other}", hint=error.hint) from None

    return checked


@dataclass(frozen=True, slots=True)
class Several:
    """A check for values separated by commas, each checked by `each`, as a tuple without repeats."""

    each: Check

    def __call__(self, name: str, text: object) -> tuple[object, ...]:
        if isinstance(text, tuple):
            return text
        return tuple(dict.fromkeys(self.each(name, part.strip()) for part in str(text).split(",")))


def several(check: Check) -> Check:
    """Values separated by commas, each checked by `check`, as a tuple without repeats."""
    return Several(check)
