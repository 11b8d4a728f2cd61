"""The pool: requests that join, end, fail and are cancelled at any moment, over fakes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from threading import Thread
from unittest.mock import Mock

import pytest
from greenlet import getcurrent, greenlet

from specllama.base.errors import (
    BackendError,
    Interrupted,
    ModelBusy,
    NumericsError,
    PromptError,
    RollbackRefused,
    SpecllamaError,
    UsageError,
)
from specllama.batch.pool import FEW, SLICE, Pool, planned
from specllama.batch.request import Done, Request
from specllama.batch.slot_view import SlotView, Want
from specllama.core.sampling import RandomChooser
from specllama.core.types import Cancel, Part
from specllama.drafters.model import ModelDrafter
from tests.exact.harness import GREEDY, N_VOCAB, Certain, agreeing, plain_greedy
from tests.exact.reference import Answer, History
from tests.fakes import FakeSlots, RandomTable, Table, replaced
from tests.many import FakeMaker, answers, request

TARGET = RandomTable(N_VOCAB, 40)
DRAFT = agreeing(TARGET, N_VOCAB, 41)
N_TOKENS = 6


def prompt(i: int) -> History:
    """Of request i: no two are alike, and their lengths differ."""
    return (i % N_VOCAB, i // N_VOCAB % N_VOCAB, *([1] * (i % 4)), i // 36 % N_VOCAB)


def greedy(i: int, **changes: object) -> Request:
    made = {"id": i, "tokens": prompt(i), "choose": Certain(), "params": GREEDY, "max_tokens": N_TOKENS}
    return request(**{**made, **changes})  # type: ignore[arg-type]


def alone(i: int, n_tokens: int = N_TOKENS) -> Answer:
    return plain_greedy(TARGET, prompt(i), n_tokens), "length"


def made(n_slots: int = 3, *, table: Table = TARGET, **changes: object) -> tuple[Pool, FakeSlots, FakeMaker]:
    """A pool with a draft model; `changes`: of the target."""
    target = FakeSlots(table, N_VOCAB, n_slots, **changes)  # type: ignore[arg-type]
    maker = FakeMaker(lambda draft: (ModelDrafter(draft, n_max=3), None))
    return Pool(target, FakeSlots(DRAFT, N_VOCAB, n_slots), maker), target, maker


def assert_works(pool: Pool, n: int = 4) -> None:
    """No slot is taken, no model leased, no KV unknown."""
    assert answers(pool, map(greedy, range(n))) == {i: alone(i) for i in range(n)}


@pytest.fixture(scope="module", autouse=True)
def only_new_objects() -> Iterator[None]:
    """`greenlets` does not look through what other tests of the process made: a second for each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def greenlets() -> int:
    getcurrent()  # the thread's own exists from now on
    gc.collect()
    return sum(isinstance(each, greenlet) and not each.dead for each in gc.get_objects())


@pytest.mark.parametrize("n_slots", [1, 2, 3, 8])
def test_greedy_answers_are_those_of_plain_decoding_at_any_number_of_slots(n_slots: int) -> None:
    """An answer that depends on the requests beside it or on the one that had its slot before."""
    assert_works(made(n_slots)[0], 20)


def test_drafts_are_verified_together() -> None:
    """A pass for each request."""
    pool, target, _ = made(3)
    assert_works(pool, 3)
    assert max(len(parts) for parts in target.passes) == 3
    assert max(sum(part.n_rows for part in parts) for parts in target.passes) > 6
    assert pool.stats.n_passes == len(target.passes) < 3 * N_TOKENS


def test_requests_are_taken_only_when_a_slot_is_free() -> None:
    """A file of requests in memory, or one taken that is not answered when the caller stops."""
    taken: list[int] = []

    def source() -> Iterator[Request]:
        for i in range(10):
            taken.append(i)
            yield greedy(i)

    found = made(2)[0].run(source())
    assert taken == []
    next(found)
    assert len(taken) == 2
    next(found)
    assert len(taken) <= 4


