"""Profiles learn: what every answer shows of costs and acceptance, taken over between answers (docs/controller.md).

An answer decides by the profile that its record names. Evidence is kept beside the values in force and replaces them
once it differs by more than noise, so most answers change nothing. An answer with a fixed seed teaches nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from statistics import fmean, median

import numpy as np

from specllama.base import disk
from specllama.base.errors import SpecllamaError
from specllama.core.events import Event, PromptProgress, StepEvent, TokenEvent
from specllama.core.types import DraftPolicy
from specllama.drafters.calibration import Tally
from specllama.drafters.controller import LEAST_COST, MOST_ATTENTION, Controller, CostProfile
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import LOOKUP_ALONE, Evidence, Habit, LoadSeconds, Profile, RowCost
from specllama.pairs.setup import Setup

# Weights in answers. The measured value counts as much as FIRST_WEIGHT answers; no past counts more than MOST_WEIGHT,
# so a value follows a change of the machine by a fifth with every answer.
FIRST_WEIGHT = {"use": 1.0, "quick": 2.0, "thorough": 5.0}
ASSUMED_WEIGHT = 0.2  # of a T(n) that was not measured
MOST_WEIGHT = 5.0
# Evidence is taken over if a cost differs by more than this share, or an acceptance by this difference. The median of
# an answer's passes varies by a few percent.
CLEAR, CLEAR_ACCEPTANCE = 0.06, 0.05
LEAST_STEPS = 16  # a shorter answer teaches nothing
LEAST_PASSES = 3  # of one width
HALF = 8.0  # samples with which an answer has half of its weight
HALF_JUDGED = 30.0
# After so many tokens another T(n)/T(1) is that of attention; before, it is that of the weights.
DEEP = 1024
MOST_CHANGE = 1.5  # factor of a cost that one answer can show: the machine may have been busy with something else


@dataclass(slots=True)
class Passes:
    """The passes of one answer."""

    eval_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # of the target, by rows
    draft_s: list[tuple[float, int, bool]] = field(default_factory=list)  # (seconds, passes, whether one read 2 rows)
    n_prompt: int = 0
    n_emitted: int = 0
    _drew: bool = False  # the draft drafted in the step before, so it had to read no more than its last token
    _rereads: bool = False

    def take(self, event: Event) -> None:
        """Add a step. The first one belongs to the prompt."""
        if isinstance(event, PromptProgress):
            self.n_prompt = event.total
        elif isinstance(event, TokenEvent):
            self.n_emitted += 1
        if isinstance(event, StepEvent) and event.step > 0:
            self._add(event)

    def _add(self, step: StepEvent) -> None:
        self.eval_s[step.n_rows].append(step.eval_s)
        asked = [each for each in step.decisions if each.plan is None and each.confidence > 0.0]
        probes = any(each.plan is not None and each.plan.probe for each in step.decisions)
        plan = next((each.plan for each in step.decisions if each.plan is not None), None)
        chain = len({each.depth for each in asked}) == len(asked)  # a tree has several questions in one pass
        if asked and chain and self._drew and not probes and (plan is None or not plan.n_given):
            self.draft_s.append((step.draft_s, len(asked), self._rereads))
        self._drew = bool(asked) and chain
        self._rereads = bool(asked) and all(each.go_on for each in asked) and step.accepted == len(step.drafted)

    @property
    def depth(self) -> int:
        """Tokens of context, in the middle of the answer."""
        return self.n_prompt + self.n_emitted // 2

    @property
    def n_steps(self) -> int:
        return sum(map(len, self.eval_s.values()))

    def medians(self) -> dict[int, float]:
        """Seconds by rows, of the widths that occurred often enough."""
        return {n: median(each) for n, each in self.eval_s.items() if len(each) >= LEAST_PASSES}


def _unit(medians: Mapping[int, float], costs: CostProfile, depth: int) -> float:
    """T(1) in seconds during the answer: measured, or what the other widths say together."""
    if 1 in medians:
        return medians[1]
    return math.exp(fmean(math.log(seconds / costs.verify_cost(n, depth)) for n, seconds in medians.items()))


def _moved(old: float, weight: float, new: float, share: float) -> tuple[float, float]:
    """(mean, weight) after an observation that counts as `share` of an answer."""
    weight = min(weight + share, MOST_WEIGHT)
    return old + (new - old) * share / weight, weight


def _row_cost(old: RowCost | None, n: int, now: float, first: float, new: float, n_samples: int) -> RowCost:
    """Evidence for n rows after an answer; `now`: the value in force, which weighs `first`."""
    before = old or RowCost(n, now, first)
    new = min(max(new, before.cost / MOST_CHANGE), before.cost * MOST_CHANGE)
    cost, weight = _moved(before.cost, before.weight, new, n_samples / (n_samples + HALF))
    return RowCost(n, cost, weight)


def _draft_cost(passes: Passes, costs: CostProfile, unit_s: float) -> float:
    """The draft's pass over one row in units of T(1)."""
    c = costs.draft_cost()
    reread = max(costs.draft_cost(2) - c, 0.0)
    return c * median(seconds / unit_s / (n * c + reread * two) for seconds, n, two in passes.draft_s)


