"""The table of bars: `auto` against our plain decoding and against the best fixed setting of llama.cpp's own loop.

    python benchmarks/bars.py --output FILE.jsonl [--minutes 9] [--resume]     # runs, then prints the tables
    python benchmarks/bars.py --report FILE.jsonl                              # only prints them

The default pair, eight prompts a class, temperature 0 and 1.0, one interleaved run: prompt by prompt every arm answers
in turn, the order rotated, and every run is on the disk before the next begins, so that it can be cut into pieces
(`--minutes`, then `--resume`). "ours auto" is what `specllama run` does here, made by the same code from the profile of
`specllama tune`; "ours plain" has the kernel path on which plain decoding was fastest there, the target being loaded
twice where that is not auto's (`--plain-path`). Theirs are `llama-completion` (plain) and `llama-speculative-simple`
with the published draft and a fixed K, same sampler, threads and build flags. Ends are forbidden, so answers have the
same length, but that their last block may add up to K tokens; tokens per second are compared. Above temperature 0 the
texts differ between programs.

Decode time is everything behind the first token. In ours the draft's reading of the prompt falls in it, in theirs it
does not; "steady" leaves our second step, where that happens, out. "ours plain" at temperature 1.0, our fixed settings
and further K of theirs run on the first prompts of a class only (`--sweep-prompts`). The best setting of theirs is the
one that took least time over a class, known in hindsight; where one that was only swept was faster on the prompts it
shares, the mean is lowered by as much.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import SOURCES, Answer, Ours, Theirs, answering, opened, prompts_of, published_draft, texts
from bars_report import AUTO, PEER, PEER_PLAIN, PLAIN, Run, append, arm_table, bar_tables, difference, mend, read
from peers import programs

from specllama import llama
from specllama.base.cpu import this_cpu
from specllama.bench.plan import in_turn
from specllama.llama.kernel_path import KernelPath
from specllama.prompts.load import BenchPrompt

LOAD_S = {"plain": 2.5, "draft": 3.5}  # their programs, for the estimate
GUESSED = 1.5  # the time of a fixed setting over plain decoding, for the estimate


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to be done."""

    group: str
    prompt: BenchPrompt
    temperature: float
    arm: str
    seed: int


def arms(temperature: float, peer_k: Sequence[int]) -> tuple[list[str], list[str]]:
    """(arms that answer every prompt, arms that answer the first ones of a class)."""
    main = [AUTO, PEER_PLAIN, f"{PEER} K={peer_k[0]}"]
    swept = ["ours model K=3", "ours lookup K=3", "ours lookup K=7", *(f"{PEER} K={k}" for k in peer_k[1:])]
    return ([PLAIN, *main], swept) if temperature == 0.0 else (main, [PLAIN, *swept])


def plan(groups: Sequence[str], n_prompts: int, n_swept: int, temperatures: Sequence[float],
         peer_k: Sequence[int]) -> Iterator[Cell]:  # fmt: skip
    """Every run in its order: all classes by turns, so that a part of them is a part of each."""
    for i in range(n_prompts):
        for j, group in enumerate(groups):
            prompt = prompts_of(group)[i]
            for at, temperature in enumerate(temperatures):
                main, swept = arms(temperature, peer_k)
                turn = [*main, *(swept if i < n_swept else ())]
                for arm in in_turn(turn, i + j + at):
                    yield Cell(group, prompt, temperature, arm, 1 + i)


def guess_s(cell: Cell, n_prompt: int, n_predict: int, token_s: float, read_s: float) -> float:
    """About how long a run takes: `token_s` a plain token, `read_s` a token of a prompt. Ours share its reading."""
    drafts = not cell.arm.endswith("plain")
    if cell.arm.startswith("ours"):
        return n_predict * token_s + (n_prompt * read_s / 2 if cell.temperature == 0.0 and cell.arm == PLAIN else 0.0)
    loading = LOAD_S["draft" if drafts else "plain"]
    return loading + n_prompt * read_s * (1.4 if drafts else 1) + n_predict * token_s * (GUESSED if drafts else 1)


def warm_up(here: Ours, answer: Answer, cells: Sequence[Cell]) -> tuple[float, float]:
    """(seconds of a plain token, of a token of the prompt); every arm of ours has answered once then."""
    tokens, text = texts(here, cells[0].prompt)
    for _ in range(2):  # the first pass reads the file from the disk, too
        here.plain.truncate(0)
        began = time.perf_counter()
        said = answer(PLAIN, tokens, text, 0.0, 9, 0)
    read_s = max(time.perf_counter() - began - said.decode_s, 0.0) / len(tokens)
    for arm in dict.fromkeys(cell.arm for cell in cells if cell.arm.startswith("ours") and cell.arm != PLAIN):
        answer(arm, tokens, text, 0.0, 9, 0)
    return said.decode_s / said.n_tokens, read_s


