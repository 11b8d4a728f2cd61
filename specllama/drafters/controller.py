"""Measured costs, and the controller that decides from them what to draft and how far (docs/controller.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, TypeAlias

from specllama.base.errors import ConfigError
from specllama.core.types import Decision, DraftPlan, Observation
from specllama.drafters.calibration import Calibration
from specllama.drafters.length import TUNED

# A plan with the model needs this rate over the best plan without it: less is within the error of the estimates.
LEAST_RATE = 1.02
# T(2) from which a lookup needs a match of two tokens: one token alone was right too seldom. Replays of 192 answers
# of the 135M and 64 of the default pair: 0.4 % faster at T(2) = 1.3, 4 % slower at 1.06.
PAIR_FROM = 1.25
LEAST_COST = 0.9  # T(n): a block takes at least the time of one row; less is an error of measurement
MOST_ATTENTION = 1e-3  # of one row and one token, in T(1); more is an error of measurement

# A model that does not pay is probed: it reads the end of the text, and its predictions are compared with the text. The
# first probe comes after FIRST_GAP tokens if the model is expected to pay, else after DOUBTFUL_GAP. Each bad probe adds
# its cost in T(1) times GAP_PER_PROBE_COST to the gap. A model that would not earn the probe and the reading of the
# text at the acceptance PROMISING is not probed.
FIRST_GAP, DOUBTFUL_GAP = 8, 20
GAP_PER_PROBE_COST = 192.0
PROMISING = 0.9
PROBE_TOKENS = 16  # of a model that holds nothing, half are context: `model.PROBE_CONTEXT`

# Catching up must pay within HORIZON tokens, or within half of the tokens for which the model was not used: the length
# of the answer is unknown. With an unknown pair it may cost BLIND_INVESTMENT at most, in T(1), before the first sample.
# A long prompt costs tens.
DEPTH_STEP = 256  # tokens of context after which T(n) is computed anew
HORIZON = 32
SHARE_WEIGHT = 8  # tokens; of the share 1 with which the steps without looked-up tokens begin
BLIND_INVESTMENT = 0.5

PLAIN = DraftPlan()  # of a step in which nothing is drafted
NOTHING = Decision(0, 0.0, go_on=False, plan=PLAIN)

Points: TypeAlias = tuple[tuple[int, float], ...]  # (rows, cost), rows ascending from 1


# T(n)/T(1) until it is measured: the steepest curve of the machines in benchmarks/README.md. With it only lookups that
# are nearly certain are drafted.
UNMEASURED: Points = ((1, 1.0), (2, 2.0), (4, 3.0), (8, 7.0), (17, 9.5))


def best_case(c: float, verify: Callable[[int], float], n_rows: int) -> float:
    """The speed over plain decoding with the best draft length, if every token is accepted. `verify`: up to n_rows."""
    return max(((k + 1) / (k * c + verify(k + 1)) for k in range(1, n_rows)), default=0.0)


def rows_of(points: Points) -> tuple[int, ...]:
    """The rows of the points after T(1)."""
    return tuple(n for n, _ in points if n > 1)


def cost_at(points: Points, n: float) -> float:
    """The cost of n rows: linear between the measured points, with the last slope after the last point."""
    if len(points) == 1:
        return points[0][1] * n
    for (n_low, low), (n_high, high) in pairwise(points):
        if n <= n_high:
            return low + (high - low) * (n - n_low) / (n_high - n_low)
    return high + max(high - low, 0.0) * (n - n_high) / (n_high - n_low)


def _require_points(points: Points, name: str) -> None:
    """Raises ConfigError for points that are no costs."""
    rows = [n for n, _ in points]
    if not rows or rows[0] != 1 or any(a >= b for a, b in pairwise(rows)):
        raise ConfigError(f"the cost profile's {name!r} has points at rows {rows}, expected 1 and ascending")
    if not all(0.0 <= cost < math.inf for _, cost in points):
        raise ConfigError(f"the cost profile's {name!r} holds a cost that is no number, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Measured costs of passes over n rows, in units of T(1): the target's pass over one row.

    T may have any shape. The draft's points of many rows are the cost of catching up. Raises ConfigError for points
    that are no costs.
    """

    verify: Points
    draft: Points
    attention: float = 0.0  # what a token of context adds to each row of the target; the points hold near its beginning
    assumed: tuple[int, ...] = ()  # rows of `verify` that were not measured

    def __post_init__(self) -> None:
        _require_points(self.verify, "verify")
        _require_points(self.draft, "draft")
        if abs(self.verify[0][1] - 1.0) > 1e-6:
            raise ConfigError(f"the cost profile has T(1) = {self.verify[0][1]}, expected 1, its unit")

    def verify_cost(self, n: int, depth: int = 0) -> float:
        """T(n)/T(1) after `depth` tokens: rows share the reading of the weights, but not the attention."""
        more = self.attention * depth
        return (cost_at(self.verify, n) + n * more) / (1.0 + more)

    def measured_cost(self, n: int, n_context: int = 0) -> float | None:
        """`verify_cost`; None if a point that it depends on was not measured."""
        if n == 1:
            return 1.0  # the unit
        rows = [row for row, _ in self.verify]
        beside = [n] if n in rows else [*[row for row in rows if row < n][-1:], *[row for row in rows if row > n][:1]]
        return None if set(beside) & set(self.assumed) else self.verify_cost(n, n_context)

    def draft_cost(self, n: int = 1) -> float:
        """The draft's pass over n rows; over one row it is the c of the cost model."""
        return cost_at(self.draft, n)

    @property
    def best_case(self) -> float:
        """The speed over plain decoding with the best draft length, if every token is accepted."""
        return best_case(self.draft_cost(), self.verify_cost, self.verify[-1][0])


