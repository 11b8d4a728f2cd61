"""The benchmark's plots as PNG and SVG: points taken from a report, drawn with matplotlib (extra `plots`)."""

from __future__ import annotations

import io
import logging
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specllama.base.disk import NO_ROOM, write_own
from specllama.base.errors import ReportError, UsageError
from specllama.bench.plan import differences
from specllama.bench.report import ALL, BenchReport, BenchRow, Interval, TimeSplit
from specllama.bench.verdict import condition_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
MOST_ARMS = 5  # in the plot by class: more are not readable
PARTS: Sequence[str] = tuple(field.name for field in fields(TimeSplit))
AUTO = "auto"
_PNG_DPI = 160
# The colour-blind safe colours of Okabe and Ito; marker and dash differ as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")
_GREY, _FAINT = "#666666", "#DDDDDD"
# For names in Japanese and Chinese, if one of these is installed.
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
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "specllama",  # the same report gives the same bytes
    "text.parse_math": False,  # a $ in a file name is not a formula
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One value and its confidence interval; low = high = y without one."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """One line or group of bars, in the order of x."""

    name: str
    marks: tuple[Mark, ...]
    predicted: tuple[tuple[float, float], ...] = ()  # (x, y) of the cost model


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: one condition."""

    ticks: tuple[tuple[float, str], ...]  # x and label
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class WrittenPlots:
    """The files that were written."""

    paths: tuple[Path, ...]
    missing: tuple[str, ...]  # plots without data in the report


def by_class(report: BenchReport, condition: int) -> Panel:
    """Speedup by class of prompts; x counts the classes, "all" is the last.

    Shows the arms that are fastest on average over all conditions, the same under each.
    """
    classes = [*dict.fromkeys(prompt.category for prompt in report.plan.prompts), ALL]
    speeds: dict[int, list[float]] = {}
    for row in report.rows_of():
        if row.speedup is not None and row.decode_tok_s:
            speeds.setdefault(row.arm, []).append(row.decode_tok_s)
    series = []
    for arm in sorted(sorted(speeds, key=lambda arm: -fmean(speeds[arm]))[:MOST_ARMS]):
        marks = [
            _mark(float(place), row.speedup)
            for place, name in enumerate(classes)
            for row in _rows(report, condition, name)
            if row.arm == arm and row.speedup is not None
        ]
        if marks:
            series.append(Series(report.plan.arms[arm].name, tuple(marks)))
    kept = {mark.x for each in series for mark in each.marks}
    return Panel(tuple((float(i), name) for i, name in enumerate(classes) if i in kept), tuple(series))