def run_all(here: Ours, there: Theirs, cells: Sequence[Cell], args: argparse.Namespace) -> bool:
    """Do what is to be done; False where time ran out before the end."""
    began = time.monotonic()
    answer = answering(here, there)
    token_s, read_s = warm_up(here, answer, cells)
    asked = {cell.prompt.id: texts(here, cell.prompt) for cell in cells}
    left = [guess_s(cell, len(asked[cell.prompt.id][0]), args.predict, token_s, read_s) for cell in cells]
    say(f"a plain token takes {1000 * token_s:.0f} ms, one of a prompt {1000 * read_s:.1f} ms: {len(cells)} runs, "
        f"about {sum(left) / 60:.0f} minutes")  # fmt: skip
    if here.setup.profile is None:
        say(f"note: this pair was not tuned here ({here.setup.stale or 'specllama tune does it'}): auto drafts blindly")
    elif here.setup.profile.plain_path is None and args.plain_path == "best":
        say("note: the profile does not say on which kernel path plain decoding is fastest, so it gets auto's; "
            "specllama tune finds it")  # fmt: skip
    if args.estimate:
        return False
    runs_began = time.monotonic()
    for n, cell in enumerate(cells):
        if time.monotonic() - began + left[n] > 60 * args.minutes:
            say(f"{len(cells) - n} runs are left, about {sum(left[n:]) / 60:.0f} minutes: go on with --resume")
            return False
        tokens, text = asked[cell.prompt.id]
        said = answer(cell.arm, tokens, text, cell.temperature, args.predict, cell.seed)
        run = Run(group=cell.group, prompt=cell.prompt.id, temperature=cell.temperature, arm=cell.arm, **asdict(said))
        append(args.output, "run", run)
        done_s = time.monotonic() - runs_began
        say(f"{n + 1}/{len(cells)} {cell.prompt.id} at {cell.temperature:g}, {cell.arm}: {run.speed:.2f} t/s, "
            f"{run.n_accepted} of {run.n_drafted} accepted; {done_s / 60:.0f} min so far, about "
            f"{done_s / 60 * sum(left[n + 1 :]) / sum(left[: n + 1]):.0f} min left")  # fmt: skip
    return True


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings(here: Ours, args: argparse.Namespace) -> dict[str, object]:
    """What all runs of one file must have in common."""
    setup, profile = here.setup, here.setup.profile
    return {
        "target": setup.target.path.name,
        "auto": setup.strategy,
        "auto_draft": None if setup.draft is None else setup.draft.path.name,
        "tuned": None if profile is None else profile.made,
        "costs": None if profile is None else profile.costs.to_json(),
        "path": KernelPath.of(setup.target_options).name,
        "plain_path": KernelPath.of(here.plain.plan).name,
        "threads": here.n_threads,
        "predict": args.predict,
        "cpu": this_cpu().model,
        "bindings": llama.build_info().bindings,
        "python": platform.python_version(),
    }


def report(path: Path) -> None:
    """The tables of what the file holds, be it all or a part: they say of how many prompts."""
    found, runs = read(path)
    if found is None or not runs:
        raise SystemExit(f"{path} holds no runs")
    draft = found["auto_draft"] or "no draft model"
    tuned = f"tuned {found['tuned']}" if found["tuned"] else "not tuned"
    print(
        f"{len(runs)} runs; {found['target']}, {found['predict']} tokens, {found['threads']} threads, {found['cpu']}; "
        f"auto here: {found['auto']}, {draft} ({tuned}), target with {found['path']}; our plain decoding with "
        f"{found.get('plain_path') or 'a path that this file does not name'}; "
        f"llama-cpp-python {found['bindings']}, Python {found['python']}"
    )
    print("\n".join([*bar_tables(runs), *arm_table(runs)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file that every run is written to")
    parser.add_argument("--resume", action="store_true", help="go on with that file")
    parser.add_argument("--report", type=Path, help="print the tables of a file and run nothing")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take and run nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end before so many minutes have passed")
    parser.add_argument("--classes", default=",".join(SOURCES))
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, 9), help="of every class")
    parser.add_argument("--sweep-prompts", type=int, default=2, help="prompts of a class that the other arms answer")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--predict", type=int, default=64)
    parser.add_argument("--peer-k", default="3,2", help="draft lengths of theirs; the first answers every prompt")
    parser.add_argument("--plain-path", choices=("best", "same"), default="best",
                        help="the kernel path of our plain decoding: its best one as tuned, or auto's")  # fmt: skip
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    if args.output is None and not args.estimate:
        parser.error("--output FILE or --report FILE")
    then, done = read(args.output) if args.output else (None, [])
    if then is not None and not args.resume:
        parser.error(f"{args.output} is there already: --resume goes on with it")
    known = {run.key for run in done}
    temperatures = [float(text) for text in args.temperatures.split(",")]
    peer_k = [int(text) for text in args.peer_k.split(",")]
    cells = [
        cell
        for cell in plan(args.classes.split(","), args.prompts, args.sweep_prompts, temperatures, peer_k)
        if (cell.group, cell.prompt.id, cell.temperature, cell.arm) not in known
    ]
    if cells:
        published = published_draft()
        assert published.draft is not None
        with_draft = any(cell.arm.startswith("ours model") for cell in cells)
        with opened(with_draft=with_draft, plain_path=args.plain_path) as here:
            there = Theirs(programs(), published.target.path, published.draft.path, here.n_threads)
            now = settings(here, args)
            if then is not None and (other := difference(then, now)):
                raise SystemExit(f"{args.output} was begun otherwise: {other}")
            if args.output:
                mend(args.output)
            if args.output and then is None:
                append(args.output, "settings", now)
            if not run_all(here, there, cells, args):
                return
    report(args.output)


if __name__ == "__main__":
    main()
