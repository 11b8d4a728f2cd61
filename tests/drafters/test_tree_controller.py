"""Decisions of the controller of trees: which nodes are drawn and read, and what it learns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specllama.core.types import Draft, Observation, Verdict
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import DOUBTFUL_GAP, FIRST_GAP, PROBE_TOKENS, CostProfile, Points
from specllama.drafters.shape import Situation
from specllama.drafters.tree_controller import TreeController

FLAT: Points = ((1, 1.0), (17, 1.2))
RISING: Points = ((1, 1.0), (17, 2.6))
STEEP: Points = ((1, 1.0), (17, 17.0))


def controller(verify: Points = FLAT, c: float = 0.1, *, typical: float = 0.8, slope: float = 0.65) -> TreeController:
    """A cheap draft that reads a few nodes as fast as one."""
    costs = CostProfile(verify=verify, draft=((1, c), (8, 1.2 * c)))
    prior = Prior(typical, typical - 0.8 * slope, slope, known=True)
    return TreeController(costs, calibration=Calibration(prior))


def grown(policy: TreeController, confidences: Sequence[float]) -> list[int]:
    """The parents of the drawn nodes; confidences: of the children of every node, by rank."""
    n = policy.plan_tree(Situation(16, 8, lag=0)).n_given
    parents, level = list[int](), [-1]
    while level and (chosen := policy.expand(level)):
        level = []
        for parent in chosen:
            for confidence in confidences:
                if not policy.go_on_tree(parent, confidence):
                    break
                level.append(n + len(parents))
                parents.append(parent)
    return parents


def seen(parents: Sequence[int], path: Sequence[int]) -> Observation:
    """All nodes were submitted in the order in which they were drawn."""
    return Observation((), Draft(tuple(range(len(parents))), None, tuple(parents)), Verdict(tuple(path), 0), "test")


def test_confidence_decides_between_width_and_depth() -> None:
    """A tree that is the same whether the draft is sure or not."""
    sure = grown(controller(RISING, typical=0.9), (0.99, 0.9))
    doubtful = grown(controller(RISING), (0.35, 0.9, 0.3))
    assert sure == list(range(-1, len(sure) - 1)), "nothing is left for a sibling"
    assert doubtful.count(-1) > 1
    assert len(sure) > max(doubtful) + 1, "a doubtful path ends earlier"


@pytest.mark.parametrize("confidence", [0.3, 0.99])
def test_nothing_is_drafted_where_rows_are_expensive(confidence: float) -> None:
    """A draft that costs more than it can give, or a probe of it."""
    policy = controller(STEEP)
    assert grown(policy, (confidence,)) == []
    for _ in range(3 * DOUBTFUL_GAP):
        assert policy.plan_tree(Situation(16, 8, lag=0)).probe == 0
        policy.observe(seen((), ()))


def test_one_leaf_is_a_chain() -> None:
    """Siblings for a model that evaluates no trees."""
    policy = controller()
    policy.plan_tree(Situation(16, 1, lag=0))
    assert policy.expand([-1]) == [-1]
    assert policy.go_on_tree(-1, 0.3)
    assert not policy.go_on_tree(-1, 0.9)


def test_the_limit_holds_for_offered_and_drawn_nodes_together() -> None:
    """More rows than the target's context or batch has room for."""
    policy = controller()
    plan = policy.plan_tree(Situation(3, 8, offer=[(0.9, -1), (0.9, 0), (0.9, 1), (0.9, 2)], lag=0))
    assert plan.n_given + plan.n_drawn == 3
    policy = controller()
    policy.plan_tree(Situation(2, 8, lag=0))
    policy.expand([-1])
    assert [policy.go_on_tree(-1, 0.3) for _ in range(3)] == [True, True, False]


