"""What the engine says while it works: frozen dataclasses, each with `to_json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from specllama.core.stats import SpecStats
from specllama.core.types import Decision

Origin = Literal["draft", "correction", "bonus", "target"]
Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`done` of `total` prompt tokens are in the target's KV."""

    done: int
    total: int

    def to_json(self) -> dict[str, object]:
        return {"event": "prompt", **asdict(self)}


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token: drafted and accepted, a correction, a bonus, or the target's own (a step without a draft)."""

    token: int
    origin: Origin
    step: int

    def to_json(self) -> dict[str, object]:
        return {"event": "token", **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One verify pass, after its tokens; times in seconds, the reader's own time between events not among them."""

    step: int
    drafted: tuple[int, ...]  # drafted ids, what lies behind the end of the answer left out
    accepted: int
    drafter: str
    decisions: tuple[Decision, ...]
    draft_s: float
    eval_s: float
    sample_s: float
    kv_s: float
    step_s: float  # the whole step
    loop_s: float  # of it, the time outside the models' own calls

    def to_json(self) -> dict[str, object]:
        return {"event": "step", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence the user should read; nothing failed."""

    text: str

    def to_json(self) -> dict[str, object]:
        return {"event": "notice", "text": self.text}


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event: why the answer ended, and its counters."""

    reason: Reason
    stats: SpecStats

    def to_json(self) -> dict[str, object]:
        return {"event": "finished", "reason": self.reason, "stats": asdict(self.stats)}


Event: TypeAlias = PromptProgress | TokenEvent | StepEvent | Notice | Finished
