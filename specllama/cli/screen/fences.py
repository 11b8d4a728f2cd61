"""Which lines of Markdown are the fences of code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Backticks with another backtick behind them in the line are inline code.
_OPENS = re.compile(r"( *)(`{3,}|~{3,})((?<=`)[^`\n]*|(?<=~)[^\n]*)")
_MAY_OPEN = re.compile(r" *(`{0,2}|~{0,2}|`{3,}[^`\n]*|~{3,}[^\n]*)")
_CLOSES = re.compile(r"( *)(`{3,}|~{3,})[ \t\r]*")
_MAY_CLOSE = re.compile(r" *(`*|~*)[ \t\r]*")
_LIST_MARK = re.compile(r" *(?:[-*+]|\d{1,9}[.)]) +")
_LONGEST = 200  # characters of a fence's line: it is held until it ends
_MOST_INDENT = 3  # of a fence, from the text of its list item; more is indented code


@dataclass(slots=True)
class Fences:
    """Follows the lines of an answer. Source: CommonMark 0.31, 4.5 and 5.2."""

    mark: str = ""  # the fence that opened the block; empty outside
    indent: int = 0  # its spaces, which are not part of the code
    info: str = ""  # what follows it, such as the language; stays after the block
    _content: int = 0  # where the text of the list item begins

    def may_be_fence(self, start: str) -> bool:
        """True if a line that begins with `start` can open or close the block."""
        return len(start) <= _LONGEST and bool((_MAY_CLOSE if self.mark else _MAY_OPEN).fullmatch(start))

    def take(self, line: str) -> bool:
        """Take the next line, without its newline; True if it is a fence."""
        found = (_CLOSES if self.mark else _OPENS).fullmatch(line) if len(line) <= _LONGEST else None
        if found and len(found[1]) <= self._content + _MOST_INDENT and found[2].startswith(self.mark):
            if self.mark:
                self.mark = ""
            else:
                self.indent, self.mark, self.info = len(found[1]), found[2], found[3]
            return True
        if not self.mark and line.strip():
            item = _LIST_MARK.match(line)
            self._content = item.end() if item else min(self._content, len(line) - len(line.lstrip(" ")))
        return False
