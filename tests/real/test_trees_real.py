"""Token trees on real models, against chains of the same file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specllama.audit.kv import check_trees
from specllama.audit.models import Recorded, Undecided
from specllama.audit.parts import AuditPrompt
from specllama.audit.report import KV_BOUND
from specllama.core.engine import Engine
from specllama.drafters.shape import FixedShape
from specllama.drafters.tree import TreeDrafter
from specllama.llama import LlamaModel
from tests.llama.test_tree import path_to, random_tree
from tests.real.conftest import DRAFT, SMALL, TARGET, WINDOWED
from tests.real.test_exact_real import N_TOKENS, PROMPTS, answer, chat

pytestmark = pytest.mark.model
OpenModel = Callable[..., LlamaModel]


@pytest.mark.parametrize("name", [SMALL, DRAFT, WINDOWED])
def test_rows_of_a_tree_are_those_of_its_paths(open_model: OpenModel, name: str) -> None:
    """Prevents: a token that sees its sibling, or greedy text that depends on the tree it was verified in."""
    model, plain = open_model(name, n_ctx=1024, max_leaves=8), open_model(name, n_ctx=1024)
    text = [token for prompt in PROMPTS for token in chat(model, prompt)][:300]
    rng = np.random.default_rng(3)
    parents = random_tree(rng, 14)
    tokens = [int(token) for token in rng.choice(text, 15)]
    for each in (model, plain):
        each.feed(text)
    rows = np.array(model.eval(tokens, parents))
    for node in set(range(14)).difference(parents):
        line = path_to(parents, node)
        expected = plain.eval([tokens[0], *(tokens[1 + each] for each in line)])
        found = rows[[0, *(1 + each for each in line)]]
        if model.plan.kernels:
            assert np.array_equal(found, expected), (parents, node)
        else:
            assert np.abs(found - expected).max() < 0.3 * expected.std()
        plain.truncate(len(text))


@pytest.mark.parametrize("name", [SMALL, DRAFT, WINDOWED])
def test_after_random_paths_the_kv_cache_is_that_of_a_chain(open_model: OpenModel, name: str) -> None:
    """Prevents: a rejected branch that stays in the cache, or cells in another order than after a chain."""
    model = open_model(name, n_ctx=1024, max_leaves=8)
    prompt = AuditPrompt("x", tuple(chat(model, PROMPTS[0])))
    row = check_trees("target", Recorded(model), prompt, 8, np.random.default_rng(4))
    assert (row.n_foreign, row.full) == (0, False)
    assert row.n_dropped > 8
    assert row.difference <= KV_BOUND < row.wrong
    if model.plan.kernels:
        assert row.difference == row.narrow == 0.0


@pytest.mark.parametrize(("name", "draft"), [(SMALL, SMALL), (WINDOWED, WINDOWED), (TARGET, DRAFT)])
def test_greedy_answers_with_trees_are_those_without(open_model: OpenModel, name: str, draft: str) -> None:
    """Prevents: text that depends on the branches beside it. A draft that is too good is made to err."""
    target, drafts = open_model(name, n_ctx=1024, max_leaves=8), open_model(draft, n_ctx=1280, max_leaves=8)
    if not target.plan.kernels:
        pytest.skip("llama.cpp's own kernels round with the block")
    model = Undecided(drafts) if name == draft else drafts
    shape = FixedShape((-1, -1, -1, 0, 0, 1, 3))
    drafter = TreeDrafter(model, shape, n_leaves=8, vocab_size=target.vocab_size)
    paths = []
    for prompt in (chat(target, text) for text in (PROMPTS[9:10] if name == TARGET else PROMPTS[:2])):
        found, steps = answer(Engine(target, drafter), prompt, N_TOKENS)
        assert found == answer(Engine(target), prompt, N_TOKENS)[0]
        paths += [step.path for step in steps if step.path]
    assert any(path != tuple(range(len(path))) for path in paths)
