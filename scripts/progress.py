"""Progress on stderr: one updating line on a terminal, a line at intervals elsewhere."""

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

QUIET_S = 15.0  # longest time without a line in a pipe
TICK_S = 0.5  # longest time between two updates on a terminal


@dataclass(frozen=True)
class Stage:
    """The current work of a step; `done` of `total` if it can be counted."""

    what: str
    done: int = 0
    total: int = 0
    detail: str = ""  # shown on a terminal only

    def __str__(self) -> str:
        if not self.total:
            return self.what
        return f"{self.what} {self.done}/{self.total} ({100 * self.done // self.total} %)"

    @property
    def tenths(self) -> int:
        """Progress in tenths; a pipe gets one line for each."""
        return 10 * self.done // self.total if self.total else 0


@dataclass
class Ticker:
    """The progress line of one step."""

    title: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._start_s = self._shown_s = self.clock()
        self._shown: Stage | None = None

    def show(self, stage: Stage) -> None:
        """Show the stage; may be called at any rate."""
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
        """Show the outcome, which stays on the screen."""
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
    """Run a command and return its exit status. Its output goes to `log`, its stages to `ticker`.

    The command gets its own process group, so that its compilers end with it.
    """
    with (
        log.open("ab") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it closes when this process ends, see `toolchain.WITH_PARENT`
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
