"""Python time of the lookup drafter and of the controller.

    python benchmarks/deciding.py

The text is source code of the standard library, word by word, because code repeats itself.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np

from specllama.core.distribution import Distribution
from specllama.core.types import Draft, Observation, Verdict
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.lookup import INDEXED_AT_ONCE, LookupDrafter
from specllama.drafters.model import confidence_of

Answer = TypeVar("Answer")

N_TEXT = 32_768
N_VOCAB = 152_064
COSTS = CostProfile(
    verify=((1, 1.0), (2, 1.59), (3, 1.67), (4, 1.73), (5, 1.83), (6, 1.90), (8, 2.08), (12, 2.42), (17, 2.88)),
    draft=((1, 0.21), (2, 0.33), (16, 0.59), (64, 1.4)),
)


def words() -> list[int]:
    """The text as token ids, one per word, sign or space."""
    source = "".join(inspect.getsource(module) for module in (argparse, ast, inspect, statistics, re))
    ids: dict[str, int] = {}
    return [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+|[^\w\s]|\s+", source)][:N_TEXT]


def us(work: Callable[[], object], n: int) -> float:
    """Microseconds of one of the `n` items of `work`; the best of five runs."""
    times = []
    for _ in range(5):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return 1e6 * min(times) / n


def read(text: Sequence[int]) -> LookupDrafter:
    """A drafter that has indexed `text`, the second half as an answer."""
    drafter = LookupDrafter(n_max=16)
    drafter.begin(text[: len(text) // 2])
    while not drafter.follow(text):
        pass
    return drafter


def decisions(n_steps: int) -> dict[str, float]:
    """Mean microseconds of each call to the controller, over `n_steps` of a chain drafter."""
    controller = Controller(COSTS)
    spent, asked = dict.fromkeys(("plan", "look", "go_on", "observe"), 0.0), dict.fromkeys(("look", "go_on"), 0)

    def timed(name: str, question: Callable[[], Answer]) -> Answer:
        started = perf_counter()
        answer = question()
        spent[name] += 1e6 * (perf_counter() - started)
        return answer

    for i, row in enumerate(np.random.default_rng(0).uniform(0.6, 1.0, size=(n_steps, 16)).tolist()):
        offer = row[:4] if i % 3 == 0 else ()
        plan = timed("plan", lambda offer=offer: controller.plan(16, offer=offer, lag=0))
        n = plan.n_given
        while n < plan.n_given + plan.n_drawn:
            asked["look"] += 1
            if not timed("look", lambda n=n: controller.look(n)):
                break
            asked["go_on"] += 1
            if not timed("go_on", lambda n=n, row=row: controller.go_on(n, row[n])):
                break
            n += 1
        accepted = tuple(range(n if row[0] > 0.7 else n // 2))
        seen = Observation((), Draft(tuple(range(n))), Verdict(accepted, 0), "benchmark")
        timed("observe", lambda seen=seen: controller.observe(seen))
    return {name: us / max(asked.get(name, n_steps), 1) for name, us in spent.items()}


def main() -> None:
    text = words()
    rows = (4 * np.random.default_rng(0).normal(size=(32, N_VOCAB))).astype(np.float32)
    drafter = read(text)
    print(f"Python {platform.python_version()}, {platform.machine()}, {len(text)} tokens of text\n")
    print("| what | us |\n|---|---|")
    print(f"| index one token, and learn from it | {us(lambda: read(text), len(text)):.1f} |")
    print(f"| index at most, in one step | {us(lambda: read(text), len(text)) * INDEXED_AT_ONCE:.0f} |")
    print(f"| look up a draft of 16 | {us(lambda: [list(drafter.offer(text, 16)) for _ in range(100)], 100):.1f} |")
    for name, taken in decisions(2000).items():
        print(f"| controller: {name} | {taken:.1f} |")
    point = Distribution.point(0)
    taken = us(lambda: [confidence_of(row, point, greedy=True) for row in rows], len(rows))
    print(f"| confidence of a greedy draft, V = {N_VOCAB} | {taken:.0f} |")


if __name__ == "__main__":
    main()
