"""The five lines of docs/api.md on a real model, as its own draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import specllama
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model

PROMPT = "Write a function that merges two sorted lists."


def test_a_model_as_its_own_draft_says_what_it_says_alone(model_file: Callable[[str], Path]) -> None:
    """Prevents: a face that only tiny models fit; one KV for two models, whose every draft is a wrong one."""
    path = model_file(SMALL)
    with specllama.load(target=path, draft=path, n_ctx=512, n_max=4) as pair:
        text = "".join(pair.stream(PROMPT, temperature=0, max_tokens=16))
        assert pair.stats.n_emitted == 16
        assert pair.stats.alpha is not None
        assert pair.stats.alpha > 0.8, "blocks and single rows round differently, which parts near ties"
        plain = pair.answer(PROMPT, temperature=0, max_tokens=16, drafts=False)
        assert (plain.text, plain.stats.n_drafted) == (text, 0)
        left = pair.stream("Tell a story.", temperature=0)
        next(left)
        del left
        assert pair.answer(PROMPT, temperature=0, max_tokens=16).text == text
