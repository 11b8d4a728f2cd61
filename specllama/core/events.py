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
    accepted: int  # the length of the accepted path
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
    parents: tuple[int, ...] | None = None  # of a tree: the parent of each drafted node, as in `Draft`; None = a chain
    path: tuple[int, ...] | None = None  # of a tree: the accepted nodes; None = the first `accepted` of a chain
    looked_up: int = 0  # the first so many of `drafted` are copied from the text, or forced by a constraint

    @property
    def rejected(self) -> bool:
        """The target had another token than any that was drafted for its place."""
        if self.parents is None:
            return self.accepted < len(self.drafted)
        return (self.path[-1] if self.path else -1) in self.parents

    @property
    def accepted_looked_up(self) -> int:
        """How many of the looked-up tokens were accepted."""
        if self.path is None:
            return min(self.accepted, self.looked_up)
        return sum(node < self.looked_up for node in self.path)

    @property
    def levels(self) -> list[int]:
        """Drafted tokens by depth; of a chain, 1 each."""
        if self.parents is None:
            return [1] * len(self.drafted)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return [depths.count(depth) for depth in range(max(depths, default=-1) + 1)]


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
