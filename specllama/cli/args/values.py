"""Checks of option values; `base.ranges` and `chat.settings` have the others."""

from __future__ import annotations

import re
from typing import Any

from specllama.base.errors import UsageError
from specllama.base.ranges import AUTO, whole
from specllama.chat import settings

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_MOST_LAYERS = 512  # llama.cpp's own limit
_LONGEST_S = 366 * 24 * 3600


def gpu_layers(name: str, text: object) -> str:
    """A number of layers, `auto` or `all`, as text."""
    if text in (AUTO, "all"):
        return str(text)
    try:
        return str(whole(0, 2**31 - 1)(name, text))  # llama.cpp counts in 32 bits
    except UsageError:
        raise UsageError(f"{name} is {text}, expected a whole number of layers, auto or all") from None


def logit_bias(name: str, text: object) -> str:
    """ID=V in the one spelling that reports use."""
    token, bias = settings.logit_bias(name, text)
    return f"{token}={bias}"


def duration(name: str, text: object) -> float | None:
    """Seconds of a text such as 90, 90s, 10m or 1h30m; None for `none`."""
    if text is None or isinstance(text, float):
        return text
    if text == "none":
        return None
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", str(text))
    hours, minutes, rest = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    seconds = 3600 * hours + 60 * minutes + rest
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"{name} is {text}, expected a time such as 10m, 90s or 1h30m, or none")
    return float(seconds)


def quants(_name: str, text: object) -> Any:
    """A comma list of quantizations."""
    from specllama.llama.quantize import quant_of

    return tuple(dict.fromkeys(quant_of(part.strip()) for part in str(text).split(",")))


def n_tokens(name: str, text: object) -> Any:
    """A number of tokens; 32k is 32000."""
    match = re.fullmatch(r"(\d{1,9})(k?)", str(text).strip().lower())
    number = int(match[1]) * (1000 if match[2] else 1) if match else 0
    if not number:
        raise UsageError(f"{name} is {text}, expected a number of tokens such as 32k or 32000")
    return number


def layers(name: str, text: object) -> Any:
    """A list of layers such as 4,7-9, or auto."""
    if text == AUTO:
        return text
    found: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= _MOST_LAYERS:
            raise UsageError(f"{name} is {text}, expected auto or a list of layers such as 4,7-9 (the first is 0)")
        found += range(first, last + 1)
    return tuple(found)
