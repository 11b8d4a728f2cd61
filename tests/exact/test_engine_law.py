"""The whole engine with a model drafter: the law of the answer, by enumeration, against plain decoding's.

The reference is written in plain Python from the definitions (reference.py). Every run in here also checks the KV of
both models and the counters after every step (harness.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import pytest

from specllama.base.errors import NumericsError
from specllama.chat.stream import StopWatch
from specllama.core.arrays import FloatArray
from specllama.core.events import Notice
from specllama.core.types import Chooser, Draft, Rule
from tests.enumeration import law_of
from tests.exact.harness import (
    GREEDY,
    PLAIN,
    PROMPT,
    Certain,
    Pair,
    Rig,
    assert_same_law,
    params_of,
    random_pair,
    without_reasons,
)
from tests.exact.reference import Answer, History
from tests.fakes import (
    FakeModel,
    RandomTable,
    ScriptedDrafter,
    Table,
    drawn_tree,
    points,
    random_laws,
    replaced,
)
from tests.marks import slow

TREE = Draft((2, 0, 1, 2, 1, 2), None, (-1, -1, 0, 0, 1, 1))

# Per draft length: tokens in the vocabulary and in the answer. An answer one longer than the draft lets a block be
# accepted whole; fewer tokens to choose from keep the long ones countable.
SIZES = {1: (4, 3), 2: (3, 3), 3: (2, 4), 4: (2, 5)}

SAMPLERS = {
    "plain": PLAIN,
    "cooler": params_of(temperature=0.7),
    "hotter": params_of(temperature=1.6),
    "greedy": GREEDY,
    "top-k": params_of(top_k=2),
    "top-p": params_of(top_p=0.75),
    "min-p": params_of(min_p=0.35),
    "all filters": params_of(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1),
    "repeat penalty": params_of(repeat_penalty=1.7, repeat_last_n=2),
    "presence penalty": params_of(presence_penalty=0.9, repeat_last_n=2),
    "frequency penalty": params_of(frequency_penalty=0.6, repeat_last_n=3),
    "penalties over everything": params_of(
        repeat_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.3, repeat_last_n=-1
    ),
    "penalties before top-k": params_of(repeat_penalty=1.7, repeat_last_n=2, top_k=2),
    "greedy with a penalty": params_of(temperature=0.0, repeat_penalty=1.7, repeat_last_n=2),
    "bias": params_of(logit_bias={0: 1.2, 1: -0.8}),
    "ban": params_of(logit_bias={1: -math.inf}),
    "bias of -100": params_of(logit_bias={0: -100.0}),
}
OFTEN = (
    "plain",
    "repeat penalty",
    "greedy",
    "greedy with a penalty",
)  # at each of three lengths of a draft in `make quick`


@pytest.mark.parametrize(
    ("sampler", "n_max"),
    [
        (sampler, n_max) if n_max == 2 or (n_max < 4 and sampler in OFTEN) else slow(sampler, n_max)
        for sampler in SAMPLERS
        for n_max in SIZES
    ],
)
def test_the_answer_follows_the_targets_law(sampler: str, n_max: int) -> None:
    """A bias with any sampler setting at any position of a block."""
    n_vocab, n_tokens = SIZES[n_max]
    if n_max == 4 and sampler not in ("plain", "repeat penalty", "greedy"):
        n_tokens = 4  # the block is cut to three; a fourth is left to those settings where it could matter
    pair = random_pair(7, n_vocab=n_vocab, n_max=n_max)
    params = SAMPLERS[sampler]
    assert_same_law(pair.engine_law(params, n_tokens), pair.plain_law(params, n_tokens))


@pytest.mark.parametrize("sampler", ["plain", "all filters", "repeat penalty", "ban", "greedy"])
@pytest.mark.parametrize("rule", [Rule.BLOCK, slow(Rule.MATCH)])
def test_every_rule_gives_the_targets_law(rule: Rule, sampler: str) -> None:
    """A rule that is exact in the verifier's own test and not in the loop."""
    for n_max in (2, 3):
        n_vocab, n_tokens = SIZES[n_max]
        if rule is Rule.MATCH:  # it draws at every row, so its branches multiply
            n_vocab, n_tokens = (3, 2) if n_max == 2 else (2, n_tokens)
        pair = random_pair(8, n_vocab=n_vocab, n_max=n_max, rule=rule)
        params = SAMPLERS[sampler]
        assert_same_law(pair.engine_law(params, n_tokens), pair.plain_law(params, n_tokens))


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("draft_temperature", "temperature"), [(1.5, 0.7), (0.3, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_another_draft_temperature_changes_nothing_but_speed(
    draft_temperature: float, temperature: float, rule: Rule
) -> None:
    """q of the target's temperature, or a dense q beside a greedy draft."""
    pair = random_pair(9, draft_temperature=draft_temperature, rule=rule)
    params = params_of(temperature=temperature, top_k=2, min_p=0.02)
    assert_same_law(pair.engine_law(params, 3), pair.plain_law(params, 3))


@pytest.mark.parametrize("n_draft_vocab", [slow(1), 2, slow(4), 7])
@pytest.mark.parametrize("sampler", ["plain", "all filters", "bias", "greedy", "repeat penalty"])
def test_a_draft_with_another_vocabulary_size_changes_nothing_but_speed(sampler: str, n_draft_vocab: int) -> None:
    """p cut to the draft's size, a padding id drafted, or a q that still holds the mass of padding rows."""
    pair = random_pair(10, n_draft_vocab=n_draft_vocab)
    params = SAMPLERS[sampler]
    assert_same_law(pair.engine_law(params, 3), pair.plain_law(params, 3))


@pytest.mark.slow
@pytest.mark.parametrize("p_min", [0.4, 0.6, 0.99])
@pytest.mark.parametrize("sampler", ["plain", "all filters", "frequency penalty"])
def test_stopping_the_draft_at_low_confidence_changes_nothing_but_speed(sampler: str, p_min: float) -> None:
    """A token dropped after it was drawn, because its q was low: [.55, .17, .28] for [.5, .3, .2] (docs/design.md)."""
    for n_max in (2, 3):
        n_vocab, n_tokens = SIZES[n_max]
        pair = random_pair(11, n_vocab=n_vocab, n_max=n_max, p_min=p_min)
        params = SAMPLERS[sampler]
        assert_same_law(pair.engine_law(params, n_tokens), pair.plain_law(params, n_tokens))


def test_ties_masks_and_a_perfect_draft_change_nothing_but_speed() -> None:
    """Equal logits broken one way in the draft and another in the target, laws with exact zeros, p = q."""
    masked = random_pair(target=RandomTable(3, 12, masked=0.5), draft=RandomTable(3, 13, masked=0.5))
    tied = random_pair(target=RandomTable(3, 14, ties=True), draft=RandomTable(3, 15, ties=True))
    same = random_pair(target=RandomTable(3, 16), draft=RandomTable(3, 16))
    for pair in (masked, tied, same):
        for params in (PLAIN, GREEDY, params_of(top_k=2), params_of(top_p=0.6)):
            assert_same_law(pair.engine_law(params, 3), pair.plain_law(params, 3))


@pytest.mark.parametrize("ends", [{2}, {0}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("n_max", [slow(1), 2, slow(3)])
@pytest.mark.parametrize("sampler", ["plain", "top-k", "greedy", "repeat penalty"])
def test_end_tokens_end_the_answer_where_plain_decoding_does(sampler: str, n_max: int, ends: set[int]) -> None:
    """An end token emitted, only one of several known, or one inside a block passed over."""
    pair = random_pair(17, n_max=n_max, end_tokens=frozenset(ends))
    params = SAMPLERS[sampler]
    assert_same_law(pair.engine_law(params, 3, prompt=(0, 0)), pair.plain_law(params, 3, prompt=(0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(Rule))
def test_end_tokens_end_the_answer_under_every_rule(rule: Rule) -> None:
    """An end token that is the correction or the bonus of a rule's own path through the code."""
    pair, n_tokens = random_pair(18, end_tokens=frozenset({2}), rule=rule), 3 if rule is Rule.MATCH else 4
    assert_same_law(pair.engine_law(PLAIN, n_tokens), pair.plain_law(PLAIN, n_tokens))


@pytest.mark.parametrize("stops", [[(1,)], [(0, 1)], [(1, 1), (0, 0, 1)], [(1, 0, 1)]])
@pytest.mark.parametrize("n_max", [1, 2, 3])
def test_stops_are_found_wherever_they_fall_in_a_block(n_max: int, stops: Sequence[History]) -> None:
    """A stop missed in the middle of a block or across two, or checked after the length cap."""
    pair = random_pair(19, n_vocab=2, n_max=n_max)
    found = pair.engine_law(PLAIN, 4, stops=stops)
    assert_same_law(found, pair.plain_law(PLAIN, 4, stops=stops))
    assert any(reason == "stop" and len(tokens) == 4 for tokens, reason in found)


class EndsInNonsense:
    """A table whose rows behind a whole answer are NaN: plain decoding does not get there."""

    def __init__(self, table: Table, ends: Sequence[History]) -> None:
        self._table = table
        self._ends = ends

    def __call__(self, history: History) -> FloatArray:
        row, said = self._table(history), history[len(PROMPT) :]
        over = any(said[i : i + len(end)] == end for end in self._ends for i in range(len(said)))
        return row * math.nan if over else row


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("draft", [Draft((0, 1, 2, 2)), slow(Draft((2, 1))), TREE])
@pytest.mark.parametrize("sampler", [slow("plain"), "greedy", "repeat penalty"])
@pytest.mark.parametrize("ends", [[(2,)], [(0,), (1,)], [(0, 1)]])
def test_rows_behind_the_end_do_not_matter(draft: Draft, ends: list[History], sampler: str, rule: Rule) -> None:
    """A NaN behind an end token or a stop string, or on a path that was not taken, that fails a whole answer."""
    params, end_tokens = SAMPLERS[sampler], frozenset(end[0] for end in ends if len(end) == 1)
    stops, table = [end for end in ends if len(end) > 1], EndsInNonsense(RandomTable(3, 29), ends)

    def first_three(choose: Chooser) -> Answer:
        drafter = ScriptedDrafter(lambda tokens, limit, choose: draft)
        rig = Rig(FakeModel(table, 3, end_tokens=end_tokens), None, drafter, rule=rule)
        with closing(rig.run(PROMPT, params, choose, 12, stops=stops)) as run:
            for _ in run:
                if len(rig.emitted) == 3:
                    break
        return rig.emitted, ""

    expected = Pair(target=table, draft=None, end_tokens=end_tokens).plain_law(params, 3, stops=stops)
    assert_same_law(law_of(first_three), without_reasons(expected))


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, slow(Rule.MATCH)])
def test_what_is_said_before_a_broken_row_follows_the_targets_law(rule: Rule) -> None:
    """Tokens that depend on a row that only comes later."""
    table = RandomTable(2, 30)
    pair = random_pair(30, n_vocab=2, target=replaced(table, len(PROMPT) + 2, math.nan), rule=rule, n_max=3)

    def run(choose: Chooser) -> Answer:
        rig = pair.rig()
        with pytest.raises(NumericsError):
            rig.answer(PROMPT, PLAIN, choose, 5)
        return rig.emitted, "length"

    assert_same_law(law_of(run), Pair(target=table, draft=None, n_vocab=2).plain_law(PLAIN, 2))


def test_the_real_stop_watch_stops_where_the_text_does() -> None:
    """A stop string over several tokens, or within one token, that is missed."""
    pieces = {0: b"a", 1: b"ab", 2: "é".encode()}
    pair = random_pair(20)

    def run(choose: Chooser) -> Answer:
        rig = pair.rig()
        watch = StopWatch(["ba", "é"], lambda token: pieces[token])
        for event in rig.engine.generate(PROMPT, PLAIN, choose, max_tokens=4, stopper=watch):
            rig.events.append(event)
        return rig.emitted, rig.finished.reason

    # In tokens: "ba" is completed by 0 or 1 after 1, and nothing else can end in it; "é" is token 2.
    assert_same_law(law_of(run), pair.plain_law(PLAIN, 4, stops=[(1, 0), (1, 1), (2,)]))


@pytest.mark.parametrize("max_tokens", range(5))
@pytest.mark.parametrize("n_max", [1, slow(3)])
def test_the_length_cap_may_fall_anywhere_in_a_block(n_max: int, max_tokens: int) -> None:
    """One token too many or too few, or a law changed by clipping the draft after it was drawn."""
    pair = random_pair(21, n_vocab=2, n_max=n_max)
    assert_same_law(pair.engine_law(PLAIN, max_tokens), pair.plain_law(PLAIN, max_tokens))


@pytest.mark.parametrize("n_room", range(5))
@pytest.mark.parametrize(("n_max", "max_tokens"), [(1, 100), slow(3, -1)])
def test_the_context_may_end_anywhere_in_a_block(n_max: int, n_room: int, max_tokens: int) -> None:
    """A crash at the last cell, or an answer that is cut before the context is full."""
    pair = random_pair(22, n_vocab=2, n_max=n_max, n_ctx=len(PROMPT) + n_room)
    found = pair.engine_law(PLAIN, max_tokens)
    assert_same_law(found, pair.plain_law(PLAIN, n_room + 1))
    assert {reason for _, reason in found} == {"length"}


@pytest.mark.parametrize("n_draft_room", range(-2, 4))
def test_a_full_draft_context_ends_the_drafting_and_not_the_answer(n_draft_room: int) -> None:
    """An error from the draft, or no notice of why the answer became slow."""
    n_draft_ctx = len(PROMPT) + n_draft_room
    pair = random_pair(23, n_vocab=2, n_max=3, n_draft_ctx=n_draft_ctx)
    assert_same_law(pair.engine_law(PLAIN, 4), pair.plain_law(PLAIN, 4))
    rig = pair.rig()
    rig.answer(PROMPT, GREEDY, Certain(), 8)
    notices = [event for event in rig.events if isinstance(event, Notice)]
    assert len(notices) == 1, "once, not at every step"
    assert max((len(step.drafted) for step in rig.steps[-2:]), default=0) == 0


@pytest.mark.parametrize("max_block", [1, 2, 3])
def test_a_block_never_outgrows_what_the_target_can_evaluate(max_block: int) -> None:
    """More rows than were reserved at load: llama.cpp aborts the process."""
    pair = random_pair(24, n_vocab=2, n_max=4, max_block=max_block)
    assert_same_law(pair.engine_law(PLAIN, 4), pair.plain_law(PLAIN, 4))


def test_a_long_prompt_is_answered_with_the_same_law() -> None:
    """A bias of the first step after a long prompt, which has no draft: a second code path."""
    prompt = tuple(i % 2 for i in range(45))
    pair = random_pair(25, n_vocab=2, n_max=2)
    assert_same_law(pair.engine_law(PLAIN, 4, prompt=prompt), pair.plain_law(PLAIN, 4, prompt=prompt))


@pytest.mark.slow
def test_trees_go_through_the_engine_unchanged() -> None:
    """Rows of a tree taken for rows of a chain, penalties along the wrong path, or a KV that keeps a losing branch."""
    target, params = RandomTable(3, 26), SAMPLERS["repeat penalty"]

    def first_two(choose: Chooser) -> Answer:
        rig = Rig(FakeModel(target, 3), None, ScriptedDrafter(drawn_tree(random_laws(3, 27, zeros=0.4), (2, 1))))
        with closing(rig.run(PROMPT, params, choose, 8)) as run:  # room for whole trees; two tokens are enough
            for _ in run:
                if len(rig.emitted) == 2:
                    break
        return rig.emitted, "length"

    assert_same_law(law_of(first_two), Pair(target=target, draft=None).plain_law(params, 2))


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("sampler", ["plain", "top-k", "repeat penalty", "greedy"])
def test_trees_chosen_without_chance_go_through_the_engine_unchanged(sampler: str, rule: Rule) -> None:
    """The second child, and a child of the second child, accepted: the KV must follow that branch."""
    target, params = RandomTable(3, 34), SAMPLERS[sampler]

    def first_three(choose: Chooser) -> Answer:  # of a whole path, or of two steps
        rig = Rig(FakeModel(target, 3), None, ScriptedDrafter(lambda tokens, limit, choose: TREE), rule=rule)
        with closing(rig.run(PROMPT, params, choose, 12)) as run:
            for _ in run:
                if len(rig.emitted) == 3:
                    break
        return rig.emitted, "length"

    assert_same_law(law_of(first_three), Pair(target=target, draft=None).plain_law(params, 3))


@pytest.mark.parametrize("sampler", ["plain", "ban", "repeat penalty", "top-k", "greedy"])
@pytest.mark.parametrize("rule", list(Rule))
def test_a_stubborn_draft_changes_nothing_but_speed(sampler: str, rule: Rule) -> None:
    """A draft that always proposes the penalised or banned token, judged as a point mass."""
    target = RandomTable(3, 28)
    pair = Pair(target=target, draft=None)
    params = SAMPLERS[sampler]

    def run(choose: Chooser) -> Answer:
        drafter = ScriptedDrafter(points(lambda tokens: (1, 1, 1)))
        return Rig(FakeModel(target, 3), None, drafter, rule=rule).answer(PROMPT, params, choose, 4)

    assert_same_law(law_of(run), pair.plain_law(params, 4))


def test_an_engine_used_again_and_again_gives_the_same_law() -> None:
    """State that leaks from one answer into the next; here all replays share one engine and its caches."""
    pair = random_pair(30)
    rig = pair.rig()
    law = law_of(lambda choose: rig.answer(PROMPT, PLAIN, choose, 3))
    assert_same_law(law, pair.plain_law(PLAIN, 3))
    law = law_of(lambda choose: rig.answer((0, 1, 1), PLAIN, choose, 3))
    assert_same_law(law, pair.plain_law(PLAIN, 3, prompt=(0, 1, 1)))
