"""The benchmark's plots as files, PNG and SVG, drawn with matplotlib: the optional extra `plots`."""

from __future__ import annotations

import io
import logging
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specllama.base.errors import ReportError, UsageError
from specllama.bench import charts as bench_charts
from specllama.bench.charts import BarPanel, ChartMark, Panel
from specllama.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_PNG_DPI = 160
# Okabe and Ito's colours, which the colour-blind tell apart; marker and dash change along with them.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")
_GREY, _FAINT = "#666666", "#DDDDDD"
# For names in Japanese and Chinese, where the machine has one of these.
_CJK_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans JP", "Hiragino Sans", "Yu Gothic", "Meiryo", "PingFang SC",
    "Microsoft YaHei", "IPAexGothic", "IPAGothic", "WenQuanYi Zen Hei",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "specllama",  # the same report gives the same bytes
    "text.parse_math": False,  # a $ in a file's name is a $
}


@dataclass(frozen=True, slots=True)
class WrittenPlots:
    """What became of the plots."""

    paths: tuple[Path, ...]
    missing: tuple[str, ...]  # plots that the report has no figures for


def prepare(folder: Path) -> None:
    """Make the folder and see that it can be drawn into: to be asked before minutes are spent on measuring.

    Raises UsageError without matplotlib, ReportError where no file can be written.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "plots are drawn with matplotlib, which is not installed",
            hint="install it with `pip install matplotlib` or `pip install 'specllama[plots]'`",
        )
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A failure to write, in a sentence."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}", hint="give another folder") from None


def write(report: BenchReport, folder: Path) -> WrittenPlots:
    """Every plot that the report has figures for, into `folder`; files of the same name are replaced.

    Raises what `prepare` raises.
    """
    prepare(folder)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports every font that it did not find
    from matplotlib import rc_context

    paths, missing = [], []
    style: Any = {**_STYLE, "font.sans-serif": _fonts()}  # matplotlib lists every key it knows as its type
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for name, draw in _PLOTS.items():
            figure = draw(report)
            if figure is None:
                missing.append(name)
                continue
            paths += [_save(figure, folder / f"{name}.{kind}", kind) for kind in FORMATS]
    return WrittenPlots(tuple(paths), tuple(missing))


def _fonts() -> list[str]:
    from matplotlib import font_manager

    there = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _CJK_FONTS if name in there)]


def _save(figure: Figure, path: Path, kind: str) -> Path:
    """Drawn first and written in one go, so that a failure leaves no half of a picture."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=_PNG_DPI, metadata={"Date": None} if kind == "svg" else None)
    with _told(path):
        path.write_bytes(picture.getvalue())
    return path


# ------------------------------------------------------------------------------------------------ parts of every plot


def _printable(text: str) -> str:
    """Names come from files; characters that have no shape would be drawn as boxes."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _caption(report: BenchReport) -> str:
    """What was measured where and when; a partial or synthetic report says so on every picture."""
    names = [str(report.target.get("file", "")), *report.plan.drafts]
    parts = [" + ".join(Path(name).name for name in names if name), report.machine.cpu, report.made[:10]]
    if report.synthetic is not None:
        parts.append(f"SYNTHETIC acceptance {report.synthetic:g}: no valid output")
    if report.partial:
        parts.append("PARTIAL: not everything was measured")
    return _printable("  |  ".join(part for part in parts if part))


def _figure(report: BenchReport, title: str, n_panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels of that size in inches, at most three beside each other."""
    from matplotlib.figure import Figure

    n_columns = min(n_panels, 3)
    n_rows = -(-n_panels // n_columns)
    caption = textwrap.wrap(_caption(report), int(width * n_columns / 0.051))  # inches of a character
    head = 0.36 + 0.13 * len(caption)
    whole = height * n_rows + head + 0.4
    figure = Figure(figsize=(width * n_columns, whole))
    figure.set_layout_engine("constrained", rect=(0.0, 0.0, 1.0, 1.0 - head / whole))
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[n_panels:]:
        axes.remove()
    for axes in grid.flat[:n_panels]:
        axes.tick_params(labelbottom=True)  # below a panel there may be none
    left = 0.1 / (width * n_columns)
    figure.text(left, 1.0 - 0.08 / whole, title, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(left, 1.0 - 0.30 / whole, "\n".join(caption), ha="left", va="top", fontsize=6.5, color=_GREY)
    return figure, list(grid.flat[:n_panels])


def _label(axes: Axes, panel: Panel | BarPanel, x: str, y: str = "") -> None:
    """Names of the axes, that of y only at the left edge; and of the panel."""
    axes.set_xlabel(x)
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel(y)
    axes.set_title(_printable(panel.title))


def _legend(figure: Figure, every: Sequence[Axes]) -> None:
    """One for all panels, where it covers none of them."""
    found: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    n_columns = int(figure.get_figwidth() / (0.75 + 0.075 * max(map(len, found))))  # inches of a sign and of its name
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), n_columns or 1))


