"""Rules of sampling, drafting, the loop and its caches, broken one by one in the whole engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest

from specllama.audit.faults import FAULTS
from specllama.base.errors import NumericsError
from specllama.core import sampling
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.row_laws import RowLaws
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Chooser, Draft, LanguageModel, Stopper
from specllama.drafters.model import ModelDrafter
from tests.exact.faults import Case, Install, Law, SeededFault
from tests.exact.harness import GREEDY, PLAIN, PROMPT, REPEAT, Pair, params_of, random_pair
from tests.exact.reference import token_law
from tests.fakes import FakeModel, FakeStopper, History, RandomTable, replaced


def engine_case(pair: Pair, params: SamplingParams, n_tokens: int = 3, stops: Sequence[History] = ()) -> Case:
    """The law of the whole answer, of the engine and of the reference."""
    return Case(
        lambda: pair.engine_law(params, n_tokens, stops=stops), lambda: pair.plain_law(params, n_tokens, stops=stops)
    )


def patch_target_law(change: Callable[..., Distribution]) -> Install:
    """Replace the law of the target's rows by `change(law, logits, history, params)`."""
    law = sampling.law

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampling, "law", lambda *args: change(law, *args))

    return install


Row: TypeAlias = FloatArray
Ids: TypeAlias = Sequence[int]
LawFunction: TypeAlias = Callable[[Row, Ids, SamplingParams], Distribution]


def wider_window(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    return law(logits, history, replace(params, repeat_last_n=params.repeat_last_n - 1))


def temperature_first(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    return law(logits / params.temperature, history, replace(params, temperature=1.0))


def top_p_before_top_k(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    kept = law(logits, history, replace(params, top_k=0)).support()
    row = np.full(logits.shape, -np.inf)
    row[kept] = logits[kept]
    return law(row, history, replace(params, top_p=1.0))


def bias_after_penalties(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    """Undo and redo: the bias is given so that after the penalty's factor it counts in full."""
    seen = set(params.window(history))
    bias = {
        token: value * params.repeat_penalty if token in seen else value for token, value in params.logit_bias.items()
    }
    return law(logits, history, replace(params, logit_bias=bias))


def ties_to_the_highest(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    return Distribution.point(len(logits) - 1 - int(logits[::-1].argmax()))


def another_cut_off(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / params.temperature)
    return Distribution.dense(weights / weights.sum())


def cut_to_the_draft(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    return law(logits[:2], history, params)


def nan_to_number(law: LawFunction, logits: Row, history: Ids, params: SamplingParams) -> Distribution:
    return law(np.nan_to_num(logits, nan=0.0), history, params)


class PathlessRows(RowLaws):
    """Penalties that look at the committed tokens only."""

    def _path(self, node: int) -> list[int]:
        return []


def patch_rows(rows: type[RowLaws]) -> Install:
    return lambda monkeypatch: monkeypatch.setattr("specllama.core.engine.RowLaws", rows)


ProposeChange: TypeAlias = Callable[[ModelDrafter, Draft, History, SamplingParams], Draft]


def patch_drafts(change: ProposeChange) -> Install:
    """Let every draft pass through `change` on its way to the engine."""
    propose = ModelDrafter.propose

    def changed(self: ModelDrafter, tokens: Ids, limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        return change(self, propose(self, tokens, limit, params, choose), tuple(tokens), params)

    return lambda monkeypatch: monkeypatch.setattr(ModelDrafter, "propose", changed)


def laws_of(drafter: ModelDrafter, draft: Draft, tokens: History, params: SamplingParams) -> Draft:
    """`draft` with the laws of its model under `params` instead of those it was drawn from."""
    model = drafter.model
    assert isinstance(model, FakeModel)
    laws = []
    for i in range(len(draft.tokens)):
        history = (*tokens, *draft.tokens[:i])
        law = token_law(model.table(history).tolist(), history, params)
        laws.append(Distribution.on(list(law), list(law.values())))
    return Draft(draft.tokens, tuple(laws))


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
        return replace(event, reason="length") if at_cap else event  # type: ignore[call-arg]

    monkeypatch.setattr(Engine, "generate", changed)


def keeps_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = FakeModel.keep
    monkeypatch.setattr(FakeModel, "keep", lambda self, length, path: keep(self, length, path[:-1]))


def restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptPrefix, "hold", lambda self, tokens: None)


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
    """The reader leaves after one token of a longer block; what the KV holds then, and what it must hold."""
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


def engine_fault(rule: str, case: Case, install: Install) -> SeededFault:
    return SeededFault(rule, case, case, install)


PAIR = random_pair(81)
ENDS = random_pair(82, end_tokens=frozenset({1, 2}))
TIED = random_pair(target=RandomTable(3, 83, ties=True, spread=0.8), draft=RandomTable(3, 84))
SHARP = params_of(temperature=1e-7)
NEAR_TIE = random_pair(target=lambda history: np.array([1.0, 1.0 + 2**-23, 0.0], dtype=np.float32))
STOPS = [(1, 0), (0, 0)]
TWO_TOKENS = random_pair(85, n_vocab=2)

ENGINE_FAULTS = [
    # The audit's catalogue, but for verification, which has a loop of its own, and for draws that depend on each other,
    # which enumeration takes to be independent.
    *(
        SeededFault(fault.name, engine_case(PAIR, PLAIN), engine_case(replace(PAIR, parts=fault.parts), PLAIN))
        for fault in FAULTS
        if fault.verifier is None and fault.section != "draws"
    ),
    engine_fault("penalties follow the path", engine_case(PAIR, REPEAT), patch_rows(PathlessRows)),
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
    engine_fault("limits are clipped before drafting", engine_case(PAIR, PLAIN), patch_drafts(ignore_limit)),
    engine_fault("every token of a block is tested", engine_case(ENDS, PLAIN), patch_end_test(only_drafted_tokens)),
    SeededFault(
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
    engine_fault("keep keeps the whole path", engine_case(PAIR, PLAIN), keeps_too_little),
    engine_fault("an abandoned answer leaves the KV in order", abandoned_case(), restore_nothing),
    engine_fault("the draft's cache stays within what is committed", engine_case(PAIR, PLAIN), observe_nothing),
    engine_fault("no hole in the draft's cache", self_draft_case(), hole_in_the_draft_cache),
    engine_fault("rows are read before the next eval", engine_case(PAIR, PLAIN), stale_rows),
    engine_fault("the bonus token is no accepted draft", engine_case(PAIR, PLAIN), bonus_counts_as_accepted),
]
