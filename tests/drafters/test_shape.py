"""The search for the best tree against every tree, and the policy of one fixed tree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from specllama.core.types import Caps
from specllama.drafters.shape import FixedShape, Grounds, best_shapes, by_rank

assert Caps  # placeholder


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
    for n in range(7):
        best = max(rate_of(parents, on) for parents in every_tree(n))
        assert rate_of(found[n].parents, on) == pytest.approx(found[n].rate), "a shape is what it says"
        assert found[n].rate >= 0.98 * best
    whole = max(shape.rate for shape in found)
    assert whole == pytest.approx(max(rate_of(parents, on) for n in range(7) for parents in every_tree(n)), rel=0.01)
