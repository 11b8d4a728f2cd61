"""Recorded answers replayed through costs by the program's own loop: nothing is counted twice or forgotten."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import replay as recording
from benchmarks.bars_arms import SOURCES
from benchmarks.replaying import FIXED, LOOKUP, MODEL, Machine, Recorded, Replays, accepted, bounds, hopeless, replay
from benchmarks.rows import append
from specllama.core.types import Caps
from specllama.drafters import DraftSettings
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import DraftLength
from specllama.tuning.traces import answer, judged
from tests.fakes import FakeModel, random_laws, table_of

CHEAP = CostProfile(verify=((1, 1.0), (2, 1.2), (16, 1.8)), draft=((1, 0.1), (2, 0.12), (64, 0.5)))
EXPENSIVE = CostProfile(verify=((1, 1.0), (2, 2.0), (16, 16.0)), draft=((1, 0.7), (2, 0.8), (64, 8.0)))
N_PROMPT, N_TOKENS = 20, 64


def _answer(chance: float, seed: int = 0) -> Recorded:
    """An answer without repeated tokens, so that lookups find nothing."""
    tokens = random.Random(seed).sample(range(1000), N_PROMPT + N_TOKENS)
    return Recorded("code", tuple(tokens[:N_PROMPT]), tuple(tokens[N_PROMPT:]), (chance,) * N_TOKENS,
                    (0.9,) * N_TOKENS)  # fmt: skip


def test_a_draft_that_is_always_right_costs_what_the_formula_says() -> None:
    """Prevents: a pass that is not counted, the prompt counted for the target, or a lost last token."""
    answer, k = _answer(1.0), 3
    passes = replay(answer, [True] * N_TOKENS, MODEL, DraftSettings(length=DraftLength(k)))
    # The first step goes without a draft; then 15 blocks of four, and what is left of 63 tokens.
    assert dict(passes.target) == {1: 1, 4: 15, 3: 1}
    assert dict(passes.draft) == {N_PROMPT + 1: 1, 2: 15, 1: 2 * 15 + 1}


def test_a_draft_that_is_never_right_costs_every_block_for_one_token() -> None:
    """Prevents: rejected tokens that stay in the draft, or tokens accepted by chance."""
    passes = replay(_answer(0.0), [False] * N_TOKENS, MODEL, DraftSettings(length=DraftLength(2)))
    assert passes.target[3] == N_TOKENS - 3  # the first step is plain; the last ones have no room for a block of three
    assert sum(passes.target.values()) == N_TOKENS


def test_lookups_are_those_of_the_text() -> None:
    """Prevents: missed repetitions, or a lookup that knows the answer."""
    fresh = _answer(0.0)
    again = Recorded("code", fresh.tokens, fresh.tokens, fresh.acceptance, fresh.confidence)
    settings = DraftSettings(length=DraftLength(7))
    assert sum(replay(fresh, [False] * N_TOKENS, LOOKUP, settings).target.values()) == N_TOKENS
    repeated = replay(again, [False] * N_TOKENS, LOOKUP, settings)
    assert sum(repeated.target.values()) < N_TOKENS / 3
    assert not repeated.draft


@pytest.mark.slow
def test_the_controller_finds_what_pays_and_leaves_what_does_not() -> None:
    """Prevents: a replay of `auto` without the program's controller."""
    good = Replays([_answer(0.95, seed) for seed in range(3)], 1).on(Machine("cheap", CHEAP))
    assert good.best.startswith("K = ")
    assert good.share > 0.9
    assert good.fixed["plain"] == 1.0
    bad = Replays([_answer(0.95)], 1).on(Machine("expensive", EXPENSIVE))
    assert (bad.best, bad.auto) == ("plain", pytest.approx(1.0))


def test_on_a_machine_where_no_draft_can_pay_lookups_alone_draft() -> None:
    """Prevents: a draft model that the program would not load."""
    assert Machine("expensive", EXPENSIVE).auto == "lookup"
    assert Machine("cheap", CHEAP).auto == "chain"


def test_above_temperature_0_the_controller_begins_with_what_tuning_measured_there() -> None:
    """Prevents: a controller that starts with the acceptance at temperature 0."""
    cold, warm = Prior(0.9, 0.9, 1.0), Prior(0.4, 0.4, 1.0)
    here = Machine("here", CHEAP, cold, warm)
    assert (here.at(0.0).prior, here.at(1.0).prior) == (cold, warm)
    assert Machine("elsewhere", CHEAP).at(1.0).prior == Prior()


def test_a_hopeless_draft_is_found_out() -> None:
    """Prevents: a probe that reads the end of the text and is scored on its start, or a draft that knows the text."""
    rate, worst = Replays([hopeless(_answer(1.0), 0.0)], 1).controlled(Machine("cheap", CHEAP), MODEL)
    assert 0.85 < worst == rate < 1.0


def test_every_round_draws_anew_but_not_at_temperature_0() -> None:
    """Prevents: one draw taken for the mean of several."""
    even = _answer(0.5)
    assert accepted(even, 0) != accepted(even, 1)
    assert accepted(even, 1) == accepted(even, 1)
    assert all(accepted(_answer(1.0), round_) == [True] * N_TOKENS for round_ in range(3))


def test_what_bounds_the_gain_is_every_token_accepted() -> None:
    """Prevents: an error of one row against the example of the README."""
    costs = CostProfile(verify=((1, 1.0), (4, 2.86)), draft=((1, 0.32),))
    assert bounds(costs, (3,))[3] == pytest.approx(4 / (3 * 0.32 + 2.86))
    assert bounds(costs, (3,), 0.0)[3] == pytest.approx(4 / 2.86)
    assert max(FIXED) < 16


def test_what_was_recorded_is_judged_as_the_trace_would_be(tmp_path: Path) -> None:
    """Prevents: distributions off by one from their tokens, or temperature 0 scored with one at 1."""
    for temperature in (0.0, 1.0):
        target, draft = (
            FakeModel(table_of(random_laws(5, seed)), 5, n_ctx=64, caps=Caps(max_block=4)) for seed in (1, 2)
        )
        params = replace(recording.SAMPLER, temperature=temperature)
        sampled, greedy = judged(draft, answer(target, "code", [0, 1, 2], n_tokens=11, params=params))
        asked = recording.Asked("code", "code-1", temperature)
        path = tmp_path / f"{temperature}.jsonl"
        append(path, "answer", recording.heard(target, asked, [0, 1, 2], 11))
        row = recording.read(path).answers[asked.key]
        again = judged(draft, recording.as_answer(row, 5))
        n = len(row["tokens"])
        wanted, found = (greedy, again[1]) if temperature == 0.0 else (sampled, again[0])
        assert found.acceptance == pytest.approx(wanted.acceptance[:n])
        assert found.confidence == pytest.approx(wanted.confidence[:n])


def test_a_recording_holds_every_prompt_once_and_by_turns() -> None:
    """Prevents: a part of a recording without some class, or with a prompt twice."""
    plan = [asked for asked, _ in recording.everything(list(SOURCES), 8)]
    assert len({asked.key for asked in plan}) == len(plan) == 8 * len(SOURCES) * 2
    assert {asked.group for asked in plan[: 2 * len(SOURCES)]} == set(SOURCES)
