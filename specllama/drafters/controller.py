"""Measured costs, and the controller that decides from them whether, with what and how far to draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from specllama.base.errors import ConfigError
from specllama.core.types import DraftPlan, Observation
from specllama.drafters.calibration import Calibration
from specllama.drafters.length import TUNED

# A plan with the model must promise so many times the rate of the best plan without it. Less is within the error of the
# estimates.
LEAST_RATE = 1.02

# A model that does not pay is probed: it reads the end of the text and is asked what it would have said there. The
# first probe comes after FIRST_GAP tokens where the model is believed to pay, after DOUBTFUL_GAP where it is not. After
# one in vain the gap grows by the cost of a probe in T(1) times GAP_PER_PROBE_COST.
FIRST_GAP, DOUBTFUL_GAP = 8, 20
GAP_PER_PROBE_COST = 192.0
PROBE_TOKENS = 24

# Catching up is an investment, and the length of the answer is not known. It must be earned back within HORIZON
# tokens, or within half as many as the model was not used for. On a model that was never seen at work no more than
# BLIND_INVESTMENT is spent, in T(1): it is probed first. A long prompt costs tens.
HORIZON = 32
BLIND_INVESTMENT = 0.5

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


@dataclass(slots=True)
class _Step:
    """What was planned and answered since the last verification."""

    plan: DraftPlan
    limit: int
    looks: bool  # `look` is asked before every evaluation
    typical: float  # acceptance of the model's token while its confidence is not known
    reach: float = 1.0  # chance that all tokens drafted so far are accepted
    confidences: list[float | None] = field(default_factory=list)  # of each of them; None = it was looked up

    def add(self, confidence: float | None, chance: float) -> None:
        """One token more is drafted."""
        self.confidences.append(confidence)
        self.reach *= chance


class Controller:
    """A `Planner`: drafts as long as the next tokens are expected to earn more than their time.

    The rule. With P(i) the estimated chance that drafted token i is reached and accepted, the plan is the draft of the
    highest rate R = (1 + P(1) + ... + P(k)) / (cost of drafting k tokens + T(k+1)), k = 0 among the candidates, the
    smaller k winning ties. While drafting, with the confidences seen so far, it goes on at n iff some m > n has
    P(n+1) + ... + P(m) > R * (cost of drafting m-n more + T(m+1) - T(n+1)); what is spent already does not count.
    Candidates are the head of what a lookup offers, the model's own draft, and the model's behind that head.

    Only stored costs and past verifications enter, and nothing after a token was drawn: the text is exact, and the
    same seed gives the same text. A model that does not pay is neither evaluated nor fed; see the constants above for
    how it is probed, and how it comes back.
    """

    def __init__(self, costs: CostProfile, *, n_max: int = TUNED, calibration: Calibration | None = None) -> None:
        self.costs = costs
        # Blocks that were not measured are not tried: kernels have cliffs behind which T(n) leaps.
        self.n_max = min(n_max, max(costs.verify[-1][0] - 1, 1))
        self.calibration = calibration or Calibration()
        self._verify = [costs.verify_cost(n) for n in range(1, self.n_max + 2)]  # [n] = T(n+1), of n drafted tokens
        self._draft = costs.draft_cost()
        # A model's block that is accepted whole leaves it one token more to read in the next step.
        self._reread = max(costs.draft_cost(2) - self._draft, 0.0)
        self._step: _Step | None = None
        self._n_unused = 0  # tokens emitted since the model last drafted
        self._n_idle = 0  # tokens emitted since it last drafted or was probed
        self._gap = 0  # idle tokens before the next probe; 0 until the model is first considered
        self._probed = False  # a probe was ordered, and its outcome not judged yet

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None) -> DraftPlan:
        """See `Planner.plan`; the rule is the class's."""
        return self._begin_step(limit, offer, lag, looks=True).plan

    def _begin_step(self, limit: int, offer: Sequence[float], lag: int | None, *, looks: bool) -> _Step:
        """Plan, and keep what the questions to come will need."""
        limit = min(limit, self.n_max)
        n_given, rate = self._best_offer(offer[:limit])
        plan = DraftPlan(n_given, rate=rate)
        if lag is not None and limit > 0:
            plan = self._with_model(plan, offer[:n_given], limit, lag)
        step = self._step = _Step(plan, limit, looks, self.calibration.typical)
        for chance in offer[: plan.n_given]:
            step.add(None, chance)
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

    def _with_model(self, without: DraftPlan, chances: Sequence[float], limit: int, lag: int) -> DraftPlan:
        """The plan with the model drawing, or being probed, where that is better than the plan `without` it."""
        n_given, rate = self._best_model(chances, limit)
        pays = rate > LEAST_RATE * without.rate
        if pays and self._worth_catching_up(lag, rate, without.rate):
            return DraftPlan(n_given, limit - n_given, rate=rate)
        self._gap = self._gap or (FIRST_GAP if pays else DOUBTFUL_GAP)
        if self._probed:  # in vain
            self._probed = False
            self._gap += 0 if pays else int(GAP_PER_PROBE_COST * self.costs.draft_cost(PROBE_TOKENS))
        elif self._n_idle >= self._gap and (self.calibration.empty or not pays):
            self.calibration.age(self._n_idle)
            self._n_idle, self._probed = 0, True
            return replace(without, probe=PROBE_TOKENS)
        return without

    def _best_model(self, chances: Sequence[float], limit: int) -> tuple[int, float]:
        """(tokens of the offer to take first: all or none, rate) with at least one token of the model."""
        n_given, best, typical = 0, 0.0, self.calibration.typical
        for start in sorted({0, len(chances)}):
            reach, n_expected = 1.0, 1.0
            for chance in chances[:start]:
                reach *= chance
                n_expected += reach
            cost = self.costs.draft_cost(start + 1)  # it reads the offered tokens before it draws its own
            for n in range(start + 1, limit + 1):
                reach *= typical
                n_expected += reach
                rate = n_expected / (cost + reach * self._reread + self._verify[n])
                if rate > best:
                    n_given, best = start, rate
                cost += self._draft
        return n_given, best

    def _worth_catching_up(self, lag: int, rate: float, rival: float) -> bool:
        """Does it pay to read `lag` tokens, to emit tokens at `rate` instead of `rival`?"""
        cost = self.costs.draft_cost(lag + 1) - self._draft
        if cost > BLIND_INVESTMENT and self.calibration.empty:
            return False
        return cost <= max(HORIZON, self._n_unused // 2) * (1.0 / rival - 1.0 / rate)

    def look(self, depth: int) -> bool:
        """May the model be evaluated for token `depth`? The evaluation is among the costs, the confidence unknown."""
        step = self._open_step()
        return depth < step.limit and self._pays(step, depth, step.typical, self._draft)

    def go_on(self, depth: int, confidence: float) -> bool:
        """May token `depth` be drawn from the law that was just evaluated?

        A drafter that does not ask before it evaluates goes on to evaluate the next law, so for it that counts too.
        """
        step = self._open_step()
        if depth >= step.limit:
            return False
        chance = self.calibration.at(confidence)
        allowed = step.plan.n_drawn > 0 and self._pays(step, depth, chance, 0.0 if step.looks else self._draft)
        if step.plan.probe:  # asked by a drafter that knows no plans: one token is its probe
            allowed = depth == 0
        if allowed:
            step.add(confidence, chance)
        return allowed

    def _open_step(self) -> _Step:
        """The step in progress; a drafter that knows no plans has one made by its first question."""
        return self._step or self._begin_step(self.n_max, (), 0, looks=False)

    def _pays(self, step: _Step, n: int, chance: float, cost: float) -> bool:
        """Does some m > n earn more than it costs? `chance` and `cost` are those of token n (0 = first)."""
        reach, gain = step.reach, 0.0
        for m in range(n + 1, step.limit + 1):
            reach *= chance if m == n + 1 else step.typical
            gain += reach
            reread = (reach - step.reach) * self._reread
            if gain > step.plan.rate * (cost + reread + self._verify[m] - self._verify[n]):
                return True
            cost += self._draft
        return False

    def learn(self, confidence: float, acceptance: float) -> None:
        """See `Planner.learn`."""
        self.calibration.learn(confidence, acceptance)

    def observe(self, seen: Observation) -> None:
        """Learn which tokens were accepted. A rejection tells of one token; of those behind it nothing is known."""
        step, self._step = self._step, None
        n_accepted = len(seen.verdict.path)
        self._n_idle += n_accepted + 1
        self._n_unused += n_accepted + 1
        if step is None or seen.draft.parents is not None:
            return
        n_drafted = min(len(seen.draft.tokens), len(step.confidences))
        for depth, confidence in enumerate(step.confidences[: min(n_accepted + 1, n_drafted)]):
            if confidence is not None:
                self.calibration.learn(confidence, float(depth < n_accepted))
        if step.plan.n_drawn and n_drafted > step.plan.n_given:
            self._n_unused = self._n_idle = 0
            self._gap, self._probed = FIRST_GAP, False
