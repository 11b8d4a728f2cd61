"""What the benchmark's plots show: the points, the prediction, the names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specllama import bench_charts
from specllama.bench_types import ALL, Condition, Load
from tests.benchreports import COSTS, report


def test_speedup_by_class_shows_the_fastest_arms_with_their_intervals() -> None:
    """Prevents: nine arms on top of each other; an interval of another class; "all" lost among the classes."""
    made = report(lengths=range(10))
    cold, hot = bench_charts.by_class(made)
    assert [each.name for each in hot.series] == [each.name for each in cold.series], "panels beside each other"
    assert [name for _, name in cold.ticks] == ["coding", "qa", "poem", ALL]
    assert len(cold.series) == bench_charts.MOST_ARMS
    assert [each.name for each in cold.series] == ["K=1", "K=2", "K=3", "K=4", "K=5"], "of nine, the slowest are 6 to 9"
    series = cold.series[0]
    (expected,) = [
        row.speedup for row in made.rows_of("qa") if row.condition == 0 and made.plan.arms[row.arm].name == series.name
    ]
    assert expected is not None
    mark = series.marks[1]
    assert (mark.x, mark.y, mark.low, mark.high) == (1.0, expected.value, expected.low, expected.high)


def test_speedup_over_length_starts_at_plain_decoding_and_carries_the_prediction() -> None:
    """Prevents: a plot without its break-even, or a prediction at another length than the measured one."""
    cold, hot = bench_charts.over_length(report())
    assert [name for _, name in cold.ticks] == ["0", "2", "4", "8", "auto"]
    (series,) = cold.series
    assert [mark.x for mark in series.marks] == [x for x, _ in cold.ticks]
    assert series.marks[0].y == 1.0
    assert [x for x, _ in series.predicted] == [0.0, 2.0, 4.0, 8.0], "auto has no one length to predict for"
    for (x, predicted), mark in zip(series.predicted[1:], series.marks[1:], strict=False):
        assert (x, predicted) == (mark.x, pytest.approx(1.05 * mark.y))
    assert hot.title == "temperature 1"


def test_arms_that_differ_in_more_than_the_length_are_series_of_their_own() -> None:
    """Prevents: a line that jumps between two drafts or rules and means neither."""
    made = report(lengths=(0, 2, 4))
    arms = list(made.plan.arms)
    arms[2] = replace(arms[2], draft=1, verify_rule="token")
    plan = replace(made.plan, arms=tuple(arms), drafts=("small.gguf", "tiny.gguf"))
    cold = bench_charts.over_length(replace(made, plan=plan))[0]
    assert [each.name for each in cold.series] == [
        "draft-simple, small.gguf, block rule",
        "draft-simple, tiny.gguf, token rule",
    ]
    assert [[mark.x for mark in each.marks] for each in cold.series] == [[0.0, 2.0], [0.0, 4.0]]


def test_names_say_what_differs_and_nothing_else() -> None:
    """Prevents: panels that look the same, or headings of ten words where one would do."""
    cold, hot = Condition(temperature=0.0), Condition(temperature=0.7)
    assert bench_charts.condition_names([cold, hot]) == ["temperature 0", "temperature 0.7"]
    deep = replace(cold, n_depth=2048, n_prompt=512)
    assert bench_charts.condition_names([cold, deep]) == [
        "temperature 0, depth 0, prompt as it is",
        "temperature 0, depth 2048, prompt 512",
    ]
    assert bench_charts.load_names([Load()]) == [""]
    two = [Load(n_threads=None), Load(n_threads=8, type_k="q8_0")]
    assert bench_charts.load_names(two) == ["default threads, f16 K", "8 threads, q8_0 K"]


def test_positions_are_counted_from_one_and_costs_end_where_the_target_was_measured() -> None:
    """Prevents: acceptance of the second token shown as that of the first; a draft's costs stretching the axis."""
    cold = bench_charts.by_position(report())[0]
    assert [each.name for each in cold.series] == ["K=8", "K=auto"], "shorter ones say the same"
    longest = cold.series[0]
    assert [mark.x for mark in longest.marks] == [float(i) for i in range(1, 9)]
    assert longest.marks[1].y == pytest.approx(0.7**2)
    (panel,) = bench_charts.costs(report())
    checking, draft = panel.series
    assert [(mark.x, mark.y) for mark in checking.marks] == [(float(n), cost) for n, cost in COSTS.verify]
    assert [mark.x for mark in draft.marks] == [1.0, 2.0]


def test_the_parts_of_a_token_s_time_are_those_of_its_arm() -> None:
    """Prevents: shares of one arm drawn over the speed of another."""
    made = report()
    cold = bench_charts.time_split(made)[0]
    assert [bar.name for bar in cold.bars] == [arm.name for arm in made.plan.arms]
    assert cold.bars[0].token_s == pytest.approx(0.05)
    for bar in cold.bars:
        assert sum(bar.shares) == pytest.approx(1.0)
        assert len(bar.shares) == len(bench_charts.PARTS)


def test_a_report_without_figures_has_no_plots() -> None:
    """Prevents: a run that was stopped early ending in a traceback."""
    nothing = report(rows=(), costs=())
    assert (
        bench_charts.by_class(nothing) == bench_charts.over_length(nothing) == bench_charts.by_position(nothing) == ()
    )
    assert bench_charts.costs(nothing) == bench_charts.time_split(nothing) == ()
