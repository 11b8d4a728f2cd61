"""The speed of an answer against plain decoding, estimated from the times of its own passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TypeAlias

# T(n)/T(1) of the target for (rows, tokens of context), by a profile; None = not measured.
Cost: TypeAlias = Callable[[int, int], float | None]


def unmeasured(n_rows: int, n_context: int) -> None:
    """The `Cost` without a profile."""


LEAST_PASSES = 5  # fewer say nothing about the spread
LEAST_PAIRS = 16  # so many neighbours correct the profile; the median of fewer is less certain than the profile


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One verify pass of the target after the first. Times in seconds."""

    n_rows: int
    n_tokens: int  # accepted ones, and the correction or bonus
    cost: float | None  # of so many rows in T(1), by the profile; None without a profile
    eval_s: float
    sample_s: float
    step_s: float  # the whole step, drafting included


@dataclass(frozen=True, slots=True)
class Gain:
    """Speed over plain decoding, and its quartiles by pass."""

    value: float
    low: float
    high: float


def gain(passes: Sequence[TimedPass]) -> Gain | None:
    """The time that plain decoding would have taken for the tokens, over the time taken; None if T(1) is not known.

    Each pass gives T(1) at its own moment and depth of the context: its time over T(n)/T(1) of the profile. Passes of
    one row need no profile; those beside wider passes correct it. A plain token is sampled once as well.
    """
    known = [(each, step_s) for each, step_s in zip(passes, _single_row_times(passes), strict=True) if step_s]
    if len(known) < LEAST_PASSES:
        return None
    evals_s = sum(each.n_tokens * step_s for each, step_s in known)
    sample_s = sum(each.sample_s for each, _ in known)
    spent_s = sum(each.step_s for each, _ in known)
    mean_s = evals_s / sum(each.n_tokens for each, _ in known)
    low_s, _, high_s = quantiles((step_s for _, step_s in known), n=4)
    ends = (min(low_s, mean_s), mean_s, max(high_s, mean_s))
    low, value, high = ((evals_s * each_s / mean_s + sample_s) / spent_s for each_s in ends)
    return Gain(value, low, high)


def _single_row_times(passes: Sequence[TimedPass]) -> list[float | None]:
    """T(1) in seconds at each pass; None = unknown."""
    single = [i for i, each in enumerate(passes) if each.n_rows == 1]
    error, at, found = _error_of_profile(passes), 0, list[float | None]()
    for i, each in enumerate(passes):
        while at + 1 < len(single) and abs(single[at + 1] - i) <= abs(single[at] - i):
            at += 1  # the nearest pass of one row
        if each.n_rows == 1:
            found.append(each.eval_s)
        elif each.cost:
            found.append(each.eval_s / each.cost / error)
        else:
            found.append(passes[single[at]].eval_s if len(single) >= LEAST_PASSES else None)
    return found


def _error_of_profile(passes: Sequence[TimedPass]) -> float:
    """The cost of passes of several rows, measured against their neighbours of one row, over that of the profile."""
    ratios = []
    for pair in pairwise(passes):
        one, other = sorted(pair, key=lambda each: each.n_rows)
        if one.n_rows == 1 < other.n_rows and one.eval_s and other.cost:
            ratios.append(other.eval_s / other.cost / one.eval_s)
    return median(ratios) if len(ratios) >= LEAST_PAIRS else 1.0
