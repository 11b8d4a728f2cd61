"""`verify` alone: the law of what it emits, for every rule and shape of draft, on random 3-token tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from specllama.base.errors import DraftLawError
from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule, Verdict
from specllama.core.verification import verify
from tests.enumeration import ScriptedChooser, as_dict, law_of, tv
from tests.exact.loop import N_VOCAB, LazyRows, P, Q, drawn_trees, emit, emitted_law, plain_law
from tests.fakes import History, Laws, Probs, Script, always, dense, drawn_chain, points, random_laws
from tests.marks import slow


def likeliest_chain(laws: Laws, n_max: int) -> Script:
    """A greedy draft: the most likely tokens, as point masses."""

    def tokens_at(tokens: History) -> History:
        chain: History = ()
        for _ in range(n_max):
            law = laws((*tokens, *chain))
            chain = (*chain, law.index(max(law)))
        return chain

    return points(tokens_at)


def dense_points(script: Script, laws: Laws) -> Script:
    """What `script` proposes, with the one-hot law of every token spelled out."""

    def spelled(tokens: History, limit: int, choose: Chooser) -> Draft:
        draft = script(tokens, limit, choose)
        return Draft(draft.tokens, tuple(Distribution.point(token) for token in draft.tokens))

    return spelled


CHAINS: dict[str, Callable[[Laws], Script]] = {
    "nothing": lambda q: points(lambda tokens: ()),
    "drawn 1": lambda q: drawn_chain(q, 1),
    "drawn 2": lambda q: drawn_chain(q, 2),
    "drawn 3": lambda q: drawn_chain(q, 3),
    "likeliest 3": lambda q: likeliest_chain(q, 3),
    "likeliest 2 with one-hot laws": lambda q: dense_points(likeliest_chain(q, 2), q),
    "constant": lambda q: points(lambda tokens: (1, 1, 1)),
}


@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["full support", "with zeros"])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("shape", CHAINS)
def test_emitted_tokens_of_a_chain_follow_the_targets_law(shape: str, rule: Rule, zeros: float) -> None:
    """Any bias in accepting, correcting or the bonus token, at any position and whatever was drafted before."""
    # Chains of three double with every token more: two tokens in the vocabulary instead of three keep them small.
    n_vocab, n_tokens = (2, 4) if shape == "drawn 3" else (N_VOCAB, 3)
    p, q = random_laws(n_vocab, 1, zeros=zeros), random_laws(n_vocab, 101, zeros=zeros)
    assert tv(emitted_law(p, CHAINS[shape](q), rule, n_tokens), plain_law(p, n_tokens)) < 1e-12


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_emitted_tokens_follow_the_targets_law_whatever_the_tables(rule: Rule, seed: int) -> None:
    """A wrong weight that one table does not show, because there it is 1 or the residual has one token."""
    p, q = random_laws(N_VOCAB, 200 + seed), random_laws(N_VOCAB, 300 + seed)
    assert tv(emitted_law(p, drawn_chain(q, 2), rule, 3), plain_law(p, 3)) < 1e-12


def moved(laws: Laws, distance: float) -> Laws:
    """`laws`, with `distance` of their mass moved from the likeliest token to the next id."""

    def changed(history: History) -> Probs:
        probs = list(laws(history))
        peak = probs.index(max(probs))
        probs[peak] -= distance
        probs[(peak + 1) % len(probs)] += distance
        return tuple(probs)

    return cache(changed)


@pytest.mark.parametrize("distance", [slow(1e-3), 1e-5, slow(1e-7), 1e-9])
@pytest.mark.parametrize("rule", list(Rule))
def test_a_draft_that_nearly_has_the_targets_law_is_no_exception(rule: Rule, distance: float) -> None:
    """A residual taken for p where little mass is left: all of the bias of a requantised draft, which a rejection
    corrects once in 10^4 tokens."""
    p = random_laws(N_VOCAB, 4)
    for q in (moved(p, distance), moved(p, -distance)):
        n_tokens = 2 if rule is Rule.MATCH else 3  # its branches multiply, and it has no residual
        assert tv(emitted_law(p, drawn_chain(q, 2), rule, n_tokens), plain_law(p, n_tokens)) < 1e-12
    # Each sibling leaves little mass to the next.
    steep = always((1.0 - distance, 0.7 * distance, 0.3 * distance))
    for q in (moved(steep, distance / 4), moved(steep, -distance / 4), always((0.3, 0.3, 0.4))):
        for p in (steep, moved(steep, distance / 2)):
            assert tv(emitted_law(p, drawn_trees(q, 3), rule, 1), plain_law(p, 1)) < 1e-12
            if rule is not Rule.MATCH:
                assert tv(emitted_law(p, drawn_trees(q, 1, 2), rule, 2), plain_law(p, 2)) < 1e-12


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_draft_from_the_targets_own_law_is_always_accepted(rule: Rule) -> None:
    """p/q a rounding below 1, a comparison that rejects at equality, or a residual without mass (p = q)."""
    p = random_laws(N_VOCAB, 6)
    assert tv(emitted_law(p, drawn_chain(p, 2), rule, 3), plain_law(p, 3)) < 1e-12

    def n_accepted(choose: Chooser) -> int:
        draft = drawn_chain(p, 3)((), 3, choose)
        return len(verify(draft, LazyRows(p, (), draft), choose, rule).path)

    assert law_of(n_accepted) == {3: pytest.approx(1.0)}


def test_after_a_rejection_the_correction_follows_the_residual_of_the_whole_row() -> None:
    """A residual that only zeroes the drafted token, or a redraw from p, seen in the rejected rounds alone."""

    def run(choose: Chooser) -> tuple[int, bool, int]:
        draft = drawn_chain(always(Q), 1)((), 1, choose)
        verdict = verify(draft, LazyRows(always(P), (), draft), choose)
        return draft.tokens[0], bool(verdict.path), verdict.next_token

    law = law_of(run)
    rejected = {token: law.get((2, False, token), 0.0) for token in range(N_VOCAB)}
    assert law[2, True, 0] + law[2, True, 1] + law[2, True, 2] == pytest.approx(0.2)
    assert rejected == {0: pytest.approx(0.35), 1: pytest.approx(0.05), 2: 0.0}


@pytest.mark.parametrize(
    ("answers", "n_accepted"), [((True, False), 1), ((False,), 0), ((True, True, False), 2), ((True,) * 4, 4)]
)
def test_everything_behind_the_first_rejection_is_dropped(answers: tuple[bool, ...], n_accepted: int) -> None:
    """An accept mask T,F,T,T that counts 3. The flips after the first refusal must not even be asked for."""
    draft = Draft((2, 2, 2, 2), tuple(dense(Q) for _ in range(4)))
    choose = ScriptedChooser(flips=answers, picks=[0])
    verdict = verify(draft, LazyRows(always(P), (), draft), choose)
    assert verdict.path == tuple(range(n_accepted))
    assert choose.flipped == [pytest.approx(1 / 3)] * len(answers)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.MATCH])
def test_only_the_rows_that_are_reached_are_asked_for(rule: Rule) -> None:
    """Laws of 152k tokens made for rows behind a rejection: the time budget of a step would be gone."""
    draft = Draft((2, 2, 2), tuple(dense(Q) for _ in range(3)))
    rows = LazyRows(always(P), (), draft)
    choose = ScriptedChooser(flips=[True, False], picks=[0] if rule is Rule.TOKEN else [2, 0])
    verdict = verify(draft, rows, choose, rule)
    assert verdict.path == (0,)
    assert set(rows.asked) == {0, 1}


def test_the_block_rule_asks_for_no_row_behind_a_token_that_cannot_be_said() -> None:
    """The same for the block rule, which looks at every row up to a weight of 0."""
    draft = Draft((2, 2, 0), tuple(dense(Q) for _ in range(3)))
    rows = LazyRows(lambda tokens: (0.6, 0.4, 0.0) if tokens else P, (), draft)
    assert verify(draft, rows, ScriptedChooser([False, True], [0]), Rule.BLOCK).path == (0,)
    assert set(rows.asked) == {0, 1}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_block_rule_asks_once_for_each_prefix(n: int) -> None:
    """A draw for a prefix that cannot fail, the empty one: the same seed would give another text."""
    draft = Draft((2,) * n, (dense(Q),) * n)
    choose = ScriptedChooser([False] * n, [0])
    assert verify(draft, [dense(P)] * (n + 1), choose, Rule.BLOCK).path == ()
    assert len(choose.flipped) == n


def test_a_prefix_whose_next_row_has_no_excess_passes() -> None:
    """0/0 where q sums to a little more than 1, within its tolerance, and the token after the prefix is rejected."""
    above = dense(tuple(prob * (1.0 + 5e-7) for prob in P))
    choose = ScriptedChooser([False, True], [0])
    assert verify(Draft((0, 1), (dense(P), above)), [dense(P)] * 3, choose, Rule.BLOCK).path == (0,)
    assert choose.flipped == [pytest.approx(1.0, abs=1e-6), 1.0]
    assert choose.picked == [dense(P)]


TWO = Draft((2, 2), (dense(Q), dense(Q)))


@pytest.mark.parametrize(
    ("draft", "n_rows", "rule"),
    [
        (replace(TWO, probs=(dense(Q),)), 3, Rule.TOKEN),
        (TWO, 2, Rule.TOKEN),
        (TWO, 4, Rule.MATCH),
        (replace(TWO, parents=(-1,)), 3, Rule.TOKEN),
        (replace(TWO, parents=(-1, 1)), 3, Rule.TOKEN),
        (replace(TWO, parents=(0, -1)), 3, Rule.TOKEN),
        (replace(TWO, parents=(-2, -1)), 3, Rule.TOKEN),
        (replace(TWO, parents=(-1, 1)), 3, Rule.BLOCK),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(draft: Draft, n_rows: int, rule: Rule) -> None:
    """A node that is its own parent, which never ends; or the row of another node."""
    with pytest.raises(ValueError, match=r"."):
        verify(draft, [dense(P)] * n_rows, ScriptedChooser([True] * 9, [0] * 9), rule)


def test_a_chain_may_name_its_parents() -> None:
    """A chain that is judged otherwise because it is laid out as a tree."""
    for rule in Rule:
        draft = replace(TWO, parents=(-1, 0))
        laws = [law_of(lambda choose, d=d: verify(d, [dense(P)] * 3, choose, rule)) for d in (TWO, draft)]  # noqa: B023
        assert laws[0] == laws[1]


def test_block_verification_accepts_at_least_as_many_and_somewhere_more() -> None:
    """Sun et al.: expected accepted length never below the token rule's. A wrong weight or a stop at the first failure
    still gives an exact law often enough, but loses acceptance."""
    gains = []
    for seed in range(12):
        p, q = random_laws(N_VOCAB, seed), random_laws(N_VOCAB, 50 + seed)
        mean = {}
        for rule in (Rule.TOKEN, Rule.BLOCK):

            def n_accepted(choose: Chooser, rule: Rule = rule, p: Laws = p, q: Laws = q) -> int:
                draft = drawn_chain(q, 3)((), 3, choose)
                return len(verify(draft, LazyRows(p, (), draft), choose, rule).path)

            mean[rule] = math.fsum(n * weight for n, weight in law_of(n_accepted).items())
        gains.append(mean[Rule.BLOCK] - mean[Rule.TOKEN])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def sun_et_al(draft: Draft, p: Sequence[Distribution]) -> dict[Verdict, float]:
    """The law of the verdicts on a chain by the formulas of arXiv 2403.10444."""
    assert draft.probs is not None
    weights, law, left = [1.0], dict[Verdict, float](), 1.0
    for token, row, q in zip(draft.tokens, p, draft.probs, strict=False):
        weights.append(min(1.0, weights[-1] * row.prob(token) / q.prob(token)))
    for i in range(len(draft.tokens), -1, -1):
        after = as_dict(p[i])
        pass_prob = weights[i]
        if i < len(draft.tokens):
            after = {token: max(weights[i] * prob - draft.probs[i].prob(token), 0.0) for token, prob in after.items()}
            spare = math.fsum(after.values())
            pass_prob = spare / (spare + 1.0 - weights[i]) if i else 1.0
        law |= {
            Verdict(tuple(range(i)), token): left * pass_prob * share / math.fsum(after.values())
            for token, share in after.items()
            if share > 0.0
        }
        left *= 1.0 - pass_prob
    return law


def test_the_block_rule_on_a_chain_has_the_law_of_the_paper() -> None:
    """Exact, but not block verification: what it is to gain over the token rule would be lost."""
    for seed in range(4):
        p, q = random_laws(N_VOCAB, 60 + seed), random_laws(N_VOCAB, 160 + seed)
        for tokens in product(range(N_VOCAB), repeat=3):
            draft = Draft(tokens, tuple(dense(q(tokens[:n])) for n in range(3)))
            rows = LazyRows(p, (), draft)
            found = law_of(lambda choose, draft=draft, rows=rows: verify(draft, rows, choose, Rule.BLOCK))  # type: ignore[misc]
            assert tv(found, sun_et_al(draft, rows)) < 1e-12


def test_block_verification_equals_the_token_rule_for_point_masses() -> None:
    """With a point mass there is nothing to gain; a weight that leaks would accept behind a mismatch."""
    p = random_laws(N_VOCAB, 9)

    def verdict(choose: Chooser, rule: Rule) -> Verdict:
        draft = likeliest_chain(random_laws(N_VOCAB, 59), 3)((), 3, choose)
        return verify(draft, LazyRows(p, (), draft), choose, rule)

    token, block = (law_of(lambda choose, rule=rule: verdict(choose, rule)) for rule in (Rule.TOKEN, Rule.BLOCK))
    assert tv(token, block) < 1e-12


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
@pytest.mark.parametrize(
    "q",
    [(0.5, 0.5, 0.0), (0.3, 0.3, 0.3), (0.5, 0.3, 0.3)],
    ids=["token could not have been drawn", "mass below 1", "mass above 1"],
)
def test_a_law_the_token_was_not_drawn_from_is_an_error(q: tuple[float, ...], rule: Rule) -> None:
    """q taken before top-k, or not renormalised after it: a silent bias unless it is refused."""
    draft = Draft((2,), (dense(q),))
    with pytest.raises(DraftLawError):
        verify(draft, LazyRows(always(P), (), draft), ScriptedChooser([True, True], [0, 0]), rule)


def test_a_token_that_the_target_cannot_say_is_never_accepted() -> None:
    """`u <= p/q` accepts an impossible token when the generator returns exactly 0."""
    for rule in Rule:
        law = law_of(
            lambda choose, rule=rule: emit(always((0.6, 0.4, 0.0)), drawn_chain(always(Q), 1), rule, 1, choose)
        )
        assert set(law) == {(0,), (1,)}
