"""The audit's report as data: the rows of every section, and what they prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

from specllama.audit.chi_square import POWER, SURPRISE, ChiSquare
from specllama.audit.law import Distance
from specllama.base.text import counted

SCHEMA = {
    "name": "specllama.audit",
    "version": 1,
    "units": "tv, errors and chances are fractions of 1, gaps and differences are logits, *_s are seconds",
}

# Allowed distance of an enumerated law from p. Rounding gives about 1e-15.
LAW_BOUND = 1e-9
# Allowed difference of logits after rollbacks from those of a KV cache that read the same blocks; usually 0.
KV_BOUND = 1e-3
# The blocks of the control are not those of the answer: it is enough if they move the logits by half of the gap.
NEAR_TIE = 2.0


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first difference of an answer from plain decoding, and the scores of the control without a draft.

    A score is a logit, or with `same_seed` a logarithm of p with the noise of the seed.
    """

    at: int  # position in the answer
    plain: int  # token
    ours: int
    plain_text: str
    our_text: str
    gap: float  # of the two scores, read token by token
    top_gap: float  # of the two largest scores there
    moved: float  # largest change of that gap when the same text is read in blocks
    reread: float  # the gap in the blocks of our answer, read again without a draft

    @property
    def near_tie(self) -> bool:
        """True if reading in blocks, without a draft, can reverse the two tokens."""
        return 0.0 <= self.gap <= NEAR_TIE * self.moved


@dataclass(frozen=True, slots=True)
class GreedyRun:
    """One answer with drafts, greedy or with the noise of one seed, compared with plain decoding."""

    prompt: str
    strategy: str
    rule: str
    n_max: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    difference: TextDifference | None
    same_seed: bool = False  # at the temperature of the audit, `--seed-mode same`
    in_format: bool = False
    failure: str = ""  # the error that was raised instead

    @property
    def kind(self) -> str:
        return "same seed" if self.same_seed else "in a format" if self.in_format else "greedy"


@dataclass(frozen=True, slots=True)
class LawRow:
    """Exact laws of one combination over many contexts."""

    strategy: str
    rule: str
    n_contexts: int  # measured
    n_wide: int  # contexts with too many branches, which are left out
    n_drafted_in: int  # contexts with a draft
    n_open: int  # contexts in which p has more than one token
    longest: int  # draft
    n_masked: int  # contexts in an answer in a format
    n_branches: int
    distance: Distance
    failure: str = ""  # the error that was raised instead

    @property
    def sound(self) -> bool:
        return not self.failure and self.distance.tv <= LAW_BOUND and self.distance.error <= LAW_BOUND

    def __add__(self, other: LawRow) -> LawRow:
        return LawRow(
            strategy=self.strategy,
            rule=self.rule,
            n_contexts=self.n_contexts + other.n_contexts,
            n_wide=self.n_wide + other.n_wide,
            n_drafted_in=self.n_drafted_in + other.n_drafted_in,
            n_open=self.n_open + other.n_open,
            n_masked=self.n_masked + other.n_masked,
            longest=max(self.longest, other.longest),
            n_branches=self.n_branches + other.n_branches,
            distance=self.distance.worse(other.distance),
            failure=self.failure or other.failure,
        )


@dataclass(frozen=True, slots=True)
class DrawRow:
    """Counts of real draws of one combination, over many contexts or answers."""

    strategy: str
    rule: str
    test: ChiSquare
    failure: str = ""

    @property
    def sound(self) -> bool:
        return not self.failure and not self.test.surprising

    def __add__(self, other: DrawRow) -> DrawRow:
        return DrawRow(self.strategy, self.rule, self.test + other.test, self.failure or other.failure)


