"""Recorded answers, generated again by models that only count their passes: the cost of any setting on any machine.

Engine, drafters and controller are the program's own; only target and draft are stand-ins. The target emits the
recorded answer. The draft proposes the same token if the recorded one would be accepted, else another one, with the
recorded confidence. A pass over n rows costs what the machine's profile says.

Above temperature 0 the recorded chance of acceptance, sum of min(p, q), is drawn for every token, in several rounds. A
looked-up token is accepted if it is the token of the answer, as for a point mass. Block verification, which accepts a
little more, is left out there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import Finished
from specllama.core.gain import Cost, unmeasured
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Caps, LanguageModel
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import PROBE_TOKENS, Controller, CostProfile
from specllama.drafters.length import TUNED, DraftLength
from specllama.llama.kernel_path import KernelPath
from specllama.pairs.profile import ClassFigures, Profile

GREEDY = SamplingParams(temperature=0.0)
FIXED = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15)
LOOKUPS = (3, 7)
N_ROUNDS = 2  # draws of what is accepted, above temperature 0
MODEL, LOOKUP = "draft-simple", "lookup"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer, and the draft's acceptance and confidence at each of its tokens."""

    group: str  # the class of the prompt
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    acceptance: tuple[float, ...]  # one for every token at least
    confidence: tuple[float, ...]


class Reader:
    """A `LanguageModel` with fixed logits that counts its passes by rows.

    `said` is the model whose length is the position in the answer: after a probe, which reads only the end of the text,
    the draft's own length is not. `real` makes the same passes, for their time; its logits are not used.
    """

    end_tokens: frozenset[int] = frozenset()

    def __init__(self, rows: FloatArray, n_prompt: int, max_block: int, said: Reader | None = None,
                 real: LanguageModel | None = None) -> None:  # fmt: skip
        self.rows = rows  # (tokens of the answer, V)
        self.vocab_size = rows.shape[1]
        self.n_ctx = n_prompt + 2 * len(rows) + 64
        self.caps = Caps(max_block=max_block)
        self.length = 0
        self.passes: Counter[int] = Counter()
        self._n_prompt, self._said, self._n_fed, self._real = n_prompt, said, 0, real
        if real is not None:
            real.truncate(0)

    def feed(self, tokens: Sequence[int]) -> None:
        """Computed with the next block, as in `LlamaModel`."""
        self.length += len(tokens)
        self._n_fed += len(tokens)
        if self._real is not None:
            self._real.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self.length += len(tokens)
        if self._real is not None:
            self._real.eval(tokens)
        # The target's prompt does not count, the draft's does.
        self.passes[len(tokens) + (self._n_fed if self._said is not None else 0)] += 1
        self._n_fed = 0
        end = max(self.length, self._said.length if self._said is not None else 0) - self._n_prompt + 1
        places = np.arange(end - len(tokens), end)
        return self.rows[places.clip(0, len(self.rows) - 1)]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        if self._real is not None:
            self._real.truncate(self.length)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.length = length + len(path)
        if self._real is not None:
            self._real.keep(length, path)


def _rows(tokens: Sequence[int], confidence: Sequence[float], n_vocab: int) -> FloatArray:
    """Logits that give each token its confidence and the others equal shares.  (len(tokens), n_vocab)"""
    sure = np.clip(np.array(confidence), 2 / n_vocab, 1 - 1e-6)
    rows = np.repeat(np.log((1 - sure) / (n_vocab - 1))[:, None], n_vocab, axis=1)
    rows[np.arange(len(tokens)), list(tokens)] = np.log(sure)
    return rows.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Passes:
    """The number of passes of an answer, by rows."""

    target: Mapping[int, int]
    draft: Mapping[int, int]
    stats: SpecStats  # its times are those of real models, if they made the passes

    def cost(self, costs: CostProfile) -> float:
        """In T(1); plain decoding costs 1 a token."""
        verified = sum(times * costs.verify_cost(n) for n, times in self.target.items())
        return verified + sum(times * costs.draft_cost(n) for n, times in self.draft.items())


def accepted(recorded: Recorded, round_: int) -> list[bool]:
    """The tokens that the draft gets right in this round; at temperature 0 all rounds are equal."""
    rng = random.Random(round_)
    return [rng.random() < chance for chance in recorded.acceptance[: len(recorded.tokens)]]


def replay(
    recorded: Recorded, right: Sequence[bool], strategy: str, settings: DraftSettings,
    real: tuple[LanguageModel | None, LanguageModel | None] = (None, None), cost: Cost = unmeasured,
) -> Passes:  # fmt: skip
    """The passes of the answer, generated again with a strategy.

    `real`: a target and a draft that make them as well; `cost`: of the target's, for the gain.
    """
    ids = {token: i for i, token in enumerate(dict.fromkeys((*recorded.prompt, *recorded.tokens)))}
    n_vocab, wrong = len(ids) + 2, len(ids)
    prompt, said = [ids[token] for token in recorded.prompt], [ids[token] for token in recorded.tokens]
    drafted = [token if fits else wrong for token, fits in zip(said, right, strict=True)]
    target = Reader(_rows(said, [0.9] * len(said), n_vocab), len(prompt), TUNED + 1, real=real[0])
    draft = Reader(
        _rows(drafted, recorded.confidence[: len(said)], n_vocab), len(prompt), PROBE_TOKENS, target, real[1]
    )
    drafter = REGISTRY[strategy].make(draft if REGISTRY[strategy].needs_model else None, settings)
    engine = Engine(target, drafter, cost=cost)
    *events, last = engine.generate(prompt, GREEDY, RandomChooser(0), max_tokens=len(said))
    told = [token for event in events if (token := getattr(event, "token", None)) is not None]
    assert told == said, "the replay differs from the recorded answer"
    assert isinstance(last, Finished), "the engine's last event is always Finished"
    return Passes(target.passes, draft.passes, last.stats)


