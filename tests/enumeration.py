"""A chooser that follows a script. The choosers that enumerate are in `specllama.audit.enumeration`."""

from __future__ import annotations

from collections.abc import Iterable

from specllama.audit.enumeration import ContractBroken, EnumeratingChooser, law_of, tv
from specllama.core.distribution import Distribution

__all__ = ["EnumeratingChooser", "ScriptedChooser", "as_dict", "law_of", "tv"]


def as_dict(law: Distribution) -> dict[int, float]:
    ids, probs = law.items()
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


class ScriptedChooser:
    """Answers from two lists and records every question. Raises ContractBroken for an impossible answer."""

    def __init__(self, flips: Iterable[bool] = (), picks: Iterable[int] = ()) -> None:
        self._flips = list(flips)
        self._picks = list(picks)
        self.flipped: list[float] = []
        self.picked: list[Distribution] = []

    def flip(self, prob: float) -> bool:
        self.flipped.append(prob)
        answer = self._flips.pop(0)
        if prob <= 0.0 if answer else prob >= 1.0:
            raise ContractBroken(f"flip({prob}) cannot be {answer}")
        return answer

    def pick(self, law: Distribution) -> int:
        self.picked.append(law)
        token = self._picks.pop(0)
        if not law.prob(token) > 0.0:
            raise ContractBroken(f"token {token} cannot be drawn from {law}")
        return token