def over_length(report: BenchReport, condition: int) -> Panel:
    """Speedup over the longest draft, with the prediction of the cost model; `auto` is the last place."""
    arms = report.plan.arms
    lengths = sorted({arm.length.longest for arm in arms if not arm.length.is_auto} | {0})
    auto_at = float(lengths[-1] + max(1, lengths[-1] // 4))
    ticks = [(float(n), str(n)) for n in lengths]
    if any(arm.length.is_auto for arm in arms):
        ticks.append((auto_at, AUTO))
    families = _families(report, [row for row in _rows(report, condition) if row.speedup is not None])
    series = []
    for name, members in zip(_family_names(report, families), families, strict=True):
        auto = arms[members[0].arm].length.is_auto
        # K = 0 is plain decoding.
        marks, predicted = ([], []) if auto else ([Mark(0.0, 1.0, 1.0, 1.0)], [(0.0, 1.0)])
        for row in members:
            x = float(arms[row.arm].n_max or auto_at)
            assert row.speedup is not None, "rows without were left out"
            marks.append(_mark(x, row.speedup))
            if row.predicted is not None and not auto:
                predicted.append((x, row.predicted))
        marks.sort(key=lambda mark: mark.x)
        series.append(Series(name, tuple(marks), tuple(sorted(predicted)) if len(predicted) > 1 else ()))
    return Panel(tuple(ticks), tuple(series))


def by_position(report: BenchReport, condition: int) -> Panel:
    """Share of the steps with a draft that accept the token at each position; x is the position, from 1.

    Of arms that differ only in length the longest is shown: the curves of the others are its beginning.
    """
    families = _families(report, [row for row in _rows(report, condition) if row.per_position])
    shown = sorted((max(each, key=lambda row: len(row.per_position)) for each in families), key=lambda row: row.arm)
    n_most = max((len(row.per_position) for row in shown), default=0)
    series = (Series(report.plan.arms[row.arm].name, _exact(list(enumerate(row.per_position, 1)))) for row in shown)
    return Panel(tuple((float(i), str(i)) for i in range(1, n_most + 1)), tuple(series))


def costs(report: BenchReport, _condition: int) -> Panel:
    """Cost of a pass over n rows in T(1); x is n. One series for each load and each draft."""
    loads = _load_names(report)
    series, seen = [], set()
    for each in report.costs:
        load = f", {loads[each.load]}" if loads[each.load] else ""
        if each.load not in seen:  # the costs of the target do not depend on the draft
            one = f"T(1) = {1000 * each.step_s:.3g} ms"
            series.append(Series(f"target, n rows, {one}{load}", _exact(each.profile.verify)))
            seen.add(each.load)
        if each.draft is not None:
            several = f" {report.plan.drafts[each.draft]}" if len(report.plan.drafts) > 1 else ""
            longest = each.profile.verify[-1][0]
            points = [point for point in each.profile.draft if point[0] <= longest]
            series.append(Series(f"draft{several}, n rows{load}", _exact(points)))
    places = sorted({mark.x for each in series for mark in each.marks})
    return Panel(tuple((x, f"{x:g}") for x in places), tuple(series))


def time_split(report: BenchReport, condition: int) -> Panel:
    """Milliseconds per token by part: x counts the arms, one series for each part."""
    rows = [row for row in _rows(report, condition) if row.time_split is not None and row.decode_tok_s]
    if not rows:
        return Panel((), ())
    series = []
    for part in PARTS:
        points = [(i, 1000 * getattr(row.time_split, part) / (row.decode_tok_s or 1.0)) for i, row in enumerate(rows)]
        series.append(Series(part, _exact(points)))
    return Panel(tuple((float(i), report.plan.arms[row.arm].name) for i, row in enumerate(rows)), tuple(series))


def _mark(x: float, found: Interval) -> Mark:
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    return Mark(x, found.value, low, high)


def _exact(points: Sequence[tuple[int, float]]) -> tuple[Mark, ...]:
    return tuple(Mark(float(x), y, y, y) for x, y in points)


def _rows(report: BenchReport, condition: int, category: str = ALL) -> list[BenchRow]:
    """In the order of the arms."""
    return sorted((row for row in report.rows_of(category) if row.condition == condition), key=lambda row: row.arm)


def _load_names(report: BenchReport) -> list[str]:
    """The options that differ between the loads; empty if there is only one load."""
    return [" ".join(differences(load, report.plan.loads)) for load in report.plan.loads]


def _families(report: BenchReport, rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Rows of arms that differ only in the longest draft, grouped; `auto` is a group of its own."""

    def family(row: BenchRow) -> tuple[object, ...]:
        arm = report.plan.arms[row.arm]
        return (arm.length.is_auto, arm.load, arm.spec_type, arm.verify_rule, -1 if arm.draft is None else arm.draft)

    return [list(each) for _, each in groupby(sorted(rows, key=family), key=family)]


def _family_names(report: BenchReport, families: Sequence[Sequence[BenchRow]]) -> list[str]:
    """The strategy of each family, and what else differs between them."""
    loads, arms = _load_names(report), [report.plan.arms[each[0].arm] for each in families]
    several_drafts = len({arm.draft for arm in arms if arm.draft is not None}) > 1
    several_rules = len({arm.verify_rule for arm in arms}) > 1
    names = []
    for arm in arms:
        parts = [
            f"{AUTO}: {arm.spec_type}" if arm.length.is_auto else arm.spec_type,
            report.plan.drafts[arm.draft] if several_drafts and arm.draft is not None else "",
            f"{arm.verify_rule} rule" if several_rules else "",
            loads[arm.load],
        ]
        names.append(", ".join(filter(None, parts)))
    return names


def prepare(folder: Path) -> None:
    """Creates the folder and checks that files can be written, before minutes are spent on measuring.

    Raises UsageError without matplotlib, ReportError if the folder is not writable.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib is not installed (needed for plots)",
            hint="install it with `pip install matplotlib` or `pip install 'specllama[plots]'`",
        )
    with _reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "free disk space or use a folder on another disk" if error.errno in NO_ROOM else "use another folder"
        raise ReportError(f"{path} cannot be written: {error.strerror}", hint=hint) from None


def write(report: BenchReport, folder: Path) -> WrittenPlots:
    """Writes every plot that the report has data for; replaces existing files. Raises the errors of `prepare`."""
    prepare(folder)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it reports every missing font
    from matplotlib import font_manager, rc_context

    there = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _CJK_FONTS if name in there)]
    style: Any = {**_STYLE, "font.sans-serif": fonts}  # rc_context is typed with a Literal of all keys
    paths, missing = [], []
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for name in PLOTS:
            figure = draw(report, name)
            if figure is None:
                missing.append(name)
            else:
                paths += [_save(figure, folder / f"{name}.{kind}", kind) for kind in FORMATS]
    return WrittenPlots(tuple(paths), tuple(missing))


