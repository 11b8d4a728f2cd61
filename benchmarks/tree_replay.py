"""Recorded answers (`trees.py record`), drafted again by policies of trees and chains: what a machine would take.

A step walks down its tree as long as the next token of the answer is the child of the recorded rank. The policies are
the program's own; only models and drafters are left out. A pass costs what the machine's profile says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specllama.core.types import Draft, DraftPlan, Observation, Planner, Verdict
from specllama.core.verification import children_of
from specllama.drafters.controller import PROBE_TOKENS, CostProfile
from specllama.drafters.shape import Situation, TreePolicy

MAX_LEAVES = 16
LONGEST = 16  # nodes of a step


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer; lists by token. What is judged at a token depends on the round."""

    group: str
    temperature: float
    confidence: tuple[tuple[float, ...], ...]  # of the siblings in the order of their ranks
    right: tuple[int | None, ...]  # the rank that is accepted; None = no rank

    def __len__(self) -> int:
        return len(self.right)


def trace_of(row: dict[str, object], round_: int, siblings: str = "draws") -> Trace:
    """siblings: "draws" or "top"; at temperature 0 always "top"."""
    chance, top, draws = random.Random(round_), row["top"], row["draws"]
    assert isinstance(top, list)
    assert isinstance(draws, list)
    confidence, right = list[tuple[float, ...]](), list[int | None]()
    for i in range(len(top)):
        ranks = chance.choice(draws[i]) if draws and siblings == "draws" else top[i]
        confidence.append(tuple(each for each, _ in ranks))
        right.append(next((rank for rank, (_, accepted) in enumerate(ranks) if chance.random() < accepted), None))
    return Trace(str(row["group"]), float(str(row["temperature"])), tuple(confidence), tuple(right))


class AsChain:
    """A `Planner` as a policy of trees without branches."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self._depth, self._plan, self._said = planner, 0, DraftPlan(), -2

    def plan_tree(self, at: Situation) -> DraftPlan:
        self._plan, self._depth, self._said = self.planner.plan(at.limit, lag=at.lag, depth=at.depth), 0, -2
        return self._plan

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        looks = self._plan.n_drawn > 0 and (nodes[0] == -1 or self.planner.look(self._depth))
        return nodes if looks else ()

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        if self._said == parent or not self.planner.go_on(self._depth, confidence):
            return False
        self._said, self._depth = parent, self._depth + 1
        return True

    def observe(self, seen: Observation) -> None:
        self.planner.observe(Observation((), Draft(seen.draft.tokens), seen.verdict, ""))

    def learn(self, confidence: float, acceptance: float) -> None:
        self.planner.learn(confidence, acceptance)


@dataclass(slots=True)
class Spent:
    """What an answer took."""

    n_tokens: int = 0
    n_steps: int = 0
    n_nodes: int = 0
    n_branched: int = 0  # steps with a branch
    draft: float = 0.0  # in T(1)
    verify: float = 0.0

    @property
    def rate(self) -> float:
        return self.n_tokens / (self.draft + self.verify)

    @property
    def per_pass(self) -> float:
        return self.n_tokens / self.n_steps

    def add(self, other: Spent) -> None:
        for name in ("n_tokens", "n_steps", "n_nodes", "n_branched", "draft", "verify"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Grown:
    """A drafted tree. Lists by node."""

    parents: list[int]
    depths: list[int]
    evaluated: set[int]
    cost: float = 0.0


def grown(policy: TreePolicy, trace: Trace, at: int, limit: int, unread: int, costs: CostProfile) -> Grown:
    """The tree that the policy lets grow at token `at`."""
    tree, level = Grown([], [], set()), [-1]
    while level and len(tree.parents) < limit and (chosen := policy.expand(level)):
        tree.cost += costs.draft_cost(len(chosen) + (unread if level == [-1] else 0))
        tree.evaluated.update(chosen)
        level = []
        for parent in chosen:
            depth = tree.depths[parent] + 1 if parent >= 0 else 0
            for confidence in trace.confidence[at + depth]:
                if len(tree.parents) == limit or not policy.go_on_tree(parent, confidence):
                    break
                level.append(len(tree.parents))
                tree.parents.append(parent)
                tree.depths.append(depth)
    return tree


def walk(draft: Draft, right: Sequence[int | None]) -> Iterator[int]:
    """The accepted nodes; right: the accepted rank at every depth."""
    node, depth = -1, 0
    while siblings := children_of(draft, node):
        rank = right[depth]
        if rank is None or rank >= len(siblings):
            return
        node, depth = siblings[rank], depth + 1
        yield node


def play(policy: TreePolicy, trace: Trace, costs: CostProfile) -> Spent:
    """The answer, drafted by a fresh policy. The draft has read the prompt."""
    spent, at, unread, held = Spent(len(trace)), 0, 0, 0  # unread: by the draft; held: rows computed again
    while at < len(trace):
        limit = min(LONGEST, len(trace) - at - 1)
        plan = policy.plan_tree(Situation(limit, MAX_LEAVES, lag=unread, depth=at))
        if plan.probe:
            learn = getattr(policy, "learn")  # noqa: B009  # only planners probe
            for i in range(max(0, at - PROBE_TOKENS), at):
                learn(trace.confidence[i][0], float(trace.right[i] == 0))
            spent.draft += costs.draft_cost(min(unread + 1, PROBE_TOKENS))
            unread = 0 if unread < PROBE_TOKENS else unread
            plan = policy.plan_tree(Situation(limit, MAX_LEAVES, lag=unread, depth=at))
        tree = grown(policy, trace, at, limit, unread, costs) if plan.n_drawn else Grown([], [], set())
        n = len(tree.parents)
        draft = Draft(tuple(range(n)), None, tuple(tree.parents))
        path = tuple(walk(draft, trace.right[at:]))
        policy.observe(Observation((), draft, Verdict(path, 0), "replay"))
        spent.draft += tree.cost
        spent.verify += costs.verify_cost(n + 1 + held)
        spent.n_steps += 1
        spent.n_nodes += n
        spent.n_branched += len(set(tree.parents)) < n
        in_order = 0  # accepted nodes whose cells stay
        while in_order < len(path) and children_of(draft, (-1, *path)[in_order])[0] == path[in_order]:
            in_order += 1
        held = len(path) - in_order
        if tree.evaluated:
            unread = held if held or not path else int(path[-1] not in tree.evaluated)
        else:
            unread += len(path) + 1
        at += len(path) + 1
    return spent


def total(parts: Sequence[Spent]) -> Spent:
    whole = Spent()
    for each in parts:
        whole.add(each)
    return whole
