"""`LookupDrafter`: its proposals, its confidence, and its index from turn to turn."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from specllama.base.errors import UsageError
from specllama.core.optional import models_of
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Decision, Draft, DraftPlan, Observation, Verdict
from specllama.drafters import ALIASES, REGISTRY, DraftSettings
from specllama.drafters import lookup as lookup_room
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import ConfidencePolicy, DraftLength
from specllama.drafters.lookup import LOOKUP_P_MIN, LookupDrafter
from specllama.drafters.suffix import evidence as evidence_of
from tests.drafters.test_suffix import longest_match, texts
from tests.fakes import FakeModel, RandomTable
from tests.marks import looped

PARAMS = SamplingParams()


class Taking:
    """A policy that takes `n` tokens and records the questions."""

    def __init__(self, n: int = 99) -> None:
        self.n = n
        self.asked: list[tuple[int, float]] = []
        self.seen: list[Observation] = []

    def go_on(self, depth: int, confidence: float) -> bool:
        self.asked.append((depth, confidence))
        return depth < self.n

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def propose(drafter: LookupDrafter, tokens: Sequence[int], limit: int = 8) -> tuple[int, ...]:
    draft = drafter.propose(tokens, limit, PARAMS, RandomChooser(0))
    assert draft.probs is None, "chosen without chance: a point mass"
    return draft.tokens


def said(drafter: LookupDrafter, tokens: list[int], *more: int) -> None:
    """The target emits `more`; the drafter observes it token by token."""
    for token in more:
        tokens.append(token)
        drafter.observe(Observation(tokens, Draft(), Verdict((), token), "none"))


def begun(tokens: Sequence[int], policy: Taking | None = None, n_max: int = 8) -> LookupDrafter:
    drafter = LookupDrafter(n_max=n_max, policy=policy or Taking())
    drafter.begin(tokens)
    return drafter


def test_the_longest_match_decides() -> None:
    """A first match of one or two tokens where the text holds a longer one."""
    tokens = [1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3]
    assert propose(begun(tokens), tokens, 2) == (9, 9)


def test_the_most_frequent_continuation_is_proposed_and_the_latest_among_equals() -> None:
    """The first continuation, although another one is more frequent or newer."""
    tokens = [1, 2, 5, 1, 2, 6, 1, 2, 6, 1, 2]
    assert propose(begun(tokens), tokens, 1) == (6,)
    tokens = [1, 2, 5, 1, 2, 6, 1, 2]
    assert propose(begun(tokens), tokens, 1) == (6,)


def test_the_length_of_the_draft_follows_the_length_of_the_match() -> None:
    """A match of one token that is copied for a whole block."""
    long = [*range(20), 50, 0]
    assert len(propose(begun(long, n_max=16), long, 16)) == 3
    long = [*range(20), 50, 0, 1, 2]
    assert len(propose(begun(long, n_max=16), long, 16)) == 9


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_draft_stays_within_the_limit_and_n_max(limit: int) -> None:
    """More tokens than the context or the answer has room for."""
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    assert len(propose(begun(tokens), tokens, limit)) == limit
    assert len(propose(begun(tokens, n_max=2), tokens, 8)) == 2


def test_the_policy_is_asked_before_every_token_with_the_chance_that_it_is_right() -> None:
    """A length decided after the draw, or by a confidence that is no probability."""
    policy = Taking(2)
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = begun(tokens, policy)
    assert propose(drafter, tokens) == (4, 5)
    assert [depth for depth, _ in policy.asked] == [0, 1, 2]
    assert all(0.0 < confidence < 1.0 for _, confidence in policy.asked)
    assert policy.asked[0][1] < policy.asked[2][1], "the match grows with every token that is right"
    decisions = drafter.report().decisions
    assert [(each.depth, each.confidence, each.go_on) for each in decisions] == [
        (depth, confidence, depth < 2) for depth, confidence in policy.asked
    ]
    assert propose(drafter, tokens) == (4, 5)
    assert drafter.report().decisions == decisions, "of the last proposal only"
    said(drafter, tokens, 4, 5)
    assert [seen.tokens[-1] for seen in policy.seen] == [5, 5], "the list of tokens grows"


def test_without_a_policy_short_matches_are_left_alone() -> None:
    """A draft after every article and comma, which costs more than it gains."""
    drafter = LookupDrafter(n_max=8)
    tokens = [1, 2, 3, 4, 1]
    drafter.begin(tokens)
    assert propose(drafter, tokens) == ()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    drafter.begin(tokens)
    assert propose(drafter, tokens)[:2] == (5, 6)


def test_confidence_is_learned_from_every_token_drafted_or_not() -> None:
    """A lookup that must fail in drafts before it learns that the text does not repeat itself."""
    tokens = [1, 2] * 3
    drafter = begun(tokens)
    before = next(drafter.offer(tokens, 1)).confidence
    for i in range(20):  # after 1 and 2 comes everything but what came there before
        said(drafter, tokens, 100 + i, 1, 2)
        drafter.follow(tokens)
    assert next(drafter.offer(tokens, 1)).confidence < 0.5 * before
    for _ in range(60):  # and now it repeats itself
        said(drafter, tokens, 7, 1, 2)
        drafter.follow(tokens)
    assert next(drafter.offer(tokens, 1)).confidence > 0.8


def test_the_prompt_teaches_text_and_not_confidence() -> None:
    """Confidence learned from a prompt: it does not tell whether the answer copies from it."""
    tokens = [each for i in range(50) for each in (1, 2, 100 + i)] + [1, 2]
    fresh = begun([1, 2, 3, 1, 2])
    prior = lookup_room._Record()
    assert next(begun(tokens).offer(tokens, 1)).confidence == pytest.approx(prior.chance(2, 0))
    assert next(fresh.offer([1, 2, 3, 1, 2], 1)).confidence == pytest.approx(prior.chance(2, 2))


def test_a_chat_goes_on_in_the_same_index() -> None:
    """Every turn indexed from the beginning, or an answer that the next turn cannot copy from."""
    tokens = [1, 2, 3]
    drafter = begun(tokens)
    drafter.follow(tokens)
    index = drafter._index
    said(drafter, tokens, 40, 41, 42, 43)
    tokens = [*tokens, 9, 9, 40, 41]
    drafter.begin(tokens)
    assert drafter._index is index
    assert propose(drafter, tokens, 2) == (42, 43)


def test_text_that_left_the_conversation_is_forgotten() -> None:
    """A draft copied from a discarded answer, after /regen or before a benchmark's next prompt."""
    tokens = [1, 2, 3]
    drafter = begun(tokens)
    drafter.follow(tokens)
    said(drafter, tokens, 40, 41, 42, 43)
    drafter.follow(tokens)
    drafter.begin([1, 2, 3, 50])
    assert propose(drafter, [1, 2, 3, 50, 40, 41]) == ()
    drafter.begin([5, 40, 41, 42, 6, 40, 41])
    assert propose(drafter, [5, 40, 41, 42, 6, 40, 41], 1) == (42,)


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token that waits for the index of a whole book."""
    monkeypatch.setattr(lookup_room, "INDEXED_AT_ONCE", 4)
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = begun(tokens)
    assert propose(drafter, tokens, 1) == ()
    assert propose(drafter, tokens, 1) == ()
    assert propose(drafter, tokens, 1) == (4,)


def test_the_first_token_of_an_answer_teaches() -> None:
    """A few drafted tokens in each answer of a chat that are never counted."""
    answered, read = begun([1, 2, 3, 1]), begun([1, 2, 3, 1, 3])
    (after_one_miss,), (prior,) = (list(drafter.offer([1, 2, 3, 1, 3], 1)) for drafter in (answered, read))
    assert (prior.token, prior.confidence) == (1, pytest.approx(1 / 3))
    assert (after_one_miss.token, after_one_miss.confidence) == (1, pytest.approx(4 / 3 / (4 + 1)))


@pytest.mark.parametrize("n_given", [0, 1, 2])
def test_a_planner_sees_the_whole_offer_and_decides_how_much_is_taken(n_given: int) -> None:
    """A planner that is asked token by token cannot weigh a block whose fourth row is cheaper than its third."""

    offers = list[tuple[int, int]]()

    class Two(Taking):
        def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
            assert lag is None
            offers.append((len(offer), depth))
            return DraftPlan(n_given)

        def look(self, depth: int) -> bool:
            raise AssertionError("there is nothing to evaluate")

        def learn(self, confidence: float, acceptance: float) -> None:
            raise AssertionError("a lookup learns by itself")

    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    planner = Two()
    drafter = begun(tokens, planner)
    assert propose(drafter, tokens, 5) == (4, 5)[:n_given]
    assert offers == [(5, len(tokens))]
    assert drafter.report().decisions == (Decision(0, 0.0, n_given > 0, DraftPlan(n_given)),)
    said(drafter, tokens, 4)
    assert [seen.verdict.next_token for seen in planner.seen] == [4]


def test_the_registry_knows_lookup_and_chain_and_their_other_names() -> None:
    """A strategy that the command line cannot reach."""
    assert not REGISTRY["lookup"].needs_model
    assert REGISTRY["chain"].needs_model
    assert {ALIASES[name] for name in ("ngram", "ngram-simple", "prompt-lookup")} == {"lookup"}
    for p_min, expected in ((0.9, 0.9), (0.0, LOOKUP_P_MIN)):
        made = REGISTRY["lookup"].make(None, DraftSettings(length=DraftLength(3), p_min=p_min))
        assert isinstance(made, LookupDrafter)
        assert isinstance(made.policy, ConfidencePolicy)
        assert (made.n_max, made.policy.p_min) == (3, expected)
    with pytest.raises(UsageError):
        LookupDrafter(n_max=-1)
    assert propose(LookupDrafter(n_max=0), [1, 2, 1, 2, 1, 2]) == ()


@pytest.mark.parametrize("name", REGISTRY)
def test_a_drafter_has_the_name_of_its_strategy_and_tells_its_models(name: str) -> None:
    """Figures under another strategy's name; a draft model that two answers use at the same time."""
    model = FakeModel(RandomTable(4, 1), 4)
    drafter = REGISTRY[name].make(model if REGISTRY[name].needs_model else None, DraftSettings())
    assert (drafter.name, [*models_of(drafter)]) == (name, [model] if REGISTRY[name].needs_model else [])


