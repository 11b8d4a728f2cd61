"""`TreeDrafter`: the law of its answers by enumeration, its laws, its passes and its limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from unittest.mock import ANY

import numpy as np
import pytest

from specllama.audit.law import block_law, distance
from specllama.core import sampling
from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.events import Finished, Notice, StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Caps, Draft, DraftPlan, Observation, Rule, Verdict
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import BROKEN, FORBIDDEN, ModelDrafter
from specllama.drafters.shape import FixedShape, Situation
from specllama.drafters.tree import CHAINS_ONLY, TreeDrafter
from tests.enumeration import as_dict
from tests.exact.harness import GREEDY, N_VOCAB, PLAIN, REPEAT, Rig, agreeing, params_of, plain_greedy
from tests.exact.reference import History, token_law
from tests.fakes import FakeModel, RandomTable, ScriptedDrafter, Table, replaced, table_of
from tests.marks import slow

SHAPES = {
    "root only": (-1, -1),
    "one path": (-1, 0, 1),
    "binary": (-1, -1, 0, 0),
    "ragged": (-1, -1, 1, 2),
    "wide": (-1, -1, -1, -1, 0),  # more children than tokens
}
PROMPT = (0, 2, 2, 2, 1, 1, 2, 2)  # 2 2 was followed by 1 and by 2: the trie has two branches
TOKENS = (3, 1, 4, 1, 5)


class Taking(FixedShape):
    """Takes the first `n_given` nodes of the offer, whatever their chance, and then draws the shape."""

    def __init__(self, parents: Sequence[int], n_given: int = 0) -> None:
        super().__init__(parents)
        self.n_given = n_given
        self.offers: list[Sequence[tuple[float, int]]] = []

    def plan_tree(self, at: Situation) -> DraftPlan:
        self.offers.append(at.offer)
        return super().plan_tree(replace(at, offer=[(1.0, parent) for _, parent in at.offer[: self.n_given]]))


def model(n_vocab: int = 30, seed: int = 50, table: Table | None = None, **settings: object) -> FakeModel:
    return FakeModel(table or RandomTable(n_vocab, seed), n_vocab, **settings)  # type: ignore[arg-type]


def tree_of(fake: FakeModel, parents: Sequence[int], n_given: int = 0, **settings: object) -> TreeDrafter:
    lookup = LookupDrafter(n_max=16) if n_given else None
    return TreeDrafter(fake, Taking(parents, n_given), lookup=lookup, **{"n_leaves": 32, "n_at_once": 99, **settings})  # type: ignore[arg-type]


# --- the law ---------------------------------------------------------------------------------------------------------

SOURCES = {
    "sampled": (0, None),
    "likeliest": (0, 0.0),  # at a draft temperature of 0: siblings chosen without chance
    "looked up": (9, None),  # nothing is left for the model
    "hybrid": (1, None),
    "hybrid of two": (2, None),
    "hybrid, likeliest": (1, 0.0),
}
SAMPLERS = {
    "plain": PLAIN,
    "filters": params_of(temperature=0.8, top_k=2, top_p=0.9, min_p=0.05),
    "penalties": params_of(repeat_penalty=1.6, presence_penalty=0.3, repeat_last_n=3),
    "greedy": GREEDY,
}


def step_distance(source: str, shape: str, rule: Rule, params: SamplingParams) -> float:
    """How far the law of one step with a tree is from the target's own."""
    n_given, temperature = SOURCES[source]
    target = RandomTable(3, 80)
    drafter = tree_of(model(3, 81), SHAPES[shape], n_given, temperature=temperature)
    engine = Engine(model(3, table=target), drafter, rule=rule)
    n_nodes = len(SHAPES[shape])
    found, _, _ = block_law(engine, PROMPT, params, n_max=n_nodes, cancel=Cancel(), most=10**6)

    @cache
    def law_at(block: History) -> dict[int, float]:
        return token_law(target((*PROMPT, *block)).tolist(), (*PROMPT, *block), params)

    found_distance = distance(found, law_at)
    return max(found_distance.error, found_distance.tv)


CASES = [*product(SOURCES, SHAPES, Rule, SAMPLERS)]


