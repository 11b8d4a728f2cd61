"""How a compatibility report is shown: one screen on a terminal, a line a test elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specllama.cli.fetching import shortened
from specllama.cli.output import Output
from specllama.compat import RULE, CompatReport, Mark, Row

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# The word says it; the colour only helps.
_COLOURS = {Mark.PASS: "green", Mark.WARN: "yellow", Mark.FAIL: "red"}
_MARK_WIDTH, _TEST_WIDTH, _GAP = 4, 14, 2


def show_report(output: Output, report: CompatReport) -> None:
    """The tests, what they mean, and the verdict last."""
    if output.out.steerable:
        _draw(output, report)
    else:
        _write(output, report)
    output.line(verdict(report))
    output.detail(RULE)


def verdict(report: CompatReport) -> str:
    """One sentence: does it fit, and what spoils it."""
    if not report.fits:
        return f"It does not fit: {', '.join(row.test for row in report.failures)}."
    if report.warnings:
        return f"It fits, but see: {', '.join(row.test for row in report.warnings)}."
    return "It fits."


def _worth_explaining(report: CompatReport) -> list[Row]:
    """The rows that failed, or else those that warn: where tokens differ, what is built on them says nothing new."""
    if report.fits:
        return list(report.warnings)
    return [*report.failures, *(row for row in report.warnings if row.test == "overlap")]


def _draw(output: Output, report: CompatReport) -> None:
    """A table and, below it, why. Where that is more than a screen, the tests that passed share a line."""
    from rich.console import Group

    console = output.out_console()
    rows, why = list(report.rows), Group(*map(_explanation, _worth_explaining(report)))
    n_lines = len(rows) + len(console.render_lines(why)) + 3  # title, verdict, the shell's prompt
    passed = [row.test for row in rows if row.mark is Mark.PASS] if n_lines > console.height else []
    console.print(_table(report, [row for row in rows if row.test not in passed], console.width))
    if passed:
        console.print(_coloured(Mark.PASS, f"  {', '.join(passed)}"))
    console.print(why)


def _coloured(mark: Mark, text: str) -> Text:
    from rich.text import Text

    return Text(mark.value, style=_COLOURS[mark]).append(text, style="default")


def _table(report: CompatReport, rows: list[Row], width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    side = max((width - _MARK_WIDTH - _TEST_WIDTH - 3 * _GAP) // 2, 10)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    titles = "", "", shortened(f"target {report.target}", side), shortened(f"draft {report.draft}", side)
    for title, n_cells in zip(titles, (_MARK_WIDTH, _TEST_WIDTH, side, side), strict=True):
        table.add_column(Text(title), width=n_cells, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(_coloured(row.mark, ""), Text(row.test), Text(row.target), Text(row.draft))
    return table


def _explanation(row: Row) -> Text:
    """Why, the tokens that differ, and what to do."""
    told = _coloured(row.mark, f"  {row.test}: {row.reason}")
    if row.details:
        told.append(f"\n      {'   '.join(row.details)}")
    if row.remedy:
        told.append("\nhint: ", style="bold cyan").append(row.remedy, style="default")
    return told


def _write(output: Output, report: CompatReport) -> None:
    """The same for pipes: a line a test, the reason, the hint and each differing token on lines of their own."""
    output.line(f"target: {report.target}")
    output.line(f"draft: {report.draft}")
    for row in report.rows:
        output.line("\t".join([row.mark.value, row.test, row.target, row.draft]))
        told = [("reason", row.reason), *(("detail", line) for line in row.details), ("hint", row.remedy)]
        for label, text in told:
            if text:
                output.line("\t".join([label, row.test, text]))
