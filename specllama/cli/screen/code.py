"""Styles of code by rich's highlighter, in colours that are readable on light and on dark backgrounds."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from rich.style import Style

if TYPE_CHECKING:
    from rich.syntax import Syntax

MOST_CHARACTERS = 2_500  # of a block: each line costs a pass over all of it, together 0.2 s for this length
# Kinds of tokens as Pygments names them. Green, yellow, blue and cyan are hard to read on one of the backgrounds.
_STYLES = {
    ("Comment",): Style(dim=True, italic=True),
    ("Keyword",): Style(color="magenta"),
    ("Operator", "Word"): Style(color="magenta"),
    ("Name", "Function"): Style(bold=True),
    ("Name", "Class"): Style(bold=True),
    ("Name", "Tag"): Style(bold=True),
    ("Literal", "String"): Style(color="red"),
    ("Literal", "Number"): Style(color="red"),
}


@cache
def _syntax(language: str) -> Syntax | None:
    from rich.syntax import ANSISyntaxTheme, Syntax  # takes 30 ms

    syntax = Syntax("", language, theme=ANSISyntaxTheme(_STYLES), tab_size=0)  # 0: tabs stay
    return syntax if syntax.lexer is not None else None


def styles_of_last_line(block: str, info: str) -> list[Style] | None:
    """A style for each character of the last line of `block`, which ends with a newline.

    `info`: what follows the opening fence, such as `python`. None for an unknown language, or for a block that is too
    long or has characters that the highlighter changes.
    """
    language = info.strip().strip("{}.").partition(" ")[0].lower()
    syntax = _syntax(language) if language and len(block) <= MOST_CHARACTERS else None
    if syntax is None:
        return None
    text = syntax.highlight(block)
    if text.plain != block:
        return None
    first = block.rfind("\n", 0, -1) + 1
    styles = [Style()] * (len(block) - 1 - first)
    for start, end, style in text.spans:
        if isinstance(style, Style):
            for i in range(max(start, first), min(end, len(block) - 1)):
                styles[i - first] = style
    return styles
