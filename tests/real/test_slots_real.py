"""Many texts at once on real models, against each of them alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specllama.core.engine import Engine
from specllama.core.types import Part
from specllama.llama import LlamaModel, LlamaSlots
from tests.llama.test_tree import random_tree
from tests.real.conftest import SMALL, WINDOWED
from tests.real.test_exact_real import PROMPTS, answer, chat

pytestmark = pytest.mark.model
OpenModel = Callable[..., LlamaModel]
N_SLOTS, N_TOKENS, N_LEAVES = 4, 12, 4


@pytest.mark.parametrize("name", [SMALL, WINDOWED])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_greedy_answers_side_by_side_are_those_alone(open_model: OpenModel, name: str, trees: bool) -> None:
    """Prevents: text that depends on the requests beside it. Drafts are right for some tokens and wrong behind them."""
    model = open_model(name, n_ctx=1024, max_leaves=8)
    if not model.plan.kernels:
        pytest.skip("llama.cpp's own kernels round with the block")
    rng = np.random.default_rng(6)
    long = [token for text in PROMPTS for token in chat(model, text)][:290]  # two chunks of attention
    prompts = [*(chat(model, text) for text in PROMPTS[:N_SLOTS]), long]
    expected = [answer(Engine(model), prompt, N_TOKENS)[0] for prompt in prompts]
    waiting, found = list(enumerate(prompts)), [list[int]() for _ in prompts]
    at: dict[int, int] = {}  # slot -> number of the prompt
    unread: dict[int, list[int]] = {}  # slot -> tokens of the prompt
    with LlamaSlots(model, n_slots=N_SLOTS, n_ctx=512, max_rows=96, n_leaves=N_LEAVES if trees else 1) as slots:
        while waiting or at:
            parts = []
            for slot in range(N_SLOTS):
                if slot not in at and waiting:
                    at[slot], prompt = waiting.pop(0)
                    unread[slot] = list(prompt)
                if slot not in at:
                    continue
                if len(unread[slot]) > 1:
                    n = min(len(unread[slot]) - 1, int(rng.integers(1, 20)))
                    parts.append(Part(slot, tuple(unread[slot][:n]), 0))
                    del unread[slot][:n]
                    continue
                said, wish = found[at[slot]], expected[at[slot]]
                n_right, n_wrong = int(rng.integers(0, 4)), int(rng.integers(0, 4))
                draft = [*wish[len(said) : len(said) + n_right], *rng.integers(0, 1000, n_wrong).tolist()]
                pending = said[-1] if said else unread[slot][0]
                parents = None
                if trees:
                    parents = random_tree(rng, len(draft))
                    leaves = len({-1, *range(len(draft))}.difference(parents))
                    parents = parents if leaves <= N_LEAVES else tuple(range(-1, len(draft) - 1))
                parts.append(Part(slot, (pending, *draft), 1 + len(draft), parents))
            for part, rows in zip(parts, slots.run(parts), strict=True):
                if not part.n_rows:
                    continue
                said, path = found[at[part.slot]], list[int]()
                draft, parents = part.tokens[1:], part.parents or tuple(range(-1, len(part.tokens) - 2))
                while True:
                    token = int(rows[path[-1] + 1 if path else 0].argmax())
                    said.append(token)
                    node = path[-1] if path else -1
                    children = [i for i, parent in enumerate(parents) if parent == node and draft[i] == token]
                    if not children:
                        break
                    path.append(children[0])
                slots.keep(part.slot, slots.length(part.slot) - len(draft), path)
                if len(said) >= len(expected[at[part.slot]]):
                    slots.truncate(part.slot, 0)
                    del said[len(expected[at[part.slot]]) :], at[part.slot]
    assert found == expected
