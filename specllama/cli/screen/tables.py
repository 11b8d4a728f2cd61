"""Tables: in Markdown for reports and files, drawn by Rich on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from textwrap import indent
from typing import TypeAlias

from rich.cells import cell_len

from specllama.cli.screen.output import Output, console_of
from specllama.cli.screen.visible import in_one_line, wrapped

_INDENT = "  "
_GAP = 2  # columns between two columns of a table
_LEAST_PROSE = 32  # columns

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


def fitted_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int | None, *, n_left: int = 1
) -> tuple[list[str], list[str]]:
    """The heads and lines of a Markdown table; columns of `spare` are removed, the first ones first, until it fits.

    `width`: None = no limit.
    """
    table = [list(row) for row in (heads, *rows)]
    for name in (*spare, None):
        lines = markdown_table(table[0], table[1:], n_left=n_left)
        if width is None or len(lines[0]) <= width or name is None:
            break
        i = table[0].index(name)
        for row in table:
            del row[i]
    return table[0], lines


def draw_table(
    output: Output,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    figures: Collection[str] = (),
    styles: Sequence[str | None] = (),
    widths: Sequence[int] = (),
    prose: str = "",
) -> None:
    """Print a table on stdout.

    `figures`: heads of the columns set to the right. `styles`: of the rows, colours. `widths`: of the columns; longer
    cells are cut. `prose`: head of the column that may be wrapped. Where a table without widths is too wide for the
    terminal, each row becomes the text of its first cell with the other cells below it.
    """
    from rich.table import Table
    from rich.text import Text

    lines = [[(in_one_line(text), style) for text, style in map(_styled, row)] for row in (heads, *rows)]
    names, cells = lines[0], lines[1:]
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=any(heads))
    needed = -_GAP
    for n, (head, width) in enumerate(zip_longest(heads, widths)):
        natural = max(cell_len(row[n][0]) for row in lines)
        least = min(natural, _LEAST_PROSE) if head == prose else natural
        needed += least + _GAP
        table.add_column(
            Text(names[n][0]),
            justify="right" if head in figures else "left",
            overflow="fold" if width is None else "ellipsis",
            no_wrap=head != prose,
            min_width=None if widths else least,
            width=width,
        )
    for row, style in zip_longest(cells, styles):
        table.add_row(*(Text(*cell) for cell in row), style=style)
    console = console_of(output.out)
    if widths or needed <= console.width:
        console.print(table)
        return
    for ((first, first_style), *others), style in zip_longest(cells, styles):
        colour = first_style or style
        is_bold = colour == "bold"
        output.out.line(output.out.paint(first, fg=None if is_bold else colour, bold=is_bold))
        facts = [(head, text) for head, (text, _) in zip(heads[1:], others, strict=True) if text not in ("", "-")]
        told = "; ".join(text if head == prose else f"{head} {text}".strip() for head, text in facts)
        output.out.line(indent(wrapped(told, max(console.width - len(_INDENT), 1)), _INDENT))


def _styled(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell
