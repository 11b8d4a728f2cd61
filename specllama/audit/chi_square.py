"""The chi-square test: p-values of counts, and the bias that would have been detected. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specllama.audit.enumeration import Outcome

LEAST_EXPECTED = 8.0  # outcomes expected less often share one bin: with fewer, the statistic is not chi-square
SURPRISE = 1e-6  # a smaller p-value fails the test
POWER = 0.95  # chance of detection of a bias that counts as visible


def _growth(a: float, x: float) -> float:
    """Q(a + 1, x) - Q(a, x), where Q is the regularised upper incomplete gamma function."""
    return math.exp(a * math.log(x) - x - math.lgamma(a + 1.0))


def survival(statistic: float, n_free: int) -> float:
    """The chance that chi-square with `n_free` degrees of freedom exceeds `statistic`: Q(n_free / 2, statistic / 2)."""
    if n_free == 0 or statistic <= 0.0:
        return 1.0 if statistic <= 0.0 else 0.0
    x, odd = statistic / 2.0, n_free % 2
    start = math.erfc(math.sqrt(x)) if odd else 0.0
    return min(start + math.fsum(_growth(i + odd / 2.0, x) for i in range(n_free // 2)), 1.0)


def _bisected(function: Callable[[float], float], value: float, *, high: float, falling: bool) -> float:
    """The argument between 0 and `high` at which a monotone function has `value`."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2.0
        if (function(middle) > value) == falling:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def critical(n_free: int) -> float:
    """The statistic whose p-value is SURPRISE."""
    return _bisected(lambda x: survival(x, n_free), SURPRISE, high=10.0 * n_free + 1000.0, falling=True)


def _noncentral_survival(statistic: float, n_free: int, shift: float) -> float:
    """`survival` of the non-central chi-square: a Poisson mixture of central ones with mean `shift` / 2."""
    mean = shift / 2.0
    first = max(0, int(mean - 12.0 * math.sqrt(mean + 1.0)))
    last = int(mean + 12.0 * math.sqrt(mean + 1.0)) + 10
    total, share = 0.0, survival(statistic, n_free + 2 * first)
    for n in range(first, last):
        weight = math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) if mean > 0.0 else float(n == 0)
        total += weight * share
        share += _growth(n_free / 2.0 + n, statistic / 2.0)
    return total


def visible_shift(n_free: int) -> float:
    """The non-centrality that a test at SURPRISE detects with a chance of POWER."""
    bound = critical(n_free)
    return _bisected(lambda x: _noncentral_survival(bound, n_free, x), POWER, high=4.0 * bound + 200.0, falling=False)


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic, summed over independent samples."""

    n_draws: int = 0
    statistic: float = 0.0
    n_free: int = 0  # degrees of freedom

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(self.n_draws + other.n_draws, self.statistic + other.statistic, self.n_free + other.n_free)

    @property
    def p_value(self) -> float | None:
        """None if nothing can vary."""
        return survival(self.statistic, self.n_free) if self.n_free else None

    @property
    def visible_tv(self) -> float | None:
        """A bias of this total variation in every sample is detected with a chance of at least POWER.

        The sum of (r - p)^2 / p over the bins is at least (2 TV)^2 for every bias (Cauchy-Schwarz).
        """
        if not self.n_free:
            return None
        tv = math.sqrt(visible_shift(self.n_free) / (4.0 * self.n_draws))
        return tv if tv < 1.0 else None

    @property
    def surprising(self) -> bool:
        return self.p_value is not None and self.p_value < SURPRISE


def of_counts(counts: Sequence[float], expected: Sequence[float]) -> ChiSquare:
    """The statistic of counts against expected counts; both sum to the number of draws."""
    statistic = math.fsum((seen - wanted) ** 2 / wanted for seen, wanted in zip(counts, expected, strict=True))
    return ChiSquare(round(math.fsum(counts)), statistic, len(counts) - 1)


def of_law(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> ChiSquare:
    """The statistic of counted outcomes against `law`; rare outcomes and those missing in `law` share one bin."""
    n_draws = sum(counts.values())
    common = [key for key, prob in law.items() if n_draws * prob >= LEAST_EXPECTED]
    seen: list[float] = [counts.get(key, 0) for key in common]
    wanted = [n_draws * law[key] for key in common]
    seen_rest, wanted_rest = n_draws - math.fsum(seen), max(n_draws - math.fsum(wanted), 0.0)
    if not common:
        return ChiSquare(n_draws)
    if wanted_rest >= LEAST_EXPECTED:
        return of_counts([*seen, seen_rest], [*wanted, wanted_rest])
    least = min(range(len(common)), key=wanted.__getitem__)
    seen[least] += seen_rest
    wanted[least] += wanted_rest
    return of_counts(seen, wanted)
