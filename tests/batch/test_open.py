"""A pool for a loaded pair: how many at once, in how much memory, with which drafters, and what they learn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from specllama.base.errors import MemoryShort, UnsupportedModel
from specllama.batch import open as opening
from specllama.batch.open import how_many, open_pool
from specllama.batch.pool import Pool
from specllama.batch.request import Request
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel
from specllama.drafters import SIMPLE, TRANSLATED, TREE
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import TUNED, DraftLength
from specllama.drafters.translated import TranslatedModel
from specllama.llama import LlamaModel, crash_test
from specllama.llama.kernel_path import DEFAULT
from specllama.pairs import profile as profiles
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.profile import Profile
from specllama.pairs.setup import Listener, Models, Setup, choose, load_models, prepare
from tests import tiny
from tests.exact.harness import GREEDY, Certain

pytestmark = pytest.mark.usefixtures("sound_build")
SHARED = CostProfile(verify=((1, 1.0), (17, 1.6)), draft=((1, 0.1), (17, 0.2)))  # passes of many rows cost little
STEEP = CostProfile(verify=((1, 1.0), (17, 17.0)), draft=((1, 0.1), (17, 0.2)))


def profile_of(costs: CostProfile) -> Profile:
    return Profile(made="2026-01-02T03:04:05+00:00", target_path=DEFAULT, draft_path=DEFAULT, step_s=0.1, costs=costs)


@pytest.fixture(scope="module")
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(folder: Path, owned: ExitStack, spec_type: str = "auto", **options: Any) -> tuple[Models, Setup]:
    """A loaded tiny pair; a translated draft has a tokenizer of its own."""
    words = tiny.sentencepiece() if spec_type == TRANSLATED else tiny.byte_level()
    target = tiny.write_model(folder / "target.gguf", vocabulary=tiny.byte_level(), n_ctx=4096, scale=4.0)
    draft = tiny.write_model(folder / "draft.gguf", vocabulary=words, n_ctx=4096, scale=4.0, **options)
    ask = Ask(
        names=Names(target=str(target), draft=str(draft)),
        drafting=Drafting(spec_type=spec_type, length=DraftLength(4)),
        hardware=Hardware(n_ctx=256, n_threads=1),
    )
    setup = prepare(choose(ask, Listener()), Listener())
    return owned.enter_context(load_models(setup, Listener(), Cancel())), setup


def tuned(setup: Setup, costs: CostProfile = SHARED) -> Setup:
    return replace(setup, length=DraftLength.auto(TUNED), profile=profile_of(costs))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, owned: ExitStack) -> tuple[Models, Setup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash_test, "installed", lambda: crash_test.ProbeResult(crash_test.State.OK))
        return opened(tmp_path_factory.mktemp("pair"), owned, SIMPLE)


def requests(n: int, **changes: Any) -> list[Request]:
    made = {"params": GREEDY, "choose": Certain(), "max_tokens": 12}
    return [Request(i, [1, 2 + i, *range(i)], **{**made, **changes}) for i in range(n)]


def alone(models: Models, each: Request) -> list[int]:
    """Plain greedy decoding."""
    target, tokens = models.target, list(each.tokens)
    target.truncate(0)
    target.feed(tokens[:-1])
    while len(tokens) < len(each.tokens) + each.max_tokens:
        tokens.append(int(target.eval(tokens[-1:])[0].argmax()))
    target.truncate(0)
    return tokens[len(each.tokens) :]


def assert_exact(models: Models, pool: Pool, n: int = 6) -> None:
    asked = requests(n)
    ends = {done.id: done for done in pool.run(asked)}
    assert [done.error for done in ends.values()] == [None] * n
    for each in asked:
        found, expected = list(ends[each.id].tokens), alone(models, each)
        assert found == expected[: len(found)]
        assert len(found) == each.max_tokens or ends[each.id].reason == "stop"
    assert pool.stats.spec.n_drafted > 0


def test_auto_takes_the_fewest_requests_that_are_nearly_the_fastest(pair: tuple[Models, Setup]) -> None:
    """Prevents: sixteen slow answers where four give as many tokens, or one where passes are shared for nothing."""
    setup = pair[1]
    assert how_many(tuned(setup, STEEP)) == 1
    assert how_many(tuned(setup, SHARED)) > 8
    assert how_many(tuned(setup, SHARED), 3) == 3
    assert how_many(tuned(setup, SHARED), 0) == 1
    assert how_many(setup) >= 1


@pytest.mark.parametrize("fits", [1, 2, 0])
def test_auto_takes_fewer_requests_if_the_memory_is_short(
    pair: tuple[Models, Setup], monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """Prevents: a batch that is refused although fewer at once fit; a number that was asked for and is not kept."""
    real = opening.LlamaSlots

    def limited(model: LlamaModel, *, n_slots: int, **rest: Any) -> Any:
        if n_slots > fits:
            raise MemoryShort("too many")
        return real(model, n_slots=n_slots, **rest)

    monkeypatch.setattr(opening, "LlamaSlots", limited)
    models, setup = pair
    if not fits:
        with pytest.raises(MemoryShort), open_pool(models, setup, Drafting(), n_ctx=64):
            pass
        return
    with open_pool(models, tuned(setup), Drafting(), n_ctx=64) as pool:
        assert pool.stats.n_slots == fits
    with pytest.raises(MemoryShort), open_pool(models, tuned(setup), Drafting(), n_ctx=64, n_slots=3):
        pass


def test_a_failure_of_the_draft_frees_the_targets_cache(
    pair: tuple[Models, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: half of a pool that stays in memory."""
    real, made = opening.LlamaSlots, list[Any]()

    def failing(model: LlamaModel, **rest: Any) -> Any:
        if made:
            raise UnsupportedModel("the draft")
        made.append(real(model, **rest))
        return made[0]

    monkeypatch.setattr(opening, "LlamaSlots", failing)
    with pytest.raises(UnsupportedModel), open_pool(*pair, Drafting(), n_ctx=64, n_slots=2):
        pass
    assert made[0]._native.pointers.closed


