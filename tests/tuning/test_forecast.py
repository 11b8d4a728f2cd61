"""From measured costs and acceptance to what to expect."""

from __future__ import annotations

import json

import pytest

from specllama.base.jsonable import from_plain
from specllama.core.stats import SpecStats
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import LEAST_RATE, UNMEASURED, CostProfile, rows_of
from specllama.tuning.forecast import Outlook, break_even, outlook, speedup

# benchmarks/README.md: AMX, the draft as published (c = 0.42) and requantised (c = 0.21).
VERIFY = ((1, 1.0), (2, 1.59), (3, 1.67), (4, 1.73), (5, 1.83), (6, 1.9), (8, 2.08), (12, 2.42), (16, 2.79))
EXPENSIVE = CostProfile(verify=VERIFY, draft=((1, 0.42), (2, 0.5)))
CHEAP = CostProfile(verify=VERIFY, draft=((1, 0.21), (2, 0.25)))
FLAT = CostProfile(verify=((1, 1.0), (5, 1.0)), draft=((1, 0.1), (2, 0.1)))
HOPELESS = CostProfile(verify=((1, 1.0), (2, 2.0), (5, 5.0)), draft=((1, 0.5), (2, 0.5)))


def counted(n_accepted: int, n_rejected: int) -> SpecStats:
    return SpecStats(n_accepted=n_accepted, n_rejected=n_rejected)


def of(costs: CostProfile, **classes: SpecStats) -> Outlook:
    return outlook(costs, 0.1, classes)


@pytest.mark.parametrize(("alpha", "expected"), [(0.8, 2.401), (0.2, 0.893)])
def test_the_papers_figures_come_out(alpha: float, expected: float) -> None:
    """Prevents: a formula that is off by one token (docs/design.md, Cost model: T flat, c = 0.1, k = 4)."""
    assert speedup(FLAT, alpha, 4) == pytest.approx(expected, abs=5e-4)
    assert speedup(FLAT, alpha, 0) == 1.0


def test_measured_costs_count_and_so_does_reading_an_accepted_draft() -> None:
    """Prevents: T(n) taken for constant, or the draft's second row for free."""
    assert speedup(CHEAP, 1.0, 3) == pytest.approx(4 / (3 * 0.21 + 1.73 + 0.04))
    assert speedup(CHEAP, 0.9, 5) > speedup(EXPENSIVE, 0.9, 5) > 1.0


def test_the_best_length_is_chosen_and_the_range_is_that_of_the_classes() -> None:
    """Prevents: a promise from the best class alone, or a length that is not the best."""
    found = of(CHEAP, code=counted(90, 10), story=counted(65, 35))
    assert found.pays
    assert len(found.points) == 16
    assert found.alpha == pytest.approx(0.775)
    assert found.best == max(found.points, key=lambda point: point.expected)
    assert found.best.low == speedup(CHEAP, 0.65, found.best.n_max)
    assert found.best.high == speedup(CHEAP, 0.9, found.best.n_max)
    for figure in (f"story {found.best.low:.2f}", f"code {found.best.high:.2f}", f"-n-max {found.best.n_max}"):
        assert figure in found.advice


@pytest.mark.parametrize(("costs", "hope"), [(HOPELESS, "cannot pay"), (EXPENSIVE, "is 30 %; it would pay from ")])
def test_a_draft_that_does_not_pay_is_advised_against_with_the_reason(costs: CostProfile, hope: str) -> None:
    """Prevents: a slow draft that is recommended, or refused without a reason."""
    found = of(costs, question=counted(30, 70))
    assert not found.pays
    assert found.best.n_max == 0
    for words in (f"takes {costs.draft_cost():.2f}", hope):
        assert words in found.advice


def test_an_assumed_acceptance_is_no_reason_to_refuse_a_draft() -> None:
    """Prevents: 'do not use this draft' where nothing of its acceptance was measured."""
    needed = break_even(EXPENSIVE, 15)
    found = of(EXPENSIVE)
    if found.pays:  # at the assumed acceptance
        found = of(CostProfile(verify=VERIFY, draft=((1, 0.6), (2, 0.7))))
        needed = break_even(found.costs, 15)
    assert needed is not None
    assert not found.pays
    assert not found.advice.startswith("do not")
    for figure in (f"{100 * Prior().typical:.0f} %", f"{100 * needed:.0f} %"):
        assert figure in found.advice


def test_the_break_even_is_where_it_begins_to_pay() -> None:
    """Prevents: 'it would pay from 60 % on' although it does not."""
    needed = break_even(EXPENSIVE, 15)
    assert needed is not None
    for alpha, pays in ((needed, True), (needed - 0.01, False)):
        assert any(speedup(EXPENSIVE, alpha, n) > 1.02 for n in range(1, 16)) is pays
    assert break_even(HOPELESS, 4) is None
    only_all = CostProfile(verify=((1, 1.0), (2, 1.2)), draft=((1, 0.757), (2, 0.757)))
    assert speedup(only_all, 1.0, 1) > LEAST_RATE
    assert break_even(only_all, 1) is None, "what pays from 100 % on cannot pay"


def test_classes_without_a_draft_do_not_count() -> None:
    """Prevents: a division by zero after an answer of one token."""
    assert [each.name for each in of(CHEAP, code=counted(9, 1), empty=counted(0, 0)).classes] == ["code"]


def test_without_measured_acceptance_the_outlook_says_what_it_assumes() -> None:
    """Prevents: no verdict, or one that looks measured, from a probe that was stopped after the costs."""
    found = outlook(CHEAP, 0.1, {"empty": counted(0, 0)})
    assert (found.classes, found.alpha) == ((), Prior().typical)
    assert found.best.low == found.best.expected == found.best.high > 1.0
    assert "not measured" in found.advice


def test_only_lengths_whose_costs_were_measured_are_advised() -> None:
    """Prevents: advice from assumed costs of long blocks."""
    costs = CostProfile(verify=((1, 1.0), (4, 1.1), (17, 1.2)), draft=((1, 0.05),), assumed=(17,))
    assert [point.n_max for point in of(costs, code=counted(99, 1)).points] == [0, 1, 2, 3]
    hopeless = CostProfile(verify=UNMEASURED, draft=((1, 1.0),), assumed=rows_of(UNMEASURED))
    assert "cannot pay" in outlook(hopeless, 0.1, {}).advice


def test_an_outlook_is_plain_data() -> None:
    """Prevents: a `check --probe --json` that cannot be written."""
    data = json.loads(json.dumps(of(CHEAP, code=counted(9, 1)).to_json(), allow_nan=False))
    assert data["acceptance"]["code"]["alpha"] == 0.9
    assert from_plain(CostProfile, data["costs"]) == CHEAP
    assert data["points"][0] == {"n_max": 0, "low": 1.0, "expected": 1.0, "high": 1.0}
