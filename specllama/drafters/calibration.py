"""Calibration: how likely is a token of the draft model to be accepted? Learned online from what was verified."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the samples so far when one more comes: after 69 samples an old one counts half. Shorter follows the text
# faster, longer errs less: a story inside a page of code should be noticed within a few lines.
FADE = 0.99
PRIOR_WEIGHT = 3.0  # samples that the prior is worth; light, so that a bad draft is recognised within a few steps


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of a draft model before anything was verified; the defaults hold without a profile.

    The confidence is the model's own opinion, and the mass that two laws share is larger than the peak of either
    where both are flat: so the acceptance starts above 0.
    """

    typical: float = 0.8  # acceptance of a token whose confidence is not known
    base: float = 0.3  # acceptance at confidence 0, and what it gains up to confidence 1
    slope: float = 0.65

    def at(self, confidence: float) -> float:
        """Acceptance of a token with a confidence."""
        return self.base + self.slope * confidence


class Calibration:
    """The chance that a drafted token is accepted, given that all before it were, by the model's confidence in it.

    The prior's estimates are moved by what the samples were above or below them. Time is counted in samples, never by
    the clock, so the same answer is judged in the same way on every machine.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior or Prior()
        self._n = self._accepted = self._expected = 0.0  # faded sums over samples; expected by the prior

    def learn(self, confidence: float, acceptance: float) -> None:
        """A token, reached, was accepted (1), rejected (0), or would have been accepted with a chance."""
        self._n = FADE * self._n + 1.0
        self._accepted = FADE * self._accepted + acceptance
        self._expected = FADE * self._expected + self._prior.at(confidence)

    def age(self, n_tokens: int) -> None:
        """The model was not used for `n_tokens`: the samples fade as if it had been."""
        fade = FADE**n_tokens
        self._n, self._accepted, self._expected = fade * self._n, fade * self._accepted, fade * self._expected

    @property
    def empty(self) -> bool:
        """Was nothing learned yet?"""
        return not self._n

    @property
    def typical(self) -> float:
        """Acceptance of a token whose confidence is not known yet."""
        return (self._accepted + PRIOR_WEIGHT * self._prior.typical) / (self._n + PRIOR_WEIGHT)

    def at(self, confidence: float) -> float:
        """Acceptance of a token with a confidence."""
        surplus = (self._accepted - self._expected) / (self._n + PRIOR_WEIGHT)
        return min(max(self._prior.at(confidence) + surplus, 0.01), 0.99)
