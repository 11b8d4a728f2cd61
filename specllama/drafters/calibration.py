"""Calibration: how likely is a drafted token to be accepted? Learned online from the tokens that were verified."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

# Confidences crowd towards 1, and that is where the difference between 0.9 and 0.99 decides over the length.
BUCKET_EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
LAST_DEPTH = 7  # tokens behind it are taken for alike

# After this many samples an old one counts half. Shorter follows the text faster, longer errs less: a story inside
# a page of code should be noticed within a few lines.
HALF_LIFE = 64.0

# How many samples the estimate one level above is worth.
WEIGHT_OF_TYPICAL = 4.0  # light: a hopeless draft must be found out within a few steps
WEIGHT_OF_SOURCE = 16.0  # for one depth
WEIGHT_OF_SHAPE = 6.0  # for one bucket of confidences


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of a source of drafts before it was seen at work."""

    typical: float  # acceptance of a token whose confidence is not known
    base: float  # acceptance at confidence 0, and what it gains up to confidence 1
    slope: float

    def at(self, confidence: float) -> float:
        """Acceptance of a token with a confidence."""
        return self.base + self.slope * confidence


# The confidence of a lookup is a chance it has learned by itself. A model's is its own opinion, and the mass that two
# laws share is larger than the peak of either where both are flat.
PRIORS: Mapping[str, Prior] = {
    "lookup": Prior(typical=0.5, base=0.0, slope=1.0),
    "model": Prior(typical=0.8, base=0.3, slope=0.65),
}


class _Count:
    """A mean of samples in which old ones fade."""

    __slots__ = ("_n", "_now", "_sum")

    def __init__(self) -> None:
        self._n = 0.0
        self._sum = 0.0
        self._now = 0

    def _fade(self, now: int) -> float:
        """What is left at time `now` of a sample that counted last."""
        return math.pow(0.5, (now - self._now) / HALF_LIFE)

    def add(self, sample: float, now: int) -> None:
        """One sample more at time `now`, counted in samples of the source."""
        fade = self._fade(now)
        self._n = self._n * fade + 1.0
        self._sum = self._sum * fade + sample
        self._now = now

    def n(self, now: int) -> float:
        """Samples that still count at time `now`."""
        return self._n * self._fade(now)

    def mean(self, now: int, prior: float, weight: float) -> float:
        """The estimate at time `now`, `prior` counting as `weight` samples."""
        fade = self._fade(now)
        return (self._sum * fade + weight * prior) / (self._n * fade + weight)


class Calibration:
    """The chance that a drafted token is accepted, given that all before it were, by source, depth and confidence.

    Each estimate leans on the coarser one above it until it has samples of its own: depth on the source as a whole,
    a bucket of confidences on the source's prior, moved by how much too high or low that turned out to be. Time is
    counted in samples, never by the clock, so the same answer is judged in the same way on every machine.
    """

    def __init__(self, priors: Mapping[str, Prior] = PRIORS) -> None:
        self._priors = priors
        self._now = dict.fromkeys(priors, 0)
        self._source = {source: _Count() for source in priors}
        self._surplus = {source: _Count() for source in priors}  # acceptance above what the prior expected
        self._depth = {source: [_Count() for _ in range(LAST_DEPTH + 1)] for source in priors}
        self._bucket = {source: [_Count() for _ in range(len(BUCKET_EDGES) + 1)] for source in priors}

    def learn(self, source: str, depth: int, confidence: float, acceptance: float) -> None:
        """A token at `depth`, reached, was accepted (1), rejected (0), or would have been accepted with a chance."""
        now = self._now[source] = self._now[source] + 1
        self._source[source].add(acceptance, now)
        self._surplus[source].add(acceptance - self._priors[source].at(confidence), now)
        self._depth[source][min(depth, LAST_DEPTH)].add(acceptance, now)
        self._bucket[source][bisect_right(BUCKET_EDGES, confidence)].add(acceptance, now)

    def age(self, source: str, n_tokens: int) -> None:
        """The source was not seen at work for `n_tokens`: what is known of it fades as if it had been."""
        self._now[source] += n_tokens

    def n_known(self, source: str) -> float:
        """Samples that still count for the source."""
        return self._source[source].n(self._now[source])

    def overall(self, source: str) -> float:
        """Acceptance of the source as a whole."""
        return self._source[source].mean(self._now[source], self._priors[source].typical, WEIGHT_OF_TYPICAL)

    def by_depth(self, source: str, n: int) -> list[float]:
        """Acceptance of tokens whose confidence is not known yet, for depths 0 to n-1.  (n,)"""
        now, overall = self._now[source], self.overall(source)
        known = [count.mean(now, overall, WEIGHT_OF_SOURCE) for count in self._depth[source][:n]]
        return known + known[-1:] * (n - len(known))

    def at(self, source: str, confidence: float) -> float:
        """Acceptance of a token with a confidence."""
        now = self._now[source]
        surplus = self._surplus[source].mean(now, 0.0, WEIGHT_OF_TYPICAL)
        shape = min(max(self._priors[source].at(confidence) + surplus, 0.01), 0.99)
        return self._bucket[source][bisect_right(BUCKET_EDGES, confidence)].mean(now, shape, WEIGHT_OF_SHAPE)
