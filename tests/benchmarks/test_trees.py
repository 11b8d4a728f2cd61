"""Trees replayed from recorded ranks: every pass counts once, and a step walks the recorded path."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tree_replay import AsChain, Trace, play
from benchmarks.trees import likeliest, tempered
from specllama.core.distribution import Distribution
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.shape import FixedShape

COSTS = CostProfile(verify=((1, 1.0), (2, 1.2), (17, 4.2)), draft=((1, 0.1), (2, 0.12), (17, 0.42)))


def trace(*right: int | None) -> Trace:
    return Trace("code", 0.0, ((0.8, 0.5, 0.5),) * len(right), right)


def test_a_chain_that_is_always_right_costs_what_the_formula_says() -> None:
    """A pass that is not counted, or a token that the draft reads for nothing."""
    spent = play(FixedShape((-1, 0, 1)), trace(*[0] * 12), COSTS)
    assert (spent.n_steps, spent.n_nodes, spent.n_branched) == (3, 9, 0)
    assert spent.verify == pytest.approx(3 * COSTS.verify_cost(4))
    assert spent.draft == pytest.approx(9 * 0.1 + 2 * 0.02), "the last token of a step is read with the next one"


def test_a_path_off_the_first_children_is_computed_again() -> None:
    """Trees that are too good: their accepted rows cannot keep their cells."""
    spent = play(FixedShape((-1, -1)), trace(1, 0, None, None), COSTS)
    assert spent.n_steps == 3
    assert spent.verify == pytest.approx(COSTS.verify_cost(3) + COSTS.verify_cost(2 + 1) + 1.0)


def test_a_planner_drafts_chains() -> None:
    """Branches in the figures of chains."""
    assert play(AsChain(Controller(COSTS)), trace(*[0, 1, 0, 0] * 10), COSTS).n_branched == 0


def test_chances_of_siblings_are_those_after_the_ones_before() -> None:
    """A share of the whole law where one of the rest is meant."""
    row = np.log(np.array([0.5, 0.3, 0.1, 0.1], dtype=np.float32))
    found = likeliest(row, Distribution.dense([0.2, 0.4, 0.4, 0.0]))
    assert [confidence for confidence, _ in found] == pytest.approx([0.5, 0.6, 0.5, 1.0])
    assert [chance for _, chance in found] == pytest.approx([0.2, 0.5, 1.0, 0.0])


def test_a_law_at_another_temperature_keeps_its_support() -> None:
    """Squares where roots are meant."""
    law = tempered(Distribution.dense([0.8, 0.2, 0.0]), 0.5)
    assert law.prob(0) == pytest.approx(0.64 / 0.68)
    assert law.prob(2) == 0.0
