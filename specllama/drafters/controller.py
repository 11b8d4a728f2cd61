"""Measured costs, and the controller that decides from them whether, with what and how far to draft."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from specllama.base.errors import ConfigError
from specllama.core.distribution import Distribution
from specllama.core.types import DraftPlan, Observation
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.length import TUNED

LOOKUP, MODEL = "lookup", "model"  # where drafted tokens come from, as the calibration knows them


# A plan with the model must promise so many times the rate of what it competes with, be that plain decoding. What lies
# between is within the error of the estimates: it earns next to nothing and costs whenever they were too kind.
LEAST_RATE = 1.02

# A model that does not pay is probed: it reads the end of the text and is asked what it would have said there. The
# first probe comes early if the model is believed to pay. After a probe in vain the gap is twice as long; and the gap
# is longer by so many tokens per T(1) that a probe costs: all of them where R falls short of LEAST_TO_PROBE by a tenth
# of its rival's rate or more, fewer where it fails narrowly.
FIRST_GAP = 8
DOUBTFUL_GAP = 20
LAST_GAP = 512
GAP_GROWTH = 2
GAP_PER_PROBE_COST = 192.0
CLEAR_FAILURE = 0.1
LEAST_TO_PROBE = 1.05  # so many times the rival's rate the model must promise for its gap to stay short
# Where lookups are so much faster than plain decoding and than what the model promises, a probe is hardly worth it; a
# short answer has no time to make good what it costs. Meanwhile the gap is so many times as long.
COPIED_FROM, COPIED_GAPS = 1.1, 4
PROBE_TOKENS = 24

# Catching up is an investment. Nobody knows how long an answer will be, so it must be earned back within a few tokens,
# or within as many as it was missed for: then what it costs is never much more than what was lost by waiting. The
# gain is believed by half, for it was looked at because it seemed large. A model of which fewer than so many samples
# are known is probed before more than this is spent on it (in T(1); a long prompt costs tens).
HORIZON = 32
BELIEVED = 0.5
LEAST_KNOWN = 4.0
BLIND_INVESTMENT = 0.5

# What a model's draft competes with where nothing is looked up: not one plain token, for a lookup may find something
# behind it. So many steps are taken together; older stretches fade, and so much at plain speed is believed beforehand.
STRETCH = 3
ALONE_FADE = 0.96
ALONE_PRIOR = 6.0  # T(1)

# Draft temperatures tried, in units of the draft's own. Another one must be so much better to be changed to.
HEATS = (1.0, 0.7)
HEAT_MARGIN = 0.004
HEAT_FADE = 0.99  # per row
HEAT_SUPPORT = 512  # laws on more tokens than this are not worth the time

Points: TypeAlias = tuple[tuple[int, float], ...]  # (rows, cost), rows ascending from 1


def cost_at(points: Points, n: float) -> float:
    """The cost of n rows, on straight lines between the measured points; behind the last one its slope goes on."""
    if len(points) == 1:
        return points[0][1] * n
    for (n_low, low), (n_high, high) in pairwise(points):
        if n <= n_high:
            return low + (high - low) * (n - n_low) / (n_high - n_low)
    return high + max(high - low, 0.0) * (n - n_high) / (n_high - n_low)


def _require_points(points: Points, name: str) -> None:
    """Raises ConfigError where `points` cannot be meant."""
    rows = [n for n, _ in points]
    if not rows or rows[0] != 1 or any(a >= b for a, b in pairwise(rows)):
        raise ConfigError(f"the cost profile's {name!r} has points at rows {rows}, expected 1 and ascending")
    if not all(0.0 <= cost < math.inf for _, cost in points):
        raise ConfigError(f"the cost profile's {name!r} holds a cost that is not a number from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """What a pass over n rows costs, for target and draft, in units of T(1): the target's pass over one row.

    Measured points; T may have any shape. The draft's points of many rows are what catching up costs. Raises
    ConfigError where the points cannot be meant.
    """

    verify: Points
    draft: Points

    def __post_init__(self) -> None:
        _require_points(self.verify, "verify")
        _require_points(self.draft, "draft")
        if abs(self.verify[0][1] - 1.0) > 1e-6:
            raise ConfigError(f"the cost profile has T(1) = {self.verify[0][1]}, expected 1, its unit")

    def verify_cost(self, n: int) -> float:
        """T(n)/T(1)."""
        return cost_at(self.verify, n)

    def draft_cost(self, n: int = 1) -> float:
        """One pass of the draft over n rows; that over one row is the c of the cost model."""
        return cost_at(self.draft, n)

    def to_json(self) -> dict[str, object]:
        """Lists of [rows, cost]."""
        return {"verify": [list(point) for point in self.verify], "draft": [list(point) for point in self.draft]}


def reheated(q: Distribution, ratio: float) -> Distribution:
    """`q` at `ratio` times its temperature. Filters come before the temperature, so the support stays what it is."""
    ids, probs = q.items()
    weights = probs ** (1.0 / ratio)
    return Distribution.on(ids, weights / weights.sum())


class _Thermostat:
    """Which draft temperature would have had most accepted lately? All candidates are judged by the same rows."""

    def __init__(self, heats: Sequence[float]) -> None:
        self.heat = heats[0]
        self._overlaps = dict.fromkeys(heats, 0.0)  # faded sums over rows
        self._n = 0.0  # faded number of rows

    def observe(self, seen: Observation, first: int) -> None:
        """Learn from the rows from node `first` on that were reached; all were drawn at the present heat."""
        laws, probs = seen.laws, seen.draft.probs
        if laws is None or probs is None or len(self._overlaps) == 1:
            return
        for node in range(first, min(len(seen.verdict.path) + 1, len(probs))):
            if probs[node].support().size > HEAT_SUPPORT:
                continue
            self._n = self._n * HEAT_FADE + 1.0
            for other in self._overlaps:
                overlap = laws[node].overlap(reheated(probs[node], other / self.heat))
                self._overlaps[other] = self._overlaps[other] * HEAT_FADE + overlap
        best = max(self._overlaps, key=lambda heat: self._overlaps[heat])
        if self._overlaps[best] > self._overlaps[self.heat] + HEAT_MARGIN * self._n:
            self.heat = best


class _Alone:
    """How fast lookups alone would be in this text: from the steps that they would have made of what was said."""

    def __init__(self) -> None:
        self._steps: deque[tuple[bool, int, float]] = deque(maxlen=STRETCH)  # without a draft, tokens, cost in T(1)
        self._n_behind, self._cost_behind = 0.0, 0.0  # of stretches that begin without a draft, faded
        self._n, self._n_bare = 0.0, 0.0  # tokens in all, tokens of steps without a draft, faded

    def add(self, n_given: int, n_emitted: int, cost: float) -> None:
        """One step more."""
        self._n = self._n * ALONE_FADE + n_emitted
        self._n_bare = self._n_bare * ALONE_FADE + (0 if n_given else n_emitted)
        self._steps.append((not n_given, n_emitted, cost))
        if len(self._steps) == STRETCH and self._steps[0][0]:
            self._n_behind = self._n_behind * ALONE_FADE + sum(step[1] for step in self._steps)
            self._cost_behind = self._cost_behind * ALONE_FADE + sum(step[2] for step in self._steps)

    @property
    def rate(self) -> float:
        """Tokens per T(1) from a place on where nothing is looked up, over the next few steps."""
        return (self._n_behind + ALONE_PRIOR) / (self._cost_behind + ALONE_PRIOR)

    @property
    def bare(self) -> float:
        """Share of the tokens that lookups leave to plain decoding: only these can a model make cheaper."""
        return (self._n_bare + ALONE_PRIOR) / (self._n + ALONE_PRIOR)


@dataclass(slots=True)
class _Step:
    """What was planned and answered since the last verification."""

    plan: DraftPlan
    limit: int
    looks: bool  # `look` is asked before every evaluation
    hazards: list[float]  # acceptance of the model's token at every depth, its confidence not known yet  (limit,)
    reach: float = 1.0  # chance that all tokens drafted so far are accepted
    drafted: list[tuple[str, float]] = field(default_factory=list)  # source and confidence of each of them

    def add(self, source: str, confidence: float, chance: float) -> None:
        """One token more is drafted."""
        self.drafted.append((source, confidence))
        self.reach *= chance


class Controller:
    """A `Planner`: drafts as long as the next tokens are expected to earn more than their time.

    The rule. With P(i) the estimated chance that drafted token i is reached and accepted, the plan is the draft of the
    highest rate R = (1 + P(1) + ... + P(k)) / (cost of drafting k tokens + T(k+1)), k = 0 among the candidates, the
    smaller k winning ties. While drafting, with the confidences seen so far, it goes on at n iff some m > n has
    P(n+1) + ... + P(m) > R * (cost of drafting m-n more + T(m+1) - T(n+1)); what is spent already does not count.
    Candidates are the head of what a lookup offers, the model's own draft, and the model's behind that head.

    A draft of the model competes with the lookup's, and with what lookups alone make of a few steps from a place on
    where they draft nothing.

    Only stored costs and past verifications enter, and nothing after a token was drawn: the text is exact, and the
    same seed gives the same text. A model that does not pay is neither evaluated nor fed; see the constants above for
    how it is probed, and how it comes back.
    """

    def __init__(
        self,
        costs: CostProfile,
        *,
        n_max: int = TUNED,
        calibration: Calibration | None = None,
        heats: Sequence[float] = HEATS,
    ) -> None:
        """`heats`: candidates for the factor on the draft's temperature, the first one to begin with."""
        self.costs = costs
        # Blocks that were not measured are not tried: kernels have cliffs behind which T(n) leaps.
        self.n_max = min(n_max, max(costs.verify[-1][0] - 1, 1))
        self.calibration = calibration or Calibration()
        self._verify = [costs.verify_cost(n) for n in range(1, self.n_max + 2)]  # [n] = T(n+1), of n drafted tokens
        self._draft = costs.draft_cost()
        # A model's block that is accepted whole leaves it one token more to read in the next step.
        self._reread = max(costs.draft_cost(2) - self._draft, 0.0)
        self._thermostat = _Thermostat(heats)
        self._step: _Step | None = None
        self._alone = _Alone()
        self._n_unused = 0  # tokens emitted since the model last drafted
        self._n_idle = 0  # tokens emitted since it last drafted or was probed
        self._gap: int | None = None  # idle tokens before the next probe; None until the model is first thought of
        self._probed = False  # a probe was ordered, and its outcome not judged yet

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None) -> DraftPlan:
        """See `Planner.plan`; the rule is the class's."""
        return self._begin_step(limit, offer, lag, looks=True).plan

    def _begin_step(self, limit: int, offer: Sequence[float], lag: int | None, *, looks: bool) -> _Step:
        """Plan, and keep what the questions to come will need."""
        limit = min(limit, self.n_max)
        chances = [self.calibration.at(LOOKUP, confidence) for confidence in offer[:limit]]
        hazards = [] if lag is None else self.calibration.by_depth(MODEL, limit)
        n_given, rate = self._best_offer(chances)
        plan = DraftPlan(n_given, rate=rate)
        if hazards and lag is not None:
            plan = self._with_model(plan, chances[:n_given], hazards, lag)
        step = self._step = _Step(plan, limit, looks, hazards)
        for confidence, chance in zip(offer[: plan.n_given], chances, strict=False):
            step.add(LOOKUP, confidence, chance)
        return step

    def _best_offer(self, chances: Sequence[float]) -> tuple[int, float]:
        """(tokens of the offer to take, rate) without the model. chances: of each, those before it accepted."""
        n_best, best, reach, n_expected = 0, 1.0, 1.0, 1.0
        for n, chance in enumerate(chances, 1):
            reach *= chance
            n_expected += reach
            rate = n_expected / self._verify[n]
            if rate > best:
                n_best, best = n, rate
        return n_best, best

    def _with_model(
        self, without: DraftPlan, chances: Sequence[float], hazards: Sequence[float], lag: int
    ) -> DraftPlan:
        """The plan with the model drawing, or being probed, where that is better than the plan `without` it."""
        n_given, rate = self._best_model(chances, hazards)
        rival = max(without.rate, self._alone.rate)
        pays = rate > LEAST_RATE * rival
        if pays and self._worth_catching_up(lag, rate, rival):
            return DraftPlan(n_given, len(hazards) - n_given, heat=self._thermostat.heat, rate=rate)
        failed_by = min(max(LEAST_TO_PROBE - rate / rival, 0.0) / CLEAR_FAILURE, 1.0)
        longer = int(failed_by * GAP_PER_PROBE_COST * self.costs.draft_cost(PROBE_TOKENS))
        if self._gap is None:
            self._gap = min(FIRST_GAP + longer, DOUBTFUL_GAP)
        if self._probed:  # in vain
            self._gap, self._probed = min(GAP_GROWTH * self._gap + longer, LAST_GAP), False
        elif self._n_idle >= self._wait(rate, rival) and not (pays and self._is_known()):
            self.calibration.age(MODEL, self._n_idle)
            self._n_idle, self._probed = 0, True
            return DraftPlan(without.n_given, probe=PROBE_TOKENS, heat=self._thermostat.heat, rate=without.rate)
        return without

    def _wait(self, rate: float, rival: float) -> int:
        """Idle tokens before the next probe."""
        gap, copied = self._gap or FIRST_GAP, rival > COPIED_FROM and rate < rival / COPIED_FROM
        return min(COPIED_GAPS * gap, LAST_GAP) if copied else gap

    def _best_model(self, chances: Sequence[float], hazards: Sequence[float]) -> tuple[int, float]:
        """(tokens of the offer to take first: all or none, rate) with at least one token of the model."""
        n_given, best = 0, 0.0
        for start in sorted({0, len(chances)}):
            reach, n_expected = 1.0, 1.0
            for chance in chances[:start]:
                reach *= chance
                n_expected += reach
            cost = self.costs.draft_cost(start + 1)  # it reads the offered tokens before it draws its own
            for n in range(start + 1, len(hazards) + 1):
                reach *= hazards[n - 1]
                n_expected += reach
                rate = n_expected / (cost + reach * self._reread + self._verify[n])
                if rate > best:
                    n_given, best = start, rate
                cost += self._draft
        return n_given, best

    def _is_known(self) -> bool:
        """Was the model seen at work lately?"""
        return self.calibration.n_known(MODEL) >= LEAST_KNOWN

    def _worth_catching_up(self, lag: int, rate: float, rival: float) -> bool:
        """Does it pay to read `lag` tokens, for `rate` instead of the `rival` one wherever nothing is looked up?"""
        cost = self.costs.draft_cost(lag + 1) - self._draft
        if cost > BLIND_INVESTMENT and not self._is_known():
            return False
        n_tokens = max(HORIZON, BELIEVED * self._n_unused) * self._alone.bare
        return cost <= n_tokens * (1.0 / rival - 1.0 / rate)

    def look(self, depth: int) -> bool:
        """May the model be evaluated for token `depth`? The evaluation is among the costs, the confidence unknown."""
        step = self._open_step()
        return depth < step.limit and self._pays(step, depth, step.hazards[depth], self._draft)

    def go_on(self, depth: int, confidence: float) -> bool:
        """May token `depth` be drawn from the law that was just evaluated?

        A drafter that does not ask before it evaluates goes on to evaluate the next law, so for it that counts too.
        """
        step = self._open_step()
        if depth >= step.limit:
            return False
        chance = self.calibration.at(MODEL, confidence)
        allowed = step.plan.n_drawn > 0 and self._pays(step, depth, chance, 0.0 if step.looks else self._draft)
        if step.plan.probe:  # asked by a drafter that knows no plans: one token is its probe
            allowed = depth == 0
        if allowed:
            step.add(MODEL, confidence, chance)
        return allowed

    def _open_step(self) -> _Step:
        """The step in progress; a drafter that knows no plans has one made by its first question."""
        return self._step or self._begin_step(self.n_max, (), 0, looks=False)

    def _pays(self, step: _Step, n: int, chance: float, cost: float) -> bool:
        """Does some m > n earn more than it costs? `chance` and `cost` are those of token n (0 = first)."""
        reach, gain = step.reach, 0.0
        for m in range(n + 1, step.limit + 1):
            reach *= chance if m == n + 1 else step.hazards[m - 1]
            gain += reach
            reread = (reach - step.reach) * self._reread
            if gain > step.plan.rate * (cost + reread + self._verify[m] - self._verify[n]):
                return True
            cost += self._draft
        return False

    def learn(self, depth: int, confidence: float, acceptance: float) -> None:
        """See `Planner.learn`."""
        self.calibration.learn(MODEL, depth, confidence, acceptance)

    def alone(self, offer: Sequence[float]) -> int:
        """See `Planner.alone`."""
        return self._best_offer([self.calibration.at(LOOKUP, confidence) for confidence in offer[: self.n_max]])[0]

    def learn_alone(self, n_given: int, n_emitted: int) -> None:
        """See `Planner.learn_alone`."""
        self._alone.add(n_given, n_emitted, self._verify[n_given])

    def observe(self, seen: Observation) -> None:
        """Learn which tokens were accepted. A rejection tells of one token; of those behind it nothing is known."""
        step, self._step = self._step, None
        n_accepted = len(seen.verdict.path)
        self._n_idle += n_accepted + 1
        self._n_unused += n_accepted + 1
        if step is None or seen.draft.parents is not None:
            return
        n_drafted = min(len(seen.draft.tokens), len(step.drafted))
        for depth, (source, confidence) in enumerate(step.drafted[: min(n_accepted + 1, n_drafted)]):
            self.calibration.learn(source, depth, confidence, float(depth < n_accepted))
        if step.plan.n_drawn and n_drafted > step.plan.n_given:
            self._n_unused = self._n_idle = 0
            self._gap, self._probed = FIRST_GAP, False
            self._thermostat.observe(seen, step.plan.n_given)


def controller(costs: CostProfile, priors: Mapping[str, Prior], *, n_max: int, heat_is_free: bool) -> Controller:
    """A controller for one answer or chat, that believes `priors` until it has seen for itself.

    `heat_is_free`: the draft's temperature may be chosen; else it is what was asked for.
    """
    return Controller(costs, n_max=n_max, calibration=Calibration(priors), heats=HEATS if heat_is_free else HEATS[:1])
