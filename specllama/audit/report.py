"""The audit's report as data: frozen rows, sections and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

from specllama.audit.chi_square import POWER, SURPRISE, ChiSquare
from specllama.audit.law import Distance

SCHEMA = {
    "name": "specllama.audit",
    "version": 1,
    "units": "tv, errors and chances are fractions of 1, gaps and differences are logits, *_s are seconds",
}

# What an enumerated law may differ from p by: rounding gives about 1e-15, and nobody sees a bias of 1e-9.
LAW_BOUND = 1e-9
# What logits behind a KV with rollbacks may differ by from one that read the same blocks: 0 where arithmetic repeats.
KV_BOUND = 1e-3
# The deciding block lay somewhere in the answer, so it need not be among the blocks of the control: half of the gap is
# what they must at least be able to move.
NEAR_TIE = 2.0


@dataclass(frozen=True, slots=True)
class TextDifference:
    """Where a greedy answer parts from plain decoding, and what the control without any draft says."""

    at: int  # tokens of the answer before it
    plain: int  # token
    ours: int
    plain_text: str
    our_text: str
    gap: float  # of the two logits, read one by one
    top_gap: float  # of the two largest logits there
    moved: float  # most that reading the same text in blocks moves that gap
    reread: float  # the gap in the very blocks of our answer, read again without a draft

    @property
    def near_tie(self) -> bool:
        """True where reading in blocks, without any draft, can turn the two around."""
        return 0.0 <= self.gap <= NEAR_TIE * self.moved


@dataclass(frozen=True, slots=True)
class GreedyRun:
    """One answer with drafts, beside the plain one."""

    prompt: str
    strategy: str
    rule: str
    n_max: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    difference: TextDifference | None


@dataclass(frozen=True, slots=True)
class LawRow:
    """Exact laws of blocks: one combination over many contexts."""

    strategy: str
    rule: str
    n_contexts: int  # measured
    n_wide: int  # contexts left out: too many branches to take them all
    n_drafted_in: int  # contexts with a draft
    n_open: int  # contexts in which p has more than one token
    longest: int  # draft
    n_branches: int
    distance: Distance
    failure: str = ""  # what was raised instead of a law

    @property
    def sound(self) -> bool:
        """True where the law is p."""
        return not self.failure and self.distance.tv <= LAW_BOUND and self.distance.error <= LAW_BOUND


@dataclass(frozen=True, slots=True)
class DrawRow:
    """Real draws, counted: one combination over many contexts or answers."""

    strategy: str
    rule: str
    test: ChiSquare
    failure: str = ""

    @property
    def sound(self) -> bool:
        """True where the counts are no surprise."""
        return not self.failure and not self.test.surprising


@dataclass(frozen=True, slots=True)
class KvRow:
    """The KV of one model after steps with accepted and rejected tokens."""

    strategy: str
    model: str  # target or draft
    n_steps: int
    n_dropped: int  # tokens read and taken back
    n_foreign: int  # tokens in the KV that were not said at that place
    difference: float  # of logits, from a KV that read the same blocks with other tokens in the dropped places
    narrow: float  # from one that only ever read what was kept: what the width of blocks is worth on this build
    wrong: float  # from one with a single wrong token: what a fault would look like
    full: bool = False  # so full that nothing could be read behind it: only its tokens were compared, the figures are 0

    @property
    def sound(self) -> bool:
        """True where the KV holds what was said, and what was dropped left no trace."""
        return self.n_foreign == 0 and self.difference <= KV_BOUND


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A rule broken on purpose, and what noticed."""

    fault: str
    section: str
    figure: str
    caught: bool


# What rows work out of their fields and the report says beside them.
_WORKED_OUT = ("near_tie", "p_value", "visible_tv", "sound")


