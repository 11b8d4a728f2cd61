"""Fetching with something to look at: a progress bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specllama.base.disk import FetchWatch, Silent, size_text
from specllama.cli.screen.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

_PAUSE_S = 1.0  # between two lines of a log
_FIGURES_WIDTH = 52  # columns for bar, size, speed and time


def shortened(text: str, width: int) -> str:
    """`text` with its middle left out where it is too long: both ends of a file's name say which it is."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


class _Bar:
    """A `FetchWatch` that draws one bar on stderr; it leaves nothing behind."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: list[TaskID] = []

    def begin(self, what: str, total: int | None) -> None:
        width = max(20, self._progress.console.width - _FIGURES_WIDTH)
        self._tasks.append(self._progress.add_task(shortened(what, width), total=total))

    def advance(self, n_bytes: int) -> None:
        self._progress.advance(self._tasks[-1], n_bytes)

    def note(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def end(self) -> None:
        self._progress.remove_task(self._tasks.pop())


class _Lines:
    """A `FetchWatch` for logs: a line at the beginning and then for every tenth, but not several a second."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._what = ""
        self._total: int | None = None
        self._n_done = 0
        self._tenths = 0
        self._said_at = 0.0

    def begin(self, what: str, total: int | None) -> None:
        self._what, self._total, self._n_done, self._tenths = what, total, 0, 0
        self._say(f"{what} ({size_text(total)})" if total else what)

    def advance(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        tenths = self._n_done * 10 // self._total if self._total else 0
        if tenths > self._tenths and time.monotonic() - self._said_at > _PAUSE_S:
            self._tenths = tenths
            self._say(f"{self._what}: {tenths}0 %")

    def note(self, text: str) -> None:
        self._say(text)

    def end(self) -> None:
        """The next line tells."""

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._output.note(text)


@contextmanager
def watching(output: Output) -> Iterator[FetchWatch]:
    """A `FetchWatch` that shows what `output` allows."""
    if output.quiet:
        yield Silent()
    elif not output.live:
        yield _Lines(output)
    else:
        with _progress(output) as progress:
            yield _Bar(progress)


def _progress(output: Output) -> Progress:
    """Rich's progress display; size, speed and time left where the terminal is wide enough for them."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = output.err_console()
    figures: list[ProgressColumn] = [TaskProgressColumn()]
    if console.width >= _FIGURES_WIDTH + 20:
        figures = [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    name = TextColumn("{task.description}", markup=False)
    return Progress(name, BarColumn(bar_width=None), *figures, console=console, transient=True)
