"""The policy with fixed limits. The one that weighs costs is `controller.Controller`."""

from __future__ import annotations

from specllama.core.types import Observation


class ConfidencePolicy:
    """Draft up to `n_max` tokens, and stop before a token whose law has no probability of at least `p_min`."""

    def __init__(self, n_max: int, p_min: float) -> None:
        self.n_max = n_max
        self.p_min = p_min

    def go_on(self, depth: int, confidence: float) -> bool:
        """Looks at the law only, never at the token drawn from it: dropping a drawn token would bias the answer."""
        return depth < self.n_max and confidence >= self.p_min

    def observe(self, seen: Observation) -> None:
        """Fixed limits learn nothing."""