def _plain(value: object) -> object:
    """A row as plain data, `test` spread out within it."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if not is_dataclass(value):
        return value
    found: dict[str, object] = {}
    for each in fields(value):
        inner = _plain(getattr(value, each.name))
        found.update(inner if each.name == "test" and isinstance(inner, dict) else {each.name: inner})
    return {**found, **{name: getattr(value, name) for name in _WORKED_OUT if hasattr(value, name)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What was found. A section that was not reached is empty, and then the report is partial."""

    about: Mapping[str, object]  # versions, models, machine, settings: whatever decides the result
    greedy: tuple[GreedyRun, ...] = ()
    laws: tuple[LawRow, ...] = ()
    draws: tuple[DrawRow, ...] = ()  # from contexts, many times from each
    along: tuple[DrawRow, ...] = ()  # along answers, once at every place
    kv: tuple[KvRow, ...] = ()
    faults: tuple[FaultRow, ...] | None = None  # of the self-test; None = it was not asked for
    partial: bool = False
    wall_s: float = 0.0

    @property
    def bugs(self) -> list[str]:
        """Everything that is wrong, one sentence each."""
        found = [
            f"greedy: {run.prompt}, {run.strategy}, {run.rule}, K = {run.n_max} parts from plain decoding at token "
            f"{run.difference.at} although the two tokens are {run.difference.gap:.3g} logits apart and reading in "
            f"blocks moves that by {run.difference.moved:.3g}"
            for run in self.greedy
            if run.difference and not run.difference.near_tie
        ]
        for law in self.laws:
            if law.failure:
                found.append(f"law: {law.strategy}, {law.rule}: {law.failure}")
            elif not law.sound:
                found.append(f"law: {law.strategy}, {law.rule} is not the target's: TV {law.distance.tv:.3g}")
        for draw in (*self.draws, *self.along):
            if draw.failure:
                found.append(f"draws: {draw.strategy}, {draw.rule}: {draw.failure}")
            elif not draw.sound:
                found.append(f"draws: {draw.strategy}, {draw.rule} do not follow p: p-value {draw.test.p_value:.3g}")
        for row in self.kv:
            if row.n_foreign:
                found.append(
                    f"kv: {row.model}, {row.strategy}: {row.n_foreign} tokens in it are not those that were said"
                )
            elif not row.sound:
                found.append(
                    f"kv: {row.model}, {row.strategy}: what was rejected left a trace of {row.difference:.3g} logits"
                )
        found += [f"self-test: not caught: {fault.fault}" for fault in self.faults or () if not fault.caught]
        return found

    @property
    def gaps(self) -> list[str]:
        """What was looked at and could not show anything, one sentence each: no bug, and no proof either."""
        found = []
        for row in self.laws:
            if row.failure:
                continue
            if not row.n_contexts:
                found.append(f"{row.strategy}, {row.rule}: every context has too many branches; try a smaller --top-k")
            elif not row.n_drafted_in and row.strategy != "none":
                found.append(f"{row.strategy}, {row.rule}: nothing was drafted in any context")
        sections = {"greedy answers": self.greedy, "exact laws": self.laws, "draws": self.draws, "the KV": self.kv}
        for model in ("target", "draft"):
            runs = [row for row in self.kv if row.model == model]
            if full := [row for row in runs if row.full]:
                strategies = ", ".join(dict.fromkeys(row.strategy for row in full))
                found.append(
                    f"the KV of the {model}, {strategies}: it was full after {len(full)} of {len(runs)} runs, so that "
                    "its logits were not compared"
                )
        if not self.partial:
            found += [f"{name}: nothing was looked at" for name, rows in sections.items() if not rows]
        return found

    @property
    def passed(self) -> bool:
        """True where nothing is wrong, as far as the audit came."""
        return not self.bugs

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            **self.about,
            "passed": self.passed,
            "partial": self.partial,
            "bugs": self.bugs,
            "gaps": self.gaps,
            "wall_s": self.wall_s,
            "bounds": {"law": LAW_BOUND, "kv": KV_BOUND, "p_value": SURPRISE, "power": POWER, "near_tie": NEAR_TIE},
            "greedy": _plain(self.greedy),
            "laws": _plain(self.laws),
            "draws": _plain(self.draws),
            "along": _plain(self.along),
            "kv": _plain(self.kv),
            "self_test": _plain(self.faults),
        }
