"""Rules of verification, broken one by one, in the smallest decoding loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule
from specllama.core.verification import verify
from tests.exact.faults import Case, Fault
from tests.exact.loop import P, Q, Verifier, drawn_trees, emitted_law, plain_law
from tests.exact.verifiers import BlockVerifier, MatchVerifier, TokenVerifier
from tests.fakes import (
    History,
    Laws,
    Probs,
    Script,
    always,
    dense,
    drawn_chain,
    points,
    random_laws,
)


def loop_case(
    verifier: Verifier,
    *,
    p: Laws | None = None,
    script: Script | None = None,
    n_tokens: int = 3,
    rule: Rule = Rule.TOKEN,
    closed: bool = False,
) -> Case:
    """The smallest decoding loop with `verifier`; chains of two from random tables unless said otherwise."""
    target = p or random_laws(3, 70)
    drafted = script or drawn_chain(random_laws(3, 71), 2)
    return Case(
        lambda: emitted_law(target, drafted, rule, n_tokens, verifier, closed=closed),
        lambda: plain_law(target, n_tokens),
    )


def one_token(verifier: Verifier, script: Script | None = None) -> Case:
    """One token of DESIGN 5's example, drafted from its q."""
    return loop_case(verifier, p=always(P), script=script or drawn_chain(always(Q), 1), n_tokens=1)


class InvertedRatio(TokenVerifier):
    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return min(1.0, q[token] / p[token])


class TooStrict(TokenVerifier):
    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        return 0.999 * min(1.0, p[token] / q[token])


class RedrawFromTarget(TokenVerifier):
    """Instead of the residual: after a rejection in the first row, or in a later one."""

    def __init__(self, *, first_row: bool) -> None:
        self._first_row = first_row

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        return p if (depth == 0) == self._first_row else super().residual(p, q, token, depth)


class ResidualWithoutToken(TokenVerifier):
    """p with the rejected token taken out: right for a point mass only."""

    def residual(self, p: Probs, q: Probs, token: int, depth: int) -> Probs:
        rest = 1.0 - p[token]
        return tuple(0.0 if other == token or not rest else prob / rest for other, prob in enumerate(p))


def within(law: Probs, low: float, high: float) -> Probs:
    """The law of what inversion draws from `law` with a uniform known to lie in [low, high)."""
    upto = np.cumsum(law)
    shares = [max(min(end, high) - max(end - prob, low), 0.0) for prob, end in zip(law, upto, strict=True)]
    total = math.fsum(shares)
    return tuple(share / total for share in shares)


class ReusedAcceptanceUniform(TokenVerifier):
    """The uniform that rejected, u >= p/q, also draws the correction."""

    def __init__(self) -> None:
        self._rejected_at = 0.0

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        self._rejected_at = super().accept_prob(p, q, token)
        return self._rejected_at

    def correct(self, p: Probs, q: Probs, token: int, depth: int, choose: Chooser) -> int:
        return choose.pick(dense(within(p, self._rejected_at, 1.0)))


class ReusedProposalUniform(TokenVerifier):
    """The uniform that drew the token from q also decides on it."""

    def accept_prob(self, p: Probs, q: Probs, token: int) -> float:
        low = math.fsum(q[:token])
        return min(max(super().accept_prob(p, q, token) - low, 0.0) / q[token], 1.0)


class BonusFromTheRowBefore(TokenVerifier):
    def bonus(self, p: Sequence[Distribution], row: int, choose: Chooser) -> int:
        return super().bonus(p, max(row - 1, 0), choose)


class KeepsSiblingInDraftLaw(TokenVerifier):
    def next_sibling_law(self, q: Probs, rejected: int) -> Probs:
        return q


class KeepsTargetForSiblings(TokenVerifier):
    def next_sibling_target(self, before: Probs, residual: Probs) -> Probs:
        return before


class UnclippedWeight(BlockVerifier):
    def weight(self, before: float, p: Probs, q: Probs, token: int) -> float:
        return before * p[token] / q[token]


class UnweightedResidual(BlockVerifier):
    def weighted_residual(self, weight: float, p: Probs, q: Probs) -> Probs:
        return super().weighted_residual(1.0, p, q)


class BlockStopsAtFirstFailure(BlockVerifier):
    stops_at_first_failure = True


class TokenRatioInBlocks(BlockVerifier):
    def pass_prob(self, weight: float, p: Probs, q: Probs) -> float:
        return weight


class MatchRedraws(MatchVerifier):
    def redraw(self, drawn: int, p: Probs, choose: Chooser) -> int:
        return choose.pick(dense(p))