def _save(figure: Figure, path: Path, kind: str) -> Path:
    """Replaces the file in one step: an error or a full disk leaves no incomplete picture."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=_PNG_DPI, metadata={"Date": None} if kind == "svg" else None)
    with _reporting(path):
        write_own(path, picture.getvalue())
    return path


def draw(report: BenchReport, name: str) -> Figure | None:
    """One of PLOTS with a panel for each condition that has data; None without data."""
    plot, conditions = PLOTS[name], report.plan.conditions
    if plot.points is costs:  # the same under every condition
        found = [("", costs(report, 0))]
    else:
        found = [(condition_name(each, conditions), plot.points(report, i)) for i, each in enumerate(conditions)]
    titled = [(title, panel) for title, panel in found if panel.series]
    if not titled:
        return None
    panels = [panel for _, panel in titled]
    figure, every = _figure(report, plot.title, len(panels), *plot.size(panels))
    for axes, (title, panel) in zip(every, titled, strict=True):
        plot.draw(axes, panel, panels)
        axes.set_title(_printable(title))
        axes.set_xlabel(plot.x)
        place = axes.get_subplotspec()
        if place is None or place.is_first_col():
            axes.set_ylabel(plot.y)
    _legend(figure, every)
    return figure


def _printable(text: str) -> str:
    """Replaces characters of file names that fonts cannot draw."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _caption(report: BenchReport) -> str:
    """Models, machine and date; marks partial and synthetic reports."""
    names = [str(report.target.get("file", "")), *report.plan.drafts]
    parts = [" + ".join(Path(name).name for name in names if name), report.machine.cpu, report.made[:10]]
    if report.synthetic is not None:
        parts.append(f"SYNTHETIC acceptance {report.synthetic:g}: no valid output")
    if report.partial:
        parts.append("PARTIAL: runs of the plan are missing")
    return _printable("  |  ".join(part for part in parts if part))


def _figure(report: BenchReport, title: str, n_panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """`n_panels` axes of the given size in inches, at most three in a row."""
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
        axes.tick_params(labelbottom=True)  # the last row may be incomplete
    left = 0.1 / (width * n_columns)
    figure.text(left, 1.0 - 0.08 / whole, title, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(left, 1.0 - 0.30 / whole, "\n".join(caption), ha="left", va="top", fontsize=6.5, color=_GREY)
    return figure, list(grid.flat[:n_panels])


def _legend(figure: Figure, every: Sequence[Axes]) -> None:
    """One legend for all panels, below them."""
    found: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    n_columns = int(figure.get_figwidth() / (0.75 + 0.075 * max(map(len, found))))  # inches of a sign and of its name
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), n_columns or 1))


