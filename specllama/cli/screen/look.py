"""The look of answers, for `run` and `chat`: a table of the choices, with their words and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specllama.base.ranges import Check, word


@dataclass(frozen=True, slots=True)
class LookSetting:
    """The words of a choice, the default first."""

    words: tuple[str, ...]
    help: str

    @property
    def check(self) -> Check:
        return word(*self.words)


LOOKS = {
    "colors": LookSetting(("marks", "full", "off"), "mark corrections and bonus tokens, every origin, or none"),
    "strip": LookSetting(("brief", "full"), "the live figures: speed and acceptance, or all"),
    "fold": LookSetting(("off", "on"), "hide the thinking"),
}


@dataclass(slots=True)
class AnswerLook:
    """One word of LOOKS for each choice."""

    colors: str = LOOKS["colors"].words[0]
    strip: str = LOOKS["strip"].words[0]
    fold: str = LOOKS["fold"].words[0]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AnswerLook:
        """The look of checked values; others are ignored."""
        return cls(**{name: values[name] for name in LOOKS if name in values})
