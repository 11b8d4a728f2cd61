"""llama.cpp's log: kept in memory for error messages, and passed on to a sink if one is set."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

LogSink = Callable[[str, str], None]  # level ("debug", "info", "warn", "error"), one line without its newline

_LEVELS = {0: "info", 1: "debug", 2: "info", 3: "warn", 4: "error"}
_CONTINUED = 5  # continues the last text
_FUNCTION_NAME = re.compile(r"^[\w:~]+: ")
# Lines without a reason; they follow the line that has it.
_NO_REASON = re.compile(r"failed to load model|failed to read|failed to initialize the context$")


class LogBook:
    """The last lines that llama.cpp logged."""

    def __init__(self, n_lines: int = 200) -> None:
        self.sink: LogSink | None = None
        self.interrupted = False  # Ctrl-C arrived inside the callback, where no exception can pass
        self._lines: deque[tuple[str, str]] = deque(maxlen=n_lines)
        self._level = "info"
        self._open = ""  # an incomplete line

    def write(self, level: int, text: str) -> None:
        """Add a text from llama.cpp's log callback, which may end within a line."""
        if level != _CONTINUED:
            self._flush()
            self._level = _LEVELS.get(level, "info")
        *complete, self._open = (self._open + text).split("\n")
        for line in complete:
            self._add(line)

    def clear(self) -> None:
        """Delete all lines, so that `reason` is about what follows."""
        self._lines.clear()
        self._open = ""

    def reason(self) -> str:
        """llama.cpp's error messages about the last operation; empty if it logged none."""
        lines = tuple(self._lines)  # another thread may add lines
        errors = [_FUNCTION_NAME.sub("", line).strip() for level, line in lines if level == "error"]
        told = [line for line in errors if not _NO_REASON.search(line)]
        return "; ".join(dict.fromkeys(told or errors))  # each line once, in order

    def raise_interrupt(self) -> None:
        """Raise the KeyboardInterrupt that arrived inside the callback, if any."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def _flush(self) -> None:
        if self._open:
            self._add(self._open)
            self._open = ""

    def _add(self, line: str) -> None:
        if not line.strip():
            return
        self._lines.append((self._level, line))
        if self.sink is not None:
            self.sink(self._level, line)
