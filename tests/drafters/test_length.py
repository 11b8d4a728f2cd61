"""`DraftLength` and the policy of fixed limits."""

from __future__ import annotations

import pytest

from specllama.base.errors import UsageError
from specllama.base.ranges import MAX_DRAFT
from specllama.drafters.length import UNTUNED, ConfidencePolicy, DraftLength


@pytest.mark.parametrize(
    ("given", "length", "written"),
    [
        ("auto", DraftLength(UNTUNED, is_auto=True), "auto"),
        ("0", DraftLength(0), 0),
        (5, DraftLength(5), 5),
        (MAX_DRAFT, DraftLength(MAX_DRAFT), MAX_DRAFT),
        (DraftLength(7), DraftLength(7), 7),
    ],
)
def test_a_length_is_read_as_it_is_written(given: object, length: DraftLength, written: object) -> None:
    """A saved chat that drafts further than the one that was saved."""
    assert DraftLength.check("length", given) == length
    assert (length.to_json(), str(length)) == (written, str(written))
    assert DraftLength.check("length", written) == length


@pytest.mark.parametrize("given", [-1, MAX_DRAFT + 1, "some", None])
def test_a_length_that_cannot_be_meant_is_refused(given: object) -> None:
    """A length below 0, or blocks beyond all memory."""
    with pytest.raises(UsageError):
        DraftLength.check("length", given)


def test_fixed_limits_stop_at_the_length_and_below_the_confidence() -> None:
    """One token more than was asked for, or a stop at exactly the confidence that is enough."""
    policy = ConfidencePolicy(3, 0.5)
    asked = [(2, 0.5), (2, 0.49), (3, 1.0)]
    assert [policy.go_on(depth, confidence) for depth, confidence in asked] == [True, False, False]
