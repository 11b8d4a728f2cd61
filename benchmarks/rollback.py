"""What each way back costs: states of recurrent layers, and caches of windows.

    python benchmarks/rollback.py states
    python benchmarks/rollback.py windows MODEL.gguf [--depths 4000,8000] [--threads 2]

`states` writes files with the published shapes of a few models in Q8_0, with random weights: costs do not depend on
values. A step has 5 rows. Times are CPU time of one thread, so other programs matter little. The lowest acceptance that
gains is a calculation from these costs, for drafts of 4 tokens: from lookups, which cost nothing, and from a draft
model of a fifth of T(1) a token.

`windows` compares a cache of the window with a whole one: memory, passes after many tokens, and greedy text with drafts
by lookup, which are rejected often.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specllama import llama
from specllama.base.clock import perf_counter
from specllama.core.engine import Engine
from specllama.core.events import TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.drafters.lookup import LookupDrafter
from specllama.llama import LlamaModel, LoadOptions
from specllama.llama.rollback import KEPT, SAVED, TRUNCATION, WAYS, WINDOW, SavedStates
from specllama.prompts.load import sample_text
from specllama.tuning.costs import finished, interleaving, verifying
from tests import tiny, tiny_recurrent

N_DRAFT, N_AGAIN = 4, 2  # tokens of a draft; accepted ones of a step with a rejection
DRAFT_COST = 0.2  # of a drafted token, in T(1)
MATRICES = (
    "ssm_in", "ssm_out", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_output", "ffn_up", "ffn_down",
    "ffn_gate", "in_proj", "out_proj", "token_embd", "output",
)  # fmt: skip
# Architecture, sizes, and the sizes of its recurrent layers. A tiny hybrid has attention in each second layer.
SHAPES = {
    "Mamba-2 370M": ("mamba2", {"n_layer": 48, "n_embd": 1024}, {"N_STATE": 128, "N_RANK": 32}),
    "LFM2 350M": ("lfm2", {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 8, "n_ff": 4608}, {}),
    "Granite 4 H 350M": (
        "granitehybrid",
        {"n_layer": 32, "n_embd": 768, "n_head": 12, "n_head_kv": 4, "n_ff": 2048},
        {"N_STATE": 128, "N_RANK": 24},
    ),
    "Qwen3.5 0.8B": (
        "qwen35",
        {"n_layer": 24, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "n_ff": 3584},
        {"N_STATE": 128, "N_RANK": 16, "N_GROUPS": 16},
    ),
}
N_VOCAB = 97  # a vocabulary of letters: its matrix takes no time


def lowest_acceptance(one: float, all_accepted: float, rejected: float, draft: float) -> float:
    """The acceptance of a token from which a step with drafts is no slower than plain decoding; NaN if none is."""
    for a in np.linspace(0.0, 1.0, 1001):
        emitted = sum(a**i for i in range(N_DRAFT + 1))
        none = a**N_DRAFT
        if emitted * one >= none * all_accepted + (1.0 - none) * rejected + N_DRAFT * draft * one:
            return float(a)
    return float("nan")


def states() -> None:
    print("| shape | way | state, MB | save, ms | restore, ms | T(1), ms | step, all accepted | step, 2 of 4 accepted "
          "| gains from acceptance, lookups | draft model |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (arch, sizes, inner) in SHAPES.items():
        for constant, value in inner.items():
            setattr(tiny_recurrent, constant, value)
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.write_model(
                Path(folder) / "m.gguf", arch=arch, n_vocab=N_VOCAB, kinds=dict.fromkeys(MATRICES, "Q8_0"), **sizes
            )
            ways = (KEPT, SAVED) if arch in ("lfm2", "qwen35") else (SAVED,)
            for way in ways:
                options = LoadOptions(n_ctx=1024, max_block=9, n_threads=1, rollback=way)
                with llama.load(path, options) as model:
                    print(f"| {name} | {WAYS[way]} | {row(model)} |", flush=True)


def row(model: LlamaModel) -> str:
    block = list(range(N_DRAFT + 1))
    back = model._rollback
    assert isinstance(back, SavedStates)

    def step(n_accepted: int) -> Callable[[], None]:
        def run() -> None:
            model.eval(block)
            model.keep(model.length - N_DRAFT, range(n_accepted))

        return run

    def save() -> None:
        back._drop(model.length)
        back._save(model._call, model.length)

    model.feed(block * 10)
    model.eval([1])

    def plain() -> None:
        model.eval([1])

    # The step after one with a rejection computes tokens again, so the second and third do.
    work: list[Callable[[], object]] = [step(N_AGAIN), step(N_AGAIN), plain, plain, step(N_DRAFT)]
    _, rejected, _, one, accepted = map(min, finished(interleaving(work, seconds=10.0, clock=process_time)))
    back._save(model._call, model.length)
    size = len(back._saved[model.length].data)
    copies: list[Callable[[], object]] = [save, lambda: back._restore(model._call, model.length)]
    saved, restored = map(min, finished(interleaving(copies, seconds=1.0, clock=process_time)))
    least = [lowest_acceptance(one, accepted, rejected, draft) for draft in (0.0, DRAFT_COST)]
    figures = [size / 1e6, *(1e3 * each for each in (saved, restored, one, accepted, rejected))]
    return " | ".join([*(f"{figure:.3g}" for figure in figures), *(f"{each:.2f}" for each in least)])


def windows(path: Path, depths: Sequence[int], threads: int) -> None:
    print("| tokens before | cache | KV planned, MB | T(1), ms | T(5), ms | prefill, t/s |")
    print("|---|---|---|---|---|---|")
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
    for depth in depths:
        with ExitStack() as opened:
            models, passes, read_s = [], [], []
            for way in (TRUNCATION, WINDOW):
                options = LoadOptions(n_ctx=depth + 512, n_threads=threads, rollback=way)
                models.append(opened.enter_context(llama.load(path, options)))
                text = models[-1].vocab.tokenize(sample_text(), special=False)
                text = (text * -(-depth // len(text)))[:depth]
                began = perf_counter()
                models[-1].feed(text[:-1])
                models[-1].eval(text[-1:])
                read_s.append(perf_counter() - began)
                passes += [verifying(models[-1], depth, list(range(2, 2 + n))) for n in (1, 5)]
            fastest = list(map(min, finished(interleaving(passes, seconds=10.0))))
            for model, times, took_s in zip(models, (fastest[:2], fastest[2:]), read_s, strict=True):
                figures = (model.plan.need.kv / 1e6, *(1e3 * each for each in times), depth / took_s)
                shown = " | ".join(f"{figure:.4g}" for figure in figures)
                print(f"| {depth} | {model.way_back.text} | {shown} |", flush=True)
            texts = []
            for model in models:
                model.truncate(0)
                engine = Engine(model, LookupDrafter(n_max=4))
                events = list(engine.generate(text[:-300], greedy, RandomChooser(0), max_tokens=256))
                texts.append([event.token for event in events if isinstance(event, TokenEvent)])
            n_same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            print(f"greedy text after {depth - 300} tokens: {n_same} of {len(texts[0])} tokens the same", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("states", "windows"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--depths", default="4000,8000")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    if asked.what == "states":
        states()
    elif asked.model is None:
        parser.error("windows needs a model")
    else:
        windows(asked.model, [int(depth) for depth in asked.depths.split(",")], asked.threads)


if __name__ == "__main__":
    main()
