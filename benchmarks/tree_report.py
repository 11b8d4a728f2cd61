"""The tables of `trees.py`: what its recordings and its runs say."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any, TypeAlias

from bars_arms import SOURCES
from replay import AMX_READS, ELSEWHERE, FLAT, FLAT_READS, OURS_READS, ZEN4_READS
from replay import _costs as costs_of
from replaying import Machine
from rows import rows_of
from tree_replay import LONGEST, MAX_LEAVES, AsChain, Spent, Trace, play, total, trace_of

from specllama.drafters.controller import Controller, CostProfile, Points
from specllama.drafters.shape import FixedShape, Grounds, Shape, TreePolicy, best_shapes, by_rank
from specllama.drafters.tree_controller import MOST_WIDE, TreeController

TEMPERATURES = (0.0, 0.7, 1.0)
N_RANKS = 4
N_ROUNDS = 3  # draws of what is accepted, above temperature 0
ARMS = ("plain", "chain", "tree", "tree of 16")

AVX2: Points = ((1, 1.0), (2, 1.07), (3, 1.28), (4, 1.49), (6, 2.28), (8, 2.77), (12, 4.55), (16, 4.82))
ZEN3: Points = ((1, 1.0), (4, 2.86), (8, 7.09))
OURS_7B: Points = ((1, 1.0), (2, 1.10), (4, 1.31), (8, 1.62), (16, 2.80))
OURS_14B: Points = ((1, 1.0), (2, 1.12), (4, 1.27), (8, 1.61), (16, 2.66))
AMX_7B: Points = ((1, 1.0), (2, 1.67), (4, 1.84), (8, 2.14), (16, 2.70))
MACHINES = (
    *ELSEWHERE,
    Machine("specllama's kernels, AVX2, published draft (c = 0.39)", costs_of(AVX2, OURS_READS, 0.39)),
    Machine("Zen 3, draft in Q4_0 (c = 0.32)", costs_of(ZEN3, ZEN4_READS, 0.32)),
    Machine("specllama's kernels, 7B, draft in Q4_0 (c = 0.07)", costs_of(OURS_7B, OURS_READS, 0.07)),
    Machine("specllama's kernels, 14B, published draft (c = 0.04)", costs_of(OURS_14B, OURS_READS, 0.04)),
    Machine("AMX, 7B, draft in Q4_0 (c = 0.05)", costs_of(AMX_7B, AMX_READS, 0.05)),
    Machine("flat T as on a GPU (c = 0.1)", costs_of(FLAT, FLAT_READS, 0.1)),
)
BUDGETS = (4, 8, 16)
Run: TypeAlias = tuple[str, int]  # prompt and round
Cases: TypeAlias = Mapping[tuple[float, str], Sequence[Trace]]


def chain(n: int) -> list[int]:
    """The parents of a chain."""
    return list(range(-1, n - 1))


def mean_chances(kept: Sequence[Trace]) -> tuple[float, ...]:
    """Acceptance of each rank, given that those before it are rejected, over all tokens."""
    found = []
    for rank in range(N_RANKS):
        judged = [
            right == rank
            for each in kept
            for right, siblings in zip(each.right, each.confidence, strict=True)
            if rank < len(siblings) and (right is None or right >= rank)
        ]
        found.append(sum(judged) / max(len(judged), 1))
    return tuple(found)


def shapes_for(chances: Sequence[float], costs: CostProfile) -> list[Shape]:
    rows = tuple(costs.verify_cost(n) for n in range(1, min(costs.verify[-1][0], LONGEST + 1) + 1))
    levels = (0.0, *(costs.draft_cost(n) for n in range(1, MOST_WIDE + 1)))
    return best_shapes(Grounds(by_rank(chances), rows, levels, MAX_LEAVES))


FREE = CostProfile(verify=((1, 1.0), (LONGEST + 1, 1.0)), draft=((1, 0.0), (2, 0.0)))


def budget_table(by_case: Cases) -> Iterator[str]:
    yield (
        "\n**Tokens a pass of the target**: chain, tree of as many nodes (the shape for the acceptance of the class), "
        "tree / chain"
    )
    yield "| temperature | class | " + " | ".join(f"{n} nodes" for n in BUDGETS) + " |"
    yield "|---|---|" + "---|" * len(BUDGETS)
    for (temperature, group), kept in by_case.items():
        shapes, cells = shapes_for(mean_chances(kept), FREE), []
        for n in BUDGETS:
            line, tree = (
                spent(partial(FixedShape, each), kept, FREE).per_pass for each in (chain(n), shapes[n].parents)
            )
            cells.append(f"{line:.2f}, {tree:.2f}, {tree / line:.2f}")
        yield f"| {temperature:g} | {group} | " + " | ".join(cells) + " |"


def spent(make: Callable[[], TreePolicy], kept: Sequence[Trace], costs: CostProfile) -> Spent:
    """All answers, each with a fresh policy."""
    return total([play(make(), each, costs) for each in kept])


def best_fixed(shapes: Sequence[Sequence[int]], kept: Sequence[Trace], costs: CostProfile) -> str:
    """Nodes and rate of the best of some fixed shapes in hindsight."""
    rates = {len(parents): spent(partial(FixedShape, parents), kept, costs).rate for parents in shapes}
    best = max(rates, key=lambda n: rates[n])
    return f"{best}: {rates[best]:.2f}"


def automatic(kept: Sequence[Trace], costs: CostProfile) -> tuple[Spent, Spent]:
    """With the controller of chains, and with that of trees."""
    return spent(lambda: AsChain(Controller(costs)), kept, costs), spent(lambda: TreeController(costs), kept, costs)


def gain_table(by_case: Cases) -> Iterator[str]:
    yield (
        "\n**`auto` with trees over `auto` with chains**: geometric mean of the classes (range); nodes a step; share "
        "of steps with a branch"
    )
    yield "| costs of | chain, over plain | " + " | ".join(f"temperature {each:g}" for each in TEMPERATURES) + " |"
    yield "|---|---|" + "---|" * len(TEMPERATURES)
    for here in MACHINES:
        cells, rates = [], list[float]()
        for temperature in TEMPERATURES:
            both = [automatic(kept, here.costs) for (at, _), kept in by_case.items() if at == temperature]
            ratios, trees = [tree.rate / line.rate for line, tree in both], total([tree for _, tree in both])
            rates += [line.rate for line, _ in both]
            cells.append(f"{geometric_mean(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f}); "
                         f"{trees.n_nodes / trees.n_steps:.1f}; {trees.n_branched / trees.n_steps:.2f}")  # fmt: skip
        yield f"| {here.name} | {geometric_mean(rates):.2f} | " + " | ".join(cells) + " |"


def wall_table(by_case: Cases, here: Machine) -> Iterator[str]:
    yield f"\n**{here.name}**: tokens per T(1); plain decoding is 1"
    yield "| temperature | class | best K | best tree | chain, auto | tree, auto | tree / chain | nodes | branched |"
    yield "|---|---|---|---|---|---|---|---|---|"
    costs = here.costs
    for (temperature, group), kept in by_case.items():
        shapes = shapes_for(mean_chances(kept), costs)
        trees = [shape.parents for shape in shapes[2:] if shape.rate]
        line, tree = automatic(kept, costs)
        yield (
            f"| {temperature:g} | {group} | {best_fixed([chain(n) for n in range(1, 9)], kept, costs)} "
            f"| {best_fixed(trees, kept, costs)} | {line.rate:.2f} | {tree.rate:.2f} | {tree.rate / line.rate:.3f} "
            f"| {tree.n_nodes / tree.n_steps:.1f} | {tree.n_branched / tree.n_steps:.2f} |"
        )


def drawn_shape(parents: Sequence[int]) -> str:
    """Nodes of each level, e.g. 3-2-1, and the leaves."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return "-".join(str(depths.count(depth)) for depth in range(max(depths, default=-1) + 1)) or "none"


