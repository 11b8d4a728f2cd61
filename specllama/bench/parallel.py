"""Many requests at once, with drafts and without: speed and latency by the number of requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from math import exp, fsum, log
from typing import Any

from specllama.base.clock import perf_counter
from specllama.base.text import counted
from specllama.batch.pool import Pool
from specllama.batch.request import Request
from specllama.batch.stats import BatchStats, Spread
from specllama.bench.job import BenchProgress
from specllama.bench.report import Condition, Machine

PARALLEL_SCHEMA = {
    "name": "specllama.bench.parallel",
    "version": 1,
    "units": "rates and shares are fractions of 1 (null: nothing was counted), *_s are seconds, kv_bytes bytes",
}
LEAST_REQUESTS = 4  # of a cell; at least two for each at once, so that requests also begin beside others


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelJob:
    """What to measure."""

    parallel: Sequence[int]  # requests at once
    conditions: Sequence[Condition]
    n_repetitions: int | None  # None = as many as the budget allows
    budget_s: float | None
    open: Callable[[int], AbstractContextManager[Pool]]  # a pool for so many requests at once
    # A round of so many requests under a condition, with drafts or without; rounds differ in their seeds.
    requests: Callable[[Condition, int, bool, int], list[Request]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRow:
    """So many requests at once under one condition, with drafts or without."""

    n_parallel: int
    drafts: bool
    condition: Condition
    n_answers: int
    answers_s: float  # answers a second
    tokens_s: float  # tokens of all answers a second
    gain: float | None  # tokens_s over that without drafts, the mean of the rounds; None without drafts
    gain_low: float | None = None  # of one round
    gain_high: float | None = None
    first_s: Spread | None  # from a request's start, in its slot, to its first token
    token_s: Spread | None  # of an answer, after its first token
    latency_s: Spread | None  # from the same start to the end of the answer
    draft_share: float  # of the time
    verify_share: float
    prompt_share: float
    kv_share: float
    request_share: float  # sampling, verification, lookups
    scheduling_share: float
    waiting_s: Spread | None  # of a request, for the passes and turns of others
    acceptance_rate: float | None
    rows_per_pass: float | None  # with logits
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelReport:
    """The table, and from where on drafts do not pay."""

    schema: Mapping[str, Any]
    made: str  # UTC, ISO 8601
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None
    machine: Machine
    n_rounds: int
    rows: tuple[ParallelRow, ...]
    verdict: str


Rounds = Mapping[tuple[Condition, int, bool], list[BatchStats]]


def n_requests(n_parallel: int) -> int:
    """How many requests a cell answers in a round."""
    return max(LEAST_REQUESTS, 2 * n_parallel)


def measured(
    job: ParallelJob, clock: Callable[[], float] = perf_counter
) -> Generator[BenchProgress, None, tuple[Rounds, int]]:
    """The statistics of every cell, a list of rounds each; and the number of rounds.

    In each round every cell is measured without drafts and with them, from empty KV caches, in changing order. After
    the pool's cancel flag is set, the cells so far. Raises the error of a request.
    """
    cells = list(product(job.conditions, job.parallel))
    found: dict[tuple[Condition, int, bool], list[BatchStats]] = {
        (*cell, drafts): [] for cell in cells for drafts in (False, True)
    }
    began_s, n_rounds, n_done, turn = clock(), job.n_repetitions, 0, 0

    def share() -> float:
        if job.budget_s is not None and job.n_repetitions is None:
            return min((clock() - began_s) / job.budget_s, 1.0)
        return n_done / (2 * len(cells) * (n_rounds or 1))

    while n_rounds is None or turn < n_rounds:
        for condition, n_parallel in cells[:: 1 if turn % 2 == 0 else -1]:
            for drafts in (False, True) if turn % 2 == 0 else (True, False):
                what = f"{n_parallel} at once, {'drafts' if drafts else 'plain'}"
                yield BenchProgress(what, share())
                with job.open(n_parallel) as pool:
                    for done in pool.run(job.requests(condition, n_requests(n_parallel), drafts, turn)):
                        if done.error is not None:
                            raise done.error
                    if pool.cancel.is_set():
                        return found, turn
                    found[condition, n_parallel, drafts].append(pool.stats)
                n_done += 1
        turn += 1
        if n_rounds is None:
            n_rounds = max(int((job.budget_s or 0.0) / (clock() - began_s)), 1)
    return found, n_rounds


def rows(found: Rounds) -> tuple[ParallelRow, ...]:
    """The table, plain decoding before drafts, of the cells that were measured in both ways."""
    table = []
    for (condition, n_parallel, drafts), rounds in found.items():
        plain, other = found[condition, n_parallel, False], found[condition, n_parallel, not drafts]
        if n := min(len(rounds), len(other)):
            table.append(_row(condition, n_parallel, drafts, rounds[:n], plain[:n]))
    return tuple(table)


def _row(
    condition: Condition, n_parallel: int, drafts: bool, rounds: Sequence[BatchStats], plain: Sequence[BatchStats]
) -> ParallelRow:
    total = BatchStats(rounds[0].n_slots, rounds[0].kv_bytes, rounds[0].compute_bytes)
    for stats in rounds:
        total.merge(stats)
    gains = [(a.tokens_s or 0.0) / (b.tokens_s or 1.0) for a, b in zip(rounds, plain, strict=True)] if drafts else []
    return ParallelRow(
        n_parallel=n_parallel,
        drafts=drafts,
        condition=condition,
        n_answers=total.n_requests,
        answers_s=total.answers_s or 0.0,
        tokens_s=total.tokens_s or 0.0,
        gain=exp(fsum(map(log, gains)) / len(gains)) if gains and min(gains) > 0.0 else None,
        gain_low=min(gains, default=None),
        gain_high=max(gains, default=None),
        first_s=Spread.of(total.first_s),
        token_s=Spread.of(total.token_s),
        latency_s=Spread.of(total.latency_s),
        draft_share=total.draft_s / total.elapsed_s,
        verify_share=total.verify_s / total.elapsed_s,
        prompt_share=total.prompt_s / total.elapsed_s,
        kv_share=total.kv_s / total.elapsed_s,
        request_share=total.request_s / total.elapsed_s,
        scheduling_share=total.scheduling_s / total.elapsed_s,
        waiting_s=Spread.of(total.waiting_s),
        acceptance_rate=total.spec.acceptance_rate,
        rows_per_pass=total.rows_per_pass,
        kv_bytes=total.kv_bytes,
    )


def verdict(found: Sequence[ParallelRow]) -> str:
    """For each condition, up to how many requests at once drafts pay."""
    conditions = list(dict.fromkeys(row.condition for row in found))
    sentences = []
    for condition in conditions:
        gains = {row.n_parallel: row.gain for row in found if row.condition == condition and row.gain is not None}
        where = f"temperature {condition.temperature:g}, answers of {counted(condition.n_predict, 'token')}"
        where += f", prompts of {condition.n_prompt}" if condition.n_prompt else ""
        sentences.append((f"{where}: " if len(conditions) > 1 else "") + _of_gains(gains))
    return "; ".join(sentences)


def _of_gains(gains: Mapping[int, float]) -> str:
    """Where drafts stop to pay: behind the most requests at which they do."""
    paying = [n for n, gain in sorted(gains.items()) if gain > 1.0]
    if not paying:
        return "drafts do not pay at any number of requests"
    best, last = max(paying, key=lambda n: gains[n]), max(paying)
    between = [f"not at {n} ({gains[n]:.2f})" for n in sorted(gains) if n < last and n not in paying]
    behind = [n for n in sorted(gains) if n > last]
    text = f"drafts give up to {gains[best]:.2f} times the tokens (at {best})"
    if behind:
        text += f" and stop paying at {behind[0]} requests at once ({gains[behind[0]]:.2f})"
    else:
        text += f" and pay up to {last} requests at once ({gains[last]:.2f})"
    return ", ".join([text, *between])
