"""Noise keyed by seed and position: one seed gives one text, whatever drafts and however far (`--seed-mode same`).

Target and draft settle each position with the same noise. A drafted token is accepted if both settle on it, and the
correction is the target's own token, so the text depends on the target's laws and the noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from specllama.core.arrays import Float64Array, IntArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser
from specllama.core.types import Chooser

_WORD = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEPS, _FIRSTS, _SECONDS = np.uint64(_STEP), np.uint64(_FIRST), np.uint64(_SECOND)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def _mixed(word: int) -> int:
    """The output function of SplitMix64. Source: Steele, Lea and Flood, OOPSLA 2014, figure 16."""
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def _all_mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mixed` of many words; numpy's products of arrays are modulo 2**64."""
    words = (words ^ (words >> _30)) * _FIRSTS
    words = (words ^ (words >> _27)) * _SECONDS
    mixed: npt.NDArray[np.uint64] = words ^ (words >> _31)
    return mixed


class SharedNoise:
    """A `Chooser` for one seed whose draws depend on the position in the text, not on earlier draws.

    Exponential race (Gumbel-max in other words): token i arrives at E_i/p_i with E_i exponential, and the first to
    arrive wins with probability p_i. E_i depends on seed, position and token only, so two laws that are alike mostly
    give the same token: with probability sum of 1 / sum_j max(p_j/p_i, q_j/q_i).

    A law must be settled before it is drawn from: p/q rules with shared noise would be biased.
    """

    def __init__(self, seed: int) -> None:
        self._seed = _mixed(seed + _STEP & _WORD)

    def arrivals(self, ids: IntArray, position: int) -> Float64Array:
        """Exponential noise of mean 1 for each token.  (n,)"""
        key = np.uint64(_mixed(self._seed + (position + 1) * _STEP & _WORD))
        words = _all_mixed(_all_mixed(ids.astype(np.uint64) * _STEPS + key))
        # The middle of one of 2**53 equal cells: neither 0 nor 1.
        noise: Float64Array = -np.log(((words >> _11).astype(np.float64) + 0.5) * 2.0**-53)
        return noise

    def first(self, law: Distribution, position: int, n: int) -> list[int]:
        """The first `n` tokens to arrive, or all: `n` draws without replacement from `law`."""
        ids, probs = law.items()
        with np.errstate(over="ignore"):  # infinitely late
            times = self.arrivals(ids, position) / probs
        if n == 1:
            return [int(ids[times.argmin()])]
        return [int(token) for token in ids[times.argsort(kind="stable")[:n]]]

    def settled(self, law: Distribution, position: int) -> Distribution:
        """A point mass on the token that is drawn from `law` at this position of the text."""
        return Distribution.point(self.first(law, position, 1)[0])

    def flip(self, prob: float) -> bool:
        """Only certain answers. Raises ValueError if a law was not settled."""
        if 0.0 < prob < 1.0:
            raise ValueError(f"an event of probability {prob}, although every law must be settled by the noise")
        return prob >= 1.0

    def pick(self, law: Distribution) -> int:
        """The token of a settled law. Raises ValueError if it was not settled."""
        ids, _ = law.items()
        if ids.size != 1:
            raise ValueError(f"a draw from {ids.size} tokens, although every law must be settled by the noise")
        return int(ids[0])


def same_draw(p: Distribution, q: Distribution) -> float:
    """The chance that shared noise settles p and q on the same token: how often it accepts a draft.

    Token i wins both races if it beats every other token j in each, so j arrives at max(p_j/p_i, q_j/q_i) times the
    rate of i in the race that decides: 1 / sum_j max(p_j/p_i, q_j/q_i), summed over i.
    """
    both = [(p.prob(token), q.prob(token)) for token in {*p.support().tolist(), *q.support().tolist()}]
    return math.fsum(
        1.0 / math.fsum(max(p_j / p_i, q_j / q_i) for p_j, q_j in both) for p_i, q_i in both if p_i > 0.0 and q_i > 0.0
    )


def settled_by(choose: Chooser | None) -> Callable[[Distribution, int], Distribution] | None:
    """Returns what settles a law at a position before a draw from it; None if laws are not settled."""
    return choose.settled if isinstance(choose, SharedNoise) else None


class SeedMode(Enum):
    """What a seed fixes. Both keep the target's law."""

    DRAWS = "draws"  # the random numbers, one after another: other drafts give another text
    SAME = "same"  # the noise of every position: any drafts give the same text

    def chooser(self, seed: int) -> Chooser:
        """The source of randomness of one answer."""
        return SharedNoise(seed) if self is SeedMode.SAME else RandomChooser(seed)
