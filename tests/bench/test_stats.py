"""From runs to the table: paired ratios, predictions, bands, picks, and the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from specllama.base.errors import ReportError
from specllama.base.jsonable import to_plain
from specllama.bench.report import ALL, Arm, BenchReport
from specllama.bench.stats import bands, expected, interval, log_ratios, picks, weight_bytes_s
from specllama.core.stats import SpecStats, expected_speedup
from tests.bench_cases import COSTS, PLAIN, arm_of, plan_of, prompts_of, report_of, run_of


def test_a_prompt_that_is_slow_for_everybody_does_not_move_the_speedup() -> None:
    """Prevents: speeds averaged before they are compared, so that the mix of prompts decides."""
    plain = [run_of(0, i, speed) for i, speed in enumerate((10.0, 1.0, 40.0))]
    fast = [run_of(1, i, 2 * speed) for i, speed in enumerate((10.0, 1.0, 40.0))]
    found = interval(log_ratios(fast, plain))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (found.n_pairs, found.sure) == (3, True)


def test_runs_are_paired_by_condition_prompt_and_repetition() -> None:
    """Prevents: a run compared with one at another temperature, or on a machine that has become warm."""
    plain = [run_of(0, 0, 10.0), run_of(0, 0, 20.0, repetition=1), run_of(0, 0, 30.0, condition=1)]
    fast = [run_of(1, 0, 30.0, condition=1), run_of(1, 0, 20.0, repetition=1), run_of(1, 1, 5.0)]
    assert log_ratios(fast, plain) == [[0.0], [0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 12])
def test_an_interval_holds_what_it_says_however_few_prompts_there_are(n: int) -> None:
    """Prevents: a 95 % interval of three prompts with a coverage of 82 %, as of a plain bootstrap."""
    draw, n_held = np.random.default_rng(1), 0
    for _ in range(400):
        found = interval([[log_ratio] for log_ratio in draw.normal(0.1, 0.2, n)])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        n_held += math.log(found.low) <= 0.1 <= math.log(found.high)
    assert 0.92 <= n_held / 400 <= 0.98


def test_the_expectation_of_a_fixed_length_is_the_cost_models() -> None:
    """Prevents: the formula with accepted / drafted for alpha, or with T(k) for T(k+1)."""
    stats = SpecStats(n_steps=100, n_spec_steps=100, n_drafted=400, n_accepted=240, n_rejected=60)
    predicted, bound = expected(arm_of(4), stats, COSTS)
    assert predicted == pytest.approx(expected_speedup(0.8, 4, 0.1, 1.4))
    assert bound == pytest.approx(5 / 1.8)
    assert expected(PLAIN, stats, COSTS) == (None, None)


def test_a_lookup_is_expected_to_cost_nothing_but_its_checking() -> None:
    """Prevents: the cost of a draft model charged to a lookup."""
    lookup = Arm(name="lookup", spec_type="lookup", n_max=4)
    stats = SpecStats()
    for _ in range(3):
        stats.record(4, 4, rejected=False)
    stats.record(0, 0, rejected=False)
    predicted, bound = expected(lookup, stats, COSTS)
    assert predicted == pytest.approx(16 / (3 * 1.4 + 1.0))
    assert bound == pytest.approx(predicted)
    for mixed in ("chain", "tree"):
        assert expected(replace(lookup, spec_type=mixed), stats, COSTS) == (None, None)


def test_weights_are_read_once_a_step_by_the_target_and_once_a_token_by_the_draft() -> None:
    """Prevents: a bandwidth above that of the memory, or the first pass counted without its time."""
    stats = SpecStats(n_steps=11, n_drafted=22, decode_s=2.0)
    assert weight_bytes_s(PLAIN, stats, 1, 1000, 0) == 5000.0
    assert weight_bytes_s(arm_of(2), stats, 1, 1000, 100) == (10 * 1000 + 20 * 100) / 2.0
    assert weight_bytes_s(PLAIN, SpecStats(), 1, 1000, 0) is None


@pytest.mark.parametrize(
    ("category", "temperature", "alpha", "others", "found"),
    [
        ("coding", 0.0, 0.9, [], [("code", "inside")]),
        ("poem", 0.7, 0.6, [], [("poem", "above")]),
        ("math", 0.7, 0.6, [], []),
        (ALL, 0.0, 0.9, [0.8, 0.7], [("temperature 0, the highest of all", "inside")]),
        (ALL, 0.0, 0.75, [0.8, 0.7], [("temperature 0, the highest of all", "below")]),
        (ALL, 0.0, 0.75, [], []),
        (ALL, 0.3, 0.75, [], [("temperature 0.1-0.5", "below")]),
        (ALL, 0.6, 0.75, [], []),
        (ALL, 1.0, 0.75, [], [("temperature 0.7-1", "inside"), ("temperature 1-1.5", "above")]),
        (ALL, 2.0, 0.4, [], [("temperature 2", "inside")]),
        (ALL, 2.0, None, [], []),
    ],
)
def test_the_bands_of_the_literature_are_marked(
    category: str, temperature: float, alpha: float | None, others: list[float], found: list[tuple[str, str]]
) -> None:
    """Prevents: the band of another class, or an acceptance outside its band that is not marked."""
    assert [(band.source, band.place) for band in bands(category, temperature, alpha, others)] == found


def test_a_row_says_what_its_runs_measured() -> None:
    """Prevents: a share of the wrong whole, a latency without the prompt, the memory of another arm."""
    plan = plan_of([PLAIN, arm_of(2)], prompts_of(4))
    runs = [run_of(0, i, 10.0) for i in range(4)]
    runs += [run_of(1, i, 20.0, n_drafted=100, n_accepted=60, n_rejected=20) for i in range(4)]
    report = report_of(plan, runs)
    plain, fast = report.rows_of()
    assert (plain.speedup, plain.versus_reference, plain.predicted, plain.bands) == (None, None, None, ())
    assert (plain.decode_tok_s, plain.ttft_s, plain.latency_s) == (10.0, 1.0, 11.0)
    assert (plain.tpot_s, plain.step_s) == pytest.approx((0.1, 0.1))
    assert fast.speedup is not None
    assert fast.latency_speedup is not None
    assert fast.speedup.value == pytest.approx(2.0)
    assert fast.latency_speedup.value == pytest.approx(11.0 / 6.0)  # the prompt takes as long
    assert (fast.alpha, fast.acceptance_rate, fast.n_drafted, fast.rss) == (0.75, 0.6, 400, 1001)
    assert fast.time_split is not None
    shares = fast.time_split
    assert (shares.draft, shares.verify, shares.sampling, shares.kv) == pytest.approx((0.25, 0.5, 0.125, 0.0625))
    assert shares.other == pytest.approx(0.0625)
    assert fast.bound_share is not None
    assert fast.bound is not None
    assert fast.bound_share == pytest.approx(2.0 / fast.bound)
    assert fast.bandwidth_share is not None
    assert {row.category for row in report.rows} == {ALL, "coding"}


def test_classes_have_rows_of_their_own() -> None:
    """Prevents: the mean of all classes in every row."""
    plan = plan_of([PLAIN, arm_of(2)], [*prompts_of(2, "coding"), *prompts_of(2, "poem")])
    runs = [run_of(0, i, 10.0) for i in range(4)] + [run_of(1, i, 20.0 if i < 2 else 5.0) for i in range(4)]
    found = {row.category: row.speedup.value for row in report_of(plan, runs).rows if row.speedup}
    assert found == pytest.approx({ALL: 1.0, "coding": 2.0, "poem": 0.5})


def test_the_best_is_picked_on_one_half_and_confirmed_on_the_other() -> None:
    """Prevents: a lucky winner reported with the figures that it was picked by."""
    plan = plan_of([PLAIN, arm_of(2), arm_of(4)], prompts_of(6))
    speeds = {1: (12.0, 12.0), 2: (15.0, 9.0)}  # on the picking half, and on the other
    runs = [run_of(0, i, 10.0) for i in range(6)]
    runs += [run_of(arm, i, speeds[arm][i % 2]) for arm in speeds for i in range(6)]
    (pick,) = picks(plan, runs)
    assert (pick.arm, pick.picked, pick.n_picking, pick.n_confirming) == (2, pytest.approx(1.5), 3, 3)
    assert pick.confirmed is not None
    assert pick.confirmed.value == pytest.approx(0.9)
    said = report_of(plan, runs).verdict
    assert "nothing is clearly faster than plain decoding: K=4 looked best, but was 0.90 times" in said
    assert "Use" not in said


@pytest.mark.parametrize(("k4", "arm"), [(12.1, 1), (12.2, 2), (11.9, 1)])
def test_of_equals_within_one_percent_the_smaller_k_wins(k4: float, arm: int) -> None:
    """Prevents: a longer draft, and more heat, for a gain within the noise."""
    plan = plan_of([PLAIN, arm_of(2), arm_of(4)], prompts_of(2))
    runs = [run_of(index, i, speed) for index, speed in enumerate((10.0, 12.0, k4)) for i in range(2)]
    assert picks(plan, runs)[0].arm == arm


@pytest.mark.parametrize(
    ("speeds", "words", "advice"),
    [
        ([[10.0] * 4, [8.0] * 4, [7.0] * 4], "plain decoding is fastest: the best draft (K=2) reached 0.80", "none."),
        ([[10.0] * 4, [5.0, 60.0, 5.0, 60.0]], "no draft is clearly faster than plain decoding", ""),
        ([[10.0] * 8, [16.0] * 4 + [12.4, 12.5, 12.6, 12.7]], "K=2 is fastest: 1.4", "--spec-draft-n-max 2."),
        ([[10.0], [16.0]], "no prompts were left to confirm it", ""),
        ([[10.0] * 2, [1.2] * 2], "no draft was faster than plain decoding: K=2 reached 0.12", ""),
        ([[10.0] * 2, [12.0, 1.2]], "nothing is clearly faster than plain decoding: K=2 looked best, but was 0.12", ""),
        ([[10.0] * 2, [12.0, 11.0]], "K=2 may or may not be faster than plain decoding: 1.10", ""),
    ],
    ids=["a loss", "noise", "a gain", "one prompt", "a loss on few", "a refuted gain on few", "a gain on few"],
)
def test_the_verdict_says_what_is_fastest_how_sure_that_is_and_what_to_type(
    speeds: list[list[float]], words: str, advice: str
) -> None:
    """Prevents: a draft recommended where plain decoding wins, or because of noise or a single prompt."""
    plan = plan_of([PLAIN, arm_of(2), arm_of(4)][: len(speeds)], prompts_of(len(speeds[0])), temperatures=(0.0, 0.7))
    runs = [
        run_of(arm, i, speed, condition=condition)
        for condition in (0, 1)
        for arm, each in enumerate(speeds)
        for i, speed in enumerate(each)
    ]
    report = report_of(plan, runs)
    assert len(report.picks) == 2
    assert report.verdict.count(words) == 2
    assert report.verdict.partition(" Use ")[2].endswith(advice)
    assert (" Use " in report.verdict) == bool(advice)


def test_the_verdict_names_the_classes_that_gain_most_and_least() -> None:
    """Prevents: a mean that hides a class without a gain."""
    plan = plan_of([PLAIN, arm_of(4)], [*prompts_of(4, "coding"), *prompts_of(4, "poem")])
    runs = [run_of(0, i, 10.0) for i in range(8)] + [run_of(1, i, 16.0 if i < 4 else 12.0 + 0.1 * i) for i in range(8)]
    assert "most on coding (1.60), least on poem (1.2" in report_of(plan, runs).verdict


def test_synthetic_figures_are_called_no_valid_output() -> None:
    """Prevents: a speedup with unverified tokens read as one of real answers."""
    runs = [run_of(0, 0, 10.0), run_of(1, 0, 16.0)]
    report = report_of(plan_of([PLAIN, arm_of(4)], prompts_of(1)), runs, synthetic=0.8)
    assert report.verdict.startswith("NO VALID OUTPUT: 80 % of the drafted tokens")
    assert "K=4 ran at 1.60 times plain decoding" in report.verdict


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: [], "this is not a specllama.bench report"),
        (
            lambda data: {**data, "schema": {"name": "specllama.run", "version": 1}},
            "this is not a specllama.bench report",
        ),
        (lambda data: {**data, "schema": {"name": "specllama.bench", "version": 99}}, "version 99"),
        (lambda data: {**data, "plan": {**data["plan"], "arms": [{"name": "x", "load": "y"}]}}, "arms[0].load is str"),
    ],
)
def test_a_damaged_report_is_refused_with_the_place(damage: object, words: str) -> None:
    """Prevents: a traceback, or invented figures, for an edited file."""
    report = report_of(plan_of([PLAIN], prompts_of(1)), [run_of(0, 0, 10.0)])
    data = json.loads(json.dumps(to_plain(report)))
    with pytest.raises(ReportError) as raised:
        BenchReport.from_json(damage(data))  # type: ignore[operator]
    assert words in str(raised.value)
    assert raised.value.hint
