"""The figures of the documents: the worked example and the cost model."""

from __future__ import annotations

from dataclasses import fields

import pytest

from specllama.core.events import StepEvent, TokenEvent
from specllama.core.gain import TimedPass
from specllama.core.sampling import RandomChooser
from specllama.core.stats import SpecStats, expected_speedup, expected_tokens
from specllama.drafters.model import ModelDrafter
from tests.exact.harness import GREEDY, Rig
from tests.fakes import FakeModel, History, Table, table_of

WORDS = ("日本", "の", "首都", "は", "東京", "です", "！", "次に", "。", "<end>")
END = WORDS.index("<end>")


def says(*sentence: str) -> Table:
    """A model that continues the prompt with `sentence`, whatever came between, and then ends."""
    tokens = [*(WORDS.index(word) for word in sentence), *[END] * 8]

    def laws(history: History) -> tuple[float, ...]:
        return tuple(float(token == tokens[len(history) - 4]) for token in range(len(WORDS)))

    return table_of(laws)


def step_of(
    n_drafted: int, n_accepted: int, draft_s: float, eval_s: float, sample_s: float, kv_s: float, loop_s: float,
    cost: float | None = None,
) -> StepEvent:  # fmt: skip
    """A step with these counts and times."""
    return StepEvent(
        step=0, drafted=(1,) * n_drafted, accepted=n_accepted, drafter="draft-simple", decisions=(),
        draft_s=draft_s, eval_s=eval_s, sample_s=sample_s, kv_s=kv_s, step_s=draft_s + eval_s + sample_s + kv_s,
        loop_s=loop_s, n_rows=n_drafted + 1, cost=cost,
    )  # fmt: skip


def test_the_worked_example_comes_out_as_the_documents_tell_it() -> None:
    """東京 / です / ！ / 次に against 東京 / です / 。: two stay, 。 corrects, 次に is never looked at."""
    target = FakeModel(says("東京", "です", "。"), len(WORDS), end_tokens=frozenset({END}))
    draft = FakeModel(says("東京", "です", "！", "次に"), len(WORDS), end_tokens=frozenset({END}))
    rig = Rig(target, draft, ModelDrafter(draft, n_max=4, vocab_size=len(WORDS)))
    prompt = tuple(WORDS.index(word) for word in ("日本", "の", "首都", "は"))

    tokens, reason = rig.answer(prompt, GREEDY, RandomChooser(0), 20)

    assert "".join(WORDS[token] for token in tokens) == "東京です。"
    assert reason == "stop"
    first = rig.steps[0]
    assert [WORDS[token] for token in first.drafted] == ["東京", "です", "！", "次に"]
    assert first.accepted == 2
    origins = [event.origin for event in rig.events if isinstance(event, TokenEvent)]
    assert origins == ["draft", "draft", "correction"]


def test_the_cost_model_gives_the_documents_figures() -> None:
    """docs/design.md, Cost model: flat T, c = 0.1, k = 4. The quotient instead of the sum divides by zero at a = 1."""
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(2.401, abs=5e-4)
    assert expected_speedup(0.2, 4, 0.1) == pytest.approx(0.893, abs=5e-4)
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == expected_tokens(0.5, 0) == 1.0
    assert expected_speedup(0.7, 0, 0.4) == 1.0
    assert expected_speedup(0.8, 4, 0.1, verify_cost=2.0) == pytest.approx(3.3616 / 2.4)


def test_alpha_is_acceptance_per_token_and_not_per_drafted_token() -> None:
    """Accepted / drafted falls with k by construction and would predict far too little."""
    stats = SpecStats()
    stats.record(4, 4, rejected=False)
    stats.record(4, 1, rejected=True)
    stats.record(4, 0, rejected=True)
    assert stats.alpha == pytest.approx(5 / 7)
    assert stats.acceptance_rate == pytest.approx(5 / 12)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert stats.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert stats.accepted_lengths == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(("n_drafted", "n_accepted"), [(2, 3), (0, 1), (3, -1)])
def test_counts_that_cannot_be_are_refused(n_drafted: int, n_accepted: int) -> None:
    """0 <= accepted <= drafted always."""
    with pytest.raises(ValueError, match="drafted"):
        SpecStats().record(n_drafted, n_accepted, rejected=False)


def test_merged_counters_are_those_of_all_answers_together() -> None:
    """Per-position lists of different lengths cut to the shorter one, or rates averaged instead of counted."""
    first, second, both = SpecStats(), SpecStats(), SpecStats()
    for stats in (first, both):
        stats.record(4, 2, rejected=True)
        stats.record(0, 0, rejected=False)
    for stats in (second, both):
        stats.record(2, 2, rejected=False)
        stats.record(6, 5, rejected=True)
    both.n_first += 3  # each answer has a first pass; recorded as one answer, the second would have none
    first.merge(second)
    assert first == both


