"""The tables of `bars.py`: paired ratios, and the best setting of llama.cpp's loop in hindsight."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN, AUTO = "ours plain", "ours auto"
PEER = "llama.cpp"  # the first word of their arms
PEER_PLAIN = f"{PEER} plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer of one arm."""

    group: str  # the class of the prompt
    prompt: str
    temperature: float
    arm: str
    n_tokens: int  # decoded within `decode_s`
    decode_s: float  # after the first token; ours includes the draft's reading of the prompt
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


@dataclass(frozen=True, slots=True)
class Bar:
    """A comparison of `auto`, and the ratio to reach."""

    title: str
    temperature: float
    peer: bool  # against the best fixed setting of llama.cpp's loop; else against our plain decoding
    wanted: Mapping[str, float]  # by class


BARS = (
    Bar("our plain decoding, temperature 0", 0.0, False,
        {"code": 1.5, "summary/RAG": 1.7, "questions": 1.1, "story": 1.1}),
    Bar("best fixed setting of llama.cpp's loop, temperature 0", 0.0, True,
        {"code": 1.5, "summary/RAG": 1.7, "questions": 1.1, "story": 1.1}),
    Bar("best fixed setting of llama.cpp's loop, temperature 1.0", 1.0, True,
        {"code": 1.3, "summary/RAG": 1.3, "questions": 1.15, "story": 1.15}),
)  # fmt: skip
GROUPS = tuple(BARS[0].wanted)


def read(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any] | None, list[Run]]:
    """(settings, runs) of the rows of a file. Raises SystemExit."""
    settings, runs = None, []
    for row in rows:
        if row["kind"] == "settings":
            settings = row["settings"]
        elif row["kind"] == "run":
            try:
                runs.append(Run(**{**row["run"], "tokens": tuple(row["run"]["tokens"])}))
            except (TypeError, KeyError):
                raise SystemExit(f"this run is of another version: {row['run']}") from None
    return settings, runs


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def by_prompt(runs: Iterable[Run], group: str, temperature: float, arm: str) -> dict[str, Run]:
    """The runs of an arm by prompt."""
    wanted = (group, temperature, arm)
    return {run.prompt: run for run in runs if (run.group, run.temperature, run.arm) == wanted}


def arms_of(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.arm for run in runs))


def pairs(runs: Sequence[Run], group: str, temperature: float, arm: str, other: str) -> list[tuple[Run, Run]]:
    """The runs of two arms, for the prompts that both answered."""
    mine, theirs = (by_prompt(runs, group, temperature, each) for each in (arm, other))
    return [(mine[prompt], theirs[prompt]) for prompt in mine if prompt in theirs]


def best_peer(runs: Sequence[Run], group: str, temperature: float) -> str | None:
    """Their arm with the least time per token, among those that answered most prompts."""
    found = {arm: by_prompt(runs, group, temperature, arm) for arm in arms_of(runs) if arm.startswith(PEER)}
    n_most = max(map(len, found.values()), default=0)
    whole = {arm: sum(1.0 / run.speed for run in each.values()) for arm, each in found.items() if len(each) == n_most}
    return min(whole, key=lambda arm: whole[arm]) if n_most else None


@dataclass(frozen=True, slots=True)
class Cell:
    """A class in a table."""

    group: str
    other: str
    ratios: tuple[float, ...]  # by prompt
    ours: float  # tokens a second, the median
    theirs: float
    acceptance: float | None
    wanted: float

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)

    @property
    def reached(self) -> bool:
        return self.mean >= self.wanted


def cell(runs: Sequence[Run], bar: Bar, group: str) -> Cell | None:
    """None without runs."""
    other = best_peer(runs, group, bar.temperature) if bar.peer else PLAIN
    both = pairs(runs, group, bar.temperature, AUTO, other) if other else []
    if other is None or not both:
        return None
    n_drafted = sum(mine.n_drafted for mine, _ in both)
    return Cell(
        group,
        other,
        tuple(mine.speed / each.speed for mine, each in both),
        statistics.median(mine.speed for mine, _ in both),
        statistics.median(each.speed for _, each in both),
        sum(mine.n_accepted for mine, _ in both) / n_drafted if n_drafted else None,
        bar.wanted[group],
    )


def bar_tables(runs: Sequence[Run]) -> list[str]:
    """A table for each bar; without runs of llama.cpp only for our plain decoding."""
    lines = []
    peers = any(run.arm.startswith(PEER) for run in runs)
    for bar in (each for each in BARS if peers or not each.peer):
        lines += [f"\n**`auto` against {bar.title}**\n",
                  "| class | prompts | compared with | median (range) | geometric mean | bar | reached "
                  "| ours t/s | theirs t/s | accepted / drafted |",
                  "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for group in GROUPS:
            found = cell(runs, bar, group)
            if found is None:
                lines.append(f"| {group} | 0 | | | | {bar.wanted[group]:.2f} | | | | |")
                continue
            rate = "nothing drafted" if found.acceptance is None else f"{found.acceptance:.2f}"
            lines.append(
                f"| {group} | {len(found.ratios)} | {found.other} | {spread(found.ratios)} | **{found.mean:.2f}** "
                f"| {found.wanted:.2f} | {'yes' if found.reached else 'no'} | {found.ours:.1f} | {found.theirs:.1f} "
                f"| {rate} |"
            )
    return lines


def same_text(run: Run, plain: Run) -> bool:
    """True if both texts are equal. Theirs is searched in all output, without a trailing partial character."""
    return run.tokens == plain.tokens if run.tokens else plain.text.rstrip("\ufffd") in run.text


def changed_texts(runs: Sequence[Run]) -> list[str]:
    """The prompts for which `auto` and our plain decoding gave different texts at temperature 0."""
    both = [pair for group in GROUPS for pair in pairs(runs, group, 0.0, AUTO, PLAIN)]
    return [mine.prompt for mine, plain in both if not same_text(mine, plain)]


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
