"""The public names: there, and only imported when they are asked for."""

from __future__ import annotations

import specllama
from specllama.core.types import Caps, Decision, DraftPlan
from tests.marks import looped


@looped(name=specllama.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    """Prevents: a name in __all__ that no room holds."""
    assert getattr(specllama, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """Prevents: a lazy import that answers hasattr with a crash."""
    assert not hasattr(specllama, "NoSuchName")


def test_dir_lists_the_public_names() -> None:
    """Prevents: an editor that completes nothing."""
    assert set(specllama.__all__) <= set(dir(specllama))


def test_the_defaults_of_the_seams_are_those_of_the_design() -> None:
    """Prevents: a model taken for one with trees, or with other limits, because it says nothing of them."""
    assert Caps() == Caps(rollback=True, tree=False, max_leaves=1, features=False, max_block=32)
    assert DraftPlan() == DraftPlan(n_given=0, n_drawn=0, probe=0, rate=1.0)
    assert Decision(0, 0.5, go_on=True).plan is None
