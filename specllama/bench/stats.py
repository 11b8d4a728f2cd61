"""Computes the benchmark's table from its runs: medians, paired speedups with intervals, predictions, bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from specllama.bench.report import (
    ALL,
    Arm,
    Band,
    BandPlace,
    BenchPlan,
    BenchRow,
    BenchRun,
    Interval,
    PairCosts,
    Pick,
    TimeSplit,
)
from specllama.core.gain import Gain
from specllama.core.stats import SpecStats
from specllama.drafters import REGISTRY
from specllama.drafters.controller import CostProfile
from specllama.tuning import forecast

N_RESAMPLES = 2000
LEAST_PROMPTS = 3  # for an interval
TIE = 0.01  # arms within this count as equal: the smaller K wins

# Acceptance in the literature by class of prompts (name, low, high), and by temperature.
CLASS_BANDS: Mapping[str, tuple[str, float, float]] = {
    "coding": ("code", 0.85, 0.95),
    "translation": ("translation", 0.75, 0.85),
    "summarization": ("summary", 0.70, 0.80),
    "dialogue": ("free dialogue", 0.55, 0.70),
    "poem": ("poem", 0.40, 0.55),
}
TEMPERATURE_BANDS: Sequence[tuple[float, float, float, float]] = (  # from, to, acceptance low and high
    (0.1, 0.5, 0.80, 0.95),
    (0.7, 1.0, 0.60, 0.80),
    (1.0, 1.5, 0.50, 0.70),
    (2.0, 2.0, 0.30, 0.50),
)

Ratios = Sequence[Sequence[float]]  # by prompt: the logarithms of a ratio, one for each repetition
SpeedOf = Callable[[BenchRun], float | None]


def decode_speed(run: BenchRun) -> float | None:
    """Tokens per second after the first pass."""
    return run.stats.decode_tok_s


def answer_speed(run: BenchRun) -> float | None:
    """Tokens per second of the whole answer, prefill included."""
    return run.stats.n_emitted / run.latency_s if run.stats.n_emitted and run.latency_s else None


def log_ratios(runs: Iterable[BenchRun], base: Iterable[BenchRun], speed: SpeedOf = decode_speed) -> list[list[float]]:
    """ln(speed of a run / speed of the base run with the same condition, prompt and repetition), by prompt."""
    known = {(run.condition, run.prompt, run.repetition): speed(run) for run in base}
    found: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        mine, other = speed(run), known.get((run.condition, run.prompt, run.repetition))
        if mine and other:
            found.setdefault((run.condition, run.prompt), []).append(math.log(mine / other))
    return [found[key] for key in sorted(found)]


def ratio_of(ratios: Ratios) -> float:
    """The geometric mean over prompts; each prompt has the same weight, however often it was repeated."""
    return math.exp(sum(sum(each) / len(each) for each in ratios) / len(ratios))


def _student(n: int) -> float:
    """The 97.5 % point of Student's t for the mean of n samples (Cornish-Fisher: 1 % too low for three, then less)."""
    z, v = 1.959964, n - 1
    terms = (z**3 + z) / (4 * v), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    more = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    most = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    return z + sum(terms) + more + most


def interval(ratios: Ratios) -> Interval | None:
    """The ratio with its confidence interval; None without pairs.

    A percentile bootstrap over prompts, and over the repetitions of each. With few prompts the bootstrap is too narrow,
    by sqrt((n-1)/n) and by Student's t over the normal distribution; both are corrected (uncorrected, the coverage with
    three prompts is 82 %). One or two prompts give a ratio without an interval.
    """
    if not ratios:
        return None
    value = math.log(ratio_of(ratios))
    n_pairs = sum(map(len, ratios))
    if len(ratios) < LEAST_PROMPTS:
        return Interval(math.exp(value), None, None, n_pairs)
    random = np.random.default_rng(0)
    repeated = [np.asarray(each)[random.integers(0, len(each), (N_RESAMPLES, len(each)))].mean(1) for each in ratios]
    means = np.stack(repeated)  # (prompts, resamples)
    drawn = random.integers(0, len(ratios), means.shape)
    resampled = means[drawn, np.arange(N_RESAMPLES)].mean(0)
    n = len(ratios)
    wider = math.sqrt(n / (n - 1)) * _student(n) / _student(10**9)
    low, high = value + (np.percentile(resampled, (2.5, 97.5)) - value) * wider
    return Interval(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)), n_pairs)


def _steps_by_length(stats: SpecStats) -> list[tuple[int, int]]:
    """(drafted tokens, number of such steps), steps without a draft included."""
    at = [*stats.drafted_at, 0]
    lengths = [(i + 1, at[i] - at[i + 1]) for i in range(len(at) - 1)]
    return [(0, stats.n_steps - stats.n_spec_steps), *lengths]


_MIXED = ("chain", "tree")  # the cost of a token depends on which of two drafters made it


