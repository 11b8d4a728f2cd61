"""The controller against fixed draft lengths: made-up traces and the costs of benchmarks/README.md.

Texts have easy and hard stretches, and the draft is slightly more confident where it is right. Every cost counts:
evaluated rows that are thrown away, probes, catching up, the last token of a fully accepted block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from statistics import fmean

import numpy as np
import pytest

from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Draft, DraftPlan, Observation, Verdict
from specllama.drafters.controller import Controller, CostProfile, Points
from specllama.drafters.model import PROBE_CONTEXT, ModelDrafter
from specllama.tuning.traces import Trace, rate
from tests.fakes import FakeModel, History

N_TOKENS = 256
N_PROMPT = 33  # the draft reads it after the first step, which counts
SEEDS = range(24)
FIXED = (1, 2, 3, 4, 5, 7, 11, 15)

# T(n)/T(1) of the 1.5B target (benchmarks/README.md): AMX, CPU_REPACK with its cheap fourth row, no extra buffer types.
AMX = ((1, 1.0), (2, 1.59), (3, 1.67), (4, 1.73), (5, 1.83), (6, 1.90), (8, 2.08), (12, 2.42), (16, 2.79))
REPACK = ((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (5, 1.83), (6, 2.19), (8, 2.3), (12, 3.07), (16, 3.4))
BARE = ((1, 1.0), (2, 1.4), (3, 1.9), (4, 2.3), (6, 3.0), (8, 3.2), (16, 3.3))


def profile(verify: Points, c: float) -> CostProfile:
    """The draft's costs have the target's shape; a batch of 32 costs four single steps, one of 256 costs 22."""
    draft = tuple((n, c * cost) for n, cost in (*AMX, (32, 4.0), (64, 6.5), (256, 22.0)))
    return CostProfile(verify=verify, draft=draft)


# 0.42: the published draft, 0.21: the same requantised to Q4_0.
COSTS = {
    "AMX, published draft": profile(AMX, 0.42),
    "AMX, Q4_0 draft": profile(AMX, 0.21),
    "REPACK, published draft": profile(REPACK, 0.42),
    "REPACK, Q4_0 draft": profile(REPACK, 0.21),
    "no extra buffers, published draft": profile(BARE, 0.42),
    "no extra buffers, Q4_0 draft": profile(BARE, 0.21),
}


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@lru_cache
def _level_for(alpha: float) -> float:
    """The mean ease of a text with the acceptance `alpha`."""
    rng = random.Random(0)
    eases = [2.5 * rng.gauss(0, 1) for _ in range(4000)]
    low, high = -15.0, 15.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(_logistic(middle + ease) for ease in eases) < alpha else (low, middle)
    return low


@cache
def trace(seed: int, alpha_at: Callable[[int], float]) -> Trace:
    rng = random.Random(seed)
    accepted, confidence, ease = list[float](), list[float](), rng.gauss(0, 1)
    for i in range(N_TOKENS):
        ease = 0.4 * ease + math.sqrt(1 - 0.4**2) * rng.gauss(0, 1)  # neighbours are alike
        level = _level_for(alpha_at(i))
        accepted.append(float(rng.random() < _logistic(level + 2.5 * ease)))
        sure = _logistic(max(level, 0.5) + 2.5 * (0.8 * ease + 0.6 * rng.gauss(0, 1)))  # also a hopeless draft
        confidence.append(min(max(sure, 0.2), 0.9999))
    return Trace("made up", True, tuple(accepted), tuple(confidence))


SCENARIOS: dict[str, Callable[[int], float]] = {
    "hopeless": lambda i: 0.05,
    "questions": lambda i: 0.65,
    "code": lambda i: 0.90,
    "prose and code by turns": lambda i: 0.95 if i % 128 < 64 else 0.4,
}


class Replay:
    """The costs of one answer with `ModelDrafter` and the engine. `n_held`: tokens in the draft's KV."""

    def __init__(self, policy: Controller, trace: Trace, costs: CostProfile) -> None:
        self.policy = policy
        self.trace = trace
        self.costs = costs
        self.cost = 0.0
        self.n_said = 0
        self.n_held = 0

    def run(self) -> float:
        """T(1) per token."""
        while self.n_said < N_TOKENS:
            self._step(min(N_TOKENS - self.n_said - 1, 32))
        return self.cost / self.n_said

    def _learn(self, i: int) -> None:
        self.policy.learn(self.trace.confidence[i], self.trace.acceptance[i])

    def _lag(self) -> int:
        return N_PROMPT + self.n_said - 1 - self.n_held

    def _plan(self, limit: int) -> DraftPlan:
        if self.n_said == 0 or limit == 0:
            return DraftPlan()
        plan = self.policy.plan(limit, lag=self._lag())
        if plan.probe:
            self._probe(plan.probe)
            plan = self.policy.plan(limit, lag=self._lag())
        return plan

    def _probe(self, n_most: int) -> None:
        n_read = min(self._lag(), n_most)
        n_rows = min(n_read - max(0, PROBE_CONTEXT - self.n_held), self.n_said)
        self.cost += self.costs.draft_cost(n_read)
        for i in range(self.n_said - n_rows, self.n_said):
            self._learn(i)
        if n_read == self._lag():
            self.n_held += n_read

    def _step(self, limit: int) -> None:
        plan = self._plan(limit)
        lag, at, n_evals, n_drawn = self._lag(), self.n_said, 0, 0
        while n_drawn < plan.n_drawn and (n_drawn == 0 or self.policy.look(n_drawn)):
            self.cost += self.costs.draft_cost(lag + 1 if n_evals == 0 else 1)
            n_evals += 1
            if not self.policy.go_on(n_drawn, self.trace.confidence[at + n_drawn]):
                break
            n_drawn += 1
        self.cost += self.costs.verify_cost(n_drawn + 1)
        n_accepted = len(list(takewhile(bool, self.trace.acceptance[at : at + n_drawn])))
        draft, verdict = Draft(tuple(range(n_drawn))), Verdict(tuple(range(n_accepted)), 0)
        self.policy.observe(Observation((), draft, verdict, "replay"))
        if n_evals > n_drawn == n_accepted:
            self._learn(at + n_drawn)
        if n_evals:
            self.n_held += lag + min(n_evals, n_accepted + 1)
        self.n_said += n_accepted + 1


