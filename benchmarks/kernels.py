"""What a pass over n tokens costs with our kernels and with llama.cpp's, measured in turn on one machine.

    python benchmarks/kernels.py [MODEL ...] [--isa avx2] [--rounds 7] [--threads 2] [--json]

MODEL is a name of the catalog or a file; the default pair without one. Every kernel path has its own process with the
model loaded, so that nothing of ours runs in llama.cpp's. Rounds visit the paths in turn; figures are medians in
milliseconds. llama.cpp's figure is that of its fastest path at each width.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from specllama import llama
from specllama.base.cpu import this_cpu
from specllama.base.errors import SpecllamaError
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.kernels import build
from specllama.llama import LoadOptions, bindings, tested_kernels
from specllama.llama.kernel_path import OWN, KernelPath, candidates

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
PREFILL = 512  # tokens
DEPTH = 64  # tokens of context before each pass
TOKENS = [1000 + (7919 * i) % 20000 for i in range(PREFILL)]


@dataclass(frozen=True)
class Job:
    """One kernel path of one model."""

    model: Path
    path: KernelPath
    threads: int
    isa: str


def _serve(job: Job, pipe: Connection) -> None:
    """Entry point of a child: load the model, then answer a number of tokens with the seconds of a pass over them."""
    if job.path.own:
        bindings.own_kernels = lambda: own  # type: ignore[assignment]  # of the instruction set that was asked for
        own = bindings.attach_kernels(build.library(), job.isa)
        llama.open.own_kernels = lambda: own  # type: ignore[attr-defined]
    options = LoadOptions(n_ctx=1024, n_threads=job.threads, max_block=max(WIDTHS))
    with llama.load(job.model, job.path.applied(options)) as model:
        tokens = [token % model.vocab_size for token in TOKENS]
        pipe.send(model.n_bytes)
        while n := pipe.recv():
            model.truncate(0)
            if n < PREFILL:
                model.feed(tokens[:DEPTH])
                model.eval(tokens[:1])
            begun = time.perf_counter()
            if n < PREFILL:
                model.eval(tokens[:n])
            else:
                model.feed(tokens)
            pipe.send(time.perf_counter() - begun)


def _paths(model: Path) -> list[KernelPath]:
    found = candidates(llama.read_header(model), llama.build_info().extra_buffer_types)
    return [OWN, *(path for path in found if not path.own)]


def measure(model: Path, rounds: int, threads: int, isa: str) -> dict[str, Any]:
    """Medians in milliseconds by path name and width, and the bytes of weights."""
    context = multiprocessing.get_context("spawn")
    names, pipes, children = [], [], []
    for path in _paths(model):
        ours, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(Job(model, path, threads, isa), theirs), daemon=True)
        child.start()
        names.append("ours" if path.own else path.name)
        pipes.append(ours)
        children.append(child)
    n_bytes, *_ = [pipe.recv() for pipe in pipes]
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in (*WIDTHS, PREFILL)} for name in names}
    for number in range(rounds + 1):
        for n in (*WIDTHS, PREFILL) if number else WIDTHS:
            for name, pipe in zip(names, pipes, strict=True):
                pipe.send(n)
                seconds = pipe.recv()
                if number:  # the first round warms up
                    times[name][n].append(1e3 * seconds)
    for pipe in pipes:
        pipe.send(0)
    for child in children:
        child.join()
    medians = {name: {n: statistics.median(each) for n, each in of.items()} for name, of in times.items()}
    spread = {name: max(max(each) / min(each) for each in of.values()) for name, of in times.items()}
    best = {n: min(of[n] for name, of in medians.items() if name != "ours") for n in (*WIDTHS, PREFILL)}
    return {"model": model.name, "bytes": n_bytes, "paths": medians, "largest spread": spread,
            "T": {"ours": medians["ours"], "llama.cpp": best}}  # fmt: skip


def peak_read(threads: int) -> float:
    """Bytes a second that all threads read together from memory that no cache holds."""
    n = 1 << 26
    arrays = [np.ones(n) for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        workers = [threading.Thread(target=array.max) for array in arrays]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 8 * n * threads / (time.perf_counter() - begun))
    return best


def _print(found: dict[str, Any], peak: float) -> None:
    print(f"\n{found['model']}: {found['bytes'] / 1e6:.0f} MB of weights")
    print(f"| ms | {' | '.join(map(str, WIDTHS))} | {PREFILL} | T(4)/T(1) | T(8)/T(1) | T(16)/T(1) |")
    print("|---|" + "---|" * (len(WIDTHS) + 4))
    for name, of in found["paths"].items():
        ratios = [f"{of[n] / of[1]:.2f}" for n in (4, 8, 16)]
        print(f"| {name} | {' | '.join(f'{of[n]:.1f}' for n in (*WIDTHS, PREFILL))} | {' | '.join(ratios)} |")
    ours, theirs = found["T"]["ours"], found["T"]["llama.cpp"]
    gain = " | ".join(f"{theirs[n] / ours[n]:.2f}" for n in (*WIDTHS, PREFILL))
    print(f"| llama.cpp's fastest / ours | {gain} | | | |")
    rate = found["bytes"] / ours[1] * 1e3
    print(f"T(1) of ours reads {rate / 1e9:.1f} GB/s ({rate / peak:.0%} of {peak / 1e9:.1f} GB/s)")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--isa", default="", choices=["", *build.PATHS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        catalog = load_catalog()
        names = options.models or [catalog.pair().target.name, catalog.pair().draft.name]
        files = [Path(name) if Path(name).is_file() else hub.find(catalog.model(name)) for name in names]
        if None in files:
            raise SystemExit("a model is not here; fetch it: specllama models pull")
        if problem := tested_kernels.problem():
            raise SystemExit(f"our kernels cannot be used: {problem}")
        found = [measure(file, options.rounds, options.threads, options.isa) for file in files if file is not None]
    except SpecllamaError as error:
        raise SystemExit(str(error)) from error
    peak = peak_read(options.threads)
    if options.json:
        print(json.dumps(found[0] if len(found) == 1 else found))
        return 0
    print(f"{this_cpu().model}, {options.threads} threads, instruction set {options.isa or 'the best'}, "
          f"medians of {options.rounds} rounds")  # fmt: skip
    for each in found:
        _print(each, peak)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
