"""The engine's errors, limits, events, counters and seeds."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import count

import numpy as np
import pytest

from specllama.base.errors import NumericsError, PromptError, UnsupportedModel
from specllama.core import sampling
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.events import Finished, Notice, PromptProgress, StepEvent, TokenEvent
from specllama.core.row_laws import RowLaws
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Caps, Draft, Observation, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength
from specllama.drafters.model import BROKEN
from tests.enumeration import ScriptedChooser
from tests.exact.harness import GREEDY, N_VOCAB, PLAIN, PROMPT, Certain, Rig, good_pair, plain_greedy, random_pair
from tests.exact.reference import History
from tests.fakes import FakeModel, RandomTable, ScriptedDrafter, points, replaced, table_of


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams(top_k=2)])
def test_nan_logits_end_the_answer_where_they_end_plain_decoding(
    params: SamplingParams, rule: Rule, value: float
) -> None:
    """NaN that becomes an empty answer, a hang or token 0, loses the tokens before it, or breaks the session."""
    pair = good_pair()
    rig = good_pair(target=replaced(pair.target, len(PROMPT) + 5, value, token=3), rule=rule).rig()
    for prompt in (PROMPT, PROMPT[:2]):
        n_before = len(PROMPT) + 5 - len(prompt)
        with pytest.raises(NumericsError):
            rig.answer(prompt, params, RandomChooser(1), 12)
        assert len(rig.emitted) == n_before
        if params is GREEDY:
            assert rig.emitted == plain_greedy(pair.target, prompt, n_before)
    rig.answer((2, 2), params, RandomChooser(1), 3)


@pytest.mark.parametrize("strategy", ["draft-simple", "chain"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_a_draft_row_without_mass_costs_its_step_the_draft_and_no_more(
    params: SamplingParams, value: float, strategy: str
) -> None:
    """An answer that fails, or drafts no more, for a row that the target does not need; a notice at each step."""
    pair = good_pair()
    assert pair.draft is not None
    rows, broken = pair.draft, (len(PROMPT) + 2, len(PROMPT) + 7)

    def table(history: History) -> FloatArray:
        return np.full(N_VOCAB, value, np.float32) if len(history) in broken else rows(history)

    draft = FakeModel(table, N_VOCAB)
    settings = DraftSettings(length=DraftLength(3), vocab_size=N_VOCAB, n_at_once=100)
    rig = Rig(FakeModel(pair.target, N_VOCAB), draft, REGISTRY[strategy].make(draft, settings))
    tokens, reason = rig.answer(PROMPT, params, RandomChooser(1), 12)
    assert (len(tokens), reason) == (12, "length")
    if params is GREEDY:
        assert tokens == plain_greedy(pair.target, PROMPT, 12)
    assert [event.text for event in rig.events if isinstance(event, Notice)] == [BROKEN]
    assert any(step.drafted for step in rig.steps[-3:])


def test_a_row_that_is_never_reached_may_be_nonsense() -> None:
    """Laws are computed row by row: a NaN behind a rejection is never read."""
    table = RandomTable(N_VOCAB, 44)
    (first,) = plain_greedy(table, PROMPT, 1)
    wrong = (first + 1) % N_VOCAB

    def nan_behind_wrong(history: History) -> FloatArray:
        row = table(history)
        return row * math.nan if history == (*PROMPT, wrong) else row

    rig = Rig(FakeModel(nan_behind_wrong, N_VOCAB), None, ScriptedDrafter(points(lambda tokens: (wrong,))))
    assert rig.answer(PROMPT, GREEDY, Certain(), 2)[0] == plain_greedy(table, PROMPT, 2)


def test_prompts_that_cannot_be_answered_are_refused_in_words() -> None:
    """An error without the number of tokens and what to do; an empty prompt that is accepted."""
    engine = good_pair(n_ctx=10).rig().engine
    with pytest.raises(PromptError, match=r"11 tokens.*10") as caught:
        list(engine.generate((1,) * 11, GREEDY, Certain(), max_tokens=5))
    assert caught.value.hint
    with pytest.raises(PromptError):
        list(engine.generate((), GREEDY, Certain(), max_tokens=5))


def test_a_prompt_that_fills_the_context_is_answered_with_one_token() -> None:
    """The last cell is usable, and the end of the context is an ordinary end."""
    prompt = tuple(i % N_VOCAB for i in range(10))
    rig = good_pair(n_ctx=10, n_draft_ctx=10).rig()
    assert rig.answer(prompt, GREEDY, Certain(), 5) == (plain_greedy(rig.target.table, prompt, 1), "length")
    # A session whose context was full still answers a shorter prompt.
    assert rig.answer((1, 2), GREEDY, Certain(), 4)[0] == plain_greedy(rig.target.table, (1, 2), 4)


def test_an_answer_without_a_limit_is_drafted_up_to_the_last_cell() -> None:
    """-1 taken for a number of tokens, which leaves no room for a draft."""
    rig = good_pair(n_ctx=20).rig()
    tokens, reason = rig.answer(PROMPT, GREEDY, Certain(), -1)
    assert (tokens, reason) == (plain_greedy(rig.target.table, PROMPT, 20 - len(PROMPT) + 1), "length")
    assert max(len(step.drafted) for step in rig.steps) == 3


def test_a_long_prompt_reports_its_progress() -> None:
    """Progress that never moves, passes the total, or leaves tokens out; three times the batch size."""
    prompt = tuple((i * i) % N_VOCAB for i in range(1600))
    rig = good_pair(n_ctx=1700, n_draft_ctx=1700).rig()
    tokens, _ = rig.answer(prompt, GREEDY, Certain(), 6)
    assert tokens == plain_greedy(rig.target.table, prompt, 6)
    progress = [event for event in rig.events if isinstance(event, PromptProgress)]
    assert [event.done for event in progress] == [0, 512, 1024, 1536, 1600]
    assert {event.total for event in progress} == {1600}
    fed = [token for call in rig.target.calls if call.name == "feed" for token in call.tokens]
    assert tuple(fed) == prompt[:-1]


def test_what_the_kv_holds_already_is_not_read_again() -> None:
    """A chat that reads its whole history at every turn."""
    rig = good_pair().rig()
    said, _ = rig.answer(PROMPT, GREEDY, Certain(), 6)
    rig.target.calls.clear()
    rig.answer((*PROMPT, *said[:4], 5, 5, 5), GREEDY, Certain(), 2)
    assert rig.finished.stats.n_cached == len(PROMPT) + 4
    assert [call.tokens for call in rig.target.calls if call.name == "feed"] == [(5, 5)]
    rig.target.calls.clear()
    rig.answer((*PROMPT, *said[:4], 5, 5, 5), GREEDY, Certain(), 2)
    assert [call.tokens for call in rig.target.calls if call.name == "feed"] == []


class Counting(FakeModel):
    """Says that it was busy for a second in each call."""

    @property
    def busy_s(self) -> float:
        return float(len(self.calls))


def test_time_inside_the_models_is_not_time_of_the_loop() -> None:
    """Prevents: `loop_s` with the time of a model that counts its calls; a model or drafter that has to count."""
    plain, counting = FakeModel(RandomTable(N_VOCAB, 44), N_VOCAB), Counting(RandomTable(N_VOCAB, 44), N_VOCAB)
    loop_s = []
    for target in (plain, counting):
        *_, last = Engine(target).generate(PROMPT, GREEDY, Certain(), max_tokens=5)
        assert isinstance(last, Finished)
        loop_s.append(last.stats.loop_s)
    assert loop_s[0] > 0.0
    assert loop_s[1] == 0.0


def test_the_time_of_the_loop_is_what_the_models_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a model's earlier answers taken off, or added; each reading of the clock is one second later."""

    class Clocked(FakeModel):
        busy_s = property(lambda self: 100.0 + 0.25 * (self.count("feed") + self.count("eval")))

    clock = count()
    monkeypatch.setattr("specllama.core.engine.perf_counter", lambda: float(next(clock)))
    *events, last = Engine(Clocked(RandomTable(N_VOCAB, 44), N_VOCAB)).generate(PROMPT, GREEDY, Certain(), max_tokens=3)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [step.loop_s for step in steps] == [4.0 - 0.25] * 3
    assert isinstance(last, Finished)
    assert last.stats.loop_s == 2.0 - 0.25 + 3 * (4.0 - 0.25)
    assert last.stats.passes == [], "plain decoding has no gain"


