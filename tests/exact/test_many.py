"""Requests side by side in one pool: the joint law of their answers is the product of the laws of each alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest

from specllama.batch.budget import RowBudget
from specllama.core.noise import SharedNoise
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, Drafter, DraftPolicy, LanguageModel, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import DraftLength
from specllama.drafters.tree_controller import TreeController
from tests.enumeration import law_of, tv
from tests.exact.harness import GREEDY, PLAIN, Pair, params_of, random_pair
from tests.exact.reference import Answer, History
from tests.fakes import FakeSlots, ScriptedDrafter, drawn_chain, random_laws
from tests.many import FakeMaker, MakeDrafter, answers, pool_of, request
from tests.marks import slow

PROMPTS = ((0, 1, 0), (1, 1))
Joint = tuple[Answer, ...]

# Drafting pays alone, and hardly beside others: so lengths depend on what the neighbour did.
COSTS = CostProfile(verify=((1, 1.0), (2, 1.1), (3, 1.5), (8, 4.0)), draft=((1, 0.02), (8, 0.03)))
SAMPLERS = {
    "plain": PLAIN,
    "filters": params_of(temperature=0.8, top_k=2, top_p=0.9, min_p=0.05),
    "penalty": params_of(repeat_penalty=1.6, repeat_last_n=3),
    "greedy": GREEDY,
}


@dataclass(frozen=True)
class Case:
    """A pair, how it drafts, and how its requests meet."""

    pair: Pair
    strategy: str = ""  # "" = `Pair.drafter_with`, without a budget
    n_tokens: tuple[int, ...] = (2, 2)
    prompts: tuple[History, ...] = PROMPTS
    order: tuple[int, ...] = (0, 1)  # in which the requests come
    n_slots: int = 2
    max_rows: int = 64
    max_outputs: int = 64

    def _drafter(self, draft: LanguageModel) -> tuple[Drafter, DraftPolicy | None]:
        if not self.strategy:
            return self.pair.drafter_with(draft), None
        kind = TreeController if self.strategy == "tree" else Controller
        policy = kind(COSTS, n_max=self.pair.n_max)
        settings = DraftSettings(
            length=DraftLength.auto(self.pair.n_max),
            policy=policy,
            n_leaves=4,
            n_at_once=9,
            vocab_size=self.pair.n_vocab,
        )
        return REGISTRY[self.strategy].make(draft, settings), policy

    def run(self, choose: Callable[[int], Chooser], params: SamplingParams, make: MakeDrafter | None = None) -> Joint:
        """The answers of one run of a new pool, in the order of the prompts. `choose`: of each request."""
        target = FakeSlots(
            self.pair.target, self.pair.n_vocab, self.n_slots, max_rows=self.max_rows, max_outputs=self.max_outputs
        )
        assert self.pair.draft is not None
        draft = FakeSlots(
            self.pair.draft, self.pair.n_vocab, self.n_slots, max_rows=self.max_rows, max_outputs=self.max_outputs
        )
        maker = FakeMaker(make or self._drafter, self.pair.rule, RowBudget() if self.strategy else None)
        requests = [
            request(i, self.prompts[i], choose(i), params=params, max_tokens=self.n_tokens[i]) for i in self.order
        ]
        found = answers(pool_of(target, draft, maker), requests)
        return tuple(found[i] for i in sorted(self.order))

    def joint(self, params: SamplingParams) -> dict[Joint, float]:
        return law_of(lambda choose: self.run(lambda _: choose, params))

    def alone(self, params: SamplingParams) -> dict[Joint, float]:
        """The product of the laws of plain decoding, by the reference."""
        laws = [
            self.pair.plain_law(params, self.n_tokens[i], prompt=self.prompts[i]).items() for i in sorted(self.order)
        ]
        found: dict[Joint, float] = {}
        for each in product(*laws):
            weight = 1.0
            for _, share in each:
                weight *= share
            found[tuple(answer for answer, _ in each)] = weight
        return found


def assert_independent(case: Case, params: SamplingParams = PLAIN) -> None:
    found, expected = case.joint(params), case.alone(params)
    assert found.keys() <= expected.keys()
    assert tv(found, expected) < 1e-12


def pair(rule: Rule = Rule.TOKEN, **changes: object) -> Pair:
    return random_pair(5, **{"n_vocab": 2, "n_max": 1, "rule": rule, **changes})


@pytest.mark.parametrize("shape", [{}, {"n_max": 2}, {"tree": (-1, -1)}], ids=["one", "chain", "tree"])
@pytest.mark.parametrize("rule", list(Rule))
def test_each_answer_has_its_own_law_beside_another(rule: Rule, shape: dict[str, object]) -> None:
    """Rows, draws or KV of one request that reach the other, under any rule, in chains and in trees."""
    assert_independent(Case(pair(rule, **shape)))


@pytest.mark.parametrize("sampler", ["plain", slow("filters"), slow("penalty"), "greedy"])
@pytest.mark.parametrize("strategy", ["draft-simple", "lookup", "chain", "tree"])
def test_every_strategy_is_exact_with_lengths_that_depend_on_the_past_of_a_neighbour(
    strategy: str, sampler: str
) -> None:
    """A length that depends on what is drawn in the same step."""
    prompts = ((0, 1, 0, 1, 0), (1, 1, 1))  # they repeat themselves, so that lookups draft
    assert_independent(Case(pair(n_max=2), strategy, (3, 3), prompts), SAMPLERS[sampler])


@pytest.mark.parametrize(
    "met",
    [
        {"order": (1, 0)},
        {"n_slots": 1},
        {"max_rows": 2},
        {"max_rows": 3, "order": (1, 0)},
        {"max_outputs": 2},
        {"n_slots": 2, "n_tokens": (1, 2, 1), "prompts": (*PROMPTS, (1,)), "order": (2, 0, 1)},
    ],
    ids=[
        "the other order",
        "one after the other",
        "a pass for each",
        "parts of prompts",
        "logits for one",
        "three in two slots",
    ],
)
def test_the_law_does_not_depend_on_how_requests_meet(met: dict[str, object]) -> None:
    """A law that depends on the order, the size of a pass, or the request that had the slot before."""
    for strategy in ("", "chain"):
        assert_independent(Case(pair(Rule.BLOCK, n_max=1), strategy, **met))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rule"), [("", Rule.BLOCK), ("tree", Rule.BLOCK), *(("chain", rule) for rule in Rule)]
)
def test_longer_answers_side_by_side(strategy: str, rule: Rule) -> None:
    """A fault that only a second step beside a neighbour's second step shows."""
    assert_independent(Case(pair(rule, n_max=2), strategy, n_tokens=(3, 3)))


