"""A compatibility report: one screen on a terminal, one line for each test elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import indent

from rich.cells import cell_len

from specllama.cli.screen.output import Output, Stream
from specllama.cli.screen.status import shortened
from specllama.cli.screen.tables import draw_table
from specllama.cli.screen.terminal import size_of
from specllama.cli.screen.visible import Raw, in_one_line, wrapped
from specllama.pairs.report import RULE, CheckRow, CompatReport, RowMark

_COLOURS = {RowMark.PASS: "green", RowMark.WARN: "magenta", RowMark.FAIL: "red"}
_MARK_WIDTH, _TEST_WIDTH, _GAP = 4, 14, 2
_INDENT = " " * 5


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
    """The rows, then the explanations. To fit one screen, the passed tests share a line, then also those that warn.

    Where a value is too long for its column, rows are sentences instead of a table.
    """
    stream, rows = output.out, report.rows
    width, height = size_of(stream)
    side = max((width - _MARK_WIDTH - _TEST_WIDTH - 3 * _GAP) // 2, 10)
    names = in_one_line(f"target {report.target}"), in_one_line(f"draft {report.draft}")
    is_table = all(cell_len(in_one_line(cell)) <= side for row in rows for cell in (row.target, row.draft))
    above = [name for name in names if cell_len(name) > side or not is_table]

    def sentences() -> list[str]:
        told = ((row, f"{row.test}: {row.target}; {row.draft}") for row in rows if row.mark not in folded)
        return [stream.labelled(row.mark.value, _COLOURS[row.mark], text) for row, text in told]

    why = list(_explanations(_worth_explaining(report), stream))
    folded: list[RowMark] = []
    for mark in (RowMark.PASS, RowMark.WARN):
        n_table = 1 + sum(row.mark not in folded for row in rows) if is_table else 0
        lines = [*above, *_folded(rows, folded, stream), *why, "the verdict", "the shell's prompt"]
        lines += [] if is_table else sentences()
        if n_table + sum(line.count("\n") + 1 for line in lines) > height:
            folded.append(mark)
    for name in above:
        output.line(name)
    if not is_table:
        for line in [*sentences(), *_folded(rows, folded, stream), *why]:
            stream.line(line)
        return
    heads = "", "", *(shortened(name, side) for name in names)
    cells = [
        ((row.mark.value, _COLOURS[row.mark]), row.test, row.target, row.draft)
        for row in rows
        if row.mark not in folded
    ]
    draw_table(output, heads, cells, widths=(_MARK_WIDTH, _TEST_WIDTH, side, side))
    for line in [*_folded(rows, folded, stream), *why]:
        stream.line(line)


def _folded(rows: Sequence[CheckRow], marks: Sequence[RowMark], stream: Stream) -> Iterator[Raw]:
    """A line for each of the marks, with the names of its tests."""
    for mark in reversed(marks):
        if names := [row.test for row in rows if row.mark is mark]:
            yield stream.labelled(mark.value, _COLOURS[mark], ", ".join(names))


def _explanations(rows: list[CheckRow], stream: Stream) -> Iterator[str]:
    """Reason, differing tokens and hint of each test. A hint that the next test repeats is shown once, there."""
    for row, after in zip_longest(rows, rows[1:]):
        yield stream.labelled(row.mark.value, _COLOURS[row.mark], f"{row.test}: {row.reason}")
        if row.details:
            yield indent(wrapped("   ".join(row.details), max(size_of(stream)[0] - len(_INDENT), 20)), _INDENT)
        if row.remedy and (after is None or after.remedy != row.remedy):
            yield stream.hint(row.remedy)


def _write(output: Output, report: CompatReport) -> None:
    """For pipes: one line each for a test, its reason, its hint and every differing token."""
    output.line(f"target: {report.target}")
    output.line(f"draft: {report.draft}")
    for row in report.rows:
        output.row(row.mark.value, row.test, row.target, row.draft)
        told = [("reason", row.reason), *(("detail", line) for line in row.details), ("hint", row.remedy)]
        for label, text in told:
            if text:
                output.row(label, row.test, text)
