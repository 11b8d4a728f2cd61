"""The state of an engine: KV and draft cache after steps, failures, interruptions; counters; limits; seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest

from specllama.drafters.model import ModelDrafter
from specllama.engine import Engine
from specllama.errors import BackendError, Interrupted, NumericsError, PromptError, RollbackRefused, UnsupportedModel
from specllama.events import Finished, Notice, PromptProgress, TokenEvent
from specllama.sampling import RandomChooser, SamplingParams
from specllama.types import Cancel, Caps, FloatArray, Rule
from tests.enumeration import ScriptedChooser
from tests.exact.harness import GREEDY, PLAIN, PROMPT, Pair, Rig, random_pair
from tests.exact.reference import History, token_law
from tests.fakes import FakeModel, RandomTable, ScriptedDrafter, Table, points, replaced

N_VOCAB = 6
N_TOKENS = 12


class Certain:
    """A chooser for greedy runs: every question has one possible answer."""

    def flip(self, prob: float) -> bool:
        """Certain or impossible."""
        assert prob in (0.0, 1.0)
        return prob == 1.0

    def pick(self, law: object) -> int:
        """The only token."""
        (token,) = law.support().tolist()  # type: ignore[attr-defined]
        return int(token)


def agreeing(target: Table, n_vocab: int, seed: int, noise: float = 0.6) -> Table:
    """A draft that agrees with `target` often, not always."""
    other = RandomTable(n_vocab, seed, spread=noise)

    def table(history: History) -> FloatArray:
        return target(history) + other(history)

    return table


def good_pair(**changes: object) -> Pair:
    """Greedy runs of this pair accept about two thirds of what is drafted, and reject in every position."""
    target = RandomTable(N_VOCAB, 40)
    made = {"target": target, "draft": agreeing(target, N_VOCAB, 41), "n_vocab": N_VOCAB, "n_max": 3, **changes}
    return Pair(**made)  # type: ignore[arg-type]


def plain_greedy(table: Table, prompt: Sequence[int], n_tokens: int, params: SamplingParams = GREEDY) -> History:
    """What plain greedy decoding says, by the reference."""
    tokens = tuple(prompt)
    for _ in range(n_tokens):
        (token,) = token_law(table(tokens).tolist(), tokens, params)
        tokens = (*tokens, token)
    return tokens[len(prompt) :]


def assert_answers_like_new(rig: Rig, said: History) -> None:
    """Whatever happened, the engine goes on with the conversation and begins another one as a fresh one would."""
    going_on = (*PROMPT, *said)
    for prompt in (going_on, (*PROMPT, 5, 5), going_on, (3,)):
        tokens, _ = rig.answer(prompt, GREEDY, Certain(), 6)
        assert tokens == plain_greedy(rig.target.table, prompt, 6)


def test_the_pair_of_these_tests_accepts_and_rejects() -> None:
    """Fixtures that never reject, or never accept, would make every test below empty."""
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 40)
    lengths = Counter(step.accepted for step in rig.steps if len(step.drafted) == 3)
    assert set(lengths) == {0, 1, 2, 3}
    assert 0.4 < rig.finished.stats.alpha < 0.9


@pytest.mark.parametrize("n_max", range(1, 9))
def test_greedy_text_is_the_plain_one(n_max: int) -> None:
    """The smallest form of the promise, for every draft length."""
    for seed in range(5):
        target = RandomTable(N_VOCAB, seed, ties=True)
        pair = good_pair(target=target, draft=agreeing(target, N_VOCAB, seed + 60), n_max=n_max)
        tokens, _ = pair.rig().answer(PROMPT, GREEDY, Certain(), 30)
        assert tokens == plain_greedy(target, PROMPT, 30)


@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(temperature=1.0, min_p=0.0, repeat_penalty=1.4)])
def test_a_target_that_drafts_for_itself_is_accepted_throughout(params: SamplingParams, n_max: int) -> None:
    """FIELD 8: an off-by-one in truncation, a hole after an accepted block, a cache trimmed too far each round."""
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
    """DESIGN, invariant 2: nothing below the committed prefix may be lost. Here it would only show as time."""
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 40)
    assert rig.draft is not None
    n_read = sum(len(call.tokens) for call in rig.draft.calls)
    n_rejected_rows = sum(max(len(step.drafted) - 1 - step.accepted, 0) for step in rig.steps)
    assert n_read <= len(PROMPT) + 40 + n_rejected_rows


def test_a_paused_drafter_is_back_at_once_and_catches_up_in_one_go() -> None:
    """FIELD 14: 20 tokens without drafts (K=0), then K=4; token-by-token catching up would cost a draft pass each."""
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


# -------------------------------------------------------------------------------------- ended in every possible place


@pytest.mark.parametrize("at", range(24))
def test_abandoned_at_any_event_the_session_goes_on(at: int) -> None:
    """DESIGN, invariant 1: Ctrl-C, a closed pipe or a `break` in the reader's loop leave a usable session."""
    rig = good_pair().rig()
    rig.answer((*PROMPT, 4), GREEDY, Certain(), 5)  # something stands in the caches already
    with closing(rig.run(PROMPT, GREEDY, Certain(), N_TOKENS)) as run:
        for n_events, _ in enumerate(run):
            if n_events == at:
                break
    said = rig.emitted
    assert said == plain_greedy(rig.target.table, PROMPT, len(said))
    assert_answers_like_new(rig, said)


