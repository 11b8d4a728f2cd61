"""A pool over a model for one text at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama.base.errors import BackendError, UnsupportedModel
from specllama.batch.one_slot import OneSlot
from specllama.batch.open import open_pool
from specllama.batch.pool import Pool
from specllama.core.engine import Engine
from specllama.core.events import TokenEvent
from specllama.core.types import Cancel, Resuming
from specllama.drafters.model import ModelDrafter
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.setup import Listener, choose, load_models, prepare
from tests import tiny
from tests.exact.harness import GREEDY, N_VOCAB, Certain, agreeing, plain_greedy
from tests.fakes import FakeModel, RandomTable
from tests.many import FakeMaker, answers, request

TARGET = RandomTable(N_VOCAB, 60)
DRAFT = agreeing(TARGET, N_VOCAB, 61)
SMALL = Hardware(n_ctx=64, n_threads=1)


def test_answers_are_those_of_the_model_alone() -> None:
    """Prevents: a request that reads what the one before it left in the KV; a draft that lags behind."""
    target, draft = (OneSlot(FakeModel(table, N_VOCAB), n_ctx=40, max_rows=16) for table in (TARGET, DRAFT))
    pool = Pool(target, draft, FakeMaker(lambda model: (ModelDrafter(model, n_max=3), None)))
    prompts = [(1, 2), (1, 2, 0, 1), (0,) * 30, (2,)]
    asked = [request(i, tokens, Certain(), params=GREEDY, max_tokens=6) for i, tokens in enumerate(prompts)]
    found = answers(pool, asked)
    assert {i: tokens for i, (tokens, _) in found.items()} == {
        i: plain_greedy(TARGET, tokens, 6) for i, tokens in enumerate(prompts)
    }


def test_after_a_failed_pass_the_next_request_begins_from_an_empty_kv() -> None:
    """Prevents: tokens of a failed request under those of the next one."""
    calls = []

    def hook(n_call: int, name: str) -> None:
        calls.append(name)
        if len(calls) == 4:
            raise BackendError("a failed pass")

    model = FakeModel(TARGET, N_VOCAB, hook=hook)
    pool = Pool(OneSlot(model, n_ctx=40, max_rows=16), None, FakeMaker())
    asked = [request(i, (1, i), Certain(), params=GREEDY, max_tokens=4) for i in range(2)]
    first, second = pool.run(asked)
    assert isinstance(first.error, BackendError)
    assert second.tokens == plain_greedy(TARGET, (1, 1), 4)


@pytest.mark.slow
def test_the_pool_leaves_an_empty_kv(tmp_path: Path) -> None:
    """Prevents: a request of the pool under the next answer of the model, whose record has the same length."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="lfm2", n_vocab=40)
    ask, listener = Ask(names=Names(target=str(path)), drafting=Drafting(spec_type="none"), hardware=SMALL), Listener()
    setup = prepare(choose(ask, listener), listener)
    with load_models(setup, listener, Cancel()) as models:
        engine = Engine(models.target)

        def answer() -> list[int]:
            events = engine.generate((1, 2, 3), GREEDY, Certain(), max_tokens=8)
            return [event.token for event in events if isinstance(event, TokenEvent)]

        first = answer()
        with open_pool(models, setup, ask.drafting, n_ctx=64) as pool:
            assert len(answers(pool, [request(0, (1, 9, 7), Certain(), params=GREEDY, max_tokens=8)])[0][0]) == 8
        assert models.target.length == 0
        assert answer() == first


def test_tokens_that_a_state_reads_again_are_not_counted_as_cached(tmp_path: Path) -> None:
    """Prevents: a request that seems to have read nothing of its prompt, though its state began again."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="mamba", n_vocab=40)
    model = tiny.load(path)
    with model:
        pool = Pool(OneSlot(model, n_ctx=model.n_ctx, max_rows=16), None, FakeMaker())
        view, calls = pool._views[0], list[object]()
        assert isinstance(view, Resuming)
        model.resume_at = lambda length: calls.append(length) or 0  # type: ignore[method-assign,func-returns-value]
        model.expect_return = lambda tokens: calls.append(list(tokens))  # type: ignore[method-assign]
        view.feed([1, 2])
        assert view.resume_at(1) == 0
        view.expect_return([3])
        assert calls == [1, [1, 2, 3]]


@pytest.mark.slow
def test_recurrent_models_answer_one_request_at_a_time(tmp_path: Path) -> None:
    """Prevents: a hint at --parallel 1, which is refused as well; another text than that of `run`."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="mamba")
    names, drafting = Names(target=str(path)), Drafting(spec_type="lookup")
    ask, listener = Ask(names=names, drafting=drafting, hardware=SMALL), Listener()
    setup = prepare(choose(ask, listener), listener)
    with load_models(setup, listener, Cancel()) as models:
        with pytest.raises(UnsupportedModel), open_pool(models, setup, ask.drafting, n_ctx=64, n_slots=2):
            pass
        asked = [request(i, (1, 2, 3, i), Certain(), params=GREEDY, max_tokens=8) for i in range(3)]
        with open_pool(models, setup, ask.drafting, n_ctx=64) as pool:
            assert pool.stats.n_slots == 1
            assert pool.stats.kv_bytes == models.target.plan.need.kv > 0
            found = answers(pool, asked)
        for i, (tokens, _) in found.items():
            models.target.truncate(0)
            events = Engine(models.target).generate((1, 2, 3, i), GREEDY, Certain(), max_tokens=8)
            assert tokens == tuple(event.token for event in events if isinstance(event, TokenEvent))
