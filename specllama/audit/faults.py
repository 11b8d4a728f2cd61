"""Deliberate faults for the self-test: an audit that does not catch them proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from specllama.audit.models import Passing
from specllama.audit.parts import Parts, Watching
from specllama.audit.rules import BlockVerifier, MatchVerifier, Probs, TokenVerifier, law_of_probs, normalised
from specllama.core.arrays import FloatArray
from specllama.core.constraint import Allowed, Constraint
from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.row_laws import RowLaws
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, Drafter, LanguageModel, Rule

Section = Literal["greedy", "law", "draws", "kv"]


class AcceptsEverything(TokenVerifier):
    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return 1.0


class InvertedRatio(TokenVerifier):
    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, q[token] / p[token]) if token in p else 0.0


class TooStrict(TokenVerifier):
    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return 0.999 * super().accept_prob(p, q, token)


class CorrectionFromTarget(TokenVerifier):
    """Takes p for the residual, after a rejection in the first row or in a later one."""

    def __init__(self, *, first_row: bool) -> None:
        self._first_row = first_row

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        return p if (depth == 0) == self._first_row else super().residual(p, q, token, depth)


class ResidualWithoutToken(TokenVerifier):
    """Removes only the rejected token from p, which is correct for a point mass."""

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        return normalised({other: prob for other, prob in p.items() if other != token}, p)


class ReusedAcceptanceUniform(TokenVerifier):
    """Draws the correction by inversion from the uniform that rejected, u >= p/q."""

    def __init__(self) -> None:
        self._rejected_at = 0.0

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        self._rejected_at = super().accept_prob(p, q, token)
        return self._rejected_at

    def correct(self, p: Probs, q: Probs, token: int, choose: Chooser) -> int:
        ends = list(accumulate(p.values()))
        shares = {
            other: max(end - max(end - prob, self._rejected_at), 0.0)
            for (other, prob), end in zip(p.items(), ends, strict=True)
        }
        return choose.pick(law_of_probs(normalised(shares, p)))


class ReusedProposalUniform(TokenVerifier):
    """Verifies a token with the uniform that drew it from q by inversion."""

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        low = math.fsum(prob for other, prob in q.items() if other < token)
        return min(max(super().accept_prob(p, q, token) - low, 0.0) / q[token], 1.0)


class BonusFromTheRowBefore(TokenVerifier):
    def bonus(self, p: Sequence[Distribution], row: int, choose: Chooser) -> int:
        return super().bonus(p, max(row - 1, 0), choose)


class UnclippedWeight(BlockVerifier):
    def weight(self, before: float, p: Probs, q: Probs, token: int) -> float:
        return before * p.get(token, 0.0) / q[token]


class UnweightedResidual(BlockVerifier):
    def weighted_residual(self, weight: float, p: Probs, q: Probs) -> Probs:
        return super().weighted_residual(1.0, p, q)


class LosesTheBranch(BlockVerifier):
    """Gives up a whole branch when its leaf is rejected."""

    def removed(self, path: Sequence[int]) -> int:
        return 1


class WeightStays(BlockVerifier):
    """Judges a node by its ratio alone, also after the rejection of its children."""

    def weight_left(self, weight: float, p: Probs, q: Probs) -> float:
        return weight


class ResidualOfTheRoot(BlockVerifier):
    """A rejection reduces the root's p instead of the parent's."""

    def target(self, path: Sequence[int]) -> int:
        return path[0]


class ForgetsRemoval(TokenVerifier):
    """Judges a sibling by a q that still has the siblings drawn before it."""

    def law_after(self, q: Probs, sibling: int) -> Probs:
        return q


class KeepsTarget(TokenVerifier):
    """Judges a sibling by p itself, not by what the rejected ones leave of it."""

    def next_sibling_target(self, before: Probs, residual: Probs) -> Probs:
        return before


class RowOfTheSibling(BlockVerifier):
    """Takes the row of the next sibling for that of a node."""

    def row(self, node: int, siblings: Sequence[int]) -> int:
        return siblings[(siblings.index(node) + 1) % len(siblings)] + 1


class MatchRedraws(MatchVerifier):
    """Draws a second token after a mismatch."""

    def redraw(self, drawn: int, p: Distribution, choose: Chooser) -> int:
        return choose.pick(p)


class PathlessLaws(RowLaws):
    """Penalties that do not see the tokens of the draft."""

    def _path(self, node: int) -> list[int]:
        return []


class PenaltiesWithoutPath(Engine):
    _row_laws = PathlessLaws


class UnmaskedLaws(RowLaws):
    """The mask of a format reaches the draft only."""

    def _allowed(self, path: Sequence[int]) -> Allowed | None:
        return None


class UnmaskedTarget(Engine):
    _row_laws = UnmaskedLaws


class LateMaskLaws(UnmaskedLaws):
    """The mask of a format comes after the filters, which have kept tokens that it forbids."""

    def _law(self, row: int) -> Distribution:
        allowed = RowLaws._allowed(self, self._path(row - 1))
        ids, probs = super()._law(row).items()
        fitting = [i for i, token in enumerate(ids.tolist()) if allowed is None or token in allowed]
        if not fitting or sum(probs[fitting]) == 0.0:
            return RowLaws._law(self, row)
        return Distribution.on(ids[fitting], probs[fitting] / probs[fitting].sum())


class LateMask(Engine):
    _row_laws = LateMaskLaws


class OftenWrong(Passing):
    """A draft with the logits of the neighbouring ids after two of three tokens: any mask leaves it wrong tokens."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = super().eval(tokens, parents)
        return np.stack([np.roll(row, 1) if token % 3 else row for row, token in zip(rows, tokens, strict=True)])


