"""Seeded faults: a case that is exact, and the same case with one rule broken; test_faults.py checks that it shows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

from specllama.audit.faults import FAULTS, Fault
from specllama.audit.rules import RULES, Probs, TokenVerifier
from specllama.base.errors import SpecllamaError
from specllama.core.types import Chooser, Draft, Rule
from specllama.core.verification import verify
from tests.enumeration import tv
from tests.exact.harness import REPEAT, Pair, random_pair
from tests.exact.loop import P, Q, Verifier, drawn_trees, emitted_law, plain_law
from tests.fakes import History, Laws, Script, always, dense, drawn_chain, points, random_laws

Law: TypeAlias = Mapping[Hashable, float]

VISIBLE = 1e-6  # a bias this large has to be seen


@dataclass(frozen=True)
class Case:
    """An enumerated law and the expected one."""

    found: Callable[[], Law]
    expected: Callable[[], Law]

    @cached_property
    def verdict(self) -> str:
        """What is wrong with the law that was found; '' = nothing. Many faults share their healthy case."""
        try:
            found = self.found()
        except (SpecllamaError, AssertionError, ValueError) as error:
            return f"raises {type(error).__name__}"
        expected = self.expected()
        if found.keys() - expected.keys():
            return "says what is impossible"
        distance = tv(found, expected)
        return f"TV {distance:.3g}" if distance > VISIBLE else ""


@dataclass(frozen=True)
class SeededFault:
    """One broken rule."""

    name: str
    healthy: Case
    broken: Case


TARGET, DRAFTED = random_laws(3, 70), drawn_chain(random_laws(3, 71), 2)


@cache
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
    target = p or TARGET
    drafted = script or DRAFTED
    return Case(
        lambda: emitted_law(target, drafted, rule, n_tokens, verifier, closed=closed),
        lambda: plain_law(target, n_tokens),
    )


def one_token(verifier: Verifier, script: Script | None = None) -> Case:
    """One token of the worked example of docs/design.md, drafted from its q."""
    return loop_case(verifier, p=always(P), script=script or drawn_chain(always(Q), 1), n_tokens=1)


class NormalisesTwice(TokenVerifier):
    """Divides q twice by what the earlier siblings leave of it."""

    def law_after(self, q: Probs, sibling: int) -> Probs:
        left = 1.0 - q.get(sibling, 0.0)
        return {token: prob / left for token, prob in super().law_after(q, sibling).items()} if left > 0.0 else q


def drops_low_q(tokens: History, limit: int, choose: Chooser) -> Draft:
    """Draws, then drops the token because its q is below .3: the length is decided after the draw."""
    draft = drawn_chain(always(Q), 1)(tokens, limit, choose)
    return Draft() if Q[draft.tokens[0]] < 0.3 else draft


def with_laws(script: Script, law: Sequence[float]) -> Script:
    """`script`, with `law` as q instead of the law that the tokens were drawn from."""

    def changed(tokens: History, limit: int, choose: Chooser) -> Draft:
        draft = script(tokens, limit, choose)
        return Draft(draft.tokens, tuple(dense(law) for _ in draft.tokens), draft.parents)

    return changed


SOFT = (0.6, 0.3, 0.1)  # a soft law beside an argmax draft
TOP_TWO = (0.0, 0.25 / 0.85, 0.6 / 0.85)  # Q after top-k = 2
IMPOSSIBLE: Laws = always((0.6, 0.4, 0.0))  # a target that never says token 2
# p after the rejection of token 2 has two tokens and is not below q, whichever mistake is made with q.
SIBLINGS = {"script": drawn_trees(always((0.2, 0.28, 0.52)), 2), "p": always(P), "n_tokens": 2}
BRANCHES = {"script": drawn_trees(random_laws(3, 74), 2, 1), "n_tokens": 2}


PAIR = random_pair(81)
TREES = replace(PAIR, tree=(-1, -1, 0))


@cache
def engine_case(pair: Pair) -> Case:
    """The law of the whole answer, of the engine and of the reference."""
    return Case(lambda: pair.engine_law(REPEAT, 3), lambda: pair.plain_law(REPEAT, 3))


def loop_fault(name: str, wrong: Verifier, rule: Rule = Rule.TOKEN, **case: object) -> SeededFault:
    """`wrong` instead of the rule, in the same loop."""
    return SeededFault(name, loop_case(RULES[rule], **case), loop_case(wrong, **case))  # type: ignore[arg-type]


def by_rule(fault: Fault) -> bool:
    """Is it a fault of a verification alone?"""
    return fault.verifier is not None and fault.section == "law"


def drafts_for(fault: Fault) -> dict[str, object]:
    """The drafts that show it."""
    if fault.needs_tree:
        return SIBLINGS if fault.rule is Rule.TOKEN else BRANCHES
    return {"n_tokens": 2 if fault.rule is Rule.MATCH else 3}  # matching draws at every row, so its branches multiply


SEEDED = [
    # The catalogue of the audit: each rule of verification.
    *(loop_fault(fault.name, fault.verifier, fault.rule, **drafts_for(fault)) for fault in FAULTS if by_rule(fault)),
    *(
        loop_fault(f"on a tree, {fault.name}", fault.verifier, fault.rule, **BRANCHES)
        for fault in FAULTS
        if by_rule(fault) and fault.rule is Rule.BLOCK and not fault.needs_tree
    ),
    # What an audit cannot see: it draws never at the edge of a probability, and from a draft that knows its law.
    SeededFault(
        "accept with u < p/q, never <=",
        loop_case(verify, p=IMPOSSIBLE, script=drawn_chain(always(Q), 1), n_tokens=1),
        loop_case(verify, p=IMPOSSIBLE, script=drawn_chain(always(Q), 1), n_tokens=1, closed=True),
    ),
    loop_fault("q of a sibling is normalised once", NormalisesTwice(), **SIBLINGS),
    SeededFault(
        "lengths are decided before the draw",
        one_token(verify),
        one_token(verify, drops_low_q),
    ),
    SeededFault(
        "an argmax draft is a point mass",
        one_token(verify, points(lambda tokens: (0,))),
        one_token(verify, with_laws(points(lambda tokens: (0,)), SOFT)),
    ),
    SeededFault(
        "q is the law after top-k",
        one_token(verify, drawn_chain(always(TOP_TWO), 1)),
        one_token(verify, with_laws(drawn_chain(always(TOP_TWO), 1), Q)),
    ),
    SeededFault(
        "q of a drafted token is above zero",
        one_token(verify),
        one_token(verify, with_laws(drawn_chain(always(Q), 1), TOP_TWO)),
    ),
    SeededFault(
        "q sums to one",
        one_token(verify),
        one_token(verify, with_laws(drawn_chain(always(Q), 1), (0.1, 0.2, 0.5))),
    ),
    # The rest of the audit's catalogue in the whole engine, but for draws that depend on each other, which enumeration
    # takes to be independent.
    *(
        SeededFault(fault.name, engine_case(pair), engine_case(replace(pair, parts=fault.parts)))
        for fault, pair in ((fault, TREES if fault.needs_tree else PAIR) for fault in FAULTS)
        if fault.verifier is None and fault.section != "draws" and not fault.needs_format
    ),
]