def test_ends_come_as_they_happen_or_in_order() -> None:
    """A long first answer that holds the others back, or an order that is lost; also with requests never made."""

    def source() -> list[Request | Done]:
        bad = Done("bad", error=PromptError("no text"))
        return [greedy(0, max_tokens=30), bad, *(greedy(i) for i in range(2, 6)), bad]

    pool = made(3)[0]
    assert [done.id for done in pool.run(source())][-1] == 0
    assert [done.id for done in pool.run(source(), in_order=True)] == [0, "bad", 2, 3, 4, 5, "bad"]


@pytest.mark.parametrize("requests", [[], iter(())])
def test_no_request_is_no_error(requests: object) -> None:
    """A pass without parts, or waiting for a request that never comes."""
    assert list(made()[0].run(requests)) == []  # type: ignore[arg-type]


def test_a_request_may_end_with_its_first_token_or_before_it() -> None:
    """A slot that is not freed, or a time that divides by no token."""
    end = plain_greedy(TARGET, prompt(1), 1)[0]
    pool = made(2, end_tokens=frozenset({end}))[0]
    ends = {done.id: done for done in pool.run([greedy(0, max_tokens=0), greedy(1), greedy(2, max_tokens=1)])}
    assert (ends[0].tokens, ends[0].reason) == ((), "length")
    assert (ends[1].tokens, ends[1].reason) == ((), "stop")
    assert (ends[2].tokens, ends[2].reason) == (plain_greedy(TARGET, prompt(2), 1), "length")
    assert all(done.times is not None and done.times.ended >= done.times.started for done in ends.values())
    assert pool.stats.n_active == 0


def failing(i: int, kind: str) -> Request:
    """A request that ends with an error."""
    if kind == "prompt":
        return greedy(i, tokens=(1,) * 99)
    if kind == "stopper":
        return greedy(i, stopper=Broken(BackendError("a stopper that fails")))
    if kind == "bug":
        return greedy(i, stopper=Broken(TypeError("a bug")))
    return greedy(i, max_tokens=60)  # runs into NaN, see below


class Broken:
    """A stopper that fails with the third token."""

    def __init__(self, error: Exception) -> None:
        self.error, self.n_seen = error, 0

    def push(self, token: int) -> bool:
        self.n_seen += 1
        if self.n_seen == 3:
            raise self.error
        return False


@pytest.mark.parametrize(
    ("kind", "error"),
    [("prompt", PromptError), ("stopper", BackendError), ("numbers", NumericsError), ("bug", SpecllamaError)],
)
def test_an_error_of_one_request_ends_that_request_only(kind: str, error: type[Exception]) -> None:
    """One bad line of a thousand that ends them all."""
    table = replaced(TARGET, 20, float("nan")) if kind == "numbers" else TARGET
    pool = made(3, table=table)[0]
    ends = {done.id: done for done in pool.run(failing(i, kind) if i == 2 else greedy(i) for i in range(6))}
    assert isinstance(ends[2].error, error)
    assert ends[2].reason is None
    assert {i: (ends[i].tokens, ends[i].reason) for i in ends if i != 2} == {i: alone(i) for i in range(6) if i != 2}
    assert (pool.stats.n_requests, pool.stats.n_failed) == (6, 1)


def test_without_memory_the_pool_ends() -> None:
    """Prevents: one error a line for a machine without memory."""
    pool = made(3)[0]
    with pytest.raises(MemoryError):
        list(pool.run([greedy(0), greedy(1, stopper=Broken(MemoryError()))]))
    assert_works(pool)


