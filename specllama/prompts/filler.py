"""Text to fill contexts with: notes that stand before a question and have nothing to do with it. Our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

_OPENING = "The numbered notes are background. The question comes after them.\n\n"
_NOTES = (
    "The harbour office counts every boat that comes in before noon and writes the number on a slate by the door.",
    "Two of the greenhouses were rebuilt last spring; the third still leaks when the wind stands in the west.",
    "A bus leaves for the valley every forty minutes, on market days every twenty, and never on the first of May.",
    "The library keeps its maps in flat drawers, because rolled paper remembers that it was rolled.",
    "Whoever borrows the long ladder signs for it, and whoever brings it back crosses the name out.",
    "In the north field clover was sown after barley, and the bees found it within the week.",
    "The clock on the town hall is wound by hand on Mondays; it loses about a minute by Sunday.",
    "Half of the chairs in the hall belong to the choir, the other half to nobody who could be found.",
)

Count = Callable[[str], int]  # the tokens of a text


def _pieces() -> Iterator[str]:
    """Notes without end, no two of them the same."""
    for n in count(1):
        yield f"Note {n}: {_NOTES[(n * 5) % len(_NOTES)]}\n"


def notes(n_tokens: int, n_tokens_of: Count) -> str:
    """Notes of about `n_tokens` tokens, never fewer; '' for none."""
    if n_tokens <= 0:
        return ""
    text, pieces = _OPENING, _pieces()
    while (missing := n_tokens - n_tokens_of(text)) > 0:
        # A note has some 25 tokens: whole batches of them, so that the text is not counted for each.
        for _ in range(max(missing // 32, 1)):
            text += next(pieces)
    return text + "\n"
