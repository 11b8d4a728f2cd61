"""Exact laws by enumeration: `law_of` runs a function of a `Chooser` once per branch of its random decisions.

The weight of a branch is the product of its probabilities. Nothing is sampled, so a bias of 1e-12 is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser

Outcome = TypeVar("Outcome", bound=Hashable)

MASS_ERROR = 1e-12  # allowed error of the sum of all weights


class ContractBroken(AssertionError):
    """A protocol was violated."""


@dataclass(slots=True)
class _Decision:
    """The weights of all branches, and the current branch."""

    weights: tuple[float, ...]
    branch: int = 0


class EnumeratingChooser:
    """Replays a run once per branch, depth first. `weight` is the probability of the current branch.

    `closed=True` stands for a generator that compares with `<=`: a uniform draw of exactly 0 accepts an impossible
    event. Such branches have weight 0, but their outcomes appear in the law.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self._closed = closed
        self._decisions: list[_Decision] = []
        self._at = 0

    def flip(self, prob: float) -> bool:
        if math.isnan(prob):
            raise ContractBroken("flip(nan)")
        prob = min(1.0, max(0.0, float(prob)))
        if prob == 0.0 and not self._closed:
            return False
        return prob == 1.0 or self._branch((prob, 1.0 - prob)) == 0

    def pick(self, law: Distribution) -> int:
        """One branch per token of the support."""
        ids, probs = law.items()
        if abs(math.fsum(probs.tolist()) - 1.0) > 1e-9:
            raise ContractBroken(f"pick from a law of mass {math.fsum(probs.tolist())}")
        return int(ids[self._branch(tuple(probs.tolist()))])

    @property
    def weight(self) -> float:
        return math.prod(decision.weights[decision.branch] for decision in self._decisions[: self._at])

    def restart(self) -> None:
        self._at = 0

    def advance(self) -> bool:
        """Moves to the next branch; False after the last one."""
        if self._at != len(self._decisions):
            raise ContractBroken("a replay ended earlier than the last one (expected a function of the choices alone)")
        while self._decisions:
            last = self._decisions[-1]
            if last.branch + 1 < len(last.weights):
                last.branch += 1
                return True
            self._decisions.pop()
        return False

    def _branch(self, weights: tuple[float, ...]) -> int:
        """The recorded branch, or the first one of a new decision."""
        if self._at == len(self._decisions):
            self._decisions.append(_Decision(weights))
        decision = self._decisions[self._at]
        if decision.weights != weights:
            raise ContractBroken("a replay differs from the last one (expected a function of the choices alone)")
        self._at += 1
        return decision.branch


class TooManyBranches(Exception):
    """An enumeration exceeded its limit."""


def law_of(
    run: Callable[[Chooser], Outcome], *, closed: bool = False, most_branches: int | None = None
) -> dict[Outcome, float]:
    """The exact law of the result of `run`.

    Raises the errors of `run`, and TooManyBranches if there are more than `most_branches`.
    """
    chooser = EnumeratingChooser(closed=closed)
    weights: dict[Outcome, list[float]] = {}
    n_branches = 0
    while True:
        chooser.restart()
        outcome = run(chooser)
        weights.setdefault(outcome, []).append(chooser.weight)
        n_branches += 1
        if not chooser.advance():
            break
        if most_branches is not None and n_branches >= most_branches:
            raise TooManyBranches
    law = {outcome: math.fsum(parts) for outcome, parts in weights.items()}
    if abs(math.fsum(law.values()) - 1.0) > MASS_ERROR:
        raise ContractBroken(f"the weights of all branches sum to {math.fsum(law.values())!r} (expected 1)")
    return law


def tv(law_a: Mapping[Outcome, float], law_b: Mapping[Outcome, float]) -> float:
    """Total-variation distance of two laws."""
    return 0.5 * math.fsum(abs(law_a.get(key, 0.0) - law_b.get(key, 0.0)) for key in {*law_a, *law_b})