@pytest.mark.parametrize(
    ("source", "shape", "rule", "sampler"),
    [case if case[3] == "filters" or (case[1] == "binary" and case[0] != "sampled") else slow(*case) for case in CASES],
)
def test_a_step_follows_the_targets_law(source: str, shape: str, rule: Rule, sampler: str) -> None:
    """A law of a sibling, of a row or of a penalty that belongs to another node, from any source in any shape."""
    assert step_distance(source, shape, rule, SAMPLERS[sampler]) < 1e-12


def test_the_trees_of_these_tests_have_branches_from_every_source() -> None:
    """Cases that all draft chains: nothing above would be tested."""
    drafter = tree_of(model(3), SHAPES["binary"], 2)
    drafter.begin(PROMPT)
    draft = drafter.propose(PROMPT, 9, PLAIN, RandomChooser(0))
    assert draft.parents is not None
    assert draft.probs is not None
    assert {len(law.support()) for law in draft.probs} == {1, 3}, "looked up and drawn"
    assert draft.parents.count(-1) > 1


# --- one path is a chain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("params", [PLAIN, REPEAT, GREEDY])
def test_a_tree_of_one_path_is_a_chain(params: SamplingParams, rule: Rule) -> None:
    """Trees that make chains dearer or other: more calls, other draws, other events."""
    target = RandomTable(N_VOCAB, 40)

    def run(drafter: ModelDrafter | TreeDrafter, fake: FakeModel) -> tuple[list[object], list[object]]:
        engine = Engine(model(N_VOCAB, table=target, n_ctx=400), drafter, rule=rule)
        events = list(engine.generate((1, 2, 3), params, RandomChooser(3), max_tokens=60))
        steps = [event for event in events if isinstance(event, StepEvent)]
        said = [(each.drafted, each.accepted, each.parents, each.path, each.rejected, each.n_rows) for each in steps]
        assert isinstance(events[-1], Finished)
        stats = events[-1].stats
        return [*said, stats.drafted_at, stats.accepted_at, stats.n_rejected, stats.accepted_lengths], list(fake.calls)

    fakes = [FakeModel(agreeing(target, N_VOCAB, 41), N_VOCAB, n_ctx=400) for _ in range(2)]
    chain = run(ModelDrafter(fakes[0], n_max=4), fakes[0])
    tree = run(TreeDrafter(fakes[1], FixedShape((-1, 0, 1, 2)), n_leaves=32), fakes[1])
    assert tree == chain


# --- what is drawn ---------------------------------------------------------------------------------------------------


def lines_of(draft: Draft) -> list[History]:
    """The tokens from the root to every node."""
    lines: list[History] = []
    for token, parent in zip(draft.tokens, draft.parents or (), strict=True):
        lines.append((*(lines[parent] if parent >= 0 else ()), token))
    return lines


@pytest.mark.parametrize("params", [PLAIN, params_of(temperature=0.8, top_k=9, repeat_penalty=1.3, repeat_last_n=4)])
def test_q_of_a_family_is_the_law_before_any_sibling_was_taken_out(params: SamplingParams) -> None:
    """q renormalised twice, of a sibling's row, or blind to the path; a token drawn twice under one parent."""
    fake = model()
    draft = tree_of(fake, (-1, -1, 0, 0, 1, 2, 2)).propose(TOKENS, 9, params, RandomChooser(1))
    lines = lines_of(draft)
    assert len(set(lines)) == len(lines) == 7
    assert draft.probs is not None
    for line, law in zip(lines, draft.probs, strict=True):
        history = (*TOKENS, *line[:-1])
        assert as_dict(law) == pytest.approx(token_law(fake.table(history).tolist(), history, params))