def test_a_length_that_leaks_from_the_same_step_is_seen() -> None:
    """An enumeration that cannot tell: here a draft is dropped, after its draw, if the neighbour drew the same."""
    case, laws = Case(pair()), random_laws(2, 9)
    drawn: list[tuple[int, ...]] = []

    def leaks(tokens: History, limit: int, choose: Chooser) -> Draft:
        draft = drawn_chain(laws, 1)(tokens, limit, choose)
        drawn.append(draft.tokens)
        return Draft() if draft.tokens in drawn[-2:-1] else draft

    def run(choose: Chooser) -> Joint:
        drawn.clear()
        return case.run(lambda _: choose, PLAIN, lambda _: (ScriptedDrafter(leaks), None))

    assert tv(law_of(run), case.alone(PLAIN)) > 1e-3


def _noise(seed: int, i: int) -> Chooser:
    return SharedNoise(seed + i)


@pytest.mark.parametrize("strategy", ["chain", "tree"])
def test_one_seed_gives_one_text_at_any_number_of_slots(strategy: str) -> None:
    """Shared noise that depends on a slot, on the neighbours or on the order of the draws."""
    case = Case(random_pair(6, n_vocab=5, n_max=3), strategy, n_tokens=(6, 9, 7), prompts=(*PROMPTS, (3, 3, 3)))
    for seed in range(4):
        found = {
            n_slots: replace(case, n_slots=n_slots, order=order).run(partial(_noise, seed), PLAIN)
            for n_slots, order in ((1, (0, 1, 2)), (2, (0, 1, 2)), (3, (2, 0, 1)))
        }
        assert len(set(found.values())) == 1