@pytest.mark.parametrize("at", range(24))
def test_cancelled_at_any_event_the_session_goes_on(at: int) -> None:
    """FIELD 13: the conversation continues as if the answer had ended there."""
    rig, cancel = good_pair().rig(), Cancel()
    for n_events, _ in enumerate(rig.run(PROMPT, GREEDY, Certain(), N_TOKENS, cancel=cancel)):
        if n_events == at:
            cancel.set()
    assert isinstance(rig.events[-1], Finished)
    assert rig.finished.reason in ("cancelled", "length")
    assert_answers_like_new(rig, rig.emitted)


@pytest.mark.parametrize("failure", [BackendError, Interrupted, RollbackRefused])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_a_failure_in_any_model_call_leaves_a_usable_session(who: str, failure: type[BackendError]) -> None:
    """A raised error that leaves the KV ahead of what was said: the next answer would be about other text."""
    n_calls = count_calls(who)
    assert n_calls > 10
    for at in range(n_calls):
        rig, model = prepared(who)
        failed = arm(model, at, failure)
        try:
            for _ in rig.run(PROMPT, GREEDY, Certain(), N_TOKENS):
                pass
        except failure:
            assert failure is not Interrupted, "an interruption is no error"
        except AssertionError:
            # What could not be truncated is still there; all else must be as it should.
            assert failed == ["truncate"]
        model.hook = lambda n_call, name: None
        said = rig.emitted
        assert said == plain_greedy(rig.target.table, PROMPT, len(said)), f"call {at}, {failed}"
        assert_answers_like_new(rig, said)


def prepared(who: str) -> tuple[Rig, FakeModel]:
    """A rig with another conversation in its caches, and the model that will fail."""
    rig = good_pair().rig()
    rig.answer((PROMPT[0], 4, 4, 4, 4), GREEDY, Certain(), 5)
    model = rig.target if who == "target" else rig.draft
    assert model is not None
    model.calls.clear()
    return rig, model


def count_calls(who: str) -> int:
    """Model calls of the answer that nothing interrupts."""
    rig, model = prepared(who)
    rig.answer(PROMPT, GREEDY, Certain(), N_TOKENS)
    return len(model.calls)


def arm(model: FakeModel, at: int, failure: type[BackendError]) -> list[str]:
    """Let call number `at` of `model` fail; its name will stand in the list that is returned."""
    failed: list[str] = []

    def hook(n_call: int, name: str) -> None:
        # Only these look at the cancel flag; anything can fail.
        if n_call == at and (failure is not Interrupted or name in ("feed", "eval")):
            failed.append(name)
            raise failure("failed by the test")

    model.hook = hook
    return failed


def test_an_interrupted_prefill_keeps_what_was_read() -> None:
    """FIELD 37: Ctrl-C in a long prefill. What was decoded stays, what was not is not taken for read."""
    prompt = tuple(i % N_VOCAB for i in range(40))
    rig = good_pair().rig()
    arm(rig.target, 0, Interrupted)
    assert rig.answer(prompt, GREEDY, Certain(), 5) == ((), "cancelled")
    assert rig.target.tokens == prompt[:19]
    assert rig.answer(prompt, GREEDY, Certain(), 5)[0] == plain_greedy(rig.target.table, prompt, 5)
    assert [len(call.tokens) for call in rig.target.calls if call.name == "feed"] == [39, 20]


