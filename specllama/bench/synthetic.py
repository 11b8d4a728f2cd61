"""Synthetic acceptance: accepts drafted tokens by a given chance, unjudged. For the benchmark alone: NO VALID OUTPUT.

It isolates the loop's own cost from the draft's worth. The engine and the rule stay as they are; only the coin that
the token rule flips is another one. No command but `bench` may import this (see tests/test_layers.py).
"""

from __future__ import annotations

import numpy as np

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser


class SyntheticChooser:
    """A `Chooser` whose flips come true with chance `rate`, whatever probability was asked for; picks are real."""

    def __init__(self, choose: Chooser, rate: float, seed: int) -> None:
        self._choose = choose
        self._rate = rate
        self._random = np.random.default_rng([seed, 1])

    def flip(self, prob: float) -> bool:
        """True with chance `rate`."""
        return bool(self._random.random() < self._rate)

    def pick(self, law: Distribution) -> int:
        """One token drawn from `law`, as the other chooser does."""
        return self._choose.pick(law)
