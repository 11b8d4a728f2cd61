"""Every rule of DESIGN 5 broken once. The suite has to catch each of them, or it proves nothing.

A fault is a case that is exact as long as nothing is broken, and the same case with one thing broken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pytest

from specllama import sampling
from specllama.distribution import Distribution
from specllama.drafters.model import ModelDrafter
from specllama.engine import Engine
from specllama.errors import NumericsError, SpecllamaError
from specllama.events import Event, Finished
from specllama.sampling import RandomChooser, SamplingParams
from specllama.stats import SpecStats
from specllama.types import Chooser, Draft, FloatArray, LanguageModel, Rule, Stopper
from specllama.verification import verify
from tests.enumeration import tv
from tests.exact.harness import GREEDY, PLAIN, PROMPT, Pair, random_pair
from tests.exact.loop import P, Q, Verifier, drawn_trees, emitted_law, plain_law
from tests.exact.reference import token_law
from tests.exact.verifiers import BlockVerifier, MatchVerifier, TokenVerifier
from tests.fakes import (
    FakeModel,
    FakeStopper,
    History,
    Laws,
    Probs,
    RandomTable,
    Script,
    always,
    dense,
    drawn_chain,
    points,
    random_laws,
    replaced,
)

Law: TypeAlias = Mapping[Hashable, float]
Install: TypeAlias = Callable[[pytest.MonkeyPatch], None]

VISIBLE = 1e-6  # a bias this large has to be seen


@dataclass(frozen=True)
class Case:
    """An enumerated law and what it must be."""

    found: Callable[[], Law]
    expected: Callable[[], Law]

    def verdict(self) -> str:
        """What is wrong with the law that was found, or '' where nothing is."""
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
class Fault:
    """One rule, broken: `broken` is the case that shows it, `install` breaks it where the case itself does not."""

    rule: str
    healthy: Case
    broken: Case
    install: Install = lambda monkeypatch: None


# ----------------------------------------------------------------------------------------------- verification alone


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


# ------------------------------------------------------------------------------------------------- the whole engine


def engine_case(pair: Pair, params: SamplingParams, n_tokens: int = 3, stops: Sequence[History] = ()) -> Case:
    """The law of the whole answer, of the engine and of the reference."""
    return Case(
        lambda: pair.engine_law(params, n_tokens, stops=stops), lambda: pair.plain_law(params, n_tokens, stops=stops)
    )


def params_of(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **changes})


def patch_target_law(change: Callable[..., Distribution]) -> Install:
    """Let the rows of the target be sampled by `change(law, logits, history, params)`."""
    law = sampling.law

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampling, "law", lambda *args: change(law, *args))

    return install


LawFunction: TypeAlias = Callable[[FloatArray, Sequence[int], SamplingParams], Distribution]


def wider_window(law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams) -> Distribution:
    return law(logits, history, dataclasses.replace(params, repeat_last_n=params.repeat_last_n - 1))


def temperature_first(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    return law(logits / params.temperature, history, dataclasses.replace(params, temperature=1.0))


def top_p_before_top_k(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    kept = law(logits, history, dataclasses.replace(params, top_k=0)).support()
    row = np.full(logits.shape, -np.inf)
    row[kept] = logits[kept]
    return law(row, history, dataclasses.replace(params, top_p=1.0))


def bias_after_penalties(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    """Undo and redo: the bias is given so that after the penalty's factor it counts in full."""
    seen = set(params.window(history))
    bias = {
        token: value * params.repeat_penalty if token in seen else value for token, value in params.logit_bias.items()
    }
    return law(logits, history, dataclasses.replace(params, logit_bias=bias))


