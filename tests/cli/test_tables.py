"""Tables on a terminal."""

from __future__ import annotations

import io

from specllama.cli.screen.output import Output, Stream
from specllama.cli.screen.tables import draw_table


def test_no_text_in_a_table_steers_the_terminal() -> None:
    """A file name or a line of models.toml that sets the title, or swallows the rest of the report."""
    paper = io.StringIO()
    stream = Stream(paper, True, False, False, False)
    evil = "\x1b]0;X\x07\x1b[31m\n"
    draw_table(Output(stream, stream), [evil, "size"], [[(evil, "red"), "1 GB"]], figures=["size"], styles=["green"])
    assert "\x1b" not in paper.getvalue()
    assert "\x07" not in paper.getvalue()
    assert len(paper.getvalue().splitlines()) == 2
    assert paper.getvalue().count("\\x1b]0;X\\x07\\x1b[31m\\x0a") == 2
