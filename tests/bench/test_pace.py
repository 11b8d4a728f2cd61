"""A benchmark keeps to a small budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specllama.bench.report import BenchReport
from specllama.core import engine
from specllama.core.arrays import FloatArray
from specllama.core.types import Caps
from specllama.prompts.load import BenchPrompt
from tests.bench_cases import VOCAB, Stage, lengths
from tests.fakes import FakeModel, RandomTable
from tests.marks import slow

READ_SHARE, DRAFT_SHARE = 0.2, 0.4  # time for a token that is read, and for a pass of the draft, over T(1)
PROMPTS = tuple(BenchPrompt(f"q{i}", ("code", "poem")[i % 2], "en", ("word " * (40 - i),)) for i in range(30))


@dataclass
class Timed(FakeModel):
    """A model whose rows and tokens take time."""

    stage: Stage = field(default_factory=Stage)
    row_s: float = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        self.stage.now += READ_SHARE * self.row_s * len(tokens)
        super().feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self.stage.now += self.row_s * (1.0 + READ_SHARE * (len(tokens) - 1))
        return super().eval(tokens, parents)


@dataclass
class TimedStage(Stage):
    """A target and a faster draft that is its twin."""

    def model(self, seed: int) -> FakeModel:
        """The first of every load is the target."""
        share = DRAFT_SHARE if self.models and len(self.models) > 1 else 1.0
        return Timed(RandomTable(VOCAB, seed), VOCAB, n_ctx=512, end_tokens=self.end_tokens, caps=Caps(max_block=17),
                     stage=self, row_s=share * self.eval_s)  # fmt: skip


def measured(monkeypatch: pytest.MonkeyPatch, budget_s: float, step_s: float, **changes: object) -> BenchReport:
    """A benchmark whose lengths follow from the budget, with T(1) = `step_s`."""
    stage = TimedStage(eval_s=step_s)
    monkeypatch.setattr(engine, "perf_counter", lambda: stage.now)
    job = stage.job(PROMPTS, budget_s=budget_s, **{"n_predict": (), "lengths": lengths(0, 4), **changes})
    report = stage.events(job)[-1]
    assert isinstance(report, BenchReport)
    return report


@pytest.mark.parametrize(
    ("budget_s", "step_s"),
    [slow(90, 0.02), (90, 0.08), (120, 0.2), (90, 0.4), (90, 0.6)],
)
def test_a_small_budget_holds_on_fast_and_on_slow_machines(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, step_s: float
) -> None:
    """Prevents: 90 seconds that become 160, most of them spent before the first run."""
    report = measured(monkeypatch, budget_s, step_s)
    spent = report.spent
    assert spent is not None
    whole_s = spent.costs_s + spent.warm_up_s + spent.runs_s + spent.insight_s
    assert whole_s <= 1.1 * budget_s + max(run.latency_s for run in report.runs)
    assert len(spent.arms_s) == len(report.plan.arms)
    assert sum(spent.arms_s) == pytest.approx(spent.runs_s)
    measured_runs = {(run.prompt, run.arm) for run in report.runs}
    assert {prompt for prompt, arm in measured_runs if arm == 0} == {
        prompt for prompt, arm in measured_runs if arm == 1
    }
    if budget_s / step_s > 400:  # else the machine is too slow
        assert spent.costs_s + spent.warm_up_s < budget_s / 3
        assert len({prompt for prompt, _ in measured_runs}) >= 3
        assert not report.partial
    assert bool(report.costs) == (step_s <= 0.2)
    assert any("costs of a pass" in warning for warning in report.warnings) == (not report.costs)


def test_what_an_arm_needs_to_be_planned_is_known_after_a_short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a plan for half or twice as many prompts because the draft reads the prompt in one step."""
    report = measured(monkeypatch, 90.0, 0.08)
    assert report.spent is not None
    assert 0.7 < report.spent.runs_s / report.plan.expected_s < 1.1
