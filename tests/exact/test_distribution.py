"""`Distribution`: accepted mass and residual together are p, in every storage that laws can have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.base.errors import DraftLawError, NumericsError
from specllama.core.distribution import Distribution

Probs = dict[int, float]


@st.composite
def laws(draw: st.DrawFn, n_vocab: int = 12) -> tuple[Probs, Distribution]:
    """A law as a dict and as a Distribution: dense, dense and shorter, or on a support given in any order."""
    n = draw(st.integers(1, n_vocab))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.random(n) ** draw(st.sampled_from([1, 8])) * (rng.random(n) < draw(st.sampled_from([1.0, 0.6])))
    weights[int(rng.integers(n))] += 0.1
    probs = weights / weights.sum()
    if draw(st.booleans()):
        return dict(enumerate(probs.tolist())), Distribution.dense(probs)
    ids = rng.permutation(n_vocab)[:n].tolist()
    return dict(zip(ids, probs.tolist(), strict=True)), Distribution.on(ids, probs)


@given(laws(), laws(), st.sampled_from([1.0, 1.0, 0.7, 0.05]))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_accepted_and_residual_mass_together_are_p(
    target: tuple[Probs, Distribution], draft: tuple[Probs, Distribution], weight: float
) -> None:
    """docs/design.md, Exactness. A residual that mixes up dense and sparse cells, or laws of different lengths."""
    (p, p_law), (q, q_law) = target, draft
    left = {token: max(weight * p.get(token, 0.0) - q.get(token, 0.0), 0.0) for token in range(12)}
    mass = math.fsum(left.values())
    residual = p_law.residual(q_law, weight)
    for token in range(12):
        if mass > 1e-15:
            assert residual.prob(token) == pytest.approx(left[token] / mass, abs=1e-9)
        accepted = min(weight * p.get(token, 0.0), q.get(token, 0.0))
        assert accepted + mass * residual.prob(token) == pytest.approx(weight * p.get(token, 0.0), abs=1e-12)
    assert residual.mass() == pytest.approx(1.0, abs=1e-9)
    shared = math.fsum(min(p.get(token, 0.0), q.get(token, 0.0)) for token in range(12))
    assert 0.0 <= p_law.overlap(q_law) == pytest.approx(shared, abs=1e-12)


@given(laws())
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_a_law_tells_the_same_in_every_way_it_is_asked(law: tuple[Probs, Distribution]) -> None:
    """prob, support, items, peak and without disagreeing about zeros or ids."""
    probs, made = law
    positive = {token: prob for token, prob in probs.items() if prob > 0.0}
    ids, values = made.items()
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == positive
    assert made.support().tolist() == sorted(positive)
    assert made.peak() == max(positive.values())
    assert all(made.prob(token) == probs.get(token, 0.0) for token in range(-2, 20))
    for token in positive:
        left = made.without(token)
        if len(positive) > 1:
            assert left.prob(token) == 0.0
            assert left.mass() == pytest.approx(1.0)


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    """0/0 where rounding leaves no mass."""
    p = Distribution.dense([0.1, 0.2, 0.7])
    assert p.residual(p) == p
    assert p.residual(Distribution.on([2, 0, 1], [0.7, 0.1, 0.2])) == p


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
def test_a_residual_of_little_mass_is_a_residual(distance: float) -> None:
    """p itself where p and q nearly agree, or a sibling left in q because little else is."""
    p = Distribution.dense([0.1, 0.2, 0.7])
    for q in (Distribution.dense([0.1 - distance, 0.2, 0.7 + distance]), Distribution.on([1, 2], [0.2, 0.7])):
        assert p.residual(q) == Distribution.point(0)
    steep = Distribution.on([3, 5, 8], [1.0 - distance, 0.75 * distance, 0.25 * distance])
    assert [steep.without(3).prob(token) for token in (3, 5, 8)] == pytest.approx([0.0, 0.75, 0.25], abs=1e-15)


def test_a_law_does_not_change_with_the_array_it_was_made_from() -> None:
    """A law that shares memory with a logits buffer and changes with the next step."""
    source = np.array([0.5, 0.5])
    law = Distribution.dense(source)
    source[0] = 0.0
    assert law.prob(0) == 0.5
    ids = np.array([5, 2])
    sparse = Distribution.on(ids, source + 0.5)
    ids[0] = 7
    assert sparse.support().tolist() == [2, 5]
    for each in (
        law,
        sparse,
        Distribution.on([2, 5], [0.5, 0.5]),
        Distribution.point(2),
        law.residual(sparse),
        sparse.without(2),
    ):
        for cells in each.cells():
            if cells is not None:
                with pytest.raises(ValueError, match="read-only"):
                    cells[0] = 1


def test_equal_laws_are_equal_however_they_are_stored() -> None:
    """Two laws for one, because one of them stores a zero."""
    same = {Distribution.dense([0.0, 1.0]), Distribution.point(1), Distribution.on([5, 1], [0.0, 1.0])}
    assert same == {Distribution.on([1], [1.0])}
    assert Distribution.point(1) not in (Distribution.point(2), Distribution.dense([0.5, 0.5]), 1)


def test_a_law_is_shown_by_its_first_tokens() -> None:
    """A message or a failed test that shows arrays of 152k numbers."""
    assert repr(Distribution.on([3, 1, 2], [0.25, 0.75, 0.0])) == "Distribution({1: 0.75, 3: 0.25})"
    assert repr(Distribution.dense([0.125] * 8)).endswith(" 7: 0.125})")
    assert repr(Distribution.dense([0.1] * 9)).endswith(" 7: 0.1, ...})")


@pytest.mark.parametrize("probs", [[math.nan, 1.0], [-0.1, 1.1], [math.inf, 0.0], [], [[0.5, 0.5]]])
def test_numbers_that_are_no_probabilities_are_refused(probs: list[float]) -> None:
    """A NaN that travels on until a token out of range is drawn."""
    with pytest.raises(NumericsError):
        Distribution.dense(probs)
    with pytest.raises(NumericsError):
        Distribution.on(range(len(probs)), probs)


def test_ids_and_probabilities_are_as_many() -> None:
    """Probabilities of the wrong tokens."""
    with pytest.raises(ValueError, match="2 ids for 1"):
        Distribution.on([0, 1], [1.0])


def test_a_mass_that_is_not_one_is_told() -> None:
    """q not renormalised after a filter."""
    Distribution.dense([0.5, 0.5 + 5e-7]).require_normalised()
    for probs in ([0.5, 0.4], [0.5, 0.5 + 2e-6]):
        with pytest.raises(DraftLawError):
            Distribution.dense(probs).require_normalised()


@pytest.mark.parametrize("ids", [[3, 1, 3], [1, 3, 3]])
def test_a_token_may_stand_only_once_in_a_support(ids: list[int]) -> None:
    """Mass counted twice, found once."""
    with pytest.raises(ValueError, match="twice"):
        Distribution.on(ids, [0.2, 0.3, 0.5])
