"""Tables in Markdown that also read well as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.cli.screen.output import in_one_line


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, n_left: int = 1) -> list[str]:
    """The lines of a table whose columns line up; all but the first `n_left` are figures and set to the right."""
    cells = [[in_one_line(cell).replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(heads))]  # 3: the least that Markdown takes
    rule = ["-" * width if i < n_left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        padded = [
            cell.ljust(width) if i < n_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return lines
