"""What the benchmark's plots show: points read off a report, without any way of drawing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from statistics import fmean
from typing import TypeVar

from specllama.bench.plan import differences
from specllama.bench.report import ALL, Arm, BenchReport, BenchRow, Interval, TimeSplit
from specllama.bench.verdict import condition_name

T = TypeVar("T")

MOST_ARMS = 5  # in a plot by class: more cannot be told apart
PARTS: Sequence[str] = tuple(field.name for field in fields(TimeSplit))


@dataclass(frozen=True, slots=True)
class ChartMark:
    """One measured value; low and high are its confidence interval, the value itself where there is none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind, in the order of x."""

    name: str
    marks: tuple[ChartMark, ...]
    predicted: tuple[tuple[float, float], ...] = ()  # what the cost model expects at some of these places


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: everything measured under one condition."""

    title: str
    ticks: tuple[tuple[float, str], ...]  # places on the x axis that have a name
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class TimeBar:
    """Where one arm's time goes."""

    name: str
    token_s: float  # seconds of decoding a token
    shares: tuple[float, ...]  # of PARTS, together 1


@dataclass(frozen=True, slots=True)
class BarPanel:
    """The arms under one condition."""

    title: str
    bars: tuple[TimeBar, ...]


# -------------------------------------------------------------------------------------------------- the plots


def _mark(x: float, found: Interval) -> ChartMark:
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    return ChartMark(x, found.value, low, high)


def _panels(report: BenchReport, make: Callable[[int, str], T | None]) -> tuple[T, ...]:
    """One for each condition that has something to show."""
    conditions = report.plan.conditions
    names = [condition_name(each, conditions) for each in conditions]
    return tuple(panel for i, name in enumerate(names) if (panel := make(i, name)) is not None)


def _load_names(report: BenchReport) -> list[str]:
    """What tells each way of loading from the others; empty where there is only one."""
    return [" ".join(differences(load, report.plan.loads)) for load in report.plan.loads]


def _rows(report: BenchReport, condition: int, category: str = ALL) -> list[BenchRow]:
    """In the order of the arms."""
    rows = [row for row in report.rows_of(category) if row.condition == condition]
    return sorted(rows, key=lambda row: row.arm)


def by_class(report: BenchReport) -> tuple[Panel, ...]:
    """Speedup of the fastest arms for each class of prompts; x counts the classes, "all" is the last.

    The arms are the same under every condition: those that are fastest over all of them.
    """
    named = dict.fromkeys(prompt.category for prompt in report.plan.prompts)
    classes = [*named, ALL]
    speeds: dict[int, list[float]] = {}
    for row in report.rows_of():
        if row.speedup is not None and row.decode_tok_s:
            speeds.setdefault(row.arm, []).append(row.decode_tok_s)
    fastest = sorted(speeds, key=lambda arm: -fmean(speeds[arm]))[:MOST_ARMS]

    def panel(condition: int, title: str) -> Panel | None:
        series = []
        for arm in sorted(fastest):
            marks = [
                _mark(float(place), row.speedup)
                for place, name in enumerate(classes)
                for row in _rows(report, condition, name)
                if row.arm == arm and row.speedup is not None
            ]
            if marks:
                series.append(Series(report.plan.arms[arm].name, tuple(marks)))
        kept = {mark.x for each in series for mark in each.marks}
        ticks = [(float(i), name) for i, name in enumerate(classes) if i in kept]
        return Panel(title, tuple(ticks), tuple(series)) if series else None

    return _panels(report, panel)