@dataclass(frozen=True, slots=True)
class KvRow:
    """The KV cache of one model after steps with accepted and rejected tokens."""

    strategy: str
    model: str  # target or draft
    n_steps: int
    n_dropped: int  # tokens read and cut off
    n_foreign: int  # tokens in the cache that are not those of the answer
    difference: float  # of logits, from a cache that read the same blocks with other tokens in the dropped places
    narrow: float  # from a cache that read only the kept tokens: the effect of the block width on this build
    wrong: float  # from a cache with a single wrong token: the size of a real fault
    full: bool = False  # the context is full: only tokens were compared, the three differences are 0

    @property
    def sound(self) -> bool:
        return self.n_foreign == 0 and self.difference <= KV_BOUND


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A deliberate fault, and the section that must catch it."""

    fault: str
    section: str
    figure: str
    caught: bool


_COMPUTED = ("near_tie", "p_value", "visible_tv", "sound")  # properties that the JSON contains


def _plain(value: object) -> object:
    """A row as plain data, with the fields of `test` beside its own."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if not is_dataclass(value):
        return value
    found: dict[str, object] = {}
    for each in fields(value):
        inner = _plain(getattr(value, each.name))
        found.update(inner if each.name == "test" and isinstance(inner, dict) else {each.name: inner})
    return {**found, **{name: getattr(value, name) for name in _COMPUTED if hasattr(value, name)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit. Sections that were not reached are empty; then the report is partial."""

    about: Mapping[str, object]  # versions, models, machine, settings
    greedy: tuple[GreedyRun, ...] = ()
    laws: tuple[LawRow, ...] = ()
    draws: tuple[DrawRow, ...] = ()  # many from each context
    along: tuple[DrawRow, ...] = ()  # one at every position of the answers
    kv: tuple[KvRow, ...] = ()
    faults: tuple[FaultRow, ...] | None = None  # of the self-test; None = not requested
    partial: bool = False
    wall_s: float = 0.0

    @property
    def bugs(self) -> list[str]:
        """Every error that was found, as a sentence."""
        found = [
            f"{run.kind}: {run.prompt}, {run.strategy}, {run.rule}, K = {run.n_max} differs from plain decoding at "
            f"token {run.difference.at}: the two scores are {run.difference.gap:.3g} apart, and blocks move them by "
            f"only {run.difference.moved:.3g}"
            for run in self.greedy
            if run.difference and not run.difference.near_tie
        ]
        found += [f"{run.kind}: {run.prompt}, {run.strategy}: {run.failure}" for run in self.greedy if run.failure]
        for law in self.laws:
            if not law.sound:
                reason = law.failure or f"the distribution differs from the target's, TV {law.distance.tv:.3g}"
                found.append(f"law: {law.strategy}, {law.rule}: {reason}")
        for draw in (*self.draws, *self.along):
            if not draw.sound:
                reason = draw.failure or f"the draws do not follow p, p-value {draw.test.p_value:.3g}"
                found.append(f"draws: {draw.strategy}, {draw.rule}: {reason}")
        for row in self.kv:
            if row.n_foreign:
                foreign = counted(row.n_foreign, "token is", "tokens are")
                found.append(f"kv: {row.model}, {row.strategy}: {foreign} not part of the answer")
            elif not row.sound:
                found.append(
                    f"kv: {row.model}, {row.strategy}: rejected tokens change the logits by {row.difference:.3g}"
                )
        found += [f"self-test: not caught: {fault.fault}" for fault in self.faults or () if not fault.caught]
        return found

    @property
    def gaps(self) -> list[str]:
        """What could not be shown, as sentences: neither an error nor a proof."""
        found = []
        for row in self.laws:
            if row.failure:
                continue
            if not row.n_contexts:
                found.append(f"{row.strategy}, {row.rule}: every context has too many branches; use a smaller --top-k")
            elif not row.n_drafted_in and row.strategy != "none":
                found.append(f"{row.strategy}, {row.rule}: nothing was drafted in any context")
        for model in ("target", "draft"):
            runs = [row for row in self.kv if row.model == model]
            if full := [row for row in runs if row.full]:
                strategies = ", ".join(dict.fromkeys(row.strategy for row in full))
                found.append(
                    f"KV cache of the {model}, {strategies}: full after {len(full)} of {len(runs)} runs, logits were "
                    "not compared"
                )
        sections = {"greedy answers": self.greedy, "exact laws": self.laws, "draws": self.draws, "KV cache": self.kv}
        if self.laws and not any(row.n_masked for row in self.laws):
            found.append("formats: no context of an answer in a format was measured")
        if not self.partial:
            found += [f"{name}: nothing was measured" for name, rows in sections.items() if not rows]
        return found

    @property
    def passed(self) -> bool:
        return not self.bugs

    def to_json(self) -> dict[str, object]:
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
