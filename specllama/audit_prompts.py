"""The prompts that the audit asks: short ones, because every look at a pair begins with reading them."""

from __future__ import annotations

from collections.abc import Mapping

from specllama.sample_prompts import PROMPTS


def short_prompts(n_most: int) -> Mapping[str, str]:
    """At most `n_most` prompts by name, each of another class."""
    return dict(list(PROMPTS.items())[:n_most])
