"""The state of an engine: KV and draft cache after steps, failures and interruptions."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from specllama.audit.models import Passing
from specllama.base.errors import BackendError, Interrupted, RollbackRefused
from specllama.core.engine import Engine
from specllama.core.events import Finished, StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel, Chooser
from specllama.drafters.model import ModelDrafter
from tests.enumeration import law_of
from tests.exact.harness import (
    GREEDY,
    N_VOCAB,
    PLAIN,
    PROMPT,
    REPEAT,
    Certain,
    Pair,
    Rig,
    agreeing,
    assert_answers_like_new,
    assert_same_law,
    good_pair,
    plain_greedy,
    random_pair,
    without_reasons,
)
from tests.exact.reference import Answer
from tests.fakes import FakeModel, RandomTable
from tests.marks import slow

N_TOKENS = 12
COMPUTING = ("feed", "eval", "grow")
SHAPES = {"chain": None, "tree": (-1, -1, 0, 0, 1, 2)}


def test_the_pair_of_these_tests_accepts_and_rejects() -> None:
    """A pair that never rejects, or never accepts: every test below would be empty."""
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 40)
    lengths = Counter(step.accepted for step in rig.steps if len(step.drafted) == 3)
    assert set(lengths) == {0, 1, 2, 3}
    assert 0.4 < rig.finished.stats.alpha < 0.9


def test_the_trees_of_these_tests_branch_and_are_left_on_every_side() -> None:
    """Trees that are always accepted along the first children: chains in effect."""
    rig = good_pair(tree=SHAPES["tree"]).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 60)
    paths = {step.path for step in rig.steps}
    assert {(), (0,), (0, 1, 2), (0, 3), (4, 5)} <= paths, "and second children"


@pytest.mark.parametrize("n_max", range(1, 9))
def test_greedy_text_is_the_plain_one(n_max: int) -> None:
    """The smallest form of the promise, for every draft length."""
    for seed in range(5):
        target = RandomTable(N_VOCAB, seed, ties=True)
        pair = good_pair(target=target, draft=agreeing(target, N_VOCAB, seed + 60), n_max=n_max)
        tokens, _ = pair.rig().answer(PROMPT, GREEDY, Certain(), 30)
        assert tokens == plain_greedy(target, PROMPT, 30)


@pytest.mark.slow
@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(temperature=1.0, min_p=0.0, repeat_penalty=1.4)])
def test_a_target_that_drafts_for_itself_is_accepted_throughout(params: SamplingParams, n_max: int) -> None:
    """An off-by-one in truncation, a hole after an accepted block, a cache trimmed too far each round."""
    table = RandomTable(N_VOCAB, 42)
    pair = good_pair(target=table, draft=table, n_max=n_max, n_ctx=600, n_draft_ctx=600)
    rig = pair.rig()
    rig.answer(PROMPT, params, RandomChooser(0), 50 * (n_max + 1))
    stats = rig.finished.stats
    assert stats.n_steps == 50
    assert (stats.n_drafted, stats.n_accepted) == (50 * n_max, 50 * n_max)
    assert stats.alpha == stats.acceptance_rate == 1.0
    # A cache that is trimmed too far works again for what it lost: per step the draft reads each token once.
    assert rig.draft is not None
    n_read = sum(len(call.tokens) for call in rig.draft.calls)
    assert n_read == len(PROMPT) + stats.n_emitted - 2, "all but the pending token and the last, never evaluated draft"


def test_a_rejection_costs_the_draft_nothing_but_the_rejected_tokens() -> None:
    """A cache that loses committed tokens, which costs only time (docs/design.md, invariant 2)."""
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 40)
    assert rig.draft is not None
    n_read = sum(len(call.tokens) for call in rig.draft.calls)
    n_rejected_rows = sum(max(len(step.drafted) - 1 - step.accepted, 0) for step in rig.steps)
    assert n_read <= len(PROMPT) + 40 + n_rejected_rows


def test_a_paused_drafter_is_back_at_once_and_catches_up_in_one_go() -> None:
    """20 tokens without drafts (K=0), then K=4: a drafter that catches up token by token, with a pass for each."""
    table = RandomTable(N_VOCAB, 43)
    rig = good_pair(target=table, draft=table, n_max=0).rig()
    drafter = rig.drafter
    assert isinstance(drafter, ModelDrafter)
    assert rig.draft is not None
    run = rig.run(PROMPT, GREEDY, Certain(), 45)
    for _ in run:
        if len(rig.emitted) == 20:
            break
    assert rig.draft.calls == []
    drafter.n_max = drafter.policy.n_max = 4  # type: ignore[attr-defined]
    for _ in run:
        pass
    first_calls = [call.name for call in rig.draft.calls[:5]]
    assert first_calls == ["feed", "eval", "eval", "eval", "eval"]
    spec_steps = [step for step in rig.steps if step.drafted]
    assert all(step.accepted == len(step.drafted) for step in spec_steps)
    assert len(spec_steps) == 5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", range(24))
def test_abandoned_at_any_event_the_session_goes_on(at: int, shape: str) -> None:
    """A session that is broken after Ctrl-C, a closed pipe or a `break` (docs/design.md, invariant 1)."""
    rig = good_pair(tree=SHAPES[shape]).rig()
    rig.answer((*PROMPT, 4), GREEDY, Certain(), 5)
    with closing(rig.run(PROMPT, GREEDY, Certain(), N_TOKENS)) as run:
        for n_events, _ in enumerate(run):
            if n_events == at:
                break
    said = rig.emitted
    assert said == plain_greedy(rig.target.table, PROMPT, len(said))
    assert_answers_like_new(rig, said)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", range(24))
def test_cancelled_at_any_event_the_session_goes_on(at: int, shape: str) -> None:
    """A conversation that does not continue from the cancelled answer."""
    rig, cancel = good_pair(tree=SHAPES[shape]).rig(), Cancel()
    n_last, reason = N_TOKENS, "length"
    for n_events, event in enumerate(rig.run(PROMPT, GREEDY, Certain(), N_TOKENS, cancel=cancel)):
        if n_events == at:
            cancel.set()
            n_last = len(rig.steps) - isinstance(event, StepEvent)
            reason = "length" if isinstance(event, Finished) else "cancelled"
    assert len(rig.steps) <= n_last + 1, "no step begins after it"
    assert rig.finished.reason == reason
    assert_answers_like_new(rig, rig.emitted)


@pytest.mark.parametrize("failure", [BackendError, slow(Interrupted), slow(RollbackRefused)])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_failure_in_any_model_call_leaves_a_usable_session(shape: str, who: str, failure: type[BackendError]) -> None:
    """An error that leaves more in the KV than was emitted: the next answer would follow other text."""
    n_calls = count_calls(who, shape)
    assert n_calls > 10
    for at in range(n_calls):
        rig, model = prepared(who, shape)
        failed = arm(model, at, failure)
        try:
            for _ in rig.run(PROMPT, GREEDY, Certain(), N_TOKENS):
                pass
        except failure:
            assert failure is not Interrupted, "an interruption is no error"
        except AssertionError:
            # What could not be truncated is still there; everything else must be right.
            assert failed == ["truncate"]
        model.hook = lambda n_call, name: None
        said = rig.emitted
        assert said == plain_greedy(rig.target.table, PROMPT, len(said)), f"call {at}, {failed}"
        assert_answers_like_new(rig, said)


def prepared(who: str, shape: str) -> tuple[Rig, FakeModel]:
    """A rig with another conversation in its caches, and the model that will fail."""
    rig = good_pair(tree=SHAPES[shape]).rig()
    rig.answer((PROMPT[0], 4, 4, 4, 4), GREEDY, Certain(), 5)
    model = rig.target if who == "target" else rig.draft
    assert model is not None
    model.calls.clear()
    return rig, model


def count_calls(who: str, shape: str) -> int:
    """Model calls of the answer that nothing interrupts."""
    rig, model = prepared(who, shape)
    rig.answer(PROMPT, GREEDY, Certain(), N_TOKENS)
    return len(model.calls)


def arm(model: FakeModel, at: int, failure: type[BackendError]) -> list[str]:
    """Make call number `at` of `model` fail; returns a list that will hold its name."""
    failed: list[str] = []

    def hook(n_call: int, name: str) -> None:
        # Only these look at the cancel flag; anything can fail.
        if n_call == at and (failure is not Interrupted or name in COMPUTING):
            failed.append(name)
            raise failure("failed by the test")

    model.hook = hook
    return failed


def test_an_interrupted_prefill_keeps_what_was_read() -> None:
    """Ctrl-C in a long prefill that loses decoded tokens, or counts others as decoded."""
    prompt = tuple(i % N_VOCAB for i in range(40))
    rig = good_pair().rig()
    arm(rig.target, 0, Interrupted)
    assert rig.answer(prompt, GREEDY, Certain(), 5) == ((), "cancelled")
    assert rig.target.tokens == prompt[:19]
    assert rig.answer(prompt, GREEDY, Certain(), 5)[0] == plain_greedy(rig.target.table, prompt, 5)
    assert [len(call.tokens) for call in rig.target.calls if call.name == "feed"] == [39, 20]


def test_a_flag_set_before_the_start_stops_before_the_prefill() -> None:
    """A long prompt that is read although Ctrl-C came before, e.g. while loading."""
    rig, cancel = good_pair().rig(), Cancel()
    cancel.set()
    assert bytes(cancel.buffer) == b"\1\0", "a C string, which llama.cpp reads"
    for _ in rig.run(PROMPT, GREEDY, Certain(), 5, cancel=cancel):
        pass
    assert (rig.emitted, rig.finished.reason) == ((), "cancelled")
    assert rig.target.calls == []
    cancel.clear()
    assert not cancel.is_set()


@pytest.mark.parametrize("seed", range(10))
def test_two_engines_on_one_model_do_not_take_each_others_tokens_for_their_own(seed: int) -> None:
    """An engine that only compares the number of tokens in the KV with what it left there."""

    def answer(engine: Engine, prompt: list[int]) -> list[int]:
        events = engine.generate(prompt, SamplingParams(temperature=0.0), RandomChooser(0), max_tokens=3)
        return [event.token for event in events if isinstance(event, TokenEvent)]

    def model() -> FakeModel:
        return FakeModel(RandomTable(5, seed=seed), 5)

    shared = model()
    a, b = Engine(shared), Engine(shared)
    first = answer(a, [1, 2, 3, 4])
    answer(b, [4, 3, 2, 1])
    assert answer(a, [1, 2, 3, 4]) == first == answer(Engine(model()), [1, 2, 3, 4])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by", ["calls", "an adapter", "two adapters"])
def test_an_engine_notices_another_user_who_leaves_as_many_tokens(by: str, seed: int) -> None:
    """Prevents: a text of the same length, put there by direct calls or through an adapter, taken for its own."""

    def answer(engine: Engine, prompt: list[int]) -> list[int]:
        events = engine.generate(prompt, SamplingParams(temperature=0.0), RandomChooser(0), max_tokens=3)
        return [event.token for event in events if isinstance(event, TokenEvent)]

    def model() -> FakeModel:
        return FakeModel(RandomTable(5, seed=seed), 5)

    shared, prompt, other = model(), [1, 2, 3, 4], [4, 3, 2, 1]
    engine = Engine(Passing(shared) if by == "two adapters" else shared)
    first = answer(engine, prompt)
    if by == "calls":
        n_held = shared.length
        shared.truncate(0)
        shared.feed([*other, *other][:n_held])
    else:
        answer(Engine(Passing(shared)), other)
    assert answer(engine, prompt) == first
    assert shared.tokens == (*prompt, *first)[: shared.length]


def interrupted_law(pair: Pair, how: str, at: int, n_tokens: int, params: SamplingParams) -> dict[Answer, float]:
    """The law of `n_tokens` in two answers: the first one ends at event or model call number `at`."""

    def run(choose: Chooser) -> Answer:
        rig, cancel = pair.rig(), Cancel()
        n_calls = 0

        def count_call(n_call: int, name: str) -> None:
            nonlocal n_calls
            if name in COMPUTING:  # only these can be interrupted, and before anything was decided
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
        if isinstance(rig.events[-1], Finished) and rig.finished.reason != "cancelled":
            return rig.emitted, rig.finished.reason
        before = rig.emitted
        after, reason = rig.answer((*PROMPT, *before), params, choose, n_tokens - len(before))
        return (*before, *after), reason

    return law_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("how", ["cancel", "close", "target call", "draft call"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_interrupted_anywhere_goes_on_with_the_same_law(shape: str, how: str, at: int) -> None:
    """A cache that keeps what was never yielded, or a law that depends on where one stopped reading."""
    pair = random_pair(29, n_vocab=2, n_max=2, tree=SHAPES[shape])
    found = interrupted_law(pair, how, at, 4, REPEAT)
    assert_same_law(without_reasons(found), without_reasons(pair.plain_law(REPEAT, 4)))
