"""Tuning: measure the ways of loading a pair, each in a child process, and keep what promises to be fastest.

A child for each way, because a build can die of a kernel path, and because weights arranged twice need memory twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from specllama.base.child import Tell
from specllama.base.errors import BackendError, SpecllamaError
from specllama.drafters import SIMPLE
from specllama.drafters.controller import CostProfile, Points
from specllama.llama.kernel_path import DEFAULT, KernelPath
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey, Threads
from specllama.tuning import traces
from specllama.tuning.child import HeldUp, Measured, MeasureJob, RunMeasureJob, Way, run_child, steady
from specllama.tuning.costs import QUICK_ROWS, VERIFY_ROWS
from specllama.tuning.kernel_paths import MOST_PATHS, Paths, split
from specllama.tuning.traces import Trace, TracedAnswer

# Where visits of the same path differ by more than this, the machine was busy with something else, and paths that were
# measured one after the other cannot be compared.
MOST_DRIFT = 1.1
# A kernel path on which plain decoding is slower by more than this cannot be chosen, however well drafts do there:
# whenever drafting pauses, that would be the speed.
SLOWEST_PLAIN = 1.05
# Another path than the default one must promise so much more: measurements of one machine differ by as much.
PATH_MARGIN = 1.03
# The path that was chosen counts as plain decoding's fastest one where it is slower by no more than this: what
# drafting is held against should be loaded in another way only for a reason.
PLAIN_TIE = 1.01

# Of the time for the passes of one child, what a derived draft gets: fewer passes are measured of it; and what a way
# gets that is only looked at to find the best few.
VARIANT_SHARE = 0.25
COARSE_SHARE = 0.25
COARSE_ROWS = (1, 4, 8)
THREADS_SHARE = 0.2  # beside them, what choosing the numbers of threads gets, once


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneEffort:
    """How much time to spend."""

    seconds: float  # for the passes of one child
    n_visits: int  # children for each way of loading, in turn, so that a drift of the machine strikes all alike
    n_tokens: int  # generated for each class of prompts
    rows: tuple[int, ...] = VERIFY_ROWS  # the target's blocks


QUICK = TuneEffort(seconds=5.0, n_visits=1, n_tokens=24, rows=QUICK_ROWS)
THOROUGH = TuneEffort(seconds=30.0, n_visits=2, n_tokens=96)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of loading the pair, as one or more children measured it."""

    way: Way
    step_s: float  # T(1), in the fastest visit
    verify: Points | None  # in units of T(1) in the same visit: a machine that is slow for a while does not matter
    draft: Points

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        way = {"target": self.way.target.to_json(), "draft": self.way.draft.to_json()}
        return {**way, "step_s": self.step_s, "verify": self.verify, "draft_passes": self.draft}


