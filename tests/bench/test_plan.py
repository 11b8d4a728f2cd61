"""The run matrix: arms, prompts, and what fits the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specllama.bench.plan import ArmSpeed, Wishes, arms, conditions, fit, halves, in_turn, run_seconds, spread
from specllama.bench.report import BenchPlan, Load
from specllama.prompts.load import BenchPrompt
from tests.bench_cases import lengths

WISHES = Wishes(loads=(Load(),), drafts=("small",), strategies=("draft-simple",), lengths=lengths(0, 2, 4))
SPEEDS = [ArmSpeed(prefill_tok_s=100.0, decode_tok_s=each) for each in (10.0, 20.0, 5.0)]  # plain, K=2, K=4


def asked(n_classes: int, n_each: int) -> list[BenchPrompt]:
    """Prompts class by class."""
    languages = ("en", "ja", "zh")
    return [
        BenchPrompt(f"{c}{i}", f"class{c}", languages[i % 3], ("?",)) for c in range(n_classes) for i in range(n_each)
    ]


def planned(wishes: Wishes, n: int, left_s: float, n_tokens: int = 100) -> BenchPlan:
    return fit(wishes, [(prompt, n_tokens) for prompt in asked(1, n)], SPEEDS, left_s)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["plain", "K=2", "K=4"]),
        ({"lengths": lengths(2, "auto")}, ["plain", "K=2"]),  # no profile: nothing decides
        ({"lengths": lengths(2, "auto"), "auto_strategy": "chain"}, ["plain", "K=2", "auto"]),
        (
            {"lengths": lengths(2), "strategies": ("draft-simple", "lookup")},
            ["plain", "K=2 draft-simple", "K=2 lookup"],
        ),
        ({"lengths": lengths(2), "strategies": ("lookup",), "drafts": ()}, ["plain", "K=2 lookup"]),
        ({"lengths": lengths(2), "drafts": ("a", "b")}, ["plain", "K=2 a", "K=2 b"]),
        ({"lengths": lengths(2), "rules": ("block", "match")}, ["plain", "K=2 block", "K=2 match"]),
        ({"lengths": lengths(0)}, ["plain"]),
        ({"strategies": ("none",)}, ["plain"]),
        (
            {"lengths": lengths(2), "loads": (Load(n_threads=1), Load(n_threads=2))},
            ["plain t=1", "K=2 t=1", "plain t=2", "K=2 t=2"],
        ),
        (
            {"lengths": lengths(2), "loads": (Load(), Load(type_k="q8_0"))},
            ["plain ctk=f16", "K=2 ctk=f16", "plain ctk=q8_0", "K=2 ctk=q8_0"],
        ),
    ],
)
def test_every_sweep_makes_arms_with_names_of_their_own(changes: dict[str, object], names: list[str]) -> None:
    """Prevents: two settings with one name, a duplicate arm, a load without a baseline."""
    found = arms(replace(WISHES, **changes))  # type: ignore[arg-type]
    assert [arm.name for arm in found] == names
    assert [arm.plain for arm in found] == [name.startswith("plain") for name in names]


def test_lookups_are_not_repeated_for_every_draft_model() -> None:
    found = arms(replace(WISHES, drafts=("a", "b", "c"), strategies=("lookup", "draft-simple"), lengths=lengths(2)))
    assert sum(arm.spec_type == "lookup" for arm in found) == 1


def test_conditions_are_crossed() -> None:
    wishes = replace(WISHES, temperatures=(0.0, 1.0), depths=(0, 512), n_prompt=(0, 256))
    found = conditions(wishes, (32, 64))
    assert len(found) == len(set(found)) == 16


def test_every_item_is_first_equally_often_and_follows_several_others() -> None:
    """Prevents: `auto` measured always after the longest drafts, on a machine they have heated."""
    for n in (1, 2, 3, 4, 5, 7):
        orders = [in_turn(range(n), at) for at in range(n * (n - 1) or 1)]
        assert all(sorted(order) == list(range(n)) for order in orders)
        begin = [order[0] for order in orders]
        assert {begin.count(item) for item in range(n)} == {max(n - 1, 1)}
        before = {item: {order[order.index(item) - 1] for order in orders if order[0] != item} for item in range(n)}
        assert all(len(others) >= min(n - 1, 2) for others in before.values())


def test_the_first_prompts_are_of_many_classes_and_languages() -> None:
    """Prevents: a short benchmark with English code only."""
    first = spread(asked(6, 4))[:6]
    assert len({prompt.category for prompt in first}) == 6
    assert len({prompt.language for prompt in first}) == 3


def test_both_halves_have_every_class() -> None:
    """Prevents: an arm picked on code and confirmed on poems."""
    prompts = spread(asked(3, 4))
    picks = halves(prompts)
    assert sum(picks) == 6
    for name in ("class0", "class1", "class2"):
        assert sum(pick for pick, prompt in zip(picks, prompts, strict=True) if prompt.category == name) == 2
    assert halves(asked(1, 2)) == [True, False]
    assert halves([]) == []


def test_two_prompts_are_one_half_each() -> None:
    """Prevents: no prompt left to confirm the pick."""
    assert sorted(halves([BenchPrompt(str(i), f"class{i}", "en", ("?",)) for i in range(2)])) == [False, True]


def test_a_budget_buys_prompts_first_and_repetitions_when_all_are_in() -> None:
    """Prevents: a budget spent on repeating a few prompts."""
    one_s = run_seconds(WISHES, SPEEDS, conditions(WISHES, (128,))[0], 100)
    assert one_s == pytest.approx(128 / 10 + 128 / 20 + 128 / 5 + 3.0)
    wishes = replace(WISHES, budget_s=1e6)
    some = planned(wishes, 40, left_s=20.5 * one_s)
    assert (len(some.prompts), some.n_repetitions, some.conditions[0].n_predict) == (20, 1, 128)
    assert some.expected_s == pytest.approx(20 * one_s)
    every = planned(wishes, 10, left_s=25 * one_s)
    assert (len(every.prompts), every.n_repetitions) == (10, 2)
    assert planned(wishes, 4, left_s=1e5).n_repetitions == 3


def test_answers_get_shorter_before_prompts_get_few() -> None:
    """Prevents: two long answers where twelve shorter ones fit."""
    wishes = replace(WISHES, budget_s=1e6)
    assert planned(wishes, 40, left_s=400.0).conditions[0].n_predict == 64
    assert planned(wishes, 40, left_s=10.0).conditions[0].n_predict == 32
    asked_for = planned(replace(wishes, n_predict=(100,)), 40, left_s=400.0)
    assert (asked_for.conditions[0].n_predict, len(asked_for.prompts)) == (100, 10)


def test_a_budget_too_small_for_anything_is_said_to_be() -> None:
    """Prevents: a benchmark that exceeds its budget without a note, or that has a single prompt."""
    plan = planned(replace(WISHES, budget_s=20.0), 40, left_s=1.0)
    assert len(plan.prompts) == 2
    assert "the minimum, which exceeds the budget of 20 s" in plan.note
    assert "fits the budget" in planned(replace(WISHES, budget_s=2000.0), 40, left_s=1000.0).note


def test_without_a_budget_everything_is_run() -> None:
    plan = planned(replace(WISHES, n_repetitions=2), 40, left_s=1.0)
    assert (len(plan.prompts), plan.n_repetitions, plan.n_runs) == (40, 2, 40 * 2 * 3)
    assert plan.note.startswith("no budget: 40 of 40 prompts, 2 repetitions, exactly 128 tokens")
    assert len(planned(replace(WISHES, n_prompts=3), 40, left_s=1.0).prompts) == 3


def test_longer_prompts_and_pauses_are_in_the_expectation() -> None:
    """Prevents: a depth sweep that takes ten times the expected time."""
    one = conditions(WISHES, (128,))[0]
    plain_s = run_seconds(WISHES, SPEEDS, one, 100)
    assert run_seconds(WISHES, SPEEDS, replace(one, n_prompt=1100), 100) == pytest.approx(plain_s + 30.0)
    both = [SPEEDS[0], *(replace(each, draft_read_s=0.01) for each in SPEEDS[1:])]
    assert run_seconds(WISHES, both, one, 100) == pytest.approx(plain_s + 2.0)
    assert run_seconds(replace(WISHES, delay_s=2.0), SPEEDS, one, 100) == pytest.approx(plain_s + 6.0)
