"""Tuning: measure the ways of loading a pair and choose the fastest.

Each way has a child process: a kernel path can crash, and rearranged weights need memory for a second copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from specllama.base.child import Tell
from specllama.base.errors import BackendError, SpecllamaError
from specllama.drafters import SIMPLE
from specllama.drafters.controller import CostProfile, Points
from specllama.llama.kernel_path import KernelPath
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey, Threads
from specllama.tuning import traces
from specllama.tuning.child import HeldUp, Measured, MeasureJob, RunMeasureJob, Way, run_child, steady
from specllama.tuning.costs import QUICK_ROWS, VERIFY_ROWS
from specllama.tuning.kernel_paths import Paths, split
from specllama.tuning.traces import Trace, TracedAnswer

# If visits of the same path differ by more than this factor, the machine was busy, and paths cannot be compared.
MOST_DRIFT = 1.1
# A kernel path on which plain decoding is slower by more than this is never chosen: while drafting pauses, that is the
# speed.
SLOWEST_PLAIN = 1.05
PATH_MARGIN = 1.03  # another path must be faster than the default by this factor; repeated measurements differ as much
# The chosen path counts as the fastest for plain decoding if it is slower by no more than this: a comparison should
# load the target in another way only for a reason.
PLAIN_TIE = 1.01

VARIANT_SHARE = 0.25  # of the time for one child: a derived draft has fewer passes
THREADS_SHARE = 0.2  # in addition, once, for finding the numbers of threads


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneEffort:
    """How much time to spend."""

    seconds: float  # for the passes of one child
    n_visits: int  # children for each way of loading, in turn, so a drift of the machine affects all alike
    n_tokens: int  # generated for each class of prompts
    rows: tuple[int, ...] = VERIFY_ROWS  # the target's blocks


QUICK = TuneEffort(seconds=5.0, n_visits=1, n_tokens=24, rows=QUICK_ROWS)
THOROUGH = TuneEffort(seconds=30.0, n_visits=2, n_tokens=96)


@dataclass(frozen=True, slots=True)
class Layout:
    """The measurements of one way of loading the pair."""

    way: Way
    step_s: float  # T(1), in the fastest visit
    verify: Points | None  # in units of T(1) in the same visit, so a slow phase of the machine does not matter
    draft: Points

    def to_json(self) -> dict[str, object]:
        way = {"target": self.way.target.to_json(), "draft": self.way.draft.to_json()}
        return {**way, "step_s": self.step_s, "verify": self.verify, "draft_passes": self.draft}


@dataclass(frozen=True, slots=True)
class Variant:
    """The measurements of a derived draft."""

    path: Path
    layouts: tuple[Layout, ...]  # without target
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all children."""

    layouts: tuple[Layout, ...]
    traces: tuple[Trace, ...]
    failures: tuple[str, ...]  # paths and drafts that cannot be used, and why
    drift: float  # largest ratio of two visits of the same path
    variants: tuple[Variant, ...] = ()
    threads: Threads | None = None  # used for all measurements; None = those of the options
    strategy: str = SIMPLE  # of the draft model, see `ProfileKey`
    n_spelled: float = 1.0  # draft tokens for one target token

    @property
    def comparable(self) -> bool:
        """True if the machine was quiet enough to compare paths."""
        return self.drift <= MOST_DRIFT


def _scaled(points: Points, factor: float) -> Points:
    return tuple((n, cost * factor) for n, cost in points)


def _mean_points(several: Sequence[Points]) -> Points:
    return tuple((points[0][0], fmean(cost for _, cost in points)) for points in zip(*several, strict=True))