def _model_alone(arm: Arm) -> bool:
    """True if the draft model drafts every token."""
    return REGISTRY[arm.spec_type].needs_model and arm.spec_type not in _MIXED


def expected(arm: Arm, stats: SpecStats, costs: CostProfile) -> tuple[float | None, float | None]:
    """(predicted speedup, speedup if every drafted token were accepted).

    A draft model with a fixed length uses the formula of `forecast.speedup`, other arms the drafts that were made. None
    for `chain` and `tree`.
    """
    alpha = stats.alpha
    if arm.plain or alpha is None or arm.spec_type in _MIXED:
        return None, None
    if _model_alone(arm) and arm.n_max:
        return forecast.speedup(costs, alpha, arm.n_max), forecast.speedup(costs, 1.0, arm.n_max)
    price = costs.draft_cost() if _model_alone(arm) else 0.0
    cost = sum(n * costs.verify_cost(length + 1) for length, n in _steps_by_length(stats)) + price * stats.n_drafted
    return (stats.n_steps + stats.n_accepted) / cost, (stats.n_steps + stats.n_drafted) / cost


def weight_bytes_s(arm: Arm, stats: SpecStats, n_runs: int, n_target: int, n_draft: int) -> float | None:
    """Bytes of weights read per second of decoding: the target's once per step, the draft's once per drafted token."""
    if not stats.decode_s or arm.spec_type in _MIXED:
        return None
    n_steps = stats.n_steps - n_runs  # without the first pass of every run, which belongs to the prompt
    n_drawn = stats.n_drafted * n_steps / stats.n_steps if _model_alone(arm) else 0.0
    return (n_steps * n_target + n_drawn * n_draft) / stats.decode_s


def _band(source: str, low: float, high: float, alpha: float) -> Band:
    place: BandPlace = "below" if alpha < low else "above" if alpha > high else "inside"
    return Band(source, low, high, alpha, place)


