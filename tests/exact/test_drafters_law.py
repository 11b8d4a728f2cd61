"""Lookup, chain and every planner in the whole engine: the law of the answer, by enumeration, is plain decoding's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specllama.base.errors import AllForbidden
from specllama.core.events import Notice
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Chooser, Drafter, DraftPlan, DraftPolicy, Observation, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters import controller as tuning
from specllama.drafters.chain import ChainDrafter
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import DraftLength
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import FORBIDDEN, PREFILL_AT_ONCE, ModelDrafter
from specllama.drafters.shape import FixedShape, Situation, TreePolicy
from specllama.drafters.tree import TreeDrafter
from specllama.drafters.tree_controller import TreeController
from tests.enumeration import law_of
from tests.exact.harness import GREEDY, PLAIN, Pair, Rig, assert_same_law, params_of, random_pair
from tests.exact.reference import Answer, History
from tests.exact.translating import FIRST, WatchedDraft
from tests.fakes import FakeModel, RandomTable
from tests.marks import slow

# A text that repeats itself, so that lookups draft from the first step on.
PROMPT = (0, 1, 1, 0, 1, 1, 0)

SAMPLERS = {
    "plain": PLAIN,
    "filters": params_of(temperature=0.8, top_k=2, top_p=0.9, min_p=0.05),
    "penalty": params_of(repeat_penalty=1.6, repeat_last_n=3),
    "greedy": GREEDY,
}

CHEAP = CostProfile(verify=((1, 1.0), (2, 1.05), (8, 1.2)), draft=((1, 0.02), (8, 0.03)))
JUMPY = CostProfile(verify=((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (8, 2.3)), draft=((1, 0.1), (8, 0.3)))
DEAR = CostProfile(verify=((1, 1.0), (2, 1.9), (8, 9.0)), draft=((1, 0.9), (8, 5.0)))
COSTS = {"cheap": CHEAP, "jumpy": JUMPY, "dear": DEAR}


class Moody:
    """A planner with random answers. They also depend on what was accepted, as those of a learning planner do."""

    def __init__(self, seed: int) -> None:
        self.seen: list[object] = [seed]

    def _die(self, n: int) -> int:
        die = random.Random(repr(self.seen)).randrange(n)
        self.seen.append(die)
        return die

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
        n_given = self._die(min(len(offer), limit) + 1)
        n_drawn = 0 if lag is None else self._die(limit - n_given + 1)
        return DraftPlan(n_given, n_drawn, probe=(0, 0, 2, 9)[self._die(4)])

    def plan_tree(self, at: Situation) -> DraftPlan:
        plan = self.plan(at.limit, offer=[chance for chance, _ in at.offer], lag=at.lag, depth=at.depth)
        return replace(plan, n_drawn=min(plan.n_drawn, 3))

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        return [node for node in nodes if self._die(4) > 0][::-1]

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        return self._die(3) > 0

    def look(self, depth: int) -> bool:
        return self._die(4) > 0

    def go_on(self, depth: int, confidence: float) -> bool:
        return self._die(4) > 0

    def learn(self, confidence: float, acceptance: float) -> None:
        assert 0.0 <= acceptance <= 1.0
        assert 0.0 < confidence <= 1.0
        self.seen.append(round(acceptance, 6))

    def observe(self, seen: Observation) -> None:
        self.seen.append((seen.verdict.path, seen.verdict.next_token))


def lookup_rig(pair: Pair, policy: DraftPolicy | None) -> Rig:
    target = FakeModel(pair.target, pair.n_vocab, end_tokens=pair.end_tokens)
    return Rig(target, None, LookupDrafter(n_max=pair.n_max, p_min=0.1, policy=policy), rule=pair.rule)


def model_rig(pair: Pair, policy: DraftPolicy | None, *, chain: bool) -> Rig:
    assert pair.draft is not None
    target = FakeModel(pair.target, pair.n_vocab, end_tokens=pair.end_tokens)
    n_draft_vocab = pair.n_draft_vocab or pair.n_vocab
    draft = FakeModel(pair.draft, n_draft_vocab, pair.n_draft_ctx, pair.end_tokens)
    drafter: Drafter
    drafter = model = ModelDrafter(draft, n_max=pair.n_max, vocab_size=pair.n_vocab, policy=policy)
    if chain:
        drafter = ChainDrafter(model, LookupDrafter(n_max=pair.n_max))
    return Rig(target, draft, drafter, rule=pair.rule)


def translated_rig(pair: Pair, policy: DraftPolicy | None, *, chain: bool = False, first: History = ()) -> Rig:
    """A draft with other tokens: it lacks some of the target's, and spells some with several of its own."""
    target = FakeModel(pair.target, pair.n_vocab, end_tokens=pair.end_tokens)
    n_ctx = pair.n_draft_ctx
    draft = WatchedDraft(pair.n_vocab, n_ctx=n_ctx, end_tokens=pair.end_tokens, first=first)
    # Drafting from the first step on: the answers are short.
    settings = DraftSettings(
        length=DraftLength(pair.n_max), vocab_size=pair.n_vocab, policy=policy, n_at_once=PREFILL_AT_ONCE
    )
    return Rig(target, draft, REGISTRY["chain" if chain else "draft-tli"].make(draft, settings), rule=pair.rule)


