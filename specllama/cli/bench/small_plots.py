"""The benchmark's plots, small enough for a terminal: text only, so that they can be pasted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specllama.bench import charts as bench_charts
from specllama.bench.charts import ChartMark, Panel, Series
from specllama.bench.report import BenchReport
from specllama.cli.screen.plot import PlotBar, Signs, filled, plot, span, split

_N_ROWS = 9
_N_COLUMNS = 40
_LETTERS = ("d", "V", "s", "k", ".")  # of the parts of the time, in their order: told apart without colours
_MOST_CHARS = 24  # of a name


def small_plots(report: BenchReport, signs: Signs) -> Iterator[str]:
    """Lines of text: speedup over K and by class, acceptance by position, costs of passes, where the time goes."""
    for panel in bench_charts.over_length(report):
        for series in panel.series:
            yield from _titled("speed over longest draft, plain decoding = 1", panel, series)
            yield from _over_length(panel, series, signs)
    for panel in bench_charts.by_class(report):
        series = _fastest(panel)
        yield from _titled("speed by class of prompts, plain decoding = 1", panel, series)
        yield from _by_class(panel, series, signs)
    for panel in bench_charts.by_position(report):
        series = max(panel.series, key=lambda each: len(each.marks))
        yield from _titled("accepted at each position of the draft, share of its steps", panel, series)
        yield from _shares(series.marks, signs)
    for panel in bench_charts.costs(report):
        most = max(mark.y for series in panel.series for mark in series.marks)
        for series in panel.series:
            yield from _titled("cost of a pass over n rows, in passes of the target over one", panel, series)
            yield from _costs(series.marks, most, signs)
    yield from _time_split(report)


def _titled(what: str, panel: Panel, series: Series) -> Iterator[str]:
    yield ""
    yield f"{what} ({', '.join(part for part in (series.name, panel.title) if part)})"


def _name(text: str) -> str:
    """A name in a column of its own."""
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "~"


def _names(panel: Panel) -> dict[float, str]:
    return {x: _name(name) for x, name in panel.ticks}


def _over_length(panel: Panel, series: Series, signs: Signs) -> Iterator[str]:
    names = _names(panel)
    bars = [PlotBar(names[mark.x], mark.low, mark.y, mark.high) for mark in series.marks]
    yield from plot(bars, 1.0, n_rows=_N_ROWS, signs=signs)
    if series.predicted:
        yield "predicted: " + ", ".join(f"{y:.2f} ({x:g})" for x, y in series.predicted if x)


def _fastest(panel: Panel) -> Series:
    """The series that is fastest over all classes, which stand last."""
    return max(panel.series, key=lambda each: each.marks[-1].y)


def _by_class(panel: Panel, series: Series, signs: Signs) -> Iterator[str]:
    names = _names(panel)
    width = max(map(len, names.values()))
    bottom, top = min(1.0, *(mark.low for mark in series.marks)), max(1.0, *(mark.high for mark in series.marks))
    for mark in series.marks:
        bar = PlotBar(names[mark.x], mark.low, mark.y, mark.high)
        drawn = span(bar, 1.0, bottom=bottom, top=top, n_columns=_N_COLUMNS, signs=signs)
        interval = f" ({mark.low:.2f}-{mark.high:.2f})" if mark.low < mark.high else ""
        yield f"{bar.label:<{width}}  {drawn}  {mark.y:.2f}{interval}"


def _shares(marks: Sequence[ChartMark], signs: Signs) -> Iterator[str]:
    for mark in marks:
        yield f"{mark.x:3g}  {_bar(mark.y, signs)}  {100 * mark.y:.0f} %"


def _costs(marks: Sequence[ChartMark], most: float, signs: Signs) -> Iterator[str]:
    for mark in marks:
        yield f"{mark.x:3g}  {_bar(mark.y / most, signs)}  {mark.y:.2f}"


def _bar(share: float, signs: Signs) -> str:
    return f"{filled(share, n_columns=_N_COLUMNS, sign=signs.bar):<{_N_COLUMNS}}"


def _time_split(report: BenchReport) -> Iterator[str]:
    key = ", ".join(f"{letter} {part}" for letter, part in zip(_LETTERS, bench_charts.PARTS, strict=True))
    for panel in bench_charts.time_split(report):
        width = max(len(_name(bar.name)) for bar in panel.bars)
        longest = max(bar.token_s for bar in panel.bars)
        yield ""
        yield f"where the time of a token goes ({panel.title}): {key}"
        for bar in panel.bars:
            n_columns = max(1, round(_N_COLUMNS * bar.token_s / longest))
            drawn = split(bar.shares, _LETTERS, n_columns=n_columns)
            yield f"{_name(bar.name):<{width}}  {drawn:<{_N_COLUMNS}}  {1000 * bar.token_s:.1f} ms"
