"""The progress of steps on stderr: one line that is redrawn, or in a log a line for each step and every 10 %."""

from __future__ import annotations

from time import monotonic

from specllama.cli.screen.output import Output
from specllama.cli.screen.render import flow, palette_of, progress
from specllama.cli.screen.terminal import Screen

REDRAW_S = 0.1


class StatusLine:
    """A progress line. Where no live line may be drawn on stderr, `logs` prints a line for each step and every 10 %."""

    def __init__(self, output: Output, *, logs: bool = False) -> None:
        self._output = output
        self._shown = output.live
        self._logs = logs and not output.live
        self._step, self._tenths = "", -1  # in the latest line of a log
        self._screen = Screen(output.err, output.err)
        self._palette = palette_of(output.err)
        self._next = 0.0

    def show(self, what: str, share: float, detail: str = "") -> None:
        """Draw the progress of a step, at most ten times a second."""
        tenths = int(10 * share)
        if self._logs and (what != self._step or tenths > self._tenths):
            self._step, self._tenths = what, tenths
            self._output.note(f"{what}: {tenths}0 %" if tenths else f"{what} ...")
        if not self._shown or monotonic() < self._next:
            return
        self._next = monotonic() + REDRAW_S
        width = self._screen.size[0]
        self._screen.draw(list(flow(progress(what, share, detail, width, self._palette), width, self._palette)))

    def clear(self) -> None:
        """Erase the line until the next `show`."""
        self._screen.clear()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()
