"""Distribution: an immutable probability distribution (here also: law) over tokens, dense or on a sorted support."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.base.errors import DraftLawError, NumericsError
from specllama.core.arrays import Float64Array, FloatArray, IntArray

# A law whose mass differs from 1 by more than this was not normalised after its last change.
MASS_TOLERANCE = 1e-6

_CERTAIN = np.ones(1)
_CERTAIN.setflags(write=False)


def _frozen(probs: Sequence[float] | FloatArray) -> Float64Array:
    """`probs` as read-only float64. Raises NumericsError unless it is a list of finite, non-negative numbers."""
    array = np.array(probs, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise NumericsError(f"probabilities have shape {array.shape} (one row was expected)")
    # One comparison catches negative numbers and NaN; the sum is infinite or NaN if any entry is.
    if not array.min() >= 0.0 or not np.isfinite(array.sum()):
        raise NumericsError("some probabilities are negative, infinite or NaN")
    array.setflags(write=False)
    return array


class Distribution:
    """Float64 probabilities of token ids; an id that is not stored has probability 0.

    Build it with `dense`, `on` or `point`. The mass is not forced to 1: `require_normalised` checks it where the law is
    used as q.
    """

    __slots__ = ("_ids", "_probs")

    def __init__(self, ids: IntArray | None, probs: Float64Array) -> None:
        self._ids = ids  # None: probs[i] belongs to token i
        self._probs = probs

    @classmethod
    def dense(cls, probs: Sequence[float] | FloatArray) -> Distribution:
        """`probs[i]` for token i.  probs: (V,)"""
        return cls(None, _frozen(probs))

    @classmethod
    def on(cls, ids: Sequence[int] | IntArray, probs: Sequence[float] | FloatArray) -> Distribution:
        """`probs[j]` for token `ids[j]`; ids in any order, each once.  both: (n,)"""
        frozen = _frozen(probs)
        tokens = np.array(ids, dtype=np.int64)
        if tokens.shape != frozen.shape:
            raise ValueError(f"{tokens.size} ids for {frozen.size} probabilities")
        if not (tokens[1:] > tokens[:-1]).all():
            order = np.argsort(tokens)
            tokens, frozen = tokens[order], frozen[order]
            if (tokens[1:] == tokens[:-1]).any():
                raise ValueError("a token occurs twice in the support")
            frozen.setflags(write=False)
        tokens.setflags(write=False)
        return cls(tokens, frozen)

    @classmethod
    def point(cls, token: int) -> Distribution:
        ids = np.array((token,), dtype=np.int64)
        ids.setflags(write=False)
        return cls(ids, _CERTAIN)

    def prob(self, token: int) -> float:
        if self._ids is None:
            return float(self._probs[token]) if 0 <= token < self._probs.size else 0.0
        i = int(self._ids.searchsorted(token))
        return float(self._probs[i]) if i < self._ids.size and self._ids[i] == token else 0.0

    def support(self) -> IntArray:
        """Ids with positive probability, ascending.  (n,)"""
        return self.items()[0]

    def items(self) -> tuple[IntArray, Float64Array]:
        """Ids with positive probability, ascending, and their probabilities.  both (n,)"""
        positive = self._probs.nonzero()[0]
        return (positive if self._ids is None else self._ids[positive]), self._probs[positive]

    def cells(self) -> tuple[IntArray | None, Float64Array]:
        """As stored: ids (None = 0, 1, 2, ...) and probabilities, zeros included.  both (n,)"""
        return self._ids, self._probs

    def peak(self) -> float:
        return float(self._probs.max())

    def mass(self) -> float:
        return float(self._probs.sum())

    def require_normalised(self) -> None:
        """Raises DraftLawError unless the mass is 1 within MASS_TOLERANCE."""
        mass = self.mass()
        if not abs(mass - 1.0) <= MASS_TOLERANCE:
            raise DraftLawError(
                f"q sums to {mass:.9g}, expected 1",
                hint="q must be the distribution that the draft token was drawn from, after every filter",
            )

    def excess(self, q: Distribution, weight: float = 1.0) -> tuple[IntArray | None, Float64Array]:
        """max(weight*p - q, 0) on the stored cells of p; outside them it is 0. `weight`: block verification's w."""
        q_ids, q_probs = q.cells()
        left: Float64Array = self._probs * weight
        if self._ids is None and q_ids is None:
            n = min(left.size, q_probs.size)
            left[:n] -= q_probs[:n]
        elif self._ids is None:
            assert q_ids is not None
            inside = q_ids < left.size
            left[q_ids[inside]] -= q_probs[inside]
        elif q_ids is None:
            inside = self._ids < q_probs.size
            left[inside] -= q_probs[self._ids[inside]]
        else:
            at = np.minimum(q_ids.searchsorted(self._ids), q_ids.size - 1)
            left -= np.where(q_ids[at] == self._ids, q_probs[at], 0.0)
        np.maximum(left, 0.0, out=left)
        return self._ids, left

    def overlap(self, q: Distribution) -> float:
        """Sum of min(p, q): the chance that a token drawn from q is accepted. Both must be normalised."""
        return max(0.0, 1.0 - float(self.excess(q)[1].sum()))

    def spare(self, q: Distribution, weight: float = 1.0) -> tuple[float, Distribution]:
        """(mass of max(weight*p - q, 0), that normalised); (0, p itself) if rounding leaves no mass."""
        ids, left = self.excess(q, weight)
        mass = float(left.sum())
        if not mass > 0.0:
            return 0.0, self
        left /= mass
        left.setflags(write=False)
        return mass, Distribution(ids, left)

    def residual(self, q: Distribution, weight: float = 1.0) -> Distribution:
        """normalised max(weight*p - q, 0); p itself if rounding leaves no mass.

        Source: Leviathan et al., arXiv 2211.17192, section 2.3; with `weight`, Sun et al., arXiv 2403.10444.
        """
        return self.spare(q, weight)[1]

    def without(self, *tokens: int) -> Distribution:
        """The law with `tokens` removed, renormalised; itself if no other token has mass."""
        left = self._probs.copy()
        if self._ids is None:
            left[[token for token in tokens if 0 <= token < left.size]] = 0.0
        else:
            at = np.minimum(self._ids.searchsorted(tokens), self._ids.size - 1)
            left[at[self._ids[at] == tokens]] = 0.0
        mass = float(left.sum())
        if not mass > 0.0:
            return self
        left /= mass
        left.setflags(write=False)
        return Distribution(self._ids, left)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Distribution):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self.items(), other.items(), strict=True))

    def __hash__(self) -> int:
        ids, probs = self.items()
        return hash((ids.tobytes(), probs.tobytes()))

    def __repr__(self) -> str:
        ids, probs = self.items()
        shown = ", ".join(f"{i}: {p:.4g}" for i, p in zip(ids[:8], probs[:8], strict=True))
        return f"Distribution({{{shown}{', ...' if ids.size > 8 else ''}}})"