@dataclass(frozen=True, slots=True)
class Variant:
    """A draft that could be used instead, as its children measured it."""

    path: Path
    layouts: tuple[Layout, ...]  # without target
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all children."""

    layouts: tuple[Layout, ...]
    traces: tuple[Trace, ...]
    failures: tuple[str, ...]  # paths and drafts that cannot be used, and why
    drift: float  # by how much visits of the same path differ; 1 = not at all
    variants: tuple[Variant, ...] = ()
    threads: Threads | None = None  # all was measured with; None = as the options say
    strategy: str = SIMPLE  # whose drafts these are; see `ProfileKey`
    n_spelled: float = 1.0  # of the draft's own tokens to one of the target's

    @property
    def comparable(self) -> bool:
        """Was the machine quiet enough to compare paths that were measured one after the other?"""
        return self.drift <= MOST_DRIFT


def scaled(points: Points, factor: float) -> Points:
    """The same costs in another unit."""
    return tuple((n, cost * factor) for n, cost in points)


def _mean_points(several: Sequence[Points]) -> Points:
    """The mean of several measurements of the same rows."""
    return tuple((points[0][0], fmean(cost for _, cost in points)) for points in zip(*several, strict=True))


def merged(way: Way, visits: Sequence[Measured]) -> Layout:
    """What several children found about one way."""
    # Both were measured in the same rounds, so the first point of one is the unit of the other.
    units = [each.verify[0][1] if each.verify else each.step_s for each in visits]
    curves = [scaled(each.verify, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.verify]
    drafts = [scaled(each.draft, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.draft]
    step_s = min(each.step_s for each in visits)
    return Layout(way, step_s, _mean_points(curves) if curves else None, _mean_points(drafts))


def _schedule(ways: Sequence[Way], n_visits: int) -> list[tuple[Way, bool]]:
    """(way, whether it is only a check) of every child, in turn; the first of several at the end, too."""
    turns = [(way, False) for _ in range(n_visits) for way in ways]
    return [*turns, (ways[0], True)] if len(ways) > 1 else turns


def _rising(tell: Tell) -> Tell:
    """`tell` with shares that never fall, also where a child starts again."""
    most = 0.0

    def told(what: str, share: float) -> None:
        nonlocal most
        most = max(most, share)
        tell(what, most)

    return told


class _Visits:
    """Results and failures of the children so far, by way of loading."""

    def __init__(
        self, run: RunMeasureJob, threads: Threads | None = None, failures: Mapping[Way, SpecllamaError] | None = None
    ) -> None:
        self._run = run
        self.by_way: dict[Way, list[Measured]] = {}
        self.failures = dict(failures or {})
        self._held_up: dict[Way, SpecllamaError] = {}  # in a visit that does not count
        self._divided: set[Way] = set()  # failed, but each of its two paths got a chance of its own
        self.traces: tuple[Trace, ...] = ()
        self.answers: tuple[TracedAnswer, ...] = ()
        self.threads = threads
        self.n_spelled: float | None = None  # once there are answers to count in
        self.fastest = math.inf

    def tour(self, ways: Sequence[Way], n_visits: int, job: MeasureJob, tell: Tell) -> None:
        """Visit every way in turn, the default one first. Raises BackendError where that was held up throughout."""
        turns = deque(_schedule(ways, n_visits))
        done = 0.0
        while turns:
            width = (1.0 - done) / len(turns)
            way, checks = turns.popleft()
            nothing_to_check = checks and way not in self.by_way
            if way not in self.failures and way not in self._divided and not nothing_to_check:
                n_tokens = 0 if self.traces or checks else job.n_tokens
                self._visit(
                    replace(job, way=way, n_tokens=n_tokens, checks=checks),
                    lambda what, share, at=(done, width): tell(what, at[0] + at[1] * share),  # type: ignore[misc]
                )
                if way in self.failures and (parts := split(way, ways[0])):
                    del self.failures[way]
                    self._divided.add(way)
                    # The last one, which checks, stays the last one.
                    turns.rotate(1)
                    turns.extend((part, False) for part in parts for _ in range(n_visits))
                    turns.rotate(-1)
            done += width
        unseen = {way: error for way, error in self._held_up.items() if way not in self.by_way}
        if ways[0] in unseen:  # no fault of the path, and nothing to hold the others against
            raise unseen[ways[0]]
        self.failures |= unseen
        # In their order, whichever was the first that was not held up.
        self.by_way = {way: self.by_way[way] for way in (*ways, *self.by_way) if way in self.by_way}

    def _visit(self, job: MeasureJob, tell: Tell) -> None:
        """Run one child and file its result."""
        most_step_s = self.fastest * SLOWEST_PLAIN
        job = replace(job, threads=self.threads, most_step_s=most_step_s, n_spelled=self.n_spelled)
        try:
            found = steady(self._run, job, tell)
        except HeldUp as error:
            self._held_up[job.way] = error
            return
        except SpecllamaError as error:
            self.failures[job.way] = error
            return
        self.by_way.setdefault(job.way, []).append(found)
        self.traces, self.answers = self.traces or found.traces, self.answers or found.answers
        self.threads = self.threads or found.threads
        if found.answers:
            self.n_spelled = found.n_spelled
        self.fastest = min(self.fastest, found.step_s)

    @property
    def layouts(self) -> list[Layout]:
        """Every way that can be used. Raises BackendError if none can."""
        found_all = [merged(way, found) for way, found in self.by_way.items() if way not in self.failures]
        if not any(layout.verify for layout in found_all):
            raise next(iter(self.failures.values()), BackendError("nothing could be measured"))
        return found_all

    @property
    def drift(self) -> float:
        """By how much visits of the same way differ."""
        steps = [[each.step_s for each in found] for found in self.by_way.values()]
        return max(max(each) / min(each) for each in steps)


def measure(
    subject: ProfileKey, paths: Paths, effort: TuneEffort, tell: Tell, run: RunMeasureJob = run_child
) -> Findings:
    """Measure every path of target and draft, or the best few of many, then the variants of the draft.

    Raises BackendError if no path works.
    """
    visits, tell = _Visits(run), _rising(tell)
    failures = [f"kernel paths by tensor type: {paths.failure}"] if paths.failure else []
    if effort.n_visits == 1:  # in a hurry
        paths = replace(paths.head(2), variants=paths.head(1).variants)
    threads_s = THREADS_SHARE * effort.seconds  # however short the look of the child that finds them
    n_coarse = COARSE_SHARE * len(paths.ways) if len(paths.ways) > MOST_PATHS else 0.0
    n_full = effort.n_visits * min(len(paths.ways), MOST_PATHS)
    each_variant = [VARIANT_SHARE * len(several) for _, several in paths.head(MOST_PATHS).variants]
    n_all = n_coarse + n_full + sum(each_variant)

    def telling(n_before: float, share_of: float) -> Tell:
        return lambda what, share: tell(what, (n_before + share_of * share) / n_all)

    if n_coarse:
        job = MeasureJob(
            subject, paths.ways[0], COARSE_SHARE * effort.seconds, 0, rows=COARSE_ROWS, threads_s=threads_s
        )
        visits.tour(paths.ways, 1, job, telling(0, n_coarse))
        paths = _shortlist(paths, visits)
        visits = _Visits(run, visits.threads, visits.failures)
    job = MeasureJob(subject, paths.ways[0], effort.seconds, effort.n_tokens, rows=effort.rows, threads_s=threads_s)
    visits.tour(paths.ways, effort.n_visits, job, telling(n_coarse, n_full))
    layouts = visits.layouts
    failures += [f"{way.name}: {error}" for way, error in visits.failures.items()]
    found: list[Variant] = []
    for i, (path, several) in enumerate(paths.head(MOST_PATHS).variants):
        at = telling(n_coarse + n_full + sum(each_variant[:i]), each_variant[i])
        derived = replace(subject, draft=path)
        try:
            variant, failed = _measure_variant(derived, several, layouts[0], visits, effort, at, run)
            found.append(variant)
            failures += failed
        except SpecllamaError as error:
            failures.append(f"{path.stem}: {error}")
    return Findings(
        layouts=tuple(layouts),
        traces=visits.traces,
        failures=tuple(failures),
        drift=visits.drift,
        variants=tuple(found),
        threads=visits.threads,
        strategy=subject.strategy,
        n_spelled=visits.n_spelled or 1.0,
    )


def _shortlist(paths: Paths, visits: _Visits) -> Paths:
    """The paths that were best in a coarse comparison; the first ones where the machine was too busy for one."""
    layouts = visits.layouts
    if visits.drift > MOST_DRIFT:
        working = Paths(
            tuple(path for path in paths.target if any(path == layout.way.target for layout in layouts)),
            tuple(path for path in paths.draft if any(path == layout.way.draft for layout in layouts)),
        )
        return replace(working.head(MOST_PATHS), variants=paths.variants)

    def price(layout: Layout) -> float:
        """The usual time of the target's passes."""
        assert layout.verify is not None
        return layout.step_s * math.exp(fmean(math.log(cost) for _, cost in layout.verify))

    fastest = min(layouts, key=lambda layout: layout.step_s)
    steps = {layout.way.target: layout.step_s for layout in reversed(layouts)}
    targets = _first({layout.way.target: price(layout) for layout in reversed(layouts) if layout.verify})
    # What plain decoding is best on is what drafts must beat, so it is measured in full as well.
    if fastest.way.target not in targets and PLAIN_TIE * fastest.step_s < min(steps[path] for path in targets):
        targets = (*targets[:-1], fastest.way.target)
    prices = {layout.way.draft: layout.step_s * layout.draft[0][1] for layout in reversed(layouts) if layout.draft}
    return Paths(targets, _first(prices) or paths.draft[:1], paths.variants)


