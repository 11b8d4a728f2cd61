"""Renders the chat template of a model file in a child process, within limits of time and memory.

A model file is not trusted. Jinja2's sandbox keeps a template away from Python, but not from endless loops or from
filling the memory, and no list of dangerous names is complete. So one child process (`template_child`) renders all
templates of this process, and its end is an error of the template:

| limit | Linux | macOS, Windows |
|---|---|---|
| time | the parent kills the child | the same |
| memory | the kernel refuses more (RLIMIT_DATA), and the parent looks every 50 ms | the parent looks every 50 ms |

Where only the parent looks, a template can exceed the limit by what it fills in 50 ms. If the parent is killed, an idle
child ends at once and a busy one by its own timer.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Event, RLock, Thread
from time import monotonic
from typing import Any

from specllama.base.disk import size_text
from specllama.base.errors import TemplateError
from specllama.base.jsonable import parsed

HINT = "Use --raw with a prompt that carries its own markers, or another model file."

_MAX_SECONDS = 5.0  # a real template needs milliseconds
_MAX_MEMORY = 512_000_000  # bytes; jinja2 alone takes 20 MB
_START_S = 60.0  # most time until the child is ready; 0.1 s on an idle machine
_LOOK_S = 0.05
_TOO_MUCH = f"needs more than {size_text(_MAX_MEMORY)} of memory, or crashes the process that renders it"


class TemplateOverrun(TemplateError):
    """The template exceeds the limits of time or memory."""


class _Ended(Exception):
    """The child process has ended; the message says what the template does."""


def _command() -> list[str]:
    """The command line of the child, which finds packages only in the folders of jinja2 and of what it imports."""
    # In a virtual environment on Windows, sys.executable starts another process, which would escape the limits.
    python = getattr(sys, "_base_executable", sys.executable) if sys.platform == "win32" else sys.executable
    specs = filter(None, map(find_spec, ("jinja2", "markupsafe")))
    folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec.origin)
    script = Path(__file__).with_name("template_child.py")
    return [python, "-I", "-S", str(script), str(_MAX_MEMORY), str(2 * _MAX_SECONDS), *folders]


def _memory_of(pid: int) -> int:
    """Bytes that a process holds in memory; 0 if it has ended."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


@contextmanager
def _watched(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[list[str]]:
    """Kill `process` if the block takes longer than `limit_s`, or its memory exceeds the limit; yields the reason."""
    done, reasons = Event(), list[str]()

    def watch() -> None:
        end = monotonic() + limit_s
        while not reasons and not done.wait(min(_LOOK_S, limit_s)):
            if monotonic() > end:
                reasons.append(f"takes more than {limit_s:g} seconds")
            elif _memory_of(process.pid) > _MAX_MEMORY:
                reasons.append(_TOO_MUCH)
        if reasons:
            process.kill()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield reasons
    finally:
        done.set()
        watcher.join()


def _exchange(process: subprocess.Popen[bytes], data: bytes, limit_s: float) -> bytes:
    """Write `data` and read a line. Raises _Ended if the process ends or exceeds a limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    with _watched(process, limit_s) as reasons, suppress(OSError):  # the process may end before it has read all
        process.stdin.write(data)
        process.stdin.flush()
        line = process.stdout.readline()
    if reasons or not line:
        raise _Ended((reasons or [_TOO_MUCH])[0])
    return line


class _Renderer:
    """The child process of this process, started when it is needed and again after its end. Threads take turns."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without a child, also in a fork of this process, which must not use the same pipes."""
        self._turn = RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> subprocess.Popen[bytes]:
        """The child, started if none is running; does not wait until it is ready. Raises OSError."""
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._process = subprocess.Popen(
                    _command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C and Ctrl-Z are for the parent
                    creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                )
            return self._process

    def stop(self) -> None:
        """End the child, if there is one."""
        with self._turn:
            process, self._process, self._is_ready = self._process, None, False
            if process is not None:
                with suppress(OSError), process:  # a request that was not read is lost
                    process.kill()

    def _ready(self) -> subprocess.Popen[bytes]:
        """The child, ready for a request. Raises TemplateError."""
        try:
            process = self.start()
            if not self._is_ready:
                _exchange(process, b"", _START_S)
                self._is_ready = True
        except (OSError, _Ended) as error:
            self.stop()
            raise TemplateError(
                "the process that renders chat templates does not start",
                hint="check that jinja2 is installed and memory is free",
            ) from error
        return process

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The child's reply. Raises TemplateError; the next request gets a new child if this one has ended."""
        with self._turn:
            process, data = self._ready(), json.dumps(request).encode() + b"\n"
            try:
                reply: dict[str, Any] = parsed(_exchange(process, data, _MAX_SECONDS).decode())
            except _Ended as error:
                self.stop()
                raise TemplateOverrun(f"the chat template {error}", hint=HINT) from error
            except BaseException:  # such as Ctrl-C: the next request must not get the reply to this one
                self.stop()
                raise
        if "error" in reply:
            raise TemplateError(f"the chat template {_one_line(reply['error'])}", hint=HINT)
        return reply


_renderer = _Renderer()
atexit.register(_renderer.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renderer.forget)


def warm_up() -> None:
    """Start the process that renders templates, while the caller loads a model."""
    with suppress(OSError):
        _renderer.start()


def _one_line(message: object) -> str:
    """`message` of a template for a terminal: one printable line of at most 200 characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(message)[:2000]).split())
    return line if len(line) <= 200 else line[:199] + "…"


class ChatTemplate:
    """A compiled chat template.

    `literals`: the non-empty strings in its expressions, which it may look for in a message. `names`: its variables.
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", variables: Mapping[str, object] | None = None
    ) -> None:
        """Compile `source`; `variables` are its switches, such as `enable_thinking`. Raises TemplateError."""
        self.source = source
        self._fixed = {**(variables or {}), "bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        facts = _renderer.ask({"source": source})
        self.literals = frozenset[str](facts["literals"])
        self.names = frozenset[str](facts["names"])

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, now: datetime) -> str:
        """The text of a conversation. Raises TemplateError if the template refuses it, fails or exceeds a limit."""
        variables = {**self._fixed, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        reply = _renderer.ask({"source": self.source, "variables": variables, "now": now.isoformat()})
        return str(reply["text"])
