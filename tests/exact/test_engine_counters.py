"""What an engine says about its work: events, counters, seeds."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from specllama.core.events import StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Draft, Observation, Rule
from tests.enumeration import ScriptedChooser
from tests.exact.harness import (
    GREEDY,
    N_VOCAB,
    PLAIN,
    PROMPT,
    Certain,
    Rig,
    good_pair,
    random_pair,
)
from tests.fakes import (
    FakeModel,
    RandomTable,
    ScriptedDrafter,
    points,
    table_of,
)


def test_what_lies_behind_an_end_token_is_not_counted() -> None:
    """[a, END, b, c], all of it acceptable: the answer is [a], the KV agrees, b and c were never seen."""
    end, a = 2, 0
    target = table_of(lambda history: (0.0, 0.0, 1.0) if history[-1] == a and len(history) == 4 else (1.0, 0.0, 0.0))
    drafter = ScriptedDrafter(points(lambda tokens: (a, end, a, a)))
    rig = Rig(FakeModel(target, 3, end_tokens=frozenset({end})), None, drafter)
    assert rig.answer(PROMPT, GREEDY, Certain(), 10) == ((a,), "stop")
    (step,) = rig.steps
    assert step.drafted == (a, end)
    assert rig.target.tokens == PROMPT
    assert [event.origin for event in rig.events if isinstance(event, TokenEvent)] == ["draft"]


def test_events_come_in_the_order_of_the_answer() -> None:
    """A reader that draws the answer as it comes would show it scrambled, or a step before its tokens."""
    rig = random_pair(32, n_vocab=2, n_max=3).rig()
    rig.answer(PROMPT, GREEDY, Certain(), 7)
    kinds = [(type(event).__name__, getattr(event, "step", -1)) for event in rig.events]
    assert kinds[0][0] == "PromptProgress"
    assert kinds[-1][0] == "Finished"
    middle = kinds[1:-1]
    assert [step for _, step in middle] == sorted(step for _, step in middle)
    for i, (kind, step) in enumerate(middle):
        if kind == StepEvent.__name__:
            assert all(later > step for _, later in middle[i + 1 :])


def test_the_drafter_hears_of_every_verification() -> None:
    """docs/design.md, Types: a drafter that is told only of its own successes cannot keep its state in line."""
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
        assert isinstance(seen.draft, Draft)
    assert committed == (*PROMPT, *tokens)


def test_a_drafter_that_wants_the_logits_sees_those_of_the_block() -> None:
    """Rows handed over after they were overwritten, or of another block; one that does not want them gets none."""
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
    """T, F, T, T counts 1, and the step's own record says so."""
    rig = Rig(FakeModel(RandomTable(N_VOCAB, 47), N_VOCAB), None, ScriptedDrafter(points(lambda tokens: (0, 1, 2, 3))))
    with closing(rig.run(PROMPT, PLAIN, ScriptedChooser(flips=[True, False], picks=[5]), 10)) as run:
        for _ in run:
            if rig.steps:
                break
    (step,) = rig.steps
    assert (step.drafted, step.accepted, rig.emitted) == ((0, 1, 2, 3), 1, (0, 5))


@pytest.mark.parametrize("rule", list(Rule))
def test_counters_hold_over_many_random_answers(rule: Rule) -> None:
    """0 <= accepted <= drafted always. The harness checks every step; here with everything at once."""
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
    """An answer that cannot be had again, or seed 0 taken for 'random'."""
    answers = {seed: good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) for seed in range(10)}
    assert len(set(answers.values())) == 10
    for seed, answer in answers.items():
        assert good_pair().rig().answer(PROMPT, PLAIN, RandomChooser(seed), 20) == answer