def test_every_time_is_taken_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time counted twice, or in another part; here every reading of the clock is one second after the last."""
    clock = count()
    monkeypatch.setattr("specllama.core.engine.perf_counter", lambda: float(next(clock)))
    rig = good_pair().rig()
    rig.answer(PROMPT, GREEDY, Certain(), 9)
    for step in rig.steps:
        assert (step.draft_s, step.eval_s, step.sample_s, step.kv_s) == (1.0, 1.0, 1.0, 1.0)
        assert (step.step_s, step.loop_s) == (4.0, 4.0)
    stats, n_more = rig.finished.stats, len(rig.steps) - 1
    assert (stats.prompt_s, stats.decode_s) == (2.0 + 4.0, 4.0 * n_more)
    assert stats.loop_s == 2.0 + 4.0 + 4.0 * n_more
    assert len(stats.passes) == n_more > 0


def test_a_model_that_cannot_roll_back_is_refused() -> None:
    """Recurrent models keep rejected tokens in their state: every answer after a rejection would be wrong."""
    with pytest.raises(UnsupportedModel):
        Engine(FakeModel(RandomTable(3, 45), 3, caps=Caps(rollback=False)))


def test_draft_length_flags_arrive() -> None:
    """A draft length that is not passed on, so that 1 and 8 take the same number of steps."""
    n_steps = {}
    for n_max in (0, 1, 8):
        rig = good_pair(n_max=n_max).rig()
        rig.answer(PROMPT, GREEDY, Certain(), 40)
        n_steps[n_max] = len(rig.steps)
        assert max(len(step.drafted) for step in rig.steps) == n_max
    assert n_steps[0] == 40 > n_steps[1] > n_steps[8]


@pytest.mark.parametrize("drafted", [(0, 2), (0, 2, 0), (0, 2, 2, 0), (2,), (2, 0)])
@pytest.mark.parametrize("rule", list(Rule))
def test_no_row_and_no_law_is_computed_behind_an_accepted_end_token(
    rule: Rule, drafted: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a looked-up later turn, a law of 152k tokens for a token that is never said, or counts of these."""
    n_laws, law = 0, sampling.law

    def counted(*args: object) -> Distribution:
        nonlocal n_laws
        n_laws += 1
        return law(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "law", counted)
    said = drafted[: drafted.index(2)]
    says = table_of(lambda history: (0.0, 0.0, 1.0) if len(history) == len(PROMPT) + len(said) else (1.0, 0.0, 0.0))
    target = FakeModel(says, 3, end_tokens=frozenset({2}))
    rig = Rig(target, None, ScriptedDrafter(points(lambda tokens: drafted)), rule=rule)
    assert rig.answer(PROMPT, GREEDY, Certain(), 10) == (said, "stop")
    assert [call.tokens for call in target.calls if call.name == "eval"] == [(PROMPT[-1], *said, 2)]
    assert n_laws == len(said) + 1
    assert [(step.drafted, step.accepted) for step in rig.steps] == [((*said, 2), len(said) + 1)]
    assert target.tokens == (*PROMPT, *said)[:-1]
    assert [event.origin for event in rig.events if isinstance(event, TokenEvent)] == ["draft"] * len(said)


