"""Values on the command line: what each option allows, checked where it enters.

A `Check` gets the option's name and its text, or its default, which typer passes through it, too. It returns the value,
or raises a UsageError that names the option, what was found and what is allowed.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from specllama.errors import UsageError

Check: TypeAlias = Callable[[str, object], Any]

MAX_DRAFT = 64  # longest draft that may be asked for
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _in_words(noun: str, low: float, high: float, open_low: bool) -> str:
    """A range of numbers as a person would say it."""
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
            value = kind(text)
        except (ValueError, OverflowError):
            value = math.nan
        inside = low < value <= high if open_low else low <= value <= high
        if value != special and not (inside and math.isfinite(value)):
            raise UsageError(f"{name} is {text}, expected {allowed}")
        return value

    return check


def whole(low: int, high: float = math.inf, *, special: int | None = None) -> Check:
    """A whole number from `low` to `high`, or `special`."""
    return _number(int, "a whole number", low, high, False, special)


def real(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False) -> Check:
    """A number from `low` (or above it) to `high`."""
    return _number(float, "a number", low, high, open_low, None)


def word(*words: str) -> Check:
    """One of `words`."""

    def check(name: str, text: object) -> str:
        if text not in words:
            raise UsageError(f"{name} is {text}, expected one of {', '.join(words)}")
        return str(text)

    return check


def gpu_layers(name: str, text: object) -> str:
    """A number of layers, `auto` or `all`; as text."""
    if text in ("auto", "all"):
        return str(text)
    try:
        return str(whole(0)(name, text))
    except UsageError:
        raise UsageError(f"{name} is {text}, expected a whole number of layers, auto or all") from None


def stop_string(name: str, text: object) -> str:
    r"""A stop string; the escape sequences \n, \t, \r, \\, \xNN and \uNNNN are understood."""
    try:
        # Whatever latin-1 cannot hold becomes an escape sequence first, so that only escape sequences are decoded.
        stop = codecs.decode(str(text).encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError:
        raise UsageError(
            f"{name} {text} holds an escape sequence that cannot be read", hint=r"write \\ for a backslash"
        ) from None
    if not stop:
        raise UsageError(f"{name} is empty, expected at least one character")
    return stop


def logit_bias(name: str, text: object) -> str:
    """ID=V, checked; ID+V and ID-V, llama.cpp's spelling, become ID=V."""
    match = re.fullmatch(r"(\d+)=?(.+)", str(text))
    try:
        bias = float(match[2]) if match else math.nan
    except ValueError:
        bias = math.nan
    if match is None or math.isnan(bias) or bias == math.inf:
        raise UsageError(
            f"{name} is {text}, expected ID=V with a token's id and a number",
            hint="for example 15043=-5, or 15043=-inf to forbid the token",
        )
    return f"{match[1]}={bias}"


def strategies(name: str, text: object) -> str:
    """A comma list of strategies that exist, or `auto`; aliases become the names themselves."""
    from specllama.drafters import ALIASES, REGISTRY

    names = [ALIASES.get(part.strip(), part.strip()) for part in str(text).split(",")]
    for found in names:
        if found != "auto" and found not in REGISTRY:
            known = "; ".join(f"{key} ({strategy.summary})" for key, strategy in REGISTRY.items())
            raise UsageError(f"{name} {found} is no strategy of this version", hint=f"there are: auto; {known}")
    if "auto" in names and len(names) > 1:
        raise UsageError(f"{name} auto stands for every strategy, so nothing can stand beside it")
    return ",".join(dict.fromkeys(names))


def longest_draft(name: str, text: object) -> int:
    """A number of tokens. Choosing it by itself belongs to a later version, and says so."""
    if text == "auto":
        raise UsageError(
            f"{name} auto is not in this version", hint=f"give a number from 0 to {MAX_DRAFT}; 0 drafts nothing"
        )
    return int(whole(0, MAX_DRAFT)(name, text))
