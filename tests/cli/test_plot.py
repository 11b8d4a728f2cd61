"""Plots in text."""

from __future__ import annotations

from specllama.cli.screen.plot import PlotBar, Signs, plot

SIGNS = Signs("o", "|", "-", "+", "#")


def test_a_plot_shows_ranges_middles_and_the_line() -> None:
    """Prevents: a value drawn in the wrong row."""
    bars = [PlotBar("0", 1.0, 1.0, 1.0), PlotBar("1", 0.5, 1.5, 2.0), PlotBar("12", 1.5, 1.5, 1.5)]
    assert plot(bars, 1.0, n_rows=4, signs=SIGNS) == [
        " 2.00 +     |",
        " 1.50 +     o   o",
        " 1.00 +-o---|------",
        " 0.50 +     |",
        "        0   1   12",
    ]


def test_the_line_stands_where_it_is_and_everything_fits() -> None:
    """Prevents: break-even drawn at 1.02, and a length that loses two per cent shown as one that does not."""
    for low, high in ((0.17, 1.14), (0.9, 1.01), (0.99, 3.0), (1.2, 1.9), (0.2, 0.7), (0.5, 1.0), (1.0, 1.0)):
        lines = plot([PlotBar("0", 1.0, 1.0, 1.0), PlotBar("1", low, low, high)], 1.0, n_rows=9, signs=SIGNS)
        assert len(lines) == 10
        assert sum(line.startswith(" 1.00 +-o-") for line in lines) == 1
        values = [float(line[:5]) for line in lines[:-1]]
        step = values[0] - values[1]
        assert max(high, 1.0) <= values[0] + step / 2 + 0.01
        assert values[-1] - step / 2 - 0.01 <= min(low, 1.0)


def test_the_line_is_in_sight_whatever_the_values_are() -> None:
    """Prevents: a plot of good news without what to compare it with."""
    for values in ((2.0, 3.0), (0.2, 0.4), (1.0, 1.0)):
        lines = plot([PlotBar("k", values[0], values[0], values[1])], 1.0, n_rows=5, signs=SIGNS)
        assert any("-" in line for line in lines[:-1]) or any(line.startswith(" 1.00 +") for line in lines)
        assert sum("o" in line for line in lines) == 1
