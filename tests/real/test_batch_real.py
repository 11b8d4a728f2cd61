"""Many prompts at once on a real model, as its own draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import specllama
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model

PROMPTS = [
    "Write a function that merges two sorted lists.",
    "Name three uses of copper.",
    "What is 17 * 23?",
    "Say hello.",
    "Name three uses of copper, iron and gold, and say where each of them is found.",
    "Write a haiku.",
]


@pytest.mark.parametrize("parallel", [4, 8])
def test_greedy_texts_are_those_of_one_prompt_alone(model_file: Callable[[str], Path], parallel: int) -> None:
    """Prevents: cells of one text that another sees, or attention that adds in another order beside others."""
    path = model_file(SMALL)
    with specllama.load(target=path, draft=path, n_ctx=256, n_max=4) as pair:
        alone = [pair.answer(prompt, temperature=0, max_tokens=12) for prompt in PROMPTS]
        many = list(pair.batch(PROMPTS, parallel=parallel, temperature=0, max_tokens=12, in_order=True))
        assert [answer.error for answer in many] == [None] * len(PROMPTS)
        assert pair.stats.n_from_draft > 0
        same = [answer.tokens == other.tokens for answer, other in zip(many, alone, strict=True)]
        if pair._models.target.plan.kernels:
            assert all(same)
        else:  # near ties part the texts
            assert sum(same) > len(same) / 2
