"""What the benchmark's plots show: the points, the prediction, the names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specllama.bench import charts as bench_charts
from specllama.bench.report import ALL, Load
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


def test_auto_is_shown_alone_where_its_strategy_is_no_other_arm_s() -> None:
    """Prevents: a line from plain decoding to `auto`, as if it were a length."""
    made = report(lengths=(0, 2, None))
    arms = tuple(replace(arm, spec_type="chain") if arm.n_max is None else arm for arm in made.plan.arms)
    cold = bench_charts.over_length(replace(made, plan=replace(made.plan, arms=arms)))[0]
    assert {each.name: [mark.x for mark in each.marks] for each in cold.series} == {
        "draft-simple": [0.0, 2.0],
        "auto: chain": [cold.ticks[-1][0]],
    }


def test_loads_are_told_apart_by_what_differs() -> None:
    """Prevents: two curves of the same name."""
    made = report(lengths=(0, 2))
    loads = (Load(n_threads=2), Load(n_threads=4))
    arms = (*made.plan.arms, *(replace(arm, load=1) for arm in made.plan.arms))
    more = [replace(row, arm=row.arm + 2) for row in made.rows]
    plan = replace(made.plan, arms=arms, loads=loads)
    two = replace(made, plan=plan, rows=(*made.rows, *more), costs=(*made.costs, replace(made.costs[0], load=1)))
    assert [each.name for each in bench_charts.over_length(two)[0].series] == ["draft-simple, t=2", "draft-simple, t=4"]
    assert [each.name for each in bench_charts.costs(two)[0].series] == [
        "checking n rows, T(1) = 50 ms, t=2",
        "draft, n rows, t=2",
        "checking n rows, T(1) = 50 ms, t=4",
        "draft, n rows, t=4",
    ]


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
