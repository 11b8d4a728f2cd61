"""A small plot in text: a range and a middle for each place on the axis, and a line to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.cli.output import Stream


@dataclass(frozen=True, slots=True)
class Bar:
    """What is drawn above one place of the axis."""

    label: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Signs:
    """The characters of a plot."""

    middle: str
    range: str
    line: str
    axis: str


def signs_for(stream: Stream) -> Signs:
    """What the stream can show."""
    return Signs("●", "│", "─", "┤") if stream.encodes("●│─┤") else Signs("o", "|", "-", "|")


def plot(bars: Sequence[Bar], line: float, *, n_rows: int, signs: Signs) -> list[str]:
    """The plot as lines of text, the highest value on top; `line` goes across all of it and is always in sight."""
    top = max(line, *(bar.high for bar in bars))
    bottom = min(line, *(bar.low for bar in bars))
    step = (top - bottom) / (n_rows - 1) or 1.0

    def row_of(value: float) -> int:
        return round((top - value) / step)

    lines = []
    for row in range(n_rows):
        fill = signs.line if row == row_of(line) else " "
        cells = ""
        for bar in bars:
            inside = row_of(bar.high) <= row <= row_of(bar.low)
            sign = signs.middle if row == row_of(bar.middle) else signs.range if inside else fill
            cells += fill + sign + 2 * fill
        lines.append(f"{top - row * step:5.2f} {signs.axis}{cells}".rstrip())
    return [*lines, " " * 7 + "".join(f" {bar.label:<3}" for bar in bars).rstrip()]
