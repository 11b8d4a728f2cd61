"""`specllama doctor`: is the installed llama.cpp sound and fast here, and is everything else in its place?"""

from __future__ import annotations

from typing import Annotated

import typer

from specllama.checkup import Checkup, Level, look
from specllama.cli.grouping import option
from specllama.cli.options import Color
from specllama.cli.output import Output, open_output

# Sign, word and colour say the same thing; each is enough by itself.
_SIGNS = {Level.OK: ("✓", "+"), Level.NOTE: ("·", "-"), Level.ATTENTION: ("!", "!")}
_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.ATTENTION: "yellow"}


def doctor(
    json: Annotated[bool, option("--json", "One JSON object: the findings and the facts behind them.")] = False,
    color: Color = "auto",
) -> None:
    """Check the installed llama.cpp build and this machine; exit code 1 if anything needs attention."""
    output = open_output(color=color, format="json" if json else "human")
    checkup = look()
    if json:
        output.data(checkup.to_json())
    elif output.out.steerable:
        _draw(output, checkup)
    else:
        _write(output, checkup)
    if checkup.needs_attention:
        raise typer.Exit(1)


def _draw(output: Output, checkup: Checkup) -> None:
    """A table, hints below what they are about."""
    from rich.table import Table
    from rich.text import Text

    signs = 0 if output.out.encodes("✓·") else 1
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in checkup.findings:
        found = Text(finding.found)
        if finding.hint:
            found.append("\nhint: ", style="bold cyan").append(finding.hint, style="default")
        level = f"{_SIGNS[finding.level][signs]} {finding.level.value}"
        table.add_row(Text(level, style=_COLOURS[finding.level]), Text(finding.name, style="bold"), found)
    output.out_console().print(table)
    output.line()
    output.line(_conclusion(checkup))


def _write(output: Output, checkup: Checkup) -> None:
    """The same as plain lines, one a finding and one a hint, for pipes."""
    for finding in checkup.findings:
        output.line(f"{finding.level.value:<9} {finding.name}: {finding.found}")
        if finding.hint:
            output.line(f"{'hint':<9} {finding.name}: {finding.hint}")
    output.line(_conclusion(checkup))


def _conclusion(checkup: Checkup) -> str:
    names = [finding.name for finding in checkup.findings if finding.level is Level.ATTENTION]
    return f"Needs attention: {', '.join(names)}." if names else "All is well."
