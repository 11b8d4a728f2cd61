"""The figures of the documents: the worked example and the cost model."""

from __future__ import annotations

import pytest

from specllama.core.events import TokenEvent
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


def test_the_tokens_of_the_first_pass_do_not_count_into_the_decoding_speed() -> None:
    """A first pass that emits a whole block: it belongs to the prompt, so its tokens must not count as decoded."""
    stats = SpecStats(n_emitted=10)
    stats.record(4, 4, rejected=False)
    stats.count_times(0.1, 1.0, 0.0, 0.0, 0.0)
    stats.record(4, 4, rejected=False)
    stats.count_times(0.5, 0.5, 0.0, 0.0, 0.0)
    assert stats.decode_tok_s == 5.0
