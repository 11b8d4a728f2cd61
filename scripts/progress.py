"""Shows that a long step is alive: one updating line on a terminal, a line now and then elsewhere. Writes to stderr."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

QUIET_S = 15.0  # longest silence in a pipe
TICK_S = 0.5  # the clock on a terminal moves at least this often


@dataclass(frozen=True)
class Stage:
    """What a step is doing just now; `done` of `total` where it can be counted."""

    what: str
    done: int = 0
    total: int = 0
    detail: str = ""  # shown where it can be overwritten

    def __str__(self) -> str:
        if not self.total:
            return self.what
        return f"{self.what} {self.done}/{self.total} ({100 * self.done // self.total} %)"

    @property
    def tenths(self) -> int:
        """Progress in tenths: one line each in a pipe."""
        return 10 * self.done // self.total if self.total else 0


@dataclass
class Ticker:
    """The line of one step."""

    title: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._start_s = self._shown_s = self.clock()
        self._shown: Stage | None = None

    def show(self, stage: Stage) -> None:
        """Say what is going on; as often as you like."""
        now_s = self.clock()
        if self._live:
            self._redraw(f"{self.title}: {stage}  {_clock(now_s - self._start_s)}  {stage.detail}".rstrip())
            return
        last = self._shown
        is_news = last is None or (last.what, last.tenths) != (stage.what, stage.tenths)
        if is_news or now_s - self._shown_s >= QUIET_S:
            self._print(f"{self.title}: {stage}  {_clock(now_s - self._start_s)}")
            self._shown, self._shown_s = stage, now_s

    def finish(self, outcome: str) -> None:
        """The step's last word, which stays on the screen."""
        text = f"{self.title}: {outcome}  {_clock(self.clock() - self._start_s)}"
        if self._live:
            self._redraw(text)
            self._print("")
        else:
            self._print(text)

    def _redraw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.stream.write(f"\r{text[:width]}\x1b[K")
        self.stream.flush()

    def _print(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def run_logged(
    command: Sequence[str],
    *,
    log: Path,
    ticker: Ticker,
    stage_of: Callable[[str], Stage | None],
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command and return its exit status: its output goes to `log`, and what `stage_of` reads in it to `ticker`.

    The command gets a process group of its own, so that whatever ends this process ends the compilers, too.
    """
    with (
        log.open("ab") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ if env is None else env),
            start_new_session=True,
        ) as process,
    ):
        try:
            _follow(process, file.write, ticker, stage_of)
            return process.wait()
        except BaseException:
            _end(process)
            raise


def tail(log: Path, n_lines: int = 25) -> str:
    """The end of a log file, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-n_lines:]
    return "\n".join("    " + line for line in lines)


def _follow(
    process: subprocess.Popen[bytes],
    write: Callable[[bytes], object],
    ticker: Ticker,
    stage_of: Callable[[str], Stage | None],
) -> None:
    assert process.stdout is not None
    stage, rest = Stage("starting"), b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ticker.show(stage)
            if not selector.select(timeout=TICK_S):
                continue
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                return
            write(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                stage = stage_of(line.decode("utf-8", "replace")) or stage


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            return


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
