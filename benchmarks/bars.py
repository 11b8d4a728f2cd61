"""The table of bars: `auto` against our plain decoding and against the best fixed setting of llama.cpp's own loop.

    python benchmarks/bars.py --output FILE.jsonl [--minutes 9] [--resume]     # runs, then prints the tables
    python benchmarks/bars.py --output FILE.jsonl --ours                       # without llama.cpp's programs
    python benchmarks/bars.py --report FILE.jsonl                              # only prints them

The default pair, eight prompts of each class, temperature 0 and 1.0. Every arm answers each prompt in turn, in rotating
order, and each run is saved before the next. "ours auto" is `specllama run` with the profile of `specllama tune`.
"ours plain" decodes on its fastest kernel path (`--plain-path`). Theirs are `llama-completion` (plain) and
`llama-speculative-simple` with the published draft and a fixed K, with the same sampler, threads and build flags. End
tokens are forbidden, so answers have the same length, but their last block may add up to K tokens. Above temperature 0
the texts differ between programs. At temperature 0 `auto` must give the text of our plain decoding; if one differs, the
exit status is 1 (two kernel paths may differ in a near tie: `--plain-path same`).

The figure is tokens per second after the first token. Ours include the draft's reading of the prompt, theirs do not.
Their best setting is the one with the least time over a class, known in hindsight.
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

from bars_arms import SOURCES, Ours, Theirs, opened, ours, prompts_of, published, texts
from bars_report import AUTO, PEER, PEER_PLAIN, PLAIN, Run, arm_table, bar_tables, changed_texts, read
from peers import programs
from rows import append, difference, mend, rows_of

from specllama import llama
from specllama.base.cpu import this_cpu
from specllama.bench.plan import in_turn
from specllama.llama.kernel_path import KernelPath
from specllama.prompts.load import BenchPrompt


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the plan."""

    group: str
    prompt: BenchPrompt
    temperature: float
    arm: str
    seed: int


def plan(groups: Sequence[str], n_prompts: int, temperatures: Sequence[float], peers: Sequence[str]) -> Iterator[Cell]:
    """Every run in order; the classes take turns, so a part of the runs has all classes. `peers`: llama.cpp's arms."""
    arms = [PLAIN, AUTO, *peers]
    for i in range(n_prompts):
        for j, group in enumerate(groups):
            prompt = prompts_of(group)[i]
            for at, temperature in enumerate(temperatures):
                for arm in in_turn(arms, i + j + at):
                    yield Cell(group, prompt, temperature, arm, 1 + i)


def run_all(here: Ours, there: Theirs | None, cells: Sequence[Cell], args: argparse.Namespace) -> bool:
    """Run the cells in order; False if time ran out."""
    began, longest_s = time.monotonic(), 0.0
    if here.setup.profile is None:
        say(f"note: this pair was not tuned here ({here.setup.stale or 'specllama tune does it'}): auto has no profile")
    for arm in (AUTO, PLAIN):  # the first pass reads the file from the disk
        ours(here, arm, texts(here, cells[0].prompt)[0], 0.0, 9, 0)
    for n, cell in enumerate(cells):
        cell_began = time.monotonic()
        if cell_began - began + longest_s > 60 * args.minutes:
            say(f"{len(cells) - n} runs are left: continue with --resume")
            return False
        tokens, text = texts(here, cell.prompt)
        if cell.arm.startswith(PEER):
            assert there is not None, "its runs are in the plan"
            said = there.run(cell.arm, text, cell.temperature, args.predict, cell.seed)
        else:
            said = ours(here, cell.arm, tokens, cell.temperature, args.predict, cell.seed)
        run = Run(group=cell.group, prompt=cell.prompt.id, temperature=cell.temperature, arm=cell.arm, **asdict(said))
        append(args.output, "run", asdict(run))
        longest_s = max(longest_s, time.monotonic() - cell_began)
        say(f"{n + 1}/{len(cells)} {cell.prompt.id} at {cell.temperature:g}, {cell.arm}: {run.speed:.2f} t/s, "
            f"{run.n_accepted} of {run.n_drafted} accepted")  # fmt: skip
    return True


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings(here: Ours, args: argparse.Namespace) -> dict[str, object]:
    """The settings that all runs of a file share."""
    setup, profile = here.setup, here.setup.profile
    return {
        "target": setup.target.path.name,
        "auto": setup.strategy,
        "auto_draft": None if setup.draft is None else setup.draft.path.name,
        "tuned": None if profile is None else profile.made,
        "costs": None if profile is None else asdict(profile.costs),
        "path": KernelPath.of(setup.target_options).name,
        "plain_path": KernelPath.of(here.plain.plan).name,
        "threads": here.n_threads,
        "predict": args.predict,
        "cpu": this_cpu().model,
        "bindings": llama.build_info().bindings,
        "python": platform.python_version(),
    }


def report(path: Path) -> int:
    """Print the tables of a file with all runs or a part. 1 if `auto` changed a text at temperature 0, else 0."""
    found, runs = read(rows_of(path))
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
    changed = changed_texts(runs)
    if changed:
        say(f"auto gave another text than our plain decoding at temperature 0: {', '.join(changed)}")
    return int(bool(changed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file that every run is written to")
    parser.add_argument("--resume", action="store_true", help="continue that file")
    parser.add_argument("--report", type=Path, help="only print the tables of a file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--classes", default=",".join(SOURCES))
    parser.add_argument("--prompts", type=int, default=8, choices=range(1, 9), help="of every class")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--predict", type=int, default=64)
    theirs = parser.add_mutually_exclusive_group()
    theirs.add_argument("--ours", action="store_true", help="leave out llama.cpp's programs")
    theirs.add_argument("--peer-k", default="3,2", help="draft lengths of theirs")
    parser.add_argument("--plain-path", choices=("best", "same"), default="best",
                        help="the kernel path of our plain decoding: its best one as tuned, or auto's")  # fmt: skip
    args = parser.parse_args()
    if args.report:
        return report(args.report)
    if args.output is None:
        parser.error("--output FILE or --report FILE")
    then, done = read(rows_of(args.output))
    if then is not None and not args.resume:
        parser.error(f"{args.output} exists already: --resume continues it")
    known = {run.key for run in done}
    temperatures = [float(text) for text in args.temperatures.split(",")]
    peers = [] if args.ours else [PEER_PLAIN, *(f"{PEER} K={int(k)}" for k in args.peer_k.split(","))]
    cells = [
        cell
        for cell in plan(args.classes.split(","), args.prompts, temperatures, peers)
        if (cell.group, cell.prompt.id, cell.temperature, cell.arm) not in known
    ]
    if cells:
        with opened(args.plain_path) as here:
            there = None if args.ours else published(programs(), here.n_threads)
            now = settings(here, args)
            if then is not None and (other := difference(then, now)):
                raise SystemExit(f"{args.output} has other settings: {other}")
            mend(args.output)
            if then is None:
                append(args.output, "settings", now)
            if not run_all(here, there, cells, args):
                return 0
    return report(args.output)


if __name__ == "__main__":
    sys.exit(main())