@pytest.mark.parametrize("call", ["truncate", "keep"])
def test_a_change_of_the_kv_that_fails_is_no_error_of_one_request(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a line that counts as answered, though the slots of others may be empty."""
    slots = FakeSlots(TARGET, N_VOCAB, 1)
    slots.run([Part(0, (1, 2), 1)])

    def fails(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(FakeSlots, call, fails)
    view = SlotView(slots, 0, lambda want: pytest.fail("no pass"))
    with pytest.raises(BackendError):
        view.truncate(1) if call == "truncate" else view.keep(1, [])


class Emptying(FakeSlots):
    """As `LlamaSlots`: a change of the KV that fails leaves every slot empty."""

    def fail_at(self, name: str, n_call: int) -> None:
        self.name, self.n_left = name, n_call

    def _fails(self, name: str) -> None:
        if name != self.name:
            return
        self.n_left -= 1
        if not self.n_left:
            for model in self.slots:
                model.truncate(0)
            raise RollbackRefused("the KV cache was not changed")

    def truncate(self, slot: int, length: int) -> None:
        self._fails("truncate")
        super().truncate(slot, length)

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        self._fails("keep")
        super().keep(slot, length, path)


@pytest.mark.parametrize("n_call", [1, 2, 3])
@pytest.mark.parametrize(("of_draft", "name"), [(False, "keep"), (False, "truncate"), (True, "truncate")])
def test_a_change_of_the_kv_that_fails_is_the_error_of_all_that_it_emptied(
    of_draft: bool, name: str, n_call: int
) -> None:
    """Prevents: answers that go on from an empty KV, or tell an internal error, after the failure of a neighbour."""
    target, draft = (Emptying(table, N_VOCAB, 3) for table in (TARGET, DRAFT))
    target.fail_at(name if not of_draft else "", n_call)
    draft.fail_at(name if of_draft else "", n_call)
    maker = FakeMaker(lambda view: (ModelDrafter(view, n_max=3), None))
    pool = Pool(target, draft, maker)
    ends = {done.id: done for done in pool.run(greedy(i, max_tokens=9, drafts=i % 3 == 0) for i in range(9))}
    failed = {i for i, done in ends.items() if done.error is not None}
    assert (len(ends), 1 <= len(failed) <= 3) == (9, True)
    assert len({str(ends[i].error) for i in failed}) <= 1
    assert all(ends[i].tokens == alone(i, 9)[0][: len(ends[i].tokens)] for i in failed)
    assert {i: (ends[i].tokens, ends[i].reason) for i in ends if i not in failed} == {
        i: alone(i, 9) for i in set(ends) - failed
    }
    assert sorted(maker.begun) == sorted(maker.ended)
    assert_works(pool)


def test_a_change_of_the_kv_that_fails_after_an_interrupt_is_no_error_of_the_next_requests() -> None:
    """Prevents: a pool that ends new requests with an error of old ones."""
    target = Emptying(TARGET, N_VOCAB, 3)
    target.fail_at("truncate", 1)
    maker = FakeMaker(lambda view: (ModelDrafter(view, n_max=3), None))
    pool = Pool(target, FakeSlots(DRAFT, N_VOCAB, 3), maker)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(maker, "passed", Mock(side_effect=[None, KeyboardInterrupt]))
        list(pool.run(map(greedy, range(3))))
    assert target.n_left <= 0
    assert_works(pool)


def test_a_failed_pass_ends_those_in_it_and_the_next_requests_go_on() -> None:
    """An answer that goes on from an empty KV, or a pool that gives up."""

    def hook(n_call: int, name: str) -> None:
        if n_call == 3:
            raise BackendError("a pass that fails")

    pool = made(3, hook=hook)[0]
    ends = {done.id: done for done in pool.run(map(greedy, range(7)))}
    failed = {i for i, done in ends.items() if done.error is not None}
    assert 1 <= len(failed) <= 3
    assert {i: (ends[i].tokens, ends[i].reason) for i in ends if i not in failed} == {
        i: alone(i)
        for i in range(7)
        if i not in failed  # type: ignore[arg-type]
    }


def test_a_failed_pass_of_the_draft_leaves_those_alone_that_wait_for_the_target() -> None:
    """An answer that dies although its own models work; and the draft reads again what it lost."""
    target, draft = (FakeSlots(table, N_VOCAB, 2) for table in (TARGET, DRAFT))

    def hook(n_call: int, name: str) -> None:
        if n_call == 2:
            raise BackendError("a pass of the draft that fails")

    draft.hook = hook
    maker = FakeMaker(lambda view: (ModelDrafter(view, n_max=2), None))
    plain = greedy(0, drafts=False)
    ends = {done.id: done for done in Pool(target, draft, maker).run([plain, *map(greedy, (1, 2))])}
    assert (ends[0].tokens, ends[0].reason) == alone(0)
    assert isinstance(ends[1].error, BackendError)
    assert (ends[2].tokens, ends[2].reason) == alone(2)


@pytest.mark.parametrize("at", range(8))
def test_a_cancelled_request_frees_its_slot_at_the_next_step(at: int) -> None:
    """A slot that is lost, or a neighbour that loses a token."""
    flag = Cancel()

    def hook(n_call: int, name: str) -> None:
        if n_call == at:
            flag.set()

    pool, target, _ = made(2, hook=hook)
    requests = [greedy(0, id="long", tokens=(1,) * 9, max_tokens=40, cancel=flag), *map(greedy, range(4))]
    ends = {done.id: done for done in pool.run(requests)}
    assert ends["long"].reason == "cancelled"
    assert ends["long"].tokens == plain_greedy(TARGET, (1,) * 9, len(ends["long"].tokens))
    assert {i: (ends[i].tokens, ends[i].reason) for i in range(4)} == {i: alone(i) for i in range(4)}
    later = [part.slot for parts in target.passes[at + 1 :] for part in parts]
    assert later.count(0) > 0, "the slot is used again"


def test_the_pools_flag_ends_every_request_and_takes_no_more() -> None:
    """Ctrl-C that waits for the longest answer, or a thousand requests marked as cancelled."""
    pool = made(2)[0]
    found = pool.run(greedy(i, max_tokens=2 + 20 * (i > 0)) for i in range(9))
    first = next(found)
    pool.cancel.set()
    rest = list(found)
    assert (first.id, first.reason) == (0, "length")
    assert [done.reason for done in rest] == ["cancelled"] * len(rest)
    assert len(rest) <= 2
    pool.cancel.clear()
    assert_works(pool)


def test_an_aborted_pass_cancels_every_request() -> None:
    """A cancelled pass that is reported as a failure."""
    pool = made(3)[0]

    def hook(n_call: int, name: str) -> None:
        if n_call == 2:
            pool.cancel.set()
            raise Interrupted("the computation was stopped on request")

    pool._target.hook = hook  # type: ignore[attr-defined]
    assert [done.reason for done in pool.run(greedy(i, max_tokens=40) for i in range(3))] == ["cancelled"] * 3


def test_an_iterable_that_raises_is_heard_after_the_answers_before_it() -> None:
    """Answers that are lost because line 5 of a generator is broken."""

    def source() -> Iterator[Request]:
        yield from map(greedy, range(3))
        raise LookupError("the caller's own")

    pool, found = made(2)[0], list[Done]()
    with pytest.raises(LookupError):
        found.extend(pool.run(source()))
    assert pool.stats.n_requests == 3
    assert_works(pool)


@pytest.mark.parametrize("n_read", [0, 1, 2])
def test_a_caller_may_stop_reading(n_read: int) -> None:
    """A lease, a slot or a greenlet that outlives the iterator."""
    before, (pool, _, maker) = greenlets(), made(3)
    found = pool.run(map(greedy, range(9)))
    for _ in range(n_read):
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert sorted(maker.begun) == sorted(maker.ended)
    assert greenlets() == before
    assert_works(pool)
    assert pool.stats.n_active == 0


@pytest.mark.parametrize("at", range(12))
def test_an_interrupt_anywhere_leaves_a_pool_that_works(at: int) -> None:
    """Ctrl-C in a pass, in sampling or in a drafter, after which a model stays leased or a slot taken."""
    n_asked = 0

    class Interrupting(Certain):
        def pick(self, law: object) -> int:
            nonlocal n_asked
            n_asked += 1
            if n_asked == 1 + 3 * at:
                raise KeyboardInterrupt
            return super().pick(law)

    def hook(n_call: int, name: str) -> None:
        if n_call == at:
            raise KeyboardInterrupt

    for changes, choose in (({"hook": hook}, Certain), ({}, Interrupting)):
        before, (pool, _, maker) = greenlets(), made(2, **changes)
        with pytest.raises(KeyboardInterrupt):
            list(pool.run(greedy(i, choose=choose(), max_tokens=40) for i in range(6)))
        assert greenlets() == before
        assert sorted(maker.begun) == sorted(maker.ended)
        pool._target.hook = lambda n_call, name: None  # type: ignore[attr-defined]
        assert_works(pool)


def test_one_run_at_a_time_in_one_thread() -> None:
    """Two callers who take each other's slots; a greenlet cannot change its thread, so another thread is told."""
    pool = made(2)[0]
    found = pool.run(map(greedy, range(6)))
    next(found)
    with pytest.raises(ModelBusy):
        next(pool.run([greedy(0)]))
    caught: list[Exception] = []

    def read() -> None:
        try:
            next(found)
        except UsageError as error:
            caught.append(error)

    thread = Thread(target=read)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_prompt_is_read_in_slices_beside_the_steps_of_others() -> None:
    """Answers that stand still while a long prompt is read."""
    pool, target, _ = made(2, n_ctx=600, max_rows=300)
    long = greedy(0, id="long", tokens=tuple(i % 5 for i in range(500)), max_tokens=2)
    ends = {done.id: done for done in pool.run([greedy(0, max_tokens=40), long])}
    assert ends["long"].tokens == plain_greedy(TARGET, long.tokens, 2)
    both = [parts for parts in target.passes if len(parts) == 2 and any(part.n_rows == 0 for part in parts)]
    assert len(both) > 3
    assert all(sum(len(part.tokens) - part.n_rows for part in parts) <= SLICE for parts in both)
    assert max(len(part.tokens) for parts in target.passes for part in parts) > SLICE, "alone, a prompt is read at once"


def test_a_common_beginning_is_read_once_and_kept_for_the_next_requests() -> None:
    """A system prompt that every request reads again."""
    common = tuple(i % 5 for i in range(40))
    pool, target, _ = made(3)
    requests = [request(i, (*common, i % N_VOCAB, i // N_VOCAB), Certain(), params=GREEDY) for i in range(9)]
    found = answers(pool, requests)
    assert found == {i: (plain_greedy(TARGET, requests[i].tokens, 4), "length") for i in range(9)}
    assert target.shared == common
    assert pool.stats.n_read <= len(common) + 9


@pytest.mark.parametrize("length", [30, 65, 99])
def test_equal_prompts_and_prompts_that_are_too_long_share_what_they_can(length: int) -> None:
    """a shared beginning with the token that each request must compute itself, or one that no slot holds."""
    pool, target, _ = made(2)
    tokens = tuple(i % 5 for i in range(length))
    ends = list(pool.run(greedy(0, id=i, tokens=tokens, max_tokens=2) for i in range(4)))
    if length > target.n_ctx:
        assert [type(done.error) for done in ends] == [PromptError] * 4
    else:
        assert [done.tokens for done in ends] == [plain_greedy(TARGET, tokens, 2)] * 4
        assert (target.shared, pool.stats.n_read) == (tokens[:-1], length - 1)


@pytest.mark.parametrize("error", [Interrupted("stopped on request"), BackendError("a pass that fails")])
def test_a_shared_beginning_that_cannot_be_read_is_an_error_of_no_run(error: BackendError) -> None:
    """Ctrl-C in the first pass that ends in a traceback."""

    def hook(n_call: int, name: str) -> None:
        if name == "share":
            raise error

    pool = made(2, hook=hook)[0]
    tokens = tuple(i % 5 for i in range(30))
    found = answers(pool, (greedy(0, id=i, tokens=tokens, max_tokens=2) for i in range(3)))
    assert found == {i: (plain_greedy(TARGET, tokens, 2), "length") for i in range(3)}


def wants(*lengths: tuple[int, int], n_slots: int = 9) -> list[Want]:
    """Of (unread tokens, tokens with logits)."""
    target = FakeSlots(TARGET, N_VOCAB, n_slots)
    views = [SlotView(target, slot, lambda want: None) for slot in range(n_slots)]  # type: ignore[arg-type,return-value]
    return [
        Want(views[i], [0] * n_unread, (1,) * n_rows, None, grows=False) for i, (n_unread, n_rows) in enumerate(lengths)
    ]


def tokens_of(*lengths: tuple[int, int], most: int = 64, most_outputs: int = 64) -> list[tuple[int, int, int]]:
    """(slot, tokens, rows) of the parts of a pass."""
    return [(part.slot, len(part.tokens), part.n_rows) for _, part in planned(wants(*lengths), most, most_outputs)]


def test_a_pass_takes_steps_first_then_prompts_in_their_turn() -> None:
    """A step that waits for a prompt, a prompt that starves, a pass that is too wide."""
    assert tokens_of((0, 3), (2, 1), (0, 1)) == [(0, 3, 3), (1, 3, 1), (2, 1, 1)]
    assert tokens_of((100, 1), (0, 4)) == [(1, 4, 4), (0, SLICE, 0)]
    assert tokens_of((100, 1), (50, 1)) == [(0, 64, 0)]
    assert tokens_of((20, 1), (100, 1)) == [(0, 21, 1), (1, 43, 0)]
    assert tokens_of((0, 5), (0, 5), (0, 5), most=12) == [(0, 5, 5), (1, 5, 5)]
    assert tokens_of((FEW, 1), (40, 1)) == [(0, FEW + 1, 1), (1, SLICE - FEW, 0)]
    assert tokens_of((0, 5), (0, 5), (20, 5), (0, 2), most_outputs=7) == [(0, 5, 5), (3, 2, 2), (2, 20, 0)]
    (tree,) = wants((2, 3))
    tree.parents = (-1, -1)
    assert [(len(part.tokens), part.n_rows) for _, part in planned([tree], 64, 64)] == [(2, 0)]


def sampled(i: int) -> Request:
    return request(i, prompt(i), RandomChooser(i), max_tokens=12)


def test_the_same_requests_give_the_same_texts_again() -> None:
    """A scheduler that follows a clock or the order of a set."""
    first, second = (answers(made(3)[0], map(sampled, range(9))) for _ in range(2))
    assert first == second
    assert len({tokens for tokens, _ in first.values()}) > 1


def test_the_statistics_add_up() -> None:
    """Seconds that are counted twice or not at all, and requests without a time."""
    pool = made(3)[0]
    ends = list(pool.run(map(greedy, range(7))))
    stats = pool.stats
    parts = (stats.draft_s, stats.verify_s, stats.prompt_s, stats.kv_s, stats.request_s, stats.scheduling_s)
    assert sum(parts) == pytest.approx(stats.elapsed_s)
    assert min(parts) >= 0.0
    assert stats.spec.n_emitted == 7 * N_TOKENS == sum(len(done.tokens) for done in ends)
    assert stats.n_rows == stats.spec.n_drafted + stats.spec.n_steps
    assert len(stats.first_s) == len(stats.token_s) == len(stats.latency_s) == len(stats.waiting_s) == 7
    for done in ends:
        assert done.times is not None
        assert done.times.first is not None
        assert done.times.started <= done.times.first <= done.times.ended
        assert 0.0 <= done.times.waited_s <= done.times.ended - done.times.started
    found = stats.to_json()
    assert found["tokens_s"] == stats.spec.n_emitted / stats.elapsed_s
    assert set(found["latency_s"]) == {"p50", "p95", "p99"}  # type: ignore[call-overload]


@pytest.mark.slow
def test_many_requests_leave_nothing_behind() -> None:
    """A greenlet, a record or a row that stays for every request."""
    pool, target, maker = made(4)
    draft = pool._draft
    assert isinstance(draft, FakeSlots)

    def answered(n: int) -> int:
        for done in pool.run(greedy(i % 20, max_tokens=3) for i in range(n)):
            assert done.error is None
        for kept in (target.passes, draft.passes, maker.begun, maker.ended, maker.passes):
            kept.clear()
        for model in (*target.slots, *draft.slots):
            model.calls.clear()
        pool.stats = type(pool.stats)(n_slots=4)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    before = greenlets()
    tracemalloc.start()
    try:
        answered(100)
        first = answered(200)
        assert answered(200) - first < 1_600  # a pointer for each request
    finally:
        tracemalloc.stop()
    assert greenlets() == before
