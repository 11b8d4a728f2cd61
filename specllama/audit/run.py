"""The exactness audit of a pair: greedy answers, exact laws, draws, the KV cache, and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from specllama.audit import greedy as audit_greedy
from specllama.audit import kv as audit_kv
from specllama.audit import sampling as audit_sampling
from specllama.audit import self_test as audit_self_test
from specllama.audit.models import Heard
from specllama.audit.parts import AuditEffort, AuditSubject
from specllama.audit.report import AuditReport, DrawRow, FaultRow, GreedyRun, KvRow, LawRow
from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted

N_ROOM = 160  # tokens of room that the audit needs after a prompt
USUAL = 60  # passes of a unit before the first unit is done
LEAST_KNOWN = 0.03  # share after which the time left is estimated
# Rough shares of the sections, for the progress bar.
SHARES = {"greedy answers": 0.25, "exact laws and draws": 0.45, "KV cache": 0.3, "self-test": 0.3}


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """The current section and the share of the whole audit that is done."""

    doing: str
    share: float
    left_s: float | None  # None: not known yet


TellAudit = Callable[[AuditProgress], None]


@dataclass(slots=True)
class _Progress:
    sections: Mapping[str, int]  # number of units
    tell: TellAudit
    started: float = field(default_factory=perf_counter)
    section: str = ""
    done: float = 0.0
    n_beats: int = 0  # passes of the current unit
    usual: int = USUAL  # passes of the last unit

    def _unit(self) -> float:
        """The share of one unit of the section in the whole."""
        return SHARES[self.section] / sum(SHARES[name] for name in self.sections) / max(self.sections[self.section], 1)

    def _progress(self, share: float) -> AuditProgress:
        spent, share = perf_counter() - self.started, min(share, 1.0)
        return AuditProgress(self.section, share, spent / share - spent if share > LEAST_KNOWN else None)

    def begin(self, section: str) -> AuditProgress:
        self.section, self.n_beats, self.usual = section, 0, USUAL
        return self._progress(self.done)

    def tick(self) -> AuditProgress:
        """Counts one unit of the section as done."""
        self.done += self._unit()
        self.usual, self.n_beats = max(self.n_beats, 1), 0
        return self._progress(self.done)

    def beat(self) -> None:
        """Counts one pass. The number of passes of a unit is estimated from the unit before."""
        self.n_beats += 1
        part = self.n_beats / self.usual if self.n_beats < self.usual / 2 else 1.0 - self.usual / (4 * self.n_beats)
        self.tell(self._progress(self.done + part * self._unit()))


def run(
    subject: AuditSubject,
    effort: AuditEffort,
    about: Mapping[str, object],
    *,
    self_test: bool = False,
    tell: TellAudit = lambda progress: None,
) -> Iterator[AuditProgress | AuditReport]:
    """Progress, and at last the report; it is partial if `subject.cancel` was set.

    `tell` is called after every pass, because an item may take a minute. Raises the errors of the models.
    """
    faults = audit_self_test.faults_for(subject) if self_test else ()
    masked = subject.constraint is not None
    sections = {
        "greedy answers": min(effort.n_prompts, len(subject.prompts)) * (subject.drafting.length.longest + 1 + masked),
        "exact laws and draws": effort.n_contexts + masked * (effort.n_contexts // 2),
        "KV cache": effort.n_runs,
        **({"self-test": len(faults)} if faults else {}),
    }
    work = _Progress(sections, tell)
    draft = None if subject.draft is None else Heard(subject.draft, work.beat)
    subject = replace(subject, target=Heard(subject.target, work.beat), draft=draft)
    greedy, laws, draws, kv = list[GreedyRun](), list[LawRow](), list[DrawRow](), list[KvRow]()
    along: audit_kv.Along | None = None
    caught: list[FaultRow] | None = None
    partial = True
    try:
        yield work.begin("greedy answers")
        for answer in audit_greedy.compare(subject, effort):
            greedy.append(answer)
            yield work.tick()
        tell(work.begin("exact laws and draws"))
        for more_laws, more_draws in audit_sampling.measure(subject, effort):
            laws += more_laws
            draws += more_draws
            yield work.tick()
        tell(work.begin("KV cache"))
        along = audit_kv.Along(subject.target.end_tokens, np.random.default_rng([subject.seed, 1]))
        for rows in audit_kv.check(subject, effort, along):
            kv += rows
            yield work.tick()
        if faults:
            caught = []
            tell(work.begin("self-test"))
            for fault in audit_self_test.catch_all(subject, faults):
                caught.append(fault)
                yield work.tick()
        partial = False
    except Interrupted:
        if not subject.cancel.is_set():
            raise
    yield AuditReport(
        about=about,
        greedy=tuple(greedy),
        laws=audit_sampling.merged(laws),
        draws=audit_sampling.merged(draws),
        along=() if along is None else (along.row(),),
        kv=tuple(kv),
        faults=None if caught is None else tuple(caught),
        partial=partial,
        wall_s=perf_counter() - work.started,
    )
