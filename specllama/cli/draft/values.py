"""What the options of `specllama draft` allow, checked where they enter. None is the default;  is refused elsewhere."""

from __future__ import annotations

import re
from typing import Any

from specllama.base.errors import UsageError

_MOST_LAYERS = 512  # llama.cpp's own limit


def quants(_name: str, text: object) -> Any:
    """A comma list of quantisations."""
    from specllama.llama.quantize import quant_of

    if not text:
        return text
    return tuple(dict.fromkeys(quant_of(part.strip()) for part in str(text).split(",")))


def n_tokens(name: str, text: object) -> Any:
    """A number of tokens; 32k is 32000."""
    if not text:
        return text
    match = re.fullmatch(r"(\d{1,9})(k?)", str(text).strip().lower())
    number = int(match[1]) * (1000 if match[2] else 1) if match else 0
    if not number:
        raise UsageError(f"{name} is {text}, expected a number of tokens such as 32k or 32000")
    return number


def layers(name: str, text: object) -> Any:
    """A list of layers such as 4,7-9, or auto."""
    if not text or text == "auto":
        return text
    found: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= _MOST_LAYERS:
            raise UsageError(f"{name} is {text}, expected auto or a list of layers such as 4,7-9 (the first is 0)")
        found += range(first, last + 1)
    return tuple(found)