def speed(costs: CostProfile, traces: Sequence[Trace]) -> float:
    """Of the controller over all traces together: tokens per T(1), so 1 is plain decoding."""
    return 1.0 / fmean(Replay(Controller(costs), each, costs).run() for each in traces)


def best_fixed(costs: CostProfile, traces: Sequence[Trace]) -> float:
    """The same of the best fixed length, known in hindsight; the draft's reading of the prompt counts."""
    reading = costs.draft_cost(N_PROMPT) / N_TOKENS  # T(1) per token
    return max(1.0, *(1.0 / (1.0 / rate(traces, costs, k) + reading) for k in FIXED))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", COSTS)
def test_the_controller_is_never_slower_than_plain_nor_far_from_the_best_fixed_length(name: str, scenario: str) -> None:
    """A controller that pays more for learning than it gains, or is slower than a length set by hand."""
    costs = COSTS[name]
    traces = [trace(seed, SCENARIOS[scenario]) for seed in SEEDS]
    found = speed(costs, traces)
    assert found >= 0.98
    assert found >= 0.95 * best_fixed(costs, traces)


@pytest.mark.slow
def test_confidences_and_a_text_that_changes_beat_every_fixed_length() -> None:
    """A controller that ignores the confidences and only finds the best fixed length."""
    costs = COSTS["AMX, Q4_0 draft"]
    for scenario, at_least in (("code", 1.03), ("prose and code by turns", 1.05)):
        traces = [trace(seed, SCENARIOS[scenario]) for seed in SEEDS]
        assert speed(costs, traces) > at_least * best_fixed(costs, traces)


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    """A pause without a way back: code after prose at plain speed."""
    costs = profile(AMX, 0.05)
    traces = [trace(seed, lambda i: 0.05 if i < 96 else 0.95) for seed in SEEDS]
    assert speed(costs, traces) > 1.15


# ------------------------------------------------------------------------------- the real drafter in the real engine

N_VOCAB = N_PROMPT + N_TOKENS + 64  # a token is its position, so a draft that sees only the end knows it
GREEDY = SamplingParams(temperature=0.0)


def _row(token: int, confidence: float) -> FloatArray:
    """Logits that give `token` the probability `confidence` and the others equal shares."""
    row = np.full(N_VOCAB, math.log((1 - confidence) / (N_VOCAB - 1)), dtype=np.float32)
    row[token] = math.log(confidence)
    return row


def _models(trace: Trace) -> tuple[FakeModel, FakeModel]:
    """A target that counts, and a draft that counts as well, but skips one where the trace rejects."""

    def target(history: History) -> FloatArray:
        return _row(history[-1] + 1, 0.9)

    def draft(history: History) -> FloatArray:
        after = history[-1] + 1
        i = min(max(after - N_PROMPT, 0), N_TOKENS - 1)
        return _row(after + (not trace.acceptance[i]), trace.confidence[i])

    return FakeModel(target, N_VOCAB, n_ctx=400), FakeModel(draft, N_VOCAB, n_ctx=400)


def _cost(target: FakeModel, draft: FakeModel, costs: CostProfile) -> float:
    """The cost of the recorded calls; fed tokens are computed by the next `eval`, as in llama.cpp's model."""
    n_fed, total = 0, 0.0
    for call in draft.calls:
        if call.name == "feed":
            n_fed += len(call.tokens)
        elif call.name == "eval":
            total += costs.draft_cost(n_fed + len(call.tokens))
            n_fed = 0
    return total + sum(costs.verify_cost(len(call.tokens)) for call in target.calls if call.name == "eval")


@pytest.mark.parametrize(("scenario", "at_least"), [("hopeless", 0.98), ("code", 1.4)])
def test_the_real_drafter_costs_what_the_replay_says(scenario: str, at_least: float) -> None:
    """A replay that counts other evaluations than the drafter makes."""
    costs = COSTS["AMX, Q4_0 draft"]
    found = trace(5, SCENARIOS[scenario])
    target, draft = _models(found)
    engine = Engine(target, ModelDrafter(draft, n_max=16, policy=Controller(costs)))
    prompt = range(N_PROMPT)
    events = list(engine.generate(prompt, GREEDY, RandomChooser(0), max_tokens=N_TOKENS))
    assert isinstance(events[-1], Finished)
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    assert tokens == list(range(N_PROMPT, N_PROMPT + N_TOKENS))
    cost = _cost(target, draft, costs)
    assert N_TOKENS / cost >= at_least
    assert cost == pytest.approx(N_TOKENS * Replay(Controller(costs), found, costs).run(), rel=0.01)
