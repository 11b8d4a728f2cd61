"""What a pass over n tokens costs with our kernels and with llama.cpp's, measured in turn on one machine.

    python benchmarks/kernels.py [MODEL ...] [--isa avx2] [--rounds 7] [--threads 2] [--json]
    python benchmarks/kernels.py --types dense|experts [--isa avx2] [--rounds 7] [--threads 2] [--json]

MODEL is a name of the catalog or a file; the default pair without one. Every kernel path has its own process with the
model loaded, so that nothing of ours runs in llama.cpp's. Rounds visit the paths in turn; figures are medians in
milliseconds. llama.cpp's figure is that of its fastest path at each width.

--types multiplies the matrices of several layers, more than a cache holds, in every type of weights that we take
(kernels.cpp), and shows what loops reach that only load, or only multiply: "dense" those of a 1.5B model, "experts"
those of a mixture of 64 experts with columns that choose 8 by chance. Each takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specllama import llama
from specllama.base.cpu import this_cpu
from specllama.base.errors import SpecllamaError
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.kernels import build
from specllama.kernels.library import BUFFER_TYPE, ISA_VARIABLE
from specllama.llama import LoadOptions, tested_kernels
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


def _serve(job: Job, pipe: Connection) -> None:
    """Entry point of a child: load the model, then answer a number of tokens with the seconds of a pass over them."""
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


def measure(model: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Medians in milliseconds by path name and width, and the bytes of weights."""
    context = multiprocessing.get_context("spawn")
    names, pipes, children = [], [], []
    for path in _paths(model):
        ours, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(Job(model, path, threads), theirs), daemon=True)
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


def measure_types(layer: str, isa: str, rounds: int, threads: int) -> dict[str, Any]:
    """The peaks of this machine, and for each type milliseconds by buffer type and number of columns."""
    lib = build.headers().parent / "llama_cpp" / "lib"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "kernels"
        command = [*build.compiler(), *build.FLAGS, *build.PATHS[isa], f"-I{build.headers()}", f"-I{build.SOURCES}"]
        command += [str(Path(__file__).with_suffix(".cpp")), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lggml-base"]
        command += ["-lggml-cpu", "-ldl", "-pthread", "-o", str(program)]
        if failure := "".join(build.run_all([command], Path(folder))):
            raise SystemExit(f"the benchmark cannot be compiled: {failure}")
        done = subprocess.run(
            [program, build.library(), str(threads), str(rounds), layer], stdout=subprocess.PIPE, text=True, check=True
        )
    peaks: dict[str, float] = {}
    types: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        name, *rest = line.split()
        if len(rest) == 1:
            peaks[name] = float(rest[0])
            continue
        buffer, columns, ms, n_bytes, n_multiplied = rest
        of = types.setdefault(name, {"bytes": int(n_bytes), "multiplications": int(n_multiplied), "ms": {}})
        of["ms"].setdefault(buffer, {})[int(columns)] = float(ms)
    return {"peaks": peaks, "types": types}


def _show_types(found: dict[str, Any], machine: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0
    peaks = found["peaks"]
    widths = list(next(iter(found["types"].values()))["ms"][BUFFER_TYPE])
    print(f"{machine}\n\nLoops: only load {peaks['read']:.1f} GB/s, only multiply {peaks['multiply']:.0f} GMAC/s "
          f"(floating point {peaks['fma']:.0f})\n")  # fmt: skip
    gains = " | ".join(f"gain at {n}" for n in widths)
    print(f"| type | T(1) GB/s | GMAC/s at {widths[-1]} | T(4)/T(1) | T(8)/T(1) | T(16)/T(1) | {gains} |")
    print("|---|" + "---|" * (5 + len(widths)))
    for name, of in found["types"].items():
        ours = of["ms"].pop(BUFFER_TYPE)
        ratios = " | ".join(f"{ours[n] / ours[1]:.2f}" for n in (4, 8, 16))
        gains = " | ".join(f"{min(each[n] for each in of['ms'].values()) / ours[n]:.2f}" for n in widths)
        print(f"| {name} | {of['bytes'] / ours[1] / 1e6:.1f} | {of['multiplications'] * 16 / ours[16] / 1e6:.0f} "
              f"| {ratios} | {gains} |")  # fmt: skip
    print("\nGain: the time of llama.cpp's fastest buffer type, divided by ours.")
    return 0


def _print(found: dict[str, Any]) -> None:
    print(f"\n{found['model']}: {found['bytes'] / 1e6:.0f} MB of weights")
    print(f"| ms | {' | '.join(map(str, WIDTHS))} | {PREFILL} | T(4)/T(1) | T(8)/T(1) | T(16)/T(1) |")
    print("|---|" + "---|" * (len(WIDTHS) + 4))
    for name, of in found["paths"].items():
        ratios = [f"{of[n] / of[1]:.2f}" for n in (4, 8, 16)]
        print(f"| {name} | {' | '.join(f'{of[n]:.1f}' for n in (*WIDTHS, PREFILL))} | {' | '.join(ratios)} |")
    ours, theirs = found["T"]["ours"], found["T"]["llama.cpp"]
    gain = " | ".join(f"{theirs[n] / ours[n]:.2f}" for n in (*WIDTHS, PREFILL))
    print(f"| llama.cpp's fastest / ours | {gain} | | | |")
    print(f"T(1) of ours reads {found['bytes'] / ours[1] / 1e6:.1f} GB/s")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--types", choices=["dense", "experts"])
    parser.add_argument("--isa", choices=[*build.PATHS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.isa:
        os.environ[ISA_VARIABLE] = options.isa
    try:
        if problem := tested_kernels.problem():
            raise SystemExit(f"our kernels cannot be used: {problem}")
        own = llama.own_kernels()
        if own is None:
            raise SystemExit("our kernels cannot be attached")
        machine = f"{this_cpu().model}, {options.threads} threads, {own.isa}, medians of {options.rounds} rounds"
        if options.types:
            return _show_types(
                measure_types(options.types, own.isa, options.rounds, options.threads), machine, as_json=options.json
            )
        catalog = load_catalog()
        names = options.models or [catalog.pair().target.name, catalog.pair().draft.name]
        files = [Path(name) if Path(name).is_file() else hub.find(catalog.model(name)) for name in names]
        if None in files:
            raise SystemExit("a model is not here; fetch it: specllama models pull")
        found = [measure(file, options.rounds, options.threads) for file in files if file is not None]
    except SpecllamaError as error:
        raise SystemExit(str(error)) from error
    if options.json:
        print(json.dumps(found[0] if len(found) == 1 else found))
        return 0
    print(machine)
    for each in found:
        _print(each)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