def test_siblings_are_drawn_from_what_the_earlier_ones_left() -> None:
    """A draw with replacement, or from a law that is not the one the verifier reckons with."""

    class Recording(RandomChooser):
        def __init__(self) -> None:
            super().__init__(2)
            self.laws: list[Distribution] = []

        def pick(self, law: Distribution) -> int:
            self.laws.append(law)
            return super().pick(law)

    choose = Recording()
    draft = tree_of(model(), (-1, -1, -1)).propose(TOKENS, 3, PLAIN, choose)
    assert draft.probs is not None
    for i, law in enumerate(choose.laws):
        q = draft.probs[i]
        for token in draft.tokens[:i]:
            q = q.without(token)
        assert as_dict(law) == pytest.approx(as_dict(q))


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(0.0, None), (1.0, 0.0)])
def test_a_greedy_draft_has_the_likeliest_children_as_points(
    temperature: float, draft_temperature: float | None
) -> None:
    """Children in another order than that of the logits, a child cut by a filter, or a dense q beside them."""
    fake = model()
    params = SamplingParams(temperature=temperature, top_k=2, min_p=0.9)
    draft = tree_of(fake, (-1, -1, -1, 0, 1, 1), temperature=draft_temperature).propose(
        TOKENS, 9, params, RandomChooser(0)
    )
    assert draft.probs is None
    assert draft.parents == (-1, 0, -1, 2, 2, -1), "depth first"
    below: dict[History, list[int]] = {}
    for line in lines_of(draft):
        below.setdefault(line[:-1], []).append(line[-1])
    for line, tokens in below.items():
        order = np.argsort(-fake.table((*TOKENS, *line)), kind="stable")
        assert tokens == order[: len(tokens)].tolist()


def test_ties_between_siblings_go_to_the_lowest_ids() -> None:
    """A text that depends on the order in which a library sorts."""
    fake = model(6, table=lambda history: np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.5], np.float32))
    assert tree_of(fake, (-1, -1, -1, -1)).propose(TOKENS, 9, GREEDY, RandomChooser(0)).tokens == (1, 2, 4, 5)


def test_a_looked_up_child_comes_first_and_is_not_drawn_again() -> None:
    """Two equal tokens under one parent: the verifier refuses them."""
    for seed in range(20):
        drafter = tree_of(model(3, seed), (-1, -1, -1, -1, 2, 0), 4)
        drafter.begin(PROMPT)
        draft = drafter.propose(PROMPT, 9, PLAIN, RandomChooser(seed))
        lines = lines_of(draft)
        assert len(set(lines)) == len(lines)
        roots = [node for node, parent in enumerate(draft.parents or ()) if parent == -1]
        assert draft.probs is not None
        assert [len(draft.probs[node].support()) for node in roots] == [1, 1, 3]


def test_a_law_with_fewer_tokens_than_children_ends_the_family() -> None:
    """A token drawn from nothing, or the same one again."""
    for params in (params_of(top_k=2), PLAIN):
        draft = tree_of(model(4), (-1,) * 9).propose((3, 1, 2), 9, params, RandomChooser(0))
        assert len(draft.tokens) == len(set(draft.tokens)) == (2 if params.top_k else 4)
    drafter = tree_of(
        model(4, table=lambda history: np.array([9.0, -np.inf, -np.inf, -np.inf], np.float32)), (-1, -1), 1
    )
    drafter.begin((0, 0))
    assert drafter.propose((0, 0), 9, PLAIN, RandomChooser(0)).tokens == (0,), "the model knows only what was looked up"


# --- when it is decided ----------------------------------------------------------------------------------------------


class Asked(FixedShape):
    """Records its questions, and how many tokens were drawn before them; refuses the children of `barren` nodes."""

    def __init__(self, parents: Sequence[int], choose: Counting, barren: Sequence[int] = ()) -> None:
        super().__init__(parents)
        self._choose, self._barren = choose, barren
        self.asked: list[tuple[int, float, bool, int]] = []
        self.expanded: list[tuple[int, ...]] = []
        self.learned: list[tuple[float, float]] = []

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        self.expanded.append(tuple(super().expand(nodes)))
        return self.expanded[-1]

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        allowed = parent not in self._barren and super().go_on_tree(parent, confidence)
        self.asked.append((parent, confidence, allowed, self._choose.n_drawn))
        return allowed

    def learn(self, confidence: float, acceptance: float) -> None:
        self.learned.append((confidence, acceptance))


class Counting(RandomChooser):
    n_drawn = 0

    def pick(self, law: Distribution) -> int:
        self.n_drawn += 1
        return super().pick(law)


