"""How far to draft: a fixed number of tokens, or as a profile decides at every step. All default lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specllama.base.ranges import AUTO, MAX_DRAFT, either, whole

# The longest draft, in tokens, where nobody names one.
UNTUNED = 4  # auto without a profile: short, because the cost of a block on this machine is not known then
TUNED = 16  # auto with a profile: its costs are measured up to blocks of this and one token
CHAT = 16  # what a chat's models have room for, so that `/set draft-n-max` needs no loading
AUDIT = 8  # `audit` compares one greedy answer for each length up to it, per prompt, strategy and rule
AUDIT_KV = 6  # of the random patterns of accepted and rejected tokens with which `audit` checks the KV cache
BENCH = (0, 2, 4, 8)  # what `bench` compares beside auto


@dataclass(frozen=True, slots=True)
class DraftLength:
    """Up to `longest` drafted tokens; 0 = plain decoding.

    Where `is_auto`, a profile's controller decides within them at every step, if there is a profile.
    """

    longest: int
    is_auto: bool = False

    @classmethod
    def auto(cls, longest: int = UNTUNED) -> DraftLength:
        """Up to `longest` tokens without a profile."""
        return cls(longest, is_auto=True)

    @classmethod
    def check(cls, name: str, text: object) -> DraftLength:
        """`auto`, or a number of tokens; a `base.ranges.Check`. Raises UsageError."""
        if isinstance(text, DraftLength):
            return text
        value = either(AUTO, AUTO, whole(0, MAX_DRAFT))(name, text)
        return cls.auto() if value == AUTO else cls(value)

    def to_json(self) -> int | Literal["auto"]:
        """As it is typed, and stands in reports and saved chats."""
        return "auto" if self.is_auto else self.longest

    def __str__(self) -> str:
        return str(self.to_json())


AUTO_LENGTH = DraftLength.auto()
NO_DRAFTS = DraftLength(0)