def test_offered_nodes_are_taken_while_they_pay() -> None:
    """Unlikely lookups that make every pass longer; a lookup that the model's draft hides."""
    policy = controller(RISING)
    offer = [(0.9, -1), (0.8, 0), (0.05, -1), (0.02, 1)]
    assert policy.plan_tree(Situation(16, 8, offer=offer)).n_given == 2
    assert policy.plan_tree(Situation(16, 8, offer=[(0.05, -1)])).n_given == 0
    plan = policy.plan_tree(Situation(16, 8, offer=[(0.99, -1), (0.99, 0), (0.99, 1)], lag=0))
    assert plan.n_given == 3


def test_each_rank_learns_from_the_nodes_that_were_judged() -> None:
    """Siblings after the accepted one, and nodes below a rejected one, counted as rejected."""
    policy = controller()
    parents = grown(policy, (0.35, 0.9, 0.9))
    assert parents[:3] == [-1, -1, -1]
    at = [node for node, parent in enumerate(parents) if parent == 1]
    assert len(at) > 1
    policy.observe(seen(parents, (1, at[0])))
    first, second, third = (each.judged for each in policy.by_rank[:3])
    below = [node for node, parent in enumerate(parents) if parent == at[0]]
    assert (first.n, first.accepted) == (2 + bool(below), 1.0)
    assert (second.n, second.accepted) == (1 + (len(below) > 1), 1.0)
    assert third.n == int(len(below) > 2)


def test_siblings_that_are_never_right_are_drawn_no_more() -> None:
    """A tree of fixed shape for a pair whose draft is right the first time or never."""
    policy = controller(RISING)
    assert grown(policy, (0.35, 0.9)).count(-1) == 2
    for _ in range(60):
        parents = grown(policy, (0.35, 0.9))
        policy.observe(seen(parents, ()))
        parents = grown(policy, (0.35, 0.9))
        policy.observe(seen(parents, (0,)))
    assert grown(policy, (0.35, 0.9)).count(-1) == 1


def test_a_draft_that_was_cut_teaches_nothing() -> None:
    """Nodes taken for others after the drafter left some out."""
    policy = controller()
    parents = grown(policy, (0.35, 0.5))
    policy.observe(seen(parents[:-1], ()))
    assert all(each.judged.n == 0 for each in policy.by_rank)


def test_the_same_answers_give_the_same_trees() -> None:
    """A decision from the clock: the same seed would give other texts."""
    one, other = controller(), controller()
    for step in range(30):
        confidences = (0.3 + 0.02 * step, 0.9)
        parents = grown(one, confidences)
        assert grown(other, confidences) == parents
        path = (0,) if parents and step % 3 else ()
        one.observe(seen(parents, path))
        other.observe(seen(parents, path))


def test_the_first_probe_of_a_model_that_must_catch_up_comes_soon() -> None:
    """A long prompt that is never read, because trees do not probe."""
    costs = CostProfile(verify=FLAT, draft=((1, 0.1), (8, 0.12)))
    policy = TreeController(costs, calibration=Calibration(Prior()))  # of an unknown pair
    assert policy.plan_tree(Situation(16, 8, lag=300)).n_drawn == 0
    for _ in range(FIRST_GAP):
        policy.observe(seen((), ()))
        plan = policy.plan_tree(Situation(16, 8, lag=300))
    assert plan.probe == PROBE_TOKENS


def test_a_sibling_pays_for_the_row_it_adds_to_the_levels_to_come() -> None:
    """Where four rows cost less than three, a sibling took the cheap row and left the dear one to the next level."""
    jumpy: Points = ((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (5, 1.83), (6, 2.19), (16, 3.4))
    assert grown(controller(jumpy, c=0.21), (0.7, 0.5))[:3] == [-1, 0, 1]


def test_a_bad_model_is_not_used_beside_an_offer() -> None:
    """The share of later ranks over the first one, which exceeds 1 for a model that is rarely right at first."""
    policy = controller(RISING, c=0.3, typical=0.1, slope=0.0)
    plan = policy.plan_tree(Situation(16, 8, offer=[(0.3, -1)], lag=0))
    assert (plan.n_given, plan.n_drawn) == (1, 0)
