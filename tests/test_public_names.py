"""The public names: there, and only imported when they are asked for."""

from __future__ import annotations

import pytest

import specllama


@pytest.mark.parametrize("name", specllama.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    """Prevents: a name in __all__ that no room holds."""
    assert getattr(specllama, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """Prevents: a lazy import that answers hasattr with a crash."""
    assert not hasattr(specllama, "NoSuchName")


def test_dir_lists_the_public_names() -> None:
    """Prevents: an editor that completes nothing."""
    assert set(specllama.__all__) <= set(dir(specllama))
