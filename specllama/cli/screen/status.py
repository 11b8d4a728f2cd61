"""The progress of steps on stderr: one line that is redrawn, or in a log a line for each step and every 10 %."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specllama.base.clock import perf_counter
from specllama.base.disk import FetchWatch, Silent, size_text
from specllama.cli.screen.output import Output
from specllama.cli.screen.render import clock, flow, palette_of, progress
from specllama.cli.screen.terminal import Screen
from specllama.cli.screen.visible import in_one_line

REDRAW_S = 0.1
_LOG_S = 1.0  # between two lines of one step in a log
_FIGURES_WIDTH = 52  # columns for bar, speed and time


class StatusLine:
    """A progress line. Where no live line may be drawn on stderr, `logs` prints a line for each step and every 10 %."""

    def __init__(self, output: Output, *, logs: bool = False) -> None:
        self._output = output
        self._shown = output.live
        self._logs = logs and not output.live
        self._step, self._tenths, self._logged = "", -1, 0.0  # of the latest line of a log
        self._screen = Screen(output.err, output.err)
        self._palette = palette_of(output.err)
        self._next = 0.0

    @property
    def width(self) -> int:
        """The current columns."""
        return self._screen.size[0]

    def show(self, what: str, share: float | None, detail: str = "") -> None:
        """Draw the progress of a step, at most ten times a second; without a bar if the share is unknown."""
        tenths, now = int(10 * (share or 0.0)), perf_counter()
        if self._logs and (what != self._step or (tenths > self._tenths and now > self._logged + _LOG_S)):
            self._step, self._tenths, self._logged = what, tenths, now
            self._output.note(f"{what}: {tenths}0 %" if tenths else f"{what} ...")
        if not self._shown or now < self._next:
            return
        self._next = now + REDRAW_S
        width = self.width
        self._screen.draw(list(flow(progress(what, share, detail, width, self._palette), width, self._palette)))

    def clear(self) -> None:
        """Erase the line until the next `show`."""
        self._next = 0.0
        self._screen.clear()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()


def shortened(text: str, width: int) -> str:
    """`text` in one line, cut in the middle to `width`: both ends of a file name matter."""
    text = in_one_line(text)
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


class _Fetching:
    """A `FetchWatch` on a status line."""

    def __init__(self, output: Output, status: StatusLine) -> None:
        self._output = output
        self._status = status
        self._what = ""

    def begin(self, what: str, total: int | None) -> None:
        self._what, self._total, self._n_done = f"{what} ({size_text(total)})" if total else what, total, 0
        self._first: tuple[float, int] | None = None  # when bytes were first there, and how many: not all are new
        self._show()

    def advance(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        if self._first is None:
            self._first = perf_counter(), self._n_done
        self._show()

    def note(self, text: str) -> None:
        self._status.clear()
        self._output.note(text)

    def end(self) -> None:
        self._what = ""  # other threads may go on after an interrupt
        self._status.clear()

    def _show(self) -> None:
        if not self._what:
            return
        since, n_before = self._first or (0.0, 0)
        speed = (self._n_done - n_before) / max(perf_counter() - since, 0.1)
        figures = [f"{size_text(int(speed))}/s"] if speed else []
        if speed and self._total:
            figures.append(f"{clock(max(self._total - self._n_done, 0) / speed)} left")
        share = min(self._n_done / self._total, 1.0) if self._total else None
        what = shortened(self._what, max(20, self._status.width - _FIGURES_WIDTH)) if self._output.live else self._what
        self._status.show(what, share, ", ".join(figures))


@contextmanager
def watching(output: Output) -> Iterator[FetchWatch]:
    """A `FetchWatch` that shows as much as `output` allows."""
    if output.quiet:
        yield Silent()
    else:
        with StatusLine(output, logs=True) as status:
            yield _Fetching(output, status)