def test_a_row_that_is_asked_for_again_is_not_sampled_again() -> None:
    """A second pass over 152k logits for each reader of a law: the block rule, the drafter's observation."""
    laws = RowLaws(np.zeros((2, 3)), PROMPT, Draft((1,)), PLAIN)
    assert all(laws[row] is laws[row] for row in range(2))


def test_a_draft_is_cut_behind_its_first_end_token_only_if_it_is_a_chain() -> None:
    """A tree whose parents no longer fit its nodes, or a draft without its laws."""
    laws = tuple(map(Distribution.point, (0, 2, 1, 2)))
    assert Draft((0, 2, 1, 2), laws).until({2}) == Draft((0, 2), laws[:2])
    for draft in (Draft((0, 2, 1), None, (-1, 0, 0)), Draft((0, 2), laws[:2]), Draft((0, 1)), Draft()):
        assert draft.until({2}) == draft


def test_what_lies_behind_a_stop_string_is_not_counted() -> None:
    """Drafted tokens that were never judged, counted as rejected or accepted."""
    says = table_of(lambda history: ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))[len(history) % 2 == 0])
    assert len(PROMPT) % 2 == 1
    for behind in ((), (2,), (0,), (0, 1)):
        rig = Rig(FakeModel(says, 3), None, ScriptedDrafter(points(lambda tokens, behind=behind: (0, 1, *behind))))
        assert rig.answer(PROMPT, GREEDY, Certain(), 10, stops=[(0, 1)]) == ((0, 1), "stop")
        assert [(step.drafted, step.accepted) for step in rig.steps] == [((0, 1), 2)]
        assert rig.finished.stats.n_rejected == 0


def test_a_drafter_is_not_asked_for_the_last_token() -> None:
    """A draft pass for tokens that the answer has no room for."""
    drafter = ScriptedDrafter(points(lambda tokens: ()))
    Rig(FakeModel(RandomTable(2, 33), 2), None, drafter).answer(PROMPT, PLAIN, RandomChooser(0), 3)
    assert drafter.limits == [2, 1]


def test_a_draft_longer_than_its_limit_is_refused() -> None:
    """A block that the model cannot evaluate, or an answer longer than it may be, by a drafter's mistake."""
    for max_block, max_tokens in ((32, 3), (3, 30)):
        target = FakeModel(RandomTable(3, 33), 3, caps=Caps(max_block=max_block))
        rig = Rig(target, None, ScriptedDrafter(lambda tokens, limit, choose: Draft((1,) * (limit + 1))))
        with pytest.raises(ValueError, match="3 tokens, at most 2"):
            rig.answer(PROMPT, PLAIN, RandomChooser(0), max_tokens)
        assert [call.name for call in target.calls] == ["feed"]


