"""Traces of what a draft is worth, and their replay through costs."""

from __future__ import annotations

import pytest

from specllama.core.engine import Engine
from specllama.core.events import StepEvent
from specllama.core.sampling import SamplingParams
from specllama.core.stats import expected_tokens
from specllama.core.types import Caps, Chooser
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import DraftLength
from specllama.tuning.traces import Trace, answer, best_length, judged
from tests.enumeration import law_of
from tests.exact.translating import WatchedDraft
from tests.fakes import FakeModel, RandomTable, random_laws, table_of

FLAT = CostProfile(verify=((1, 1.0), (2, 1.0), (9, 1.0)), draft=((1, 0.1), (2, 0.1)))
STEEP = CostProfile(verify=((1, 1.0), (2, 2.0), (9, 9.0)), draft=((1, 0.7), (2, 0.7)))


def _trace(chance: float, n: int = 600) -> Trace:
    return Trace("code", False, (chance,) * n, (chance,) * n)


def test_a_replay_is_the_cost_model_where_every_token_is_alike() -> None:
    """A replay that counts a token twice, or forgets the correction after a rejection."""
    length, rate = best_length([_trace(0.8)], FLAT)
    by_formula = {k: expected_tokens(0.8, k) / (0.1 * k + 1.0) for k in range(1, 9)}
    assert length == max(by_formula, key=lambda k: by_formula[k])
    assert rate == pytest.approx(by_formula[length], rel=0.01)


def test_where_nothing_pays_the_best_length_is_none_at_all() -> None:
    """A draft recommended although plain decoding is faster."""
    assert best_length([_trace(1.0)], STEEP) == (0, 1.0)
    assert best_length([_trace(0.05)], FLAT) == (0, 1.0)


def test_a_certain_and_a_hopeless_stretch_are_not_their_mean() -> None:
    """Replaying the mean acceptance: here 100 steps emit 3 tokens each, then 300 one each, all at a cost of 1.2."""
    mixed = Trace("code", True, (1.0,) * 300 + (0.0,) * 300, (1.0,) * 600)
    length, rate = best_length([mixed], FLAT)
    assert length == 2
    assert rate == pytest.approx(600 / (400 * 1.2), rel=0.01)
    assert best_length([_trace(0.5)], FLAT)[1] > 1.1 * rate


def _model(seed: int, max_block: int = 4) -> FakeModel:
    return FakeModel(table_of(random_laws(5, seed)), 5, n_ctx=128, caps=Caps(max_block=max_block))


def test_a_draft_that_is_the_target_is_worth_everything_and_another_one_less() -> None:
    """Rows of p and q that are off by one, for example at the end of a block."""
    plain = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    for draft, expected in ((_model(1), True), (_model(2), False)):
        target = _model(1)
        sampled, greedy = judged(draft, answer(target, "code", [0, 1, 2], n_tokens=11, params=plain))
        for trace in (sampled, greedy):
            assert len(trace.acceptance) == len(trace.confidence) == 11
            assert (min(trace.acceptance) > 1 - 1e-9) is expected
            assert all(0.0 <= chance <= 1.0 for chance in (*trace.acceptance, *trace.confidence))
        assert (sampled.greedy, greedy.greedy) == (False, True)
        assert target.length == draft.length == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_of_another_tokenizer_is_worth_what_the_engine_accepts_of_it(temperature: float) -> None:
    """Acceptance over tokens that the draft lacks, or after a differently spelled text."""
    params = SamplingParams(temperature=temperature, top_k=4, top_p=0.95, min_p=0.0)
    table, prompt = RandomTable(6, 17), [1, 3, 4, 0]
    by = answer(FakeModel(table, 6), "code", prompt, n_tokens=9, params=params)
    trace, _ = judged(WatchedDraft(6), by)
    assert set(by.tokens) & {1, 4, 5}, "tokens that the draft has to spell"
    for i, chance in enumerate(trace.acceptance):

        def accepted(choose: Chooser, said: tuple[int, ...] = by.tokens[:i]) -> int:
            drafter = REGISTRY["draft-tli"].make(
                WatchedDraft(6), DraftSettings(length=DraftLength(1), vocab_size=6, n_at_once=99)
            )
            events = Engine(FakeModel(table, 6), drafter).generate([*prompt, *said], params, choose, max_tokens=2)
            return next(event.accepted for event in events if isinstance(event, StepEvent))

        assert law_of(accepted).get(1, 0.0) == pytest.approx(chance, abs=1e-12)
