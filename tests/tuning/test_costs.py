"""Measuring passes and acceptance."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Caps
from specllama.tuning import costs
from specllama.tuning.costs import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Curve,
    finished,
    interleaving,
    measuring_acceptance,
    measuring_costs,
    spread,
    verifying,
)
from tests import tiny
from tests.fakes import FakeModel, RandomTable


@pytest.mark.parametrize(("budget", "n_rounds"), [(0.0, LEAST_ROUNDS), (1e9, MOST_ROUNDS), (30.0, 9)])
def test_passes_take_turns_until_the_time_is_over(budget: float, n_rounds: int) -> None:
    """Prevents: a machine that grows hot and slows only the last pass; a measurement that never ends."""
    log, shares = list[float](), list[float]()
    passes = [lambda: log.append(1.0), lambda: log.append(2.0)]
    samples = finished(interleaving(passes, seconds=budget, clock=lambda: sum(log)), shares.append)
    assert log == [1.0, 2.0] * (n_rounds + 1), "the first round warms up"
    assert samples == [[1.0] * n_rounds, [2.0] * n_rounds]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_costs_of_real_models_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Prevents: a measurement that leaves its text in the KV caches, or measures other rows."""
    target_path, draft_path = tiny.write_pair(tmp_path)
    with tiny.load(target_path, max_block=9) as target, tiny.load(draft_path, max_block=1) as draft:
        costs = finished(measuring_costs(target, draft, [1, 2, 3, 4] * 20, seconds=0.01))
        assert [n for n, _ in costs.profile.verify] == [1, 2, 3, 4, 5, 6, 8]
        assert [n for n, _ in costs.profile.draft] == [1, 2, 8, 32]
        assert all(cost > 0 for _, cost in (*costs.profile.verify, *costs.profile.draft))
        assert costs.step_s > 0
        assert costs.noise >= 0
        assert target.length == draft.length == 0


@pytest.mark.parametrize(
    ("n_again", "n_ctx", "n_rows", "calls"),
    [
        (0, 64, 3, ["eval"]),
        (4, 64, 3, ["feed", "eval"]),
        (4, 64, 1, ["eval"]),  # a plain step rejects nothing
        (4, 8, 3, ["eval"]),  # no room
    ],
)
def test_a_block_costs_also_what_a_rejection_computes_again(
    n_again: int, n_ctx: int, n_rows: int, calls: list[str]
) -> None:
    """Prevents: drafts that seem to pay because a recurrent model's replay is not counted."""
    model = FakeModel(RandomTable(5, 1), 5, n_ctx=n_ctx, caps=Caps(n_again=n_again))
    model.feed([1] * 5)
    verifying(model, 5, [2, 3, 4][:n_rows])()
    assert model.length == 5
    assert [call.name for call in model.calls if call.name in ("feed", "eval")][1:] == calls


def test_acceptance_is_counted_for_each_class(tmp_path: Path) -> None:
    """Prevents: one number for all classes; acceptance without drafts."""
    target_path, draft_path = tiny.write_pair(tmp_path)
    with tiny.load(target_path, max_block=5) as target, tiny.load(draft_path, max_block=1) as draft:
        prompts = {"one": [1, 2, 3], "two": [4, 5, 6, 7]}
        params = SamplingParams(logit_bias={10: -1e9, 11: -1e9})  # no end tokens
        found, again = (
            finished(measuring_acceptance(target, draft, prompts, params, n_max=4, n_tokens=30)) for _ in range(2)
        )
        ticks = count()
        short = measuring_acceptance(
            target, draft, prompts, params, n_max=4, n_tokens=30, seconds=40.0, clock=lambda: float(next(ticks))
        )
        shares = list[float]()
        cut = finished(short, shares.append)
        cancel = Cancel()
        stopped = measuring_acceptance(target, draft, prompts, params, n_max=4, n_tokens=30, cancel=cancel)
        for _ in range(8):
            next(stopped)
        cancel.set()
        rest = finished(stopped)
    assert list(found) == ["one", "two"]
    for name, stats in found.items():
        assert stats.n_emitted == 30
        assert stats.n_accepted + stats.n_rejected > 10
        assert (stats.n_accepted, stats.n_rejected) == (again[name].n_accepted, again[name].n_rejected)
    assert shares == sorted(shares)
    assert all(0 < stats.n_emitted < 30 for stats in cut.values()), "each class gets its part of the time"
    assert list(cut) == ["one", "two"]
    assert list(rest) == ["one"]
    assert 0 < rest["one"].n_emitted < 30


@pytest.mark.parametrize("attention", [0.0, 5e-5, 4e-4])
def test_the_attention_follows_from_the_curves_at_two_depths(attention: float) -> None:
    """Prevents: a factor of T(1), of the rows or of the first depth; a negative cost."""

    def curve(depth: int, drift: float = 1.0) -> Curve:
        more = depth * attention
        return Curve(depth, {n: drift * (cost + n * more) / (1.0 + more) for n, cost in ((4, 1.25), (8, 1.6))})

    assert costs.attention(curve(128), curve(2048)) == pytest.approx(attention)
    assert costs.attention(curve(128, 1.2), curve(2048)) >= 0.0


def test_noise_is_the_spread_of_the_middle_half() -> None:
    """Prevents: the work of other programs counted as cost of the models."""
    assert spread([1.0, 1.0, 1.0, 1.0, 50.0]) > 1.0
    assert spread([2.0] * 5) == 0.0
    assert spread([0.9, 1.0, 1.0, 1.0, 1.1]) == pytest.approx(0.1)