@pytest.mark.parametrize("spec_type", [SIMPLE, TRANSLATED, TREE, "lookup,draft-simple"])
@pytest.mark.parametrize("costs", [None, SHARED], ids=["fixed", "auto"])
def test_every_strategy_gives_the_greedy_text_of_plain_decoding(
    tmp_path: Path, spec_type: str, costs: CostProfile | None
) -> None:
    """Prevents: a draft in other token ids, or a tree, that only one request at a time can use."""
    with ExitStack() as owned:
        models, setup = opened(tmp_path, owned, spec_type)
        setup = setup if costs is None else tuned(setup, costs)
        with open_pool(models, setup, Drafting(), n_ctx=64, n_slots=3) as pool:
            assert_exact(models, pool)
            assert pool._target.caps.tree == (spec_type == TREE)


def test_a_translated_draft_whose_own_tokens_fill_its_context_stops_drafting(tmp_path: Path) -> None:
    """Prevents: requests that fail because the draft spells their text with more tokens than the target."""
    with ExitStack() as owned:
        models, setup = opened(tmp_path, owned, TRANSLATED)
        assert isinstance(models.draft, TranslatedModel)
        long = max(range(models.target.vocab_size), key=lambda token: models.draft.n_cells([token]))
        with open_pool(models, setup, Drafting(), n_ctx=64, n_slots=2) as pool:
            asked = [replace(each, tokens=[long] * 12) for each in requests(3)]
            ends = list(pool.run(asked))
        assert models.draft.n_cells([long] * 12) > 64
        assert [(done.error, len(done.notices), done.stats.n_drafted) for done in ends] == [(None, 1, 0)] * 3
        assert [list(done.tokens) for done in ends] == [alone(models, each) for each in asked]


def test_requests_without_drafts_decode_plainly(pair: tuple[Models, Setup]) -> None:
    """Prevents: drafts of a request that asked for none."""
    models, setup = pair
    with open_pool(models, setup, Drafting(), n_ctx=64, n_slots=2) as pool:
        assert [done.stats.n_drafted for done in pool.run(requests(3, drafts=False))] == [0] * 3


def test_ended_requests_are_the_prior_of_the_next_and_not_saved(pair: tuple[Models, Setup]) -> None:
    """Prevents: a bad draft that every request has to find out anew; a file of prompts that changes its own answers."""
    models, setup = pair
    setup = tuned(setup)
    before = setup.policy(greedy=False)
    assert isinstance(before, Controller)
    params = SamplingParams(temperature=1.0)
    with open_pool(models, setup, Drafting(), n_ctx=256, n_slots=2) as pool:
        ended = list(pool.run(requests(4, params=params, choose=RandomChooser(3), max_tokens=60)))
        assert sum(done.stats.n_drafted for done in ended) > 0
        maker = pool._maker
        assert isinstance(maker, opening._PairMaker)
        after = maker._setup.policy(greedy=False)
        assert isinstance(after, Controller)
    assert after.calibration.typical != before.calibration.typical
    assert not profiles.path_of(setup.subject).exists()
    assert not profiles.path_of(setup.subject, "use").exists()


def test_recurrent_models_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """Prevents: a state of one text that another overwrites."""
    with ExitStack() as owned:
        models, setup = opened(tmp_path, owned, SIMPLE)
        recurrent = tiny.load(tiny.write_model(tmp_path / "mamba.gguf", arch="mamba", vocabulary=tiny.byte_level()))
        owned.enter_context(recurrent)
        models.target = recurrent
        with pytest.raises(UnsupportedModel) as error, open_pool(models, setup, Drafting(), n_ctx=64, n_slots=2):
            pass
        assert error.value.hint


def test_the_context_is_the_one_asked_for(tmp_path: Path) -> None:
    """Prevents: requests that end at the trained length, silently and unlike those of `run`."""
    path = tiny.write_model(tmp_path / "short.gguf", vocabulary=tiny.byte_level(), n_ctx=128)
    hardware = Hardware(n_ctx=256, n_threads=1)
    ask = Ask(names=Names(target=str(path)), drafting=Drafting(spec_type="none"), hardware=hardware)
    setup = prepare(choose(ask, Listener()), Listener())
    with (
        load_models(setup, Listener(), Cancel()) as models,
        open_pool(models, setup, ask.drafting, n_ctx=256, n_slots=2) as pool,
    ):
        assert pool.n_ctx == models.target.n_ctx == 256


@pytest.mark.slow
def test_five_hundred_requests_take_no_more_memory(pair: tuple[Models, Setup]) -> None:
    """Prevents: cells, rows or contexts that stay for every request."""
    process, grown = psutil.Process(), list[int]()
    with open_pool(*pair, Drafting(), n_ctx=64, n_slots=8) as pool:
        for n, _ in enumerate(pool.run(each for _ in range(50) for each in requests(10, max_tokens=4))):
            if n in (100, 499):
                gc.collect()
                grown.append(process.memory_info().rss)
    assert grown[1] - grown[0] < 4 << 20