def tree_rig(pair: Pair, policy: DraftPolicy | None, *, tli: bool = False) -> Rig:
    """A model and lookups in one tree: a fixed one, or what `policy` or its kin for trees decides."""
    assert pair.draft is not None
    target = FakeModel(pair.target, pair.n_vocab, end_tokens=pair.end_tokens)
    draft: FakeModel | WatchedDraft
    if tli:
        draft = WatchedDraft(pair.n_vocab, n_ctx=pair.n_draft_ctx, end_tokens=pair.end_tokens, max_leaves=32)
    else:
        draft = FakeModel(pair.draft, pair.n_draft_vocab or pair.n_vocab, pair.n_draft_ctx, pair.end_tokens)
    shape: TreePolicy = FixedShape((-1, -1, 0, 1))
    if isinstance(policy, Moody):
        shape = policy
    elif isinstance(policy, Controller):
        shape = TreeController(policy.costs)
    lookup = LookupDrafter(n_max=pair.n_max)
    drafter = TreeDrafter(draft, shape, lookup=lookup, n_leaves=32, vocab_size=pair.n_vocab)
    return Rig(target, draft, drafter, rule=pair.rule)


DRAFTERS: dict[str, Callable[[Pair, DraftPolicy | None], Rig]] = {
    "lookup": lookup_rig,
    "draft-simple": lambda pair, policy: model_rig(pair, policy, chain=False),
    "chain": lambda pair, policy: model_rig(pair, policy, chain=True),
    "draft-tli": translated_rig,
    "tree": tree_rig,
    "tree-tli": lambda pair, policy: tree_rig(pair, policy, tli=True),
    "chain-tli": lambda pair, policy: translated_rig(pair, policy, chain=True, first=FIRST),
}


def engine_law(
    make: Callable[[], Rig], params: SamplingParams, n_tokens: int, prompt: History = PROMPT
) -> dict[Answer, float]:
    return law_of(lambda choose: make().answer(prompt, params, choose, n_tokens))


@pytest.mark.parametrize("rule", [slow(Rule.TOKEN), Rule.BLOCK, slow(Rule.MATCH)])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_without_a_planner_the_answer_follows_the_targets_law(name: str, sampler: str, rule: Rule) -> None:
    """A looked-up token judged by a dense law, or a drawn one as a point mass, anywhere in a mixed chain."""
    # Matching draws at every row, so its branches multiply: two tokens in the vocabulary are enough there.
    for n_vocab, n_max, n_tokens in ((2 if rule is Rule.MATCH else 3, 2, 3), (2, 3, 4)):
        pair = random_pair(41, n_vocab=n_vocab, n_max=n_max, rule=rule)
        params = SAMPLERS[sampler]
        found = engine_law(lambda pair=pair: DRAFTERS[name](pair, None), params, n_tokens)
        assert_same_law(found, pair.plain_law(params, n_tokens, prompt=PROMPT))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_answer_follows_the_targets_law_under_any_plan(name: str, seed: int) -> None:
    """A probe that leaves tokens in a cache, a pause that skips a token, a plan that mixes sources wrongly."""
    rule = list(Rule)[seed % 3]
    params = list(SAMPLERS.values())[seed % 4]
    pair = random_pair(50 + seed, n_vocab=2, n_max=3, rule=rule)
    found = engine_law(lambda: DRAFTERS[name](pair, Moody(seed)), params, 4)
    assert_same_law(found, pair.plain_law(params, 4, prompt=PROMPT))


