"""Verification: which drafted tokens are accepted, and which token follows them.

p is the target's law, q the draft's. Under every rule the emitted tokens follow p exactly, provided that the draft
tokens were drawn from q. A draft without laws is a point mass: right for every token that was chosen without chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def _family(draft: Draft, node: int) -> Iterator[tuple[int, int, Distribution]]:
    """(child, its token, the law of its draw) of a node's children in the order they were drawn.

    Siblings are drawn without replacement: the law of a draw is q without the tokens of the siblings before it.
    Raises DraftLawError if a token cannot have been drawn from it.
    """
    taken: list[int] = []
    for child in children_of(draft, node):
        token, q = draft.tokens[child], _law_of(draft, child)
        q.require_normalised()
        if taken:
            q = q.without(*taken)
        if token in taken or not q.prob(token) > 0.0:
            among = " without the tokens of its earlier siblings" if taken else ""
            raise DraftLawError(
                f"drafted token {token} has probability 0 under q{among}",
                hint="q must be the law after every filter of the draft's own sampler",
            )
        taken.append(token)
        yield child, token, q


def _choose_by_token(draft: Draft, node: int, p: Distribution, choose: Chooser) -> tuple[int | None, int]:
    """(accepted child, -), or (None, correction) if all are rejected.

    Each sibling is accepted with min(1, p/q); a rejection leaves the residual of p for the next. Sources: Leviathan et
    al., arXiv 2211.17192, algorithm 1; for siblings Jeon et al., arXiv 2402.14160.
    """
    for child, token, q in _family(draft, node):
        if choose.flip(min(1.0, p.prob(token) / q.prob(token))):
            return child, -1
        p = p.residual(q)
    return None, choose.pick(p)


def _choose_by_match(draft: Draft, node: int, p: Distribution, choose: Chooser) -> tuple[int | None, int]:
    """(child equal to a draw from p, -), or (None, the draw)."""
    drawn = choose.pick(p)
    for child in children_of(draft, node):
        if draft.tokens[child] == drawn:
            return child, -1
    return None, drawn


def _verify_block(
    draft: Draft, p: Sequence[Distribution], choose: Chooser, path: tuple[int, ...] = (), weight: float = 1.0
) -> Verdict | None:
    """The verdict at or below the last node of `path`; None if it and all below it are rejected.

    `weight`: the chance that they are not. A child has the share of it that covers the child's token. A rejected child
    leaves the weighted residual of p, and the weight given that rejection, to its next sibling and at last to the node
    itself. Sources: Sun et al., arXiv 2403.10444, algorithm 2; for trees Weng et al., arXiv 2505.12398.
    """
    node = path[-1] if path else -1
    law: Distribution | None = None
    for child, token, q in _family(draft, node) if weight > 0.0 else ():
        law = law or p[node + 1]
        share = min(1.0, weight * law.prob(token) / q.prob(token))
        if verdict := _verify_block(draft, p, choose, (*path, child), share):
            return verdict
        spare, law = law.spare(q, weight)
        rejected = spare + (1.0 - weight)
        weight = spare / rejected if rejected > 0.0 else 1.0
    if path and not choose.flip(weight):
        return None
    return Verdict(path, choose.pick(law or p[node + 1]))


def verify(draft: Draft, p: Sequence[Distribution], choose: Chooser, rule: Rule = Rule.TOKEN) -> Verdict:
    """Accepted nodes and the token after them; together they follow p exactly.

    p: n+1 laws. p[0] follows the pending token, p[i+1] follows draft node i; rows behind a rejection are not read.
    Raises DraftLawError if a token cannot have been drawn from its q, ValueError if draft and p do not fit together.
    """
    _require_sound(draft, p)
    if not draft.tokens:
        return Verdict((), choose.pick(p[0]))
    if rule is Rule.BLOCK:
        verdict = _verify_block(draft, p, choose)
        assert verdict is not None, "the root has weight 1"
        return verdict
    decide = _choose_by_match if rule is Rule.MATCH else _choose_by_token
    path: list[int] = []
    node = -1
    while True:
        accepted, next_token = decide(draft, node, p[node + 1], choose)
        if accepted is None:
            return Verdict(tuple(path), next_token)
        node = accepted
        path.append(node)
