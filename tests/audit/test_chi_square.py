"""The chi-square test, against scipy's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specllama.audit.chi_square import POWER, SURPRISE, ChiSquare, critical, of_counts, of_law, survival, visible_shift


@pytest.mark.parametrize("n_free", [1, 2, 7, 40, 300])
def test_the_law_is_scipys(n_free: int) -> None:
    """Prevents: a p-value of a truncated series or of the wrong tail."""
    from scipy.special import chdtrc, chdtri  # takes a quarter of a second

    for statistic in (0.01, 3.0, float(n_free), 2.0 * n_free, 5.0 * n_free + 30.0):
        assert survival(statistic, n_free) == pytest.approx(chdtrc(n_free, statistic), rel=1e-8, abs=1e-300)
    assert survival(0.0, n_free) == 1.0
    assert critical(n_free) == pytest.approx(chdtri(n_free, SURPRISE), rel=1e-9)


@pytest.mark.parametrize("n_free", [1, 20, 200])
def test_the_power_is_scipys(n_free: int) -> None:
    """Prevents: a bias called visible that most audits of this size would not see."""
    from scipy.special import chndtr

    assert 1.0 - chndtr(critical(n_free), n_free, visible_shift(n_free)) == pytest.approx(POWER, abs=1e-6)


def test_a_bias_as_large_as_the_visible_one_is_seen() -> None:
    """Prevents: a wrong factor between the statistic and the total variation."""
    n_draws, rng = 2000, np.random.default_rng(1)
    law = np.full(4, 0.25)
    seen_from = of_counts((500, 500, 500, 500), [500.0] * 4).visible_tv
    assert seen_from is not None
    biased = law + seen_from * np.array([0.5, 0.5, -0.5, -0.5])
    assert 0.5 * np.abs(biased - law).sum() == pytest.approx(seen_from)
    seen = [of_counts(rng.multinomial(n_draws, biased).tolist(), [500.0] * 4).surprising for _ in range(200)]
    assert sum(seen) >= 0.9 * len(seen)
    healthy = [of_counts(rng.multinomial(n_draws, law).tolist(), [500.0] * 4).surprising for _ in range(200)]
    assert not any(healthy)


def test_rare_outcomes_share_a_bin_and_none_is_lost() -> None:
    """Prevents: a huge statistic of expected counts near 0, or lost outcomes."""
    law = {"a": 0.6, "b": 0.3, "c": 0.06, "d": 0.004}
    found = of_law(Counter(a=60, b=30, c=6, d=2, e=2), law)
    assert found == of_counts([60, 40], [60.0, 40.0]) or found == of_counts([60, 30, 10], [60.0, 30.0, 10.0])
    assert of_law(Counter(a=100), {"a": 1.0}) == ChiSquare(100, 0.0, 0)
    assert of_law(Counter(x=5), {"a": 1.0}).n_free == 0
    assert of_law(Counter(e=100), {"a": 0.5, "b": 0.5}).surprising


def test_independent_samples_add_up_and_no_samples_give_no_figures() -> None:
    """Prevents: a division by zero if no sample can vary."""
    assert ChiSquare(10, 3.0, 2) + ChiSquare(5, 1.0, 1) == ChiSquare(15, 4.0, 3)
    assert ChiSquare().p_value is None
    assert ChiSquare().visible_tv is None
    assert not ChiSquare().surprising