@pytest.mark.parametrize(
    ("n_followed", "n_seen", "alone", "evidence"),
    [(1, 1, True, 2), (2, 2, True, 3), (5, 5, True, 3), (1, 2, False, 1), (1, 3, False, 0), (2, 4, False, 1)],
)
def test_evidence_tells_sometimes_mostly_once_and_always_apart(
    n_followed: int, n_seen: int, alone: bool, evidence: int
) -> None:
    """Two kinds of evidence counted as one, so that neither has the chance of its own."""
    assert evidence_of(n_followed, n_seen, alone=alone) == evidence


CHANCES = [(length, evidence) for length in (1, 2, 3, 4, 6, 8, 12, 16) for evidence in range(4)]


@pytest.mark.parametrize("seed", range(12))
def test_a_token_teaches_the_confidence_that_the_guess_for_it_had(seed: int) -> None:
    """A kind of match or evidence that learns from the tokens of another one."""
    text = texts(seed)
    drafter = begun(text[:1])
    for n, token in enumerate(text[1:], 1):
        guess = next(drafter.offer(text[:n], 1), None)
        before = [drafter._record.chance(*each) for each in CHANCES]
        drafter.follow(text[: n + 1])
        after = [drafter._record.chance(*each) for each in CHANCES]
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        if guess is None:
            assert changed == []
        else:
            ((old, new),) = changed
            assert old == guess.confidence
            assert (new > old) == (guess.token == token)