def _first(prices: Mapping[KernelPath, float]) -> tuple[KernelPath, ...]:
    """The default, where it can be used, and the cheapest others."""
    ranked = sorted(prices, key=lambda path: (path != DEFAULT, prices[path]))
    return tuple(ranked[:MOST_PATHS])


def _measure_variant(
    subject: ProfileKey,
    several: Sequence[KernelPath],
    target: Layout,
    visits: _Visits,
    effort: TuneEffort,
    tell: Tell,
    run: RunMeasureJob,
) -> tuple[Variant, list[str]]:
    """A draft on every path of its own, judged by what the target said before; and which paths failed, and why.

    Raises what the first path did if none works.
    """
    assert subject.draft is not None
    found, recorded, errors = list[Layout](), tuple[Trace, ...](), dict[KernelPath, SpecllamaError]()
    n_spelled: float | None = None
    for i, path in enumerate(several):
        way = replace(target.way, draft=path)
        answers = () if recorded else visits.answers
        job = MeasureJob(
            subject, way, VARIANT_SHARE * effort.seconds, 0, answers=answers, rows=(1,), threads=visits.threads
        )
        job = replace(job, n_spelled=n_spelled)  # its own, not that of the draft that it was derived from
        try:
            at: Tell = lambda what, share, i=i: tell(what, (i + share) / len(several))  # type: ignore[misc]  # noqa: E731
            measured = steady(run, job, at)
        except SpecllamaError as error:
            errors[path] = error
            continue
        recorded, n_spelled = recorded or measured.traces, measured.n_spelled
        # In units of T(1) in the same rounds: it does not matter how fast the machine was then.
        found.append(replace(merged(way, [measured]), step_s=target.step_s, verify=None))
    if not found and errors:
        raise next(iter(errors.values()))
    failures = [f"{subject.draft.stem}, {path.name}: {error}" for path, error in errors.items()]
    return Variant(subject.draft, tuple(found), recorded), failures


