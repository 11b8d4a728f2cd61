"""Synthetic acceptance: accepts drafted tokens with a fixed chance. NO VALID OUTPUT.

It measures the cost of the loop without the quality of the draft. The engine and the rule are the real ones; only the
random numbers of the token rule are replaced. Only `bench` may import this (see tests/test_layers.py).
"""

from __future__ import annotations

import numpy as np

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser


class SyntheticChooser:
    """A `Chooser` whose `flip` ignores the probability and is True with chance `rate`; `pick` is the real one."""

    def __init__(self, choose: Chooser, rate: float, seed: int) -> None:
        self._choose = choose
        self._rate = rate
        self._random = np.random.default_rng([seed, 1])

    def flip(self, prob: float) -> bool:
        return bool(self._random.random() < self._rate)

    def pick(self, law: Distribution) -> int:
        return self._choose.pick(law)
