"""What lookups alone would have made of an answer, beside whatever else drafts in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from specllama.core.types import Planner
from specllama.drafters.suffix import LookupGuess

AskLookup: TypeAlias = Callable[[], Sequence[LookupGuess]]


class LookupsAlone:
    """Goes through an answer as it is said, in the steps of a drafter that has lookups and no model.

    Whoever drafted, the answer has the target's law, and a looked-up token is accepted where it equals what is said.
    So these are the very steps that lookups alone would need for this text: nothing is estimated, and no model asked.
    """

    def __init__(self, planner: Planner) -> None:
        """`planner` says how much of an offer would be taken, and hears what came of it."""
        self._planner = planner
        self._given: list[int] | None = None  # what the step in progress would have drafted; None = it begins
        self._n_said = 0  # of its tokens

    def begin(self) -> None:
        """A new answer starts: the step in progress comes to nothing."""
        self._given = None

    def say(self, token: int, look: AskLookup) -> None:
        """The next token of the answer. `look` gives what would be offered for it and those behind it."""
        if self._given is None:
            guesses = look()
            n_given = self._planner.alone([guess.confidence for guess in guesses])
            self._given, self._n_said = [guess.token for guess in guesses[:n_given]], 0
        hit = self._n_said < len(self._given) and self._given[self._n_said] == token
        self._n_said += 1
        if not hit:  # the correction, or the token behind a draft that was accepted whole
            self._planner.learn_alone(len(self._given), self._n_said)
            self._given = None
