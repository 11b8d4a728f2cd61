"""The self-test of the audit: runs every fault through the section that must catch it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from specllama.audit import greedy as audit_greedy
from specllama.audit import kv as audit_kv
from specllama.audit import sampling as audit_sampling
from specllama.audit.faults import FAULTS, Fault
from specllama.audit.models import Remembered, Undecided
from specllama.audit.parts import AuditEffort, AuditSubject
from specllama.audit.report import DrawRow, FaultRow, KvRow, LawRow
from specllama.audit.sampling import BROKEN, AuditedContext
from specllama.base.errors import Interrupted
from specllama.base.text import counted
from specllama.core.sampling import SamplingParams
from specllama.drafters import DraftSettings

# The most for one fault: each section stops when it shows the fault.
MOST = AuditEffort(
    n_prompts=4, n_tokens=16, n_contexts=12, most_branches=600, n_enumerated=2, n_draws=1500, n_runs=4, n_steps=6
)
# Three tokens in a law: with few branches every context can have drafts of two tokens. The penalty counts tokens, so
# that those of a draft matter also if the text has them already.
PARAMS = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, frequency_penalty=0.5)


def faults_for(subject: AuditSubject) -> tuple[Fault, ...]:
    """The faults that this pair can show; fewer without a draft model, or with models for chains."""
    target, draft = subject.target, subject.draft
    shown = [fault for fault in FAULTS if target.caps.tree or not fault.needs_tree]
    shown = [fault for fault in shown if subject.constraint is not None or not fault.needs_format]
    if draft is None:
        return tuple(replace(fault, strategy="lookup") for fault in shown if not fault.needs_draft)
    return tuple(fault for fault in shown if draft.caps.tree or not (fault.needs_tree and fault.needs_draft))


class _FaultBench:
    """The pair and the contexts, whose rows are computed once for all faults.

    Every section goes on until it shows the fault: not every prompt and every context can.
    """

    def __init__(self, subject: AuditSubject, effort: AuditEffort) -> None:
        self.subject, self.effort = subject, effort
        target = Remembered(subject.target)
        draft = None if subject.draft is None else Remembered(subject.draft)
        contexts = list(audit_sampling.contexts(subject, effort))
        self.places = [AuditedContext(subject, context, target, draft) for context in contexts]

    def by_law(self, broken: AuditSubject, in_format: bool) -> tuple[str, bool]:
        rows: list[LawRow] = []
        for place in (each for each in self.places if (each.context.said is not None) == in_format):
            rows.append(replace(place, subject=broken).measure(broken.combinations[0], self.effort))
            if not rows[-1].sound:
                break
        (row,) = audit_sampling.merged(rows)
        return row.failure or f"TV {row.distance.tv:.2g}", not row.sound

    def by_draws(self, broken: AuditSubject, _in_format: bool) -> tuple[str, bool]:
        rows: list[DrawRow] = []
        for i, place in enumerate(self.places):
            here = replace(place, subject=broken)
            rows.append(here.draw(broken.combinations[0], self.effort.n_draws, broken.seed + i * self.effort.n_draws))
            (row,) = audit_sampling.merged(rows)
            if not row.sound:
                break
        value = row.test.p_value
        figure = "no variation" if value is None else f"p-value {value:.2g} over {row.test.n_draws} draws"
        return row.failure or figure, not row.sound

    def by_greedy(self, broken: AuditSubject, in_format: bool) -> tuple[str, bool]:
        for run in audit_greedy.compare(broken, self.effort, only_in_format=in_format):
            if run.failure:
                return run.failure, True
            if run.difference and not run.difference.near_tie:
                found = run.difference
                return f"token {found.at}, gap {found.gap:.2f}, blocks move it by {found.moved:.2g}", True
        return "the same text", False

    def by_kv(self, broken: AuditSubject, _in_format: bool) -> tuple[str, bool]:
        along = audit_kv.Along(broken.target.end_tokens, np.random.default_rng(broken.seed))
        found: list[KvRow] = []
        caught = False
        for rows in audit_kv.check(broken, self.effort, along):
            found += rows
            if caught := any(not row.sound for row in rows):
                break
        if not found:
            return "nothing was compared", False
        if n_foreign := max(row.n_foreign for row in found):
            return f"{counted(n_foreign, 'token is', 'tokens are')} not part of the answer", caught
        return f"logits differ by {max(row.difference for row in found):.2g}", caught


def _catch(bench: _FaultBench, fault: Fault) -> FaultRow:
    broken = replace(bench.subject, parts=fault.parts, strategies=(fault.strategy,), rules=(fault.rule,))
    sections = {"law": bench.by_law, "draws": bench.by_draws, "greedy": bench.by_greedy, "kv": bench.by_kv}
    try:
        figure, caught = sections[fault.section](broken, fault.needs_format)
    except Interrupted:
        raise
    except BROKEN as error:
        figure, caught = f"{type(error).__name__}: {error}", True
    return FaultRow(fault.name, fault.section, figure, caught)


def catch_all(subject: AuditSubject, faults: Sequence[Fault]) -> Iterator[FaultRow]:
    """A row for every fault. The sections that cache rows come first: they rely on the KV caches of the models.

    The draft and the settings are changed: a draft that is never rejected, temperature 0, a high p-min or an answer
    that ends at once would hide faults.
    """
    subject = replace(
        subject,
        draft=None if subject.draft is None else Undecided(subject.draft),
        params=replace(PARAMS, logit_bias=dict.fromkeys(subject.target.end_tokens, -math.inf)),
        drafting=DraftSettings(length=subject.drafting.length),
    )
    bench = _FaultBench(subject, MOST)
    for fault in sorted(faults, key=lambda fault: fault.section not in ("law", "draws")):
        subject.require_going()
        yield _catch(bench, fault)