def test_every_node_is_decided_before_it_is_drawn_and_then_kept() -> None:
    """A drawn token that is dropped because of what it is."""
    choose = Counting(0)
    policy = Asked((-1, -1, 0, 0, 2), choose)
    draft = TreeDrafter(model(), policy, n_leaves=32).propose(TOKENS, 9, PLAIN, choose)
    assert policy.expanded == [(-1,), (0,), (2,)]
    assert [(parent, allowed, n) for parent, _, allowed, n in policy.asked] == [
        (-1, True, 0), (-1, True, 1), (-1, False, 2), (0, True, 2), (0, True, 3), (0, False, 4), (2, True, 4),
    ]  # fmt: skip
    assert len(draft.tokens) == choose.n_drawn == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_confidence_is_the_largest_mass_that_is_left(temperature: float) -> None:
    """A confidence of another row, of a law that still holds the siblings, or of the few likeliest tokens alone."""
    choose, fake = Counting(0), model()
    policy = Asked((-1, -1, -1, 0, 0), choose)
    drafter = TreeDrafter(fake, policy, n_leaves=32)
    drafter._asks_confidence = True  # as with any policy but a fixed shape
    draft = drafter.propose(TOKENS, 9, params_of(temperature=temperature), choose)
    at: dict[int, History] = {-1: ()}  # lines by the policy's numbers: in the order of the draws
    below = {line: [each[-1] for each in lines_of(draft) if each[:-1] == line] for line in ((), *lines_of(draft))}
    n_of: dict[int, int] = {}
    for parent, confidence, allowed, _ in policy.asked:
        rank = n_of.get(parent, 0)
        history = (*TOKENS, *at[parent])
        left = token_law(fake.table(history).tolist(), history, PLAIN)
        for token in below[at[parent]][:rank]:
            del left[token]
        assert confidence == pytest.approx(max(left.values()) / math.fsum(left.values()), rel=1e-5)
        if allowed:
            at[len(at) - 1] = (*at[parent], below[at[parent]][rank])
            n_of[parent] = rank + 1


def test_a_first_child_that_was_not_drawn_is_learned_from_where_it_was_reached() -> None:
    """A policy that refuses what it would have to draw to learn that it is right."""
    choose = Counting(0)
    policy = Asked((-1, -1, 0, 1), choose, barren=(1,))
    drafter, fake = TreeDrafter(model(), policy, n_leaves=32), model()
    draft = drafter.propose(TOKENS, 9, PLAIN, choose)
    lines = lines_of(draft)
    second = max(node for node, line in enumerate(lines) if len(line) == 1)  # node 1 of the policy
    p = Distribution.dense(np.full(30, 1 / 30))
    seen = Observation((*TOKENS, draft.tokens[second], 7), draft, Verdict((second,), 7), "tree", laws=[p] * 9)
    drafter.observe(seen)
    history = (*TOKENS, draft.tokens[second])
    q = Distribution.dense(list(token_law(fake.table(history).tolist(), history, PLAIN).values()))
    assert policy.learned == [(pytest.approx(q.peak()), pytest.approx(p.overlap(q)))]


# --- what the model reads --------------------------------------------------------------------------------------------


def test_a_level_is_one_pass_and_leaves_are_not_read() -> None:
    """A pass for every node; a cell and a row for nodes without children."""
    fake = model()
    tree_of(fake, (-1, -1, -1, 0, 0, 1, 3, 5)).propose(TOKENS, 9, PLAIN, RandomChooser(0))
    assert [(call.name, len(call.tokens)) for call in fake.calls] == [
        ("feed", 4),
        ("eval", 1),
        ("grow", 2),
        ("grow", 2),
    ]


def test_a_level_wider_than_a_batch_is_read_in_parts() -> None:
    """More rows than were reserved at load: llama.cpp aborts the process."""
    shape = (-1, -1, -1, -1, -1, 0, 1, 2, 3, 4)
    caps = Caps(tree=True, max_leaves=32, max_block=2)
    few, many = model(caps=caps), model()
    draft = tree_of(few, shape).propose(TOKENS, 16, PLAIN, RandomChooser(0))
    assert [len(call.tokens) for call in few.calls if call.name == "grow"] == [2, 2, 1]
    assert draft == tree_of(many, shape).propose(TOKENS, 16, PLAIN, RandomChooser(0))


def test_the_cache_follows_any_path_that_was_committed() -> None:
    """A losing branch that stays in the draft's KV, or a node of the path that is read again."""
    shape = (-1, -1, 0, 0, 1, 2, 3, 4, 5)
    for seed in range(40):
        fake = model(seed=seed)
        drafter = tree_of(fake, shape)
        draft = drafter.propose(TOKENS, 16, PLAIN, RandomChooser(seed))
        lines = lines_of(draft)
        node = seed % (len(lines) + 1) - 1
        line = lines[node] if node >= 0 else ()
        path = [lines.index(line[: n + 1]) for n in range(len(line))]
        committed = (*TOKENS, *line, 29)
        drafter.observe(Observation(committed, draft, Verdict(tuple(path), 29), "tree"))
        assert fake.tokens == committed[: fake.length]
        unread = len(committed) - 1 - fake.length
        leaf = all(other[:-1] != line for other in lines)
        assert unread == (leaf and node >= 0), "only a leaf has not been read"


