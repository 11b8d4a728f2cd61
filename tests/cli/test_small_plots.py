"""The benchmark's plots in the terminal."""

from __future__ import annotations

from specllama.cli.bench.small_plots import small_plots
from specllama.cli.screen.plot import PlotBar, Signs, filled, span, split
from tests.benchreports import report

SIGNS = Signs("o", "|", "-", "+", "#")


def test_a_lying_range_shows_the_line_and_its_middle() -> None:
    """Prevents: a range that begins in the wrong column, or hides what it is compared with."""
    draw = {"bottom": 0.0, "top": 2.0, "n_columns": 9, "signs": SIGNS}
    assert span(PlotBar("", 1.25, 1.5, 2.0), 1.0, **draw) == "    |-o--"
    assert span(PlotBar("", 0.0, 0.5, 1.5), 1.0, **draw) == "--o----  "
    assert span(PlotBar("", 1.0, 1.0, 1.0), 1.0, **draw) == "    o    "
    assert span(PlotBar("", 1.5, 1.5, 9.0), 1.0, **draw) == "    | o--", "beyond the edge is the edge"


def test_bars_are_as_long_as_their_share() -> None:
    """Prevents: something that looks like nothing, or parts that are longer than the whole."""
    assert (filled(0.5, n_columns=8, sign="#"), filled(0.001, n_columns=8, sign="#")) == ("####", "#")
    assert filled(0.0, n_columns=8, sign="#") == ""
    assert split([0.3, 0.6, 0.02, 0.02, 0.06], "dVsk.", n_columns=10) == "dddVVVVVV."
    for n in range(1, 60):
        assert len(split([0.17, 0.33, 0.0, 0.21, 0.29], "dVsk.", n_columns=n)) == n


def test_the_small_plots_show_all_five_in_a_terminal_of_eighty_columns() -> None:
    """Prevents: a plot that is left out, or lines that wrap and tear it."""
    lines = list(small_plots(report(), SIGNS))
    text = "\n".join(lines)
    for heading in ("over longest draft", "by class", "each position", "cost of a pass", "where the time"):
        assert heading in text
    assert "draft-simple, temperature 1" in text
    assert "predicted: " in text
    assert any(line.startswith("coding  ") and "(" in line for line in lines)
    assert max(map(len, lines)) <= 100
    assert text.isascii()


def test_a_report_without_figures_draws_nothing() -> None:
    """Prevents: a traceback at the end of a run that was stopped early."""
    assert list(small_plots(report(rows=(), costs=()), SIGNS)) == []
