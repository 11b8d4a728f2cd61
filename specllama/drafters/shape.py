"""Which tree to draft: the protocol of such a policy, the search for the best tree, and a policy of one fixed tree.

Source of the search's aim, and of acceptance by rank: Sequoia, Chen et al., arXiv 2402.12374, section 3.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specllama.core.types import DraftPlan, Observation

OFFER_TAKEN_FROM = 0.7  # a fixed shape takes offered nodes of at least this chance: that of a fair draft model
# Acceptance of the children of a node in the order of their ranks, given that those before are rejected.
TYPICAL = (0.8, 0.36, 0.24, 0.14)
FALLEN = 0.75  # the search adds no nodes to a tree whose rate has fallen to this part of its highest


@dataclass(frozen=True, slots=True)
class Situation:
    """What a tree is planned by; `lag` and `depth` as in `Planner.plan`.

    offer: (chance given that the parent is accepted and no earlier sibling is, parent) of looked-up nodes; parents
    before children, the likeliest first.
    """

    limit: int  # most nodes
    max_leaves: int
    offer: Sequence[tuple[float, int]] = ()
    lag: int | None = None
    depth: int = 0


class TreePolicy(Protocol):
    """Decides, node by node, which tree is drafted; every decision comes before the draw.

    Nodes are numbered in the order in which they join the tree: first those taken from the offer, then those drawn.
    -1 is the pending token.
    """

    def plan_tree(self, at: Situation) -> DraftPlan:
        """As `Planner.plan`. `n_given`: nodes of the offer to take; `n_drawn`: most drawn after them."""

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        """Those of `nodes` that the draft model evaluates next, in one batch, likeliest first; () ends the tree.

        nodes: drawn in the last level, without end tokens; at first (-1,).
        """

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        """May one more child of `parent`, an expanded node, be drawn? True = it is drawn, and is the next node.

        `confidence`: the largest mass of the law it would be drawn from: without the children that are there,
        renormalised; for a greedy draft, of that law at temperature 1.
        """

    def observe(self, seen: Observation) -> None:
        """Learn from a verification. Siblings in `seen.draft` stand in the order in which they joined the tree."""

    def learn(self, confidence: float, acceptance: float) -> None:
        """As `Planner.learn`: from a probe, or from a first child that was looked at but not drawn."""


@dataclass(slots=True)
class GrownTree:
    """The tree of the step in progress. `children[node + 1]`: of a node, in the order in which they joined."""

    limit: int
    max_leaves: int
    parents: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=lambda: [[]])
    n_leaves: int = 1

    def has_room(self, parent: int) -> bool:
        """True if one more child of `parent` is within the limits."""
        branches = bool(self.children[parent + 1])
        return len(self.parents) < self.limit and (not branches or self.n_leaves < self.max_leaves)

    def add(self, parent: int) -> int:
        """A new child of `parent`."""
        node = len(self.parents)
        self.n_leaves += bool(self.children[parent + 1])
        self.parents.append(parent)
        self.children[parent + 1].append(node)
        self.children.append([])
        return node


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree and what it is expected to do."""

    parents: tuple[int, ...] = ()  # parents before children; children of a node in the order of their rank
    n_expected: float = 1.0  # tokens of a step, the one after the draft included
    draft: float = 0.0  # cost of drafting and of computing nodes again, in T(1)
    rate: float = 1.0  # tokens per T(1)

    @property
    def n_levels(self) -> int:
        levels = [0]  # [node + 1]
        for parent in self.parents:
            levels.append(levels[parent + 1] + 1)
        return max(levels)


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a shape is chosen by."""

    by_rank: tuple[float, ...]  # chance that the child of a rank is the accepted one, if its parent is accepted
    verify: tuple[float, ...]  # [n]: the target's pass with n nodes, in T(1)
    levels: tuple[float, ...]  # [n]: the draft's pass over n nodes; [0] = 0
    max_leaves: int


def by_rank(chances: Sequence[float]) -> tuple[float, ...]:
    """The chance that the child of each rank is the accepted one; chances: if those before it are rejected."""
    left, found = 1.0, list[float]()
    for chance in chances:
        found.append(left * chance)
        left *= 1.0 - chance
    return tuple(found)


def _grow(on: Grounds, depth: int, width: int, best: list[Shape]) -> tuple[bool, bool]:
    """Add the likeliest nodes one by one, and improve `best`, the best shapes by their number of nodes.

    Returns whether more depth, and more width, would give another tree.
    """
    row = on.levels[2] - on.levels[1]  # a node that the draft reads again costs it a row, and the target another
    parents, at, reach = list[int](), list[int](), list[float]()  # of each node: its parent, depth and reach
    expanded, n_leaves, n_expected, drafting, again, off_first = [0] * depth, 1, 1.0, 0.0, 0.0, 0.0
    on_first, highest, deeper, wider = {-1}, 0.0, False, False
    waiting = [(-on.by_rank[0], -1, 0)]  # (-reach, parent, rank)
    while waiting and len(parents) + 1 < len(on.verify):
        less, parent, rank = heapq.heappop(waiting)
        level = at[parent] + 1 if parent >= 0 else 0
        if rank == 0:
            if level == depth or expanded[level] == width:
                deeper, wider = deeper or level == depth, wider or level < depth
                continue
            drafting += on.levels[expanded[level] + 1] - on.levels[expanded[level]]
            expanded[level] += 1
            again -= reach[parent] * row if parent in on_first and parent >= 0 else 0.0
        elif n_leaves == on.max_leaves:
            continue
        else:
            n_leaves += 1
        node, chance = len(parents), -less
        parents.append(parent)
        at.append(level)
        reach.append(chance)
        n_expected += chance
        n = len(parents)
        again += chance * row
        if rank == 0 and parent in on_first:
            on_first.add(node)
        else:
            off_first += chance
        draft = drafting + again + off_first * max(on.verify[n] - on.verify[1], 0.0) / n
        rate = n_expected / (draft + on.verify[n])
        if rate > best[n].rate:
            best[n] = Shape(tuple(parents), n_expected, draft, rate)
        highest = max(highest, rate)
        if rate < FALLEN * highest:
            break
        heapq.heappush(waiting, (less * on.by_rank[0], node, 0))
        if rank + 1 < len(on.by_rank):
            whole = chance / on.by_rank[rank] if on.by_rank[rank] else 0.0
            heapq.heappush(waiting, (-whole * on.by_rank[rank + 1], parent, rank + 1))
    return deeper, wider


def best_shapes(on: Grounds) -> list[Shape]:
    """The shape of the highest rate for every number of nodes, 0 included; of rate 0 where more nodes are hopeless.

    A node's reach does not depend on the rest of the tree. So the best tree of n nodes, of a given depth and of a given
    most number of nodes that the draft evaluates in a level, consists of the n likeliest nodes; only depths and widths
    are searched. A node that the next step computes again costs a row: the draft's if it never evaluated it, both
    models' if it is off the path of first children (its cells cannot stay, see `LanguageModel.keep`).
    """
    best = [Shape()] + [Shape(rate=0.0)] * (len(on.verify) - 1)
    depth, deeper = 1, True
    while deeper and depth < len(on.verify):
        deeper, width, wider = False, 1, True
        while wider and width < len(on.levels):
            cut, wider = _grow(on, depth, width, best)
            deeper, width = deeper or cut, width + 1
        depth += 1
    return best


def best_shape(n_nodes: int) -> tuple[int, ...]:
    """The parents of the shape of so many nodes, before anything is known of the pair and the machine."""
    levels = (0.0, 0.1, 0.11, 0.12, 0.13)  # a draft that reads a few nodes as fast as one
    return best_shapes(Grounds(by_rank(TYPICAL), (1.0,) * (n_nodes + 1), levels, n_nodes))[n_nodes].parents


class FixedShape:
    """A `TreePolicy` that always drafts the same tree, as far as there is room. It learns nothing."""

    def __init__(self, parents: Sequence[int]) -> None:
        """parents: of a `Shape`."""
        self._n_nodes = len(parents)
        self._children: list[list[int]] = [[] for _ in range(self._n_nodes + 1)]  # of node - 1 of the shape
        for node, parent in enumerate(parents):
            self._children[parent + 1].append(node)
        self._tree = GrownTree(0, 1)
        self._n_given = 0
        self._node: dict[int, int] = {}  # of the step -> of the shape

    def plan_tree(self, at: Situation) -> DraftPlan:
        limit = min(at.limit, self._n_nodes)
        tree = self._tree = GrownTree(limit, at.max_leaves)
        self._node = {-1: -1}
        for chance, parent in at.offer:
            if chance < OFFER_TAKEN_FROM or not tree.has_room(parent):
                break
            tree.add(parent)
        self._n_given = len(tree.parents)
        return DraftPlan(self._n_given, 0 if at.lag is None else limit - self._n_given)

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        return [node for node in nodes if self._children[self._node[node] + 1]]

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        wanted = self._children[self._node[parent] + 1]
        rank = sum(child >= self._n_given for child in self._tree.children[parent + 1])
        if rank == len(wanted) or not self._tree.has_room(parent):
            return False
        self._node[self._tree.add(parent)] = wanted[rank]
        return True

    def observe(self, seen: Observation) -> None:
        """A fixed shape learns nothing."""

    def learn(self, confidence: float, acceptance: float) -> None:
        """A fixed shape learns nothing."""
