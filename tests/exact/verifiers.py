"""The rules of verification once more, from the papers and in plain Python: one rule a method, for faults to break.

Unbroken, they are a second opinion on `specllama.core.verification`: same drafts, same law of verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule, Verdict
from tests.fakes import Probs, dense

N_IDS = 8  # more than any vocabulary of these tests


def spread(law: Distribution) -> Probs:
    """`law` as a tuple over the first ids."""
    return tuple(law.prob(token) for token in range(N_IDS))


def normalised(weights: Sequence[float], otherwise: Probs) -> Probs:
    """`weights` as a law; `otherwise` where they have no mass."""
    total = sum(weights)
    return tuple(weight / total for weight in weights) if total > 0.0 else otherwise


class TokenVerifier:
    """Token by token, chains and trees. Leviathan et al., arXiv 2211.17192; siblings: Jeon et al., arXiv 2402.14160."""

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        """With what probability a drafted token is accepted."""
        return min(1.0, p[token] / q[token])

    def accepts(self, p: Probs, q: Probs, token: int, choose: Chooser) -> bool:
        """Whether it is."""
        return choose.flip(self.accept_prob(p, q, token))

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        """What is left of p for whoever comes after the rejected token."""
        return normalised([max(a - b, 0.0) for a, b in zip(p, q, strict=True)], p)

    def correct(self, p: Probs, q: Probs, token: int, depth: int, choose: Chooser) -> int:
        """The token after a rejection; `p` is the residual, `q` and `token` those of the last rejected node."""
        return choose.pick(dense(p))

    def next_sibling_law(self, q: Probs, rejected: int) -> Probs:
        """q of the next sibling: drawn without replacement."""
        return normalised([0.0 if token == rejected else prob for token, prob in enumerate(q)], q)

    def next_sibling_target(self, before: Probs, residual: Probs) -> Probs:
        """p of the next sibling."""
        return residual

    def bonus(self, p: Sequence[Distribution], row: int, choose: Chooser) -> int:
        """The token after a draft that was accepted whole."""
        return choose.pick(dense(spread(p[row])))

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        """The verdict."""
        parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        path: list[int] = []
        node = -1
        while siblings := [child for child, parent in enumerate(parents) if parent == node]:
            left = spread(p[node + 1])
            q = self.law_of(draft, siblings[0])
            for sibling in siblings:
                token = draft.tokens[sibling]
                if draft.probs is None:
                    q = self.law_of(draft, sibling)
                if self.accepts(left, q, token, choose):
                    path.append(sibling)
                    node = sibling
                    break
                judged_by = q
                residual = self.residual(left, q, token, len(path))
                left = residual if sibling == siblings[-1] else self.next_sibling_target(left, residual)
                q = self.next_sibling_law(q, token)
            else:
                return Verdict(tuple(path), self.correct(left, judged_by, token, len(path), choose))
        return Verdict(tuple(path), self.bonus(p, node + 1, choose))

    def law_of(self, draft: Draft, node: int) -> Probs:
        """q of a node."""
        point = tuple(float(token == draft.tokens[node]) for token in range(N_IDS))
        return point if draft.probs is None else spread(draft.probs[node])


class BlockVerifier(TokenVerifier):
    """The longest prefix that the joint law allows. Sun et al., arXiv 2403.10444, as METHODS writes it down."""

    stops_at_first_failure = False

    def weight(self, before: float, p: Probs, q: Probs, token: int) -> float:
        """w of one token more."""
        return min(1.0, before * p[token] / q[token])

    def pass_prob(self, weight: float, p: Probs, q: Probs) -> float:
        """h of a prefix that is not the whole draft; `p` and `q` are those of the token after it."""
        spare = sum(max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True))
        return spare / (spare + 1.0 - weight) if spare + 1.0 - weight > 0.0 else 1.0

    def weighted_residual(self, weight: float, p: Probs, q: Probs) -> Probs:
        """The law of the correction."""
        return normalised([max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)], p)

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        """The verdict; a chain."""
        n = len(draft.tokens)
        targets = [spread(p[row]) for row in range(n + 1)]
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
            return Verdict(path, choose.pick(dense(targets[n])))
        law = self.weighted_residual(weights[n_accepted], targets[n_accepted], laws[n_accepted])
        return Verdict(path, choose.pick(dense(law)))


class MatchVerifier(TokenVerifier):
    """Draw from p and go on while the draw equals the draft."""

    def redraw(self, drawn: int, p: Probs, choose: Chooser) -> int:
        """The token after a mismatch: the draw itself."""
        return drawn

    def __call__(self, draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule) -> Verdict:
        """The verdict; a chain."""
        for node, token in enumerate(draft.tokens):
            drawn = choose.pick(dense(spread(p[node])))
            if drawn != token:
                return Verdict(tuple(range(node)), self.redraw(drawn, spread(p[node]), choose))
        return Verdict(tuple(range(len(draft.tokens))), self.bonus(p, len(draft.tokens), choose))