@pytest.mark.parametrize("costs", ["cheap", slow("jumpy"), slow("dear")])
@pytest.mark.parametrize("rule", [slow(Rule.TOKEN), Rule.BLOCK])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_controller_changes_nothing_but_speed(
    name: str, rule: Rule, costs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length, a pause or a probe that depends on the token it decides about."""
    for gap in ("FIRST_GAP", "DOUBTFUL_GAP"):  # probes within four tokens
        monkeypatch.setattr(tuning, gap, 1)
    pair = random_pair(61, n_vocab=2, n_max=3, rule=rule)
    for params in (PLAIN, SAMPLERS["penalty"]):
        found = engine_law(lambda: DRAFTERS[name](pair, Controller(COSTS[costs])), params, 4)
        assert_same_law(found, pair.plain_law(params, 4, prompt=PROMPT))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_controller_that_learned_from_other_answers_changes_nothing_but_speed(name: str) -> None:
    """A bias by state that is carried from answer to answer."""
    pair = random_pair(62, n_vocab=2, n_max=3)

    def second(choose: Chooser) -> Answer:
        rig = DRAFTERS[name](pair, Controller(CHEAP))
        first, _ = rig.answer(PROMPT, PLAIN, choose, 2)
        return rig.answer((*PROMPT, *first, 1), PLAIN, choose, 3)

    expected: dict[Answer, float] = {}
    for (first, _), weight in pair.plain_law(PLAIN, 2, prompt=PROMPT).items():
        for answer, more in pair.plain_law(PLAIN, 3, prompt=(*PROMPT, *first, 1)).items():
            expected[answer] = expected.get(answer, 0.0) + weight * more
    assert_same_law(law_of(second), expected)


@pytest.mark.parametrize("ends", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("name", DRAFTERS)
def test_end_tokens_that_are_looked_up_end_the_answer(name: str, ends: set[int]) -> None:
    """Lookups propose the end tokens of earlier turns, with the text after them."""
    pair = random_pair(63, n_max=3, end_tokens=frozenset(ends))
    found = engine_law(lambda: DRAFTERS[name](pair, Moody(3)), PLAIN, 3)
    assert_same_law(found, pair.plain_law(PLAIN, 3, prompt=PROMPT))


@pytest.mark.parametrize("n_draft_vocab", [1, 2])
def test_a_looked_up_token_that_the_draft_does_not_know_is_not_fed_to_it(n_draft_vocab: int) -> None:
    """An id outside the draft's vocabulary aborts inside llama.cpp."""
    prompt = (1, 2, 0, 1, 2, 0, 1)
    pair = random_pair(64, n_max=3, n_draft_vocab=n_draft_vocab)
    found = engine_law(lambda: model_rig(pair, None, chain=True), PLAIN, 3, prompt)
    assert_same_law(found, pair.plain_law(PLAIN, 3, prompt=prompt))


@pytest.mark.parametrize("n_ctx", [n if n % 4 == 1 else slow(n) for n in range(9, 18)])
def test_a_draft_that_spells_runs_full_earlier_and_the_answer_goes_on(n_ctx: int) -> None:
    """Cells counted in the target's tokens: an error in the middle of an answer."""
    pair = random_pair(67, n_max=3, n_draft_ctx=n_ctx)
    for make in (lambda: translated_rig(pair, None), lambda: translated_rig(pair, Moody(5), chain=True, first=FIRST)):
        found = engine_law(make, PLAIN, 3)
        assert_same_law(found, pair.plain_law(PLAIN, 3, prompt=PROMPT))


@pytest.mark.parametrize("room", range(-1, 4))
def test_a_chain_in_a_draft_context_that_runs_full_goes_on_with_lookups(room: int) -> None:
    """A draft context smaller than the conversation, whose cells looked-up tokens also take."""
    pair = random_pair(65, n_vocab=2, n_max=3, n_draft_ctx=len(PROMPT) + room)
    for policy in (lambda: None, lambda: Moody(5)):
        found = engine_law(lambda policy=policy: model_rig(pair, policy(), chain=True), PLAIN, 4)
        assert_same_law(found, pair.plain_law(PLAIN, 4, prompt=PROMPT))


def forbidden_rig(strategy: str | None) -> tuple[Rig, SamplingParams]:
    """A pair and a logit bias that forbids every token of the draft, which knows 3 of 5."""
    target = FakeModel(RandomTable(5, 5), 5)
    params = params_of(logit_bias=dict.fromkeys(range(3), -math.inf))
    if strategy is None:
        return Rig(target, None, None), params
    draft = FakeModel(RandomTable(3, 6), 3)
    settings = DraftSettings(length=DraftLength(2), vocab_size=5, n_at_once=100)
    return Rig(target, draft, REGISTRY[strategy].make(draft, settings)), params


@pytest.mark.parametrize("strategy", ["draft-simple", "chain"])
def test_a_bias_that_forbids_all_of_the_drafts_tokens_ends_the_drafting_and_not_the_answer(strategy: str) -> None:
    """Prevents: an error in an answer that plain decoding gives, a useless pass at every step, or another law."""
    rig, params = forbidden_rig(strategy)
    tokens, reason = rig.answer(PROMPT, params, RandomChooser(3), 12)
    assert reason == "length"
    assert set(tokens) <= {3, 4}
    notices = [event.text for event in rig.events if isinstance(event, Notice)]
    assert notices.count(FORBIDDEN) == 1
    assert rig.draft is not None
    assert rig.draft.length <= len(PROMPT)
    for again, allowed in ((PLAIN, True), (params, False)):
        rig.answer(PROMPT, again, RandomChooser(3), 6)
        assert any(step.drafted for step in rig.steps) == allowed, "the next answer has a bias of its own"
        assert [event.text for event in rig.events if isinstance(event, Notice)] == [FORBIDDEN] * (not allowed)
    plain, found = (
        law_of(lambda choose, name=name: forbidden_rig(name)[0].answer(PROMPT, params, choose, 3))
        for name in (None, strategy)
    )
    assert_same_law(found, plain)


def test_a_bias_that_forbids_all_of_the_targets_tokens_is_an_error() -> None:
    """Prevents: a swallowed error, and an answer of nothing."""
    params = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(5), -math.inf))
    with pytest.raises(AllForbidden):
        forbidden_rig("draft-simple")[0].answer((0, 1), params, RandomChooser(0), 3)