@looped(seed=range(40))
def test_an_offer_is_the_one_that_a_search_through_the_text_finds(seed: int) -> None:
    """A guess behind the first one with the chance of a shorter match, or of other evidence."""
    text = texts(seed)
    record, length = lookup_room._Record(), longest_match(text)[0]
    said, expected = text[len(text) - length :], list[tuple[int, float]]()

    def places(end: list[int]) -> list[int]:
        """Where `end` ends."""
        return [i for i in range(len(end), len(text) + 1) if text[i - len(end) : i] == end]

    for n in range(min(12, 3 * length)):
        while said and places(said) == [len(text)]:  # nothing follows there
            n_places = len(places(said))
            while said and len(places(said)) == n_places:
                said = said[1:]
        if not said:
            break
        counts = Counter(followed := [text[i] for i in places(said) if i < len(text)])
        n_most = max(counts.values())
        token = [each for each in followed if counts[each] == n_most][-1]
        evidence = evidence_of(n_most, len(places(said)) - (n == 0), alone=len(counts) == 1)
        expected.append((token, record.chance(len(said), evidence)))
        said = [*said, token]
    assert [(guess.token, guess.confidence) for guess in begun(text).offer(text, 12)] == expected


def test_chances_before_and_after_samples_are_those_of_the_definitions() -> None:
    """Lengths counted together that differ, or samples that weigh more or less than the prior allows."""
    record = lookup_room._Record()
    for length in range(1, 40):
        counted = max(each for each, _ in CHANCES if each <= length)
        expected = [share * counted / (counted + 2) for share in (0.25, 0.4, 1.0, 1.1)]
        assert [record.chance(length, evidence) for evidence in range(4)] == pytest.approx(expected)
    record.learn(2, 3, right=True)
    assert record.chance(2, 3) == pytest.approx((4 * 0.55 + 1) / (4 + 1)), "the prior counts as four samples"
    for right, n in ((True, 2000), (False, 69)):
        for _ in range(n):
            record.learn(2, 3, right=right)
    assert record.chance(2, 3) == pytest.approx(0.5, abs=0.005), "after 69 samples an old one counts half"


