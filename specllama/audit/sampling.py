"""Sampling: for many contexts of the real pair, the exact law of what the engine emits, and real draws, against p."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specllama.audit.chi_square import LEAST_EXPECTED, ChiSquare, of_law
from specllama.audit.enumeration import ContractBroken, TooManyBranches
from specllama.audit.law import END, NONE, Block, block_law, distance
from specllama.audit.models import Remembered
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject, Combination, Watching
from specllama.audit.reference import target_law
from specllama.audit.report import DrawRow, LawRow
from specllama.base.errors import Interrupted, SpecllamaError
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.no_drafter import NoDrafter
from specllama.core.sampling import RandomChooser
from specllama.core.types import Drafter, Observation

WIDEST = 4  # a draft of one token may have so many times the branches of longer ones, or there would be none
N_COUNTED = 2  # tokens of a drawn answer that are compared
N_DRAFTED = 2  # tokens drafted for it
N_LOOKED_AT = 24  # tokens of an answer among which places for contexts are sought
ECHO, BEFORE_ECHO = 8, 6  # tokens that are repeated, and of the answer between the two places

# What a broken part may raise; whatever else is raised is nobody's finding.
BROKEN = (SpecllamaError, ContractBroken, ValueError)


@dataclass(frozen=True, slots=True)
class Context:
    """A text behind which laws are compared."""

    name: str
    tokens: tuple[int, ...]


def _uncertain(subject: AuditSubject, prompt: AuditPrompt) -> tuple[tuple[int, ...], list[int]]:
    """A sampled plain answer, and its places: first where the target is of two minds about the next token.

    Where it is of many, there are too many branches for more than one drafted token; where it is sure, nothing shows.
    """
    peaks: list[float] = []

    def see(seen: Observation) -> None:
        assert seen.laws is not None
        peaks.append(seen.laws[0].peak())

    tokens: list[int] = []
    subject.target.truncate(0)  # whoever used it last left nothing that an engine may trust
    engine = Engine(subject.target, Watching(NoDrafter(), see))
    events = engine.generate(
        prompt.tokens, subject.params, RandomChooser(subject.seed), max_tokens=N_LOOKED_AT, cancel=subject.cancel
    )
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
    subject.require_going()
    return tuple(tokens), sorted(range(len(peaks)), key=lambda place: abs(peaks[place] - 0.5))


def contexts(subject: AuditSubject, effort: AuditEffort) -> Iterator[Context]:
    """Texts at whose end the target is undecided: answers cut there, and every second one with a passage said again.

    Said again, so that lookups find something.
    """
    n_room = subject.target.n_ctx if subject.draft is None else min(subject.target.n_ctx, subject.draft.n_ctx)
    known = subject.target.vocab_size if subject.draft is None else subject.draft.vocab_size
    n_made = 0
    rounds = -(-effort.n_contexts // (2 * len(subject.prompts)))  # each round gives a plain and a repeating one
    for prompt in subject.prompts:
        said, places = _uncertain(subject, prompt)
        line = (*prompt.tokens, *said)
        for place in places[:rounds]:
            at = len(prompt.tokens) + place
            echo = (*line[: at + BEFORE_ECHO], *line[max(at - ECHO, 0) : at])
            for name, text in ((f"{prompt.name}+{place}", line[:at]), (f"{prompt.name}+{place}, again", echo)):
                if n_made < effort.n_contexts and len(text) + N_LOOKED_AT < n_room and max(text) < known:
                    n_made += 1
                    yield Context(name, text)


@dataclass(slots=True)
class AuditedContext:
    """One context, with models that remember what they computed for it, and p behind every continuation."""

    subject: AuditSubject
    context: Context
    target: Remembered
    draft: Remembered | None
    _laws: dict[Block, Mapping[int, float]] = field(default_factory=dict)

    def law_at(self, block: Block) -> Mapping[int, float]:
        """p behind the context and `block`, all end tokens as one."""
        if block not in self._laws:
            line = (*self.context.tokens, *block)
            law: dict[int, float] = {}
            for token, prob in target_law(self.target.row(line), line, self.subject.params).items():
                key = END if token in self.target.end_tokens else token
                law[key] = law.get(key, 0.0) + prob
            self._laws[block] = law
        return self._laws[block]

    def engine(self, combination: Combination, n_max: int) -> Engine:
        """An engine that drafts from its first step on."""
        subject = self.subject
        drafter: Drafter = subject.drafter(combination.strategy, self.draft, n_max)
        return subject.parts.engine(subject.parts.target(self.target), drafter, rule=combination.rule)

    def measure(self, combination: Combination, effort: AuditEffort) -> LawRow:
        """The exact law of the engine's block with drafts of every length that is feasible."""
        found, n_branches, n_drafted, failure = NONE, 0, 0, ""
        for n_max in range(1, effort.n_enumerated + 1):
            try:
                block = block_law(
                    self.engine(combination, n_max),
                    self.context.tokens,
                    self.subject.params,
                    n_max=n_max,
                    cancel=self.subject.cancel,
                    most=effort.most_branches * (WIDEST if n_max == 1 else 1),
                )
                found = found.worse(distance(block.law, self.law_at))
            except TooManyBranches:
                break
            except Interrupted:
                raise
            except BROKEN as error:
                failure = f"{type(error).__name__}: {error}"
                break
            n_branches += block.n_branches
            n_drafted = max(n_drafted, block.n_drafted)
            if block.n_drafted < n_max:
                break  # the strategy has no more to say here
        return LawRow(
            strategy=combination.strategy,
            rule=combination.rule.value,
            n_contexts=int(n_branches > 0),
            n_wide=int(n_branches == 0 and not failure),
            n_drafted_in=int(n_drafted > 0),
            n_open=int(n_branches > 0 and len(self.law_at(())) > 1),
            longest=n_drafted,
            n_branches=n_branches,
            distance=found,
            failure=failure,
        )

    def _counted_law(self, n_draws: int) -> dict[Block, float]:
        """p of the first tokens; beginnings that are too rare to be counted are left out."""
        law: dict[Block, float] = {}

        def extend(block: Block, prob: float) -> None:
            if len(block) == N_COUNTED or (block and block[-1] == END):
                law[block] = prob
                return
            for token, share in self.law_at(block).items():
                if n_draws * prob * share >= LEAST_EXPECTED:
                    extend((*block, token), prob * share)

        extend((), 1.0)
        return law

    def draw(self, combination: Combination, n_draws: int, seed: int) -> DrawRow:
        """Real draws: the first tokens of many answers, counted."""
        engine = self.engine(combination, N_DRAFTED)
        counts: Counter[Block] = Counter()
        try:
            for i in range(n_draws):
                self.subject.require_going()
                counts[self._drawn(engine, seed + i)] += 1
        except Interrupted:
            raise
        except BROKEN as error:
            told = f"{type(error).__name__}: {error}"
            return DrawRow(combination.strategy, combination.rule.value, ChiSquare(), told)
        excluded = sum(n for block, n in counts.items() if self._excluded(block))
        failure = f"{excluded} answers that p excludes were drawn" if excluded else ""
        test = of_law(counts, self._counted_law(n_draws))
        return DrawRow(combination.strategy, combination.rule.value, test, failure)

    def _excluded(self, block: Block) -> bool:
        """True where p gives some token of the block no chance."""
        return any(block[i] not in self.law_at(block[:i]) for i in range(len(block)))

    def _drawn(self, engine: Engine, seed: int) -> Block:
        """The first tokens of one answer."""
        said: list[int] = []
        choose = self.subject.parts.choose(seed)
        for event in engine.generate(
            self.context.tokens, self.subject.params, choose, max_tokens=N_DRAFTED + 1, cancel=self.subject.cancel
        ):
            if isinstance(event, TokenEvent):
                said.append(event.token)
            elif isinstance(event, Finished):
                if event.reason == "cancelled":
                    raise Interrupted("cancelled in the middle of a draw")
                if event.reason == "stop":
                    said.append(END)
        return tuple(said[:N_COUNTED])


