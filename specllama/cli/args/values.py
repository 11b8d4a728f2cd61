"""Values on the command line: what each option allows, checked where it enters.

A `Check` gets the option's name and its text, or its default, which typer passes through it, too. It returns the value,
or raises a UsageError that names the option, what was found and what is allowed.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import Literal

from specllama.base.errors import UsageError
from specllama.base.ranges import AUTO, MAX_DRAFT, either
from specllama.base.ranges import Check as Check
from specllama.base.ranges import real as real
from specllama.base.ranges import whole as whole
from specllama.base.ranges import word as word

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


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


def longest_draft(name: str, text: object) -> int | Literal["auto"]:
    """A number of tokens, or `auto`."""
    value: int | Literal["auto"] = either(AUTO, AUTO, whole(0, MAX_DRAFT))(name, text)
    return value


def several(check: Check) -> Check:
    """Values separated by commas, each checked by `check`, as a tuple without repeats."""

    def parse(name: str, text: object) -> tuple[object, ...]:
        if isinstance(text, tuple):
            return text
        return tuple(dict.fromkeys(check(name, part.strip()) for part in str(text).split(",")))

    return parse


_LONGEST_S = 366 * 24 * 3600


def duration(name: str, text: object) -> float | None:
    """Seconds of a text such as 90, 90s, 10m or 1h30m; None for `none`."""
    if text is None or isinstance(text, float):
        return text
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", str(text))
    seconds = (
        sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if text == "none":
        return None
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"{name} is {text}, expected a time such as 10m, 90s or 1h30m, or none")
    return float(seconds)
