"""Verification: which drafted tokens are accepted, and which token follows them.

p is the target's law, q the draft's. Under every rule the emitted tokens follow p exactly, provided that the draft
tokens were drawn from q. A draft without laws is a point mass: right for every token that was chosen without chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.base.errors import DraftLawError
from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule, Verdict


def children_of(draft: Draft, node: int) -> list[int]:
    """Nodes whose parent is `node` (-1 = the pending token), in the order they were drawn."""
    if draft.parents is None:
        return [node + 1] if node + 1 < len(draft.tokens) else []
    return [child for child, parent in enumerate(draft.parents) if parent == node]


def _require_sound(draft: Draft, p: Sequence[Distribution]) -> None:
    """Raises ValueError if the parts of the draft and the rows of p do not fit together."""
    n = len(draft.tokens)
    if draft.probs is not None and len(draft.probs) != n:
        raise ValueError(f"{len(draft.probs)} laws for {n} drafted tokens")
    if draft.parents is not None and (
        len(draft.parents) != n or any(not -1 <= parent < node for node, parent in enumerate(draft.parents))
    ):
        raise ValueError(f"parents {draft.parents} are no tree of {n} drafted tokens, parents first")
    if len(p) != n + 1:
        raise ValueError(f"{len(p)} rows of p for {n} drafted tokens, expected one more than tokens")


def _law_of(draft: Draft, node: int) -> Distribution:
    """q of a drafted token."""
    return Distribution.point(draft.tokens[node]) if draft.probs is None else draft.probs[node]


def _ratio(p: Distribution, q: Distribution, token: int) -> float:
    """p/q at a drafted token. Raises DraftLawError if the token cannot have been drawn from q."""
    q.require_normalised()
    if not q.prob(token) > 0.0:
        raise DraftLawError(
            f"drafted token {token} has probability 0 under q",
            hint="q must be the law after every filter of the draft's own sampler",
        )
    return p.prob(token) / q.prob(token)


def _choose_by_token(draft: Draft, siblings: list[int], p: Distribution, choose: Chooser) -> tuple[int | None, int]:
    """(accepted sibling, -), or (None, correction) if all are rejected.

    Each sibling is accepted with min(1, p/q); a rejection leaves the residual of p for the next, and takes the token
    out of q, because siblings are drawn without replacement. Sources: Leviathan et al., arXiv 2211.17192, algorithm 1;
    for siblings Jeon et al., arXiv 2402.14160.
    """
    for i, node in enumerate(siblings):
        q = _law_of(draft, node)
        for earlier in siblings[:i]:
            q = q.without(draft.tokens[earlier])
        if choose.flip(min(1.0, _ratio(p, q, draft.tokens[node]))):
            return node, -1
        p = p.residual(q)
    return None, choose.pick(p)


def _choose_by_match(draft: Draft, siblings: list[int], p: Distribution, choose: Chooser) -> tuple[int | None, int]:
    """(sibling equal to a draw from p, -), or (None, the draw)."""
    drawn = choose.pick(p)
    for node in siblings:
        if draft.tokens[node] == drawn:
            return node, -1
    return None, drawn


def _verify_block(draft: Draft, p: Sequence[Distribution], choose: Chooser) -> Verdict:
    """Accept the longest prefix that the joint law allows. Source: Sun et al., arXiv 2403.10444, algorithm 2."""
    n = len(draft.tokens)
    weights = [1.0]  # w_i: the share of the target's mass that the first i tokens cover
    while len(weights) <= n and weights[-1] > 0.0:
        i = len(weights) - 1
        weights.append(min(1.0, weights[-1] * _ratio(p[i], _law_of(draft, i), draft.tokens[i])))
    for n_accepted in range(len(weights) - 1, 0, -1):  # the longest prefix that passes
        weight = weights[n_accepted]
        if n_accepted == n or weight == 0.0:
            pass_prob = weight
        else:
            spare = float(p[n_accepted].excess(_law_of(draft, n_accepted), weight)[1].sum())
            pass_prob = spare / (spare + 1.0 - weight) if spare + 1.0 - weight > 0.0 else 1.0
        if choose.flip(pass_prob):
            break
    else:
        n_accepted = 0
    path = tuple(range(n_accepted))
    if n_accepted == n:
        return Verdict(path, choose.pick(p[n]))
    return Verdict(path, choose.pick(p[n_accepted].residual(_law_of(draft, n_accepted), weights[n_accepted])))


def verify(draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule = Rule.TOKEN) -> Verdict:
    """Accepted nodes and the token after them; together they follow p exactly.

    p: n+1 laws. p[0] follows the pending token, p[i+1] follows draft node i; rows behind a rejection are not read.
    Raises DraftLawError if a token cannot have been drawn from its q, ValueError if draft and p do not fit together or
    the draft of a BLOCK is a tree.
    """
    _require_sound(draft, p)
    if rule is Rule.BLOCK:
        if draft.parents is not None and draft.parents != tuple(range(-1, len(draft.tokens) - 1)):
            raise ValueError("block verification needs a chain, found a tree")
        return _verify_block(draft, p, choose)
    decide = _choose_by_match if rule is Rule.MATCH else _choose_by_token
    path: list[int] = []
    node = -1
    while siblings := children_of(draft, node):
        accepted, correction = decide(draft, siblings, p[node + 1], choose)
        if accepted is None:
            return Verdict(tuple(path), correction)
        node = accepted
        path.append(node)
    return Verdict(tuple(path), choose.pick(p[node + 1]))
