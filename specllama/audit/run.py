"""The exactness audit of a real pair: greedy answers, exact laws, draws and the KV; and whether it sees faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from specllama.audit import greedy as audit_greedy
from specllama.audit import kv as audit_kv
from specllama.audit import sampling as audit_sampling
from specllama.audit import self_test as audit_self_test
from specllama.audit.faults import Fault
from specllama.audit.models import Heard
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject
from specllama.audit.report import AuditReport, DrawRow, FaultRow, GreedyRun, KvRow, LawRow
from specllama.base.errors import Interrupted, PromptError
from specllama.chat.conversation import Conversation, Message, TemplateVocabulary

N_ROOM = 160  # tokens behind a prompt that the audit needs
USUAL = 60  # passes of a unit, before any was seen
LEAST_KNOWN = 0.03  # share of the whole from which on the rest can be guessed
# What each section takes of the whole, roughly: only the time that is left is guessed from it.
SHARES = {"greedy answers": 0.25, "exact laws and draws": 0.45, "the KV": 0.3, "self-test": 0.3}


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """What the audit is doing, the share that is done, and the seconds that are left, where they can be guessed."""

    doing: str
    share: float
    left_s: float | None


TellAudit = Callable[[AuditProgress], None]


def prompts_for(
    vocab: TemplateVocabulary, template: str | None, texts: Mapping[str, str], *, n_known: int, n_room: int
) -> tuple[AuditPrompt, ...]:
    """The prompts that leave room for an answer, in tokens that both models know. Raises PromptError if none does."""
    conversation = Conversation(vocab, template)
    found = [AuditPrompt(name, tuple(conversation.tokens([Message("user", text)]))) for name, text in texts.items()]
    fit = tuple(each for each in found if 1 < len(each.tokens) <= n_room and max(each.tokens) < n_known)
    if not fit:
        raise PromptError("no prompt fits these models", hint="use a longer context (--ctx-size), or another pair")
    return fit


@dataclass(slots=True)
class _Work:
    """What is found so far, and how far the audit is."""

    subject: AuditSubject
    effort: AuditEffort
    sections: Mapping[str, int]  # units of each
    tell: TellAudit
    started: float = field(default_factory=perf_counter)
    section: str = ""
    done: float = 0.0
    n_beats: int = 0  # of the unit in hand: passes of either model
    usual: int = USUAL  # of the last one
    greedy: list[GreedyRun] = field(default_factory=list)
    laws: list[LawRow] = field(default_factory=list)
    draws: list[DrawRow] = field(default_factory=list)
    kv: list[KvRow] = field(default_factory=list)
    along: audit_kv.Along | None = None
    faults: list[FaultRow] | None = None

    def _unit(self) -> float:
        """What a unit of the section is of the whole."""
        return SHARES[self.section] / sum(SHARES[name] for name in self.sections) / max(self.sections[self.section], 1)

    def _progress(self, share: float) -> AuditProgress:
        spent, share = perf_counter() - self.started, min(share, 1.0)
        return AuditProgress(self.section, share, spent / share - spent if share > LEAST_KNOWN else None)

    def begin(self, section: str) -> AuditProgress:
        """The next section."""
        self.section, self.n_beats, self.usual = section, 0, USUAL
        return self._progress(self.done)

    def tick(self) -> AuditProgress:
        """One unit more of the section is done."""
        self.done += self._unit()
        self.usual, self.n_beats = max(self.n_beats, 1), 0
        return self._progress(self.done)

    def beat(self) -> None:
        """One pass more. How many a unit takes is known from the one before, and never surely."""
        self.n_beats += 1
        part = self.n_beats / self.usual if self.n_beats < self.usual / 2 else 1.0 - self.usual / (4 * self.n_beats)
        self.tell(self._progress(self.done + part * self._unit()))

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


def _sections(subject: AuditSubject, effort: AuditEffort, faults: Sequence[Fault]) -> dict[str, int]:
    """The sections, and in how many units they go forward."""
    sections = {
        "greedy answers": min(effort.n_prompts, len(subject.prompts)) * subject.drafting.length.longest,
        "exact laws and draws": effort.n_contexts,
        "the KV": effort.n_runs,
    }
    return {**sections, "self-test": len(faults)} if faults else sections


def run(
    subject: AuditSubject,
    effort: AuditEffort,
    about: Mapping[str, object],
    *,
    self_test: bool = False,
    tell: TellAudit = lambda progress: None,
) -> Iterator[AuditProgress | AuditReport]:
    """The audit; the last item is the report, a partial one where `subject.cancel` was set meanwhile.

    `tell` hears of every pass, between the items: some take a minute. Raises what the models raise.
    """
    faults = audit_self_test.faults_for(subject) if self_test else ()
    work = _Work(subject, effort, _sections(subject, effort, faults), tell)
    draft = None if subject.draft is None else Heard(subject.draft, work.beat)
    subject = replace(subject, target=Heard(subject.target, work.beat), draft=draft)
    partial = True
    try:
        yield work.begin("greedy answers")
        for run_ in audit_greedy.compare(subject, effort):
            work.greedy.append(run_)
            yield work.tick()
        work.tell(work.begin("exact laws and draws"))
        for laws, draws in audit_sampling.measure(subject, effort):
            work.laws += laws
            work.draws += draws
            yield work.tick()
        work.tell(work.begin("the KV"))
        work.along = audit_kv.Along(subject.target.end_tokens, np.random.default_rng([subject.seed, 1]))
        for rows in audit_kv.check(subject, effort, work.along):
            work.kv += rows
            yield work.tick()
        if faults:
            work.faults = []
            work.tell(work.begin("self-test"))
            for caught in audit_self_test.catch_all(subject, faults):
                work.faults.append(caught)
                yield work.tick()
        partial = False
    except Interrupted:
        if not subject.cancel.is_set():
            raise
    yield work.report(about, partial=partial)
