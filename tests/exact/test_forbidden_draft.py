"""A logit bias that leaves the draft nothing to say: the answer goes on without drafts, and follows the same law."""

from __future__ import annotations

import math

import pytest

from specllama.base.errors import AllForbidden
from specllama.core.events import Notice
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Drafter
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength
from tests.exact.harness import PROMPT, Rig, law_of
from tests.fakes import FakeModel, RandomTable

N_VOCAB, N_DRAFT = 5, 3  # the draft knows fewer tokens
FORBIDDEN = dict.fromkeys(range(N_DRAFT), -math.inf)
PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=FORBIDDEN)


def rig(strategy: str | None) -> Rig:
    """A pair whose draft may say nothing, drafting from the first step on."""
    target = FakeModel(RandomTable(N_VOCAB, 5), N_VOCAB)
    if strategy is None:
        return Rig(target, None, None)
    draft = FakeModel(RandomTable(N_DRAFT, 6), N_DRAFT)
    settings = DraftSettings(length=DraftLength(2), vocab_size=N_VOCAB, n_at_once=100)
    drafter: Drafter = REGISTRY[strategy].make(draft, settings)
    return Rig(target, draft, drafter)


@pytest.mark.parametrize("strategy", ["draft-simple", "chain"])
def test_an_answer_goes_on_without_drafts_and_says_so_once(strategy: str) -> None:
    """Prevents: an error in the middle of an answer that plain decoding gives; or a futile pass at every step."""
    prompt = tuple(token % N_DRAFT for token in PROMPT)
    ours = rig(strategy)
    tokens, reason = ours.answer(prompt, PARAMS, RandomChooser(3), 12)
    assert reason == "length"
    assert set(tokens) <= {3, 4}
    notices = [event.text for event in ours.events if isinstance(event, Notice)]
    assert [notice for notice in notices if "forbids every token that the draft knows" in notice] == notices[:1]
    assert ours.draft is not None
    assert ours.draft.length <= len(prompt)


@pytest.mark.parametrize("strategy", ["draft-simple", "chain"])
def test_its_law_is_that_of_plain_decoding(strategy: str) -> None:
    """Prevents: a draft that gives up, and leaves something behind in the law."""
    prompt = tuple(token % N_DRAFT for token in PROMPT)
    plain = law_of(lambda choose: rig(None).answer(prompt, PARAMS, choose, 3))
    ours = law_of(lambda choose: rig(strategy).answer(prompt, PARAMS, choose, 3))
    assert ours.keys() == plain.keys()
    assert all(ours[text] == pytest.approx(chance, abs=1e-12) for text, chance in plain.items())


def test_a_target_that_may_say_nothing_is_still_an_error() -> None:
    """Prevents: a swallowed error, and an answer of nothing."""
    everything = dict.fromkeys(range(N_VOCAB), -math.inf)
    params = SamplingParams(temperature=1.0, logit_bias=everything)
    with pytest.raises(AllForbidden):
        rig("draft-simple").answer((0, 1), params, RandomChooser(0), 3)
