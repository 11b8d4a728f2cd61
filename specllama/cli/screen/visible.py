"""Text from files, models and networks made visible: it can neither control the screen nor hide in it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

# A hidden character stays where a script or an emoji needs it. Only the characters before it decide, so that text which
# streams never waits.
_ALWAYS = (  # C0 without newline and tab, DEL, C1, fillers, separators, bidirectional, surrogates, other formats
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u115f\u1160\u17b4\u17b5\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\ud800-\udfff\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e001f\U000e0080-\U000e00ff\U000e01f0-\U000e0fff"
)
_RIGHT_TO_LEFT = "\u0590-\u061b\u061d-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001eeff"
_JOINING = _RIGHT_TO_LEFT + "\u0900-\u109f\u1700-\u180d\u180f-\u1cff\ua800-\uabff\U00011000-\U00011fff"  # Indic, Thai
_SYMBOL = "\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001fbff"  # also emoji
_IDEOGRAPH = "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TAG = "[\U000e0020-\U000e007f]"
N_BEFORE = 16  # characters before a character that decide whether it stays
_NOT_IN_A_FLAG = "".join(f"(?<!\U0001f3f4{_TAG * n})" for n in range(1, 7))  # five letters of a region, and the end
_NOT_RIGHT_TO_LEFT = "".join(f"(?<![{_RIGHT_TO_LEFT}].{{{n}}})" for n in range(1, N_BEFORE + 1))  # marks follow figures
HIDDEN = re.compile(
    f"[{_ALWAYS}]"
    f"|[\u034f\u180e\u200b\u200c](?<![{_JOINING}].)"
    f"|\u200d(?<![{_JOINING}{_SYMBOL}\ufe0f].)"
    f"|[\u061c\u200e\u200f]{_NOT_RIGHT_TO_LEFT}"
    f"|[\ufe00-\ufe0f](?<![{_JOINING}{_SYMBOL}{_IDEOGRAPH}0-9#*].)"
    f"|[\U000e0100-\U000e01ef](?<![{_IDEOGRAPH}].)"
    f"|{_TAG}{_NOT_IN_A_FLAG}"
)


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str, before: str = "") -> str:
    """`text`, which follows `before`, with control and hidden characters as \\xNN or \\uNNNN."""
    n = len(before)
    return HIDDEN.sub(lambda found: _spelled(found[0]) if found.start() >= n else found[0], before + text)[n:]


def in_one_line(text: str) -> str:
    """`visible`, with line breaks and tabs spelled out as well."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


_COMMAND = re.compile("`[^`]+`|(?<=: )(?:specllama|pip) .+")
_NO_BREAK = "\xa0"


def wrapped(text: str, width: int) -> str:
    """Visible lines of at most `width` columns; 0 = one line.

    Paths and commands stay whole, so that they can be copied: the terminal wraps a longer one without a line break.
    """
    text = in_one_line(text)
    if not width:
        return text
    text = _COMMAND.sub(lambda command: command[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_NO_BREAK, " ")


class Raw(str):
    """Text that `Stream.write` leaves as it is: our own escape sequences, and data for a pipe.

    What is added to it or joined by it becomes visible. Other operations give a plain str.
    """

    __slots__ = ()

    @staticmethod
    def of(text: str) -> str:
        return text if isinstance(text, Raw) else visible(text)

    def __add__(self, after: str, /) -> Raw:
        return Raw(str.__add__(self, Raw.of(after)))

    def __radd__(self, before: str, /) -> Raw:
        return Raw(str.__add__(Raw.of(before), self))

    def join(self, parts: Iterable[str], /) -> Raw:
        return Raw(str.join(self, map(Raw.of, parts)))
