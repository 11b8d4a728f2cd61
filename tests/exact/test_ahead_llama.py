"""Reading ahead on the real llama.cpp: two contexts that compute at once, with random models on one CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specllama.core.engine import Engine
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel, FloatArray, LanguageModel, Rule
from specllama.drafters.model import ModelDrafter
from specllama.llama import LlamaModel
from specllama.llama.running_ahead import AheadModel
from specllama.pairs.draft_in_target_ids import in_target_ids
from tests import tiny
from tests.exact.test_tiny_llama import Tiny, answer, stats_of

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

pytestmark = pytest.mark.slow

N_LETTERS = 57
WARM = SamplingParams(temperature=0.9, top_k=20, top_p=0.97, min_p=0.0, repeat_penalty=1.2, repeat_last_n=16)


@pytest.fixture(scope="module")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """A pair that agrees on most tokens, not on all."""
    target, draft = tiny.write_pair(
        tmp_path_factory.mktemp("talkers"), vocabulary=tiny.letters(N_LETTERS + 3), noise=0.1
    )
    with tiny.load(target) as loaded_target, tiny.load(draft) as loaded_draft:
        yield Tiny(loaded_target, loaded_draft)


def engine(pair: Tiny, n_max: int, *, ahead: bool) -> Engine:
    pair.target.truncate(0)
    pair.draft.truncate(0)
    draft = in_target_ids(pair.target, pair.draft, ahead=ahead)
    assert isinstance(draft, AheadModel) == ahead
    return Engine(pair.target, ModelDrafter(draft, n_max=n_max), rule=Rule.BLOCK)


def argmax(row: FloatArray) -> int:
    return int(row.argmax())


@pytest.mark.parametrize("n_max", [1, 4])
def test_answers_are_the_same_as_without_it(talkers: Tiny, n_max: int) -> None:
    """Two threads in llama.cpp that disturb each other, rows of another KV, draws that shift."""
    rng = np.random.default_rng(n_max)
    prompts = [tuple(rng.integers(0, N_LETTERS, size=int(rng.integers(1, 40))).tolist()) for _ in range(12)]
    answers = []
    for ahead in (False, True):
        running = engine(talkers, n_max, ahead=ahead)
        greedy = [stats_of(running, prompt, 30) for prompt in prompts]
        warm = [answer(running, WARM, RandomChooser(seed), 30, prompt) for seed, prompt in enumerate(prompts)]
        answers.append(([(said, stats.n_drafted, stats.n_accepted) for said, stats in greedy], warm))
    assert answers[0] == answers[1]
    assert sum(n_accepted for _, _, n_accepted in answers[1][0]) > 50
    assert any(n_accepted < n_drafted for _, n_drafted, n_accepted in answers[1][0])


def test_two_contexts_compute_at_once_and_give_what_each_gives_alone(talkers: Tiny) -> None:
    """Logits that are read from a buffer in which another pass is writing; compared to the bit."""
    prompt, block = [1, 5, 9, 2], [3, 4, 5, 6, 7, 8]

    def rows(draft: LanguageModel, *, ahead: bool) -> tuple[list[FloatArray], FloatArray]:
        for model in (talkers.target, draft):
            model.truncate(0)
            model.feed(prompt[:-1])
        token = argmax(draft.eval(prompt[-1:])[0])
        if ahead:
            draft.run_ahead(token, 6, argmax)  # type: ignore[attr-defined]
        judged = talkers.target.eval([prompt[-1], *block]).copy()
        drafted = []
        for _ in range(6):
            drafted.append(draft.eval([token])[0].copy())
            token = argmax(drafted[-1])
        return drafted, judged

    quiet, judged = rows(talkers.draft, ahead=False)
    model = AheadModel(talkers.draft)
    for _ in range(60):
        found, also_judged = rows(model, ahead=True)
        assert np.array_equal(judged, also_judged)
        assert all(np.array_equal(a, b) for a, b in zip(quiet, found, strict=True))


def test_a_model_that_drafts_for_itself_is_accepted_throughout(tmp_path: Path) -> None:
    """FIELD 8 on the real KV, with tokens in it that nobody asked for yet."""
    path = tiny.write_model(tmp_path / "model.gguf", vocabulary=tiny.letters(7), seed=5)
    with tiny.load(path, n_ctx=512) as target, tiny.load(path, n_ctx=512) as draft:
        _, stats = stats_of(engine(Tiny(target, draft), 4, ahead=True), (0, 2, 1, 3, 0), 200)
    assert (stats.n_steps, stats.n_drafted, stats.n_accepted) == (40, 160, 160)


def test_the_cancel_flag_and_closing_end_what_runs_in_the_background(talkers: Tiny) -> None:
    """A hang, or memory that is freed under a running pass."""
    for n_steps in range(20):
        with tiny.load(talkers.draft.path) as loaded:
            model = in_target_ids(talkers.target, loaded, ahead=True)
            assert isinstance(model, AheadModel)
            cancel = Cancel()
            model.watch(cancel)
            model.eval([1, 2])
            model.run_ahead(3, 200, argmax)
            if n_steps % 2:
                cancel.set()
                assert model.length == 2
                cancel.clear()
                assert np.allclose(model.eval([3]), fresh_row(talkers.draft, [1, 2, 3]), rtol=0.0, atol=1e-4)
            model.close()
            model.close()


def test_a_model_that_is_closed_while_it_reads_ends_the_reading(talkers: Tiny) -> None:
    """Memory that is freed under a running pass, a hang, or an error out of the closing."""
    for n_round in range(20):
        loaded = tiny.load(talkers.draft.path)
        model = AheadModel(loaded)
        model.eval([1, 2])
        model.run_ahead(3, 200, argmax)
        if n_round % 2:
            threading.Event().wait(0.001 * n_round / 4)
        loaded.close()
        model.close()


def fresh_row(model: LlamaModel, tokens: list[int]) -> FloatArray:
    model.truncate(0)
    model.feed(tokens[:-1])
    return model.eval(tokens[-1:])
