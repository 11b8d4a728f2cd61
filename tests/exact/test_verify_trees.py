"""`verify` on trees: the law of one block for every source of siblings, shape and rule, on small random tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest

from specllama.audit.law import distance
from specllama.base.errors import DraftLawError
from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule
from specllama.core.verification import verify
from tests.enumeration import ScriptedChooser, law_of
from tests.exact.loop import LazyRows, P, Q
from tests.fakes import History, Laws, Probs, Script, always, dense, drawn_siblings, random_laws

Shape: TypeAlias = tuple[Any, ...]  # the shapes below each child
Siblings: TypeAlias = list[tuple[int, Distribution | None]]  # tokens with their laws; None = chosen without chance
Source: TypeAlias = Callable[[Probs, int, Chooser], Siblings]  # (q, most siblings, choose)

LEAF: Shape = ()
SHAPES: dict[str, Shape] = {
    "root only": (),
    "one path": (((LEAF,),),),
    "binary": ((LEAF, LEAF), (LEAF, LEAF)),
    "ragged": ((LEAF, LEAF), LEAF),
    "the second child is deeper": (LEAF, ((LEAF,),)),
    "wide": (LEAF,) * 5,
}


def drawn(q: Probs, width: int, choose: Chooser) -> Siblings:
    """Drawn from q without replacement."""
    return [(token, dense(q)) for token in drawn_siblings(q, width, choose)]


def likeliest(q: Probs, width: int, choose: Chooser) -> Siblings:
    """The top tokens of q, with their one-hot laws spelled out."""
    ranked = sorted(range(len(q)), key=lambda token: -q[token])
    return [(token, Distribution.point(token)) for token in ranked[:width]]


def looked_up(q: Probs, width: int, choose: Chooser) -> Siblings:
    """The same tokens always."""
    return [(token, None) for token in (1, 2, 0)[:width]]


def looked_up_then_drawn(q: Probs, width: int, choose: Chooser) -> Siblings:
    """A looked-up token, then draws from q without it."""
    found = looked_up(q, min(width, 1), choose)
    return found + [(token, dense(q)) for token in drawn_siblings(q, width - 1, choose, (1,))]


def drawn_then_looked_up(q: Probs, width: int, choose: Chooser) -> Siblings:
    """A draw from q, then looked-up tokens that it is not."""
    first = drawn(q, min(width, 1), choose)
    return first + [each for each in looked_up(q, 3, choose) if each[0] != first[0][0]][: width - 1]


SOURCES = (drawn, likeliest, looked_up, looked_up_then_drawn, drawn_then_looked_up)


def grown(laws: Laws, shape: Shape, source: Source) -> Script:
    """A tree of this shape, laid depth first; a family ends where its source does."""

    def script(tokens: History, limit: int, choose: Chooser) -> Draft:
        drafted: list[int] = []
        probs: list[Distribution | None] = []
        parents: list[int] = []

        def add(parent: int, path: History, shape: Shape) -> None:
            siblings = source(laws(path), len(shape), choose) if shape else []
            for (token, law), below in zip(siblings, shape, strict=False):
                drafted.append(token)
                probs.append(law)
                parents.append(parent)
                add(len(drafted) - 1, (*path, token), below)

        add(-1, tokens, shape)
        laws_of_all = tuple(law or Distribution.point(token) for token, law in zip(drafted, probs, strict=True))
        return Draft(tuple(drafted), laws_of_all if any(probs) else None, tuple(parents))

    return script


def certain(seed: int) -> Laws:
    """A target that is sure of one token after every history."""
    laws = random_laws(3, seed)

    def one_hot(history: History) -> Probs:
        law = laws(history)
        return tuple(float(token == law.index(max(law))) for token in range(len(law)))

    return one_hot


TABLES: dict[str, tuple[Laws, Laws]] = {
    "random": (random_laws(3, 20), random_laws(3, 21)),
    "zeros": (random_laws(3, 22, zeros=0.4), random_laws(3, 23, zeros=0.4)),
    "equal": (random_laws(3, 24), random_laws(3, 24)),
    "disjoint": (always((0.0, 0.7, 0.3, 0.0)), always((0.4, 0.0, 0.0, 0.6))),
    "certain": (certain(25), random_laws(3, 26)),
}


def block_law(p: Laws, script: Script, rule: Rule) -> Mapping[History, float]:
    """The law of the tokens that one verification emits."""

    def run(choose: Chooser) -> History:
        draft = script((), 99, choose)
        verdict = verify(draft, LazyRows(p, (), draft), choose, rule)
        return (*(draft.tokens[node] for node in verdict.path), verdict.next_token)

    return law_of(run)


def n_accepted(law: Mapping[History, float]) -> float:
    return math.fsum((len(block) - 1) * weight for block, weight in law.items())


@pytest.mark.parametrize("source", SOURCES, ids=[source.__name__ for source in SOURCES])
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_block_of_a_tree_follows_the_targets_law(shape: str, tables: str, source: Source) -> None:
    """Siblings judged by a law that they were not drawn from, a path through wrong rows, or a wrong weight."""
    p, q = TABLES[tables]
    for rule in Rule:
        found = block_law(p, grown(q, SHAPES[shape], source), rule)
        assert distance(found, lambda block: {i: prob for i, prob in enumerate(p(block)) if prob > 0.0}).tv < 1e-12


def gain(shape: Shape, source: Source, seed: int, zeros: float = 0.0) -> float:
    """Accepted tokens of the block rule less those of the token rule."""
    p, q = (random_laws(3, number, zeros=zeros) for number in (seed, 5000 + seed))
    by_block, by_token = (block_law(p, grown(q, shape, source), rule) for rule in (Rule.BLOCK, Rule.TOKEN))
    return n_accepted(by_block) - n_accepted(by_token)


@pytest.mark.parametrize("shape", [((LEAF, LEAF),), (((LEAF,), LEAF),)], ids=["siblings", "the first child is deeper"])
def test_the_block_rule_accepts_no_fewer_tokens_of_a_tree(shape: Shape) -> None:
    """Exact, but without what leaf to root is to gain: a weight or a residual that forgets the path."""
    gains = [gain(shape, drawn, seed, zeros) for seed in range(6) for zeros in (0.0, 0.4)]
    assert min(gains) > -1e-12
    assert max(gains) > 0.05
    for source in SOURCES[1:]:
        assert gain(shape, source, 0) > -1e-12


def test_the_block_rule_prefers_the_first_branch() -> None:
    """A claim without its condition: it may accept fewer tokens if a later sibling has the deeper branch."""
    assert gain(((LEAF, (LEAF,)),), drawn, 11) < -0.01


@pytest.mark.parametrize("source", [looked_up, likeliest, drawn])
def test_equal_siblings_are_refused(source: Source) -> None:
    """Siblings that were drawn with replacement: one of them would be judged by a law that it was not drawn from."""

    def doubled(q: Probs, width: int, choose: Chooser) -> Siblings:
        return source(q, 1, choose) * 2

    script = grown(always(Q), (LEAF, LEAF), doubled)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        with pytest.raises(DraftLawError):
            block_law(always(P), script, rule)


def test_a_sibling_that_its_earlier_siblings_leave_no_mass_is_refused() -> None:
    """More siblings than q has tokens: 0/0 in its law."""
    draft = Draft((0, 1), (dense((1.0, 0.0, 0.0)),) * 2, (-1, -1))
    for rule in (Rule.TOKEN, Rule.BLOCK):
        with pytest.raises(DraftLawError):
            verify(draft, LazyRows(always(P), (), draft), ScriptedChooser([False] * 2, [0]), rule)


TWO_BY_TWO = Draft((0, 1, 2, 1, 0, 2), None, (-1, 0, 0, -1, 3, 3))


@pytest.mark.parametrize(
    ("rule", "flips", "picks", "path", "rows"),
    [
        (Rule.TOKEN, [True, False, True], [0], (0, 2), {0, 1, 3}),
        (Rule.TOKEN, [False, False], [2], (), {0}),
        (Rule.MATCH, [], [1, 2, 0], (3, 5), {0, 4, 6}),
        # Leaf to root: rows of leaves that are rejected and of branches that are not reached are not needed.
        (Rule.BLOCK, [True], [2], (0, 1), {0, 1, 2}),
        (Rule.BLOCK, [False, False, True], [0], (0,), {0, 1}),
        (Rule.BLOCK, [False, False, False, True], [0], (3, 4), {0, 1, 4, 5}),
    ],
)
def test_only_the_rows_on_the_way_are_asked_for(
    rule: Rule, flips: list[bool], picks: list[int], path: History, rows: set[int]
) -> None:
    """Laws of 152k tokens made for rows that decide nothing."""
    asked = LazyRows(always(P), (), TWO_BY_TWO)
    choose = ScriptedChooser(flips, picks)
    assert verify(TWO_BY_TWO, asked, choose, rule).path == path
    assert set(asked.asked) == rows
    assert len(choose.flipped) == len(flips)


def test_no_row_below_a_token_that_cannot_be_said_is_asked_for() -> None:
    """The same for a branch that has weight 0."""
    draft = Draft((2, 0, 0), None, (-1, 0, -1))
    rows = LazyRows(always((0.6, 0.4, 0.0)), (), draft)
    assert verify(draft, rows, ScriptedChooser([False, True], [1]), Rule.BLOCK).path == (2,)
    assert set(rows.asked) == {0, 3}
