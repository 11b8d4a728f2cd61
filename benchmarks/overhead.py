"""The loop's own cost: the time a step spends outside the models, at the vocabulary size of Qwen2.5.

    python benchmarks/overhead.py

Two stand-in models return prepared rows and take no time, so the engine's `loop_s` is everything else: laws, draws,
verification, bookkeeping, events. The first table has K = 0, 1, 2, 4, 8 drafted tokens after a short prompt. The second
has a line for everything that could make a step expensive. The third is the verification of a tree by each rule, with
the laws of the rows that it reads.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from specllama import Caps, Draft, Engine, Observation, RandomChooser, Rule, SamplingParams, StepEvent, verify
from specllama.core.row_laws import RowLaws
from specllama.core.sampling import law
from specllama.core.types import DraftPlan
from specllama.drafters.model import ModelDrafter
from specllama.drafters.translated import TranslatedModel

N_VOCAB = 152_064
N_TRIMMED = 32_768  # tokens of the trimmed draft
N_LONG = 32_768  # tokens of the long prompt
N_TOKENS = 200
N_ANSWERS = 3
KS = (0, 1, 2, 4, 8)
N_PROBED = 16
N_TREES = 200
TREE = (-1, 0, 1, 2, 2, 1, 0, 6, -1, 8, 9, 8, -1, 12, -1, 14)  # parents of 16 nodes

Table = npt.NDArray[np.float32]

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams()
UNFILTERED = SamplingParams(top_k=0, top_p=1.0, min_p=0.0)
NO_END = {N_VOCAB - 2: -math.inf, N_VOCAB - 1: -math.inf}  # what `bench` asks for


class Rows:
    """A `LanguageModel` whose logits come from a prepared table: row (position mod 64)."""

    n_ctx = N_LONG + 1024
    end_tokens: frozenset[int] = frozenset()
    caps = Caps()

    def __init__(self, table: Table) -> None:  # table: (64, V) float32
        self.vocab_size = table.shape[1]
        self._table = np.concatenate((table, table[:16]))  # so that a block is a view
        self._table.setflags(write=False)
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Table:
        at = self.length % 64
        self.length += len(tokens)
        return self._table[at : at + len(tokens)]

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.length = length + len(path)


class Spelling:
    """Spells the tokens that a trimmed draft lacks with one that it has."""

    first: Sequence[int] = ()

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._cells = {token: (cell,) for cell, token in enumerate(ids.tolist())}

    def __call__(self, token: int) -> Sequence[int]:
        return self._cells.get(token, (0,))


class AlwaysProbes:
    """A planner that never drafts, and probes the draft at every step."""

    _asked = False

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
        self._asked = not self._asked
        return DraftPlan(probe=N_PROBED if self._asked else 0)

    def go_on(self, depth: int, confidence: float) -> bool:
        return False

    def look(self, depth: int) -> bool:
        return False

    def learn(self, confidence: float, acceptance: float) -> None:
        """Nothing is learned."""

    def observe(self, seen: Observation) -> None:
        """Nothing is learned."""


def best_ms(
    target: Table, drafter: Callable[[], ModelDrafter], params: SamplingParams, k: int = 4, n_prompt: int = 3
) -> float:
    """Median over the steps of an answer with `k` drafted tokens, without the first; the best of several answers."""
    prompt = [token % N_TRIMMED for token in range(n_prompt)]

    def median() -> float:
        events = Engine(Rows(target), drafter()).generate(prompt, params, RandomChooser(0), max_tokens=N_TOKENS)
        steps = [event.loop_s for event in events if isinstance(event, StepEvent) and len(event.drafted) == k]
        return 1000 * statistics.median(steps[1:])

    return min(median() for _ in range(N_ANSWERS))


def cases(target: Table, draft: Table) -> Iterator[tuple[str, float]]:
    """(what is measured, milliseconds a step)"""
    ids = np.arange(N_TRIMMED, dtype=np.int64) * (N_VOCAB // N_TRIMMED)
    rows = np.ascontiguousarray(draft[:, ids])

    def plain() -> ModelDrafter:
        return ModelDrafter(Rows(draft), n_max=4)

    def asking() -> ModelDrafter:
        return ModelDrafter(Rows(draft), n_max=4, p_min=1e-9)

    def trimmed() -> ModelDrafter:
        return ModelDrafter(TranslatedModel(Rows(rows), ids, Spelling(ids), vocab_size=N_VOCAB), n_max=4)

    def probing() -> ModelDrafter:
        return ModelDrafter(Rows(draft), policy=AlwaysProbes())

    for temperature in (0.0, 0.8):
        name, params = f"temperature {temperature:g}", SamplingParams(temperature=temperature)
        yield name, best_ms(target, plain, params)
        yield f"{name}, {N_LONG:,} tokens of context", best_ms(target, plain, params, n_prompt=N_LONG)
        yield f"{name}, end tokens forbidden", best_ms(target, plain, replace(params, logit_bias=NO_END))
        yield f"{name}, repeat penalty", best_ms(target, plain, replace(params, repeat_penalty=1.1))
        yield f"{name}, trimmed draft", best_ms(target, trimmed, params)
    yield "temperature 0, confidence asked for", best_ms(target, asking, GREEDY)
    yield "temperature 0.8, no top-k", best_ms(target, plain, SamplingParams(top_k=0))
    yield "temperature 0.8, no filter", best_ms(target, plain, UNFILTERED)
    yield f"temperature 0, no drafts, {N_PROBED} rows probed", best_ms(target, probing, GREEDY, 0, 64)
    yield f"the same, {N_LONG:,} tokens of context", best_ms(target, probing, GREEDY, 0, N_LONG)


def tree_us(target: Table, draft: Table, params: SamplingParams, rule: Rule) -> float:
    """Median of the verifications of many trees, each with other rows."""
    random = np.random.default_rng(0)
    choose = RandomChooser(0)
    times = []
    for _ in range(N_TREES):
        at = random.permutation(64)[: len(TREE) + 1]
        wide = replace(params, top_p=1.0, min_p=0.0)  # there are enough tokens for all children
        laws = [law(draft[row], (), wide) for row in at]  # of the children of each node, -1 first
        tokens: list[int] = []
        for node, parent in enumerate(TREE):
            taken = [tokens[i] for i in range(node) if TREE[i] == parent]
            tokens.append(choose.pick(laws[parent + 1].without(*taken)))
        tree = Draft(tuple(tokens), tuple(laws[parent + 1] for parent in TREE), TREE)
        rows = RowLaws(target[at], (0,), tree, params)
        started = perf_counter()
        verify(tree, rows, choose, rule)
        times.append(perf_counter() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    random = np.random.default_rng(0)
    target = (4 * random.normal(size=(64, N_VOCAB))).astype(np.float32)
    draft = (target + random.normal(size=target.shape)).astype(np.float32)
    print(f"V = {N_VOCAB}, Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n")
    print("| settings | K = " + " | K = ".join(map(str, KS)) + " | a step | a drafted token |")
    print("|---|" + "---|" * (len(KS) + 2))
    for name, params in (
        ("temperature 0", GREEDY),
        ("temperature 0.8, top-k 40, top-p 0.95, min-p 0.05", SAMPLED),
        ("the same, repeat penalty 1.1", SamplingParams(repeat_penalty=1.1)),
        ("temperature 0.8, no top-k", SamplingParams(top_k=0)),
    ):
        times = [best_ms(target, lambda k=k: ModelDrafter(Rows(draft), n_max=k), params, k) for k in KS]  # type: ignore[misc]
        slope, base = np.polyfit(KS, times, 1)
        cells = " | ".join(f"{ms:.2f}" for ms in times)
        print(f"| {name} | {cells} | {base:.2f} ms | {slope:.2f} ms |", flush=True)
    print("\n| K = 4 | a step |\n|---|---|")
    for name, ms in cases(target, draft):
        print(f"| {name} | {ms:.3f} ms |", flush=True)
    print(f"\n| a tree of {len(TREE)} nodes, us | " + " | ".join(rule.value for rule in Rule) + " |\n|---|---|---|---|")
    for name, params in (("temperature 0.8", SAMPLED), ("temperature 0.8, no filter", UNFILTERED)):
        figures = " | ".join(f"{tree_us(target, draft, params, rule):.0f}" for rule in Rule)
        print(f"| {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
