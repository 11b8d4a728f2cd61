"""The budget: what a row costs beside those of others, and what controllers make of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specllama.batch.budget import RowBudget, SharedCosts
from specllama.core.types import Draft, Observation, Part, Verdict
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.tree_controller import TreeController

# A pass is flat up to 4 rows, then each row costs a third of T(1); the draft costs a twelfth.
COSTS = CostProfile(verify=((1, 1.0), (4, 1.2), (17, 5.5)), draft=((1, 0.08), (17, 0.4)))


def controller(acceptance: float = 0.9) -> Controller:
    return Controller(COSTS, calibration=Calibration(Prior(typical=acceptance, base=acceptance, slope=0.0, known=True)))


def rows(*counts: int) -> list[Part]:
    """The parts of a pass, one per slot."""
    return [Part(slot, (0,) * n, n) for slot, n in enumerate(counts) if n]


def drafted(policy: Controller) -> int:
    """How many tokens it drafts while the draft is as sure as it accepts."""
    if not policy.plan(16, lag=0).n_drawn:
        return 0
    n = 0
    while policy.look(n) and policy.go_on(n, 0.5):
        n += 1
    return n


def test_alone_a_request_decides_by_the_profile_itself() -> None:
    """A single request of a batch that drafts otherwise than `run`."""
    budget, policy = RowBudget(), controller()
    budget.join(0, policy)
    budget.passed(rows(5), 1)
    assert policy.costs is COSTS
    budget.join(1, controller())
    budget.passed(rows(5, 1), 1)
    assert isinstance(policy.costs, SharedCosts)
    budget.leave(1)
    budget.passed(rows(5), 1)
    assert policy.costs is COSTS


def test_costs_are_the_share_of_a_pass_and_what_more_rows_add() -> None:
    """A row of a full pass that seems free, or the whole pass charged to one request."""
    shared = SharedCosts(COSTS, n_requests=4, n_others=3, n_drafting=2)
    share = COSTS.verify_cost(4) / 4
    assert shared.verify_cost(1) == 1.0
    assert shared.verify_cost(5) == pytest.approx(1.0 + (COSTS.verify_cost(8) - COSTS.verify_cost(4)) / share)
    assert shared.draft_cost() == pytest.approx(COSTS.draft_cost(2) / 2 / share)
    assert shared.draft_cost(9) == pytest.approx(
        (COSTS.draft_cost(2) / 2 + COSTS.draft_cost(10) - COSTS.draft_cost(2)) / share
    )


@pytest.mark.parametrize("kind", [Controller, TreeController])
def test_the_more_requests_the_shorter_the_drafts(kind: type[Controller]) -> None:
    """Drafts that slow a full machine down."""
    lengths = []
    for n in (1, 2, 4, 8, 16, 32):
        budget, policies = RowBudget(), [kind(COSTS) for _ in range(n)]
        for slot, policy in enumerate(policies):
            budget.join(slot, policy)
        for _ in range(9):
            budget.passed(rows(*[1] * n), n)
        lengths.append(drafted(policies[0]))
    assert lengths[0] == 3
    assert all(more >= fewer for more, fewer in pairwise(lengths))
    assert lengths[-1] == 0


def test_a_request_whose_drafts_are_accepted_drafts_longer_than_its_neighbour() -> None:
    """One length for all requests."""
    budget, sure, doubtful = RowBudget(), controller(0.97), controller(0.4)
    budget.join(0, sure)
    budget.join(1, doubtful)
    budget.passed(rows(4, 1), 1)
    assert drafted(sure) > drafted(doubtful)


def test_costs_change_only_with_a_pass_of_the_request_itself() -> None:
    """A length that changes in the middle of a step, by what others did meanwhile."""
    budget, policy = RowBudget(), controller()
    for slot in range(3):
        budget.join(slot, policy if slot == 0 else controller())
    before = policy.costs
    budget.passed(rows(0, 9, 9), 2)
    assert policy.costs is before
    budget.passed(rows(1, 9, 9), 2)
    assert policy.costs is not before


def test_a_row_more_or_less_changes_nothing() -> None:
    """A search for the best tree in every step."""
    budget, policy = RowBudget(), controller()
    for slot in range(4):
        budget.join(slot, policy if slot == 0 else controller())
    budget.passed(rows(1, 4, 4, 4), 4)
    before = policy.costs
    budget.passed(rows(1, 4, 5, 4), 4)
    assert policy.costs is before
    budget.passed(rows(1, 9, 9, 9), 4)
    assert policy.costs is not before


def test_requests_draft_together_where_one_alone_would_not() -> None:
    """Every request waiting for another to share the draft's pass."""
    dear = CostProfile(verify=((1, 1.0), (17, 1.3)), draft=((1, 0.5), (17, 0.6)))
    budget, policies = RowBudget(), [Controller(dear) for _ in range(8)]
    for slot, policy in enumerate(policies):
        budget.join(slot, policy)
    assert drafted(policies[-1]) > 0
    for _ in range(9):
        budget.passed(rows(*[1] * 8), 0)
    assert drafted(policies[-1]) == 0


@pytest.mark.parametrize(("n", "probes"), [(1, True), (16, False)])
def test_no_probe_where_no_draft_can_pay(n: int, probes: bool) -> None:
    """A tenth of the time spent on finding out about a draft that is not used whatever comes out."""
    budget, policies = RowBudget(), [controller(0.01) for _ in range(n)]
    for slot, policy in enumerate(policies):
        budget.join(slot, policy)
    policy, asked = policies[-1], 0
    for _ in range(60):
        asked += policy.plan(16, lag=40).probe
        policy.observe(Observation((), Draft(), Verdict((), 0), "none"))
        budget.passed(rows(*[1] * n), 0)
    assert (asked > 0) == probes