def shape_table(by_case: Cases) -> Iterator[str]:
    yield "\n**The chosen shape**: nodes of each level (rate), and the best chain's length (rate)"
    chances = {temperature: mean_chances([each for (at, _), kept in by_case.items() if at == temperature
                                          for each in kept]) for temperature in TEMPERATURES}  # fmt: skip
    for temperature, each in chances.items():
        yield f"acceptance by rank at {temperature:g}: " + ", ".join(f"{chance:.2f}" for chance in each)
    yield "| costs of | " + " | ".join(f"temperature {each:g}" for each in chances) + " |"
    yield "|---|" + "---|" * len(chances)
    for here in MACHINES:
        cells = []
        for each in chances.values():
            best = max(shapes_for(each, here.costs), key=lambda shape: shape.rate)
            line = max(shapes_for(each[:1], here.costs), key=lambda shape: shape.rate)
            cells.append(f"{drawn_shape(best.parents)} ({best.rate:.2f}); {len(line.parents)} ({line.rate:.2f})")
        yield f"| {here.name} | " + " | ".join(cells) + " |"


def report(args: argparse.Namespace) -> None:
    rows = [row["judged"] for row in rows_of(args.file)]
    by_case: dict[tuple[float, str], list[Trace]] = {}
    for temperature in TEMPERATURES:
        for group in SOURCES:
            rounds = range(1 if temperature == 0.0 else N_ROUNDS)
            kept = [
                trace_of(row, round_, args.siblings)
                for row in rows
                if (row["temperature"], row["group"]) == (temperature, group)
                for round_ in rounds
            ]
            if kept:
                by_case[temperature, group] = kept
    tables = [budget_table(by_case), shape_table(by_case), gain_table(by_case)]
    if args.only:
        tables = [wall_table(by_case, here) for here in MACHINES if args.only in here.name]
    for line in itertools.chain.from_iterable(tables):
        print(line, flush=True)


