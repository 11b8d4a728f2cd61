"""A line of progress on stderr for the steps before an answer."""

from __future__ import annotations

from time import monotonic

from specllama.cli.screen.output import Output
from specllama.cli.screen.render import flow, palette_of, progress
from specllama.cli.screen.terminal import Screen

REDRAW_S = 0.1


class StatusLine:
    """A progress line; shows nothing where live lines may not be drawn on stderr."""

    def __init__(self, output: Output) -> None:
        self._shown = output.live
        self._screen = Screen(output.err, output.err)
        self._palette = palette_of(output.err)
        self._next = 0.0

    def show(self, what: str, share: float, detail: str = "") -> None:
        """Draw the progress of a step, at most ten times a second."""
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