def guesses_of(text: Sequence[int], limit: int, max_leaves: int) -> list[tuple[int, float, int]]:
    return [(each.token, each.confidence, each.parent) for each in begun(text).offer(text, limit, max_leaves)]


def test_a_trie_holds_every_continuation_by_its_share() -> None:
    """One continuation where the text had several; a chance that still counts the siblings before it."""
    text = [7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2, 6, 4, 1, 2, 3, 1, 2]
    found = guesses_of(text, 16, 16)
    mostly = lookup_room._Record().chance(2, 1)
    roots = [(token, chance) for token, chance, parent in found if parent == -1]
    assert roots == [(6, pytest.approx(mostly)), (3, lookup_room.OTHERS / 3), (5, lookup_room.OTHERS / 2)], (
        "6 followed twice; then the latest"
    )
    below = {parent: token for token, _, parent in reversed(found)}
    firsts = {token: node for node, (token, _, parent) in enumerate(found) if parent == -1}
    assert {token: below[node] for token, node in firsts.items()} == {6: 4, 3: 1, 5: 8}, "the latest among equals"


@looped(max_leaves=(1, 2, 3, 16), seed=range(12))
def test_a_trie_is_a_tree_of_the_likeliest_guesses(seed: int, max_leaves: int) -> None:
    """A guess before the one it follows, equal siblings, more leaves than the target can evaluate, a worse order."""
    text = texts(seed)
    found = guesses_of(text, 12, max_leaves)
    parents = [parent for _, _, parent in found]
    assert all(parent < node for node, parent in enumerate(parents))
    assert len({(token, parent) for token, _, parent in found}) == len(found)
    assert not found or len(set(range(-1, len(found))) - {*parents}) <= max_leaves
    reach, since = list[float](), list[int]()  # `since`: the last guess that this one needs before it
    for node, (_, chance, parent) in enumerate(found):
        earlier = [each for each in range(node) if parents[each] == parent]
        missed = math.prod(1.0 - found[each][1] for each in earlier)
        reach.append((reach[parent] if parent >= 0 else 1.0) * missed * chance)
        since.append(max([parent, *earlier]))
        assert 0.0 < chance <= 1.0
    if max_leaves == 16:
        for i, mine in enumerate(reach):
            assert all(other <= mine + 1e-12 for other, needs in zip(reach[i:], since[i:], strict=True) if needs < i)
    if max_leaves == 1:
        assert parents == list(range(-1, len(found) - 1))
    assert len(guesses_of(text, 5, max_leaves)) == min(5, len(found))
    assert found[:1] == guesses_of(text, 1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_while_no_match_can_pay_the_index_waits_and_no_proposal_changes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work at every token of a text that does not repeat itself, or a repetition that is noticed late."""
    chance = random.Random(seed)
    costs = CostProfile(verify=((1, 1.0), (2, 1.3), (17, 2.0)), draft=((1, 1.0),))
    waiting, eager = (LookupDrafter(n_max=8, policy=Controller(costs)) for _ in range(2))
    monkeypatch.setattr(eager, "waits", lambda tokens: False)
    tokens = [chance.randrange(40) for _ in range(30)]
    for drafter in (waiting, eager):
        drafter.begin(tokens)
    n_waited = 0
    for _ in range(200):
        proposed = [propose(drafter, tokens) for drafter in (waiting, eager)]
        assert proposed[0] == proposed[1]
        n_waited += len(waiting._text) < len(tokens)
        assert len(tokens) - len(waiting._text) <= lookup_room.MOST_WAITING
        at = chance.randrange(len(tokens))
        tokens += tokens[at : at + chance.randrange(1, 9)] if chance.random() < 0.2 else [chance.randrange(40)]
    assert n_waited > 50
    for drafter in (waiting, eager):
        drafter.follow(tokens)
    assert vars(waiting._record) == vars(eager._record), "nothing is left out of what is learned"


@pytest.mark.parametrize(("two_rows", "drafted"), [(1.1, True), (1.3, False)])
def test_one_matching_token_drafts_only_where_a_second_row_is_cheap(two_rows: float, drafted: bool) -> None:
    """Drafts of one matching token that cost more than they save: they were right too seldom."""
    costs = CostProfile(verify=((1, 1.0), (2, two_rows), (17, 17 * two_rows)), draft=((1, 1.0),))
    drafter = LookupDrafter(n_max=8, policy=Controller(costs))
    tokens = [1, 2, 3, 1]
    drafter.begin(tokens)
    assert bool(propose(drafter, tokens)) == drafted
    assert list(drafter.offer(tokens, 8)), "a draft model may go on behind it"