def drops_low_q(tokens: History, limit: int, choose: Chooser) -> Draft:
    """Draws, then drops the token because its q is below .3: the length is decided after the draw."""
    draft = drawn_chain(always(Q), 1)(tokens, limit, choose)
    return Draft() if Q[draft.tokens[0]] < 0.3 else draft


def with_laws(script: Script, law: Probs) -> Script:
    """`script`, handing over `law` as q whatever the tokens were drawn from."""

    def changed(tokens: History, limit: int, choose: Chooser) -> Draft:
        draft = script(tokens, limit, choose)
        return Draft(draft.tokens, tuple(dense(law) for _ in draft.tokens), draft.parents)

    return changed


SOFT = (0.6, 0.3, 0.1)  # the q of FIELD 1
TOP_TWO = (0.0, 0.25 / 0.85, 0.6 / 0.85)  # Q after top-k = 2
IMPOSSIBLE: Laws = always((0.6, 0.4, 0.0))  # a target that never says token 2
SIBLINGS = drawn_trees(always(Q), 2)


def loop_fault(rule: str, right: Verifier, wrong: Verifier, **case: object) -> Fault:
    """`wrong` instead of `right`, in the same loop."""
    return Fault(rule, loop_case(right, **case), loop_case(wrong, **case))  # type: ignore[arg-type]


VERIFICATION_FAULTS = [
    Fault(
        "accept with u < p/q, never <=",
        loop_case(verify, p=IMPOSSIBLE, script=drawn_chain(always(Q), 1), n_tokens=1),
        loop_case(verify, p=IMPOSSIBLE, script=drawn_chain(always(Q), 1), n_tokens=1, closed=True),
    ),
    loop_fault("accept with p/q, not q/p", TokenVerifier(), InvertedRatio()),
    loop_fault("accepted and residual mass together are p", TokenVerifier(), TooStrict()),
    loop_fault("residual after a rejection in the first row", TokenVerifier(), RedrawFromTarget(first_row=True)),
    loop_fault("residual after a rejection in a later row", TokenVerifier(), RedrawFromTarget(first_row=False)),
    loop_fault("the residual uses the whole row of q", TokenVerifier(), ResidualWithoutToken()),
    loop_fault("a fresh draw for the correction", TokenVerifier(), ReusedAcceptanceUniform()),
    loop_fault("proposal and acceptance draw apart", TokenVerifier(), ReusedProposalUniform()),
    loop_fault("the bonus token comes from the row behind the last", TokenVerifier(), BonusFromTheRowBefore()),
    loop_fault(
        "a rejected sibling leaves q",
        TokenVerifier(),
        KeepsSiblingInDraftLaw(),
        script=SIBLINGS,
        p=always(P),
        n_tokens=1,
    ),
    loop_fault(
        "a rejected sibling leaves the residual to the next",
        TokenVerifier(),
        KeepsTargetForSiblings(),
        script=SIBLINGS,
        p=always(P),
        n_tokens=1,
    ),
    loop_fault("block: weights stay at 1 or below", BlockVerifier(), UnclippedWeight()),
    loop_fault("block: the residual is weighted", BlockVerifier(), UnweightedResidual()),
    loop_fault("block: independent tests, no stop at the first failure", BlockVerifier(), BlockStopsAtFirstFailure()),
    loop_fault("block: h, not w, before the last token", BlockVerifier(), TokenRatioInBlocks()),
    loop_fault("match: the draw that differs is the correction", MatchVerifier(), MatchRedraws(), n_tokens=2),
    Fault(
        "lengths are decided before the draw",
        one_token(verify),
        one_token(verify, drops_low_q),
    ),
    Fault(
        "an argmax draft is a point mass",
        one_token(verify, points(lambda tokens: (0,))),
        one_token(verify, with_laws(points(lambda tokens: (0,)), SOFT)),
    ),
    Fault(
        "q is the law after top-k",
        one_token(verify, drawn_chain(always(TOP_TWO), 1)),
        one_token(verify, with_laws(drawn_chain(always(TOP_TWO), 1), Q)),
    ),
    Fault(
        "q of a drafted token is above zero",
        one_token(verify),
        one_token(verify, with_laws(drawn_chain(always(Q), 1), TOP_TWO)),
    ),
    Fault(
        "q sums to one",
        one_token(verify),
        one_token(verify, with_laws(drawn_chain(always(Q), 1), (0.1, 0.2, 0.5))),
    ),
]
