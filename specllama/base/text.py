"""Text: counts in sentences, and bytes that should be text."""

from __future__ import annotations

import codecs

from specllama.base.errors import SpecllamaError


def figure(n: int) -> str:
    """A whole number in a sentence: "4096", "81,000"."""
    return str(n) if abs(n) < 10_000 else format(n, ",")


def counted(n: int, noun: str, plural: str = "") -> str:
    """A count and its noun: "1 token", "4096 tokens", "81,000 tokens"; `plural` if it is not the noun with an s."""
    return f"{figure(n)} {noun if n == 1 else plural or noun + 's'}"


def decoded(data: bytes, what: str, error: type[SpecllamaError]) -> str:
    """UTF-8 as text, without a byte order mark. Otherwise raises `error`; its hint names the likely encoding."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as found:
        likely = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise error(
            f"{what} is not UTF-8 text: byte {found.start} is 0x{data[found.start]:02x}",
            hint=f"convert it first, for example: iconv -f {likely} -t UTF-8",
        ) from None
