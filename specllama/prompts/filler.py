"""Text that fills a context: our own notes, which come before a question and are unrelated to it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice

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

Count = Callable[[str], int]  # the number of tokens of a text


def notes(n_tokens: int, n_tokens_of: Count) -> str:
    """Different notes of at least `n_tokens` tokens, and few more; '' for 0."""
    if n_tokens <= 0:
        return ""
    text, numbers = _OPENING, count(1)
    while (missing := n_tokens - n_tokens_of(text)) > 0:
        # A note has about 25 tokens. Adding several at once saves counting the text for each.
        for n in islice(numbers, max(missing // 32, 1)):
            text += f"Note {n}: {_NOTES[(n * 5) % len(_NOTES)]}\n"
    return text + "\n"
