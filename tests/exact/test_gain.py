"""The gain over plain decoding, from the times of an answer's passes; see core/gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.core.gain import LEAST_PAIRS, LEAST_PASSES, Gain, TimedPass, gain
from tests.marks import looped

Clock = Callable[[int], float]  # T(1) in seconds at each pass


def cost(n: int) -> float:
    """A made-up T(n)/T(1): a step up at two rows, then flat, then steep."""
    return 1.0 if n == 1 else 1.5 + 0.05 * n + (0.2 * (n - 8) if n > 8 else 0.0)


def made(steps: Sequence[tuple[int, int, float]], t_1: Clock, *, off: float = 1.0) -> list[TimedPass]:
    """Passes of (rows, accepted tokens at most, drafting in s). `off`: wide passes in the profile over the truth."""
    found = []
    for i, (n_rows, n_accepted, draft_s) in enumerate(steps):
        eval_s, said = t_1(i) * cost(n_rows), cost(n_rows) * (off if n_rows > 1 else 1.0)
        n_tokens = min(n_accepted, n_rows - 1) + 1
        sample_s = 0.002 * n_tokens
        found.append(TimedPass(n_rows, n_tokens, said, eval_s, sample_s, draft_s + eval_s + sample_s))
    return found


def truth(passes: Sequence[TimedPass], t_1: Clock) -> float:
    """The time of plain decoding, by the made-up machine, over the time taken."""
    return sum(each.n_tokens * (t_1(i) + 0.002) for i, each in enumerate(passes)) / sum(p.step_s for p in passes)


def answer(random: Random, n: int = 40, *, plain: float = 0.3) -> list[tuple[int, int, float]]:
    """Steps of an answer, a share of them without a draft."""
    widths = (1 if random.random() < plain else random.randint(2, 9) for _ in range(n))
    return [(n_rows, random.randint(0, 8), 0.01 * (n_rows - 1)) for n_rows in widths]


def found(passes: Sequence[TimedPass]) -> Gain:
    known = gain(passes)
    assert known is not None
    return known


@given(st.integers(0, 2**32), st.integers(LEAST_PASSES, 80), st.floats(0.0, 1.0), st.floats(-0.01, 0.01))
def test_without_noise_the_gain_is_exact_while_the_machine_changes_its_speed(
    seed: int, n: int, plain: float, drift: float
) -> None:
    """A laptop that throttles, or a context that grows: T(1) of the beginning would show a gain that is not there."""

    def t_1(i: int) -> float:
        return 0.05 * (1.0 + drift * i)

    passes = made(answer(Random(seed), n, plain=plain), t_1)
    seen = found(passes)
    assert seen.value == pytest.approx(truth(passes, t_1), rel=1e-9 + 5 * abs(drift))
    assert seen.low <= seen.value <= seen.high


def test_the_interval_covers_the_truth_under_noise() -> None:
    """Ten percent of noise on every pass: an interval that is too sure."""
    n_covered = 0
    for seed in range(200):
        random = Random(seed)
        noise = [max(random.gauss(1.0, 0.1), 0.5) for _ in range(40)]
        passes = made(answer(random), lambda i, noise=noise: 0.05 * noise[i])  # type: ignore[misc]
        seen = found(passes)
        n_covered += seen.low <= truth(passes, lambda _i: 0.05) <= seen.high
        assert seen.high / seen.low < 1.4
    assert n_covered >= 190


def test_passes_of_one_row_correct_a_wrong_profile() -> None:
    """A profile measured at another depth, or on a machine that was busy: a gain 30 % too high."""
    passes = made(answer(Random(1), 4 * LEAST_PAIRS), lambda _i: 0.05, off=0.7)
    assert found(passes).value == pytest.approx(truth(passes, lambda _i: 0.05))
    few = made(answer(Random(1), plain=0.0), lambda _i: 0.05, off=0.7)
    assert found(few).value == pytest.approx(truth(few, lambda _i: 0.05) / 0.7, rel=0.05), "nothing tells it"


@pytest.mark.parametrize(("n_pairs", "corrects"), [(15, False), (16, True)])
def test_so_many_neighbours_correct_a_profile_and_passes_of_one_row_are_no_neighbours(
    n_pairs: int, corrects: bool
) -> None:
    """A correction by chance, or by the ratio of two passes of one row: that of the profile is not in it."""
    passes = made([(1, 0, 0.0)] * 40 + [(4, 3, 0.02), (1, 0, 0.0)] * (n_pairs // 2) + [(4, 3, 0.02)] * (n_pairs % 2),
                  lambda _i: 0.05, off=0.5)  # fmt: skip
    assert (found(passes).value == pytest.approx(truth(passes, lambda _i: 0.05))) == corrects


@looped(seed=range(40))
def test_without_a_profile_a_wide_pass_has_the_time_of_the_nearest_pass_of_one_row(seed: int) -> None:
    """The time of the answer's beginning, where the machine has slowed down since. Of two as near, it is the later."""
    random = Random(seed)
    steps = answer(random, 60)
    times = [random.uniform(0.01, 0.1) for _ in steps]
    passes = [replace(each, cost=None) for each in made(steps, times.__getitem__)]
    single = [i for i, each in enumerate(passes) if each.n_rows == 1]
    nearest = [times[min(single, key=lambda at: (abs(at - i), -at))] for i in range(len(passes))]
    assert found(passes).value == pytest.approx(truth(passes, nearest.__getitem__))


@pytest.mark.parametrize(("n_single", "is_known"), [(4, False), (5, True)])
def test_without_a_profile_only_some_passes_of_one_row_tell_the_gain(n_single: int, is_known: bool) -> None:
    """A guess where nothing was measured."""
    passes = made(answer(Random(2), plain=0.0) + [(1, 0, 0.0)] * n_single, lambda _i: 0.05)
    seen = gain([replace(each, cost=None) for each in passes])
    assert (seen.value if seen else None) == (pytest.approx(truth(passes, lambda _i: 0.05)) if is_known else None)


def test_without_a_profile_only_passes_of_one_row_tell_the_gain() -> None:
    """A guess where nothing was measured."""
    enough = made([*answer(Random(2)), (1, 0, 0.0)], lambda _i: 0.05)
    assert found([replace(each, cost=None) for each in enough]).value == pytest.approx(truth(enough, lambda _i: 0.05))


def test_a_few_passes_or_a_clock_that_stands_still_tell_nothing() -> None:
    """A ratio of the first two steps, or a division by zero on a coarse clock."""
    passes = made(answer(Random(3)), lambda _i: 0.05)
    assert gain(passes[:4]) is None
    assert gain(passes[:5]) is not None
    assert gain([replace(each, eval_s=0.0, sample_s=0.0, step_s=0.0) for each in passes]) is None


def test_drafting_in_vain_is_a_loss() -> None:
    """Acceptance taken for gain: every draft is accepted, and costs more than it saves."""
    passes = made([(5, 4, 0.5)] * 10, lambda _i: 0.05)
    assert found(passes).value < 0.5
    assert found([replace(each, step_s=each.step_s - 0.5) for each in passes]).value > 2.0
