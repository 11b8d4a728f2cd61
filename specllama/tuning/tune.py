"""Tuning: measure the ways of loading a pair, piece by piece within a time, and choose the fastest.

Each piece has a child process: a kernel path can crash, and rearranged weights need memory for a second copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from specllama.base.child import Tell
from specllama.base.errors import BackendError, SpecllamaError
from specllama.drafters import SIMPLE
from specllama.drafters.controller import CostProfile, Points, cost_at
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import derived as drafts
from specllama.pairs.profile import ClassFigures, LoadSeconds, Profile, ProfileKey, Threads
from specllama.tuning import traces
from specllama.tuning.budget import Budget
from specllama.tuning.child import HeldUp, Measured, MeasureJob, RunMeasureJob, Way, run_child, steady
from specllama.tuning.kernel_paths import Paths, split
from specllama.tuning.traces import Trace, TracedAnswer

# If visits of the same path differ by more than this factor, the machine was busy, and paths cannot be compared.
MOST_DRIFT = 1.1
# A kernel path on which plain decoding is slower by more than this is never chosen: while drafting pauses, that is the
# speed.
SLOWEST_PLAIN = 1.05
PATH_MARGIN = 1.03  # another path must be faster than the default by this factor; repeated measurements differ as much
# A draft with a cut vocabulary must be faster than a whole one by this factor more: the answers that judge it are in
# English, and in Chinese or Japanese it drafts little (benchmarks/README.md).
CUT_MARGIN = 1.07
# The chosen path counts as the fastest for plain decoding if it is slower by no more than this: a comparison should
# load the target in another way only for a reason.
PLAIN_TIE = 1.01

# Weights of the pieces in the time: a visit, a last look at the default, a long context, the answers, a draft.
VISIT, CHECK, LONG_CONTEXT, ANSWERS, DRAFT = 3.0, 0.7, 3.0, 4.0, 2.0
NO_TIME = "no time was left"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneEffort:
    """How much time to spend."""

    seconds: float  # for everything
    n_visits: int  # children for each way of loading, in turn, so a drift of the machine affects all alike
    n_tokens: int  # generated for each class of prompts, at most


# A minute: starting takes 2 to 3 s, and the last draft, with the models loaded again, up to 8 s more than its share.
QUICK = TuneEffort(seconds=46.0, n_visits=1, n_tokens=24)
THOROUGH = TuneEffort(seconds=280.0, n_visits=2, n_tokens=96)


@dataclass(frozen=True, slots=True)
class Layout:
    """The measurements of one way of loading the pair."""

    way: Way
    step_s: float  # T(1), in the fastest visit
    verify: Points | None  # in units of T(1) in the same visit, so a slow phase of the machine does not matter
    draft: Points  # by the draft's own tokens

    def to_json(self) -> dict[str, object]:
        way = {"target": self.way.target.to_json(), "draft": self.way.draft.to_json()}
        return {**way, "step_s": self.step_s, "verify": self.verify, "draft_passes": self.draft}


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """The measurements of one draft, beside the target."""

    path: Path | None  # None = the subject's own
    layouts: tuple[Layout, ...]  # a derived draft's have no target
    traces: tuple[Trace, ...] = ()  # empty if no draft can pay
    n_spelled: float = 1.0  # draft tokens for one target token
    noise: float = 0.0  # see `Measured`
    is_cut: bool = False  # it knows only some of the tokens
    loads: LoadSeconds = field(default_factory=LoadSeconds)


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all children."""

    layouts: tuple[Layout, ...]
    drafts: tuple[MeasuredDraft, ...]  # the subject's own first
    failures: tuple[str, ...] = ()  # paths and drafts that cannot be used, and why
    drift: float = 1.0  # largest ratio of two visits of the same path
    threads: Threads | None = None  # used for all measurements; None = those of the options
    strategy: str = SIMPLE  # of the draft model, see `ProfileKey`
    attention_s: float = 0.0  # what a token of context adds to each row of the target; 0 = not measured

    @property
    def comparable(self) -> bool:
        """True if the machine was quiet enough to compare paths."""
        return self.drift <= MOST_DRIFT

    @property
    def usable(self) -> list[Layout]:
        """The target's layouts to choose from."""
        layouts = self._compared(self.layouts)
        fastest = min(layout.step_s for layout in layouts)
        measured = [layout for layout in layouts if layout.verify is not None]
        return [layout for layout in measured if layout.step_s <= SLOWEST_PLAIN * fastest] or measured

    @property
    def fastest(self) -> Layout:
        """The layout with the fastest plain decoding."""
        return min(self._compared(self.layouts), key=lambda layout: layout.step_s)

    def _compared(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        return layouts if self.comparable else layouts[:1]

    def layout_of(self, draft: MeasuredDraft) -> Layout:
        """The draft's path with the cheapest pass, or the first if none is clearly cheaper."""
        best, *others = self._compared(draft.layouts)
        for layout in others:
            if layout.draft and PATH_MARGIN * layout.draft[0][1] * layout.step_s < best.draft[0][1] * best.step_s:
                best = layout
        return best

    def costs(self, target: Layout, draft: MeasuredDraft) -> CostProfile:
        """The costs of the draft beside the target on one of its paths."""
        assert target.verify is not None
        layout = self.layout_of(draft)
        points = by_tokens(scaled(layout.draft, layout.step_s / target.step_s), draft.n_spelled)
        # Without a draft its costs are never used; a profile needs some.
        attention = self.attention_s / target.step_s
        return CostProfile(verify=((1, 1.0), *target.verify[1:]), draft=points or ((1, 1.0),), attention=attention)

    def best_case(self, factor: float = 1.0) -> float:
        """The speed over plain decoding if every token of the own draft is accepted and costs `factor` of its time."""
        own = self.drafts[0]
        layouts = tuple(replace(layout, draft=scaled(layout.draft, factor)) for layout in own.layouts)
        several = [self.costs(target, replace(own, layouts=layouts)) for target in self.usable]
        return max(costs.best_case for costs in several)


def scaled(points: Points, factor: float) -> Points:
    """The costs, each times `factor`."""
    return tuple((n, cost * factor) for n, cost in points)


def by_tokens(cells: Points, n_spelled: float) -> Points:
    """Costs by tokens of the target, from costs by tokens of the draft.

    A drafted token is one token of the draft, but the emitted token before it may be several. Every pass is charged
    with the mean, so a draft never seems cheaper than it is.
    """
    if n_spelled == 1.0:  # no rounding
        return cells
    return tuple((n, cost_at(cells, n * n_spelled)) for n, _ in cells)


def _mean_points(several: Sequence[Points]) -> Points:
    return tuple((points[0][0], fmean(cost for _, cost in points)) for points in zip(*several, strict=True))


def merged(way: Way, visits: Sequence[Measured]) -> Layout:
    """The layout that results from all visits of one way."""
    # T(1) of the same rounds is the unit of both curves.
    units = [each.verify[0][1] if each.verify else each.step_s for each in visits]
    curves = [scaled(each.verify, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.verify]
    drafts = [scaled(each.draft, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.draft]
    step_s = min(each.step_s for each in visits)
    return Layout(way, step_s, _mean_points(curves) if curves else None, _mean_points(drafts))


class Tuning:
    """Measures a pair piece by piece, each in a child process, and keeps the results."""

    def __init__(self, subject: ProfileKey, effort: TuneEffort, tell: Tell, run: RunMeasureJob = run_child) -> None:
        self.subject, self.effort = subject, effort
        self.budget = Budget(effort.seconds, tell)
        self.answers: tuple[TracedAnswer, ...] = ()
        self.threads: Threads | None = None
        self._run = run
        self._visits: dict[Way, list[Measured]] = {}
        self._dead: dict[Way, SpecllamaError] = {}
        self._rows: tuple[int, ...] | None = None  # of the first visit, so that all have the same
        self.failures: list[str] = []
        self._own: Measured | None = None  # the subject's own draft, judged by the answers
        self._attention_s = 0.0
        self._others: list[MeasuredDraft] = []

    def compare(self, paths: Paths) -> None:
        """Measure the costs of passes on the paths of target and draft, on two of each in a short tuning.

        Raises BackendError if no path works, or if the default was held up in every visit.
        """
        paths = paths.head(2) if self.effort.n_visits == 1 else paths
        n_ways = len(paths.ways)
        self.budget.plan(self.effort.n_visits * n_ways * VISIT + CHECK * (n_ways > 1))
        self._tour(paths.ways)
        self.failures += [f"{way.name}: {error}" for way, error in self._dead.items()]

    def _tour(self, ways: Sequence[Way]) -> None:
        """Visit every way in turn, the default first and once more at the end, as a check."""
        n_visits = self.effort.n_visits
        turns = deque((way, VISIT) for _ in range(n_visits) for way in ways)
        if len(ways) > 1:
            turns.append((ways[0], CHECK))
        held_up, divided = dict[Way, SpecllamaError](), set[Way]()
        while turns:
            way, weight = turns.popleft()
            nothing_to_check = weight == CHECK and way not in self._visits
            too_late = self._visits and self.budget.left <= 0.0
            if way in self._dead or way in divided or nothing_to_check or too_late:
                if way not in self._dead and way not in divided:
                    held_up.setdefault(way, BackendError(NO_TIME))
                self.budget.plan(-weight)
                continue
            self._visit(way, weight, held_up)
            if way in self._dead and (parts := split(way, ways[0])):
                del self._dead[way]
                divided.add(way)
                turns.rotate(1)  # the check stays the last turn
                turns.extend((part, VISIT) for part in parts for _ in range(n_visits))
                turns.rotate(-1)
                self.budget.plan(VISIT * len(parts) * n_visits)
        unseen = {way: error for way, error in held_up.items() if way not in self._visits}
        if ways[0] in unseen:  # nothing to compare the others with
            raise unseen[ways[0]]
        self._dead |= unseen
        # In the order of `ways`, even if the first visit was held up.
        self._visits = {way: self._visits[way] for way in (*ways, *self._visits) if way in self._visits}

    def _visit(self, way: Way, weight: float, held_up: dict[Way, SpecllamaError]) -> None:
        seconds, tell = self.budget.piece(weight)
        most_step_s = SLOWEST_PLAIN * min((each.step_s for each in self._all_visits), default=math.inf)
        rows = () if weight == CHECK else self._rows
        job = MeasureJob(self.subject, way, seconds, rows, threads=self.threads, most_step_s=most_step_s)
        try:
            found = steady(self._run, job, tell)
        except HeldUp as error:
            held_up[way] = error
            return
        except SpecllamaError as error:
            self._dead[way] = error
            return
        self._visits.setdefault(way, []).append(found)
        self.threads = self.threads or found.threads
        if found.verify and self._rows is None:
            self._rows = tuple(n for n, _ in found.verify)

    @property
    def _all_visits(self) -> list[Measured]:
        return [each for several in self._visits.values() for each in several]

    @property
    def _layouts(self) -> list[Layout]:
        """Every way that works. Raises BackendError if none does."""
        found = [merged(way, visits) for way, visits in self._visits.items() if way not in self._dead]
        if not any(layout.verify for layout in found):
            raise next(iter(self._dead.values()), BackendError("nothing could be measured"))
        return found

    @property
    def _drift(self) -> float:
        steps = [[each.step_s for each in visits] for visits in self._visits.values()]
        return max(max(each) / min(each) for each in steps)

    def deepen(self) -> None:
        """Measure what a long context adds to a pass. Raises what the child raises."""
        seconds, tell = self.budget.piece(LONG_CONTEXT)
        fastest, target = self.findings.fastest, replace(self.subject, draft=None, draft_options=None)
        found = self._run(MeasureJob(target, fastest.way, seconds, threads=self.threads, deep=True), tell)
        self._attention_s = (found.attention or 0.0) * fastest.step_s

    def hear(self) -> None:
        """Record answers of the target, judged by the subject's own draft. Raises what the child raises."""
        seconds, tell = self.budget.piece(ANSWERS)
        way = self.findings.fastest.way
        job = MeasureJob(self.subject, way, seconds, (), self.effort.n_tokens, threads=self.threads)
        self._own = self._run(job, tell)
        self.answers = self._own.answers

    def draft_job(self, path: Path, kernels: KernelPath, seconds: float, *, judges: bool = True) -> MeasureJob:
        """Another draft beside the target on its first path."""
        subject, way = replace(self.subject, draft=path), replace(self._layouts[0].way, draft=kernels)
        answers = self.answers if judges else ()
        return MeasureJob(subject, way, seconds, rows=(1,), answers=answers, threads=self.threads)

    def try_draft(self, path: Path, several: Sequence[KernelPath], seconds: float, tell: Tell) -> MeasuredDraft:
        """Measure another draft on each of its paths, judged once by the target's answers.

        Raises the first path's error if none works.
        """
        found, errors, failures = list[Measured](), list[SpecllamaError](), list[str]()
        layouts, step_s, end = list[Layout](), self._layouts[0].step_s, self.budget.left - seconds
        for i, kernels in enumerate(several):
            left = max(self.budget.left - end, 0.0)
            if found and not left:
                failures += [f"{path.stem}, {each.name}: {NO_TIME}" for each in several[i:]]
                break
            job = self.draft_job(path, kernels, left / (len(several) - i), judges=not found)
            try:
                found.append(steady(self._run, job, _part(tell, i, len(several))))
            except SpecllamaError as error:
                errors.append(error)
                failures.append(f"{path.stem}, {kernels.name}: {error}")
                continue
            # In units of T(1) in the same rounds, so the speed of the machine at that time does not matter.
            layouts.append(replace(merged(job.way, found[-1:]), step_s=step_s, verify=None))
        if not found:
            raise errors[0]
        self.failures += failures
        one, derived = found[0], drafts.read(path)
        is_cut = derived is not None and derived.recipe.n_vocab > 0
        draft = MeasuredDraft(path, tuple(layouts), one.traces, one.n_spelled, one.noise, is_cut, one.loads)
        self._others.append(draft)
        return draft

    @contextmanager
    def attempt(self, name: str, weight: float) -> Iterator[bool]:
        """A block that measures something more. False if no time is left. An error is kept among the failures."""
        try:
            with self.budget.part(weight) as has_time:
                if not has_time:
                    self.failures.append(f"{name}: {NO_TIME}")
                yield has_time
        except SpecllamaError as error:
            self.failures.append(f"{name}: {error}")

    @property
    def findings(self) -> Findings:
        """What was measured so far."""
        layouts, judged = tuple(self._layouts), self._own or self._all_visits[0]
        noise = fmean(each.noise for each in self._all_visits)
        return Findings(
            layouts,
            (MeasuredDraft(None, layouts, judged.traces, judged.n_spelled, noise, loads=judged.loads), *self._others),
            tuple(self.failures),
            self._drift,
            self.threads,
            self.subject.strategy,
            self._attention_s,
        )


def _part(tell: Tell, i: int, n: int) -> Tell:
    """`tell` for part `i` of `n`."""
    return lambda what, share: tell(what, (i + share) / n)


def figures(recorded: Sequence[Trace], costs: CostProfile, slowdown: float = 1.0) -> tuple[ClassFigures, ...]:
    """The expected figures by class. `slowdown`: time of plain decoding on this path over that on its fastest."""
    found = []
    for name, greedy in dict.fromkeys((trace.name, trace.greedy) for trace in recorded):
        seen = [trace for trace in recorded if (trace.name, trace.greedy) == (name, greedy)]
        n_max, rate = traces.best_length(seen, costs)
        sure = traces.confidence(seen)
        found.append(ClassFigures(name, greedy, traces.acceptance(seen), sure, n_max, rate / slowdown))
    return tuple(found)


def choose(found: Findings, *, quick: bool) -> Profile:
    """The profile with the best draft and kernel paths, by the geometric mean of the classes' predicted speeds.

    If the machine was too busy to compare paths, the default ones.
    """
    fastest = found.fastest
    best: Profile | None = None
    best_score = 0.0
    for draft in sorted(found.drafts, key=lambda each: each.is_cut):
        for target in found.usable:
            costs = found.costs(target, draft)
            profile = Profile(
                made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                source="quick" if quick else "thorough",
                target_path=target.way.target,
                draft_path=found.layout_of(draft).way.draft,
                step_s=target.step_s,
                costs=costs,
                classes=figures(draft.traces, costs, target.step_s / fastest.step_s),
                threads=found.threads,
                derived=draft.path,
                strategy=found.strategy,
                loads=draft.loads,
            )
            # Speed over plain decoding on its fastest path.
            score = mean_speed(profile.classes) if profile.classes else fastest.step_s / profile.step_s
            if draft.is_cut:
                score /= CUT_MARGIN
            if best is None or score > PATH_MARGIN * best_score:
                best, best_score = profile, score
    assert best is not None, "at least one path was measured"
    plain = best.target_path if best.step_s <= PLAIN_TIE * fastest.step_s else fastest.way.target
    return replace(best, plain_path=plain)


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
    several = [(draft, found.costs(target, draft)) for draft in found.drafts]
    return [Judged(draft.path, costs.draft_cost(), figures(draft.traces, costs)) for draft, costs in several]


def mean_speed(classes: Sequence[ClassFigures]) -> float:
    """The geometric mean of the classes' speeds; 1 without classes."""
    return math.exp(fmean(math.log(each.speedup) for each in classes)) if classes else 1.0
