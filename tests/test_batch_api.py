"""Batches from Python: many prompts with one call, in order or not, in one thread or with `async for`."""

# ruff: noqa: F811  (fixtures are imported, and are parameters)

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from specllama import BatchAnswer, Hardware, ModelBusy, Pair, PromptError, UsageError
from tests.test_api import ENDLESS, ask, files, opened, pair  # noqa: F401

pytestmark = pytest.mark.usefixtures("sound_build", "children")
PROMPTS = ["hello", "a", "what is it?", "hello again", "b c d", "x" * 50, "hello"]


def batch(pair: Pair, prompts: Any = PROMPTS, **options: Any) -> Any:
    return pair.batch(prompts, **{"temperature": 0, "max_tokens": 20, "logit_bias": ENDLESS, "n_ctx": 256, **options})


@pytest.mark.parametrize("parallel", [1, 3, "auto"])
def test_greedy_answers_are_those_of_one_prompt_alone(pair: Pair, parallel: Any) -> None:
    """Prevents: texts that depend on the other prompts."""
    alone = [ask(pair, prompt, max_tokens=20) for prompt in PROMPTS]
    found = list(batch(pair, parallel=parallel))
    assert sorted(answer.index for answer in found) == list(range(len(PROMPTS)))
    assert {answer.index: answer.text for answer in found} == {i: answer.text for i, answer in enumerate(alone)}
    assert all(answer.tokens == alone[answer.index].tokens and answer.reason == "length" for answer in found)
    assert pair.stats.n_emitted == sum(len(answer.tokens) for answer in found)
    assert pair.stats.n_from_draft > 0


def test_answers_come_in_order_if_asked(pair: Pair) -> None:
    """Prevents: a column of answers beside the wrong prompts."""
    stop = ask(pair, "hello").text[4:6]
    found = list(batch(pair, iter(PROMPTS), parallel=3, in_order=True, stop=stop))
    assert [answer.index for answer in found] == list(range(len(PROMPTS)))
    assert [str(answer) for answer in found] == [ask(pair, prompt, max_tokens=20, stop=stop).text for prompt in PROMPTS]
    assert found[0].reason == "stop"


def test_a_bad_prompt_has_its_error_and_the_others_go_on(pair: Pair) -> None:
    """Prevents: a thousand answers lost for one prompt; or the error of one told as that of another."""
    prompts = ["a", "y" * 400, [{"role": "user"}], "b"]
    found = list(batch(pair, prompts, in_order=True, parallel=2))
    assert [type(answer.error) for answer in found] == [type(None), PromptError, UsageError, type(None)]
    assert [answer.reason for answer in found] == ["length", None, None, "length"]
    assert [answer.index for answer in found] == [0, 1, 2, 3]


def test_a_seed_gives_each_prompt_its_own(pair: Pair) -> None:
    """Prevents: the same draws for every prompt, or an answer that cannot be had again."""
    same = {"temperature": 1, "seed": 5, "seed_mode": "same"}
    found = list(batch(pair, ["hello"] * 3, in_order=True, parallel=3, **same))
    assert [answer.seed for answer in found] == [5, 6, 7]
    assert len({answer.text for answer in found}) == 3
    again = [ask(pair, "hello", max_tokens=20, **{**same, "seed": answer.seed}).text for answer in found]
    assert again == [answer.text for answer in found]
    assert len({answer.seed for answer in batch(pair, ["a"] * 3, temperature=1)}) == 3


def test_what_the_texts_depend_on_is_noted_once(files: tuple[Path, Path]) -> None:
    """Prevents: a promise of equal texts that llama.cpp's kernels do not keep."""
    notes: list[str] = []
    with opened(files, hardware=Hardware(kernels="off"), on_note=notes.append) as pair:
        notes.clear()
        assert [len(list(batch(pair, ["a"], temperature=1, max_tokens=2))) for _ in range(2)] == [1, 1]
        assert notes == []
        assert [len(list(batch(pair, ["a"], max_tokens=2))) for _ in range(2)] == [1, 1]
        assert [("near-ties" in note) for note in notes] == [True]


