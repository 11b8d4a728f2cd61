"""What targets of 3B to 14B gain with a 0.5B draft on this machine: measured costs, recorded acceptance.

    python benchmarks/sizes.py measure COSTS.jsonl [--sizes 3B,7B,14B] [--seconds 20]   # repeat it to continue
    python benchmarks/sizes.py report COSTS.jsonl ACCEPTANCE.jsonl
    python benchmarks/sizes.py paper
    python benchmarks/sizes.py confirm COSTS.jsonl ACCEPTANCE.jsonl [--size 7B] [--answers 4] [--rounds 2]

`measure` writes GGUF files with the published shapes of Qwen2.5 in the types of a Q4_K_M file, with random weights:
costs do not depend on values. It measures T(n) of each and c of the default pair's draft, as published and in Q4_0,
with specllama's kernels and with llama.cpp's, each in a process of its own. A file is removed after its measurements. A
size that does not fit on the disk or into memory is skipped, with the reason.

`report` replays what `replay.py record` wrote of the default pair (see `replaying.py`) with these costs. That is a
calculation: it holds for a larger target that accepts its draft as often. `paper` calculates the costs as well, of
machines that are not here: from their bandwidth and arithmetic. Its gains follow from the mean acceptance.

`confirm` runs one row of the table: the loop with the large file and the real draft, whose logits are replaced by the
recorded ones after each pass, in turn with plain decoding. `bench --synthetic` cannot do this: it accepts every token
with one probability, and its drafts have the confidence of a text that means nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import replay as recording
from bars_arms import SOURCES, prepared, published_draft
from replaying import Machine, Recorded, Replays, accepted, replay
from rows import append, mend, rows_of

from specllama import llama
from specllama.base.cpu import this_cpu
from specllama.base.disk import size_text
from specllama.base.jsonable import from_plain, to_plain
from specllama.derive import make as derive
from specllama.drafters.controller import PROBE_TOKENS, CostProfile
from specllama.drafters.length import TUNED
from specllama.files.gguf_header import TOKENS, TYPES
from specllama.files.gguf_rewrite import SourceTensor, read_source, strings, u32, write
from specllama.files.gguf_rewrite import integers as whole_numbers
from specllama.files.gguf_tiny import Q4_K, Q6_K
from specllama.llama import Header, LoadOptions, tested_kernels
from specllama.pairs.derived import Recipe
from specllama.tuning.costs import finished, measuring_costs
from specllama.tuning.forecast import speedup

F32 = 0
N_NOISE_ROWS = 64  # rows of random weights, written again and again
ROOM = 1 << 30  # bytes of disk and memory that stay free
N_CTX = 1024
DRAFTS = ("as published", "Q4_0")
TYPES_OF_TOKENS, UNUSED = "tokenizer.ggml.token_type", 5


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass over one row has to do."""

    n_bytes: int  # to read
    n_products: int  # to add up


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Qwen2.5, as published."""

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    tied: bool  # the token embedding is also the output matrix

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(name, shape, type), as llama.cpp's Q4_K_M stores them."""
        n_kv = self.n_head_values * self.n_head_kv
        yield "token_embd.weight", (self.n_embd, self.n_vocab), Q6_K.number if self.tied else Q4_K.number
        yield "output_norm.weight", (self.n_embd,), F32
        if not self.tied:
            yield "output.weight", (self.n_embd, self.n_vocab), Q6_K.number
        for layer in range(self.n_layer):
            eighth = self.n_layer // 8
            fine = layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2
            better = Q6_K.number if fine else Q4_K.number
            for name, n_in, n_out, kind in (
                ("attn_q", self.n_embd, self.n_embd, Q4_K.number),
                ("attn_k", self.n_embd, n_kv, Q4_K.number),
                ("attn_v", self.n_embd, n_kv, better),
                ("attn_output", self.n_embd, self.n_embd, Q4_K.number),
                ("ffn_gate", self.n_embd, self.n_ff, Q4_K.number),
                ("ffn_up", self.n_embd, self.n_ff, Q4_K.number),
                ("ffn_down", self.n_ff, self.n_embd, better),
            ):
                yield f"blk.{layer}.{name}.weight", (n_in, n_out), kind
                if name in ("attn_q", "attn_k", "attn_v"):
                    yield f"blk.{layer}.{name}.bias", (n_out,), F32
            yield f"blk.{layer}.attn_norm.weight", (self.n_embd,), F32
            yield f"blk.{layer}.ffn_norm.weight", (self.n_embd,), F32

    @property
    def n_head_values(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_bytes(self) -> int:
        return sum(_n_bytes(kind, *shape) for _, shape, kind in self.tensors())

    @property
    def work(self) -> Work:
        """Of a pass; an embedding that is not tied is looked up, not multiplied."""
        used = [(shape, kind) for name, shape, kind in self.tensors() if self.tied or name != "token_embd.weight"]
        return Work(
            sum(_n_bytes(kind, *shape) for shape, kind in used), sum(map(math.prod, (each for each, _ in used)))
        )


SHAPES = {
    "3B": Shape(2048, 36, 16, 2, 11008, 151936, tied=True),
    "7B": Shape(3584, 28, 28, 4, 18944, 152064, tied=False),
    "14B": Shape(5120, 48, 40, 8, 13824, 152064, tied=False),
}
REAL = "1.5B"  # the default target itself, to compare


def _n_bytes(kind: int, n_in: int, n_out: int = 1) -> int:
    return n_in // TYPES[kind].n_values * TYPES[kind].n_bytes * n_out


def write_model(base: Header, shape: Shape, path: Path) -> None:
    """A model of this shape with the tokenizer and template of `base`, a Qwen2.5."""
    source, noise = read_source(base.files), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"  # N_NOISE_ROWS rows of each type and length
        places: dict[tuple[int, int], int] = {}
        with rows.open("wb") as file:
            for _, (n_in, *_n_out), kind in shape.tensors():
                if (kind, n_in) not in places:
                    places[kind, n_in] = file.tell()
                    file.write(_noise(kind, n_in, noise))
        tensors = [_tensor(name, each, kind, rows, places[kind, each[0]]) for name, each, kind in shape.tensors()]
        numbers = {
            "block_count": shape.n_layer, "embedding_length": shape.n_embd, "feed_forward_length": shape.n_ff,
            "attention.head_count": shape.n_head, "attention.head_count_kv": shape.n_head_kv,
            "attention.key_length": shape.n_head_values, "attention.value_length": shape.n_head_values,
            "rope.dimension_count": shape.n_head_values,
        }  # fmt: skip
        values: dict[str, bytes | None] = {f"{base.architecture}.{key}": u32(n) for key, n in numbers.items()}
        values |= _padded_vocabulary(base, shape.n_vocab)
        write(source, path, values=values, tensors=tensors)


def _noise(kind: int, n_in: int, noise: random.Random) -> bytes:
    """N_NOISE_ROWS rows of matrices; of vectors, enough ones (norms) that no value is special."""
    if kind == F32:
        return np.ones(n_in, "<f4").tobytes()
    block = {Q4_K.number: Q4_K, Q6_K.number: Q6_K}[kind]
    return b"".join(block.block(noise) for _ in range(N_NOISE_ROWS * n_in // TYPES[kind].n_values))


def _tensor(name: str, shape: tuple[int, ...], kind: int, rows: Path, start: int) -> SourceTensor:
    if len(shape) == 1:
        return SourceTensor(name, shape, kind, rows, start, _n_bytes(kind, *shape))
    stored = (shape[0], N_NOISE_ROWS)
    picked = np.arange(shape[1], dtype=np.int64) % N_NOISE_ROWS
    return SourceTensor(name, stored, kind, rows, start, _n_bytes(kind, *stored), picked)


def _padded_vocabulary(base: Header, n_vocab: int) -> dict[str, bytes]:
    """The base's tokens, with unused ones at the end as in the published files."""
    n_more = n_vocab - base.n_vocab
    if not n_more:
        return {}
    kinds = base.gguf.numbers(TYPES_OF_TOKENS)
    assert kinds is not None, "every Qwen2.5 has types of tokens"
    more = [f"[PAD{base.n_vocab + i}]".encode() for i in range(n_more)]
    padded = np.concatenate([kinds.astype(np.int64), np.full(n_more, UNUSED)])
    return {TOKENS: strings([*base.gguf.strings(TOKENS), *more]), TYPES_OF_TOKENS: whole_numbers(padded)}


@contextmanager
def model_of(size: str, folder: Path | None = None) -> Iterator[Path]:
    """The file of a size; written, and removed at the end. Raises SystemExit if there is no room for it."""
    base = prepared().target.header
    if size == REAL:
        yield base.path
        return
    shape = SHAPES[size]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        n_free, memory = shutil.disk_usage(place).free, llama.memory_free()
        for what, has in (("disk", n_free), ("memory", memory)):
            if has < shape.n_bytes + ROOM:
                raise SystemExit(f"{size}: {size_text(shape.n_bytes + ROOM)} of {what} needed, {size_text(has)} free")
        path = Path(place) / f"random-{size}-q4_k_m.gguf"
        write_model(base, shape, path)
        yield path


@contextmanager
def drafts_here() -> Iterator[dict[str, Path]]:
    """The default pair's draft, and the same in Q4_0."""
    setup = published_draft()
    assert setup.draft is not None
    with tempfile.TemporaryDirectory() as folder:
        cheap = Path(folder) / "draft-q4_0.gguf"
        derive.make(setup.draft.header, Recipe(quant="Q4_0"), cheap, lambda what, share: None)
        yield dict(zip(DRAFTS, (setup.draft.path, cheap), strict=True))


def options(kernels: bool, n_ctx: int = N_CTX) -> LoadOptions:
    return LoadOptions(n_ctx=n_ctx, kernels=kernels, max_block=max(TUNED + 1, PROBE_TOKENS))


def costs_of(target: Path, draft: Path, kernels: bool, seconds: float) -> dict[str, Any]:
    """T(n) and c, interleaved; runs in a child process."""
    llama.set_log(None)
    tokens = [1000 + 7919 * i % 20000 for i in range(128)]
    with llama.load(target, options(kernels)) as model, llama.load(draft, options(kernels)) as small:
        found = finished(measuring_costs(model, small, tokens, seconds=seconds))
        n_bytes = {"target": model.n_bytes, "draft": small.n_bytes}
    return {"step_s": found.step_s, "noise": found.noise, "costs": to_plain(found.profile), "bytes": n_bytes}


def measure(args: argparse.Namespace) -> None:
    mend(args.costs)
    known = {_key(row) for row in _measured(args.costs)}
    with drafts_here() as drafts:
        for size in args.sizes.split(","):
            missing = [
                (draft, kernels) for draft in drafts for kernels in args.kernels if (size, draft, kernels) not in known
            ]
            if not missing:
                continue
            try:
                with model_of(size, args.folder) as path:
                    for draft, kernels in missing:
                        with ProcessPoolExecutor(1, get_context("spawn")) as child:
                            found = child.submit(costs_of, path, drafts[draft], kernels, args.seconds).result()
                        append(args.costs, "costs", {"size": size, "draft": draft, "kernels": kernels, **found})
                        shown = f"T(1) = {1e3 * found['step_s']:.0f} ms, spread {found['noise']:.0%}"
                        print(f"{size}, draft {draft}, {_kernels(kernels)}: {shown}", flush=True)
            except SystemExit as no_room:
                print(no_room, flush=True)


def _kernels(kernels: bool) -> str:
    return "specllama's kernels" if kernels else "llama.cpp's"


def _measured(path: Path) -> list[dict[str, Any]]:
    return [row["costs"] for row in rows_of(path)]


def _key(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["size"], row["draft"], row["kernels"]


def machine_of(row: dict[str, Any]) -> Machine:
    name = f"{row['size']}, draft {row['draft']}, {_kernels(row['kernels'])}"
    return Machine(name, from_plain(CostProfile, row["costs"]))


Cases = Sequence[tuple[float, str, list[Recorded]]]


def cases_of(path: Path) -> Cases:
    """(temperature, class, answers) of what `replay.py record` wrote."""
    found = recording.read(path)
    every = ((temperature, group) for temperature in recording.TEMPERATURES for group in SOURCES)
    cases = [(*each, recording.recorded(found, each[1], each[0], recording.PUBLISHED)) for each in every]
    return [case for case in cases if case[2]]


def gains(replays: Sequence[Replays], here: Machine) -> list[float]:
    """What `auto` gains over plain decoding, by case."""
    return [each.controlled(here, here.auto)[0] for each in replays]


def report(args: argparse.Namespace) -> None:
    cases = cases_of(args.acceptance)
    replays = [Replays(kept, recording.rounds(temperature)) for temperature, _, kept in cases]
    heads = " | ".join(f"{group}, {temperature:g}" for temperature, group, _ in cases)
    n_answers = sum(len(kept) for *_, kept in cases)
    print(f"{this_cpu().model}. {n_answers} recorded answers. A calculation: what `auto` gains with the measured costs "
          "if the draft is accepted as often as in the default pair.\n")  # fmt: skip
    print(f"| target | draft | kernels | plain t/s | T(2) | T(4) | T(8) | T(16) | c | {heads} |")
    print("|---|---|---|" + "---|" * (6 + len(cases)))
    for row in sorted(_measured(args.costs), key=lambda row: (-row["kernels"], row["step_s"])):
        here = machine_of(row)
        cells = [f"{1 / row['step_s']:.1f}", *(f"{here.costs.verify_cost(n):.2f}" for n in (2, 4, 8, 16))]
        cells += [f"{here.costs.draft_cost():.2f}", *(f"{gain:.2f}" for gain in gains(replays, here))]
        print(f"| {row['size']} | {row['draft']} | {_kernels(row['kernels'])} | {' | '.join(cells)} |", flush=True)


@dataclass(frozen=True, slots=True)
class Paper:
    """A machine that is not here."""

    name: str
    bytes_s: float
    products_s: float  # with all cores

    def pass_s(self, work: Work, n: int, overlaps: bool) -> float:
        read_s, multiply_s = work.n_bytes / self.bytes_s, n * work.n_products / self.products_s
        return max(read_s, multiply_s) if overlaps else read_s + multiply_s

    def costs(self, target: Work, draft: Work, overlaps: bool) -> CostProfile:
        def points(work: Work, *rows: int) -> tuple[tuple[int, float], ...]:
            return tuple((n, self.pass_s(work, n, overlaps) / self.pass_s(target, 1, overlaps)) for n in rows)

        return CostProfile(verify=points(target, *range(1, TUNED + 2)), draft=points(draft, 1, 2, 8, 32, 256))


# 80 % of the memory's rate, and 60 % of the multiply-adds that the ports can start, which is what our kernels reach on
# Zen 3 (134 of 221 G/s). A cycle starts two vpdpbusd of 32 (AVX-VNNI), or one vpmaddubsw of 32 and its vpmaddwd (AVX2).
PAPER = (
    Paper("laptop, DDR5-5600 in two channels, 6 cores with AVX-VNNI at 4 GHz", 0.8 * 89.6e9, 0.6 * 6 * 4.0e9 * 64),
    Paper("laptop, DDR4-2400 in two channels, 4 cores with AVX2 at 2.6 GHz", 0.8 * 38.4e9, 0.6 * 4 * 2.6e9 * 32),
)


# Per-token acceptance of the default pair at temperature 0.
ALPHAS = {"code": 0.90, "summary/RAG": 0.88, "questions": 0.65, "story": 0.68}


def on_paper(_args: argparse.Namespace) -> None:
    print("A calculation: at the best draft length, if a pass reads the weights, then multiplies (the lower gain), or "
          "does both at once (the higher one).\n")  # fmt: skip
    heads = " | ".join(f"{group}, {alpha:.2f} accepted" for group, alpha in ALPHAS.items())
    print(f"| machine | target | plain t/s | T(4) | T(8) | c | {heads} |")
    print("|---|---|" + "---|" * (4 + len(ALPHAS)))
    draft = published_draft().draft
    assert draft is not None
    used = draft.header.pass_tensors
    small = Work(sum(each.n_bytes for each in used), sum(each.n_elements for each in used))
    for paper in PAPER:
        for size, shape in SHAPES.items():
            plain = [1 / paper.pass_s(shape.work, 1, at_once) for at_once in (False, True)]
            costs = [paper.costs(shape.work, small, at_once) for at_once in (False, True)]
            cells = [_range(plain, 1), _range([each.verify_cost(4) for each in costs])]
            cells += [_range([each.verify_cost(8) for each in costs]), _range([each.draft_cost() for each in costs])]
            for alpha in ALPHAS.values():
                cells.append(_range([max(speedup(each, alpha, k) for k in range(TUNED)) for each in costs]))
            print(f"| {paper.name} | {size} | {' | '.join(cells)} |")


def _range(values: Sequence[float], digits: int = 2) -> str:
    return "-".join(dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values)))


def confirm(args: argparse.Namespace) -> None:
    """Each answer plainly and with drafts, in turn; the loop, the controller and all passes are real."""
    row = next((each for each in _measured(args.costs) if _key(each) == (args.size, DRAFTS[1], True)), None)
    if row is None:
        raise SystemExit(f"{args.costs} has no costs of {args.size} with the draft in Q4_0")
    llama.set_log(None)
    here, ratios = machine_of(row), []
    groups = [kept for temperature, _, kept in cases_of(args.acceptance) if temperature == 0.0]
    answers = [each for turn in zip(*groups, strict=False) for each in turn][: args.answers]
    how = options(kernels=True, n_ctx=max(len(each.prompt) + len(each.tokens) for each in answers) + PROBE_TOKENS)
    with ExitStack() as owned:
        draft = owned.enter_context(llama.load(owned.enter_context(drafts_here())[DRAFTS[1]], how))
        target = owned.enter_context(llama.load(owned.enter_context(model_of(args.size, args.folder)), how))
        print(f"{here.name}\n\n| answer | tokens | calculated | measured | shown live |\n|---|---|---|---|---|")
        for each in answers:
            right, n_decoded = accepted(each, 0), len(each.tokens) - 1  # the first pass counts as prompt
            for _ in range(args.rounds):
                both = (target, draft)
                plain, fast = (
                    replay(each, right, strategy, here.settings(), both, here.costs.measured_cost)
                    for strategy in ("none", here.auto)
                )
                calculated = n_decoded / (fast.cost(here.costs) - 1.0)
                measured, shown = plain.stats.decode_s / fast.stats.decode_s, fast.stats.gain
                ratios.append(measured / calculated)
                live = "n/a" if shown is None else f"{shown.value:.2f} ({shown.low:.2f}-{shown.high:.2f})"
                print(f"| {each.group} | {len(each.tokens)} | {calculated:.2f} | {measured:.2f} | {live} |", flush=True)
    print(f"\nmeasured / calculated: {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "report", "paper", "confirm"))
    parser.add_argument("costs", type=Path, nargs="?", help="a file of `measure`")
    parser.add_argument("acceptance", type=Path, nargs="?", help="a file of `replay.py record`")
    parser.add_argument("--sizes", default=",".join((REAL, *SHAPES)))
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, for each size, draft and kernels")
    parser.add_argument("--folder", type=Path, help="for the large files; the default is that of temporary files")
    parser.add_argument("--size", default="7B", choices=(REAL, *SHAPES), help="to confirm")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.costs is None and args.action != "paper":
        parser.error(f"{args.action} needs a file of costs")
    if args.acceptance is None and args.action in ("report", "confirm"):
        parser.error(f"{args.action} needs the recorded acceptance")
    args.kernels = (True, False) if tested_kernels.usable() else (False,)
    {"measure": measure, "report": report, "paper": on_paper, "confirm": confirm}[args.action](args)


if __name__ == "__main__":
    main()
