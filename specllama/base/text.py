"""Text: bytes that should be text."""

from __future__ import annotations

import codecs

from specllama.base.errors import SpecllamaError


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