def shown(mine: Mapping[Run, Mapping[str, Any]], others: Sequence[Mapping[Run, Mapping[str, Any]]]) -> list[str]:
    """The figures of some runs of one arm; others: the same answers in the arms to compare with, plain first."""

    def sum_of(name: str) -> float:
        return sum(float(row[name]) for row in mine.values())

    ratios = [[speed(row) / speed(other[key]) for key, row in mine.items() if key in other] for other in others]
    plain, greedy = others[0], [key for key in mine if key in others[0] and mine[key]["temperature"] == 0.0]
    same = sum(mine[key]["tokens"] == plain[key]["tokens"] for key in greedy)
    return [
        str(len(mine)),
        *(f"{geometric_mean(each):.2f} ({min(each):.2f}-{max(each):.2f})" if each else "" for each in ratios),
        f"{sum_of('n_tokens') / sum_of('decode_s'):.1f}",
        f"{sum_of('n_tokens') / sum_of('cost'):.2f}",
        f"{sum_of('n_nodes') / sum_of('n_steps'):.1f}",
        f"{sum_of('n_branched') / sum_of('n_steps'):.2f}",
        f"{sum_of('loop_s') / sum_of('step_s'):.1%}",
        f"{same} of {len(greedy)}" if greedy else "",
    ]


def show(args: argparse.Namespace) -> None:
    """The table of `run`."""
    by_arm: dict[tuple[str, float], dict[Run, dict[str, Any]]] = {}
    for row in rows_of(args.file):
        found = row["run"]
        by_arm.setdefault((found["arm"], found["temperature"]), {})[found["prompt"], found["round"]] = found
    columns = ("temperature", "class", "arm", "answers", "over plain (range)", "over the chain (range)", "t/s",
               "tokens per T(1), by costs", "nodes a step", "branched", "outside the models", "same text")  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for (arm, temperature), kept in sorted(by_arm.items(), key=lambda each: (each[0][1], ARMS.index(each[0][0]))):
        others = [by_arm.get((name, temperature), {}) for name in ("plain", "chain")]
        for group in (*SOURCES, "all"):
            if mine := {key: row for key, row in kept.items() if group in ("all", row["group"])}:
                print(f"| {temperature:g} | {group} | {arm} | " + " | ".join(shown(mine, others)) + " |")


def speed(row: Mapping[str, Any]) -> float:
    return float(row["n_tokens"]) / float(row["decode_s"])
