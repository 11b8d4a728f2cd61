"""The whole benchmark on fake models: order, caches, seeds, lengths, budget, interruption."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specllama.base.errors import Interrupted, PromptError
from specllama.bench import run as module
from specllama.bench.insight import entropy_of, places
from specllama.bench.job import BenchEvent, BenchProgress
from specllama.bench.report import ALL, BenchPlan, BenchReport, BenchRun, Load
from specllama.bench.synthetic import SyntheticChooser
from specllama.core.sampling import RandomChooser
from specllama.core.types import Cancel
from specllama.prompts.filler import notes
from tests.bench_cases import Stage, asked, lengths


def parts(events: list[BenchEvent]) -> tuple[BenchPlan, list[BenchRun], BenchReport]:
    """The plan, the runs in order, and the report, which must be the last event."""
    report = events[-1]
    assert isinstance(report, BenchReport)
    (plan,) = (event for event in events if isinstance(event, BenchPlan))
    return plan, [event for event in events if isinstance(event, BenchRun)], report


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs take no time: those of fakes mean nothing."""
    monkeypatch.setattr(module, "MOST_COSTS_S", 0.001)


def test_the_plan_comes_before_the_first_run_and_every_run_of_it_is_made_once() -> None:
    """Prevents: a matrix that changes during the benchmark, or one with missing runs."""
    events = Stage().events(Stage().job(asked(4), temperatures=(0.0, 0.7), n_repetitions=2))
    first_run = next(i for i, event in enumerate(events) if isinstance(event, BenchRun))
    assert any(isinstance(event, BenchPlan) for event in events[:first_run])
    plan, runs, report = parts(events)
    cells = Counter((run.arm, run.condition, run.prompt, run.repetition) for run in runs)
    assert set(cells.values()) == {1}
    assert len(cells) == plan.n_runs == 3 * 2 * 4 * 2
    assert report.runs == tuple(runs)
    assert report.partial == ""


def test_arms_take_turns_prompt_by_prompt_and_each_is_first_sometimes() -> None:
    """Prevents: all plain runs on a cool machine and all drafts on a hot one; an arm that always meets a cold cache."""
    _, runs, _ = parts(Stage().events(Stage().job(asked(6), n_repetitions=1)))
    blocks = [runs[i : i + 3] for i in range(0, len(runs), 3)]
    assert all({run.arm for run in block} == {0, 1, 2} for block in blocks)
    assert [block[0].prompt for block in blocks] == list(range(6))
    assert {block[0].arm for block in blocks} == {0, 1, 2}


def test_every_load_is_opened_warmed_and_has_its_own_baseline() -> None:
    """Prevents: an arm compared with plain decoding at another thread count."""
    stage = Stage()
    job = stage.job(asked(2), loads=(Load(n_threads=1), Load(n_threads=2)), lengths=lengths(2), n_repetitions=2)
    plan, runs, report = parts(stage.events(job))
    assert stage.opened == [1, 0, 1, 0]  # each once before the runs, then back and forth
    assert len(runs) == plan.n_runs
    by_name = {plan.arms[row.arm].name: row for row in report.rows_of()}
    assert by_name["K=2 t=2"].speedup is not None
    assert by_name["plain t=2"].speedup is None
    assert by_name["plain t=2"].versus_reference is not None
    assert {(each.load, each.draft) for each in report.costs} == {(0, 0), (1, 0)}


def test_rows_of_drafts_have_the_gain_that_run_shows_and_reports_no_passes() -> None:
    """Prevents: a live figure that the benchmark cannot be compared with; megabytes of passes in a report."""
    stage = Stage()
    _, runs, report = parts(stage.events(stage.job(asked(2), n_predict=(48,), lengths=lengths(0, 2))))
    for row in report.rows:
        plain = report.plan.arms[row.arm].plain
        mine = [run for run in runs if (run.arm, run.condition) == (row.arm, row.condition)]
        assert all((run.gain is None) == plain and run.stats.passes == [] for run in mine)
        assert (row.gain is None) == plain
        assert row.gain is None or row.gain.low <= row.gain.value <= row.gain.high


def test_both_caches_are_empty_before_a_run() -> None:
    """Prevents: a prompt cached for every arm but the first."""
    _, runs, _ = parts(Stage().events(Stage().job(asked(3), n_repetitions=2)))
    assert {run.stats.n_cached for run in runs} == {0}


def test_a_depth_is_in_the_caches_before_the_clock_runs() -> None:
    """Prevents: the time to fill the context counted as prefill of the prompt."""
    stage = Stage(n_ctx=1024)
    _, runs, _ = parts(stage.events(stage.job(asked(2), depths=(0, 200))))
    cached = {run.condition: run.stats.n_cached for run in runs}
    assert cached[0] == 0
    assert 200 <= cached[1] <= 200 + module.NOTE_TOKENS
    assert all(run.stats.n_prompt > cached[run.condition] for run in runs)


def test_a_prompt_is_lengthened_to_what_was_asked_for() -> None:
    stage = Stage(n_ctx=1024)
    _, runs, _ = parts(stage.events(stage.job(asked(2), n_prompt=(0, 300))))
    assert all((run.stats.n_prompt >= 300) == (run.condition == 1) for run in runs)
    assert {run.stats.n_cached for run in runs} == {0}


