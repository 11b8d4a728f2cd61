"""How a benchmark ends: with an error, at its budget; and the record of its time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from specllama.base.errors import NumericsError
from specllama.base.jsonable import to_plain
from specllama.bench import run as module
from specllama.bench.job import BenchEvent, BenchJob, BenchProgress
from specllama.bench.report import BenchReport, BenchRun
from specllama.bench.stats import interval
from specllama.cli.bench.view import report_lines
from specllama.core.types import Cancel
from tests.bench_cases import PLAIN, Stage, arm_of, asked, lengths, plan_of, prompts_of, report_of, run_of


def ended(
    stage: Stage, job: BenchJob, spoil: Callable[[list[BenchEvent]], None]
) -> tuple[list[BenchEvent], Exception | None]:
    """Everything a benchmark yields while `spoil` looks on, and the error after it."""
    seen: list[BenchEvent] = []
    try:
        for event in module.bench(job, stage.open, Cancel(), clock=lambda: stage.now):
            seen.append(event)
            spoil(seen)
    except Exception as error:
        return seen, error
    return seen, None


def failing_after(stage: Stage, n_runs: int, error: Exception) -> Callable[[list[BenchEvent]], None]:
    """Makes the models fail after `n_runs` counted runs."""

    def fail() -> None:
        raise error

    def spoil(seen: list[BenchEvent]) -> None:
        if sum(isinstance(each, BenchRun) for each in seen) == n_runs:
            stage.on_eval = fail

    return spoil


@pytest.mark.parametrize("error", [NumericsError("NaN among the logits"), OSError(28, "No space left on device")])
def test_an_error_in_the_middle_reports_what_was_measured_and_is_raised_then(error: Exception) -> None:
    """Prevents: minutes of measurements lost to one error."""
    stage = Stage()
    seen, raised = ended(stage, stage.job(asked(6)), failing_after(stage, 7, error))
    assert raised is error
    report = seen[-1]
    assert isinstance(report, BenchReport)
    assert len(report.runs) == 7
    assert report.partial == f"an error ended it ({error})"
    assert report.verdict.startswith(f"This is a part of the plan: an error ended it ({error}).")
    assert report.rows


def test_an_error_before_the_first_run_is_no_report() -> None:
    """Prevents: an empty table above an error."""
    stage, error = Stage(), NumericsError("NaN among the logits")
    seen, raised = ended(stage, stage.job(asked(2)), failing_after(stage, 0, error))
    assert raised is error
    assert not any(isinstance(event, BenchReport) for event in seen)


def test_a_report_says_what_the_time_went_into() -> None:
    """Prevents: a budget that cannot be checked."""
    stage = Stage(eval_s=0.01, load_s=50.0)
    report = stage.events(stage.job(asked(8), budget_s=20.0, lengths=lengths(2)))[-1]
    assert isinstance(report, BenchReport)
    (line,) = (line for line in report_lines(report, full=False) if " spent of a budget of 20 s, " in line)
    assert "without 50 s of loading" in line
    assert f" on {len(report.runs)} runs" in line
    data = to_plain(report)
    assert BenchReport.from_json(data) == report
    del data["spent"]["arms_s"]  # as in reports of older versions
    assert BenchReport.from_json(data).spent is not None


def test_measuring_costs_and_warming_up_say_how_far_they_are() -> None:
    """Prevents: a bar at 0 % for half a minute before the first run."""
    stage = Stage(eval_s=0.4)
    events = stage.events(stage.job(asked(3), budget_s=600.0, n_predict=(8,)))
    for what in (module.COSTS, "warming up: plain", "prompt 1 of 3 (coding), plain"):
        shares = [event.share for event in events if isinstance(event, BenchProgress) and event.what == what]
        assert len(set(shares)) > 3, what
        assert shares == sorted(shares)


def test_the_time_that_is_left_is_no_more_than_the_budget() -> None:
    """Prevents: "37:00 left" of a budget of one minute after a slow first answer."""
    stage = Stage(eval_s=0.05)
    events = stage.events(stage.job(asked(8), budget_s=30.0, temperatures=(0.0, 0.7)))
    left = [event.left_s for event in events if isinstance(event, BenchProgress) and event.left_s is not None]
    assert left
    assert max(left) <= 30.0
    assert min(left) >= 0.0


def test_time_is_left_as_long_as_a_prompt_is_in_hand() -> None:
    """Prevents: "0 s left" for minutes, on a machine that is slower than planned: all arms finish their prompt."""
    stage = Stage(eval_s=0.05)

    def slow() -> None:
        stage.now += 3.0 * (stage.now > 14.3)  # from the first arm of a prompt on

    stage.on_eval = slow
    events = stage.events(stage.job(asked(8), budget_s=20.0))
    begun = [event for before, event in pairwise(events) if isinstance(before, BenchRun)]
    left = [event.left_s for event in begun if isinstance(event, BenchProgress) and event.what.startswith("prompt ")]
    assert all(each is not None and each > 0.0 for each in left)


def test_fewer_than_three_prompts_give_a_ratio_and_no_interval() -> None:
    """Prevents: "1.80 (1.62-1.97)" from one prompt with twenty repetitions."""
    assert interval([]) is None
    for ratios in ([[0.5] * 20], [[0.5, 0.6], [0.4, 0.45]]):
        found = interval(ratios)
        assert found is not None
        assert (found.low, found.high, found.sure) == (None, None, False)
    plan = plan_of([PLAIN, arm_of(4)], prompts_of(2))
    runs = [run_of(arm, i, 10.0 + 9 * arm) for arm in (0, 1) for i in range(2)]
    report = report_of(plan, runs)
    assert "too few prompts for a confidence interval" in report.verdict
    assert "sure:" not in report.verdict
    text = "\n".join(report_lines(report, full=True))
    assert "1.90 (" not in text
    assert "| 1.90 |" in " ".join(text.split())
    assert BenchReport.from_json(to_plain(report)) == report