@dataclass(frozen=True, slots=True)
class Machine:
    """The costs of a machine, and the priors of its controller."""

    name: str
    costs: CostProfile
    prior: Prior = field(default_factory=Prior)
    warm_prior: Prior | None = None  # above temperature 0; None = the same

    def at(self, temperature: float) -> Machine:
        """With the prior for a temperature."""
        return replace(self, prior=self.warm_prior) if temperature > 0.0 and self.warm_prior else self

    @property
    def draft_can_pay(self) -> bool:
        """As in a profile: if not, the draft is not loaded."""
        known = ClassFigures("any", True, 1.0, 1.0, 0, 1.0)
        return Profile(made="", target_path=KernelPath(), draft_path=KernelPath(), step_s=1.0,
                       costs=self.costs, classes=(known,)).draft_can_pay  # fmt: skip

    @property
    def auto(self) -> str:
        """The strategy of `auto` here."""
        return "chain" if self.draft_can_pay else LOOKUP

    def settings(self) -> DraftSettings:
        """A fresh controller, as a tuned pair gets it."""
        policy = Controller(self.costs, calibration=Calibration(self.prior))
        return DraftSettings(length=DraftLength(TUNED), policy=policy)


@dataclass(frozen=True, slots=True)
class Found:
    """One class, temperature and machine; rates are tokens per T(1), so 1 is plain decoding."""

    group: str
    fixed: Mapping[str, float]  # by setting, plain among them
    model: float | None  # the controller with the draft model alone; None if the draft is not loaded
    auto: float  # the controller as `auto` has it
    worst: float  # answer, with `auto`

    @property
    def best(self) -> str:
        """The best fixed setting in hindsight, the first of equals."""
        return max(self.fixed, key=lambda name: self.fixed[name])

    @property
    def best_length(self) -> str:
        """The same among lengths of the model's drafts and plain decoding."""
        own = {name: rate for name, rate in self.fixed.items() if not name.startswith(LOOKUP)}
        return max(own, key=lambda name: own[name])

    @property
    def share(self) -> float:
        """`auto` over the best fixed setting."""
        return self.auto / self.fixed[self.best]

    @property
    def model_share(self) -> float | None:
        """The controller with the model alone over the best length."""
        return None if self.model is None else self.model / self.fixed[self.best_length]


class Replays:
    """Answers of one class at one temperature, replayed; fixed settings take the same passes on every machine."""

    def __init__(self, answers: Sequence[Recorded], n_rounds: int) -> None:
        self.answers = answers
        self.turns = [(each, accepted(each, round_)) for each in answers for round_ in range(n_rounds)]
        self.n_tokens = sum(len(each.tokens) for each, _ in self.turns)
        self._fixed: dict[str, list[Passes]] | None = None

    def fixed(self) -> dict[str, list[Passes]]:
        """The passes of every fixed setting."""
        if self._fixed is None:
            settings = [(MODEL, k) for k in FIXED] + [(LOOKUP, k) for k in LOOKUPS]
            self._fixed = {
                f"{LOOKUP} K = {k}" if name == LOOKUP else f"K = {k}":
                [replay(each, right, name, DraftSettings(length=DraftLength(k))) for each, right in self.turns]
                for name, k in settings
            }  # fmt: skip
        return self._fixed

    def controlled(self, here: Machine, strategy: str) -> tuple[float, float]:
        """(the controller's rate over all answers together, the worst answer's)."""
        rates, cost = [], 0.0
        for each, right in self.turns:
            spent = replay(each, right, strategy, here.settings()).cost(here.costs)
            rates.append(len(each.tokens) / spent)
            cost += spent
        return self.n_tokens / cost, min(rates)

    def on(self, here: Machine) -> Found:
        """The figures on one machine."""
        fixed = {"plain": 1.0}
        for name, passes in self.fixed().items():
            fixed[name] = self.n_tokens / sum(each.cost(here.costs) for each in passes)
        auto, worst = self.controlled(here, here.auto)
        model = self.controlled(here, MODEL)[0] if here.draft_can_pay else None
        return Found(self.answers[0].group, fixed, model, auto, worst)


def hopeless(recorded: Recorded, acceptance: float) -> Recorded:
    """The same answer with a made-up draft of this acceptance and the recorded confidence."""
    return replace(recorded, acceptance=(acceptance,) * len(recorded.tokens))


def bounds(costs: CostProfile, drafted: Sequence[int], c: float | None = None) -> dict[int, float]:
    """(k+1) / (k*c + T(k+1)) for every length: the highest gain, with all tokens accepted."""
    c = costs.draft_cost() if c is None else c
    return {k: (k + 1) / (k * c + costs.verify_cost(k + 1)) for k in drafted}
