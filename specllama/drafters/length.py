"""How many tokens to draft: lengths, all their defaults, and the policy of fixed limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specllama.base.ranges import AUTO, MAX_DRAFT, either, whole
from specllama.core.types import Observation

# The default longest drafts, in tokens.
UNTUNED = 4  # auto without a profile: short, because the cost of a block on this machine is unknown
TUNED = 16  # auto with a profile: costs are measured up to blocks of one token more
CHAT = 16  # a chat's models have room for it, so that `/set spec-draft-n-max` needs no loading
AUDIT = 8  # `audit` compares one greedy answer for each length up to this, per prompt, strategy and rule
AUDIT_KV = 6  # in the random patterns of accepted and rejected tokens with which `audit` checks the KV cache
BENCH = (0, 2, 4, 8)  # `bench` compares these and auto


@dataclass(frozen=True, slots=True)
class DraftLength:
    """Up to `longest` drafted tokens; 0 = plain decoding. `is_auto`: the profile, if any, decides at every step."""

    longest: int
    is_auto: bool = False

    @classmethod
    def auto(cls, longest: int = UNTUNED) -> DraftLength:
        return cls(longest, is_auto=True)

    @classmethod
    def check(cls, name: str, text: object) -> DraftLength:
        """From `auto` or a number of tokens; a `base.ranges.Check`. Raises UsageError."""
        if isinstance(text, DraftLength):
            return text
        value = either(AUTO, AUTO, whole(0, MAX_DRAFT))(name, text)
        return cls.auto() if value == AUTO else cls(value)

    def to_json(self) -> int | Literal["auto"]:
        """As typed, and as in reports and saved chats."""
        return "auto" if self.is_auto else self.longest

    def __str__(self) -> str:
        return str(self.to_json())


AUTO_LENGTH = DraftLength.auto()
NO_DRAFTS = DraftLength(0)


class ConfidencePolicy:
    """Drafts up to `n_max` tokens; stops before a token whose law has no probability of at least `p_min`."""

    def __init__(self, n_max: int, p_min: float) -> None:
        self.n_max = n_max
        self.p_min = p_min

    def go_on(self, depth: int, confidence: float) -> bool:
        # The law only, never the token drawn from it: to drop a drawn token would bias the answer.
        return depth < self.n_max and confidence >= self.p_min

    def observe(self, seen: Observation) -> None:
        """Fixed limits learn nothing."""
