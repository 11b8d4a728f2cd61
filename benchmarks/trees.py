"""Trees against chains: recorded acceptance by rank, replayed with the costs of several machines, and real answers.

    python benchmarks/trees.py record FILE.jsonl --answers ANSWERS.jsonl [--minutes 4]    # repeat it to continue
    python benchmarks/trees.py report FILE.jsonl

`record` takes the answers of a recording by `replay.py`. At every token the draft's law is compared with the target's:
which sibling would be accepted. Siblings are the likeliest tokens at temperature 0, else drawn without replacement,
several times. The answers at temperature 1 are also judged at temperature 0.7.

`report` replays the answers. A step walks down the drafted tree as long as the next token of the answer is the child of
the recorded rank. Off the answer's path the draft's laws are not known; there a node has the confidences of its depth.
Lookups do not draft here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeAlias

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars_arms import SOURCES, published_draft
from replay import AMX_READS, ELSEWHERE, FLAT, FLAT_READS, OURS_READS, ZEN4_READS, as_answer, read
from replay import _costs as costs_of
from replaying import Machine
from rows import append, mend, rows_of
from tree_replay import LONGEST, MAX_LEAVES, AsChain, Spent, Trace, play, total, trace_of

from specllama import llama
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, law
from specllama.drafters.controller import PROBE_TOKENS, Controller, CostProfile, Points
from specllama.drafters.shape import FixedShape, Grounds, Shape, TreePolicy, best_shapes
from specllama.drafters.shape import by_rank as ranked
from specllama.drafters.tree_controller import MOST_WIDE, TreeController
from specllama.tuning import traces
from specllama.tuning.traces import TracedAnswer

TEMPERATURES = (0.0, 0.7, 1.0)
N_RANKS = 4
N_ROUNDS = 3  # draws of what is accepted, above temperature 0
N_DRAWS = 4  # of the siblings at every token, above temperature 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def likeliest(row: FloatArray, p: Distribution) -> list[tuple[float, float]]:
    """(confidence, chance of acceptance given that those before are rejected) of the most likely tokens.  row: (V,)"""
    shares = np.exp(row.astype(np.float64) - row.max())
    shares /= shares.sum()
    found, mass, left = list[tuple[float, float]](), 1.0, 1.0
    for token in np.argsort(-shares, kind="stable")[:N_RANKS].tolist():
        share, chance = float(shares[token]), p.prob(token)
        found.append((share / mass, min(chance / left, 1.0) if left > 1e-9 else 0.0))
        mass, left = max(mass - share, 1e-12), left - chance
    return found


def drawn(q: Distribution, p: Distribution, choose: RandomChooser) -> list[tuple[float, float]]:
    """The same for tokens drawn without replacement."""
    found = list[tuple[float, float]]()
    for _ in range(min(N_RANKS, len(q.support()))):
        token = choose.pick(q)
        found.append((q.peak(), min(1.0, p.prob(token) / q.prob(token))))
        p, q = p.residual(q), q.without(token)
    return found


def rounded(ranks: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[round(each, 4) for each in pair] for pair in ranks]


def tempered(p: Distribution, temperature: float) -> Distribution:
    """The law at another temperature, of a law at temperature 1: filters come before the temperature."""
    ids, probs = p.items()
    powers = probs ** (1.0 / temperature)
    return Distribution.on(ids, powers / powers.sum())


def judged(rows: Sequence[FloatArray], said: TracedAnswer) -> dict[str, list[Any]]:
    """At every token, "top": the likeliest siblings; "draws": several draws of siblings, none at temperature 0."""
    choose, history = RandomChooser(0), [*said.prompt, *said.tokens]
    top, draws = list[Any](), list[Any]()
    for i, row in enumerate(rows[: len(said.tokens)]):
        top.append(rounded(likeliest(row, said.laws[i])))
        if not said.params.greedy:
            q = law(row, history[: len(said.prompt) + i], said.params)
            draws.append([rounded(drawn(q, said.laws[i], choose)) for _ in range(N_DRAWS)])
    return {"top": top, "draws": draws}


def record(args: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * args.minutes
    llama.set_log(None)
    setup = published_draft()
    assert setup.draft is not None
    mend(args.file)
    known = {(row["judged"]["prompt"], row["judged"]["temperature"]) for row in rows_of(args.file)}
    with llama.load(
        args.draft or setup.draft.path, replace(setup.draft_options(4096), max_block=PROBE_TOKENS)
    ) as draft:
        for row in read(args.answers).answers.values():
            said = as_answer(row, draft.vocab_size)
            kinds = [said]
            if row["temperature"] == 1.0:
                laws = tuple(tempered(p, 0.7) for p in said.laws)
                kinds.append(replace(said, laws=laws, params=replace(said.params, temperature=0.7)))
            kinds = [each for each in kinds if (row["prompt"], each.params.temperature) not in known]
            if not kinds or not said.tokens:
                continue
            if time.monotonic() > until:
                say("time ran out: the same command continues")
                return
            rows = traces.rows(draft, said.prompt, said.tokens, draft.vocab_size)
            for each in kinds:
                append(args.file, "judged", {"group": row["group"], "prompt": row["prompt"],
                                             "temperature": each.params.temperature, **judged(rows, each)})  # fmt: skip
            say(f"{row['prompt']} at {row['temperature']:g}")


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


def shapes_for(chances: Sequence[float], costs: CostProfile, depth: int = 0) -> list[Shape]:
    rows = tuple(costs.verify_cost(n, depth) for n in range(1, min(costs.verify[-1][0], LONGEST + 1) + 1))
    levels = (0.0, *(costs.draft_cost(n) for n in range(1, MOST_WIDE + 1)))
    return best_shapes(Grounds(ranked(chances), rows, levels, MAX_LEAVES))


FREE = CostProfile(verify=((1, 1.0), (LONGEST + 1, 1.0)), draft=((1, 0.0), (2, 0.0)))


def budget_table(by_case: Cases) -> Iterator[str]:
    yield ("\n**Tokens a pass of the target**: chain, tree of as many nodes (the shape of most expected tokens by the "
           "mean acceptance at this temperature), tree / chain")  # fmt: skip
    yield "| temperature | class | " + " | ".join(f"{n} nodes" for n in BUDGETS) + " |"
    yield "|---|---|" + "---|" * len(BUDGETS)
    for temperature in TEMPERATURES:
        every = [each for (at, _), kept in by_case.items() if at == temperature for each in kept]
        if not every:
            continue
        shapes = shapes_for(mean_chances(every), FREE)
        for (at, group), kept in by_case.items():
            if at != temperature:
                continue
            cells = []
            for n in BUDGETS:
                a, b = (total([play(FixedShape(parents), each, FREE) for each in kept]).per_pass
                        for parents in (chain(n), shapes[n].parents))  # fmt: skip
                cells.append(f"{a:.2f}, {b:.2f}, {b / a:.2f}")
            yield f"| {at:g} | {group} | " + " | ".join(cells) + " |"


def spent(make: Callable[[], TreePolicy], kept: Sequence[Trace], costs: CostProfile) -> Spent:
    """All answers, each with a fresh policy."""
    return total([play(make(), each, costs) for each in kept])


def best_fixed(shapes: Sequence[Sequence[int]], kept: Sequence[Trace], costs: CostProfile) -> str:
    """Nodes and rate of the best of some fixed shapes in hindsight."""
    rates = {len(parents): spent(partial(FixedShape, parents), kept, costs).rate for parents in shapes}
    best = max(rates, key=lambda n: rates[n])
    return f"{best}: {rates[best]:.2f}"


def wall_table(by_case: Cases, here: Machine) -> Iterator[str]:
    yield f"\n**{here.name}**: tokens per T(1); plain decoding is 1"
    yield "| temperature | class | best K | best tree | chain, auto | tree, auto | tree / chain | nodes | branched |"
    yield "|---|---|---|---|---|---|---|---|---|"
    costs = here.costs
    for temperature in TEMPERATURES:
        cases = {group: kept for (at, group), kept in by_case.items() if at == temperature}
        if not cases:
            continue
        shapes = shapes_for(mean_chances([each for kept in cases.values() for each in kept]), costs)
        trees = [shapes[n].parents for n in (2, 3, 4, 5, 6, 8, 10, 12, 16) if n < len(shapes)]
        ratios = []
        for group, kept in cases.items():
            auto = spent(lambda: AsChain(Controller(costs)), kept, costs)
            tree = spent(lambda: TreeController(costs), kept, costs)
            ratios.append(tree.rate / auto.rate)
            yield (
                f"| {temperature:g} | {group} | {best_fixed([chain(n) for n in range(1, 9)], kept, costs)} "
                f"| {best_fixed(trees, kept, costs)} | {auto.rate:.2f} | {tree.rate:.2f} | {ratios[-1]:.3f} "
                f"| {tree.n_nodes / tree.n_steps:.1f} | {tree.n_branched / tree.n_steps:.2f} |"
            )
        yield f"| {temperature:g} | all | | | | | **{geometric_mean(ratios):.3f}** | | |"


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
    for line in budget_table(by_case):
        print(line, flush=True)
    for line in shape_table(by_case):
        print(line, flush=True)
    for here in MACHINES:
        if args.only in here.name:
            for line in wall_table(by_case, here):
                print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--answers", type=Path, help="recorded by replay.py")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no answer after this time")
    parser.add_argument("--draft", type=Path, help="another draft than the pair's")
    parser.add_argument("--siblings", choices=("draws", "top"), default="draws", help="above temperature 0")
    parser.add_argument("--only", default="", help="report only machines whose name contains this")
    args = parser.parse_args()
    (record if args.action == "record" else report)(args)


if __name__ == "__main__":
    main()