def _near_the_beginning(ratio: float, n: int, costs: CostProfile, depth: int) -> float:
    """T(n)/T(1) without the attention that n rows and one row have after `depth` tokens."""
    extra = costs.attention * depth
    return ratio * (1.0 + extra) - n * extra


def learned(profile: Profile, passes: Passes, judged: Tally, *, greedy: bool) -> Profile:
    """`profile` after an answer: with more evidence, and with other costs and habits once the evidence is clear."""
    medians = passes.medians()
    if passes.n_steps < LEAST_STEPS or not medians:
        return profile
    first, costs, evidence = FIRST_WEIGHT[profile.source], profile.costs, profile.evidence
    unit_s = _unit(medians, costs, passes.depth)
    known = {each.n_rows: each for each in evidence.verify}
    attention = evidence.attention
    ratios = {n: seconds / unit_s for n, seconds in medians.items() if 1 < n <= costs.verify[-1][0]}
    if passes.depth >= DEEP and 1 in medians:
        attention = _attention(attention or RowCost(1, costs.attention, first), ratios, passes, costs)
    elif passes.depth < DEEP and 1 in medians:  # by an expected T(1), an error would confirm itself
        for n, ratio in ratios.items():
            seen = _near_the_beginning(ratio, n, costs, passes.depth)
            weight = first if costs.measured_cost(n) else ASSUMED_WEIGHT
            known[n] = _row_cost(known.get(n), n, costs.verify_cost(n), weight, seen, len(passes.eval_s[n]))
    draft = evidence.draft
    if passes.depth < DEEP and len(passes.draft_s) >= LEAST_PASSES and costs.draft_cost() > 0.0:
        seen = _draft_cost(passes, costs, unit_s)
        draft = _row_cost(draft, 1, costs.draft_cost(), first, seen, len(passes.draft_s))
    shallow_s = unit_s / (1.0 + costs.attention * passes.depth)
    step_s, _ = _moved(profile.step_s or shallow_s, first, shallow_s, 1.0)
    rows = tuple(known[n] for n in sorted(known))
    more = Evidence(rows, draft, attention, _habits(profile, judged, greedy=greedy), evidence.n_answers + 1)
    return _taken_over(replace(profile, step_s=step_s, evidence=more))


def accepted(profile: Profile, judged: Tally, *, greedy: bool) -> Profile:
    """`profile` after an answer whose times say nothing, because its passes were shared with others."""
    evidence = replace(profile.evidence, habits=_habits(profile, judged, greedy=greedy))
    return _taken_over(replace(profile, evidence=evidence))


def looked(profile: Profile, found: CostProfile, depth: int) -> Profile:
    """`profile` after its costs were measured again behind `depth` tokens, without the rows that `found` assumes.

    Costs that differ clearly are taken over, and what was not measured moves with its neighbours, as after an answer.
    """
    ratios = {n: cost for n, cost in found.verify if n > 1 and n not in found.assumed}
    rows = tuple(RowCost(n, _near_the_beginning(ratio, n, profile.costs, depth), 1.0) for n, ratio in ratios.items())
    seen = replace(profile.evidence, verify=rows, draft=RowCost(1, found.draft_cost(), 1.0))
    kept = replace(profile.evidence, verify=(), draft=None, n_answers=0)
    return replace(_taken_over(replace(profile, evidence=seen)), evidence=kept)


def _attention(old: RowCost, ratios: Mapping[int, float], passes: Passes, costs: CostProfile) -> RowCost:
    """Solves ratio = (T(n) + n * a * depth) / (1 + a * depth) for a, for the widths of a deep answer together."""
    found = [(ratio - costs.verify_cost(n)) / (n - ratio) / passes.depth for n, ratio in ratios.items() if ratio < n]
    if not found:
        return old
    seen = min(max(median(found), 0.0), MOST_ATTENTION)
    n_samples = sum(len(passes.eval_s[n]) for n in ratios)
    cost, weight = _moved(old.cost, old.weight, seen, n_samples / (n_samples + HALF))
    return RowCost(1, cost, weight)


def _habits(profile: Profile, judged: Tally, *, greedy: bool) -> tuple[Habit, ...]:
    """Evidence of acceptance after an answer."""
    habits = {each.greedy: each for each in profile.evidence.habits}
    if judged.n:
        old, first = habits.get(greedy) or profile.habit(greedy=greedy), FIRST_WEIGHT[profile.source]
        habits[greedy] = _habit(old, judged, first, greedy=greedy)
    return tuple(habits[each] for each in sorted(habits))


def _habit(old: Habit | None, judged: Tally, first: float, *, greedy: bool) -> Habit:
    acceptance, confidence = judged.accepted / judged.n, judged.confidence / judged.n
    share = judged.n / (judged.n + HALF_JUDGED)
    if old is None:
        return Habit(greedy, acceptance, confidence, share)
    weight = old.weight or first
    moved, _ = _moved(old.acceptance, weight, acceptance, share)
    sure, weight = _moved(old.confidence, weight, confidence, share)
    return Habit(greedy, moved, sure, weight)


