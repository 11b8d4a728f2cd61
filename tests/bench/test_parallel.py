"""`bench --parallel` over fakes: what a round is, what the table says, and where drafts stop paying."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from specllama.base.errors import PromptError
from specllama.batch.pool import Pool
from specllama.batch.request import Request
from specllama.batch.stats import BatchStats
from specllama.bench import parallel
from specllama.bench.parallel import ParallelJob, ParallelRow, Rounds, measured, n_requests, rows, verdict
from specllama.bench.report import Condition
from specllama.core.types import Cancel
from specllama.drafters.model import ModelDrafter
from tests.exact.harness import N_VOCAB, agreeing
from tests.fakes import FakeSlots, RandomTable
from tests.many import FakeMaker, request

TARGET = RandomTable(N_VOCAB, 50)
DRAFT = agreeing(TARGET, N_VOCAB, 51)
SHORT, LONG = Condition(n_predict=4), Condition(n_predict=8)


class Bench:
    """A job over fakes that records its pools and its requests."""

    def __init__(self, cancel: Cancel | None = None) -> None:
        self.cancel = cancel or Cancel()
        self.opened: list[Pool] = []
        self.asked: list[tuple[Condition, int, bool, int]] = []
        self.n_prompt = 2

    @contextmanager
    def open(self, n_slots: int) -> Iterator[Pool]:
        target, draft = (FakeSlots(table, N_VOCAB, n_slots) for table in (TARGET, DRAFT))
        maker = FakeMaker(lambda model: (ModelDrafter(model, n_max=2), None))
        self.opened.append(Pool(target, draft, maker, cancel=self.cancel))
        yield self.opened[-1]

    def requests(self, condition: Condition, n: int, drafts: bool, turn: int) -> list[Request]:
        self.asked.append((condition, n, drafts, turn))
        return [request(i, (1,) * self.n_prompt, max_tokens=condition.n_predict, drafts=drafts) for i in range(n)]

    def run(self, *, n_repetitions: int | None = 2, budget_s: float | None = None) -> tuple[Rounds, int]:
        seconds = count()
        job = ParallelJob(
            parallel=(1, 3),
            conditions=(SHORT, LONG),
            n_repetitions=n_repetitions,
            budget_s=budget_s,
            open=self.open,
            requests=self.requests,
        )
        work = measured(job, lambda: float(next(seconds)))
        shares = []
        while True:
            try:
                shares.append(next(work).share)
            except StopIteration as end:
                assert shares == sorted(shares)
                assert 0.0 <= shares[0] <= shares[-1] <= 1.0
                found: tuple[Rounds, int] = end.value
                return found


def test_every_cell_is_measured_in_both_ways_from_empty_caches() -> None:
    """Prevents: an arm that finds the prompts of the other in its cache, or that always comes second."""
    bench = Bench()
    found, n_rounds = bench.run()
    assert n_rounds == 2
    assert len(bench.opened) == len(bench.asked) == 2 * 2 * 2 * 2
    assert [(n, drafts) for _, n, drafts, _ in bench.asked[:4]] == [(4, False), (4, True), (6, False), (6, True)]
    assert [(n, drafts) for _, n, drafts, _ in bench.asked[8:10]] == [(6, True), (6, False)]
    assert all(len(rounds) == 2 for rounds in found.values())
    table = rows(found)
    assert [(row.condition, row.n_parallel, row.drafts) for row in table] == [
        (condition, n, drafts) for condition in (SHORT, LONG) for n in (1, 3) for drafts in (False, True)
    ]
    for row in table:
        assert row.n_answers == 2 * n_requests(row.n_parallel)
        assert (row.gain is None) == (row.acceptance_rate is None) == (not row.drafts)
        shares = (row.draft_share, row.verify_share, row.prompt_share, row.kv_share, row.request_share)
        assert sum(shares) + row.scheduling_share == pytest.approx(1.0)


@pytest.mark.parametrize(("budget_s", "n_rounds"), [(1.0, 1), (10.0, 1), (30.0, 3)])
def test_a_budget_gives_as_many_rounds_as_fit(budget_s: float, n_rounds: int) -> None:
    """Prevents: a benchmark that takes several times its budget."""
    assert Bench().run(n_repetitions=None, budget_s=budget_s)[1] == n_rounds


def test_after_ctrl_c_the_cells_that_are_whole_are_reported() -> None:
    """Prevents: minutes of measuring lost; a row of answers that were cut."""
    bench = Bench()
    original = bench.requests

    def requests(condition: Condition, n: int, drafts: bool, turn: int) -> list[Request]:
        if len(bench.asked) == 3:
            bench.cancel.set()
        return original(condition, n, drafts, turn)

    bench.requests = requests  # type: ignore[method-assign]
    table = rows(bench.run()[0])
    assert [(row.n_parallel, row.drafts) for row in table] == [(1, False), (1, True)]


def test_a_request_that_fails_ends_the_benchmark() -> None:
    """Prevents: a speed of requests that were not answered."""
    bench = Bench()
    bench.n_prompt = 1000
    with pytest.raises(PromptError):
        bench.run()


def _table(gains: dict[int, float], condition: Condition = SHORT) -> list[ParallelRow]:
    found: dict[tuple[Condition, int, bool], list[BatchStats]] = {}
    for n, gain in gains.items():
        for drafts in (False, True):
            stats = BatchStats(n_slots=n, elapsed_s=1.0)
            stats.spec.n_emitted = round(1000 * (gain if drafts else 1.0))
            found[condition, n, drafts] = [stats]
    return list(rows(found))


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({1: 1.5, 2: 1.2, 4: 0.9, 8: 0.8}, "1.50 times the tokens (at 1) and stop paying at 4 requests at once (0.90)"),
        ({1: 1.5, 8: 1.1}, "1.50 times the tokens (at 1) and pay up to 8 requests at once (1.10)"),
        ({1: 1.5, 4: 0.9, 8: 1.1}, "(at 1) and pay up to 8 requests at once (1.10), not at 4 (0.90)"),
        ({1: 0.9, 8: 0.8}, "drafts do not pay"),
    ],
)
def test_the_verdict_says_where_drafts_stop_paying(gains: dict[int, float], said: str) -> None:
    """Prevents: a table without an answer."""
    assert said in verdict(_table(gains))


def test_each_condition_has_its_verdict() -> None:
    """Prevents: the best condition's verdict for all of them."""
    found = verdict([*_table({1: 1.5}), *_table({1: 0.5}, LONG)])
    assert found.count("drafts ") == 2
    assert parallel.PARALLEL_SCHEMA["version"] == 1