def ties_to_the_highest(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    return Distribution.point(len(logits) - 1 - int(logits[::-1].argmax()))


def another_cut_off(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / params.temperature)
    return Distribution.dense(weights / weights.sum())


def cut_to_the_draft(
    law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams
) -> Distribution:
    return law(logits[:2], history, params)


def nan_to_number(law: LawFunction, logits: FloatArray, history: Sequence[int], params: SamplingParams) -> Distribution:
    return law(np.nan_to_num(logits, nan=0.0), history, params)


class PathlessRows(sampling.RowLaws):
    """Penalties that look at the committed tokens only."""

    def __init__(self, rows: FloatArray, tokens: Sequence[int], draft: Draft, params: SamplingParams) -> None:
        super().__init__(rows, tokens, draft, params)
        self._own = (rows, tuple(tokens), params)

    def __getitem__(self, row: int) -> Distribution:  # type: ignore[override]
        rows, tokens, params = self._own
        return sampling.law(rows[row], tokens, params)


class ShiftedRows(sampling.RowLaws):
    """Row i taken for row i - 1 behind the first."""

    def __getitem__(self, row: int) -> Distribution:  # type: ignore[override]
        return super().__getitem__(max(row - 1, 0))


def patch_rows(rows: type[sampling.RowLaws]) -> Install:
    return lambda monkeypatch: monkeypatch.setattr("specllama.engine.RowLaws", rows)


ProposeChange: TypeAlias = Callable[[ModelDrafter, Draft, History, SamplingParams], Draft]


def patch_drafts(change: ProposeChange) -> Install:
    """Let every draft pass through `change` on its way to the engine."""
    propose = ModelDrafter.propose

    def changed(
        self: ModelDrafter, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser
    ) -> Draft:
        return change(self, propose(self, tokens, limit, params, choose), tuple(tokens), params)

    return lambda monkeypatch: monkeypatch.setattr(ModelDrafter, "propose", changed)


def laws_of(drafter: ModelDrafter, draft: Draft, tokens: History, params: SamplingParams) -> Draft:
    """`draft` with the laws that its model has under `params`, whatever was drawn from."""
    model = drafter.model
    assert isinstance(model, FakeModel)
    laws = []
    for i in range(len(draft.tokens)):
        history = (*tokens, *draft.tokens[:i])
        law = token_law(model.table(history).tolist(), history, params)
        laws.append(Distribution.on(list(law), list(law.values())))
    return Draft(draft.tokens, tuple(laws))


def drop_unlikely(drafter: ModelDrafter, draft: Draft, tokens: History, params: SamplingParams) -> Draft:
    """Cut at the first drawn token whose q is below .4."""
    assert draft.probs is not None
    for i, (token, law) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
        if law.prob(token) < 0.4:
            return Draft(draft.tokens[:i], draft.probs[:i])
    return draft


def ignore_limit(drafter: ModelDrafter, draft: Draft, tokens: History, params: SamplingParams) -> Draft:
    return Draft((*draft.tokens, 0), (*(draft.probs or ()), Distribution.point(0)))


def patch_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is not told how many ids the target knows."""
    init = ModelDrafter.__init__

    def forgetful(self: ModelDrafter, model: LanguageModel, **settings: object) -> None:
        init(self, model, **{**settings, "vocab_size": None})  # type: ignore[arg-type]

    monkeypatch.setattr(ModelDrafter, "__init__", forgetful)


Seen: TypeAlias = tuple[int, bool]


def patch_end_test(change: Callable[[Engine, Sequence[int], Stopper | None], Seen]) -> Install:
    return lambda monkeypatch: monkeypatch.setattr(Engine, "_n_seen", change)


def only_the_last_token(engine: Engine, block: Sequence[int], stopper: Stopper | None) -> Seen:
    ended = block[-1] in engine.target.end_tokens
    for token in block:
        stopped = stopper is not None and stopper.push(token)
    return len(block), ended or stopped


def only_drafted_tokens(engine: Engine, block: Sequence[int], stopper: Stopper | None) -> Seen:
    for i, token in enumerate(block[:-1]):
        if token in engine.target.end_tokens:
            return i + 1, True
    return len(block), False


def stops_forgotten_between_blocks(engine: Engine, block: Sequence[int], stopper: Stopper | None) -> Seen:
    assert isinstance(stopper, FakeStopper)
    stopper.tokens.clear()
    for i, token in enumerate(block):
        if stopper.push(token):
            return i + 1, True
    return len(block), False


def length_before_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that stops on its last allowed token is called cut."""
    generate = Engine.generate

    def changed(self: Engine, *args: object, max_tokens: int, **settings: object) -> object:
        for event in generate(self, *args, max_tokens=max_tokens, **settings):  # type: ignore[arg-type]
            yield cut(event, max_tokens)

    def cut(event: Event, max_tokens: int) -> Event:
        at_cap = isinstance(event, Finished) and event.stats.n_emitted == max_tokens
        return dataclasses.replace(event, reason="length") if at_cap else event  # type: ignore[call-arg]

    monkeypatch.setattr(Engine, "generate", changed)


def patch_keep(change: Callable[[Sequence[int]], Sequence[int]]) -> Install:
    keep = FakeModel.keep
    return lambda monkeypatch: monkeypatch.setattr(
        FakeModel, "keep", lambda self, length, path: keep(self, length, change(path))
    )


def restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_hold", lambda self, tokens: None)


def observe_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelDrafter, "observe", lambda self, seen: None)


