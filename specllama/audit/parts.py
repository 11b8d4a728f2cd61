"""Input of the audit: the pair, the settings, the amount of work, and the parts that the self-test replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specllama.base.errors import Interrupted
from specllama.core.arrays import FloatArray
from specllama.core.constraint import Allowed, Constraint
from specllama.core.engine import Engine
from specllama.core.optional import models_of, report_of
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel, Chooser, Draft, Drafter, LanguageModel, Observation, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength
from specllama.drafters.shape import FixedShape


@dataclass(frozen=True, slots=True)
class Combination:
    """A strategy and a rule."""

    strategy: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.strategy}, {self.rule.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEffort:
    """The amount of work of every section."""

    n_prompts: int  # of greedy answers
    n_tokens: int  # of each answer
    n_contexts: int  # whose exact laws are computed
    most_branches: int  # of one enumeration
    n_enumerated: int  # longest draft of an enumerated block: every token multiplies the branches
    n_draws: int  # from each context, for each combination
    n_runs: int  # of the KV section
    n_steps: int  # of each run


FULL = AuditEffort(
    n_prompts=6, n_tokens=16, n_contexts=10, most_branches=1000, n_enumerated=3, n_draws=300, n_runs=6, n_steps=12
)
QUICK = AuditEffort(
    n_prompts=1, n_tokens=8, n_contexts=4, most_branches=300, n_enumerated=2, n_draws=100, n_runs=1, n_steps=6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the program that decide on the output; the self-test replaces one by a broken one."""

    engine: type[Engine] = Engine
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    choose: Callable[[int], Chooser] = RandomChooser
    target: Callable[[LanguageModel], LanguageModel] = lambda model: model
    draft: Callable[[LanguageModel], LanguageModel] = lambda model: model
    constraint: Callable[[Constraint], Constraint] = lambda constraint: constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSubject:
    """The pair and the settings that are audited."""

    target: LanguageModel
    draft: LanguageModel | None
    prompts: Sequence[AuditPrompt]
    params: SamplingParams
    strategies: tuple[str, ...]
    rules: tuple[Rule, ...]
    drafting: DraftSettings  # `length` is the longest draft of greedy answers
    seed: int
    piece: Callable[[int], bytes]  # the text of a token
    constraint: Callable[[], Constraint] | None = None  # of a new answer in a format; None: no formats are audited
    cancel: Cancel = field(default_factory=Cancel)
    parts: Parts = field(default_factory=Parts)

    @property
    def combinations(self) -> list[Combination]:
        """Every strategy with every rule; plain decoding has no rule."""
        return [
            Combination(strategy, rule)
            for strategy in self.strategies
            for rule in (self.rules if strategy != "none" else self.rules[:1])
        ]

    def drafter(self, strategy: str, draft: LanguageModel | None, n_max: int) -> Drafter:
        # It drafts in the first step, which elsewhere has no draft: the law of that step is enumerated. Two children a
        # node: the best tree of few nodes is a chain.
        settings = replace(
            self.drafting,
            length=DraftLength(n_max),
            vocab_size=self.target.vocab_size,
            n_leaves=self.target.caps.max_leaves,
            tree=FixedShape([(node - 2) // 2 for node in range(n_max)]),
            n_at_once=sys.maxsize,
        )
        return self.parts.drafter(REGISTRY[strategy].make(draft, settings))

    def allowed_after(self, said: Sequence[int]) -> Allowed:
        """What may follow `said` in an answer in the format, read token by token from its beginning."""
        assert self.constraint is not None
        constraint = self.constraint()
        for token in said:
            constraint.advance((token,))
        return constraint.allowed(())

    def require_going(self) -> None:
        """Raises Interrupted if `cancel` is set."""
        if self.cancel.is_set():
            raise Interrupted("the audit was stopped")


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A text in tokens that both models know."""

    name: str
    tokens: tuple[int, ...]
    said: tuple[int, ...] | None = (
        None  # the part of `tokens` that belongs to an answer in the format; None = free text
    )


class Watching:
    """A drafter that passes every verification to `see`."""

    def __init__(self, drafter: Drafter, see: Callable[[Observation], None]) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.wants = drafter.wants
        self.models = models_of(drafter)
        self.report = report_of(drafter)
        self._see = see

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        self.drafter.begin(tokens, features)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        return self.drafter.propose(tokens, limit, params, choose)

    def observe(self, seen: Observation) -> None:
        self._see(seen)
        self.drafter.observe(seen)

    def close(self) -> None:
        self.drafter.close()
