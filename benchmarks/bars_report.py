"""The table of `bars.py`: runs as they lie in its file, paired ratios, the peer's best setting in hindsight."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAIN, AUTO = "ours plain", "ours auto"
PEER = "llama.cpp"  # every arm of theirs begins so
PEER_PLAIN = f"{PEER} plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer of one arm."""

    group: str  # the class of the prompt
    prompt: str
    temperature: float
    arm: str
    n_tokens: int  # decoded within `decode_s`
    decode_s: float  # ours: everything behind the first token, the draft's reading of the prompt included
    n_steady: int  # the same behind the second step, in which our draft reads the prompt; theirs as above
    steady_s: float
    n_drafted: int
    n_accepted: int
    text: str  # theirs: all that the program printed
    tokens: tuple[int, ...] = ()  # ours only

    @property
    def key(self) -> tuple[str, str, float, str]:
        return self.group, self.prompt, self.temperature, self.arm

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.n_tokens / self.decode_s

    @property
    def steady(self) -> float:
        return self.n_steady / self.steady_s if self.steady_s else self.speed


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the issue's table."""

    title: str
    temperature: float
    peer: bool  # against the best fixed setting of llama.cpp's loop; else against our plain decoding
    wanted: Mapping[str, float]  # by class


BARS = (
    Bar("our plain decoding, temperature 0", 0.0, False,
        {"code": 1.65, "summary/RAG": 1.65, "questions": 1.05, "story": 1.1}),
    Bar("best fixed setting of llama.cpp's loop, temperature 0", 0.0, True,
        {"code": 1.3, "summary/RAG": 1.3, "questions": 1.05, "story": 1.1}),
    Bar("best fixed setting of llama.cpp's loop, temperature 1.0", 1.0, True,
        {"code": 1.3, "summary/RAG": 1.3, "questions": 1.15, "story": 1.15}),
)  # fmt: skip
GROUPS = tuple(BARS[0].wanted)


# ------------------------------------------------------------------------------------------------------------ the file


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as `append` writes it; None for anything else."""
    try:
        row = json.loads(line)
        return row if isinstance(row[row["kind"]], dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _lines(path: Path) -> list[bytes]:
    """The lines of a file with their ends."""
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. A last line that is none was torn when a run was killed: it is passed over, and said so.

    Raises SystemExit for any other.
    """
    lines = _lines(path)
    for n, line in enumerate(lines, 1):
        if (row := _row(line)) is not None:
            yield row
        elif n == len(lines):
            print(f"note: {path}, line {n}, was torn and does not count", file=sys.stderr)
        else:
            raise SystemExit(f"{path}, line {n}, is no row of JSON")


def read(path: Path) -> tuple[dict[str, Any] | None, list[Run]]:
    """(settings, runs) of a file."""
    settings, runs = None, []
    for row in rows_of(path):
        if row.get("kind") == "settings":
            settings = row["settings"]
        elif row.get("kind") == "run":
            try:
                runs.append(Run(**{**row["run"], "tokens": tuple(row["run"]["tokens"])}))
            except (TypeError, KeyError):
                raise SystemExit(f"{path} holds a run of another version: {row['run']}") from None
    return settings, runs


def mend(path: Path) -> None:
    """Cut off a torn line at the end; and let the next one begin on a line of its own."""
    lines = _lines(path)
    if not lines:
        return
    with path.open("r+b") as file:  # never written anew: all that was measured is in it
        if _row(lines[-1]) is None:
            file.truncate(sum(map(len, lines[:-1])))
        elif not lines[-1].endswith(b"\n"):
            file.seek(0, 2)
            file.write(b"\n")


def append(path: Path, kind: str, what: Run | Mapping[str, Any]) -> None:
    """One line more, on the disk before this returns."""
    row = {"kind": kind, kind: asdict(what) if isinstance(what, Run) else dict(what)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What was set otherwise when the file was begun; empty for nothing."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in names)


# ------------------------------------------------------------------------------------------------------------- figures


def geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def by_prompt(runs: Iterable[Run], group: str, temperature: float, arm: str) -> dict[str, Run]:
    """The runs of an arm."""
    wanted = (group, temperature, arm)
    return {run.prompt: run for run in runs if (run.group, run.temperature, run.arm) == wanted}


def arms_of(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.arm for run in runs))


def pairs(runs: Sequence[Run], group: str, temperature: float, arm: str, other: str) -> list[tuple[Run, Run]]:
    """The runs of two arms, prompt by prompt, where both were run."""
    mine, theirs = (by_prompt(runs, group, temperature, each) for each in (arm, other))
    return [(mine[prompt], theirs[prompt]) for prompt in mine if prompt in theirs]


@dataclass(frozen=True, slots=True)
class Best:
    """The setting of llama.cpp's loop that took least time over a class, known in hindsight."""

    arm: str
    swept: str = ""  # a setting that was tried on some of the prompts only, and was faster on them
    factor: float = 1.0  # its time over that of `arm` there


