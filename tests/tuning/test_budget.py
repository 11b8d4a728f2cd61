"""The time of a tuning: who gets how much, and one bar that only rises."""

from __future__ import annotations

import pytest

from specllama.tuning.budget import Budget
from specllama.tuning.costs import FEWER_ROWS, VERIFY_ROWS, affordable


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_piece_gets_its_share_of_what_is_left() -> None:
    """A tuning of five minutes that takes ten, because one piece took longer than its share."""
    clock, shown = _Clock(), list[float]()
    budget = Budget(60.0, lambda _what, share: shown.append(share), clock)
    budget.plan(1.0 + 2.0 + 3.0)
    assert budget.piece(1.0)[0] == pytest.approx(10.0)
    clock.now += 30.0  # three times its share
    assert budget.piece(2.0)[0] == pytest.approx(30.0 * 2 / 5)
    clock.now += 2.0  # less than its share
    seconds, tell = budget.piece(3.0)
    assert seconds == pytest.approx(28.0)
    tell("last", 1.0)
    assert shown == [pytest.approx(1.0)]
    clock.now += 40.0
    assert budget.piece(1.0)[0] == 0.0  # without a plan, and too late


def test_the_bar_never_goes_back() -> None:
    """A bar that falls where a child begins anew or more pieces come."""
    shown = list[float]()
    budget = Budget(60.0, lambda _what, share: shown.append(share), _Clock())
    budget.plan(2.0)
    _, tell = budget.piece(1.0)
    for share in (0.0, 0.9, 0.1, 1.0):
        tell("passes", share)
    budget.plan(4.0)  # a pair of paths is divided
    for _ in range(5):
        _, tell = budget.piece(1.0)
        tell("passes", 0.5)
        tell("passes", 1.0)
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(1.0)


def test_a_part_that_fails_or_is_left_out_gives_its_time_to_the_others() -> None:
    """Minutes saved for a draft that cannot be made."""
    clock = _Clock()
    budget = Budget(60.0, lambda _what, _share: None, clock)
    budget.plan(3.0 + 3.0)
    with pytest.raises(ValueError, match="made"), budget.part(3.0) as has_time:
        assert has_time
        budget.piece(1.0)
        raise ValueError("it cannot be made")
    assert budget.piece(3.0)[0] == pytest.approx(60.0)
    clock.now += 61.0
    with budget.part(1.0) as has_time:
        assert not has_time


def test_a_slow_machine_measures_fewer_blocks() -> None:
    """A target of one token a second for which the passes of one child take five minutes."""
    assert affordable(VERIFY_ROWS, 0.05, 10.0) == VERIFY_ROWS
    assert affordable(VERIFY_ROWS, 0.1, 7.0) == FEWER_ROWS[0]
    assert affordable(VERIFY_ROWS, 1.0, 10.0) == FEWER_ROWS[1]
    assert affordable((1, 2), 1.0, 0.0) == (1,)  # a target whose longest block is 2