def hole_in_the_draft_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last drafted token of an accepted block is never fed to the draft."""
    feed = FakeModel.feed

    def holed(self: FakeModel, tokens: Sequence[int]) -> None:
        if len(tokens) != 1:
            feed(self, tokens)

    monkeypatch.setattr(FakeModel, "feed", holed)


def stale_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads the row of the step before, which the next eval has overwritten."""
    evaluate = ModelDrafter._eval
    rows: dict[int, FloatArray] = {}

    def stale(self: ModelDrafter, token: int) -> FloatArray:
        row = evaluate(self, token)
        before = rows.get(id(self), row)
        rows[id(self)] = row
        return before

    monkeypatch.setattr(ModelDrafter, "_eval", stale)


def bonus_counts_as_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SpecStats.record
    monkeypatch.setattr(
        SpecStats,
        "record",
        lambda self, n_drafted, n_accepted, rejected: record(self, n_drafted + 1, n_accepted + 1, rejected),
    )


def abandoned_case() -> Case:
    """One token of a longer block read, then the reader walks away; what the KV holds then, and what it must hold."""

    table = RandomTable(3, 91)
    pair = random_pair(target=table, draft=table)

    def found() -> Law:
        rig = pair.rig()
        with closing(rig.run(PROMPT, GREEDY, RandomChooser(0), 6)) as run:
            for _ in run:
                if rig.emitted:
                    break
        return {rig.target.tokens: 1.0}

    return Case(found, lambda: {PROMPT: 1.0})


def nan_case(pair: Pair) -> Case:
    """Does a NaN come out as a named error?"""

    def found() -> Law:
        try:
            pair.rig().answer(PROMPT, PLAIN, RandomChooser(0), 3)
        except NumericsError:
            return {"refused": 1.0}
        return {"swallowed": 1.0}

    return Case(found, lambda: {"refused": 1.0})


def self_draft_case() -> Case:
    """Target as its own draft, ten rounds of three: (drafted, accepted)."""
    table = RandomTable(3, 80)
    pair = random_pair(target=table, draft=table, n_max=3)

    def found() -> Law:
        rig = pair.rig()
        rig.answer(PROMPT, GREEDY, RandomChooser(0), 40)
        return {(rig.finished.stats.n_drafted, rig.finished.stats.n_accepted): 1.0}

    return Case(found, lambda: {(30, 30): 1.0})


def engine_fault(rule: str, case: Case, install: Install) -> Fault:
    return Fault(rule, case, case, install)


PAIR = random_pair(81)
REPEAT = params_of(repeat_penalty=1.7, repeat_last_n=2)
ENDS = random_pair(82, end_tokens=frozenset({1, 2}))
TIED = random_pair(target=RandomTable(3, 83, ties=True, spread=0.8), draft=RandomTable(3, 84))
SHARP = params_of(temperature=1e-7)
NEAR_TIE = random_pair(target=lambda history: np.array([1.0, 1.0 + 2**-23, 0.0], dtype=np.float32))
STOPS = [(1, 0), (0, 0)]
TWO_TOKENS = random_pair(85, n_vocab=2)