def test_a_tree_ends_where_the_drafts_context_does() -> None:
    """An error in the middle of an answer, or no draft although there is room for one."""
    shape = (-1, -1, 0, 1, 2, 3)
    drawn = []
    for n_ctx in range(len(TOKENS) - 1, len(TOKENS) + 6):
        drafter = tree_of(model(n_ctx=n_ctx), shape)
        drawn.append(len(drafter.propose(TOKENS, 9, PLAIN, RandomChooser(0)).tokens))
        assert bool(drafter.report().notice) == (n_ctx < len(TOKENS))
    assert drawn == [0, 2, 3, 4, 5, 6, 6]


def test_an_end_token_is_a_leaf() -> None:
    """Draft passes for tokens after the end."""
    table = replaced(RandomTable(30, 52), len(TOKENS), 50.0, token=9)
    drafter = tree_of(model(table=table, end_tokens=frozenset({9})), (-1, -1, 0, 1))
    draft = drafter.propose(TOKENS, 9, GREEDY, RandomChooser(0))
    assert draft.tokens[0] == 9
    assert draft.parents == (-1, -1, 1)


def test_a_row_without_a_law_makes_a_leaf() -> None:
    """An error, or tokens drawn from NaN, where the answer can go on."""
    table = replaced(RandomTable(30, 53), len(TOKENS) + 1, math.nan)
    drafter = tree_of(model(table=table), (-1, -1, 0, 1))
    draft = drafter.propose(TOKENS, 9, PLAIN, RandomChooser(0))
    assert draft.parents == (-1, -1)
    assert drafter.report().notice == BROKEN


def test_what_the_draft_cannot_read_or_say_ends_the_drafting_with_a_notice() -> None:
    """An id out of range in the draft, or a bias that costs a pass at every step."""
    drafter = tree_of(model(4), (-1, -1), vocab_size=30)
    assert drafter.propose((3, 4, 1), 9, PLAIN, RandomChooser(0)) == Draft()
    assert "does not know" in drafter.report().notice
    drafter = tree_of(model(4), (-1, -1))
    bias = replace(PLAIN, logit_bias=dict.fromkeys(range(4), -math.inf))
    for notice in (FORBIDDEN, ""):
        assert drafter.propose((1, 2, 3), 9, bias, RandomChooser(0)) == Draft()
        assert drafter.report().notice == notice


def test_ids_that_the_target_does_not_know_are_never_drafted() -> None:
    """A padding row of the draft among the siblings."""
    draft = tree_of(model(), (-1,) * 16 + (0,) * 16, vocab_size=20).propose(TOKENS, 32, PLAIN, RandomChooser(0))
    assert max(draft.tokens) < 20
    assert max(int(law.support()[-1]) for law in draft.probs or ()) < 20


def test_the_first_token_does_not_wait_for_the_draft() -> None:
    """A prompt that the draft reads before anything is said."""
    fake = model(n_ctx=300)
    drafter = tree_of(fake, (-1, -1), n_at_once=12)
    prompt = tuple(i % 30 for i in range(200))
    drafter.begin(prompt)
    assert drafter.propose(prompt, 9, PLAIN, RandomChooser(0)) == Draft()
    assert fake.calls == []
    assert len(drafter.propose((*prompt, 1), 9, PLAIN, RandomChooser(0)).tokens) == 2


def test_a_probe_reads_the_end_of_the_text_and_leaves_nothing_behind() -> None:
    """A policy that never learns that the model would pay again, or a KV with tokens that were not committed."""

    class Probing(Asked):
        def plan_tree(self, at: Situation) -> DraftPlan:
            lags.append(at.lag)
            return DraftPlan(probe=99 if len(lags) == 3 else 0)

    lags: list[int | None] = []
    target, fake, choose = model(n_ctx=99), model(n_ctx=99), Counting(0)
    policy = Probing((), choose)
    drafter = TreeDrafter(fake, policy, n_leaves=32, n_at_once=99)
    for _ in Engine(target, drafter).generate(tuple(range(12)), PLAIN, choose, max_tokens=5):
        assert fake.tokens == target.tokens[: fake.length]
    assert lags == [11, 12, 13, 0, 1]
    assert len(policy.learned) == 2, "of two tokens p is known"


