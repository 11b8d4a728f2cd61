"""The clipboard of the terminal, which also works over ssh: OSC 52."""

from __future__ import annotations

from base64 import b64encode

from specllama.base.disk import size_text
from specllama.base.errors import UsageError
from specllama.cli.screen.output import Stream
from specllama.cli.screen.visible import Raw, visible

MOST_BYTES = 74_994 * 3 // 4  # before base64; what the strictest common terminals take (hterm, mosh)


def copy_to_clipboard(text: str, stream: Stream) -> bool:
    """Ask the terminal to copy `text`; False if `stream` is no terminal. A terminal does not say whether it did.

    Raises UsageError for a text that terminals would cut or ignore.
    """
    if not stream.steerable:
        return False
    data = visible(text).encode()  # a pasted escape sequence could act in a shell
    if len(data) > MOST_BYTES:
        raise UsageError(f"{size_text(len(data))} are too much for a terminal's clipboard", hint="/save FILE")
    stream.write(Raw(f"\x1b]52;c;{b64encode(data).decode()}\x07"))
    return True
