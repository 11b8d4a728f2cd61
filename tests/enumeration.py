"""A chooser that follows a script; those that enumerate are the program's own (`specllama.audit.enumeration`)."""

from __future__ import annotations

from collections.abc import Iterable

from specllama.audit.enumeration import ContractBroken, EnumeratingChooser, law_of, tv
from specllama.core.distribution import Distribution

__all__ = ["EnumeratingChooser", "ScriptedChooser", "law_of", "tv"]


class ScriptedChooser:
    """Answers from two lists and records every question. What is impossible may not be scripted."""

    def __init__(self, flips: Iterable[bool] = (), picks: Iterable[int] = ()) -> None:
        self._flips = list(flips)
        self._picks = list(picks)
        self.flipped: list[float] = []
        self.picked: list[Distribution] = []

    def flip(self, prob: float) -> bool:
        """The next scripted flip."""
        self.flipped.append(prob)
        answer = self._flips.pop(0)
        if prob <= 0.0 if answer else prob >= 1.0:
            raise ContractBroken(f"flip({prob}) cannot be {answer}")
        return answer

    def pick(self, law: Distribution) -> int:
        """The next scripted token."""
        self.picked.append(law)
        token = self._picks.pop(0)
        if not law.prob(token) > 0.0:
            raise ContractBroken(f"token {token} cannot be drawn from {law}")
        return token
