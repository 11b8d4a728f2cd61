"""The benchmark's plots as PNG and SVG: points taken from a report, drawn with matplotlib (extra `plots`)."""

from __future__ import annotations

import io
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

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
_WIDTH, _HEIGHT, _MARGIN = 8.0, 3.6, 0.9  # inches: of a picture, of a panel, and of title and caption
_CAPTION = 150  # characters of a line
_PNG_DPI = 160
# The colour-blind safe colours of Okabe and Ito. The marker differs as well, and their numbers have no common factor.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v")
_GREY = "#666666"
# DejaVu has no Chinese or Japanese characters; the usual fonts of Linux, macOS and Windows that have them.
_CJK_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans JP", "Hiragino Sans", "Yu Gothic", "Meiryo", "PingFang SC",
    "Microsoft YaHei", "IPAexGothic", "IPAGothic", "WenQuanYi Zen Hei",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "axes.grid": True,
    "grid.color": "#DDDDDD",
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
    if places:
        series.append(Series("n passes over one row", _exact([(1, 1.0), (int(places[-1]), places[-1])])))
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
        draft = -1 if arm.draft is None else arm.draft
        return (arm.length.is_auto, arm.load, arm.spec_type, arm.verify_rule, arm.seed_mode, draft)

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
            f"seed mode {arm.seed_mode}" if arm.seed_mode != "draws" else "",
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
    from matplotlib.figure import Figure

    plot, conditions = PLOTS[name], report.plan.conditions
    found = [(condition_name(each, conditions), plot.points(report, i)) for i, each in enumerate(conditions)]
    if plot.points is costs:  # the same under every condition
        found = [("", found[0][1])]
    panels = [(title, panel) for title, panel in found if panel.series]
    if not panels:
        return None
    looks = _looks([panel for _, panel in panels])
    figure = Figure((_WIDTH, _HEIGHT * len(panels) + _MARGIN), layout="constrained")
    figure.suptitle(plot.title, fontweight="bold")
    figure.supxlabel("\n".join(textwrap.wrap(_caption(report), _CAPTION)), fontsize=6.5, color=_GREY)
    for axes, (title, panel) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        plot.draw(axes, panel, looks)
        if plot.is_speedup:
            axes.axhline(1.0, color=_GREY, linewidth=1, label="plain decoding")
        axes.set(title=_printable(title), xlabel=plot.x, ylabel=plot.y)
        axes.set_ylim(bottom=0.0)
        names = [_printable(text) for _, text in panel.ticks]
        slant = {"rotation": 30, "ha": "right"} if max(map(len, names)) > len(AUTO) else {}
        axes.set_xticks([x for x, _ in panel.ticks], names, **slant)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
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


Looks: TypeAlias = Mapping[str, Mapping[str, Any]]


def _looks(panels: Sequence[Panel]) -> Looks:
    """Colour and marker by the name of a series, the same in every panel."""
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return {
        name: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 4.5}
        for i, name in enumerate(names)
    }


def _draw_points(axes: Axes, panel: Panel, looks: Looks, *, apart: float = 0.0) -> None:
    """Points with their intervals, joined by lines, or the series side by side over a width of `apart`."""
    for i, series in enumerate(panel.series):
        shift = apart * ((i + 0.5) / len(panel.series) - 0.5)
        ys = [mark.y for mark in series.marks]
        errors = [[mark.y - mark.low for mark in series.marks], [mark.high - mark.y for mark in series.marks]]
        axes.errorbar(
            [mark.x + shift for mark in series.marks], ys, errors if any(map(any, errors)) else None,
            label=_printable(series.name), linestyle="none" if apart else "-", capsize=2, **looks[series.name],
        )  # fmt: skip
        if series.predicted:
            axes.plot(
                *zip(*series.predicted, strict=True), label=f"{_printable(series.name)}, predicted", linestyle=":",
                markerfacecolor="white", **looks[series.name],
            )  # fmt: skip


def _draw_bars(axes: Axes, panel: Panel, looks: Looks) -> None:
    """The series on top of each other."""
    bottoms = [0.0] * len(panel.ticks)
    for series in panel.series:
        xs, ys = [mark.x for mark in series.marks], [mark.y for mark in series.marks]
        axes.bar(xs, ys, 0.7, bottoms, label=series.name, color=looks[series.name]["color"])
        bottoms = [bottom + y for bottom, y in zip(bottoms, ys, strict=True)]


@dataclass(frozen=True, slots=True)
class _Plot:
    title: str
    points: Callable[[BenchReport, int], Panel]
    draw: Callable[[Axes, Panel, Looks], None]
    x: str
    y: str
    is_speedup: bool = False  # 1 is plain decoding


_SPEEDUP = "decoding speed over\nplain decoding, 95 % interval"
PLOTS: Mapping[str, _Plot] = {
    "speedup-by-class": _Plot(
        "Speedup by class of prompts", by_class, partial(_draw_points, apart=0.7), "class", _SPEEDUP, is_speedup=True
    ),
    "speedup-over-length": _Plot(
        "Speedup over the longest draft", over_length, _draw_points, "longest draft K (tokens)", _SPEEDUP,
        is_speedup=True,
    ),
    "acceptance-by-position": _Plot(
        "Acceptance by position in the draft", by_position, _draw_points, "position in the draft (1 = first token)",
        "accepted here, share of all\nsteps with a draft",
    ),
    "costs": _Plot(
        "Cost of a pass over n rows, T(n)", costs, _draw_points, "rows in one pass, n (tokens)",
        "time, in passes of the target\nover one row, T(n)/T(1)",
    ),
    "time-split": _Plot("Time per token by part", time_split, _draw_bars, "setting", "time per token (ms)"),
}  # fmt: skip