def best_peer(runs: Sequence[Run], group: str, temperature: float) -> Best | None:
    """By total time for as many tokens; of the arms that ran on most prompts, then of those tried on a few."""
    found = {arm: by_prompt(runs, group, temperature, arm) for arm in arms_of(runs) if arm.startswith(PEER)}
    n_most = max(map(len, found.values()), default=0)
    if not n_most:
        return None
    whole = {arm: sum(1.0 / run.speed for run in each.values()) for arm, each in found.items() if len(each) == n_most}
    best = Best(min(whole, key=lambda arm: whole[arm]))
    for arm, each in found.items():
        both = [(run, found[best.arm][prompt]) for prompt, run in each.items() if prompt in found[best.arm]]
        if arm not in whole and both:
            factor = sum(1.0 / run.speed for run, _ in both) / sum(1.0 / other.speed for _, other in both)
            if factor < best.factor:
                best = Best(best.arm, arm, factor)
    return best


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the issue's table."""

    group: str
    other: str
    ratios: tuple[float, ...]  # by prompt
    steady: tuple[float, ...]
    ours: float  # tokens a second, the median
    theirs: float
    acceptance: float | None
    factor: float  # see `Best`
    wanted: float
    swept: str

    @property
    def mean(self) -> float:
        """The geometric mean, lowered where a setting that was only swept would have been faster."""
        return geometric(self.ratios) * self.factor

    @property
    def reached(self) -> bool:
        return self.mean >= self.wanted


def cell(runs: Sequence[Run], bar: Bar, group: str) -> Cell | None:
    """None where nothing was run for it yet."""
    best = best_peer(runs, group, bar.temperature) if bar.peer else Best(PLAIN)
    both = pairs(runs, group, bar.temperature, AUTO, best.arm) if best else []
    if best is None or not both:
        return None
    n_drafted = sum(mine.n_drafted for mine, _ in both)
    return Cell(
        group,
        best.arm,
        tuple(mine.speed / other.speed for mine, other in both),
        tuple(mine.steady / other.steady for mine, other in both),
        statistics.median(mine.speed for mine, _ in both),
        statistics.median(other.speed for _, other in both),
        sum(mine.n_accepted for mine, _ in both) / n_drafted if n_drafted else None,
        best.factor,
        bar.wanted[group],
        best.swept,
    )


# ------------------------------------------------------------------------------------------------------------- tables


def bar_tables(runs: Sequence[Run]) -> list[str]:
    """The issue's table, one for each of its lines."""
    lines = []
    for bar in BARS:
        lines += [f"\n**`auto` against {bar.title}**\n",
                  "| class | prompts | compared with | median (range) | geometric mean | steady | bar | reached "
                  "| ours t/s | theirs t/s | accepted / drafted |",
                  "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for group in GROUPS:
            found = cell(runs, bar, group)
            if found is None:
                lines.append(f"| {group} | 0 | | | | | {bar.wanted[group]:.2f} | | | | |")
                continue
            swept = f" ({found.swept}: {1 / found.factor:.2f} times as fast where tried)" if found.swept else ""
            rate = "nothing drafted" if found.acceptance is None else f"{found.acceptance:.2f}"
            lines.append(
                f"| {group} | {len(found.ratios)} | {found.other}{swept} | {spread(found.ratios)} "
                f"| **{found.mean:.2f}** | {geometric(found.steady) * found.factor:.2f} | {found.wanted:.2f} "
                f"| {'yes' if found.reached else 'no'} | {found.ours:.1f} | {found.theirs:.1f} | {rate} |"
            )
    return lines


def same_text(run: Run, plain: Run) -> bool:
    """Did both say the same? Theirs is looked for in all that was printed, without a character cut in half."""
    return run.tokens == plain.tokens if run.tokens else plain.text.rstrip("\ufffd") in run.text


def arm_table(runs: Sequence[Run]) -> list[str]:
    """Every arm by class and temperature, over our plain decoding of the same prompts."""
    lines = ["\n**Every arm**\n",
             "| temperature | class | arm | prompts | t/s, median | over our plain, median (range) "
             "| accepted / drafted | same text as our plain |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for temperature in sorted({run.temperature for run in runs}):
        for group in GROUPS:
            for arm in arms_of(runs):
                mine = by_prompt(runs, group, temperature, arm)
                if not mine:
                    continue
                both = pairs(runs, group, temperature, arm, PLAIN)
                n_drafted = sum(run.n_drafted for run in mine.values())
                rate = f"{sum(run.n_accepted for run in mine.values()) / n_drafted:.2f}" if n_drafted else ""
                over = spread([run.speed / plain.speed for run, plain in both]) if both and arm != PLAIN else ""
                n_same = sum(same_text(run, plain) for run, plain in both)
                same = f"{n_same} of {len(both)}" if both and arm != PLAIN and temperature == 0.0 else ""
                lines.append(
                    f"| {temperature:g} | {group} | {arm} | {len(mine)} "
                    f"| {statistics.median(run.speed for run in mine.values()):.1f} | {over} | {rate} | {same} |"
                )
    return lines
