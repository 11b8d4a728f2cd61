"""Benchmark reports for tests: a sweep over lengths, two temperatures, a few classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specllama.bench.report import ALL, BenchReport, BenchRow, Interval, PairCosts, PlannedPrompt, TimeSplit
from specllama.drafters.controller import CostProfile
from tests.bench_cases import MACHINE, PLAIN, arm_of, plan_of, report_of

CLASSES = ("coding", "qa", "poem")
LENGTHS: Sequence[int | None] = (0, 2, 4, 8, None)
COSTS = CostProfile(
    verify=((1, 1.0), (2, 1.6), (3, 1.7), (5, 1.8), (9, 2.2)), draft=((1, 0.3), (2, 0.4), (16, 0.9), (64, 2.0))
)
_ALPHA = {"coding": 0.9, "qa": 0.65, "poem": 0.5, ALL: 0.7}


def row(arm: int, k: int | None, condition: int, category: str) -> BenchRow:
    """Consistent figures of the cost model, with an interval around them."""
    alpha, length = _ALPHA[category] - 0.05 * condition, 4 if k is None else k
    tokens = sum(alpha**i for i in range(length + 1))
    speedup = tokens / (0.3 * length + COSTS.verify_cost(length + 1))
    plain = k == 0
    return BenchRow(
        arm=arm, condition=condition, category=category, n_prompts=4, n_runs=8, ttft_s=0.8, latency_s=3.0,
        prefill_tok_s=90.0, decode_tok_s=20.0 * speedup, decode_low_tok_s=19.0 * speedup,
        decode_high_tok_s=21.0 * speedup, tpot_s=0.05 / speedup, step_s=0.05, step_p95_s=0.06, n_drafted=100 * length,
        n_accepted=int(100 * (tokens - 1)), acceptance_rate=None if plain else (tokens - 1) / length,
        alpha=None if plain else alpha, mean_length=None if plain else tokens, from_draft=None if plain else 0.6,
        per_position=() if plain else tuple(alpha**i for i in range(1, length + 1)),
        histogram=() if plain else (10, *[5] * length),
        time_split=TimeSplit(draft=0.0 if plain else 0.3, verify=0.96 if plain else 0.62, sampling=0.02, kv=0.01,
                             other=0.01 if plain else 0.05),
        rss=2_000_000_000, gpu_bytes=None, speedup=None if plain else Interval(speedup, 0.9 * speedup, 1.12 * speedup),
        latency_speedup=None, versus_reference=None, predicted=None if k in (0, None) else 1.05 * speedup,
        bound=None, bound_share=None, weight_bytes_s=None, bandwidth_share=None, bands=(),
    )  # fmt: skip


def report(
    *, lengths: Sequence[int | None] = LENGTHS, temperatures: Sequence[float] = (0.0, 1.0), **changes: Any
) -> BenchReport:
    arms = [PLAIN, *(arm_of(0, name=f"K={n or 'auto'}", n_max=n) for n in lengths if n != 0)]
    prompts = [
        PlannedPrompt(id=f"{name}-{i}", category=name, language="en", picks=i % 2 == 0)
        for name in CLASSES
        for i in range(4)
    ]
    plan = plan_of(arms, prompts, temperatures=temperatures, n_repetitions=2)
    rows = tuple(
        row(i, arm.n_max, condition, category)
        for i, arm in enumerate(arms)
        for condition in range(len(temperatures))
        for category in (*CLASSES, ALL)
    )
    made = replace(
        report_of(replace(plan, drafts=("small-q4_0.gguf",), budget_s=600.0), ()),
        target={"file": "large-q4_k_m.gguf"},
        drafts=({"file": "small-q4_0.gguf"},),
        machine=replace(MACHINE, cpu="A CPU"),
        costs=(PairCosts(load=0, draft=0, step_s=0.05, profile=COSTS, noise=0.02),),
        rows=rows,
        verdict="",
    )
    return replace(made, **changes)