class ForgetsRollback:
    """A constraint that goes on after the whole draft, also if a part of it was rejected."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._drafted: tuple[int, ...] = ()

    def allowed(self, path: Sequence[int]) -> Allowed:
        self._drafted = max(self._drafted, tuple(path), key=len)
        return self._constraint.allowed(path)

    def forced(self) -> Sequence[int]:
        return self._constraint.forced()

    def advance(self, tokens: Sequence[int]) -> None:
        self._constraint.advance(tokens if len(self._drafted) < len(tokens) else self._drafted)
        self._drafted = ()


def engine_with(verifier: TokenVerifier) -> type[Engine]:
    """The engine with another verification."""

    class Broken(Engine):
        _verify: Any = staticmethod(verifier)

    return Broken


class BrokenDrafter(Watching):
    """A drafter whose drafts are changed by `change`."""

    def __init__(self, drafter: Drafter, change: Callable[[Draft, Chooser], Draft]) -> None:
        super().__init__(drafter, lambda seen: None)
        self._change = change

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        return self._change(super().propose(tokens, limit, params, choose), choose)


def drops_unlikely(draft: Draft, choose: Chooser) -> Draft:
    """Cuts the draft before the first token that is not the most likely of q: its length depends on the draw."""
    if draft.probs is None:
        return draft
    n = next((i for i, q in enumerate(draft.probs) if q.prob(draft.tokens[i]) < q.peak()), len(draft.tokens))
    return Draft(draft.tokens[:n], draft.probs[:n] or None)


def claims_another_law(draft: Draft, choose: Chooser) -> Draft:
    """Reports a flat law instead of the one that the token was drawn from."""
    if draft.probs is None:
        return draft
    flat = []
    for q in draft.probs:
        ids = q.support()
        flat.append(Distribution.on(ids, np.full(len(ids), 1.0 / len(ids))))
    return Draft(draft.tokens, tuple(flat))


def draws_with_replacement(draft: Draft, choose: Chooser) -> Draft:
    """Draws the last leaf among its siblings again, as if they were not there."""
    if draft.probs is None or draft.parents is None:
        return draft
    leaf = max(node for node in range(len(draft.tokens)) if node not in draft.parents)
    return replace(draft, tokens=(*draft.tokens[:leaf], choose.pick(draft.probs[leaf]), *draft.tokens[leaf + 1 :]))


def normalises_twice(draft: Draft, choose: Chooser) -> Draft:
    """Divides the law of a sibling twice by what its earlier siblings leave of it."""
    if draft.probs is None or draft.parents is None:
        return draft
    laws = []
    for node, (q, parent) in enumerate(zip(draft.probs, draft.parents, strict=True)):
        taken = [draft.tokens[i] for i in range(node) if draft.parents[i] == parent]
        ids, probs = q.without(*taken).items()
        laws.append(Distribution.on(ids, probs / (1.0 - math.fsum(map(q.prob, taken)))))
    return replace(draft, probs=tuple(laws))


class OneNumberForAll:
    """A generator that verifies a drafted token with the number that drew it."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._last = float(self._random.random())

    def flip(self, prob: float) -> bool:
        return self._last < prob

    def pick(self, law: Distribution) -> int:
        self._last = float(self._random.random())
        ids, probs = law.items()
        return int(ids[min(int(np.searchsorted(probs.cumsum(), self._last, side="right")), len(ids) - 1)])


