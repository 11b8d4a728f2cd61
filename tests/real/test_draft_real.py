"""`specllama draft` on a real model: SmolLM2 as the draft of itself, cheaper by every recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import llama
from specllama.derive import make as derive
from specllama.llama import LoadOptions
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import in_target_ids
from specllama.tuning import traces
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model

OPTIONS = LoadOptions(n_ctx=256, max_block=16)


@pytest.fixture(scope="module")
def heard(model_file: Callable[[str], Path]) -> tuple[Path, traces.TracedAnswer]:
    """What the model says of itself."""
    path = model_file(SMALL)
    with llama.load(path, OPTIONS) as target:
        prompt = target.vocab.tokenize("Water boils at a hundred degrees. The reason is that", special=False)
        return path, traces.answer(target, "text", prompt, n_tokens=24)


def test_what_is_derived_is_smaller_and_still_foresees_its_parent(
    heard: tuple[Path, traces.TracedAnswer], tmp_path: Path
) -> None:
    """Rows under other tokens, layers in another order, weights read as another type: it runs, and guesses nothing."""
    path, answer = heard
    recipe = Recipe(quant="Q4_0", n_vocab=16_000, dropped=(20, 21))
    parent, made = llama.read_header(path), tmp_path / "draft.gguf"
    derive.make(parent, recipe, made, lambda _what, _share: None)
    header = llama.read_header(made)
    assert header.n_file_bytes < parent.n_file_bytes
    assert header.n_layer == parent.n_layer - len(recipe.dropped)
    assert header.weight_bytes["q4_0"] > 0.95 * header.n_weight_bytes
    with llama.load(path, OPTIONS) as target, llama.load(made, OPTIONS) as own:
        assert 0.2 < traces.acceptance(traces.judged(in_target_ids(target, own), answer)) <= 0.9
