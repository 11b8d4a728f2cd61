"""Tables: in Markdown for reports and files, drawn by Rich on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TypeAlias

from specllama.cli.screen.output import Output, in_one_line

Cell: TypeAlias = "str | tuple[str, str]"  # text, or text and its style


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, n_left: int = 1) -> list[str]:
    """The lines of an aligned table; all but the first `n_left` columns are set to the right."""
    cells = [[in_one_line(cell).replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(heads))]  # Markdown needs at least 3
    rule = ["-" * width if i < n_left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        padded = [
            cell.ljust(width) if i < n_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return lines


def draw_table(
    output: Output,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    figures: Collection[str] = (),
    styles: Sequence[str | None] = (),
    widths: Sequence[int] = (),
) -> None:
    """Print a table on stdout, with control characters spelled out.

    `figures`: heads of the columns set to the right. `styles`: of the rows. `widths`: of the columns; longer cells are
    cut. Without a width, cells are wrapped.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(heads))
    for head, width in zip_longest(heads, widths):
        table.add_column(
            Text(in_one_line(head)),
            justify="right" if head in figures else "left",
            overflow="fold" if width is None else "ellipsis",
            no_wrap=width is not None,
            width=width,
        )
    for row, style in zip_longest(rows, styles):
        pairs = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        table.add_row(*(Text(in_one_line(text), cell_style) for text, cell_style in pairs), style=style)
    output.out_console().print(table)
