"""What the engine reports while it works: frozen dataclasses with `to_json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypeAlias

from specllama.core.stats import SpecStats
from specllama.core.types import Decision

Origin = Literal["draft", "correction", "bonus", "target"]
Reason = Literal["stop", "length", "cancelled"]


class _Event:
    """`kind` is the event's name in JSON."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_json(self) -> dict[str, object]:
        return {"event": self.kind, **asdict(self)}  # type: ignore[call-overload]  # every subclass is a dataclass


@dataclass(frozen=True, slots=True)
class PromptProgress(_Event):
    """`done` of `total` prompt tokens are in the target's KV."""

    kind = "prompt"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenEvent(_Event):
    """One emitted token: drafted and accepted, a correction, a bonus, or the target's own (a step without a draft)."""

    kind = "token"
    token: int
    origin: Origin
    step: int


@dataclass(frozen=True, slots=True)
class StepEvent(_Event):
    """One verify pass, after its tokens. Times in seconds, without the time the reader takes between events."""

    kind = "step"
    step: int
    drafted: tuple[int, ...]  # drafted ids, without those behind the end of the answer
    accepted: int
    drafter: str
    decisions: tuple[Decision, ...]
    draft_s: float
    eval_s: float
    sample_s: float
    kv_s: float
    step_s: float  # the whole step
    loop_s: float  # the part of `step_s` outside the models' own calls
    n_rows: int  # of the verify pass
    cost: float | None  # of so many rows in T(1), by the profile; None without a profile


@dataclass(frozen=True, slots=True)
class Notice(_Event):
    """One sentence for the user; nothing failed."""

    kind = "notice"
    text: str


@dataclass(frozen=True, slots=True)
class Finished(_Event):
    """The last event: why the answer ended, and its counters."""

    kind = "finished"
    reason: Reason
    stats: SpecStats

    def to_json(self) -> dict[str, object]:
        """The passes are left out: each has a `StepEvent`."""
        return {"event": self.kind, "reason": self.reason, "stats": self.stats.to_json()}


Event: TypeAlias = PromptProgress | TokenEvent | StepEvent | Notice | Finished