# --- models without trees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_leaves", "caps", "who"), [(1, Caps(tree=True, max_leaves=32), "target"), (32, Caps(), "draft")]
)
def test_models_without_trees_get_chains_and_that_is_said_once(n_leaves: int, caps: Caps, who: str) -> None:
    """A tree for a model that refuses it, a notice in every answer, or none."""
    target = RandomTable(N_VOCAB, 40)
    fake = FakeModel(agreeing(target, N_VOCAB, 41), N_VOCAB, caps=caps, n_ctx=99)
    drafter = TreeDrafter(fake, FixedShape((-1, -1, 0, 0, 2)), lookup=LookupDrafter(n_max=9), n_leaves=n_leaves)
    engine = Engine(FakeModel(target, N_VOCAB, n_ctx=99, caps=Caps()), drafter)
    notices: list[str] = []
    for prompt in ((1, 2, 3), (1, 2, 4)):
        events = list(engine.generate(prompt, GREEDY, RandomChooser(0), max_tokens=20))
        notices += [event.text for event in events if isinstance(event, Notice)]
        assert all(event.parents is None for event in events if isinstance(event, StepEvent))
        assert isinstance(events[-1], Finished)
        assert events[-1].stats.n_accepted > 0
    assert notices == [CHAINS_ONLY.format(who)]


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [PLAIN, REPEAT, GREEDY])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.MATCH])
def test_no_law_is_computed_off_the_path(rule: Rule, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early exit: 16 rows of 152k logits turned into laws where three are looked at."""
    target, n_laws = RandomTable(N_VOCAB, 40), 0
    law = sampling.law

    def counted(*args: object) -> Distribution:
        nonlocal n_laws
        n_laws += 1
        return law(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "law", counted)  # as the engine calls it; the drafter has a name of its own
    drafter = tree_of(FakeModel(agreeing(target, N_VOCAB, 41), N_VOCAB), (-1, -1, -1, 0, 0, 1, 1, 3, 3))
    steps = [
        event
        for event in Engine(FakeModel(target, N_VOCAB), drafter, rule=rule).generate(
            (1, 2, 3), params, RandomChooser(0), max_tokens=40
        )
        if isinstance(event, StepEvent)
    ]
    assert n_laws == sum(step.accepted + 1 for step in steps)
    assert max(step.accepted for step in steps) == 3
    assert max(step.n_rows for step in steps) == 10


@pytest.mark.parametrize("n_nodes", [1, 2, 4, 8])
def test_greedy_text_is_the_plain_one(n_nodes: int) -> None:
    """The smallest form of the promise, for trees of every size."""
    shape = (-1, -1, 0, 0, 1, 2, 2, 5)[:n_nodes]
    for seed in range(5):
        target = RandomTable(N_VOCAB, seed, ties=True)
        fake = FakeModel(agreeing(target, N_VOCAB, seed + 60), N_VOCAB)
        engine = Engine(FakeModel(target, N_VOCAB), tree_of(fake, shape, 1))
        events = list(engine.generate((0, 1, 0), GREEDY, RandomChooser(0), max_tokens=30))
        assert tuple(event.token for event in events if event.kind == "token") == plain_greedy(target, (0, 1, 0), 30)


TREE = Draft((2, 0, 1, 3, 1, 2), None, (-1, 0, 1, 0, -1, 4))  # 2 (0 (1) 3) 1 (2)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({9}, TREE),
        ({0}, Draft((2, 0, 3, 1, 2), None, (-1, 0, 0, -1, 3))),
        ({2}, Draft((2, 1, 2), None, (-1, -1, 1))),
        ({1, 2}, Draft((2, 1), None, (-1, -1))),
    ],
)
def test_nothing_is_submitted_below_an_end_token(ends: set[int], expected: Draft) -> None:
    """Rows and laws of tokens behind the end; a branch that is lost, or hung to another node, with them."""
    laws = tuple(Distribution.on((token, 20 + node), (0.5, 0.5)) for node, token in enumerate(TREE.tokens))
    found = replace(TREE, probs=laws).until(ends)
    assert replace(found, probs=None) == expected
    kept = [node for node, law in enumerate(laws) if law in (found.probs or ())]
    assert [TREE.tokens[node] for node in kept] == list(found.tokens)
    assert TREE.until(ends).probs is None


def test_looked_up_nodes_are_counted_where_some_are_cut() -> None:
    """A drawn node that counts as looked up, because one before it was below an end token."""
    prompt = (2, 3, 4, 1, 2)  # 2 was followed by 3 and that by 4
    target, fake = FakeModel(RandomTable(6, 7), 6, end_tokens=frozenset({3})), model(6)
    drafter = tree_of(fake, (-1, -1, -1, -1), 2)
    for event in Engine(target, drafter).generate(prompt, PLAIN, RandomChooser(0), max_tokens=20):
        if isinstance(event, StepEvent):
            break
    assert (drafter.policy.offers[0][:2], event.drafted[0], len(event.drafted)) == ([(ANY, -1), (ANY, 0)], 3, 3)
    assert event.looked_up == 1


def test_a_tree_of_one_path_is_submitted_as_a_chain() -> None:
    """A model without trees that refuses a chain because its parents are spelled out."""
    assert Draft((1, 2, 3), None, (-1, 0, 1)).until({9}) == Draft((1, 2, 3))
    assert Draft((1, 2, 3), None, (-1, 0, -1)).until({9}) == Draft((1, 2, 3), None, (-1, 0, -1))
    assert Draft((1, 2, 3), None, (-1, 0, -1)).until({1}) == Draft((1, 3), None, (-1, -1))
    assert Draft((1, 2), None, (-1, 0)).until({1}) == Draft((1,))
    assert Draft().until({1}) == Draft()


@pytest.mark.parametrize(
    ("answer", "stops", "nodes", "path", "origins", "levels"),
    [  # the target says `answer`; `nodes` are those of TREE that count
        ((2, 3, 4), (), range(6), (0, 3), ("draft", "draft", "bonus"), [2, 3, 1]),
        ((2, 4), (), range(6), (0,), ("draft", "correction"), [2, 3, 1]),
        ((3,), (), range(6), (), ("correction",), [2, 3, 1]),
        ((1, 2, 4), (), range(6), (4, 5), ("draft", "draft", "bonus"), [2, 3, 1]),
        ((2, 0, 1, 4), ((0,),), (0, 1, 3, 4, 5), (0, 1), ("draft", "draft"), [2, 3]),
        ((2, 0, 1, 4), ((2,),), (0, 4, 5), (0,), ("draft",), [2, 1]),
        ((1, 2, 4), ((1,),), range(5), (4,), ("draft",), [2, 2, 1]),
    ],
)
def test_a_step_reports_the_tree_and_how_it_was_walked(
    answer: History,
    stops: tuple[History, ...],
    nodes: Sequence[int],
    path: History,
    origins: tuple[str, ...],
    levels: list[int],
) -> None:
    """Drafted tokens counted behind the end of an answer; a path in the numbers of another tree; a wrong origin."""
    said = table_of(lambda history: tuple(float(token == (*answer, *[4] * 9)[len(history) - 2]) for token in range(5)))
    drafter = ScriptedDrafter(lambda tokens, limit, choose: TREE if len(tokens) == 2 else Draft())
    rig = Rig(FakeModel(said, 5), None, drafter)
    rig.answer((3, 3), GREEDY, RandomChooser(0), 7, stops=stops)
    step, stats = rig.steps[0], SpecStats()
    assert step.drafted == tuple(TREE.tokens[node] for node in nodes)
    assert step.parents is not None
    assert TREE.parents is not None
    assert [-1 if each < 0 else nodes[each] for each in step.parents] == [TREE.parents[node] for node in nodes]
    assert step.path == path
    own = tuple(event.origin for event in rig.events if isinstance(event, TokenEvent) and event.step == 0)
    assert own == origins
    assert step.rejected == ("correction" in origins)
    stats.take(step)
    assert (stats.drafted_at, stats.accepted_at) == (levels, [1] * len(path))
    assert (stats.n_drafted, stats.n_accepted, stats.n_rejected) == (len(nodes), len(path), step.rejected)
    assert step.to_json()["path"] == path
