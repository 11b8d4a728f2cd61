"""A second implementation of the verification rules, from the papers and in plain Python, one rule per method.

It gives the same law of verdicts as `specllama.core.verification`; faults override single methods. Laws are
dictionaries over their support, with ascending ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule, Verdict

Probs: TypeAlias = Mapping[int, float]


def probs_of(law: Distribution) -> Probs:
    """The support of `law`, with probabilities."""
    ids, probs = law.items()
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


def law_of_probs(probs: Probs) -> Distribution:
    """The inverse of `probs_of`."""
    return Distribution.on(list(probs), list(probs.values()))


def normalised(weights: Mapping[int, float], otherwise: Probs) -> Probs:
    """`weights` divided by their sum; `otherwise` if the sum is 0."""
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight > 0.0} if total > 0.0 else otherwise


def children_of(draft: Draft) -> dict[int, list[int]]:
    """The children of every node; -1 is the pending token."""
    parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
    return {node: [child for child, parent in enumerate(parents) if parent == node] for node in range(-1, len(parents))}


class TokenVerifier:
    """Token by token, from the root down. Leviathan et al., arXiv 2211.17192; siblings: Jeon et al., 2402.14160."""

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, p.get(token, 0.0) / q[token])

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        return normalised({other: max(prob - q.get(other, 0.0), 0.0) for other, prob in p.items()}, p)

    def correct(self, p: Probs, q: Probs, token: int, choose: Chooser) -> int:
        """The token after a rejection; `p` is the residual, `q` and `token` belong to the last rejected node."""
        return choose.pick(law_of_probs(p))

    def law_after(self, q: Probs, sibling: int) -> Probs:
        """q of a node after the draw of a sibling: siblings are drawn without replacement."""
        return normalised({token: prob for token, prob in q.items() if token != sibling}, q)

    def next_sibling_target(self, before: Probs, residual: Probs) -> Probs:
        return residual

    def row(self, node: int, siblings: Sequence[int]) -> int:
        """The row of p that follows `node`, which is one of `siblings`."""
        return node + 1

    def bonus(self, p: Sequence[Distribution], row: int, choose: Chooser) -> int:
        """The token after a fully accepted draft."""
        return choose.pick(p[row])

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        children = children_of(draft)
        path: list[int] = []
        row = 0
        while siblings := children[path[-1] if path else -1]:
            left = probs_of(p[row])
            for node in siblings:
                token, q = draft.tokens[node], self.law_of(draft, node, siblings)
                if choose.flip(self.accept_prob(left, q, token)):
                    path.append(node)
                    row = self.row(node, siblings)
                    break
                residual = self.residual(left, q, token, len(path))
                left = residual if node == siblings[-1] else self.next_sibling_target(left, residual)
            else:
                return Verdict(tuple(path), self.correct(left, q, token, choose))
        return Verdict(tuple(path), self.bonus(p, row, choose))

    def law_of(self, draft: Draft, node: int, siblings: Sequence[int]) -> Probs:
        """The law that `node` was drawn from, after its earlier siblings."""
        q: Probs = {draft.tokens[node]: 1.0} if draft.probs is None else probs_of(draft.probs[node])
        for earlier in siblings[: siblings.index(node)]:
            q = self.law_after(q, draft.tokens[earlier])
        return q


class BlockVerifier(TokenVerifier):
    """Leaf to root: Weng et al., arXiv 2505.12398; on a chain block verification, Sun et al., arXiv 2403.10444.

    The first leaf is accepted with its weight, or removed; then its parent may be a leaf. The root is always accepted.
    """

    def weight(self, before: float, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, before * p.get(token, 0.0) / q[token])

    def spare(self, weight: float, p: Probs, q: Probs) -> dict[int, float]:
        """The excess of the weighted p over q."""
        return {token: max(weight * prob - q.get(token, 0.0), 0.0) for token, prob in p.items()}

    def weight_left(self, weight: float, p: Probs, q: Probs) -> float:
        """The weight of a node after the rejection of a child that was drawn from `q`."""
        spare = math.fsum(self.spare(weight, p, q).values())
        return spare / (spare + (1.0 - weight)) if spare + (1.0 - weight) > 0.0 else 1.0

    def weighted_residual(self, weight: float, p: Probs, q: Probs) -> Probs:
        return normalised(self.spare(weight, p, q), p)

    def removed(self, path: Sequence[int]) -> int:
        """Index in `path` of the first node that goes with its rejected last one."""
        return len(path) - 1

    def target(self, path: Sequence[int]) -> int:
        """The node of `path` whose p is reduced by a rejection of its last one."""
        return path[-2]

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        siblings, left = children_of(draft), children_of(draft)
        weights = {-1: 1.0}
        targets: dict[int, Probs] = {}
        path = [-1]
        while True:
            node = path[-1]
            if node not in targets:
                row = self.row(node, siblings[path[-2]]) if node >= 0 else 0
                targets[node] = probs_of(p[row])
            if left[node]:
                child = left[node][0]
                q = self.law_of(draft, child, siblings[node])
                weights[child] = self.weight(weights[node], targets[node], q, draft.tokens[child])
                path.append(child)
            elif node < 0 or choose.flip(weights[node]):
                return Verdict(tuple(path[1:]), choose.pick(law_of_probs(targets[node])))
            else:
                del path[self.removed(path) + 1 :]
                target = targets[self.target(path)]
                child = path.pop()
                parent = path[-1]
                left[parent].remove(child)
                q = self.law_of(draft, child, siblings[parent])
                targets[parent] = self.weighted_residual(weights[parent], target, q)
                weights[parent] = self.weight_left(weights[parent], target, q)


class MatchVerifier(TokenVerifier):
    """Draws from p and continues while the draw equals a drafted token."""

    def redraw(self, drawn: int, p: Distribution, choose: Chooser) -> int:
        """The token after a mismatch: the draw itself."""
        return drawn

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        children = children_of(draft)
        path: list[int] = []
        row = 0
        while siblings := children[path[-1] if path else -1]:
            drawn = choose.pick(p[row])
            node = next((node for node in siblings if draft.tokens[node] == drawn), None)
            if node is None:
                return Verdict(tuple(path), self.redraw(drawn, p[row], choose))
            path.append(node)
            row = self.row(node, siblings)
        return Verdict(tuple(path), self.bonus(p, row, choose))


RULES: Mapping[Rule, TokenVerifier] = {
    Rule.TOKEN: TokenVerifier(), Rule.BLOCK: BlockVerifier(), Rule.MATCH: MatchVerifier(),
}  # fmt: skip
