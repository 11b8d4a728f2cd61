"""What the audit works with: the pair, the settings, the amount of work, and the parts that the self-test breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specllama.base.errors import Interrupted
from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel, Chooser, Draft, Drafter, DraftReport, LanguageModel, Observation, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength

PieceOf = Callable[[int], bytes]  # what a token shows


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to draft and one to accept."""

    strategy: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.strategy}, {self.rule.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEffort:
    """How much of everything."""

    n_prompts: int  # for greedy answers
    n_tokens: int  # of each
    n_contexts: int  # whose exact laws are computed
    most_branches: int  # of one enumeration
    n_enumerated: int  # longest draft of an enumerated block: branches multiply with every token
    n_draws: int  # from each context, for each combination
    n_runs: int  # with random accept and reject patterns
    n_steps: int  # of each


FULL = AuditEffort(
    n_prompts=6, n_tokens=16, n_contexts=10, most_branches=1000, n_enumerated=3, n_draws=300, n_runs=6, n_steps=12
)
QUICK = AuditEffort(
    n_prompts=1, n_tokens=8, n_contexts=4, most_branches=300, n_enumerated=2, n_draws=100, n_runs=1, n_steps=6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the program that decide what is emitted; the self-test puts a broken one in the place of one."""

    engine: type[Engine] = Engine
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    choose: Callable[[int], Chooser] = RandomChooser
    target: Callable[[LanguageModel], LanguageModel] = lambda model: model
    draft: Callable[[LanguageModel], LanguageModel] = lambda model: model


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSubject:
    """What is audited."""

    target: LanguageModel
    draft: LanguageModel | None
    prompts: Sequence[AuditPrompt]
    params: SamplingParams
    strategies: tuple[str, ...]
    rules: tuple[Rule, ...]
    drafting: DraftSettings  # n_max is the longest draft of greedy answers
    seed: int
    piece: PieceOf
    cancel: Cancel = field(default_factory=Cancel)
    parts: Parts = field(default_factory=Parts)

    @property
    def combinations(self) -> list[Combination]:
        """Every strategy under every rule; plain decoding knows no rule."""
        return [
            Combination(strategy, rule)
            for strategy in self.strategies
            for rule in (self.rules if strategy != "none" else self.rules[:1])
        ]

    def drafter(self, strategy: str, draft: LanguageModel | None, n_max: int) -> Drafter:
        """The strategy at work for this target."""
        # Drafting from the first step on, which elsewhere goes without a draft: it is the one whose law is enumerated.
        settings = replace(
            self.drafting, length=DraftLength(n_max), vocab_size=self.target.vocab_size, n_at_once=sys.maxsize
        )
        return self.parts.drafter(REGISTRY[strategy].make(draft, settings))

    def require_going(self) -> None:
        """Raises Interrupted where somebody asked to stop."""
        if self.cancel.is_set():
            raise Interrupted("the audit was stopped")


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt in tokens that both models know."""

    name: str
    tokens: tuple[int, ...]


class Watching:
    """A drafter that lets somebody see what was verified."""

    def __init__(self, drafter: Drafter, see: Callable[[Observation], None]) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.wants = drafter.wants
        self.models = drafter.models
        self._see = see

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        self.drafter.begin(tokens, features)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        return self.drafter.propose(tokens, limit, params, choose)

    def report(self) -> DraftReport:
        return self.drafter.report()

    def observe(self, seen: Observation) -> None:
        self._see(seen)
        self.drafter.observe(seen)

    def close(self) -> None:
        self.drafter.close()
