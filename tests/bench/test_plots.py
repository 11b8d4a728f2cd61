"""The benchmark's plots as files."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import ReportError, UsageError
from specllama.bench import plots as bench_plots
from tests.benchreports import report

pytestmark = pytest.mark.slow

NAMES = ["speedup-by-class", "speedup-over-length", "acceptance-by-position", "costs", "time-split"]


def texts_of(figure: Any) -> str:
    """Everything that is written on a figure."""
    from matplotlib.text import Text

    return "\n".join(each.get_text() for each in figure.findobj(Text))


def test_every_plot_is_written_as_png_and_svg(tmp_path: Path) -> None:
    """Prevents: an empty or half-written picture; a folder that must be made by hand."""
    written = bench_plots.write(report(temperatures=(0.0,)), tmp_path / "new" / "plots")
    assert [path.name for path in written.paths] == [f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")]
    assert written.missing == ()
    for path in written.paths:
        if path.suffix == ".png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        else:
            assert ET.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")
        assert path.stat().st_size > 5000


def test_plots_without_figures_are_named_not_drawn(tmp_path: Path) -> None:
    """Prevents: empty axes that look like a measurement."""
    written = bench_plots.write(report(rows=(), costs=()), tmp_path)
    assert (written.paths, written.missing) == ((), tuple(NAMES))
    assert not list(tmp_path.iterdir()), "not even a trial file"


@pytest.mark.parametrize("name", NAMES)
def test_every_plot_says_what_was_measured_and_in_which_units(name: str) -> None:
    """Prevents: a picture that means nothing once it is pasted elsewhere."""
    figure = bench_plots._PLOTS[name](report(partial="stopped by Ctrl-C", synthetic=0.8))
    text = texts_of(figure)
    assert "large-q4_k_m.gguf + small-q4_0.gguf" in text
    assert "A CPU" in text
    assert "2026-01-02" in text
    assert "PARTIAL" in text
    assert "SYNTHETIC acceptance 0.8: no valid output" in text
    assert figure is not None
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert figure.axes[0].get_ylabel() or name in ("speedup-by-class", "time-split"), "those have names beside each row"


def test_the_line_to_compare_with_is_in_every_plot_of_a_speedup() -> None:
    """Prevents: 0.8 looking as good as 1.2."""
    for name in ("speedup-by-class", "speedup-over-length"):
        figure = bench_plots._PLOTS[name](report(temperatures=(0.0,)))
        assert figure is not None
        (axes,) = figure.axes
        index = 0 if name == "speedup-by-class" else 1
        straight = [line for line in axes.lines if set(map(float, line.get_data()[index])) == {1.0}]
        assert straight, name
        low, high = axes.get_xlim() if index == 0 else axes.get_ylim()
        assert low < 1.0 < high


def test_an_arm_looks_the_same_in_every_panel_and_the_legend_knows_all() -> None:
    """Prevents: the second panel of a stopped run drawn in the colours of other arms than the legend's."""
    made = report()
    rows = tuple(row for row in made.rows if row.condition == 1 or made.plan.arms[row.arm].name != "K=2")
    figure = bench_plots._by_class(replace(made, rows=rows))
    assert figure is not None
    colours: dict[str, set[str]] = {}
    for axes in figure.axes:
        for container in axes.containers:
            colours.setdefault(str(container.get_label()), set()).add(str(container[0].get_color()))
    assert set(colours) == {"K=2", "K=4", "K=8", "K=auto"}
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == len(colours)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"plain decoding", *colours}


def test_names_from_files_cannot_break_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a dollar, a control character or a Japanese class ending the program behind a long measurement."""
    monkeypatch.setattr(bench_plots, "FORMATS", ("svg",))
    made = report(temperatures=(0.0,))
    plan = replace(
        made.plan,
        drafts=("$x^{$\x1b[31m.gguf",),
        arms=tuple(replace(arm, name=f"{arm.name}$_$") for arm in made.plan.arms),
        prompts=tuple(replace(prompt, category=f"{prompt.category}会話") for prompt in made.plan.prompts),
    )
    rows = tuple(row if row.category == "all" else replace(row, category=f"{row.category}会話") for row in made.rows)
    written = bench_plots.write(replace(made, plan=plan, rows=rows), tmp_path)
    assert len(written.paths) == len(NAMES)


def test_a_missing_matplotlib_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents: an ImportError after ten minutes of measuring."""
    monkeypatch.setattr(bench_plots, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib, which is not installed") as caught:
        bench_plots.prepare(tmp_path)
    assert "specllama[plots]" in caught.value.hint


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Prevents: a traceback when DIR is a file."""
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        bench_plots.prepare(place)
    with pytest.raises(ReportError, match="cannot be written"):
        bench_plots.prepare(place / "deeper")
