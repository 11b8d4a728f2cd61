"""Answers interrupted anywhere and gone on with on the same engine: the law of the whole is plain decoding's."""

from __future__ import annotations

from contextlib import closing

import pytest

from specllama.base.errors import Interrupted
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Chooser
from tests.enumeration import law_of
from tests.exact.harness import PROMPT, REPEAT, Pair, Rig, assert_same_law, random_pair
from tests.exact.reference import Answer, History


def continued(rig: Rig, choose: Chooser, params: SamplingParams, n_tokens: int, prefix: History) -> Answer:
    """Answer on after `prefix` had been said, on an engine that was interrupted: the whole answer."""
    tokens, reason = rig.answer((*PROMPT, *prefix), params, choose, n_tokens - len(prefix))
    return (*prefix, *tokens), reason


def interrupted_law(pair: Pair, how: str, at: int, n_tokens: int, params: SamplingParams) -> dict[Answer, float]:
    """The law of `n_tokens`, said in two goes: the first one ends at event or model call number `at`."""

    def run(choose: Chooser) -> Answer:
        rig, cancel = pair.rig(), Cancel()
        n_calls = 0

        def count_call(n_call: int, name: str) -> None:
            nonlocal n_calls
            if name in ("feed", "eval"):  # only these can be interrupted, and before anything was decided
                n_calls += 1
                if n_calls == at + 1:
                    cancel.set()
                    raise Interrupted("stopped by the test")

        if how == "target call":
            rig.target.hook = count_call
        elif how == "draft call":
            assert rig.draft is not None
            rig.draft.hook = count_call
        with closing(rig.run(PROMPT, params, choose, n_tokens, cancel=cancel)) as run:
            for n_events, _ in enumerate(run):
                if n_events == at and how == "cancel":
                    cancel.set()
                elif n_events == at and how == "close":
                    break
        if any(event for event in rig.events if getattr(event, "reason", "") in ("stop", "length")):
            return rig.emitted, rig.finished.reason
        return continued(rig, choose, params, n_tokens, rig.emitted)

    return law_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("how", ["cancel", "close", "target call", "draft call"])
def test_an_answer_interrupted_anywhere_goes_on_with_the_same_law(how: str, at: int) -> None:
    """A cache that keeps what was never yielded, or a law that depends on where one stopped reading."""
    pair, params = random_pair(29, n_vocab=2, n_max=2), REPEAT
    found = interrupted_law(pair, how, at, 4, params)
    assert_same_law(merge_reasons(found), merge_reasons(pair.plain_law(params, 4)))


def merge_reasons(law: dict[Answer, float]) -> dict[Answer, float]:
    """Without the reason, which an interruption after the last token may change."""
    merged: dict[Answer, float] = {}
    for (tokens, _), weight in law.items():
        merged[tokens, ""] = merged.get((tokens, ""), 0.0) + weight
    return merged
