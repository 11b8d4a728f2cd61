"""The search for the best tree against every tree, and the policy of one fixed tree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from specllama.drafters.shape import FixedShape, Grounds, Situation, TreePolicy, best_shape, best_shapes, by_rank


@cache
def forests(n: int) -> list[tuple[object, ...]]:
    """Every ordered forest of n nodes: a tuple of trees, each the forest below its root."""
    if n == 0:
        return [()]
    return [(first, *rest) for k in range(n) for first in forests(k) for rest in forests(n - 1 - k)]


def parents_of(forest: tuple[object, ...], parent: int = -1, found: list[int] | None = None) -> list[int]:
    """The parents of a forest's nodes, depth first."""
    found = [] if found is None else found
    for tree in forest:
        found.append(parent)
        assert isinstance(tree, tuple)
        parents_of(tree, len(found) - 1, found)
    return found


def every_tree(n: int) -> Iterator[list[int]]:
    return map(parents_of, forests(n))


def rate_of(parents: Sequence[int], on: Grounds) -> float:
    """Expected tokens over expected cost, by the definition; -1 if the tree is outside the limits."""
    reach, depth, first, ranks = list[float](), list[int](), list[bool](), [0] * (len(parents) + 1)
    for parent in parents:
        rank, ranks[parent + 1] = ranks[parent + 1], ranks[parent + 1] + 1
        if rank >= len(on.by_rank):
            return -1.0
        above = (1.0, -1, True) if parent < 0 else (reach[parent], depth[parent], first[parent])
        reach.append(above[0] * on.by_rank[rank])
        depth.append(above[1] + 1)
        first.append(above[2] and rank == 0)
    n, leaves = len(parents), [node for node in range(len(parents)) if not ranks[node + 1]]
    if len(leaves) > on.max_leaves:
        return -1.0
    widths = [len({p for p, d in zip(parents, depth, strict=True) if d == level}) for level in range(n)]
    if max(widths, default=0) >= len(on.levels):
        return -1.0
    row = on.levels[2] - on.levels[1]
    cost = on.verify[n] + sum(on.levels[width] for width in widths)
    cost += row * sum(reach[node] for node in range(n) if node in leaves or not first[node])
    cost += sum(reach[node] for node in range(n) if not first[node]) * max(on.verify[n] - on.verify[1], 0.0) / max(n, 1)
    return (1.0 + sum(reach)) / cost


def grounds(seed: int) -> Grounds:
    """Random acceptance and costs: flat, steep, or with jumps; cheap and expensive drafts."""
    chance = random.Random(seed)
    chances = [chance.uniform(0.3, 0.98), chance.uniform(0.1, 0.6), chance.uniform(0.05, 0.5)]
    verify, slope = [1.0], chance.choice((0.02, 0.1, 0.5))
    for _ in range(6):
        verify.append(max(verify[-1] + slope * chance.uniform(-0.2, 2.0), 1.0))
    c, share = chance.choice((0.02, 0.1, 0.4)), chance.uniform(0.02, 0.6)
    levels = (0.0, *(c * (1.0 + share * n) for n in range(4)))
    return Grounds(by_rank(chances), tuple(verify), levels, chance.choice((2, 8)))


@pytest.mark.parametrize("seed", range(30))
def test_the_shape_is_the_best_of_all_trees(seed: int) -> None:
    """A search that overlooks a shape: chain, root only, broad and narrow trees are all best somewhere."""
    on = grounds(seed)
    found = best_shapes(on)
    best = [max(rate_of(parents, on) for parents in every_tree(n)) for n in range(7)]
    assert max(shape.rate for shape in found) == pytest.approx(max(best))
    for shape, rate in zip(found, best, strict=True):
        if shape.rate:  # else so many nodes are hopeless
            assert rate_of(shape.parents, on) == pytest.approx(shape.rate)
            assert shape.rate >= 0.98 * rate


def test_plain_decoding_and_chains_are_among_the_shapes() -> None:
    """A tree where a chain is faster; a draft where nothing pays."""
    levels = (0.0, 0.1, 0.2, 0.3)
    steep = best_shapes(Grounds(by_rank((0.8, 0.5)), tuple(1.0 + n for n in range(7)), levels, 8))
    assert max(steep, key=lambda shape: shape.rate).parents == ()
    sure = best_shapes(Grounds(by_rank((0.98, 0.5)), tuple(1.0 + 0.05 * n for n in range(7)), levels, 8))
    assert max(sure, key=lambda shape: shape.rate).parents == (-1, 0, 1, 2, 3, 4)
    doubtful = best_shapes(Grounds(by_rank((0.4, 0.5)), tuple(1.0 + 0.05 * n for n in range(7)), levels, 8))
    assert max(doubtful, key=lambda shape: shape.rate).parents.count(-1) == 2
    assert (
        max(best_shapes(Grounds(by_rank((0.4, 0.5)), (1.0,) * 7, levels, 1))[3].parents.count(p) for p in (-1, 0)) == 1
    )


def test_the_best_shape_of_a_number_of_nodes_has_so_many() -> None:
    """A `--tree 16` that drafts fewer nodes."""
    for n in range(33):
        parents = best_shape(n)
        assert len(parents) == n
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert not n or parents[0] == -1


def grown(policy: TreePolicy, confidence: float = 0.9, n_most: int = 64) -> list[int]:
    """The parents of the nodes that a policy lets grow, in the order of drawing."""
    parents, level = list[int](), [-1]
    while level and (chosen := policy.expand(level)):
        assert set(chosen) <= set(level)
        level = []
        for parent in chosen:
            while len(parents) < n_most and policy.go_on_tree(parent, confidence):
                level.append(len(parents))
                parents.append(parent)
    return parents


def test_a_fixed_shape_grows_as_it_is() -> None:
    """Children under the wrong parent, when nodes are drawn level by level and the shape is not."""
    policy = FixedShape((-1, 0, 1, -1, 0, 3))
    assert policy.plan_tree(Situation(16, 8, lag=0)).n_drawn == 6
    assert grown(policy) == [-1, -1, 0, 0, 1, 2]


def test_a_fixed_shape_keeps_the_limits() -> None:
    """More leaves or nodes than the target can take."""
    policy = FixedShape((-1, -1, -1, 0, 0, 3))
    policy.plan_tree(Situation(16, 1, lag=0))
    assert grown(policy) == [-1, 0, 1]
    policy.plan_tree(Situation(16, 3, lag=0))
    assert grown(policy) == [-1, -1, -1, 0, 3]
    policy.plan_tree(Situation(2, 8, lag=0))
    assert grown(policy) == [-1, -1]
    assert policy.plan_tree(Situation(16, 8, lag=None)).n_drawn == 0


def test_a_fixed_shape_takes_likely_offers_first() -> None:
    """An unlikely lookup in the place of drawn nodes; numbers of nodes that ignore the offered ones."""
    policy = FixedShape((-1, 0, -1, 0))
    plan = policy.plan_tree(Situation(16, 8, offer=[(0.9, -1), (0.8, 0), (0.3, 1)], lag=0))
    assert (plan.n_given, plan.n_drawn) == (2, 2)
    assert policy.expand([-1]) == [-1]
    assert policy.go_on_tree(-1, 0.5)  # node 2 of the step
    assert policy.go_on_tree(-1, 0.5)
    assert not policy.go_on_tree(-1, 0.5)
    assert list(policy.expand([2, 3])) == [2]
