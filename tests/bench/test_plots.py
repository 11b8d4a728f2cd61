"""The points of the benchmark's plots, and the files that are written."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import ReportError, UsageError
from specllama.bench import plots
from specllama.bench.report import ALL, Load
from tests.benchreports import COSTS, report
from tests.homes import file_size_limit


def test_speedup_by_class_shows_the_fastest_arms_with_their_intervals() -> None:
    """Prevents: nine arms on top of each other; an interval of another class; "all" between the classes."""
    made = report(lengths=range(10))
    cold, hot = (plots.by_class(made, condition) for condition in (0, 1))
    assert [each.name for each in hot.series] == [each.name for each in cold.series], "panels beside each other"
    assert [name for _, name in cold.ticks] == ["coding", "qa", "poem", ALL]
    assert len(cold.series) == plots.MOST_ARMS
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
    cold = plots.over_length(report(), 0)
    assert [name for _, name in cold.ticks] == ["0", "2", "4", "8", "auto"]
    series, auto = cold.series
    assert [mark.x for each in (series, auto) for mark in each.marks] == [x for x, _ in cold.ticks]
    assert series.marks[0].y == 1.0
    assert (auto.name, auto.predicted) == ("auto: draft-simple", ()), "it has no one length to predict for"
    assert [x for x, _ in series.predicted] == [0.0, 2.0, 4.0, 8.0]
    for (x, predicted), mark in zip(series.predicted[1:], series.marks[1:], strict=False):
        assert (x, predicted) == (mark.x, pytest.approx(1.05 * mark.y))


def test_arms_that_differ_in_more_than_the_length_are_series_of_their_own() -> None:
    """Prevents: one line for two drafts or rules."""
    made = report(lengths=(0, 2, 4))
    arms = list(made.plan.arms)
    arms[2] = replace(arms[2], draft=1, verify_rule="token")
    plan = replace(made.plan, arms=tuple(arms), drafts=("small.gguf", "tiny.gguf"))
    cold = plots.over_length(replace(made, plan=plan), 0)
    assert [each.name for each in cold.series] == [
        "draft-simple, small.gguf, block rule",
        "draft-simple, tiny.gguf, token rule",
    ]
    assert [[mark.x for mark in each.marks] for each in cold.series] == [[0.0, 2.0], [0.0, 4.0]]


def test_loads_are_named_by_what_differs() -> None:
    """Prevents: two curves with one name."""
    made = report(lengths=(0, 2))
    loads = (Load(n_threads=2), Load(n_threads=4))
    arms = (*made.plan.arms, *(replace(arm, load=1) for arm in made.plan.arms))
    more = [replace(row, arm=row.arm + 2) for row in made.rows]
    plan = replace(made.plan, arms=arms, loads=loads)
    two = replace(made, plan=plan, rows=(*made.rows, *more), costs=(*made.costs, replace(made.costs[0], load=1)))
    assert [each.name for each in plots.over_length(two, 0).series] == ["draft-simple, t=2", "draft-simple, t=4"]
    assert [each.name for each in plots.costs(two, 0).series] == [
        "target, n rows, T(1) = 50 ms, t=2",
        "draft, n rows, t=2",
        "target, n rows, T(1) = 50 ms, t=4",
        "draft, n rows, t=4",
        "n passes over one row",
    ]


def test_positions_are_counted_from_one_and_costs_end_where_the_target_was_measured() -> None:
    """Prevents: acceptance of the second token shown as that of the first; a draft's costs stretching the axis."""
    cold = plots.by_position(report(), 0)
    assert [each.name for each in cold.series] == ["K=8", "K=auto"], "shorter ones say the same"
    longest = cold.series[0]
    assert [mark.x for mark in longest.marks] == [float(i) for i in range(1, 9)]
    assert longest.marks[1].y == pytest.approx(0.7**2)
    checking, draft, _ = plots.costs(report(), 0).series
    assert [(mark.x, mark.y) for mark in checking.marks] == [(float(n), cost) for n, cost in COSTS.verify]
    assert [mark.x for mark in draft.marks] == [1.0, 2.0]


def test_the_parts_of_a_token_s_time_are_those_of_its_arm() -> None:
    """Prevents: shares of one arm drawn over the speed of another."""
    made = report()
    cold = plots.time_split(made, 0)
    assert [name for _, name in cold.ticks] == [arm.name for arm in made.plan.arms]
    assert [each.name for each in cold.series] == list(plots.PARTS)
    for i, row in enumerate(row for row in made.rows_of(ALL) if row.condition == 0):
        parts = [each.marks[i].y for each in cold.series]
        assert sum(parts) == pytest.approx(1000 / (row.decode_tok_s or 0.0))
        assert parts[0] == pytest.approx(row.time_split.draft * sum(parts) if row.time_split else -1)


def texts_of(figure: Any) -> str:
    """All text on a figure."""
    from matplotlib.text import Text

    return "\n".join(each.get_text() for each in figure.findobj(Text))


