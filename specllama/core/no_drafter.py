"""Plain decoding through the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.core.arrays import FloatArray
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, Observation


class NoDrafter:
    """Proposes nothing: every step emits one token of the target."""

    name = "none"
    wants: frozenset[str] = frozenset()

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Nothing to prepare."""

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        return Draft()

    def observe(self, seen: Observation) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """Nothing to free."""
