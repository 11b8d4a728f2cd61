"""The self-test of the audit: every broken rule goes through the section that has to notice it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specllama.audit import greedy as audit_greedy
from specllama.audit import kv as audit_kv
from specllama.audit import sampling as audit_sampling
from specllama.audit.faults import FAULTS, Fault
from specllama.audit.models import Remembered
from specllama.audit.parts import AuditEffort, AuditSubject
from specllama.audit.report import FaultRow, LawRow
from specllama.audit.sampling import BROKEN, AuditedContext
from specllama.base.errors import Interrupted

MINIMAL = AuditEffort(
    n_prompts=1, n_tokens=8, n_contexts=8, most_branches=600, n_enumerated=2, n_draws=1500, n_runs=1, n_steps=6
)
LOOKUPS = replace(MINIMAL, n_contexts=12)  # a lookup drafts in every second context, and not always what is possible
N_DRAWN_IN = 2  # contexts that are drawn in
NARROW = 3  # tokens in a law: few branches, so that drafts of two tokens are feasible everywhere


def faults_for(subject: AuditSubject) -> tuple[Fault, ...]:
    """The faults that this pair can show: lookups have no law of their own, so without a draft there are fewer."""
    if subject.draft is not None:
        return FAULTS
    return tuple(replace(fault, strategy="lookup") for fault in FAULTS if not fault.needs_draft)


@dataclass(slots=True)
class _FaultBench:
    """The pair, with contexts that all faults share; their rows are computed once."""

    subject: AuditSubject
    effort: AuditEffort
    places: list[AuditedContext] = field(default_factory=list)

    def prepare(self) -> None:
        """Choose the contexts."""
        target = Remembered(self.subject.target)
        draft = None if self.subject.draft is None else Remembered(self.subject.draft)
        for context in list(audit_sampling.contexts(self.subject, self.effort)):
            self.places.append(AuditedContext(self.subject, context, target, draft))

    def by_law(self, broken: AuditSubject) -> tuple[str, bool]:
        """The largest distance over the contexts, up to the first that shows the fault: not every one can."""
        rows: list[LawRow] = []
        for place in self.places:
            rows.append(replace(place, subject=broken).measure(broken.combinations[0], self.effort))
            if not rows[-1].sound:
                break
        (row,) = audit_sampling.merged_laws(rows)
        return row.failure or f"TV {row.distance.tv:.2g}", not row.sound

    def by_draws(self, broken: AuditSubject) -> tuple[str, bool]:
        """The statistic over the contexts."""
        rows = []
        for i, place in enumerate(self.places[:N_DRAWN_IN]):
            here = replace(place, subject=broken)
            rows.append(here.draw(broken.combinations[0], self.effort.n_draws, broken.seed + i * self.effort.n_draws))
        (row,) = audit_sampling.merged_draws(rows)
        value = row.test.p_value
        told = "nothing varied" if value is None else f"p-value {value:.2g} over {row.test.n_draws} draws"
        return row.failure or told, not row.sound

    def by_greedy(self, broken: AuditSubject) -> tuple[str, bool]:
        """The first answer that parts from the plain one for no reason of arithmetic."""
        for run in audit_greedy.compare(broken, self.effort):
            if run.difference and not run.difference.near_tie:
                found = run.difference
                return f"token {found.at}, gap {found.gap:.2f}, blocks move it by {found.moved:.2g}", True
        return "the same text", False

    def by_kv(self, broken: AuditSubject) -> tuple[str, bool]:
        """The difference that what was dropped made."""
        along = audit_kv.Along(broken.target.end_tokens, np.random.default_rng(broken.seed))
        found = [row for rows in audit_kv.check(broken, self.effort, along) for row in rows]
        caught = any(not row.sound for row in found)
        if n_foreign := max(row.n_foreign for row in found):
            return f"{n_foreign} tokens were not said", caught
        return f"logits differ by {max(row.difference for row in found):.2g}", caught


def _catch(bench: _FaultBench, fault: Fault) -> FaultRow:
    """Run the section that has to notice `fault` on the broken program."""
    broken = replace(bench.subject, parts=fault.parts, strategies=(fault.strategy,), rules=(fault.rule,))
    sections = {"law": bench.by_law, "draws": bench.by_draws, "greedy": bench.by_greedy, "kv": bench.by_kv}
    try:
        figure, caught = sections[fault.section](broken)
    except Interrupted:
        raise
    except BROKEN as error:
        figure, caught = f"{type(error).__name__}: {error}", True
    return FaultRow(fault.name, fault.section, figure, caught)


def catch_all(subject: AuditSubject, faults: Sequence[Fault]) -> Iterator[FaultRow]:
    """Every fault, and what noticed it. Those that use the models' rows come first: they trust what the models hold."""
    top_k = min(subject.params.top_k or NARROW, NARROW)
    subject = replace(subject, params=replace(subject.params, top_k=top_k))
    bench = _FaultBench(subject, MINIMAL if subject.draft is not None else LOOKUPS)
    bench.prepare()
    for fault in sorted(faults, key=lambda fault: fault.section not in ("law", "draws")):
        subject.require_going()
        yield _catch(bench, fault)
