"""The exactness audit of a real pair: greedy answers, exact laws, draws and the KV; and whether it sees faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from specllama import audit_greedy, audit_kv, audit_sampling, audit_self_test
from specllama.audit_faults import Fault
from specllama.audit_parts import Effort, Prompt, Subject
from specllama.audit_types import AuditReport, DrawRow, FaultRow, GreedyRun, KvRow, LawRow
from specllama.conversation import Conversation, Message, Vocab
from specllama.errors import Interrupted, PromptError

# What each section takes of the whole, roughly: only the time that is left is guessed from it.
N_ROOM = 160  # tokens behind a prompt that the audit needs
SHARES = {"greedy answers": 0.5, "exact laws and draws": 0.3, "the KV": 0.2, "self-test": 0.3}


@dataclass(frozen=True, slots=True)
class Progress:
    """What the audit is doing, the share that is done, and the seconds that are left, where they can be guessed."""

    doing: str
    share: float
    left_s: float | None


def prompts_for(
    vocab: Vocab, template: str | None, texts: Mapping[str, str], *, n_known: int, n_room: int
) -> tuple[Prompt, ...]:
    """The prompts that leave room for an answer, in tokens that both models know. Raises PromptError if none does."""
    conversation = Conversation(vocab, template)
    found = [Prompt(name, tuple(conversation.tokens([Message("user", text)]))) for name, text in texts.items()]
    fit = tuple(each for each in found if 1 < len(each.tokens) <= n_room and max(each.tokens) < n_known)
    if not fit:
        raise PromptError("no prompt fits these models", hint="use a longer context (--ctx-size), or another pair")
    return fit


@dataclass(slots=True)
class _Work:
    """What is found so far, and how far the audit is."""

    subject: Subject
    effort: Effort
    sections: Mapping[str, int]  # units of each
    started: float = field(default_factory=perf_counter)
    done: float = 0.0
    greedy: list[GreedyRun] = field(default_factory=list)
    laws: list[LawRow] = field(default_factory=list)
    draws: list[DrawRow] = field(default_factory=list)
    kv: list[KvRow] = field(default_factory=list)
    along: audit_kv.Along | None = None
    faults: list[FaultRow] | None = None

    def tick(self, section: str) -> Progress:
        """One unit more of a section is done."""
        total = sum(SHARES[name] for name in self.sections)
        self.done += SHARES[section] / total / max(self.sections[section], 1)
        spent = perf_counter() - self.started
        share = min(self.done, 1.0)
        return Progress(section, share, spent / share - spent if share > 0.03 else None)

    def report(self, about: Mapping[str, object], *, partial: bool) -> AuditReport:
        """What was found."""
        along = () if self.along is None else (audit_kv.along_row(self.along),)
        return AuditReport(
            about=about,
            greedy=tuple(self.greedy),
            laws=audit_sampling.merged_laws(self.laws),
            draws=audit_sampling.merged_draws(self.draws),
            along=along,
            kv=tuple(self.kv),
            faults=None if self.faults is None else tuple(self.faults),
            partial=partial,
            wall_s=perf_counter() - self.started,
        )


def _sections(subject: Subject, effort: Effort, faults: Sequence[Fault]) -> dict[str, int]:
    """The sections, and in how many units they go forward."""
    sections = {
        "greedy answers": min(effort.n_prompts, len(subject.prompts)) * subject.drafting.n_max,
        "exact laws and draws": effort.n_contexts,
        "the KV": effort.n_runs,
    }
    return {**sections, "self-test": len(faults)} if faults else sections


def run(
    subject: Subject, effort: Effort, about: Mapping[str, object], *, self_test: bool = False
) -> Iterator[Progress | AuditReport]:
    """The audit; the last item is the report, a partial one where `subject.cancel` was set meanwhile.

    Raises what the models raise.
    """
    faults = audit_self_test.faults_for(subject) if self_test else ()
    work = _Work(subject, effort, _sections(subject, effort, faults))
    partial = True
    try:
        yield Progress("greedy answers", 0.0, None)
        for run_ in audit_greedy.compare(subject, effort):
            work.greedy.append(run_)
            yield work.tick("greedy answers")
        for laws, draws in audit_sampling.measure(subject, effort):
            work.laws += laws
            work.draws += draws
            yield work.tick("exact laws and draws")
        work.along = audit_kv.Along(subject.target.end_tokens, np.random.default_rng([subject.seed, 1]))
        for rows in audit_kv.check(subject, effort, work.along):
            work.kv += rows
            yield work.tick("the KV")
        if faults:
            work.faults = []
            for caught in audit_self_test.catch_all(subject, faults):
                work.faults.append(caught)
                yield work.tick("self-test")
        partial = False
    except Interrupted:
        if not subject.cancel.is_set():
            raise
    yield work.report(about, partial=partial)