def _costs(target: Layout, draft: Layout) -> CostProfile:
    """In units of the target's T(1)."""
    assert target.verify is not None
    points = scaled(draft.draft, draft.step_s / target.step_s)
    # Without a draft nothing is ever asked of its costs; they have to be something.
    return CostProfile(verify=((1, 1.0), *target.verify[1:]), draft=points or ((1, 1.0),))


def figures(recorded: Sequence[Trace], costs: CostProfile, slowdown: float = 1.0) -> tuple[ClassFigures, ...]:
    """What to expect by class; `slowdown`: plain decoding's time here over that on its fastest path."""
    found = []
    for name, greedy in dict.fromkeys((trace.name, trace.greedy) for trace in recorded):
        seen = [trace for trace in recorded if (trace.name, trace.greedy) == (name, greedy)]
        n_max, rate = traces.best_length(seen, costs)
        sure = traces.confidence(seen)
        found.append(ClassFigures(name, greedy, traces.acceptance(seen), sure, n_max, rate / slowdown))
    return tuple(found)


def _cheapest_draft(layouts: Sequence[Layout]) -> Layout:
    """The path for the draft: its price is all that matters of it. The first one unless another is clearly cheaper."""
    best = layouts[0]
    for layout in layouts[1:]:
        if layout.draft and PATH_MARGIN * layout.draft[0][1] * layout.step_s < best.draft[0][1] * best.step_s:
            best = layout
    return best


def _plain_path(layouts: Sequence[Layout], profile: Profile) -> KernelPath:
    """The path on which plain decoding alone was fastest."""
    fastest = min(layouts, key=lambda layout: layout.step_s)
    return profile.target_path if profile.step_s <= PLAIN_TIE * fastest.step_s else fastest.way.target


def choose(found: Findings, *, quick: bool) -> Profile:
    """The profile of the best kernel paths, the target's by the geometric mean of the classes' predicted speeds.

    Where the machine was too busy to compare them, the default ones.
    """
    layouts = found.layouts if found.comparable else found.layouts[:1]
    fastest = min(layout.step_s for layout in layouts)
    measured = [layout for layout in layouts if layout.verify is not None]
    usable = [layout for layout in measured if layout.step_s <= SLOWEST_PLAIN * fastest] or measured
    best: Profile | None = None
    best_score = 0.0
    for derived, drafts, recorded in _drafts(found):
        draft = _cheapest_draft(drafts)
        for target in usable:
            costs = _costs(target, draft)
            profile = Profile(
                made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                quick=quick,
                target_path=target.way.target,
                draft_path=draft.way.draft,
                step_s=target.step_s,
                costs=costs,
                classes=figures(recorded, costs, target.step_s / fastest),
                threads=found.threads,
                derived=derived,
                strategy=found.strategy,
            )
            score = _score(profile, fastest)
            if best is None or score > PATH_MARGIN * best_score:
                best, best_score = profile, score
    assert best is not None, "at least one path was measured"
    return replace(best, plain_path=_plain_path(layouts, best))


def _drafts(found: Findings) -> list[tuple[Path | None, Sequence[Layout], Sequence[Trace]]]:
    """(file, its layouts, its traces) of every draft, that of the subject first."""
    several = [(variant.path, variant.layouts, variant.traces) for variant in found.variants]
    return [
        (path, layouts if found.comparable else layouts[:1], recorded)
        for path, layouts, recorded in [(None, found.layouts, found.traces), *several]
    ]


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft on the profile's path of the target."""

    path: Path | None  # None = the subject's own
    cost: float  # c
    classes: tuple[ClassFigures, ...]

    @property
    def speed(self) -> float:
        """The geometric mean of the classes' speeds."""
        return mean_speed(self.classes)


def judged(found: Findings, profile: Profile) -> list[Judged]:
    """Every draft by what it was chosen by, that of the subject first."""
    target = next(layout for layout in found.layouts if layout.way.target == profile.target_path and layout.verify)
    told = []
    for path, layouts, recorded in _drafts(found):
        costs = _costs(target, _cheapest_draft(layouts))
        told.append(Judged(path, costs.draft_cost(), figures(recorded, costs)))
    return told


def mean_speed(classes: Sequence[ClassFigures]) -> float:
    """The geometric mean of the classes' speeds; 1 where there are none."""
    return math.exp(fmean(math.log(each.speedup) for each in classes)) if classes else 1.0


def _score(profile: Profile, fastest: float) -> float:
    """Speed over plain decoding on its fastest path."""
    return mean_speed(profile.classes) if profile.classes else fastest / profile.step_s