def test_a_flag_set_before_the_start_stops_before_the_prefill() -> None:
    """A second Ctrl-C, or one while loading: nothing of a long prompt need be read."""
    rig, cancel = good_pair().rig(), Cancel()
    cancel.set()
    for _ in rig.run(PROMPT, GREEDY, Certain(), 5, cancel=cancel):
        pass
    assert (rig.emitted, rig.finished.reason) == ((), "cancelled")
    assert rig.target.count("eval") == 0


# ------------------------------------------------------------------------------------------- numbers that are not laws


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(top_k=2)])
def test_nan_logits_are_a_named_error_within_the_step(params: SamplingParams, who: str, value: float) -> None:
    """FIELD 6: NaN at step 3 becomes silence, a hang or token 0. Afterwards the session is usable."""
    at_length = len(PROMPT) + 5
    pair = good_pair()
    broken = {who: replaced(getattr(pair, who), at_length, value, token=3)}
    rig = good_pair(**broken).rig()
    with pytest.raises(NumericsError):
        rig.answer(PROMPT, params, RandomChooser(1), N_TOKENS)
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


# ------------------------------------------------------------------------------------------------------ limits, caches


def test_prompts_that_cannot_be_answered_are_refused_in_words() -> None:
    """FIELD 25: a prompt longer than the context says how many tokens and which flag; an empty one is an error too."""
    engine = good_pair(n_ctx=10).rig().engine
    with pytest.raises(PromptError, match=r"11 tokens.*10") as caught:
        list(engine.generate((1,) * 11, GREEDY, Certain(), max_tokens=5))
    assert "--ctx-size" in caught.value.hint
    with pytest.raises(PromptError):
        list(engine.generate((), GREEDY, Certain(), max_tokens=5))


def test_a_prompt_that_fills_the_context_is_answered_with_one_token() -> None:
    """FIELD 24: the last cell is usable, and the end of the context is an ordinary end."""
    prompt = tuple(i % N_VOCAB for i in range(10))
    rig = good_pair(n_ctx=10, n_draft_ctx=10).rig()
    assert rig.answer(prompt, GREEDY, Certain(), 5) == (plain_greedy(rig.target.table, prompt, 1), "length")
    assert_answers_like_short(rig)


def assert_answers_like_short(rig: Rig) -> None:
    """A session whose context was full still answers a shorter prompt."""
    assert rig.answer((1, 2), GREEDY, Certain(), 4)[0] == plain_greedy(rig.target.table, (1, 2), 4)


def test_a_long_prompt_reports_its_progress() -> None:
    """FIELD 25: three times the batch size; progress that never moves, passes the total, or leaves tokens out."""
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


def test_a_model_that_someone_else_used_is_not_trusted() -> None:
    """A second engine on the same model, or a benchmark in between: what the first one remembers is no longer there."""
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 6)
    other = Engine(rig.target)
    for _ in other.generate((5, 4, 3, 2, 1), GREEDY, Certain(), max_tokens=2):
        pass
    assert_answers_like_new(rig, (1,))


def test_a_model_that_cannot_roll_back_is_refused() -> None:
    """Recurrent models keep rejected tokens in their state: every answer after a rejection would be wrong."""
    with pytest.raises(UnsupportedModel):
        Engine(FakeModel(RandomTable(3, 45), 3, caps=Caps(rollback=False)))


def test_a_small_draft_context_is_mentioned_once() -> None:
    """FIELD 26: drafting stops with a note, the answer goes on."""
    rig = good_pair(n_draft_ctx=9).rig()
    tokens, _ = rig.answer(PROMPT, GREEDY, Certain(), 20)
    assert tokens == plain_greedy(rig.target.table, PROMPT, 20)
    notices = [event.text for event in rig.events if isinstance(event, Notice)]
    assert len(notices) == 1
    assert "9" in notices[0]
    assert [len(step.drafted) for step in rig.steps[-5:]] == [0] * 5


def test_draft_length_flags_arrive() -> None:
    """FIELD 21: `--draft-max` parsed and not passed on, so that 1 and 8 take the same number of rounds."""
    n_steps = {}
    for n_max in (0, 1, 8):
        rig = good_pair(n_max=n_max).rig()
        rig.answer(PROMPT, GREEDY, Certain(), 40)
        n_steps[n_max] = len(rig.steps)
        assert max(len(step.drafted) for step in rig.steps) == n_max
    assert n_steps[0] == 40 > n_steps[1] > n_steps[8]