def merged_laws(rows: Sequence[LawRow]) -> tuple[LawRow, ...]:
    """One row for each combination."""
    found: dict[tuple[str, str], LawRow] = {}
    for row in rows:
        before = found.get((row.strategy, row.rule))
        found[row.strategy, row.rule] = row if before is None else _both(before, row)
    return tuple(found.values())


def _both(a: LawRow, b: LawRow) -> LawRow:
    return LawRow(
        strategy=a.strategy,
        rule=a.rule,
        n_contexts=a.n_contexts + b.n_contexts,
        n_wide=a.n_wide + b.n_wide,
        n_drafted_in=a.n_drafted_in + b.n_drafted_in,
        n_open=a.n_open + b.n_open,
        longest=max(a.longest, b.longest),
        n_branches=a.n_branches + b.n_branches,
        distance=a.distance.worse(b.distance),
        failure=a.failure or b.failure,
    )


def merged_draws(rows: Sequence[DrawRow]) -> tuple[DrawRow, ...]:
    """One row for each combination; the statistics of independent samples add up."""
    found: dict[tuple[str, str], DrawRow] = {}
    for row in rows:
        before = found.get((row.strategy, row.rule))
        if before is not None:
            row = DrawRow(row.strategy, row.rule, before.test + row.test, before.failure or row.failure)
        found[row.strategy, row.rule] = row
    return tuple(found.values())


def measure(subject: AuditSubject, effort: AuditEffort) -> Iterator[tuple[list[LawRow], list[DrawRow]]]:
    """Context after context: the exact laws of every combination, and draws."""
    target = Remembered(subject.target)
    draft = None if subject.draft is None else Remembered(subject.parts.draft(subject.draft))
    seeds = np.random.default_rng(subject.seed)
    for context in list(contexts(subject, effort)):
        place = AuditedContext(subject, context, target, draft)
        laws, draws = [], []
        for combination in subject.combinations:
            subject.require_going()
            laws.append(place.measure(combination, effort))
            draws.append(place.draw(combination, effort.n_draws, int(seeds.integers(2**32))))
        target.forget()
        if draft is not None:
            draft.forget()
        yield laws, draws