def test_the_passes_after_the_first_are_kept_for_the_gain() -> None:
    """A gain of the prompt's pass or of plain decoding; passes lost between the turns of a chat, or written to JSON."""
    stats, plain, merged = SpecStats(), SpecStats(), SpecStats()
    for n_drafted, n_accepted in ((2, 1), (3, 2), *[(0, 0)] * 5):
        event = step_of(n_drafted, n_accepted, 0.1, 1.0, 0.2, 0.3, 0.0, 1.0 + 0.5 * n_drafted)
        stats.take(event)
        plain.take(event, drafts=False)
    first, *others = stats.passes
    assert first == TimedPass(n_rows=4, n_tokens=3, cost=2.5, eval_s=1.0, sample_s=0.2, step_s=1.6)
    assert others == [TimedPass(n_rows=1, n_tokens=1, cost=1.0, eval_s=1.0, sample_s=0.2, step_s=1.6)] * 5
    assert (plain.passes, plain.gain) == ([], None)
    merged.merge(stats)
    merged.merge(stats)
    assert merged.passes == 2 * stats.passes
    assert stats.gain is not None
    assert f" ({stats.gain.value:.1f}x plain)" in str(stats)
    plainly = stats.to_json()
    assert plainly == {field.name: getattr(stats, field.name) for field in fields(SpecStats) if field.name != "passes"}
    assert len(stats.passes) == 6, "they are left out of the JSON only"


def test_a_place_that_never_was_accepted_has_the_rate_0() -> None:
    """One accepted token too many, or fewer than none, behind the longest accepted draft."""
    stats = SpecStats()
    stats.record(3, 1, rejected=True)
    assert stats.acceptance_per_position == [1.0, 0.0, 0.0]


def test_every_figure_of_an_answer_is_the_one_of_its_definition() -> None:
    """A rate of the wrong counter, or 0 where nothing was counted."""
    stats = SpecStats(n_prompt=50, n_cached=10, n_emitted=12, n_from_draft=9)
    for n_drafted, n_accepted, times in ((3, 3, 1.0), (4, 1, 2.0), (0, 0, 4.0), (5, 5, 8.0)):
        event = step_of(n_drafted, n_accepted, *(share * times for share in (0.1, 0.2, 0.3, 0.4, 0.5)))
        stats.take(event)
    assert (stats.n_steps, stats.n_spec_steps, stats.n_first, stats.n_rejected) == (4, 3, 4, 1)
    assert (stats.drafted_at, stats.accepted_at) == ([3, 3, 3, 2, 1], [3, 2, 2, 1, 1])
    assert stats.accepted_lengths == [0, 1, 0, 1, 0, 1]
    times_s = (stats.prompt_s, stats.draft_s, stats.eval_s, stats.sample_s, stats.kv_s, stats.decode_s, stats.loop_s)
    assert times_s == pytest.approx((1.0, 1.4, 2.8, 4.2, 5.6, 14.0, 7.5))
    assert stats.acceptance_rate == 9 / 12
    assert stats.alpha == 9 / 10
    assert stats.mean_acceptance_length == 4.0
    assert stats.acceptance_per_position == pytest.approx([1.0, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert stats.from_draft == 9 / 12
    assert stats.decode_tok_s == pytest.approx(8 / 14)
    assert stats.prompt_tok_s == pytest.approx(40.0)
    assert str(stats) == "12 tokens, 0.6 tokens/s; 9 of 12 drafted tokens accepted, 3.00 tokens per step"
    empty = SpecStats()
    assert empty.alpha is empty.from_draft is empty.decode_tok_s is empty.prompt_tok_s is None
    assert (empty.acceptance_per_position, str(empty)) == ([], "0 tokens")
    assert SpecStats(n_first=4, n_emitted=3, decode_s=1.0).decode_tok_s is None, "cut within the first pass"


def test_the_tokens_of_the_first_pass_do_not_count_into_the_decoding_speed() -> None:
    """A first pass that emits a whole block: it belongs to the prompt, so its tokens must not count as decoded."""
    stats = SpecStats(n_emitted=10)
    stats.take(step_of(4, 4, 0.1, 1.0, 0.0, 0.0, 0.0))
    stats.take(step_of(4, 4, 0.5, 0.5, 0.0, 0.0, 0.0))
    assert stats.decode_tok_s == 5.0