def merged(way: Way, visits: Sequence[Measured]) -> Layout:
    """The layout that results from all visits of one way."""
    # T(1) of the same rounds is the unit of both curves.
    units = [each.verify[0][1] if each.verify else each.step_s for each in visits]
    curves = [_scaled(each.verify, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.verify]
    drafts = [_scaled(each.draft, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.draft]
    step_s = min(each.step_s for each in visits)
    return Layout(way, step_s, _mean_points(curves) if curves else None, _mean_points(drafts))


def _within(tell: Tell, begin: float, width: float) -> Tell:
    """`tell` for a part of the whole."""
    return lambda what, share: tell(what, begin + width * share)


def _rising(tell: Tell) -> Tell:
    """`tell` with shares that never fall, even if a child starts again."""
    most = 0.0

    def told(what: str, share: float) -> None:
        nonlocal most
        most = max(most, share)
        tell(what, most)

    return told


class _Visits:
    """Runs children, and keeps their results and failures by way of loading."""

    def __init__(self, run: RunMeasureJob) -> None:
        self._run = run
        self.by_way: dict[Way, list[Measured]] = {}
        self.failures: dict[Way, SpecllamaError] = {}
        self._held_up: dict[Way, SpecllamaError] = {}  # in a visit that does not count
        self._divided: set[Way] = set()  # failed; each of its two paths is measured apart
        self.traces: tuple[Trace, ...] = ()
        self.answers: tuple[TracedAnswer, ...] = ()
        self.threads: Threads | None = None
        self.n_spelled: float | None = None  # counted in the first answers
        self.fastest = math.inf

    def tour(self, ways: Sequence[Way], n_visits: int, job: MeasureJob, tell: Tell) -> None:
        """Visit every way in turn, the default first and once more at the end, as a check.

        Raises BackendError if the default was held up in every visit.
        """
        turns = deque((way, False) for _ in range(n_visits) for way in ways)
        if len(ways) > 1:
            turns.append((ways[0], True))
        done = 0.0
        while turns:
            width = (1.0 - done) / len(turns)
            way, checks = turns.popleft()
            nothing_to_check = checks and way not in self.by_way
            if way not in self.failures and way not in self._divided and not nothing_to_check:
                n_tokens = 0 if self.traces or checks else job.n_tokens
                visit = replace(job, way=way, n_tokens=n_tokens, checks=checks)
                self._visit(visit, _within(tell, done, width))
                if way in self.failures and (parts := split(way, ways[0])):
                    del self.failures[way]
                    self._divided.add(way)
                    # The check stays the last turn.
                    turns.rotate(1)
                    turns.extend((part, False) for part in parts for _ in range(n_visits))
                    turns.rotate(-1)
            done += width
        unseen = {way: error for way, error in self._held_up.items() if way not in self.by_way}
        if ways[0] in unseen:  # nothing to compare the others with
            raise unseen[ways[0]]
        self.failures |= unseen
        # In the order of `ways`, even if the first visit was held up.
        self.by_way = {way: self.by_way[way] for way in (*ways, *self.by_way) if way in self.by_way}

    def _visit(self, job: MeasureJob, tell: Tell) -> None:
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
        """Every way that works. Raises BackendError if none does."""
        found_all = [merged(way, found) for way, found in self.by_way.items() if way not in self.failures]
        if not any(layout.verify for layout in found_all):
            raise next(iter(self.failures.values()), BackendError("nothing could be measured"))
        return found_all

    @property
    def drift(self) -> float:
        steps = [[each.step_s for each in found] for found in self.by_way.values()]
        return max(max(each) / min(each) for each in steps)

    def variant(
        self, subject: ProfileKey, several: Sequence[KernelPath], target: Layout, seconds: float, tell: Tell
    ) -> tuple[Variant, list[str]]:
        """A derived draft on each of its paths, judged by the target's answers so far; and the failures.

        Raises the first path's error if none works.
        """
        assert subject.draft is not None
        found, recorded, errors = list[Layout](), tuple[Trace, ...](), dict[KernelPath, SpecllamaError]()
        n_spelled: float | None = None  # its own, not that of its parent
        for i, path in enumerate(several):
            way = replace(target.way, draft=path)
            answers = () if recorded else self.answers
            job = MeasureJob(subject, way, seconds, 0, answers=answers, rows=(1,), threads=self.threads,
                             n_spelled=n_spelled)  # fmt: skip
            try:
                measured = steady(self._run, job, _within(tell, i / len(several), 1 / len(several)))
            except SpecllamaError as error:
                errors[path] = error
                continue
            recorded, n_spelled = recorded or measured.traces, measured.n_spelled
            # In units of T(1) in the same rounds, so the speed of the machine at that time does not matter.
            found.append(replace(merged(way, [measured]), step_s=target.step_s, verify=None))
        if not found and errors:
            raise next(iter(errors.values()))
        failures = [f"{subject.draft.stem}, {path.name}: {error}" for path, error in errors.items()]
        return Variant(subject.draft, tuple(found), recorded), failures


def measure(
    subject: ProfileKey, paths: Paths, effort: TuneEffort, tell: Tell, run: RunMeasureJob = run_child
) -> Findings:
    """Measure the paths of target and draft, then the derived drafts.

    Raises BackendError if no path works.
    """
    visits, tell = _Visits(run), _rising(tell)
    if effort.n_visits == 1:  # --quick
        paths = replace(paths.head(2), variants=paths.head(1).variants)
    threads_s = THREADS_SHARE * effort.seconds
    n_visits = effort.n_visits * len(paths.ways)
    each_variant = [VARIANT_SHARE * len(several) for _, several in paths.variants]
    n_all = n_visits + sum(each_variant)

    job = MeasureJob(subject, paths.ways[0], effort.seconds, effort.n_tokens, rows=effort.rows, threads_s=threads_s)
    visits.tour(paths.ways, effort.n_visits, job, _within(tell, 0.0, n_visits / n_all))
    layouts = visits.layouts
    failures = [f"{way.name}: {error}" for way, error in visits.failures.items()]
    found: list[Variant] = []
    for i, (path, several) in enumerate(paths.variants):
        at = _within(tell, (n_visits + sum(each_variant[:i])) / n_all, each_variant[i] / n_all)
        derived, seconds = replace(subject, draft=path), VARIANT_SHARE * effort.seconds
        try:
            variant, failed = visits.variant(derived, several, layouts[0], seconds, at)
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


def _costs(target: Layout, draft: Layout) -> CostProfile:
    assert target.verify is not None
    points = _scaled(draft.draft, draft.step_s / target.step_s)
    # Without a draft its costs are never used; a profile needs some.
    return CostProfile(verify=((1, 1.0), *target.verify[1:]), draft=points or ((1, 1.0),))


def figures(recorded: Sequence[Trace], costs: CostProfile, slowdown: float = 1.0) -> tuple[ClassFigures, ...]:
    """The expected figures by class. `slowdown`: time of plain decoding on this path over that on its fastest."""
    found = []
    for name, greedy in dict.fromkeys((trace.name, trace.greedy) for trace in recorded):
        seen = [trace for trace in recorded if (trace.name, trace.greedy) == (name, greedy)]
        n_max, rate = traces.best_length(seen, costs)
        sure = traces.confidence(seen)
        found.append(ClassFigures(name, greedy, traces.acceptance(seen), sure, n_max, rate / slowdown))
    return tuple(found)


def _cheapest_draft(layouts: Sequence[Layout]) -> Layout:
    """The draft's path with the cheapest pass, or the first if none is clearly cheaper."""
    best = layouts[0]
    for layout in layouts[1:]:
        if layout.draft and PATH_MARGIN * layout.draft[0][1] * layout.step_s < best.draft[0][1] * best.step_s:
            best = layout
    return best


def choose(found: Findings, *, quick: bool) -> Profile:
    """The profile with the best draft and kernel paths, by the geometric mean of the classes' predicted speeds.

    If the machine was too busy to compare paths, the default ones.
    """
    layouts = found.layouts if found.comparable else found.layouts[:1]
    fastest = min(layouts, key=lambda layout: layout.step_s)
    measured = [layout for layout in layouts if layout.verify is not None]
    usable = [layout for layout in measured if layout.step_s <= SLOWEST_PLAIN * fastest.step_s] or measured
    best: Profile | None = None
    best_score = 0.0
    for derived, drafts, recorded in _drafts(found):
        draft = _cheapest_draft(drafts)
        for target in usable:
            costs = _costs(target, draft)
            profile = Profile(
                made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                source="quick" if quick else "thorough",
                target_path=target.way.target,
                draft_path=draft.way.draft,
                step_s=target.step_s,
                costs=costs,
                classes=figures(recorded, costs, target.step_s / fastest.step_s),
                threads=found.threads,
                derived=derived,
                strategy=found.strategy,
            )
            # Speed over plain decoding on its fastest path.
            score = mean_speed(profile.classes) if profile.classes else fastest.step_s / profile.step_s
            if best is None or score > PATH_MARGIN * best_score:
                best, best_score = profile, score
    assert best is not None, "at least one path was measured"
    plain = best.target_path if best.step_s <= PLAIN_TIE * fastest.step_s else fastest.way.target
    return replace(best, plain_path=plain)


def _drafts(found: Findings) -> list[tuple[Path | None, Sequence[Layout], Sequence[Trace]]]:
    """(file, layouts, traces) of every draft, the subject's own first, without a file."""
    several = [(variant.path, variant.layouts, variant.traces) for variant in found.variants]
    return [
        (path, layouts if found.comparable else layouts[:1], recorded)
        for path, layouts, recorded in [(None, found.layouts, found.traces), *several]
    ]


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft with the profile's path of the target."""

    path: Path | None  # None = the subject's own
    cost: float  # c
    classes: tuple[ClassFigures, ...]

    @property
    def speed(self) -> float:
        return mean_speed(self.classes)


def judged(found: Findings, profile: Profile) -> list[Judged]:
    """Every draft with the figures that it was judged by, the subject's own first."""
    target = next(layout for layout in found.layouts if layout.way.target == profile.target_path and layout.verify)
    every = []
    for path, layouts, recorded in _drafts(found):
        costs = _costs(target, _cheapest_draft(layouts))
        every.append(Judged(path, costs.draft_cost(), figures(recorded, costs)))
    return every


def mean_speed(classes: Sequence[ClassFigures]) -> float:
    """The geometric mean of the classes' speeds; 1 without classes."""
    return math.exp(fmean(math.log(each.speedup) for each in classes)) if classes else 1.0