class PassCosts(Protocol):
    """What a controller decides by: costs in units of a pass of the target without drafts."""

    @property
    def verify(self) -> Points:
        """The points that were measured."""

    def verify_cost(self, n: int, depth: int = 0) -> float:
        """The target's pass over n rows after `depth` tokens; 1 for one row."""

    def draft_cost(self, n: int = 1) -> float:
        """The draft's pass over n rows."""


@dataclass(slots=True)
class _Step:
    """The plan and the answers since the last verification."""

    plan: DraftPlan
    limit: int
    looks: bool  # `look` is asked before every evaluation
    typical: float  # acceptance of a token of the model at unknown confidence
    reach: float = 1.0  # chance that all tokens drafted so far are accepted
    confidences: list[float | None] = field(default_factory=list)  # of each of them; None = looked up

    def add(self, confidence: float | None, chance: float) -> None:
        self.confidences.append(confidence)
        self.reach *= chance


class Controller:
    """A `Planner` that drafts as long as the next tokens are expected to save more time than they cost.

    P(i) is the estimated chance that drafted token i is reached and accepted. The plan is the draft with the highest
    rate R = (1 + P(1) + ... + P(k)) / (cost of drafting k tokens + T(k+1)), k = 0 included; the smaller k wins ties.
    The candidates are the first tokens of the lookup's offer, the model's own draft, and the model's after the offer.
    While drafting, with the confidences seen so far, it continues at n if for some m > n
    P(n+1) + ... + P(m) > R * (cost of drafting m-n more + T(m+1) - T(n+1)).

    It depends on stored costs and past verifications only, and on nothing after a draw: the text is exact, and the same
    seed gives the same text. A model that does not pay is neither evaluated nor fed, but probed.
    """

    def __init__(self, costs: PassCosts, *, n_max: int = TUNED, calibration: Calibration | None = None) -> None:
        self.calibration = calibration or Calibration()
        self._longest = n_max
        # While the model is not used, each step asks for the same.
        self._best_model = lru_cache(maxsize=4)(self._find_best_model)
        self.use(costs)
        self._step: _Step | None = None
        self._n_unused = 0  # tokens emitted since the model last drafted
        self._n_bare = 0  # of these, in steps without looked-up tokens
        self._n_idle = 0  # tokens emitted since it last drafted or was probed
        self._gap = 0  # idle tokens before the next probe; 0 until the model is first considered
        self._probed = False  # the last plan has a probe

    def use(self, costs: PassCosts) -> None:
        """Decide by these costs from the next step on."""
        self.costs = costs
        # Blocks that were not measured are not tried: T(n) can jump.
        self.n_max = min(self._longest, max(costs.verify[-1][0] - 1, 1))
        self._draft = costs.draft_cost()
        self._go_to(0)
        # After a fully accepted block the model reads one token more in the next step.
        self._reread = max(costs.draft_cost(2) - self._draft, 0.0)

    def _go_to(self, depth: int) -> None:
        """Use the costs after `depth` tokens."""
        self._depth = depth
        self._best_model.cache_clear()
        rows = range(1, self.n_max + 2)
        self._verify = [self.costs.verify_cost(n, depth) for n in rows]  # [n] = T(n+1), of n drafted tokens

    def _come_to(self, depth: int) -> None:
        """`_go_to` if the costs have changed since."""
        if abs(depth - self._depth) >= DEPTH_STEP:
            self._go_to(depth)

    @property
    def needs_pair(self) -> bool:
        """True if a lookup by the last token alone cannot pay."""
        return self._verify[1] >= PAIR_FROM

    def rests(self, limit: int, depth: int) -> bool:
        """True if the model is not used now without an offer, nor probed within the tokens that a probe compares."""
        self._come_to(depth)
        limit, typical = min(limit, self.n_max), self.calibration.typical
        if self._probed or limit < 1 or self._best_model((), limit, typical)[1] > LEAST_RATE:
            return False
        soon = self._n_idle + PROBE_TOKENS + self.n_max + 1 >= self._gap
        if soon and self._best_model((), self.n_max, max(PROMISING, typical))[1] > LEAST_RATE:
            return False
        self._step = None
        return True

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
        self._come_to(depth)
        if lag is None and not self._best_offer(offer[: min(limit, self.n_max)])[0]:
            self._step = None
            return PLAIN
        return self._begin_step(limit, offer, lag, looks=True).plan

    def _begin_step(self, limit: int, offer: Sequence[float], lag: int | None, *, looks: bool) -> _Step:
        limit, typical = min(limit, self.n_max), self.calibration.typical
        n_given, rate = self._best_offer(offer[:limit])
        plan = DraftPlan(n_given, rate=rate)
        if lag is not None and limit > 0:
            best = self._best_model(tuple(offer[:n_given]), limit, typical)
            plan = self._with_model(plan, best, limit, lag)
        step = self._step = _Step(plan, limit, looks, typical)
        for chance in offer[: plan.n_given]:
            step.add(None, chance)
        return step

    def _best_offer(self, chances: Sequence[float]) -> tuple[int, float]:
        """(tokens of the offer to take, rate) without the model; chances: of each, if all before it are accepted."""
        n_best, best, reach, n_expected = 0, 1.0, 1.0, 1.0
        for n, chance in enumerate(chances, 1):
            reach *= chance
            n_expected += reach
            rate = n_expected / self._verify[n]
            if rate > best:
                n_best, best = n, rate
        return n_best, best

    def _with_model(self, without: DraftPlan, best: tuple[int, float], limit: int, lag: int) -> DraftPlan:
        """The plan with the model, if it is better than `without`; else `without`, perhaps with a probe.

        best: (tokens of the offer to take first, rate) of the best plan with the model.
        """
        n_given, rate = best
        pays = rate > LEAST_RATE * without.rate
        if pays and self._worth_catching_up(lag, rate, without.rate):
            return DraftPlan(n_given, limit - n_given, rate=rate)
        self._gap = self._gap or (FIRST_GAP if pays else DOUBTFUL_GAP)
        if self._probed:  # without success
            self._probed = False
            self._gap += 0 if pays else int(GAP_PER_PROBE_COST * self.costs.draft_cost(PROBE_TOKENS))
        elif (
            self._n_idle >= self._gap
            and (self.calibration.empty or not pays)
            and self._worth_probing(lag, without.rate)
        ):
            self.calibration.age(self._n_idle)
            self._n_idle, self._probed = 0, True
            return replace(without, probe=PROBE_TOKENS)
        return without

    def _find_best_model(self, chances: Sequence[float], limit: int, typical: float) -> tuple[int, float]:
        """(tokens of the offer to take first: all or none, rate) with at least one token of the model.

        typical: acceptance of each of them.
        """
        n_given, best = 0, 0.0
        for start in sorted({0, len(chances)}):
            reach, n_expected = 1.0, 1.0
            for chance in chances[:start]:
                reach *= chance
                n_expected += reach
            cost = self.costs.draft_cost(start + 1)  # the model reads the offered tokens first
            for n in range(start + 1, limit + 1):
                reach *= typical
                n_expected += reach
                rate = n_expected / (cost + reach * self._reread + self._verify[n])
                if rate > best:
                    n_given, best = start, rate
                cost += self._draft
        return n_given, best

    def _worth_catching_up(self, lag: int, rate: float, rival: float) -> bool:
        """True if reading `lag` tokens pays, to emit tokens at `rate` instead of `rival`."""
        cost = self._catching_up(lag)
        if self.calibration.blind and cost > BLIND_INVESTMENT:
            return False
        return cost <= self._saving(rate, rival)

    def saves(self, n_tokens: int, n_prompt: int) -> float:
        """T(1) that the model is expected to save in an answer, with the reading of the prompt; below 0 for a loss."""
        _, rate = self._best_model((), self.n_max, self.calibration.typical)
        return n_tokens * (1.0 - 1.0 / rate) - self._catching_up(n_prompt)

    def _worth_probing(self, lag: int, rival: float) -> bool:
        """True if a promising model would save more than the probe and reading `lag` tokens cost."""
        _, rate = self._best_model((), self.n_max, max(PROMISING, self.calibration.typical))
        cost = self.costs.draft_cost(min(lag + 1, PROBE_TOKENS)) + self._catching_up(lag)
        return rate > LEAST_RATE * rival and cost <= self._saving(rate, rival)

    def _catching_up(self, lag: int) -> float:
        """What reading `lag` tokens costs, beside drafting."""
        return self.costs.draft_cost(lag + 1) - self._draft

    def _saving(self, rate: float, rival: float) -> float:
        """T(1) that the model is expected to save in this answer, at `rate` instead of `rival`.

        Only in steps without looked-up tokens, by their share so far: 1 at first, with the weight of SHARE_WEIGHT.
        """
        share = (self._n_bare + SHARE_WEIGHT) / (self._n_unused + SHARE_WEIGHT)
        return max(HORIZON, self._n_unused // 2) * share * (1.0 / rival - 1.0 / rate)

    def look(self, depth: int) -> bool:
        """May the model be evaluated for token `depth`? Its confidence is unknown."""
        step = self._open_step()
        return self._pays(step, depth, step.typical, self._draft)

    def go_on(self, depth: int, confidence: float) -> bool:
        """May token `depth` be drawn from the law that was just evaluated?

        A drafter that does not ask `look` evaluates the next law at once, so the cost of that counts as well.
        """
        step = self._open_step()
        chance = self.calibration.at(confidence)
        allowed = step.plan.n_drawn > 0 and self._pays(step, depth, chance, 0.0 if step.looks else self._draft)
        if step.plan.probe:  # a drafter without plans: one token is its probe
            allowed = depth == 0
        if allowed:
            step.add(confidence, chance)
        return allowed

    def _open_step(self) -> _Step:
        """The step in progress; the first question of a drafter without plans begins one."""
        return self._step or self._begin_step(self.n_max, (), 0, looks=False)

    def _pays(self, step: _Step, n: int, chance: float, cost: float) -> bool:
        """True if some m > n, within the limit, saves more than it costs. `chance`, `cost`: of token n (0 = first)."""
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
        self.calibration.learn(confidence, acceptance)

    def observe(self, seen: Observation) -> None:
        """Learn from the accepted tokens and the first rejected one; those after it were not judged."""
        step, self._step = self._step, None
        n_accepted = len(seen.verdict.path)
        self._pass(seen)
        if step is None or seen.draft.parents is not None:
            return
        n_drafted = min(len(seen.draft.tokens), len(step.confidences))
        for depth, confidence in enumerate(step.confidences[: min(n_accepted + 1, n_drafted)]):
            if confidence is not None:
                self.calibration.learn(confidence, float(depth < n_accepted))
        if step.plan.n_drawn and n_drafted > step.plan.n_given:
            self._restart()

    def _pass(self, seen: Observation) -> None:
        """Count the emitted tokens."""
        n_tokens = len(seen.verdict.path) + 1
        self._n_idle += n_tokens
        self._n_unused += n_tokens
        self._n_bare += 0 if seen.draft.n_given else n_tokens

    def _restart(self) -> None:
        """The model drafted: count anew."""
        self._n_unused = self._n_bare = self._n_idle = 0
        self._gap, self._probed = FIRST_GAP, False
