"""An engine over fakes. Every run checks the invariants of docs/design.md after every step and at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from specllama.audit.parts import Parts
from specllama.core.constraint import Constraint
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, StepEvent, TokenEvent
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Caps, Chooser, Drafter, LanguageModel, Rule
from specllama.drafters.model import ModelDrafter
from specllama.drafters.shape import FixedShape
from specllama.drafters.tree import TreeDrafter
from tests.enumeration import law_of, tv
from tests.exact.reference import Answer, History, TokenLaw, answer_law, token_law
from tests.exact.translating import WatchedDraft
from tests.fakes import FakeModel, FakeStopper, RandomTable, Table


def params_of(**changes: object) -> SamplingParams:
    """The model's own law without filters, except for `changes`."""
    return SamplingParams(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **changes})  # type: ignore[arg-type]


PLAIN = params_of()
GREEDY = params_of(temperature=0.0)
REPEAT = params_of(repeat_penalty=1.7, repeat_last_n=2)  # tokens of a block change its own laws
PROMPT = (0, 1, 0)
N_VOCAB = 6  # of the pairs that run greedily


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The parts of a target and its draft; `rig` makes a new engine of them."""

    target: Table
    draft: Table | None
    n_vocab: int = 3
    n_draft_vocab: int | None = None  # None = the target's
    n_max: int = 2
    p_min: float = 0.0
    draft_temperature: float | None = None
    tree: tuple[int, ...] | None = None  # parents of a drafted tree; None = a chain of `n_max`
    end_tokens: frozenset[int] = frozenset()
    n_ctx: int = 64
    n_draft_ctx: int = 64
    max_block: int = 32
    rule: Rule = Rule.TOKEN
    parts: Parts = field(default_factory=Parts)  # broken ones, where a fault is seeded

    def rig(self) -> Rig:
        caps = Caps(max_block=self.max_block, tree=True, max_leaves=32)
        target = FakeModel(self.target, self.n_vocab, self.n_ctx, self.end_tokens, caps)
        if self.draft is None:
            return Rig(target, None, None, rule=self.rule)
        draft = FakeModel(self.draft, self.n_draft_vocab or self.n_vocab, self.n_draft_ctx, self.end_tokens)
        return Rig(target, draft, self.drafter_with(draft), rule=self.rule, parts=self.parts)

    def drafter_with(self, draft: LanguageModel) -> Drafter:
        model, temperature, n_vocab = self.parts.draft(draft), self.draft_temperature, self.n_vocab
        if self.tree is not None:
            shape = FixedShape(self.tree)
            return TreeDrafter(model, shape, n_leaves=32, temperature=temperature, vocab_size=n_vocab)
        return ModelDrafter(model, n_max=self.n_max, p_min=self.p_min, temperature=temperature, vocab_size=n_vocab)

    def law_at(self, params: SamplingParams) -> Callable[[History], TokenLaw]:
        """The law of the token after a history, by the reference alone."""
        return cache(lambda history: token_law(self.target(history).tolist(), history, params))

    def plain_law(
        self, params: SamplingParams, n_max: int, *, stops: Sequence[History] = (), prompt: History = PROMPT
    ) -> dict[Answer, float]:
        return answer_law(self.law_at(params), prompt, n_max, end_tokens=self.end_tokens, stops=stops)

    def engine_law(
        self, params: SamplingParams, max_tokens: int, *, stops: Sequence[History] = (), prompt: History = PROMPT
    ) -> dict[Answer, float]:
        """Every branch of the engine, each on a new rig."""
        return law_of(lambda choose: self.rig().answer(prompt, params, choose, max_tokens, stops=stops))


@dataclass
class Rig:
    """One engine over fakes. `events` are those of the run in progress or of the last one."""

    target: FakeModel
    draft: FakeModel | WatchedDraft | None
    drafter: Drafter | None
    rule: Rule = Rule.TOKEN
    parts: Parts = field(default_factory=Parts)
    events: list[Event] = field(default_factory=list)
    constraint: Callable[[], Constraint] | None = None  # a new one for every answer
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        parts, drafter = self.parts, self.drafter
        self.engine = parts.engine(parts.target(self.target), drafter and parts.drafter(drafter), rule=self.rule)

    @property
    def emitted(self) -> History:
        return tuple(event.token for event in self.events if isinstance(event, TokenEvent))

    @property
    def steps(self) -> list[StepEvent]:
        return [event for event in self.events if isinstance(event, StepEvent)]

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    def run(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        choose: Chooser,
        max_tokens: int,
        *,
        stops: Sequence[History] = (),
        cancel: Cancel | None = None,
    ) -> Iterator[Event]:
        self.events = []
        events = self.engine.generate(
            prompt,
            params,
            choose,
            max_tokens=max_tokens,
            stopper=FakeStopper(tuple(stops)) if stops else None,
            cancel=cancel,
            constraint=self.constraint and self.parts.constraint(self.constraint()),
        )
        try:
            for event in events:
                self.events.append(event)
                if isinstance(event, StepEvent):
                    self._check_step(prompt, event)
                yield event
        finally:
            events.close()
            self._check_rest(prompt)
        self._check_counters()

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        choose: Chooser,
        max_tokens: int,
        *,
        stops: Sequence[History] = (),
    ) -> Answer:
        for _ in self.run(prompt, params, choose, max_tokens, stops=stops):
            pass
        return self.emitted, self.finished.reason

    def _check_step(self, prompt: Sequence[int], step: StepEvent) -> None:
        """Invariants 1 and 2, and the arithmetic of one step."""
        tokens = (*prompt, *self.emitted)
        own = [event for event in self.events if isinstance(event, TokenEvent) and event.step == step.step]
        from_draft = tuple(event.token for event in own if event.origin == "draft")
        if len(own) == step.accepted + 1:  # else the answer ended within the block, and `finally` cuts the KV
            assert self.target.tokens == tokens[:-1], "between steps the target's KV holds tokens[:-1]"
        if self.draft is not None:
            held = self.draft.tokens
            assert held == tokens[: len(held)], "the draft's cache holds a prefix of what is committed"
        assert 0 <= step.accepted <= len(step.drafted)
        path, n_rejected = _path_and_rest(step)
        assert step.accepted == len(path)
        assert from_draft == tuple(step.drafted[node] for node in path)[: len(from_draft)], "a path is said in order"
        # All accepted tokens are emitted, except an accepted end token; then one more, unless the answer ended.
        assert step.accepted - 1 <= len(from_draft) <= step.accepted
        assert len(from_draft) <= len(own) <= step.accepted + 1
        if len(own) > len(from_draft):
            assert own[-1].origin in (("correction",) if n_rejected else ("bonus", "target"))

    def _check_rest(self, prompt: Sequence[int]) -> None:
        """After any end: the KV holds all yielded tokens but the last, or a part of the prompt."""
        tokens = (*prompt, *self.emitted)
        held = self.target.tokens
        if self.emitted:
            assert held == tokens[:-1]
        else:
            assert held == tokens[: len(held)]
            assert len(held) < len(tokens)

    def _check_counters(self) -> None:
        stats, steps = self.finished.stats, self.steps
        assert stats.n_emitted == len(self.emitted)
        assert stats.n_steps == len(steps)
        assert stats.n_drafted == sum(len(step.drafted) for step in steps)
        assert stats.n_accepted == sum(step.accepted for step in steps)
        assert stats.n_spec_steps == sum(bool(step.drafted) for step in steps)
        tokens = [event for event in self.events if isinstance(event, TokenEvent)]
        assert stats.n_from_draft == sum(event.origin == "draft" for event in tokens)
        assert stats.n_rejected == sum(_path_and_rest(step)[1] > 0 for step in steps)
        assert (sum(stats.drafted_at), sum(stats.accepted_at)) == (stats.n_drafted, stats.n_accepted)
        assert 0 <= stats.n_accepted <= stats.n_drafted
        assert (stats.acceptance_rate is None) == (stats.n_drafted == 0)


def _path_and_rest(step: StepEvent) -> tuple[tuple[int, ...], int]:
    """The accepted nodes, checked to be a line from the root, and how many children its end has."""
    parents = tuple(range(-1, len(step.drafted) - 1)) if step.parents is None else step.parents
    path = tuple(range(step.accepted)) if step.path is None else step.path
    assert [parents[node] for node in path] == [-1, *path][:-1]
    assert len(parents) == len(step.drafted)
    return path, parents.count(path[-1] if path else -1)


def random_pair(seed: int = 0, **changes: object) -> Pair:
    """Two unrelated random tables over the same small vocabulary, except for `changes`."""
    n_vocab = int(changes.get("n_vocab", 3))  # type: ignore[call-overload]
    tables = {
        "target": RandomTable(n_vocab, seed),
        "draft": RandomTable(int(changes.get("n_draft_vocab", n_vocab)), 1000 + seed),  # type: ignore[call-overload]
    }
    return Pair(**{**tables, **changes})  # type: ignore[arg-type]


class Certain:
    """A chooser for greedy runs: every question has one possible answer."""

    def flip(self, prob: float) -> bool:
        assert prob in (0.0, 1.0)
        return prob == 1.0

    def pick(self, law: object) -> int:
        (token,) = law.support().tolist()  # type: ignore[attr-defined]
        return int(token)


def agreeing(target: Table, n_vocab: int, seed: int, noise: float = 0.6) -> Table:
    """A draft that agrees with `target` often, not always."""
    other = RandomTable(n_vocab, seed, spread=noise)
    return lambda history: target(history) + other(history)


def good_pair(**changes: object) -> Pair:
    """Greedy runs of this pair accept about two thirds of what is drafted, and reject in every position."""
    target = RandomTable(N_VOCAB, 40)
    made = {"target": target, "draft": agreeing(target, N_VOCAB, 41), "n_vocab": N_VOCAB, "n_max": 3, **changes}
    return Pair(**made)  # type: ignore[arg-type]


def plain_greedy(table: Table, prompt: Sequence[int], n_tokens: int, params: SamplingParams = GREEDY) -> History:
    """The answer of plain greedy decoding, by the reference."""
    tokens = tuple(prompt)
    for _ in range(n_tokens):
        (token,) = token_law(table(tokens).tolist(), tokens, params)
        tokens = (*tokens, token)
    return tokens[len(prompt) :]


def assert_answers_like_new(rig: Rig, said: History) -> None:
    """The engine continues the conversation and begins another one as a new engine would."""
    going_on = (*PROMPT, *said)
    for prompt in (going_on, (*PROMPT, 5, 5), going_on, (3,)):
        tokens, _ = rig.answer(prompt, GREEDY, Certain(), 6)
        assert tokens == plain_greedy(rig.target.table, prompt, 6)


def without_reasons(law: dict[Answer, float]) -> dict[Answer, float]:
    """An answer that is left after its last token has another reason, or none."""
    merged: dict[Answer, float] = {}
    for (tokens, _), weight in law.items():
        merged[tokens, ""] = merged.get((tokens, ""), 0.0) + weight
    return merged


def assert_same_law(found: dict[Answer, float], expected: dict[Answer, float]) -> None:
    """The same answers are possible, with the same probabilities."""
    assert found.keys() <= expected.keys(), f"impossible answers: {sorted(found.keys() - expected.keys())[:5]}"
    assert tv(found, expected) < 1e-12