def _looks(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash by the name of a series, the same in every panel."""
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _DASHES[(i // len(_COLOURS)) % len(_DASHES)],
        }
        for i, name in enumerate(names)
    }


def _error(marks: Sequence[Mark]) -> Any:
    """Distances down and up from each value for matplotlib; None without intervals."""
    if all(mark.low == mark.high for mark in marks):
        return None
    return [[max(mark.y - mark.low, 0.0) for mark in marks], [max(mark.high - mark.y, 0.0) for mark in marks]]


def _xs(series: Series) -> list[float]:
    return [mark.x for mark in series.marks]


def _ys(series: Series) -> list[float]:
    return [mark.y for mark in series.marks]


def _name_rows(axes: Axes, panel: Panel) -> None:
    """The ticks as rows, the first on top."""
    last = panel.ticks[-1][0]
    axes.set_yticks([x for x, _ in panel.ticks], [_printable(name) for _, name in panel.ticks])
    axes.set_ylim(last + 0.6, -0.6)


def _name_columns(axes: Axes, panel: Panel) -> None:
    axes.set_xticks([x for x, _ in panel.ticks], [_printable(name) for _, name in panel.ticks])
    axes.grid(axis="y")


def _draw_classes(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    looks, step = _looks(panels), 0.7 / len(panel.series)
    for i, series in enumerate(panel.series):
        shift = (i - (len(panel.series) - 1) / 2) * step
        axes.errorbar(
            _ys(series), [x + shift for x in _xs(series)], xerr=_error(series.marks), label=_printable(series.name),
            markersize=4, linewidth=1, elinewidth=1, capsize=2, **{**looks[series.name], "linestyle": "none"},
        )  # fmt: skip
    axes.axvline(1.0, color=_GREY, linewidth=1, label="plain decoding")
    axes.axhline(panel.ticks[-1][0] - 0.5, color=_FAINT, linewidth=1)  # separates "all" from the classes
    _name_rows(axes, panel)
    axes.grid(axis="x")


def _draw_lengths(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    looks = _looks(panels)
    axes.axhline(1.0, color=_GREY, linewidth=1, label="plain decoding: break-even")
    for series in panel.series:
        name, look = _printable(series.name), looks[series.name]
        axes.errorbar(
            _xs(series), _ys(series), yerr=_error(series.marks), label=f"{name}, measured",
            markersize=5, linewidth=1.4, elinewidth=1, capsize=2.5, **look,
        )  # fmt: skip
        if series.predicted:
            axes.plot(
                [x for x, _ in series.predicted], [y for _, y in series.predicted], label=f"{name}, predicted",
                color=look["color"], linestyle=(0, (2, 2)), linewidth=1.1, marker=look["marker"], markersize=5,
                markerfacecolor="white", zorder=1.9,
            )  # fmt: skip
    _name_columns(axes, panel)


def _draw_lines(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    looks = _looks(panels)
    for series in panel.series:
        name = _printable(series.name)
        axes.plot(_xs(series), _ys(series), label=name, markersize=4.5, linewidth=1.4, **looks[series.name])
    _name_columns(axes, panel)


def _draw_positions(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    _draw_lines(axes, panel, panels)
    axes.set_ylim(0.0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _place: f"{100 * share:.0f} %")


def _draw_costs(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    _draw_lines(axes, panel, panels)
    n_most = panel.ticks[-1][0]
    axes.plot([1, n_most], [1, n_most], color=_GREY, linestyle=":", linewidth=1, label="n passes over one row")
    axes.set_ylim(0.0, 1.1 * max(mark.y for series in panel.series for mark in series.marks))


def _wholes(panel: Panel) -> list[float]:
    return [sum(each) for each in zip(*map(_ys, panel.series), strict=True)]


def _draw_times(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    """A bar for each arm; shares are written into the parts that are wide enough."""
    wholes = _wholes(panel)
    longest = max(whole for each in panels for whole in _wholes(each))
    lefts = [0.0] * len(wholes)
    for series, colour in zip(panel.series, _COLOURS, strict=False):
        axes.barh(_xs(series), _ys(series), left=lefts, height=0.7, color=colour, label=series.name, linewidth=0)
        for mark, left, whole in zip(series.marks, lefts, wholes, strict=True):
            if mark.y > 0.14 * longest:
                axes.text(
                    left + mark.y / 2, mark.x, f"{series.name} {100 * mark.y / whole:.0f} %", ha="center", va="center",
                    color="white", fontsize=7,
                )  # fmt: skip
        lefts = [left + mark.y for left, mark in zip(lefts, series.marks, strict=True)]
    for (place, _), whole in zip(panel.ticks, wholes, strict=True):
        axes.text(whole, place, f" {whole:.0f}", ha="left", va="center", fontsize=7, color=_GREY)
    axes.set_xlim(0.0, 1.08 * longest)
    _name_rows(axes, panel)


@dataclass(frozen=True, slots=True)
class _Plot:
    """`size` returns the size of a panel in inches."""

    title: str
    points: Callable[[BenchReport, int], Panel]
    draw: Callable[[Axes, Panel, Sequence[Panel]], None]
    size: Callable[[Sequence[Panel]], tuple[float, float]]
    x: str
    y: str = ""


def _size_by_class(panels: Sequence[Panel]) -> tuple[float, float]:
    n_classes, n_series = (max(len(getattr(panel, name)) for panel in panels) for name in ("ticks", "series"))
    return 4.8, 0.6 + n_classes * (0.16 + 0.13 * n_series)


PLOTS: Mapping[str, _Plot] = {
    "speedup-by-class": _Plot(
        "Speedup by class of prompts", by_class, _draw_classes, _size_by_class,
        "decoding speed over plain decoding, 95 % interval",
    ),
    "speedup-over-length": _Plot(
        "Speedup over the longest draft", over_length, _draw_lengths, lambda _: (4.8, 3.2),
        "longest draft K (tokens)", "decoding speed over\nplain decoding, 95 % interval",
    ),
    "acceptance-by-position": _Plot(
        "Acceptance by position in the draft", by_position, _draw_positions, lambda _: (4.8, 3.2),
        "position in the draft (1 = first token)", "accepted here, share of all\nsteps with a draft",
    ),
    "costs": _Plot(
        "Cost of a pass over n rows, T(n)", costs, _draw_costs, lambda _: (6.0, 3.6),
        "rows in one pass, n (tokens)", "time, in passes of the target\nover one row, T(n)/T(1)",
    ),
    "time-split": _Plot(
        "Time per token by part", time_split, _draw_times,
        lambda panels: (5.2, 0.7 + 0.38 * max(len(panel.ticks) for panel in panels)), "time per token (ms)",
    ),
}  # fmt: skip