@pytest.mark.slow
def test_every_plot_is_written_as_png_and_svg(tmp_path: Path) -> None:
    """Prevents: an empty or incomplete picture; a folder that must be created by hand."""
    written = plots.write(report(temperatures=(0.0,)), tmp_path / "new" / "plots")
    assert [path.name for path in written.paths] == [
        f"{name}.{kind}" for name in plots.PLOTS for kind in ("png", "svg")
    ]
    assert written.missing == ()
    for path in written.paths:
        if path.suffix == ".png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        else:
            assert ET.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")
        assert path.stat().st_size > 5000


@pytest.mark.slow
def test_plots_without_figures_are_named_not_drawn(tmp_path: Path) -> None:
    """Prevents: empty axes that look like a measurement."""
    written = plots.write(report(rows=(), costs=()), tmp_path)
    assert (written.paths, written.missing) == ((), tuple(plots.PLOTS))
    assert not list(tmp_path.iterdir()), "not even a trial file"


@pytest.mark.slow
def test_a_full_disk_keeps_the_picture_that_was_there(tmp_path: Path) -> None:
    """Prevents: an empty PNG in place of a good one."""
    made = report(temperatures=(0.0,), rows=())
    (png, svg) = plots.write(made, tmp_path).paths
    before = png.read_bytes()

    with file_size_limit(100), pytest.raises(ReportError, match="cannot be written") as caught:
        plots.write(made, tmp_path)
    assert "space" in caught.value.hint
    assert png.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [png, svg]


@pytest.mark.slow
@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_says_what_was_measured_and_in_which_units(name: str) -> None:
    """Prevents: a picture that cannot be understood without its report."""
    figure = plots.draw(report(partial="stopped by Ctrl-C", synthetic=0.8), name)
    assert figure is not None
    text = texts_of(figure)
    assert "large-q4_k_m.gguf + small-q4_0.gguf" in text
    assert "A CPU" in text
    assert "2026-01-02" in text
    assert "PARTIAL" in text
    assert "SYNTHETIC acceptance 0.8: no valid output" in text
    assert ("temperature 0" in text) is (name != "costs")
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


@pytest.mark.slow
def test_the_line_to_compare_with_is_in_every_plot_of_a_speedup() -> None:
    """Prevents: 0.8 looking as good as 1.2."""
    for name in ("speedup-by-class", "speedup-over-length"):
        figure = plots.draw(report(temperatures=(0.0,)), name)
        assert figure is not None
        (axes,) = figure.axes
        assert [line for line in axes.lines if set(map(float, line.get_data()[1])) == {1.0}], name
        low, high = axes.get_ylim()
        assert low < 1.0 < high


@pytest.mark.slow
def test_an_arm_looks_the_same_in_every_panel_and_is_in_its_legend() -> None:
    """Prevents: panels of a partial report with other colours than the legend."""
    made = report()
    rows = tuple(row for row in made.rows if row.condition == 1 or made.plan.arms[row.arm].name != "K=2")
    figure = plots.draw(replace(made, rows=rows), "speedup-by-class")
    assert figure is not None
    colours: dict[str, set[str]] = {}
    for axes in figure.axes:
        for container in axes.containers:
            colours.setdefault(str(container.get_label()), set()).add(str(container[0].get_color()))
        shown = {str(container.get_label()) for container in axes.containers}
        assert {text.get_text() for text in axes.get_legend().get_texts()} == {"plain decoding", *shown}
    assert set(colours) == {"K=2", "K=4", "K=8", "K=auto"}
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


@pytest.mark.slow
def test_names_from_files_cannot_break_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an error after a long measurement because of a dollar, a control character or Japanese text."""
    monkeypatch.setattr(plots, "FORMATS", ("svg",))
    made = report(temperatures=(0.0,))
    plan = replace(
        made.plan,
        drafts=("$x^{$\x1b[31m.gguf",),
        arms=tuple(replace(arm, name=f"{arm.name}$_$") for arm in made.plan.arms),
        prompts=tuple(replace(prompt, category=f"{prompt.category}会話") for prompt in made.plan.prompts),
    )
    rows = tuple(row if row.category == "all" else replace(row, category=f"{row.category}会話") for row in made.rows)
    written = plots.write(replace(made, plan=plan, rows=rows), tmp_path)
    assert len(written.paths) == len(plots.PLOTS)


def test_a_missing_matplotlib_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents: an ImportError after ten minutes of measuring."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib is not installed") as caught:
        plots.prepare(tmp_path)
    assert "specllama[plots]" in caught.value.hint


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Prevents: a traceback when DIR is a file."""
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        plots.prepare(place)
    with pytest.raises(ReportError, match="cannot be written"):
        plots.prepare(place / "deeper")


def test_chinese_and_japanese_names_get_a_font_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: boxes in place of a file's name where the system has a font for it."""
    import matplotlib as mpl
    from matplotlib import font_manager

    seen: list[list[str]] = []
    monkeypatch.setattr(font_manager, "get_font_names", lambda: ["Arial", "Meiryo"])
    monkeypatch.setattr(plots, "draw", lambda *_args: seen.append(mpl.rcParams["font.sans-serif"]))
    plots.write(report(temperatures=(0.0,)), tmp_path)
    assert seen[0] == ["DejaVu Sans", "Meiryo"]