def over_length(report: BenchReport) -> tuple[Panel, ...]:
    """Speedup over the longest draft, with what the cost model predicts; `auto` stands behind the longest."""
    plan = report.plan
    lengths = sorted({arm.n_max for arm in plan.arms if arm.n_max is not None} | {0})
    auto_at = float(lengths[-1] + max(1, lengths[-1] // 4))
    ticks = [(float(n), str(n)) for n in lengths]
    if any(arm.n_max is None for arm in plan.arms):
        ticks.append((auto_at, "auto"))

    def panel(condition: int, title: str) -> Panel | None:
        rows = [row for row in _rows(report, condition) if row.speedup is not None]
        series = tuple(_over_length(report, rows, auto_at))
        return Panel(title, tuple(ticks), series) if series else None

    return _panels(report, panel)


def _families(report: BenchReport, rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """The rows of arms that differ in nothing but the longest draft, family by family."""

    def family(row: BenchRow) -> tuple[int, str, str, int]:
        arm = report.plan.arms[row.arm]
        return (arm.load, arm.spec_type, arm.verify_rule, -1 if arm.draft is None else arm.draft)

    return [list(each) for _, each in groupby(sorted(rows, key=family), key=family)]


def _over_length(report: BenchReport, rows: Sequence[BenchRow], auto_at: float) -> Iterator[Series]:
    """One series for all arms that differ in nothing but the length."""
    arms = report.plan.arms
    families = _families(report, rows)
    names = _family_names(report, [arms[each[0].arm] for each in families])
    for name, members in zip(names, families, strict=True):
        marks, predicted = [ChartMark(0.0, 1.0, 1.0, 1.0)], [(0.0, 1.0)]  # no draft is plain decoding itself
        if all(arms[row.arm].n_max is None for row in members):
            name, marks = f"auto: {name}", []  # it has no place on the axis of lengths
        for row in members:
            n_max = arms[row.arm].n_max
            assert row.speedup is not None, "those without were left out"
            marks.append(_mark(auto_at if n_max is None else float(n_max), row.speedup))
            if n_max and row.predicted is not None:
                predicted.append((float(n_max), row.predicted))
        ordered = tuple(sorted(marks, key=lambda mark: mark.x))
        yield Series(name, ordered, tuple(sorted(predicted)) if len(predicted) > 1 else ())


def _family_names(report: BenchReport, arms: Sequence[Arm]) -> list[str]:
    """What tells these arms from each other, their lengths aside; the strategy always."""
    loads = _load_names(report)
    several_drafts = len({arm.draft for arm in arms if arm.draft is not None}) > 1
    several_rules = len({arm.verify_rule for arm in arms}) > 1
    names = []
    for arm in arms:
        parts = [arm.spec_type]
        if several_drafts and arm.draft is not None:
            parts.append(report.plan.drafts[arm.draft])
        if several_rules:
            parts.append(f"{arm.verify_rule} rule")
        names.append(", ".join(part for part in (*parts, loads[arm.load]) if part))
    return names


def by_position(report: BenchReport) -> tuple[Panel, ...]:
    """Share of the steps with a draft in which the token at each position was accepted; x is the position, from 1.

    Of arms that differ in nothing but the length the longest is shown: the others' curves are beginnings of its own.
    That of `auto`, whose steps differ in length, is not, and is shown, too.
    """

    def panel(condition: int, title: str) -> Panel | None:
        arms, shown = report.plan.arms, []
        for members in _families(report, [row for row in _rows(report, condition) if row.per_position]):
            shown += [row for row in members if arms[row.arm].n_max is None]
            fixed = [row for row in members if arms[row.arm].n_max is not None]
            shown += [max(fixed, key=lambda row: len(row.per_position))] if fixed else []
        shown.sort(key=lambda row: row.arm)
        series = [Series(arms[row.arm].name, _measured(list(enumerate(row.per_position, 1)))) for row in shown]
        n_most = max((len(row.per_position) for row in shown), default=0)
        return Panel(title, tuple((float(i), str(i)) for i in range(1, n_most + 1)), tuple(series)) if shown else None

    return _panels(report, panel)


def costs(report: BenchReport) -> tuple[Panel, ...]:
    """What a pass over n rows costs, in passes over one; x is n. One series for each load, and one for each draft."""
    loads = _load_names(report)
    series, seen = [], set()
    for each in report.costs:
        load = f", {loads[each.load]}" if loads[each.load] else ""
        if each.load not in seen:  # the target's costs are the same whatever drafts
            one = f"T(1) = {1000 * each.step_s:.3g} ms"
            series.append(Series(f"checking n rows, {one}{load}", _measured(each.profile.verify)))
            seen.add(each.load)
        if each.draft is not None:
            several = f" {report.plan.drafts[each.draft]}" if len(report.plan.drafts) > 1 else ""
            longest = each.profile.verify[-1][0]
            points = [point for point in each.profile.draft if point[0] <= longest]
            series.append(Series(f"draft{several}, n rows{load}", _measured(points)))
    if not series:
        return ()
    places = sorted({mark.x for each in series for mark in each.marks})
    return (Panel("", tuple((x, f"{x:g}") for x in places), tuple(series)),)


def _measured(points: Sequence[tuple[int, float]]) -> tuple[ChartMark, ...]:
    return tuple(ChartMark(float(n), cost, cost, cost) for n, cost in points)


def time_split(report: BenchReport) -> tuple[BarPanel, ...]:
    """Where the time of a token goes, arm by arm."""

    def panel(condition: int, title: str) -> BarPanel | None:
        bars = [
            TimeBar(
                report.plan.arms[row.arm].name,
                1.0 / row.decode_tok_s,
                tuple(getattr(row.time_split, part) for part in PARTS),
            )
            for row in _rows(report, condition)
            if row.time_split is not None and row.decode_tok_s
        ]
        return BarPanel(title, tuple(bars)) if bars else None

    return _panels(report, panel)
