"""The acceptance of the draft model's tokens by confidence, learned from past verifications."""

from __future__ import annotations

from dataclasses import dataclass

# Each new sample multiplies the weight of older ones: after 69 samples an old one counts half. A smaller value follows
# the text faster, a larger one has less noise: a story inside a page of code is noticed within a few lines.
FADE = 0.99
PRIOR_WEIGHT = 3.0  # in samples; low, so that a bad draft is recognised within a few steps


@dataclass(frozen=True, slots=True)
class Prior:
    """The acceptance before the first sample; the defaults hold without a profile.

    Acceptance is above 0 at confidence 0: two flat laws share more mass than the peak of either.
    """

    typical: float = 0.8  # acceptance at unknown confidence
    base: float = 0.3  # acceptance at confidence 0
    slope: float = 0.65  # its gain up to confidence 1
    known: bool = False  # measured with this pair or learned from it, or specllama recommends the pair

    def at(self, confidence: float) -> float:
        return self.base + self.slope * confidence


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over tokens of the draft that were judged."""

    n: int = 0
    accepted: float = 0.0
    confidence: float = 0.0

    def plus(self, confidence: float, acceptance: float) -> Tally:
        return Tally(self.n + 1, self.accepted + acceptance, self.confidence + confidence)


class Calibration:
    """The chance that a drafted token is accepted, given that all before it are, by the model's confidence.

    The prior moves by the mean difference between samples and prior. Samples fade by their number, never by the clock,
    so the same answer gives the same estimates on every machine.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or Prior()
        self._n = self._accepted = self._expected = 0.0  # faded sums over samples; expected by the prior
        self.judged = Tally()  # of all samples, not faded; the reader may reset it

    def learn(self, confidence: float, acceptance: float) -> None:
        """Add a token that was reached: accepted (1), rejected (0), or the chance that it would be accepted."""
        self.judged = self.judged.plus(confidence, acceptance)
        self._n = FADE * self._n + 1.0
        self._accepted = FADE * self._accepted + acceptance
        self._expected = FADE * self._expected + self._prior.at(confidence)

    def age(self, n_tokens: int) -> None:
        """Let samples fade for `n_tokens` without the model."""
        fade = FADE**n_tokens
        self._n, self._accepted, self._expected = fade * self._n, fade * self._accepted, fade * self._expected

    @property
    def empty(self) -> bool:
        """True before the first sample."""
        return not self._n

    @property
    def blind(self) -> bool:
        """True before the first sample if the prior says nothing of this pair."""
        return self.empty and not self._prior.known

    @property
    def typical(self) -> float:
        """Acceptance at unknown confidence."""
        return (self._accepted + PRIOR_WEIGHT * self._prior.typical) / (self._n + PRIOR_WEIGHT)

    def at(self, confidence: float) -> float:
        """Acceptance at a confidence."""
        surplus = (self._accepted - self._expected) / (self._n + PRIOR_WEIGHT)
        return min(max(self._prior.at(confidence) + surplus, 0.01), 0.99)