class BrokenModel(Passing):
    """Keeps the beginning of a chain with its own `truncate`, which the faults below may break."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.caps = replace(model.caps, tree=False, max_leaves=1)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.truncate(length + len(path))


class ShiftedRows(BrokenModel):
    """Takes row i for row i + 1 of a block."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = self.model.eval(tokens, parents)
        return np.stack([rows[max(i - 1, 0)] for i in range(len(rows))])


class Leftover(BrokenModel):
    """Keeps the first of the tokens that it should drop, but reports the shorter length."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._n_left = 0

    @property
    def length(self) -> int:
        return self.model.length - self._n_left

    def truncate(self, length: int) -> None:
        if length >= self.length:
            return
        self._n_left = 0 if length == 0 else self._n_left + 1
        self.model.truncate(length + self._n_left)


class KeepsOneMore(BrokenModel):
    """Keeps the first rejected token of a block."""

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.truncate(min(length + len(path) + 1, self.length))


class Miscounting(Engine):
    """The engine with a target that keeps one token too many."""

    def __init__(self, target: LanguageModel, drafter: Drafter | None = None, *, rule: Rule = Rule.TOKEN) -> None:
        super().__init__(KeepsOneMore(target), drafter, rule=rule)


class KeepsTheSibling(Passing):
    """Keeps another branch where the accepted one has a sibling."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._parents: list[int] = []

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._parents = list(range(-1, len(tokens) - 2) if parents is None else parents)
        return super().eval(tokens, parents)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        self._parents += parents
        return super().grow(tokens, parents)

    def keep(self, length: int, path: Sequence[int]) -> None:
        *above, last = path or (-1,)
        family = [node for node, parent in enumerate(self._parents) if last >= 0 and parent == self._parents[last]]
        super().keep(length, (*above, next((node for node in family if node != last), last)) if path else path)


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken part, and the section of the audit that must catch it. The exactness tests use the same faults."""

    name: str
    section: Section
    parts: Parts
    strategy: str = "draft-simple"  # `lookup` without a draft model
    rule: Rule = Rule.TOKEN
    needs_draft: bool = False  # lookups are rare point masses, which do not always show the fault
    needs_format: bool = False
    needs_tree: bool = False  # the target, and the draft if it is needed, must evaluate trees
    verifier: TokenVerifier | None = None  # the broken verifier of `parts`


def _rule(
    name: str, verifier: TokenVerifier, *, section: Section = "law", rule: Rule = Rule.TOKEN, needs_draft: bool = False
) -> Fault:
    parts = Parts(engine=engine_with(verifier))
    return Fault(name, section, parts, rule=rule, needs_draft=needs_draft, verifier=verifier)


def _tree(fault: Fault) -> Fault:
    return replace(fault, name=f"tree: {fault.name}", strategy="tree", needs_draft=True, needs_tree=True)


def _block(name: str, verifier: TokenVerifier) -> Fault:
    return _rule(name, verifier, rule=Rule.BLOCK, needs_draft=True)


def _drafts(name: str, change: Callable[[Draft, Chooser], Draft]) -> Fault:
    return Fault(name, "law", Parts(drafter=lambda drafter: BrokenDrafter(drafter, change)), needs_draft=True)


def _masks(name: str, section: Section, parts: Parts) -> Fault:
    return Fault(f"format: {name}", section, parts, needs_format=True)


FAULTS = (
    _rule("every drafted token is accepted", AcceptsEverything()),
    _rule("accepts with q/p instead of p/q", InvertedRatio()),
    _rule("rejects one good token in a thousand", TooStrict()),
    _rule("the first correction is drawn from p, not from the residual", CorrectionFromTarget(first_row=True)),
    _rule(
        "a later correction is drawn from p, not from the residual",
        CorrectionFromTarget(first_row=False),
        needs_draft=True,
    ),
    _rule("the residual removes only the rejected token", ResidualWithoutToken(), needs_draft=True),
    _rule("the number that rejects a token draws the correction", ReusedAcceptanceUniform(), needs_draft=True),
    _rule("the number that drafts a token verifies it", ReusedProposalUniform(), needs_draft=True),
    _rule("the bonus token comes from the row before", BonusFromTheRowBefore()),
    _block("block: weights above 1", UnclippedWeight()),
    _block("block: the residual is not weighted", UnweightedResidual()),
    _block("block: a rejected leaf takes its branch with it", LosesTheBranch()),
    _block("block: the weight stays after a rejection", WeightStays()),
    _block("block: a rejection reduces the p of the first row", ResidualOfTheRoot()),
    _tree(_rule("a rejected sibling stays in q", ForgetsRemoval())),
    _tree(_rule("a rejected sibling leaves p as it is", KeepsTarget())),
    _tree(_block("the row of a node is its sibling's", RowOfTheSibling())),
    _rule("match: draws again after a mismatch", MatchRedraws(), rule=Rule.MATCH),
    _drafts("a drawn token is dropped because it is unlikely", drops_unlikely),
    _drafts("q is not the law that was drawn from", claims_another_law),
    _tree(_drafts("siblings are drawn with replacement", draws_with_replacement)),
    _tree(_drafts("q of a sibling is normalised twice", normalises_twice)),
    Fault("penalties do not see the tokens of the draft", "law", Parts(engine=PenaltiesWithoutPath), needs_draft=True),
    _masks("the mask reaches q, not p", "law", Parts(engine=UnmaskedTarget)),
    _masks("the mask comes after the filters", "law", Parts(engine=LateMask)),
    _masks(
        "a rejected draft stays in the state of the format",
        "greedy",
        Parts(constraint=ForgetsRollback, draft=OftenWrong),
    ),
    Fault("one random number drafts and verifies a token", "draws", Parts(choose=OneNumberForAll), needs_draft=True),
    _rule("greedy: every drafted token is accepted", AcceptsEverything(), section="greedy"),
    Fault("greedy: row i is taken for row i+1", "greedy", Parts(target=ShiftedRows), needs_draft=True),
    Fault("a rejected token stays in the target's KV", "kv", Parts(target=Leftover)),
    Fault("a rejected token stays in the draft's KV", "kv", Parts(draft=Leftover), needs_draft=True),
    Fault("the engine keeps one token too many", "kv", Parts(engine=Miscounting)),
    Fault("tree: another branch stays in the target's KV", "kv", Parts(target=KeepsTheSibling), needs_tree=True),
)
