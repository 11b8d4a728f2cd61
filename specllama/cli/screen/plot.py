"""Small plots in text: ranges with a middle beside a line to compare with, standing or lying, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.cli.screen.output import Stream


@dataclass(frozen=True, slots=True)
class PlotBar:
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
    bar: str


UNICODE = Signs("●", "│", "─", "┤", "█")


def signs_for(stream: Stream) -> Signs:
    """What the stream can show."""
    return UNICODE if stream.encodes("●│─┤█") else Signs("o", "|", "-", "|", "#")


def _scale(above: float, below: float, n_rows: int) -> tuple[float, int]:
    """(height of a row, rows above the line): the line has a row of its own, and whatever is to be shown fits."""
    n_above = round((n_rows - 1) * above / (above + below)) if above + below else 0
    n_above = min(max(n_above, above > 0), n_rows - 1 - (below > 0))
    steps = [length / n for length, n in ((above, n_above), (below, n_rows - 1 - n_above)) if n]
    return max(steps) or 1.0, n_above


def plot(bars: Sequence[PlotBar], line: float, *, n_rows: int, signs: Signs) -> list[str]:
    """The plot as lines of text, the highest value on top; `line` goes across all of it and is always in sight."""
    above = max(bar.high for bar in bars) - line
    below = line - min(bar.low for bar in bars)
    step, n_above = _scale(max(above, 0.0), max(below, 0.0), n_rows)
    top = line + n_above * step

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


def span(bar: PlotBar, line: float, *, bottom: float, top: float, n_columns: int, signs: Signs) -> str:
    """One range lying down, with the mark of `line` across it: a row of a table from `bottom` to `top`."""
    step = (top - bottom) / (n_columns - 1) or 1.0

    def column_of(value: float) -> int:
        return round((min(max(value, bottom), top) - bottom) / step)

    cells = [" "] * n_columns
    cells[column_of(line)] = signs.range
    first, last = column_of(bar.low), column_of(bar.high)
    if last > first:
        cells[first : last + 1] = [signs.line] * (last - first + 1)
    cells[column_of(bar.middle)] = signs.middle
    return "".join(cells)


def filled(share: float, *, n_columns: int, sign: str) -> str:
    """A bar of that share of the columns; something of it is seen of whatever is not nothing."""
    n = round(share * n_columns)
    return sign * (max(n, 1) if share > 0 else 0)


def split(shares: Sequence[float], letters: Sequence[str], *, n_columns: int) -> str:
    """One bar cut into parts, each of its own letter; the cuts are rounded, the whole is not."""
    text, total = "", 0.0
    for share, letter in zip(shares, letters, strict=True):
        total += share
        text += letter * (round(total * n_columns) - len(text))
    return text
