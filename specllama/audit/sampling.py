"""Sampling: the exact law of the engine's output, and counts of real draws, compared with p after many contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from specllama.audit.chi_square import LEAST_EXPECTED, ChiSquare, of_law
from specllama.audit.enumeration import ContractBroken, TooManyBranches
from specllama.audit.law import END, Block, Distance, block_law, distance
from specllama.audit.models import Remembered, RememberedMasks
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject, Combination, Watching
from specllama.audit.reference import masked, target_law
from specllama.audit.report import DrawRow, LawRow
from specllama.base.errors import Interrupted, SpecllamaError
from specllama.base.text import counted
from specllama.core.constraint import Constraint
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.no_drafter import NoDrafter
from specllama.core.sampling import RandomChooser
from specllama.core.types import Observation

Row = TypeVar("Row", LawRow, DrawRow)

WIDEST = 4  # a draft of one token may have so many times the branches of longer drafts
N_COUNTED = 2  # tokens of a drawn answer that are compared
N_DRAFTED = 2  # longest draft of a drawn answer
N_LOOKED_AT = 24  # tokens of an answer in which contexts may end
ECHO, BEFORE_ECHO = 8, 6  # tokens that are repeated, and tokens before the repetition

# Errors that count as a result of the audit; others are not caught.
BROKEN = (SpecllamaError, ContractBroken, ValueError)


def _uncertain(
    subject: AuditSubject, prompt: AuditPrompt, constraint: Constraint | None
) -> tuple[tuple[int, ...], list[int]]:
    """A sampled plain answer and its positions, those first whose most likely token has a probability close to 0.5.

    A flatter law has too many branches for more than one drafted token; a certain one shows nothing.
    """
    peaks: list[float] = []

    def see(seen: Observation) -> None:
        assert seen.laws is not None
        peaks.append(seen.laws[0].peak())

    tokens: list[int] = []
    subject.target.truncate(0)  # the engine must not reuse the cache of an earlier section
    engine = Engine(subject.target, Watching(NoDrafter(), see))
    events = engine.generate(
        prompt.tokens,
        subject.params,
        RandomChooser(subject.seed),
        max_tokens=N_LOOKED_AT,
        cancel=subject.cancel,
        constraint=constraint,
    )
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
    subject.require_going()
    return tuple(tokens), sorted(range(len(peaks)), key=lambda place: abs(peaks[place] - 0.5))


def contexts(subject: AuditSubject, effort: AuditEffort) -> Iterator[AuditPrompt]:
    """Answers cut where the target is undecided; in every second one a passage is repeated, for the lookups.

    Then half as many in a format, if there is one.
    """
    n_room = subject.target.n_ctx if subject.draft is None else min(subject.target.n_ctx, subject.draft.n_ctx)
    known = subject.target.vocab_size if subject.draft is None else subject.draft.vocab_size
    n_made = 0
    rounds = -(-effort.n_contexts // (2 * len(subject.prompts)))  # each round gives a plain and a repeating one

    def fits(text: tuple[int, ...]) -> bool:
        return len(text) + N_LOOKED_AT < n_room and max(text) < known

    for prompt in subject.prompts:
        said, places = _uncertain(subject, prompt, None)
        line = (*prompt.tokens, *said)
        for place in places[:rounds]:
            at = len(prompt.tokens) + place
            echo = (*line[: at + BEFORE_ECHO], *line[max(at - ECHO, 0) : at])
            for name, text in ((f"{prompt.name}+{place}", line[:at]), (f"{prompt.name}+{place}, again", echo)):
                if n_made < effort.n_contexts and fits(text):
                    n_made += 1
                    yield AuditPrompt(name, text)
    n_wanted = n_made + effort.n_contexts // 2
    for prompt in subject.prompts:
        if subject.constraint is None:
            break
        said, places = _uncertain(subject, prompt, subject.constraint())
        for place in places[: -(-effort.n_contexts // (2 * len(subject.prompts)))]:
            before = (*prompt.tokens, *said) * (n_made % 2)
            text = (*before, *prompt.tokens, *said[:place])
            if n_made < n_wanted and fits(text):
                n_made += 1
                yield AuditPrompt(f"{prompt.name}+{place}, in a format", text, said[:place])


@dataclass(slots=True)
class AuditedContext:
    """One context with models that cache their rows, and p after every continuation."""

    subject: AuditSubject
    context: AuditPrompt
    target: Remembered
    draft: Remembered | None
    _laws: dict[Block, Mapping[int, float]] = field(default_factory=dict)
    _masks: RememberedMasks | None = None

    def constraint(self) -> Constraint | None:
        """That of an answer which goes on after the context; None for free text."""
        if self.context.said is None:
            return None
        if self._masks is None:
            assert self.subject.constraint is not None
            self._masks = RememberedMasks(self.subject.constraint(), self.context.said, self.target.end_tokens)
        return self.subject.parts.constraint(self._masks.answer())

    def law_at(self, block: Block) -> Mapping[int, float]:
        """p after the context and `block`, with all end tokens as one outcome."""
        if block not in self._laws:
            line = (*self.context.tokens, *block)
            row = self.target.row(line)
            if self.context.said is not None:
                row = masked(row, self.subject.allowed_after((*self.context.said, *block)))
            law: dict[int, float] = {}
            for token, prob in target_law(row, line, self.subject.params).items():
                key = END if token in self.target.end_tokens else token
                law[key] = law.get(key, 0.0) + prob
            self._laws[block] = law
        return self._laws[block]

    def engine(self, combination: Combination, n_max: int) -> Engine:
        drafter = self.subject.drafter(combination.strategy, self.draft, n_max)
        parts = self.subject.parts
        return parts.engine(parts.target(self.target), drafter, rule=combination.rule)

    def measure(self, combination: Combination, effort: AuditEffort) -> LawRow:
        """The exact law of the engine's block with drafts of up to the longest length that can be enumerated."""
        found, n_branches, n_drafted, failure = Distance(), 0, 0, ""
        for n_max in range(1, effort.n_enumerated + 1):
            try:
                law, more, drafted = block_law(
                    self.engine(combination, n_max),
                    self.context.tokens,
                    self.subject.params,
                    n_max=n_max,
                    cancel=self.subject.cancel,
                    most=effort.most_branches * (WIDEST if n_max == 1 else 1),
                    constraint=self.constraint,
                )
                found = found.worse(distance(law, self.law_at))
            except TooManyBranches:
                break
            except Interrupted:
                raise
            except BROKEN as error:
                failure = f"{type(error).__name__}: {error}"
                break
            n_branches += more
            n_drafted = max(n_drafted, drafted)
            if drafted < n_max:
                break  # the strategy drafts no more here
        return LawRow(
            strategy=combination.strategy,
            rule=combination.rule.value,
            n_contexts=int(n_branches > 0),
            n_wide=int(n_branches == 0 and not failure),
            n_drafted_in=int(n_drafted > 0),
            n_open=int(n_branches > 0 and len(self.law_at(())) > 1),
            n_masked=int(n_branches > 0 and self.context.said is not None),
            longest=n_drafted,
            n_branches=n_branches,
            distance=found,
            failure=failure,
        )

    def _counted_law(self, n_draws: int) -> dict[Block, float]:
        """p of the first N_COUNTED tokens, without beginnings that are too rare to count."""
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
        """Counts the first tokens of many sampled answers."""
        engine = self.engine(combination, N_DRAFTED)
        counts: Counter[Block] = Counter()
        try:
            for i in range(n_draws):
                self.subject.require_going()
                counts[self._drawn(engine, seed + i)] += 1
        except Interrupted:
            raise
        except BROKEN as error:
            failure = f"{type(error).__name__}: {error}"
            return DrawRow(combination.strategy, combination.rule.value, ChiSquare(), failure)

        def possible(block: Block) -> bool:
            return all(block[i] in self.law_at(block[:i]) for i in range(len(block)))

        excluded = sum(n for block, n in counts.items() if not possible(block))
        failure = f"drew {counted(excluded, 'answer')} with probability 0 under p" if excluded else ""
        test = of_law(counts, self._counted_law(n_draws))
        return DrawRow(combination.strategy, combination.rule.value, test, failure)

    def _drawn(self, engine: Engine, seed: int) -> Block:
        said: list[int] = []
        choose = self.subject.parts.choose(seed)
        for event in engine.generate(
            self.context.tokens,
            self.subject.params,
            choose,
            max_tokens=N_DRAFTED + 1,
            cancel=self.subject.cancel,
            constraint=self.constraint(),
        ):
            if isinstance(event, TokenEvent):
                said.append(event.token)
            elif isinstance(event, Finished):
                if event.reason == "cancelled":
                    raise Interrupted("cancelled during a draw")
                if event.reason == "stop":
                    said.append(END)
        return tuple(said[:N_COUNTED])


def merged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The sum of the rows of each combination."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.strategy, row.rule)
        found[key] = found[key] + row if key in found else row
    return tuple(found.values())


def measure(subject: AuditSubject, effort: AuditEffort) -> Iterator[tuple[list[LawRow], list[DrawRow]]]:
    """The exact laws of every combination and the draws, context by context."""
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
