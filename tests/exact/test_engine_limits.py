"""Where an engine must refuse, stop or say something: broken numbers, full contexts, long prompts, foreign caches."""

from __future__ import annotations

import math

import pytest

from specllama.base.errors import NumericsError, PromptError, UnsupportedModel
from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import PromptProgress
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Caps
from tests.exact.harness import (
    GREEDY,
    N_VOCAB,
    PLAIN,
    PROMPT,
    Certain,
    Rig,
    good_pair,
    plain_greedy,
)
from tests.exact.reference import History
from tests.fakes import FakeModel, RandomTable, ScriptedDrafter, points, replaced


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(top_k=2)])
def test_nan_logits_are_a_named_error_within_the_step(params: SamplingParams, who: str, value: float) -> None:
    """NaN at step 3 becomes silence, a hang or token 0. Afterwards the session is usable."""
    at_length = len(PROMPT) + 5
    pair = good_pair()
    broken = {who: replaced(getattr(pair, who), at_length, value, token=3)}
    rig = good_pair(**broken).rig()
    with pytest.raises(NumericsError):
        rig.answer(PROMPT, params, RandomChooser(1), 12)
    assert len(PROMPT) + len(rig.emitted) <= at_length, "nothing was said behind the row that made no sense"
    if params is GREEDY:
        assert rig.emitted == plain_greedy(pair.target, PROMPT, len(rig.emitted))
    rig.answer((2, 2), params, RandomChooser(1), 3)


def test_a_row_that_is_never_reached_may_be_nonsense() -> None:
    """Laws are made row by row: a NaN behind a rejection is not the answer's business."""
    table = RandomTable(N_VOCAB, 44)
    (first,) = plain_greedy(table, PROMPT, 1)
    wrong = (first + 1) % N_VOCAB

    def nan_behind_wrong(history: History) -> FloatArray:
        row = table(history)
        return row * math.nan if history == (*PROMPT, wrong) else row

    rig = Rig(FakeModel(nan_behind_wrong, N_VOCAB), None, ScriptedDrafter(points(lambda tokens: (wrong,))))
    assert rig.answer(PROMPT, GREEDY, Certain(), 2)[0] == plain_greedy(table, PROMPT, 2)


def test_prompts_that_cannot_be_answered_are_refused_in_words() -> None:
    """A prompt longer than the context says how many tokens and which flag; an empty one is an error too."""
    engine = good_pair(n_ctx=10).rig().engine
    with pytest.raises(PromptError, match=r"11 tokens.*10") as caught:
        list(engine.generate((1,) * 11, GREEDY, Certain(), max_tokens=5))
    assert "--ctx-size" in caught.value.hint
    with pytest.raises(PromptError):
        list(engine.generate((), GREEDY, Certain(), max_tokens=5))


def test_a_prompt_that_fills_the_context_is_answered_with_one_token() -> None:
    """The last cell is usable, and the end of the context is an ordinary end."""
    prompt = tuple(i % N_VOCAB for i in range(10))
    rig = good_pair(n_ctx=10, n_draft_ctx=10).rig()
    assert rig.answer(prompt, GREEDY, Certain(), 5) == (plain_greedy(rig.target.table, prompt, 1), "length")
    assert_answers_like_short(rig)


def assert_answers_like_short(rig: Rig) -> None:
    """A session whose context was full still answers a shorter prompt."""
    assert rig.answer((1, 2), GREEDY, Certain(), 4)[0] == plain_greedy(rig.target.table, (1, 2), 4)


def test_a_long_prompt_reports_its_progress() -> None:
    """Three times the batch size; progress that never moves, passes the total, or leaves tokens out."""
    prompt = tuple((i * i) % N_VOCAB for i in range(1600))
    rig = good_pair(n_ctx=1700, n_draft_ctx=1700).rig()
    tokens, _ = rig.answer(prompt, GREEDY, Certain(), 6)
    assert tokens == plain_greedy(rig.target.table, prompt, 6)
    progress = [event for event in rig.events if isinstance(event, PromptProgress)]
    assert len(progress) > 2
    done = [event.done for event in progress]
    assert done == sorted(set(done))
    assert {event.total for event in progress} == {1600}
    assert done[-1] in (1599, 1600)
    fed = [token for call in rig.target.calls if call.name == "feed" for token in call.tokens]
    assert tuple(fed) == prompt[:-1]


def test_what_the_kv_holds_already_is_not_read_again() -> None:
    """A chat would read its whole history at every turn."""
    rig = good_pair().rig()
    said, _ = rig.answer(PROMPT, GREEDY, Certain(), 6)
    rig.target.calls.clear()
    rig.answer((*PROMPT, *said[:4], 5, 5, 5), GREEDY, Certain(), 2)
    assert rig.finished.stats.n_cached == len(PROMPT) + 4
    assert [call.tokens for call in rig.target.calls if call.name == "feed"] == [(5, 5)]
    rig.target.calls.clear()
    rig.answer((*PROMPT, *said[:4], 5, 5, 5), GREEDY, Certain(), 2)
    assert [call.tokens for call in rig.target.calls if call.name == "feed"] == []


def test_a_model_that_cannot_roll_back_is_refused() -> None:
    """Recurrent models keep rejected tokens in their state: every answer after a rejection would be wrong."""
    with pytest.raises(UnsupportedModel):
        Engine(FakeModel(RandomTable(3, 45), 3, caps=Caps(rollback=False)))


def test_draft_length_flags_arrive() -> None:
    """`--draft-max` parsed and not passed on, so that 1 and 8 take the same number of rounds."""
    n_steps = {}
    for n_max in (0, 1, 8):
        rig = good_pair(n_max=n_max).rig()
        rig.answer(PROMPT, GREEDY, Certain(), 40)
        n_steps[n_max] = len(rig.steps)
        assert max(len(step.drafted) for step in rig.steps) == n_max
    assert n_steps[0] == 40 > n_steps[1] > n_steps[8]