def test_the_same_batch_gives_the_same_texts_again(pair: Pair) -> None:
    """Prevents: drafts that follow a clock."""
    texts = [[str(each) for each in batch(pair, in_order=True, parallel=3, temperature=1, seed=1)] for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "wrong",
    [{"parallel": 0}, {"parallel": "many"}, {"n_ctx": 1}, {"n_ctx": 9999}, {"prompts": "hello"}, {"temperature": -1}],
)
def test_a_wrong_keyword_is_refused_at_once(pair: Pair, wrong: dict[str, Any]) -> None:
    """Prevents: an error at the first answer, far from its cause."""
    with pytest.raises(UsageError):
        batch(pair, **wrong)


def test_a_batch_is_one_answer_at_a_time(pair: Pair) -> None:
    """Prevents: two users of one cancel flag; a model that stays busy after an iterator that was left."""
    answers = batch(pair, parallel=2)
    next(answers)
    with pytest.raises(ModelBusy):
        ask(pair)
    with pytest.raises(ModelBusy):
        next(batch(pair))
    answers.close()
    assert ask(pair).reason == "length"
    next(batch(pair, parallel=2))  # left without a name
    gc.collect()
    assert ask(pair).reason == "length"


def test_cancel_ends_a_batch_and_not_the_next(pair: Pair) -> None:
    """Prevents: a flag that ends the next batch as well."""
    answers = batch(pair, PROMPTS * 4, parallel=2)
    first = next(answers)
    pair.cancel()
    assert first.reason == "length"
    assert {answer.reason for answer in answers} == {"cancelled"}
    assert {answer.reason for answer in batch(pair)} == {"length"}


def test_a_closed_pair_ends_its_batch(files: tuple[Path, Path]) -> None:
    """Prevents: a crash in freed weights."""
    with opened(files) as pair:
        answers = batch(pair, parallel=2)
        next(answers)
    assert list(answers) == []
    with pytest.raises(UsageError):
        batch(pair)


async def _read(pair: Pair, n: int, **options: Any) -> list[BatchAnswer]:
    found: list[BatchAnswer] = []
    async with aclosing(pair.abatch(**{"prompts": PROMPTS, **BASE, **options})) as answers:
        async for answer in answers:
            found.append(answer)
            if len(found) == n:
                break
    return found


BASE: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "logit_bias": ENDLESS, "n_ctx": 256, "parallel": 3}


def test_async_answers_are_the_same(pair: Pair) -> None:
    """Prevents: an event loop that stands still; other answers than without it."""

    async def both() -> tuple[list[BatchAnswer], int]:
        n_ticks = 0

        async def tick() -> None:
            nonlocal n_ticks
            while True:
                await asyncio.sleep(0)
                n_ticks += 1

        ticking = asyncio.create_task(tick())
        found = await _read(pair, 99, in_order=True)
        ticking.cancel()
        return found, n_ticks

    found, n_ticks = asyncio.run(both())
    assert [answer.text for answer in found] == [str(answer) for answer in batch(pair, in_order=True)]
    assert n_ticks > 10


@pytest.mark.parametrize("how", ["break", "cancel", "error"])
def test_an_async_reader_may_leave(pair: Pair, how: str) -> None:
    """Prevents: a thread that computes on, a pair that stays busy, an event loop that never ends."""

    def prompts() -> Iterator[str]:
        yield from PROMPTS
        if how == "error":
            raise LookupError
        yield from PROMPTS * 50

    async def leave() -> None:
        if how == "break":
            assert len(await _read(pair, 2, prompts=prompts())) == 2
        elif how == "error":
            with pytest.raises(LookupError):
                await _read(pair, 999, prompts=prompts())
        else:
            reading = asyncio.create_task(_read(pair, 999, prompts=prompts()))
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(leave())
    assert ask(pair).reason == "length"


def test_two_async_batches_do_not_share_a_pair(pair: Pair) -> None:
    """Prevents: a second batch that takes the slots of the first."""

    async def two() -> list[object]:
        return list(await asyncio.gather(_read(pair, 99), _read(pair, 99), return_exceptions=True))

    found = asyncio.run(two())
    assert sorted(isinstance(each, ModelBusy) for each in found) == [False, True]
    assert ask(pair).reason == "length"
