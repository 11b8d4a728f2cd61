"""The controller of trees: the same costs, learning and pauses as for chains, and a decision for every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specllama.core.types import DraftPlan, Observation
from specllama.core.verification import children_of
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import Controller, PassCosts
from specllama.drafters.length import TUNED
from specllama.drafters.shape import Grounds, GrownTree, Shape, Situation, best_shapes, by_rank

# Acceptance of the second, third and fourth child of a node, given that those before it are rejected: as recorded from
# the default pair (benchmarks/README.md).
SIBLINGS = (Prior(0.36, 0.03, 0.6), Prior(0.24, 0.05, 0.4), Prior(0.14, 0.1, 0.1))
MOST_WIDE = 4  # nodes of a level that the draft evaluates, in the search for the best shape
MOVED = 0.05  # a shape is searched anew when an acceptance has moved so far


@dataclass(slots=True)
class _TreeStep:
    """The plan and the tree since the last verification. Lists: `[node + 1]`, of the pending token first."""

    tree: GrownTree
    plan: DraftPlan = field(default_factory=DraftPlan)
    reach: list[float] = field(default_factory=lambda: [1.0])  # chance that a node is accepted
    left: list[float] = field(default_factory=lambda: [1.0])  # chance that it is, and that none of its children is
    confidence: list[float | None] = field(default_factory=lambda: [None])  # None = looked up
    first: list[bool] = field(default_factory=lambda: [True])  # on the path of first children
    level: list[int] = field(default_factory=lambda: [0])
    n_expanded: int = 0  # in the level in progress

    def add(self, parent: int, chance: float, confidence: float | None) -> None:
        """A child of `parent` that is accepted with `chance` if no earlier sibling is."""
        reach = self.left[parent + 1] * chance
        self.left[parent + 1] -= reach
        self.first.append(self.first[parent + 1] and not self.tree.children[parent + 1])
        self.level.append(self.level[parent + 1] + 1)
        self.tree.add(parent)
        self.reach.append(reach)
        self.left.append(reach)
        self.confidence.append(confidence)


class TreeController(Controller):
    """A `TreePolicy`, and for models without trees a `Planner`.

    The rate R of the plan is that of the best shape (`best_shapes`) for the acceptance learned so far; plain decoding
    and the first nodes of the offer are among the candidates. While drafting, a node is drawn or evaluated if it, or
    the chain that may follow it, is expected to emit more tokens than R times its cost. So the tree follows the
    confidences, and is a chain where siblings do not pay. Each rank of siblings has a calibration of its own.
    """

    def __init__(self, costs: PassCosts, *, n_max: int = TUNED, calibration: Calibration | None = None) -> None:
        self._siblings = [Calibration(prior) for prior in SIBLINGS]
        self._tree: _TreeStep | None = None
        self._shapes: list[Shape] = []  # best_shapes of `_shaped_by`
        self._n_levels = 0  # of the best of them
        self._shaped_by: tuple[float, ...] = ()
        super().__init__(costs, n_max=n_max, calibration=calibration)

    def _go_to(self, depth: int) -> None:
        super()._go_to(depth)
        self._shaped_by = ()

    @property
    def by_rank(self) -> list[Calibration]:
        """The calibrations of a node's children."""
        return [self.calibration, *self._siblings]

    def plan_tree(self, at: Situation) -> DraftPlan:
        self._come_to(at.depth)
        limit = min(at.limit, self.n_max)
        step, plan = self._best_offered(at.offer, limit, at.max_leaves)
        if at.lag is not None and limit > 0:
            plan = self._with_model(plan, self._best_tree(step, limit), limit, at.lag)
        if plan.n_given < len(step.tree.parents):  # the model alone is better
            step = _TreeStep(GrownTree(limit, at.max_leaves))
        step.plan, self._tree = plan, step
        return plan

    def _best_offered(
        self, offer: Sequence[tuple[float, int]], limit: int, max_leaves: int
    ) -> tuple[_TreeStep, DraftPlan]:
        """The first nodes of the offer, as many as are best without the model."""
        step, n_best, best = _TreeStep(GrownTree(limit, max_leaves)), 0, 1.0
        for n, (chance, parent) in enumerate(offer[:limit], 1):
            if not step.tree.has_room(parent):
                break
            step.add(parent, chance, None)
            rate = sum(step.reach) / self._verify[n]
            if rate > best:
                n_best, best = n, rate
        if n_best < len(step.tree.parents):
            return self._best_offered(offer[:n_best], limit, max_leaves)
        return step, DraftPlan(n_best, rate=best)

    def _best_tree(self, offered: _TreeStep, limit: int) -> tuple[int, float]:
        """(nodes of the offer to take: all or none, rate) with at least one node of the model."""
        shapes = self._best_shapes(offered.tree.max_leaves)
        found = [(0, shape.rate) for shape in shapes[1 : limit + 1]]
        if n_given := len(offered.tree.parents):
            by_rank = self.by_rank
            rank = min(len(offered.tree.children[0]), len(by_rank) - 1)
            share = offered.left[0] * min(by_rank[rank].typical / by_rank[0].typical, 1.0)
            for n, shape in enumerate(shapes[1 : limit - n_given + 1], n_given + 1):
                n_expected = sum(offered.reach) + share * (shape.n_expected - 1.0)
                found.append((n_given, n_expected / (shape.draft + self._verify[n])))
        return max(found, key=lambda each: each[1])

    def _best_shapes(self, max_leaves: int) -> list[Shape]:
        """`best_shapes` for what was learned so far; searched anew when that has moved."""
        typical = (*(each.typical for each in self.by_rank), float(max_leaves))
        if not self._shaped_by or any(
            abs(now - then) > MOVED for now, then in zip(typical, self._shaped_by, strict=True)
        ):
            levels = (0.0, *(self.costs.draft_cost(n) for n in range(1, MOST_WIDE + 1)))
            self._shapes = best_shapes(Grounds(by_rank(typical[:-1]), tuple(self._verify), levels, max_leaves))
            self._n_levels = max(self._shapes, key=lambda shape: shape.rate).n_levels
            self._shaped_by = typical
        return self._shapes

    def expand(self, nodes: Sequence[int]) -> Sequence[int]:
        step = self._tree
        assert step is not None, "a tree grows after its plan"
        step.n_expanded = 0
        if step.plan.n_drawn <= 0:
            return ()
        if nodes[0] == -1:  # the plan has decided that
            step.n_expanded = 1
            return nodes
        typical, n, chosen = self.calibration.typical, len(step.tree.parents), list[int]()
        for node in sorted(nodes, key=lambda node: -step.reach[node + 1]):
            step.n_expanded = len(chosen) + 1
            more = self._level_cost(step)
            if not self._earns(step, node, typical, more, n + len(chosen)):
                break
            chosen.append(node)
        step.n_expanded = len(chosen)
        return chosen

    def _level_cost(self, step: _TreeStep) -> float:
        """Of the draft's pass over a level, the part for its last node."""
        n = step.n_expanded
        return self.costs.draft_cost(n) - self.costs.draft_cost(n - 1) if n > 1 else self._draft

    def _earns(self, step: _TreeStep, parent: int, chance: float, cost: float, n: int) -> bool:
        """True if a child of `parent` with this chance, or a chain that begins with it, saves more than it costs.

        cost: of the law of the child; n: nodes before it.
        """
        rate, limit, is_sibling = step.plan.rate, step.tree.limit, bool(step.tree.children[parent + 1])
        again = 0.0
        if n > 1 and (is_sibling or not step.first[parent + 1]):  # if it is accepted, it is computed again
            again = (self._verify[n] - self._verify[1]) / (n - 1) + self._reread
        reach = step.left[parent + 1] * chance * max(1.0 - rate * again, 0.0)
        if is_sibling:  # it also makes the rows of later levels more expensive
            full = min(n + max(self._n_levels - step.level[parent + 1] - 1, 0), limit - 1)
            if reach <= rate * (self._verify[full + 1] - self._verify[full]):
                return False
        gain, typical, more = 0.0, self.calibration.typical, self._level_cost(step)
        for m in range(n + 1, limit + 1):
            gain += reach
            if gain > rate * (cost + self._verify[m] - self._verify[n]):
                return True
            reach *= typical
            cost += more
        return False

    def go_on_tree(self, parent: int, confidence: float) -> bool:
        step = self._tree
        assert step is not None, "a tree grows after its plan"
        rank, by_rank = len(step.tree.children[parent + 1]), self.by_rank
        if rank >= len(by_rank) or not step.tree.has_room(parent):
            return False
        chance = by_rank[rank].at(confidence)
        if not self._earns(step, parent, chance, 0.0, len(step.tree.parents)):
            return False
        step.add(parent, chance, confidence)
        return True

    def observe(self, seen: Observation) -> None:
        """Learn from the nodes that were judged: at each accepted node its children up to the accepted one."""
        step, self._tree = self._tree, None
        if step is None:
            super().observe(seen)
            return
        self._pass(seen)
        if len(seen.draft.tokens) != len(step.tree.parents):  # cut, or another drafter's
            return
        calibrations, node, at = self.by_rank, -1, -1  # the same node as drafted and as submitted
        for accepted in (*seen.verdict.path, None):
            children, siblings = step.tree.children[node + 1], children_of(seen.draft, at)
            n_judged = len(siblings) if accepted is None else siblings.index(accepted) + 1
            for rank, child in enumerate(children[:n_judged]):
                confidence = step.confidence[child + 1]
                if confidence is not None:
                    right = accepted is not None and rank == n_judged - 1
                    calibrations[rank].learn(confidence, float(right))
            if accepted is None:
                break
            node, at = children[n_judged - 1], accepted
        if len(step.tree.parents) > step.plan.n_given:
            self._restart()