ENGINE_FAULTS = [
    engine_fault("penalties follow the path", engine_case(PAIR, REPEAT), patch_rows(PathlessRows)),
    engine_fault("row i+1 follows node i", engine_case(PAIR, PLAIN), patch_rows(ShiftedRows)),
    engine_fault("penalties look at the last N", engine_case(PAIR, REPEAT), patch_target_law(wider_window)),
    engine_fault(
        "temperature comes last",
        engine_case(PAIR, params_of(temperature=1.6, top_p=0.75)),
        patch_target_law(temperature_first),
    ),
    engine_fault(
        "top-k before top-p", engine_case(PAIR, params_of(top_k=2, top_p=0.55)), patch_target_law(top_p_before_top_k)
    ),
    engine_fault(
        "bias before penalties",
        engine_case(PAIR, params_of(repeat_penalty=1.7, repeat_last_n=2, logit_bias={0: 3.0})),
        patch_target_law(bias_after_penalties),
    ),
    engine_fault("ties go to the lowest id", engine_case(TIED, GREEDY), patch_target_law(ties_to_the_highest)),
    engine_fault("one cut-off decides greedy", engine_case(NEAR_TIE, SHARP), patch_target_law(another_cut_off)),
    engine_fault(
        "q is extended, p is never cut",
        engine_case(random_pair(86, n_draft_vocab=2), PLAIN),
        patch_target_law(cut_to_the_draft),
    ),
    engine_fault(
        "padding ids are masked before the draw",
        engine_case(random_pair(87, n_draft_vocab=5), PLAIN),
        patch_vocabulary,
    ),
    engine_fault(
        "NaN logits are an error",
        nan_case(random_pair(target=replaced(RandomTable(3, 88), len(PROMPT), math.nan))),
        patch_target_law(nan_to_number),
    ),
    engine_fault(
        "q is the law of the draft's temperature",
        engine_case(random_pair(89, draft_temperature=0.3), PLAIN),
        patch_drafts(laws_of),
    ),
    engine_fault(
        "a greedy draft has no dense q",
        engine_case(random_pair(90, draft_temperature=0.0), PLAIN),
        patch_drafts(laws_of),
    ),
    engine_fault("no drawn token is dropped", engine_case(PAIR, PLAIN), patch_drafts(drop_unlikely)),
    engine_fault("limits are clipped before drafting", engine_case(PAIR, PLAIN), patch_drafts(ignore_limit)),
    engine_fault("an end token inside a block ends it", engine_case(ENDS, PLAIN), patch_end_test(only_the_last_token)),
    engine_fault("every token of a block is tested", engine_case(ENDS, PLAIN), patch_end_test(only_drafted_tokens)),
    Fault(
        "all end tokens are known",
        engine_case(ENDS, PLAIN),
        Case(engine_case(random_pair(82, end_tokens=frozenset({1})), PLAIN).found, engine_case(ENDS, PLAIN).expected),
    ),
    engine_fault(
        "stops are found inside a block",
        engine_case(TWO_TOKENS, PLAIN, 4, STOPS),
        patch_end_test(only_the_last_token),
    ),
    engine_fault(
        "stops are found across two blocks",
        engine_case(TWO_TOKENS, PLAIN, 4, STOPS),
        patch_end_test(stops_forgotten_between_blocks),
    ),
    engine_fault("stop is checked before the length cap", engine_case(TWO_TOKENS, PLAIN, 4, STOPS), length_before_stop),
    engine_fault("keep keeps the whole path", engine_case(PAIR, PLAIN), patch_keep(lambda path: path[:-1])),
    engine_fault("keep drops what was rejected", engine_case(PAIR, PLAIN), patch_keep(lambda path: (*path, len(path)))),
    engine_fault("an abandoned answer leaves the KV in order", abandoned_case(), restore_nothing),
    engine_fault("the draft's cache stays within what is committed", engine_case(PAIR, PLAIN), observe_nothing),
    engine_fault("no hole in the draft's cache", self_draft_case(), hole_in_the_draft_cache),
    engine_fault("rows are read before the next eval", engine_case(PAIR, PLAIN), stale_rows),
    engine_fault("the bonus token is no accepted draft", engine_case(PAIR, PLAIN), bonus_counts_as_accepted),
]