# --------------------------------------------------------------------------------------------------- counters and seeds


def test_counters_are_not_available_where_nothing_was_drafted() -> None:
    """FIELD 44: 0 % acceptance shown for plain decoding, or a division by zero."""
    rig = good_pair(draft=None).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 7)
    stats = rig.finished.stats
    assert (stats.n_emitted, stats.n_steps, stats.n_drafted, stats.n_accepted) == (7, 7, 0, 0)
    assert stats.acceptance_rate is stats.alpha is stats.mean_acceptance_length is None
    assert stats.acceptance_per_position == []
    assert {event.origin for event in rig.events if isinstance(event, TokenEvent)} == {"target"}


def test_the_bonus_token_is_not_an_accepted_draft() -> None:
    """FIELD 44: acceptance above 100 %, or tokens per step counted as acceptance."""
    table = RandomTable(N_VOCAB, 46)
    rig = good_pair(target=table, draft=table, n_max=3).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 8)
    stats = rig.finished.stats
    origins = [event.origin for event in rig.events if isinstance(event, TokenEvent)]
    assert origins == ["draft", "draft", "draft", "bonus"] * 2
    assert (stats.n_drafted, stats.n_accepted, stats.n_from_draft, stats.n_emitted) == (6, 6, 6, 8)
    assert stats.mean_acceptance_length == 4.0
    assert stats.acceptance_per_position == [1.0, 1.0, 1.0]


def test_an_accept_mask_with_a_hole_counts_up_to_the_hole() -> None:
    """FIELD 7: T, F, T, T counts 1, and the step's own record says so."""
    rig = Rig(FakeModel(RandomTable(N_VOCAB, 47), N_VOCAB), None, ScriptedDrafter(points(lambda tokens: (0, 1, 2, 3))))
    with closing(rig.run(PROMPT, PLAIN, ScriptedChooser(flips=[True, False], picks=[5]), 10)) as run:
        for _ in run:
            if rig.steps:
                break
    (step,) = rig.steps
    assert (step.drafted, step.accepted, rig.emitted) == ((0, 1, 2, 3), 1, (0, 5))


@pytest.mark.parametrize("rule", list(Rule))
def test_counters_hold_over_many_random_answers(rule: Rule) -> None:
    """FIELD 44: 0 <= accepted <= drafted always. The harness checks every step; here with everything at once."""
    params = SamplingParams(temperature=1.1, top_k=4, top_p=0.95, min_p=0.02, repeat_penalty=1.2, repeat_last_n=8)
    pair = good_pair(end_tokens=frozenset({5}), rule=rule, p_min=0.3, n_max=5, n_ctx=24, n_draft_ctx=20)
    rig = pair.rig()
    rng = np.random.default_rng(3)
    reasons = set()
    for seed in range(60):
        prompt = tuple(rng.integers(0, N_VOCAB, size=int(rng.integers(1, 12))).tolist())
        _, reason = rig.answer(prompt, params, RandomChooser(seed), int(rng.integers(0, 20)), stops=[(1, 1)])
        reasons.add(reason)
    assert reasons == {"stop", "length"}


def test_the_same_seed_repeats_the_answer() -> None:
    """FIELD 12: an answer that cannot be had again, or seed 0 taken for 'random'."""
    answers = {seed: good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) for seed in range(10)}
    assert len(set(answers.values())) == 10
    for seed, answer in answers.items():
        assert good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) == answer


def test_real_draws_follow_the_targets_law() -> None:
    """FIELD 5: uniforms shared between draft, acceptance and redraw. Enumeration cannot see the generator itself."""
    pair = random_pair(48)
    law = pair.plain_law(PLAIN, 2)
    n_runs = 4000
    rig = pair.rig()
    counts = Counter(rig.answer(PROMPT, PLAIN, RandomChooser(seed), 2) for seed in range(n_runs))
    assert counts.keys() <= law.keys()
    chi_square = sum((counts[answer] - n_runs * prob) ** 2 / (n_runs * prob) for answer, prob in law.items())
    assert len(law) == 9
    assert chi_square < 42.7  # 8 degrees of freedom: p = 1e-6