def test_with_a_fixed_length_every_answer_has_it_and_without_some_end_earlier() -> None:
    """Prevents: speeds of answers of different lengths compared as equals."""
    _, fixed, report = parts(Stage().events(Stage().job(asked(6), temperatures=(1.0,))))
    assert {run.stats.n_emitted for run in fixed} == {8}
    assert {run.reason for run in fixed} == {"length"}
    assert report.plan.fixed_length
    _, natural, _ = parts(Stage().events(Stage().job(asked(6), temperatures=(1.0,), fixed_length=False)))
    assert "stop" in {run.reason for run in natural}


def test_drafts_of_the_same_model_are_all_accepted_at_temperature_0() -> None:
    """Prevents: a figure of another arm in a row, or a draft that reads a stale cache."""
    _, _, report = parts(Stage().events(Stage().job(asked(4))))
    drafted = [row for row in report.rows_of(ALL) if row.n_drafted]
    assert [report.plan.arms[row.arm].name for row in drafted] == ["K=2", "K=3"]
    assert {row.alpha for row in drafted} == {1.0}
    assert all(row.per_position[0] == 1.0 for row in drafted)


def test_the_same_job_gives_the_same_answers() -> None:
    """Prevents: randomness that does not come from the seed."""
    first, second = (parts(Stage().events(Stage().job(asked(3), temperatures=(1.0,), seed=7)))[1] for _ in range(2))
    counts = [
        [(run.stats.n_drafted, run.stats.n_accepted, run.stats.accepted_at) for run in runs] for runs in (first, second)
    ]
    assert counts[0] == counts[1]


def test_several_drafts_are_compared_side_by_side() -> None:
    """Prevents: every draft measured with the first draft model."""
    stage = Stage(n_drafts=2)
    _, _, report = parts(stage.events(stage.job(asked(4), lengths=lengths(3))))
    alphas = {report.plan.arms[row.arm].name: row.alpha for row in report.rows_of(ALL) if row.n_drafted}
    assert alphas["K=3 draft0"] == 1.0
    assert alphas["K=3 draft1"] is not None
    assert alphas["K=3 draft1"] < 0.9
    assert {found.draft for found in report.insights} == {0, 1}


def test_a_pause_comes_before_every_counted_run() -> None:
    """Prevents: a fanless laptop that does not cool down."""
    pauses: list[float] = []
    _, runs, _ = parts(Stage().events(Stage().job(asked(2), delay_s=1.5), sleep=pauses.append))
    assert pauses == [1.5] * len(runs)


@pytest.mark.slow
def test_synthetic_acceptance_accepts_at_its_rate_and_judges_nothing() -> None:
    """Prevents: the quality of the draft in the cost of the loop, or plain runs that are changed."""
    stage = Stage(n_drafts=2)
    job = stage.job(
        asked(8), lengths=lengths(3), rules=("token",), n_predict=(40,), synthetic=0.75, temperatures=(1.0,)
    )
    _, runs, report = parts(stage.events(job))
    alphas = [row.alpha for row in report.rows_of(ALL) if row.n_drafted]
    assert alphas == pytest.approx([0.75, 0.75], abs=0.12)  # however different the drafts are
    assert report.synthetic == 0.75
    assert report.verdict.startswith("NO VALID OUTPUT")
    assert report.insights == ()
    assert all(run.stats.n_emitted == 40 for run in runs)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_synthetic_coin_ignores_what_it_is_asked(rate: float) -> None:
    """Prevents: tokens with probability 1 that are always accepted."""
    coin = SyntheticChooser(RandomChooser(1), rate, 1)
    heads = [coin.flip(prob) for prob in (0.0, 1.0) for _ in range(500)]
    assert sum(heads) / 1000 == pytest.approx(rate, abs=0.05)


