"""The model of llama.cpp's `examples/speculative` does what its source says."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.bias import drafted, ours, plain, theirs
from specllama.audit.enumeration import law_of, tv
from tests.exact.loop import P, Q
from tests.fakes import always, random_laws

TARGET, DRAFT = always(P), always(Q)


@pytest.mark.parametrize(
    ("n_most", "first"),
    [
        # Token 2 is accepted with .2/.6, else the residual (.35, .05, 0) is drawn from.
        (1, [2 / 3 * 0.875, 2 / 3 * 0.125, 1 / 3]),
        # Token 1 is always accepted if it comes first (.3/.25), or after token 2 with .125/.25, and else (.667, 0, 0).
        (2, [1 / 6, 0.5 + 1 / 6, 1 / 6]),
    ],
)
def test_the_first_token_has_the_law_that_follows_by_hand(n_most: int, first: list[float]) -> None:
    """A bias that is ours, and called llama.cpp's."""
    law = law_of(partial(theirs, TARGET, DRAFT, n_most, 1))
    assert [law[token,] for token in range(3)] == pytest.approx(first)


def test_sequences_split_at_likely_tokens_only() -> None:
    """Another tree than llama.cpp's."""
    # The limit is looked at after a node is added, and sequences that grow finish their level.
    assert [each.tokens for each in drafted(always((0.6, 0.3, 0.1)), (), 3)] == [(0, 0), (1, 0), (0, 1)]
    assert [each.tokens for each in drafted(always((0.6, 0.1, 0.3)), (), 2)] == [(0, 0), (2, 0)]
    assert [each.tokens for each in drafted(always((0.6, 0.3, 0.1)), (), 1)] == [(0, 0, 0)]


def test_the_same_tokens_judged_as_what_they_are_are_exact() -> None:
    """A figure for a bias that is one of the comparison."""
    p, q = random_laws(3, 7), random_laws(3, 8)
    assert tv(law_of(partial(ours, p, q, 3, 3)), law_of(partial(plain, p, 3))) < 1e-12
