"""The loop's own cost: the time a step spends outside the models, at the vocabulary of Qwen2.5 and K = 0, 1, 2, 4, 8.

    python benchmarks/overhead.py

Two stand-in models answer from prepared rows and count the time of their own calls, as `llama.py` does; what the engine
reports as `loop_s` is then everything else: laws, draws, verification, bookkeeping, events.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from specllama import Caps, Engine, RandomChooser, SamplingParams, StepEvent
from specllama.core.types import FloatArray
from specllama.drafters.model import ModelDrafter

N_VOCAB = 152_064
N_TOKENS = 400
KS = (0, 1, 2, 4, 8)


class Rows:
    """A `LanguageModel` whose logits come from a prepared table: row (position mod 64)."""

    vocab_size = N_VOCAB
    n_ctx = 8192
    end_tokens: frozenset[int] = frozenset()
    caps = Caps()

    def __init__(self, table: FloatArray) -> None:  # table: (64, V) float32
        self.table = table
        self.length = 0
        self.busy_s = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        started = perf_counter()
        rows = self.table[[(self.length + i) % 64 for i in range(len(tokens))]]
        self.length += len(tokens)
        self.busy_s += perf_counter() - started
        return rows

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.length = length + len(path)


def median_loop_ms(target: FloatArray, draft: FloatArray, k: int, params: SamplingParams) -> float:
    """Median over the steps of one answer, in milliseconds; the first step is left out."""
    drafter = ModelDrafter(Rows(draft), n_max=k)
    events = Engine(Rows(target), drafter).generate([1, 2, 3], params, RandomChooser(0), max_tokens=N_TOKENS)
    steps = [event.loop_s for event in events if isinstance(event, StepEvent) and len(event.drafted) == k]
    return 1000 * statistics.median(steps[1:])


def main() -> None:
    random = np.random.default_rng(0)
    target = (4 * random.normal(size=(64, N_VOCAB))).astype(np.float32)
    draft = (target + random.normal(size=target.shape)).astype(np.float32)
    print(f"V = {N_VOCAB}, Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n")
    print("| settings | K = " + " | K = ".join(map(str, KS)) + " | a step | a drafted token |")
    print("|---|" + "---|" * (len(KS) + 2))
    for name, params in (
        ("temperature 0", SamplingParams(temperature=0.0)),
        ("temperature 0.8, top-k 40, top-p 0.95, min-p 0.05", SamplingParams()),
        ("the same, repeat penalty 1.1", SamplingParams(repeat_penalty=1.1)),
        ("temperature 0.8, no top-k", SamplingParams(top_k=0)),
    ):
        times = [min(median_loop_ms(target, draft, k, params) for _ in range(3)) for k in KS]
        slope, base = np.polyfit(KS, times, 1)
        cells = " | ".join(f"{ms:.2f}" for ms in times)
        print(f"| {name} | {cells} | {base:.2f} ms | {slope:.2f} ms |")


if __name__ == "__main__":
    main()
