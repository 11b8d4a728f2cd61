"""What a newcomer sees: `specllama run` plainly, the first time, the second time, and after `specllama tune`.

    python benchmarks/newcomer.py [--rounds 3] [--tuned-state FOLDER]

Each answer is a process of its own with the default pair at temperature 0. Cache, configuration and state are new
folders; models and kernels are linked into the cache. One run of each command comes before and does not count: it tests
llama.cpp, the kernels and the files, once on a machine. A first answer begins without a profile, the second has what
the first one measured and taught. The profiles of `specllama tune` are copies, so no answer changes the user's. The
prompts are the second English ones of their classes, because `tune` measures with the first.

The speed is the one that the program reports, without prompt and measuring. The time is that from the start of the
process to the printed answer, with loading, measuring and prompt. Both are medians of the rounds, whose order turns. A
ratio is the median of the ratios to the plain answer of the same round; above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from platformdirs import user_cache_path, user_state_path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import SOURCES, prompts_of

from specllama.bench.plan import in_turn

PLAIN, FIRST, SECOND, TUNED = "plain", "first answer", "second answer", "after `tune`"
SECOND_ENGLISH = 3  # in a class, whose prompts alternate English, Japanese and Chinese


@dataclass(frozen=True, slots=True)
class Answer:
    """The figures of one process."""

    n_tokens: int
    speed: float  # tokens a second, as the program reports it
    answer_s: float  # until the answer was printed
    behind_s: float  # from there to the end of the process
    tuned: bool


def answered(prompt: str, n_predict: int, environment: Mapping[str, str], *options: str) -> Answer:
    """The answer of one process."""
    words = [sys.executable, "-m", "specllama", "run", "--json", "--quiet", "--temp", "0", "-n", str(n_predict)]
    began = time.perf_counter()
    with subprocess.Popen(
        [*words, *options, prompt], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        answer_s = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"specllama run ended with exit code {process.returncode}")
    said = json.loads(line)
    speed, tuned = said["timings"]["predicted_per_second"], (said["profile"] or {}).get("source", "use") != "use"
    return Answer(said["timings"]["predicted_n"], speed, answer_s, time.perf_counter() - began - answer_s, tuned)


def turn(prompt: str, n_predict: int, home: Path, tuned: Path, at: int) -> dict[str, Answer]:
    """An answer of each arm, in an order by `at`. `tuned`: a state folder of specllama."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tuned / "profiles", Path(folder) / TUNED / "specllama" / "profiles")
        for arms in in_turn([(PLAIN,), (FIRST, SECOND), (TUNED,)], at):
            places = {"XDG_STATE_HOME": Path(folder) / arms[0], "XDG_CACHE_HOME": home / "cache",
                      "XDG_CONFIG_HOME": home / "config"}  # fmt: skip
            environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
            options = ("--spec-type", "none") if arms == (PLAIN,) else ()
            for arm in arms:
                found[arm] = answered(prompt, n_predict, environment, *options)
    if not found[TUNED].tuned:
        raise SystemExit(f"{tuned} has no valid profile of the default pair (expected one of specllama tune)")
    return found


def linked(home: Path) -> None:
    """A cache in `home` with the user's models and kernels, without all else."""
    for name in ("specllama/models", "specllama/kernels", "huggingface"):
        if (theirs := user_cache_path() / name).is_dir():
            (link := home / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(theirs)


def table(groups: Mapping[str, Sequence[Mapping[str, Answer]]]) -> list[str]:
    """A row for each prompt; `groups`: its rounds."""

    def of(arm: str, figure: Callable[[Answer], float]) -> tuple[float, float]:
        ratios = [figure(each[arm]) / figure(each[PLAIN]) for each in rounds]
        return median(figure(each[arm]) for each in rounds), median(ratios)

    lines = [f"| prompt | tokens | {PLAIN} | {FIRST} | {SECOND} | {TUNED} |", "|---|---|---|---|---|---|"]
    for name, rounds in groups.items():
        cells = []
        for arm in (PLAIN, FIRST, SECOND, TUNED):
            (speed, faster), (whole_s, slower) = of(arm, lambda each: each.speed), of(arm, lambda each: each.answer_s)
            cells.append(f"{speed:.1f} t/s ({faster:.2f}), {whole_s:.1f} s ({1 / slower:.2f})")
        lines.append(f"| {name} | {rounds[0][PLAIN].n_tokens} | {' | '.join(cells)} |")
    behind_s = median(each[FIRST].behind_s for rounds in groups.values() for each in rounds)
    return [*lines, "", f"After its answer was printed, a first process ran on for {behind_s:.1f} s (median)."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--predict", type=int, default=64)
    parser.add_argument("--tuned-state", type=Path, default=user_state_path("specllama"),
                        help="the folder with the profiles of specllama tune")  # fmt: skip
    args = parser.parse_args()
    if not (args.tuned_state / "profiles").is_dir():
        parser.error(f"{args.tuned_state} has no profiles: run specllama tune")
    groups: dict[str, list[dict[str, Answer]]] = {name: [] for name in SOURCES}
    with tempfile.TemporaryDirectory() as home:
        linked(Path(home))
        turn("Hello.", 2, Path(home), args.tuned_state, 0)
        for n in range(args.rounds):
            for at, name in enumerate(SOURCES):
                prompt = prompts_of(name)[SECOND_ENGLISH].turns[0]
                found = turn(prompt, args.predict, Path(home), args.tuned_state, n + at)
                groups[name].append(found)
                said = ", ".join(f"{arm} {each.speed:.1f} t/s, {each.answer_s:.1f} s" for arm, each in found.items())
                print(f"round {n + 1}, {name}: {said}", file=sys.stderr, flush=True)
    print("\n".join(table(groups)))


if __name__ == "__main__":
    main()