def test_a_spent_budget_leaves_all_arms_with_the_same_prompts() -> None:
    """Prevents: a machine slower than expected gives the last arms fewer prompts, or exceeds the budget by hours."""
    stage = Stage(eval_s=0.01)
    job = stage.job(asked(8), budget_s=6.0, lengths=lengths(2), temperatures=(0.0, 0.7))
    plan, runs, report = parts(stage.events(job))
    prompts = [
        {run.prompt for run in runs if (run.arm, run.condition) == cell} for cell in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert 2 <= len(prompts[0]) < 8 or plan.n_repetitions > 1
    assert report.partial == f"the budget was used up after {len(runs)} of {plan.n_runs} runs"
    assert report.verdict.startswith("This is a part of the plan: the budget was used up")
    assert stage.now < 8.0


def test_several_loads_have_the_same_prompts_where_the_budget_ends() -> None:
    """Prevents: a last load that is never measured."""
    stage = Stage(eval_s=0.01)
    job = stage.job(
        asked(8), budget_s=2.0, lengths=lengths(2), loads=(Load(n_threads=1), Load(n_threads=2)), n_repetitions=1
    )
    _, runs, report = parts(stage.events(job))
    prompts = [{run.prompt for run in runs if run.arm == arm} for arm in range(4)]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert report.partial


def test_an_interrupted_benchmark_reports_what_was_measured() -> None:
    """Prevents: ten minutes lost to Ctrl-C, or an incomplete run among the others."""
    stage, cancel, seen = Stage(), Cancel(), []
    for event in module.bench(stage.job(asked(6)), stage.open, cancel):
        seen.append(event)
        if sum(isinstance(each, BenchRun) for each in seen) == 7:
            cancel.set()
    _, runs, report = parts(seen)
    assert len(runs) == len(report.runs) == 7
    assert report.partial == "it was interrupted"
    assert report.verdict.startswith("This is a part of the plan: it was interrupted.")
    assert {run.stats.n_emitted for run in report.runs} == {8}


def test_an_interruption_before_the_first_run_is_no_report() -> None:
    stage, cancel = Stage(), Cancel()
    stage.on_eval = cancel.set
    with pytest.raises(Interrupted):
        stage.events(stage.job(asked(2)), cancel)


def test_progress_says_what_is_done_and_how_long_it_will_take() -> None:
    """Prevents: a progress bar that does not move."""
    stage = Stage(eval_s=0.01)
    progress = [event for event in stage.events(stage.job(asked(4))) if isinstance(event, BenchProgress)]
    counted = [event for event in progress if event.what.startswith("prompt ")]
    assert counted[0].what.startswith("prompt 1 of 4 (coding), ")
    assert [event.share for event in counted] == sorted(event.share for event in counted)
    assert counted[-1].left_s is not None
    assert 0.0 < counted[-1].left_s < 1.0


def test_prompts_that_do_not_fit_the_context_are_left_out() -> None:
    """Prevents: an error in the middle because of one long prompt in a file."""
    long = replace(asked(1)[0], id="long", turns=("x" * 4000,))
    plan, _, _ = parts(Stage().events(Stage().job((*asked(2), long))))
    assert {prompt.id for prompt in plan.prompts} == {"q0", "q1"}
    with pytest.raises(PromptError, match="no prompt and its answer fit"):
        Stage().events(Stage().job((long,)))


def test_a_draft_with_a_short_context_is_measured_as_far_as_it_goes_and_the_report_says_so() -> None:
    """Prevents: an error after ten minutes because one prompt does not fit the draft's context."""
    stage = Stage(n_ctx_draft=32)
    long = replace(asked(1)[0], id="long", turns=("question " * 20,))
    plan, runs, report = parts(stage.events(stage.job((*asked(2), long))))
    assert len(runs) == plan.n_runs
    assert any("the draft's context of 32 tokens is full" in warning for warning in report.warnings)
    (found,) = report.insights
    assert sum(bucket.n_tokens for bucket in found.by_place) == 2 * 8


def test_lookups_alone_need_no_draft_model() -> None:
    """Prevents: a division by the costs of a missing draft."""
    stage = Stage(n_drafts=0)
    _, _, report = parts(stage.events(stage.job(asked(2), strategies=("lookup",), drafts=())))
    assert [arm.name for arm in report.plan.arms] == ["plain", "K=2 lookup", "K=3 lookup"]
    assert [each.draft for each in report.costs] == [None]


def test_entropy_is_that_of_the_softmax() -> None:
    """Prevents: bits for nats, or NaN where a token is forbidden."""
    assert entropy_of(np.zeros(8, np.float32)) == pytest.approx(math.log(8))
    assert entropy_of(np.array([0.0, -np.inf, 0.0], np.float32)) == pytest.approx(math.log(2))
    assert entropy_of(np.array([1000.0, 0.0], np.float32)) == pytest.approx(0.0, abs=1e-9)


def test_places_are_counted_from_the_beginning_of_each_sentence() -> None:
    """Prevents: Japanese sentences that never end, or places counted from the start of the answer."""
    pieces = [b"One", b" two", b".", b" Three", b"\n", "四".encode(), "。".encode(), b"five"]
    assert places(range(len(pieces)), pieces.__getitem__) == [0, 1, 2, 0, 1, 0, 1, 0]


def test_a_twin_is_right_everywhere_and_its_tokens_are_all_counted() -> None:
    """Prevents: rows off by one: the draft's distribution compared with that of the next token."""
    stage = Stage()
    _, _, report = parts(stage.events(stage.job(asked(4), temperatures=(0.0, 0.7))))
    assert [found.temperature for found in report.insights] == [0.0, 0.7]
    for found in report.insights:
        for buckets in (found.by_entropy, found.by_place):
            assert sum(bucket.n_tokens for bucket in buckets) == 4 * 8
            assert all(bucket.acceptance == pytest.approx(1.0) for bucket in buckets if bucket.n_tokens)


def test_notes_are_as_long_as_asked_and_never_the_same_twice() -> None:
    """Prevents: a context filled with one repeated sentence, which every lookup predicts."""
    text = notes(3000, lambda text: len(text) // 4)
    lines = [line for line in text.splitlines() if line.startswith("Note ")]
    assert 3000 <= len(text) // 4 <= 3200
    assert len(set(lines)) == len(lines)
    assert notes(0, len) == ""