def test_events_come_in_the_order_of_the_answer() -> None:
    """An answer shown in the wrong order, or a step before its tokens."""
    rig = random_pair(32, n_vocab=2, n_max=3).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 7)
    first, *middle, last = rig.events
    assert (first.kind, last.kind) == ("prompt", "finished")
    assert middle[0] == PromptProgress(len(PROMPT), len(PROMPT)), "the prompt is read before the first token"
    assert not any(isinstance(event, PromptProgress) for event in middle[1:])
    # A step's tokens, then the step.
    order = [(event.step, event.kind == "step") for event in middle if isinstance(event, (TokenEvent, StepEvent))]
    assert len({step for step, is_step in order if is_step}) > 1
    assert order == sorted(order)


def test_the_drafter_hears_of_every_verification() -> None:
    """A drafter that observes only its own successes, so that its state is wrong (docs/design.md, Types)."""
    drafter = ScriptedDrafter(points(lambda tokens: (1, 0) if len(tokens) % 2 else ()))
    rig = Rig(FakeModel(RandomTable(2, 33), 2), None, drafter)
    tokens, _ = rig.answer(PROMPT, GREEDY, Certain(), 8)
    assert drafter.begun == [PROMPT]
    assert len(drafter.seen) == len(rig.steps)
    committed = PROMPT
    for seen in drafter.seen:
        block = (*(seen.draft.tokens[node] for node in seen.verdict.path), seen.verdict.next_token)
        committed = (*committed, *block)
        assert tuple(seen.tokens) == committed
    assert committed == (*PROMPT, *tokens)


def test_a_drafter_that_wants_the_logits_sees_those_of_the_block() -> None:
    """Rows that were overwritten, or of another block, or given to a drafter that does not want them."""
    table, checked = RandomTable(3, 35), []

    class Reader(ScriptedDrafter):
        def observe(self, seen: Observation) -> None:
            assert seen.logits is not None
            before = tuple(seen.tokens[: len(seen.tokens) - len(seen.verdict.path) - 1])
            lines = [(*before, *seen.draft.tokens[:i]) for i in range(len(seen.draft.tokens) + 1)]
            assert [row.tolist() for row in seen.logits] == [table(line).tolist() for line in lines]
            checked.append(len(lines))

    script = points(lambda tokens: (1, 0))
    Rig(FakeModel(table, 3), None, Reader(script, wants=frozenset({"logits"}))).answer(
        PROMPT, PLAIN, RandomChooser(0), 9
    )
    assert checked
    modest = ScriptedDrafter(script)
    Rig(FakeModel(table, 3), None, modest).answer(PROMPT, PLAIN, RandomChooser(0), 9)
    assert all(seen.logits is None for seen in modest.seen)


def test_counters_are_not_available_where_nothing_was_drafted() -> None:
    """0 % acceptance shown for plain decoding, or a division by zero."""
    rig = good_pair(draft=None).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 7)
    stats = rig.finished.stats
    assert (stats.n_emitted, stats.n_steps, stats.n_drafted, stats.n_accepted) == (7, 7, 0, 0)
    assert stats.acceptance_rate is stats.alpha is stats.mean_acceptance_length is None
    assert stats.acceptance_per_position == []
    assert {event.origin for event in rig.events if isinstance(event, TokenEvent)} == {"target"}


def test_the_bonus_token_is_not_an_accepted_draft() -> None:
    """Acceptance above 100 %, or tokens per step counted as acceptance."""
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
    """T, F, T, T counted as 3."""
    rig = Rig(FakeModel(RandomTable(N_VOCAB, 47), N_VOCAB), None, ScriptedDrafter(points(lambda tokens: (0, 1, 2, 3))))
    with closing(rig.run(PROMPT, PLAIN, ScriptedChooser(flips=[True, False], picks=[5]), 10)) as run:
        for _ in run:
            if rig.steps:
                break
    (step,) = rig.steps
    assert (step.drafted, step.accepted, rig.emitted) == ((0, 1, 2, 3), 1, (0, 5))


@pytest.mark.parametrize("rule", list(Rule))
def test_counters_hold_over_many_random_answers(rule: Rule) -> None:
    """A counter that is wrong only with all settings together. The harness checks every step."""
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
    """An answer that cannot be repeated, or seed 0 taken for 'random'."""
    answers = {seed: good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) for seed in range(10)}
    assert len(set(answers.values())) == 10
    for seed, answer in answers.items():
        assert good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) == answer
