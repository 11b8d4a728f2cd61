"""llama.cpp's log: kept in memory for error messages, and passed on to a sink if one is set."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import deque
from collections.abc import Callable
from functools import partial

LogSink = Callable[[str, str], None]  # level ("debug", "info", "warn", "error"), one line without its newline

# llama.cpp's callback gets an int and a string: here the int's lowest byte, which is the level, as bytes.
Receive = ctypes.CFUNCTYPE(None, ctypes.c_char, ctypes.c_char_p)
_TEXT = re.compile(rb"\0(.)([^\0]*)", re.DOTALL)  # a C string holds no null byte; other control bytes are text
_LEVELS = {0: "info", 1: "debug", 2: "info", 3: "warn", 4: "error"}
_CONTINUED = 5  # continues the last text
_FUNCTION_NAME = re.compile(r"^[\w:~]+: ")
# Lines without a reason; they follow the line that has it.
_NO_REASON = re.compile(r"failed to load model|failed to read|failed to initialize the context$")


class LogBook:
    """The last lines that llama.cpp logged.

    `receive` is llama.cpp's callback and must not be Python code: Python runs signal handlers before its next
    instruction, and in a callback of C their exceptions are printed and lost. So it is `max`, which calls its `key`,
    here the `+=` of a bytearray, with a null byte and both arguments; `read` looks at the bytes later.
    """

    def __init__(self, n_lines: int = 200) -> None:
        self.sink: LogSink | None = None
        self._received = bytearray()
        self.receive = Receive(partial(max, b"\0", key=self._received.__iadd__))
        self._lines: deque[tuple[str, str]] = deque(maxlen=n_lines)
        self._level = "info"
        self._open = ""  # an incomplete line

    def read(self) -> None:
        """Add the received texts to the lines, and pass complete lines to the sink, whose errors are dropped."""
        if self._received:
            data = bytes(self._received)
            del self._received[: len(data)]  # another thread may have added more
            for level, text in _TEXT.findall(data):
                self._write(level[0], text.decode("utf-8", "replace"))

    def clear(self) -> None:
        """Delete all lines, so that `reason` is about what follows."""
        self.read()
        self._lines.clear()
        self._open = ""

    def reason(self) -> str:
        """llama.cpp's error messages about the last operation; empty if it logged none."""
        self.read()
        lines = tuple(self._lines)  # another thread may add lines
        errors = [_FUNCTION_NAME.sub("", line).strip() for level, line in lines if level == "error"]
        told = [line for line in errors if not _NO_REASON.search(line)]
        return "; ".join(dict.fromkeys(told or errors))  # each line once, in order

    def _write(self, level: int, text: str) -> None:
        """Add a text, which may end within a line."""
        if level != _CONTINUED:
            self._flush()
            self._level = _LEVELS.get(level, "info")
        *complete, self._open = (self._open + text).split("\n")
        for line in complete:
            self._add(line)

    def _flush(self) -> None:
        if self._open:
            self._add(self._open)
            self._open = ""

    def _add(self, line: str) -> None:
        if not line.strip():
            return
        self._lines.append((self._level, line))
        if self.sink is not None:
            with contextlib.suppress(Exception):
                self.sink(self._level, line)
