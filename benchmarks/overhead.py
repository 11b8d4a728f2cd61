"""The loop's own cost: the time a step spends outside the models, at the vocabulary of Qwen2.5.

    python benchmarks/overhead.py

Two stand-in models answer from prepared rows and count the time of their own calls, as `llama/model.py` does; what the
engine reports as `loop_s` is then everything else: laws, draws, verification, bookkeeping, events. The first table has
K = 0, 1, 2, 4, 8 drafted tokens after a short prompt; the second has one line for everything that once cost a step more
than it had to.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from specllama import Caps, Engine, Observation, RandomChooser, SamplingParams, StepEvent
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

Table = npt.NDArray[np.float32]

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams()
NO_END = {N_VOCAB - 2: -math.inf, N_VOCAB - 1: -math.inf}  # what `bench` asks for


class Rows:
    """A `LanguageModel` whose logits come from a prepared table: row (position mod 64)."""

    n_ctx = N_LONG + 1024
    end_tokens: frozenset[int] = frozenset()
    caps = Caps()
    # The rows are there already: whatever handing them out takes is no cost of the loop, so nothing is copied.
    busy_s = 0.0

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
    """A planner that never drafts, and judges the draft by the last tokens of every step."""

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None) -> DraftPlan:
        self._asked = not self._asked
        return DraftPlan(probe=N_PROBED if self._asked else 0)

    def __init__(self) -> None:
        self._asked = False

    def go_on(self, depth: int, confidence: float) -> bool:
        return False

    def look(self, depth: int) -> bool:
        return False

    def learn(self, depth: int, confidence: float, acceptance: float) -> None:
        """Nothing is learned."""

    def alone(self, offer: Sequence[float]) -> int:
        return 0

    def learn_alone(self, n_given: int, n_emitted: int) -> None:
        """Nothing is learned."""

    def observe(self, seen: Observation) -> None:
        """Nothing is learned."""


def median_loop_ms(
    target: Table, drafter: ModelDrafter, params: SamplingParams, n_drafted: int, n_prompt: int
) -> float:
    """Median over the steps of one answer, in milliseconds; the first step is left out."""
    prompt = [token % N_TRIMMED for token in range(n_prompt)]
    events = Engine(Rows(target), drafter).generate(prompt, params, RandomChooser(0), max_tokens=N_TOKENS)
    steps = [event.loop_s for event in events if isinstance(event, StepEvent) and len(event.drafted) == n_drafted]
    return 1000 * statistics.median(steps[1:])


def best_ms(
    target: Table, draft: Table, params: SamplingParams, k: int = 4, n_prompt: int = 3, p_min: float = 0.0
) -> float:
    """The best of several answers."""
    return min(
        median_loop_ms(target, ModelDrafter(Rows(draft), n_max=k, p_min=p_min), params, k, n_prompt)
        for _ in range(N_ANSWERS)
    )


def trimmed_ms(target: Table, draft: Table, params: SamplingParams) -> float:
    """The same with a draft of fewer tokens."""
    ids = np.arange(N_TRIMMED, dtype=np.int64) * (N_VOCAB // N_TRIMMED)
    rows = np.ascontiguousarray(draft[:, ids])
    return min(
        median_loop_ms(
            target,
            ModelDrafter(TranslatedModel(Rows(rows), ids, Spelling(ids), vocab_size=N_VOCAB), n_max=4),
            params,
            n_drafted=4,
            n_prompt=3,
        )
        for _ in range(N_ANSWERS)
    )


def probing_ms(target: Table, draft: Table, params: SamplingParams, n_prompt: int) -> float:
    """The same with a probe of the draft in every step, and no drafts."""
    return min(
        median_loop_ms(target, ModelDrafter(Rows(draft), policy=AlwaysProbes()), params, 0, n_prompt)
        for _ in range(N_ANSWERS)
    )


def cases(target: Table, draft: Table) -> Iterator[tuple[str, float]]:
    """(what is measured, milliseconds a step)"""
    off = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    yield "temperature 0", best_ms(target, draft, GREEDY)
    yield "temperature 0, 32,768 tokens of context", best_ms(target, draft, GREEDY, n_prompt=N_LONG)
    yield (
        "temperature 0, end tokens forbidden",
        best_ms(target, draft, SamplingParams(temperature=0.0, logit_bias=NO_END)),
    )
    yield "temperature 0, repeat penalty", best_ms(target, draft, SamplingParams(temperature=0.0, repeat_penalty=1.1))
    yield "temperature 0, confidence asked for", best_ms(target, draft, GREEDY, p_min=1e-9)
    yield "temperature 0, trimmed draft", trimmed_ms(target, draft, GREEDY)
    yield "temperature 0.8", best_ms(target, draft, SAMPLED)
    yield "temperature 0.8, 32,768 tokens of context", best_ms(target, draft, SAMPLED, n_prompt=N_LONG)
    yield "temperature 0.8, end tokens forbidden", best_ms(target, draft, SamplingParams(logit_bias=NO_END))
    yield "temperature 0.8, repeat penalty", best_ms(target, draft, SamplingParams(repeat_penalty=1.1))
    yield "temperature 0.8, trimmed draft", trimmed_ms(target, draft, SAMPLED)
    yield "temperature 0.8, no top-k", best_ms(target, draft, SamplingParams(top_k=0))
    yield "temperature 0.8, no filter", best_ms(target, draft, SamplingParams(**off))  # type: ignore[arg-type]
    yield f"temperature 0, no drafts, {N_PROBED} rows probed", probing_ms(target, draft, GREEDY, 64)
    yield "the same, 32,768 tokens of context", probing_ms(target, draft, GREEDY, N_LONG)


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
        times = [best_ms(target, draft, params, k) for k in KS]
        slope, base = np.polyfit(KS, times, 1)
        cells = " | ".join(f"{ms:.2f}" for ms in times)
        print(f"| {name} | {cells} | {base:.2f} ms | {slope:.2f} ms |", flush=True)
    print("\n| K = 4 | a step |\n|---|---|")
    for name, ms in cases(target, draft):
        print(f"| {name} | {ms:.3f} ms |", flush=True)


if __name__ == "__main__":
    main()
