"""llama.cpp's log: kept in memory, so that a failure can quote its reason, and passed on to a sink, if one is set."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

LogSink = Callable[[str, str], None]  # level ("debug", "info", "warn", "error"), one line without its newline

_LEVELS = {0: "info", 1: "debug", 2: "info", 3: "warn", 4: "error"}
_CONTINUED = 5  # the text goes on where the last one ended
_FUNCTION_NAME = re.compile(r"^[\w:~]+: ")
# Lines that only repeat that something failed, after the line that says why.
_NO_REASON = re.compile(r"failed to load model|failed to read|failed to initialize the context$")


class LogBook:
    """The last lines that llama.cpp logged."""

    def __init__(self, n_lines: int = 200) -> None:
        self.sink: LogSink | None = None
        self.interrupted = False  # Ctrl-C arrived inside the callback, where no exception can pass
        self._lines: deque[tuple[str, str]] = deque(maxlen=n_lines)
        self._level = "info"
        self._open = ""  # the beginning of a line whose newline has not come yet

    def write(self, level: int, text: str) -> None:
        """Take what llama.cpp hands to its log callback: a piece of text that may end within a line."""
        if level != _CONTINUED:
            self._flush()
            self._level = _LEVELS.get(level, "info")
        *complete, self._open = (self._open + text).split("\n")
        for line in complete:
            self._add(line)

    def clear(self) -> None:
        """Forget everything, so that `reason` speaks of what follows."""
        self._lines.clear()
        self._open = ""

    def reason(self) -> str:
        """Why the last operation failed, in llama.cpp's words; empty where it logged no error."""
        lines = tuple(self._lines)  # another model's thread may log meanwhile
        errors = [_FUNCTION_NAME.sub("", line).strip() for level, line in lines if level == "error"]
        told = [line for line in errors if not _NO_REASON.search(line)]
        return "; ".join(dict.fromkeys(told or errors))  # each line once, in order

    def raise_interrupt(self) -> None:
        """Raise the KeyboardInterrupt that could not be raised through llama.cpp's frames, if there was one."""
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