def _taken_over(profile: Profile) -> Profile:
    """`profile` with the values of its evidence in force, if one of them differs clearly."""
    evidence = profile.evidence
    seen_rows = {each.n_rows for each in evidence.verify}
    costs = replace(profile.costs, assumed=tuple(n for n in profile.costs.assumed if n not in seen_rows))
    profile = replace(profile, costs=costs)
    drift = {
        each.n_rows: math.log(max(each.cost, LEAST_COST) / costs.verify_cost(each.n_rows)) for each in evidence.verify
    }
    of_draft = 0.0 if evidence.draft is None else math.log(evidence.draft.cost / costs.draft_cost())
    if max(map(abs, (of_draft, *drift.values()))) > CLEAR:
        profile = replace(profile, costs=_shifted(costs, drift, math.exp(of_draft)))
    if (seen := evidence.attention) is not None and abs(seen.cost - costs.attention) * DEEP > CLEAR / 2:
        profile = replace(profile, costs=replace(profile.costs, attention=seen.cost))
    now = {each.greedy: profile.habit(greedy=each.greedy) for each in evidence.habits}
    if any(_differs(now[each.greedy], each) for each in evidence.habits):
        kept = [each for each in profile.habits if each.greedy not in now]
        profile = replace(profile, habits=(*kept, *evidence.habits))
    return profile


def _differs(now: Habit | None, seen: Habit) -> bool:
    if now is None:
        return seen.weight >= 1.0
    return abs(now.acceptance - seen.acceptance) > CLEAR_ACCEPTANCE


def _shifted(costs: CostProfile, drift: Mapping[int, float], draft: float) -> CostProfile:
    """The curve through the evidence; what was not seen moves with its neighbours. `drift`: logarithms by rows."""
    rows = sorted({*(n for n, _ in costs.verify), *drift})
    seen = sorted({1: 0.0, **drift}.items())
    shifts = np.interp(np.log(rows), np.log([n for n, _ in seen]), [shift for _, shift in seen])
    verify = tuple(
        (n, max(costs.verify_cost(n) * math.exp(shift), LEAST_COST)) if n > 1 else (1, 1.0)
        for n, shift in zip(rows, shifts, strict=True)
    )
    return replace(costs, verify=verify, draft=tuple((n, cost * draft) for n, cost in costs.draft))


class Lesson:
    """Follows one answer, and teaches its profile afterwards. Made before the answer's first step."""

    def __init__(
        self,
        setup: Setup,
        policy: DraftPolicy | None,
        *,
        greedy: bool,
        seeded: bool = False,
        loads: LoadSeconds | None = None,
    ) -> None:
        """`policy`: what decides in this answer; only a `Controller` learns.

        `seeded`: the user fixed the seed, or the answer's format: such an answer teaches nothing.
        `loads`: what loading the models for this answer took.
        """
        self._setup = setup
        self._controller = policy if isinstance(policy, Controller) else None
        self._greedy = greedy
        self._teaches = not seeded
        self._loads = loads or LoadSeconds()
        self._passes = Passes()
        if self._controller is not None:
            self._controller.calibration.judged = Tally()
            if setup.profile is not None:  # another answer may have taught it
                self._controller.use(setup.profile.costs)

    def take(self, event: Event) -> None:
        if self._controller is not None:
            self._passes.take(event)

    def _assumed(self) -> Profile | None:
        """The first profile of a target without a draft, which is never measured: answers alone teach it."""
        setup, path = self._setup, KernelPath.of(self._setup.target_options)
        if not setup.length.is_auto or setup.subject.draft is not None:
            return None
        return Profile(
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            source="use",
            target_path=path,
            draft_path=path,
            step_s=0.0,
            costs=setup.assumed_costs,
            strategy=LOOKUP_ALONE,
        )

    def learned(self) -> Setup:
        """The setup for the next answer, when the answer has ended; saves the profile. A full disk is no error."""
        setup, controller = self._setup, self._controller
        before = setup.profile or self._assumed()
        if controller is None or before is None or not self._teaches:
            return setup
        judged = controller.calibration.judged

        def learn(profile: Profile) -> Profile:
            profile = learned(profile, self._passes, judged, greedy=self._greedy)
            return replace(profile, loads=profile.loads.least(self._loads))

        profile = learn(before)
        if profile == before or (setup.profile is None and profile.evidence == Evidence()):
            return setup
        with suppress(OSError, SpecllamaError):  # another process may have changed it meanwhile
            if setup.profile is None:
                seen = {setup.target.path: disk.seen_at_once(setup.target.path)}
                profile = profiles.begin(setup.subject, before, learn, seen)
            else:
                profile = profiles.update(setup.subject, before, learn) or profile
        return replace(setup, profile=profile)