def bands(category: str, temperature: float, alpha: float | None, others: Sequence[float]) -> tuple[Band, ...]:
    """The bands of a row. `others`: the acceptance of the same arm at temperatures above 0."""
    if alpha is None:
        return ()
    if category != ALL:
        known = CLASS_BANDS.get(category)
        return (_band(*known, alpha),) if known else ()
    if temperature == 0.0:
        return (_band("temperature 0, the highest of all", max(others), 1.0, alpha),) if others else ()
    return tuple(
        _band(f"temperature {start:g}-{end:g}" if start < end else f"temperature {end:g}", low, high, alpha)
        for start, end, low, high in TEMPERATURE_BANDS
        if start <= temperature <= end
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of weights, and the memory bandwidth of the machine."""

    target: int
    drafts: Sequence[int]
    memory_bytes_s: float | None


def merged(runs: Iterable[BenchRun]) -> SpecStats:
    """The sum of the counters and times of several runs."""
    total = SpecStats()
    for run in runs:
        total.merge(run.stats)
    return total


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _gain(runs: Iterable[BenchRun]) -> Gain | None:
    known = [run.gain for run in runs if run.gain is not None]
    if not known:
        return None
    return Gain(*(median(getattr(each, part.name) for each in known) for part in fields(Gain)))


def _time_split(stats: SpecStats, runs: Sequence[BenchRun]) -> TimeSplit | None:
    whole = sum(sum(run.steps_s) for run in runs)
    if not whole:
        return None
    draft, verify, sampling, kv = (s / whole for s in (stats.draft_s, stats.eval_s, stats.sample_s, stats.kv_s))
    other = max(1.0 - draft - verify - sampling - kv, 0.0)
    return TimeSplit(draft=draft, verify=verify, sampling=sampling, kv=kv, other=other)


def _row(
    plan: BenchPlan,
    runs: Sequence[BenchRun],
    base: Sequence[BenchRun],
    category: str,
    pair: PairCosts | None,
    sizes: Sizes,
    reference: Sequence[BenchRun],
    others: Sequence[float],
) -> BenchRow:
    """`base`: plain decoding in the same load; `reference`: plain decoding in the first load."""
    arm, condition = plan.arms[runs[0].arm], plan.conditions[runs[0].condition]
    stats = merged(runs)
    steps = [step for run in runs for step in run.steps_s]
    speeds = [speed for run in runs if (speed := run.stats.decode_tok_s)]
    speedup = None if arm.plain else interval(log_ratios(runs, base))
    predicted, bound = expected(arm, stats, pair.profile) if pair else (None, None)
    n_draft = sizes.drafts[arm.draft] if arm.draft is not None else 0
    bytes_s = weight_bytes_s(arm, stats, len(runs), sizes.target, n_draft)
    gpu = [run.gpu_bytes for run in runs if run.gpu_bytes is not None]
    return BenchRow(
        arm=runs[0].arm,
        condition=runs[0].condition,
        category=category,
        n_prompts=len({run.prompt for run in runs}),
        n_runs=len(runs),
        ttft_s=median(run.ttft_s for run in runs),
        latency_s=median(run.latency_s for run in runs),
        prefill_tok_s=_median(run.stats.prompt_tok_s for run in runs),
        decode_tok_s=_median(speeds),
        decode_low_tok_s=float(np.percentile(speeds, 25)) if speeds else None,
        decode_high_tok_s=float(np.percentile(speeds, 75)) if speeds else None,
        tpot_s=_median(run.tpot_s for run in runs),
        step_s=_median(steps),
        step_p95_s=float(np.percentile(steps, 95)) if steps else None,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        acceptance_rate=stats.acceptance_rate,
        alpha=stats.alpha,
        mean_length=stats.mean_acceptance_length,
        from_draft=stats.from_draft,
        per_position=tuple(stats.acceptance_per_position),
        histogram=tuple(stats.accepted_lengths),
        time_split=_time_split(stats, runs),
        rss=max(run.rss for run in runs),
        gpu_bytes=max(gpu) if gpu else None,
        speedup=speedup,
        latency_speedup=None if arm.plain else interval(log_ratios(runs, base, answer_speed)),
        versus_reference=None if runs[0].arm == 0 else interval(log_ratios(runs, reference)),
        gain=_gain(runs),
        predicted=predicted,
        bound=bound,
        bound_share=speedup.value / bound if speedup and bound else None,
        weight_bytes_s=bytes_s,
        bandwidth_share=bytes_s / sizes.memory_bytes_s if bytes_s and sizes.memory_bytes_s else None,
        bands=bands(category, condition.temperature, stats.alpha, others),
    )


def _alphas_above_zero(plan: BenchPlan, runs: Sequence[BenchRun], arm: int, condition: int) -> list[float]:
    """The acceptance of an arm at every temperature above 0, with the lengths of `condition`."""
    here = plan.conditions[condition]
    shape = (here.n_depth, here.n_prompt, here.n_predict)
    found = []
    for i, other in enumerate(plan.conditions):
        if other.temperature > 0.0 and (other.n_depth, other.n_prompt, other.n_predict) == shape:
            found.append(merged(run for run in runs if run.arm == arm and run.condition == i).alpha)
    return [alpha for alpha in found if alpha is not None]


def rows(plan: BenchPlan, runs: Sequence[BenchRun], costs: Sequence[PairCosts], sizes: Sizes) -> tuple[BenchRow, ...]:
    """The table by condition, arm and class; all classes together come first. Rows without runs are left out."""
    by_load = {arm.load: i for i, arm in enumerate(plan.arms) if arm.plain}
    categories = list(dict.fromkeys(prompt.category for prompt in plan.prompts))
    found = []
    for condition in range(len(plan.conditions)):
        here = [run for run in runs if run.condition == condition]
        for index, arm in enumerate(plan.arms):
            priced = [each for each in costs if each.load == arm.load and each.draft == arm.draft]
            pair = next(iter(priced or [each for each in costs if each.load == arm.load]), None)
            for category in (ALL, *categories):
                chosen = [run for run in here if category in (ALL, plan.prompts[run.prompt].category)]
                mine = [run for run in chosen if run.arm == index]
                if mine:
                    base = [run for run in chosen if run.arm == by_load[arm.load]]
                    reference = [run for run in chosen if run.arm == 0]
                    others = _alphas_above_zero(plan, runs, index, condition) if category == ALL else []
                    found.append(_row(plan, mine, base, category, pair, sizes, reference, others))
    return tuple(found)


def picks(plan: BenchPlan, runs: Sequence[BenchRun]) -> tuple[Pick, ...]:
    """The best arm under every condition: picked on one half of the prompts, confirmed on the other."""
    found = []
    for condition in range(len(plan.conditions)):
        here = [run for run in runs if run.condition == condition]
        reference = [run for run in here if run.arm == 0]
        halves: dict[bool, set[int]] = {True: set(), False: set()}
        for run in here:
            halves[plan.prompts[run.prompt].picks].add(run.prompt)
        picking = halves[True] if halves[True] and halves[False] else halves[True] | halves[False]
        speeds = {}
        for index in range(len(plan.arms)):
            ratios = log_ratios([run for run in here if run.arm == index and run.prompt in picking], reference)
            if ratios:
                speeds[index] = ratio_of(ratios)
        if not speeds:
            continue
        best = max(speeds.values())
        equals = [index for index, speed in speeds.items() if speed >= best * (1.0 - TIE)]
        arm = min(equals, key=lambda index: (0 if plan.arms[index].plain else plan.arms[index].length.longest, index))
        rest = [run for run in here if run.arm == arm and run.prompt not in picking]
        found.append(
            Pick(
                condition=condition,
                arm=arm,
                picked=speeds[arm],
                confirmed=interval(log_ratios(rest, reference)),
                n_picking=len(picking),
                n_confirming=len({run.prompt for run in rest}),
            )
        )
    return tuple(found)
