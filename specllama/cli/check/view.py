"""A compatibility report: one screen on a terminal, one line for each test elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specllama.cli.screen.fetching import shortened
from specllama.cli.screen.output import Output
from specllama.cli.screen.tables import draw_table
from specllama.pairs.report import RULE, CheckRow, CompatReport, RowMark

if TYPE_CHECKING:
    from rich.text import Text

_COLOURS = {RowMark.PASS: "green", RowMark.WARN: "yellow", RowMark.FAIL: "red"}
_MARK_WIDTH, _TEST_WIDTH, _GAP = 4, 14, 2


def show_report(output: Output, report: CompatReport) -> None:
    """The tests, the explanations, and the verdict last."""
    if output.out.steerable:
        _draw(output, report)
    else:
        _write(output, report)
    tests = ", ".join(row.test for row in (report.warnings if report.fits else report.failures))
    verdict = "It does not fit: " if not report.fits else "It fits, but see: " if tests else "It fits"
    output.line(f"{verdict}{tests}.")
    output.detail(RULE)


def _worth_explaining(report: CompatReport) -> list[CheckRow]:
    """The rows that failed, or else those that warn: if tokens differ, tests that depend on them add nothing."""
    if report.fits:
        return list(report.warnings)
    return [*report.failures, *(row for row in report.warnings if row.test == "overlap")]


def _draw(output: Output, report: CompatReport) -> None:
    """A table, then the explanations. To fit one screen, the passed tests share a line, then also those that warn."""
    from rich.console import Group

    console = output.out_console()
    rows, why = list(report.rows), Group(*_explanations(_worth_explaining(report)))
    n_why = len(console.render_lines(why)) + 2  # and the verdict, and the shell's prompt
    folded: list[RowMark] = []
    for mark in (RowMark.PASS, RowMark.WARN):
        if _n_table_lines(rows, folded, console.width) + n_why > console.height:
            folded.append(mark)
    side = max((console.width - _MARK_WIDTH - _TEST_WIDTH - 3 * _GAP) // 2, 10)
    heads = "", "", shortened(f"target {report.target}", side), shortened(f"draft {report.draft}", side)
    cells = [
        ((row.mark.value, _COLOURS[row.mark]), row.test, row.target, row.draft)
        for row in rows
        if row.mark not in folded
    ]
    draw_table(output, heads, cells, widths=(_MARK_WIDTH, _TEST_WIDTH, side, side))
    for mark in reversed(folded):
        if line := _folded(rows, mark):
            console.print(line)
    console.print(why)


def _folded(rows: list[CheckRow], mark: RowMark) -> Text | None:
    names = [row.test for row in rows if row.mark is mark]
    return _coloured(mark, f"  {', '.join(names)}") if names else None


def _n_table_lines(rows: list[CheckRow], folded: list[RowMark], width: int) -> int:
    lines = [_folded(rows, mark) for mark in folded]
    return 1 + sum(row.mark not in folded for row in rows) + sum(len(line) // width + 1 for line in lines if line)


def _coloured(mark: RowMark, text: str) -> Text:
    from rich.text import Text

    return Text(mark.value, style=_COLOURS[mark]).append(text, style="default")


def _explanations(rows: list[CheckRow]) -> Iterator[Text]:
    """Reason, differing tokens and hint of each test. A hint that the next test repeats is shown once, there."""
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        told = _coloured(row.mark, f"  {row.test}: {row.reason}")
        if row.details:
            told.append(f"\n      {'   '.join(row.details)}")
        if row.remedy and (after is None or after.remedy != row.remedy):
            told.append("\nhint: ", style="bold cyan").append(row.remedy, style="default")
        yield told


def _write(output: Output, report: CompatReport) -> None:
    """For pipes: one line each for a test, its reason, its hint and every differing token."""
    output.line(f"target: {report.target}")
    output.line(f"draft: {report.draft}")
    for row in report.rows:
        output.line("\t".join([row.mark.value, row.test, row.target, row.draft]))
        told = [("reason", row.reason), *(("detail", line) for line in row.details), ("hint", row.remedy)]
        for label, text in told:
            if text:
                output.line("\t".join([label, row.test, text]))
