"""Download progress: a bar on a terminal, otherwise a line every 10 %."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specllama.base.disk import FetchWatch, Silent, size_text
from specllama.cli.screen.output import Output
from specllama.cli.screen.visible import in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

_PAUSE_S = 1.0  # between two lines of a log
_FIGURES_WIDTH = 52  # columns for bar, size, speed and time


def shortened(text: str, width: int) -> str:
    """`text` in one line, cut in the middle to `width`: both ends of a file name matter."""
    text = in_one_line(text)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


class _Bar:
    """A `FetchWatch` that draws a bar on stderr and erases it at the end."""

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
    """A `FetchWatch` for logs: a line at the beginning and one every 10 %, at most one a second."""

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
        """A log needs no line for the end."""

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._output.note(text)


@contextmanager
def watching(output: Output) -> Iterator[FetchWatch]:
    """A `FetchWatch` that shows as much as `output` allows."""
    if output.quiet:
        yield Silent()
    elif not output.live:
        yield _Lines(output)
    else:
        with _progress(output) as progress:
            yield _Bar(progress)


def _progress(output: Output) -> Progress:
    """Rich's progress display; a wide terminal also shows size, speed and time left."""
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
