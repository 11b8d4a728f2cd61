"""A second implementation of the verification rules, from the papers and in plain Python, one rule per method.

It gives the same law of verdicts as `specllama.core.verification`; faults override single methods. Laws are
dictionaries over their support, with ascending ids.
"""

from __future__ import annotations

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


class TokenVerifier:
    """Token by token, chains and trees. Leviathan et al., arXiv 2211.17192; siblings: Jeon et al., arXiv 2402.14160."""

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, p.get(token, 0.0) / q[token])

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        return normalised({other: max(prob - q.get(other, 0.0), 0.0) for other, prob in p.items()}, p)

    def correct(self, p: Probs, q: Probs, token: int, choose: Chooser) -> int:
        """The token after a rejection; `p` is the residual, `q` and `token` belong to the last rejected node."""
        return choose.pick(law_of_probs(p))

    def next_sibling_law(self, q: Probs, rejected: int) -> Probs:
        """q of the next sibling: siblings are drawn without replacement."""
        return normalised({token: prob for token, prob in q.items() if token != rejected}, q)

    def next_sibling_target(self, before: Probs, residual: Probs) -> Probs:
        return residual

    def bonus(self, p: Sequence[Distribution], row: int, choose: Chooser) -> int:
        """The token after a fully accepted draft."""
        return choose.pick(p[row])

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        path: list[int] = []
        node = -1
        while siblings := [child for child, parent in enumerate(parents) if parent == node]:
            left = probs_of(p[node + 1])
            q = self.law_of(draft, siblings[0])
            for sibling in siblings:
                token = draft.tokens[sibling]
                if draft.probs is None:
                    q = self.law_of(draft, sibling)
                if choose.flip(self.accept_prob(left, q, token)):
                    path.append(sibling)
                    node = sibling
                    break
                judged_by = q
                residual = self.residual(left, q, token, len(path))
                left = residual if sibling == siblings[-1] else self.next_sibling_target(left, residual)
                q = self.next_sibling_law(q, token)
            else:
                return Verdict(tuple(path), self.correct(left, judged_by, token, choose))
        return Verdict(tuple(path), self.bonus(p, node + 1, choose))

    def law_of(self, draft: Draft, node: int) -> Probs:
        return {draft.tokens[node]: 1.0} if draft.probs is None else probs_of(draft.probs[node])


class BlockVerifier(TokenVerifier):
    """Block verification of chains. Sun et al., arXiv 2403.10444."""

    stops_at_first_failure = False

    def weight(self, before: float, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, before * p.get(token, 0.0) / q[token])

    def spare(self, weight: float, p: Probs, q: Probs) -> dict[int, float]:
        """The excess of the weighted p over q."""
        return {token: max(weight * prob - q.get(token, 0.0), 0.0) for token, prob in p.items()}

    def pass_prob(self, weight: float, p: Probs, q: Probs) -> float:
        """h of a prefix that is not the whole draft; `p` and `q` belong to the token after it."""
        spare = sum(self.spare(weight, p, q).values())
        return spare / (spare + 1.0 - weight) if spare + 1.0 - weight > 0.0 else 1.0

    def weighted_residual(self, weight: float, p: Probs, q: Probs) -> Probs:
        return normalised(self.spare(weight, p, q), p)

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        n = len(draft.tokens)
        targets = [probs_of(p[row]) for row in range(n + 1)]
        laws = [self.law_of(draft, node) for node in range(n)]
        weights = [1.0]
        for node, token in enumerate(draft.tokens):
            weights.append(self.weight(weights[-1], targets[node], laws[node], token))
        n_accepted = 0
        for i in range(1, n + 1):
            pass_prob = weights[n] if i == n else self.pass_prob(weights[i], targets[i], laws[i])
            if choose.flip(pass_prob):
                n_accepted = i
            elif self.stops_at_first_failure:
                break
        path = tuple(range(n_accepted))
        if n_accepted == n:
            return Verdict(path, choose.pick(p[n]))
        law = self.weighted_residual(weights[n_accepted], targets[n_accepted], laws[n_accepted])
        return Verdict(path, choose.pick(law_of_probs(law)))


class MatchVerifier(TokenVerifier):
    """Draws from p and continues while the draw equals the draft; for chains."""

    def redraw(self, drawn: int, p: Distribution, choose: Chooser) -> int:
        """The token after a mismatch: the draw itself."""
        return drawn

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        for node, token in enumerate(draft.tokens):
            drawn = choose.pick(p[node])
            if drawn != token:
                return Verdict(tuple(range(node)), self.redraw(drawn, p[node], choose))
        return Verdict(tuple(range(len(draft.tokens))), self.bonus(p, len(draft.tokens), choose))


RULES: Mapping[Rule, TokenVerifier] = {
    Rule.TOKEN: TokenVerifier(), Rule.BLOCK: BlockVerifier(), Rule.MATCH: MatchVerifier(),
}  # fmt: skip