def _looks(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of each series by its name: the same in every panel, whichever are missing there."""
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _DASHES[(i // len(_COLOURS)) % len(_DASHES)],
        }
        for i, name in enumerate(names)
    }


def _error(marks: Sequence[ChartMark]) -> Any:
    """Distances down and up from each value, as matplotlib wants them; None where there is no interval."""
    if all(mark.low == mark.high for mark in marks):
        return None
    return [[max(mark.y - mark.low, 0.0) for mark in marks], [max(mark.high - mark.y, 0.0) for mark in marks]]


# --------------------------------------------------------------------------------------------------------- the plots


def _by_class(report: BenchReport) -> Figure | None:
    panels = bench_charts.by_class(report)
    if not panels:
        return None
    looks = _looks(panels)
    n_classes = max(len(panel.ticks) for panel in panels)
    n_series = max(len(panel.series) for panel in panels)
    height = 0.6 + n_classes * (0.16 + 0.13 * n_series)
    figure, every = _figure(report, "Speedup by class of prompts", len(panels), 4.8, height)
    for axes, panel in zip(every, panels, strict=True):
        step = 0.7 / n_series
        for i, series in enumerate(panel.series):
            shift = (i - (len(panel.series) - 1) / 2) * step
            places = [mark.x + shift for mark in series.marks]
            look = {**looks[series.name], "linestyle": "none"}
            axes.errorbar(
                [mark.y for mark in series.marks], places, xerr=_error(series.marks), label=_printable(series.name),
                markersize=4, linewidth=1, elinewidth=1, capsize=2, **look,
            )  # fmt: skip
        axes.axvline(1.0, color=_GREY, linewidth=1, label="plain decoding")
        axes.set_yticks([x for x, _ in panel.ticks], [_printable(name) for _, name in panel.ticks])
        axes.set_ylim(max(x for x, _ in panel.ticks) + 0.6, -0.6)
        axes.axhline(max(x for x, _ in panel.ticks) - 0.5, color=_FAINT, linewidth=1)  # "all" is no class
        axes.grid(axis="x", color=_FAINT, linewidth=0.6)
        _label(axes, panel, "decoding speed over plain decoding, 95 % interval")
    _legend(figure, every)
    return figure


def _over_length(report: BenchReport) -> Figure | None:
    panels = bench_charts.over_length(report)
    if not panels:
        return None
    looks = _looks(panels)
    figure, every = _figure(report, "Speedup over the longest draft", len(panels), 4.8, 3.2)
    for axes, panel in zip(every, panels, strict=True):
        axes.axhline(1.0, color=_GREY, linewidth=1, label="plain decoding: break-even")
        alone = {x for x, name in panel.ticks if name == "auto"}  # no place on the axis leads to it
        for series in panel.series:
            look = looks[series.name]
            groups = {True: [mark for mark in series.marks if mark.x in alone]}
            groups[False] = [mark for mark in series.marks if mark.x not in alone]
            for is_alone, marks in groups.items():
                if marks:
                    axes.errorbar(
                        [mark.x for mark in marks], [mark.y for mark in marks], yerr=_error(marks),
                        label=None if is_alone else f"{_printable(series.name)}, measured",
                        markersize=5, linewidth=1.4, elinewidth=1, capsize=2.5, **look,
                    )  # fmt: skip
            if series.predicted:
                axes.plot(
                    [x for x, _ in series.predicted], [y for _, y in series.predicted], color=look["color"],
                    linestyle=(0, (2, 2)), linewidth=1.1, marker=look["marker"], markersize=5, markerfacecolor="white",
                    label=f"{_printable(series.name)}, predicted", zorder=1.9,
                )  # fmt: skip
        _ticked(axes, panel)
        axes.grid(axis="y", color=_FAINT, linewidth=0.6)
        _label(axes, panel, "longest draft K (tokens)", "decoding speed over\nplain decoding, 95 % interval")
    _legend(figure, every)
    return figure


def _ticked(axes: Axes, panel: Panel) -> None:
    axes.set_xticks([x for x, _ in panel.ticks], [_printable(name) for _, name in panel.ticks])


def _by_position(report: BenchReport) -> Figure | None:
    panels = bench_charts.by_position(report)
    if not panels:
        return None
    looks = _looks(panels)
    figure, every = _figure(report, "Acceptance by position in the draft", len(panels), 4.8, 3.2)
    for axes, panel in zip(every, panels, strict=True):
        _lines(axes, panel, looks)
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(lambda share, _place: f"{100 * share:.0f} %")
        _label(
            axes, panel, "position in the draft (1 = first token)", "accepted here, share of all\nsteps with a draft"
        )
    _legend(figure, every)
    return figure


def _lines(axes: Axes, panel: Panel, looks: dict[str, dict[str, Any]]) -> None:
    for series in panel.series:
        axes.plot(
            [mark.x for mark in series.marks], [mark.y for mark in series.marks], label=_printable(series.name),
            markersize=4.5, linewidth=1.4, **looks[series.name],
        )  # fmt: skip
    _ticked(axes, panel)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)


def _costs(report: BenchReport) -> Figure | None:
    panels = bench_charts.costs(report)
    if not panels:
        return None
    figure, (axes,) = _figure(report, "Cost of a pass over n rows, T(n)", 1, 6.0, 3.6)
    panel = panels[0]
    _lines(axes, panel, _looks(panels))
    top = 1.1 * max(mark.y for series in panel.series for mark in series.marks)
    n_most = max(x for x, _ in panel.ticks)
    axes.plot([1, n_most], [1, n_most], color=_GREY, linestyle=":", linewidth=1, label="n passes over one row")
    axes.set_ylim(0.0, top)
    _label(axes, panel, "rows in one pass, n (tokens)", "time, in passes of the target\nover one row, T(n)/T(1)")
    _legend(figure, [axes])
    return figure


def _time_split(report: BenchReport) -> Figure | None:
    panels = bench_charts.time_split(report)
    if not panels:
        return None
    n_bars = max(len(panel.bars) for panel in panels)
    figure, every = _figure(report, "Where the time of a token goes", len(panels), 5.2, 0.7 + 0.38 * n_bars)
    longest = max(bar.token_s for panel in panels for bar in panel.bars)
    for axes, panel in zip(every, panels, strict=True):
        _stacks(axes, panel, longest)
        _label(axes, panel, "time per token (ms)")
    _legend(figure, every)
    return figure


def _stacks(axes: Axes, panel: BarPanel, longest_s: float) -> None:
    """One bar for an arm; shares that have room for it are written into them, so that no colour has to be named."""
    places: Sequence[int] = range(len(panel.bars))
    lefts = [0.0] * len(panel.bars)
    for i, part in enumerate(bench_charts.PARTS):
        widths = [1000 * bar.token_s * bar.shares[i] for bar in panel.bars]
        axes.barh(places, widths, left=lefts, height=0.7, color=_COLOURS[i], label=part, linewidth=0)
        for place, bar, left, width in zip(places, panel.bars, lefts, widths, strict=True):
            if width > 0.14 * 1000 * longest_s:
                axes.text(
                    left + width / 2, place, f"{part} {100 * bar.shares[i]:.0f} %", ha="center", va="center",
                    color="white", fontsize=7,
                )  # fmt: skip
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, left in zip(places, lefts, strict=True):
        axes.text(left, place, f" {left:.0f}", ha="left", va="center", fontsize=7, color=_GREY)
    axes.set_yticks(places, [_printable(bar.name) for bar in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.5, -0.5)
    axes.set_xlim(0.0, 1080 * longest_s)


_PLOTS: dict[str, Callable[[BenchReport], Figure | None]] = {
    "speedup-by-class": _by_class,
    "speedup-over-length": _over_length,
    "acceptance-by-position": _by_position,
    "costs": _costs,
    "time-split": _time_split,
}
