"""What answers teach a profile, on made-up machines."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from specllama.core.events import PromptProgress, StepEvent
from specllama.core.types import Decision, DraftPlan
from specllama.drafters.calibration import Calibration, Prior, Tally
from specllama.drafters.controller import Controller, CostProfile, Points, cost_at
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import DEFAULT
from specllama.pairs import profile as profiles
from specllama.pairs.learning import MOST_WEIGHT, Passes, learned
from specllama.pairs.profile import ClassFigures, LoadSeconds, Profile, ProfileKey
from specllama.tuning.forecast import speedup

VERIFY: Points = ((1, 1.0), (2, 1.5), (4, 2.0), (8, 3.0))
COSTS = CostProfile(verify=VERIFY, draft=((1, 0.2), (16, 1.0)))
PROFILE = Profile(
    made="2026-01-02T03:04:05+00:00", source="use", target_path=DEFAULT, draft_path=DEFAULT, step_s=0.1, costs=COSTS
)
NONE = Tally()


def step(number: int, k: int, accepted: int, eval_s: float, draft_s: float, *, more: bool = True) -> StepEvent:
    """A step with k tokens of the draft; `more`: a further one was looked at, but not drawn."""
    plan = DraftPlan(n_drawn=k)
    drawn = [Decision(depth, 0.9, True) for depth in range(k)] + [Decision(k, 0.3, False)] * (more and k > 0)
    return StepEvent(
        step=number, n_rows=k + 1, cost=None, drafted=(7,) * k, accepted=accepted, drafter="chain",
        decisions=(Decision(0, 0.0, k > 0, plan), *drawn), draft_s=draft_s, eval_s=eval_s,
        sample_s=0.0, kv_s=0.0, step_s=eval_s + draft_s, loop_s=0.0,
    )  # fmt: skip


def answer(
    lengths: Sequence[int],
    verify: Points,
    c: float,
    *,
    step_s: float = 0.1,
    rng: random.Random | None = None,
    depth: int = 0,
    attention: float = 0.0,
) -> Passes:
    """The passes of an answer on a machine with these costs; 10 % noise with `rng`."""
    passes, one = Passes(), 1.0 + depth * attention
    passes.take(PromptProgress(0, depth))

    def noise() -> float:
        return rng.gauss(1.0, 0.1) if rng else 1.0

    for number, k in enumerate((0, *lengths)):
        n_evals = k + 1 if k else 0
        eval_s = step_s * (cost_at(verify, k + 1) + (k + 1) * depth * attention)
        passes.take(step(number, k, 0, eval_s * noise(), step_s * one * c * n_evals * noise()))
    return passes


def test_the_passes_of_an_answer_are_taken_apart() -> None:
    """Prevents: the prompt's pass counted; the reading of a late draft counted as its drafting."""
    passes = Passes()
    for number, k in enumerate((3, 0, 3, 3, 3)):
        passes.take(step(number, k, 3, 1.0 + k, 0.1 * k, more=number != 3))
    assert dict(passes.eval_s) == {1: [1.0], 4: [4.0] * 3}
    # The draft caught up in step 2; step 4 comes after a block that was fully accepted and not looked behind.
    assert passes.draft_s == [(pytest.approx(0.3), 3, False), (pytest.approx(0.3), 4, True)]


def test_the_passes_of_a_tree_teach_the_target_and_not_the_draft() -> None:
    """Prevents: a draft that seems cheap because a level of a tree, with a question for every node, is one pass."""
    passes = Passes()
    for number in range(4):
        grown = tuple(Decision(depth, 0.9, True) for depth in (0, 0, 1, 1, 1))
        passes.take(replace(step(number, 5, 2, 1.0, 0.4), parents=(-1, 0, 0, -1, 3), path=(0, 1), decisions=grown))
    assert dict(passes.eval_s) == {6: [1.0] * 3}
    assert passes.draft_s == []
    passes.take(step(4, 3, 0, 1.0, 0.4))
    assert passes.draft_s == [], "the chain after a tree reads what the draft did not"


def test_a_machine_as_measured_teaches_nothing_new() -> None:
    """Prevents: a profile, and with it the text of a seed, that changes after every answer."""
    profile, rng = replace(PROFILE, source="thorough"), random.Random(1)
    for _ in range(40):
        profile = learned(profile, answer([0] * 12 + [1, 3, 3, 7] * 12, VERIFY, 0.2, rng=rng), NONE, greedy=True)
    assert profile.costs == COSTS
    assert all(each.weight <= MOST_WEIGHT for each in profile.evidence.verify)


def test_a_slower_machine_with_the_same_curve_teaches_nothing_but_its_speed() -> None:
    """Prevents: a throttled clock taken for another curve."""
    profile = PROFILE
    for _ in range(20):
        profile = learned(profile, answer([0, 1, 3, 7] * 8, VERIFY, 0.2, step_s=0.2), NONE, greedy=True)
    assert profile.costs == COSTS
    assert profile.step_s == pytest.approx(0.2, rel=0.02)


def test_a_short_answer_teaches_nothing() -> None:
    """Prevents: a profile that follows three passes."""
    assert learned(PROFILE, answer([0, 3] * 4, ((1, 1.0), (4, 9.0)), 0.9), NONE, greedy=True) == PROFILE


def test_the_draft_and_a_width_that_was_never_measured_are_learned() -> None:
    """Prevents: T(3) that stays on a straight line, where the CPU has a step."""
    profile, jump = PROFILE, ((1, 1.0), (2, 1.5), (3, 2.6), (4, 2.0), (8, 3.0))
    for _ in range(25):
        profile = learned(profile, answer([0, 1, 2, 3, 7] * 8, jump, 0.4), NONE, greedy=True)
    for n, cost in jump:
        assert profile.costs.verify_cost(n) == pytest.approx(cost, rel=0.07)
    assert profile.costs.draft_cost() == pytest.approx(0.4, rel=0.07)
    assert profile.costs.draft_cost(16) == pytest.approx(2.0, rel=0.07)


def chosen(costs: CostProfile, context: int = 0) -> int:
    """How far a controller drafts at an acceptance of 80 %."""
    controller, depth = Controller(costs, calibration=Calibration(Prior(0.8, 0.8, 0.0))), 0
    limit = controller.plan(16, lag=0, depth=context).n_drawn
    while depth < limit and (not depth or controller.look(depth)) and controller.go_on(depth, 0.8):
        depth += 1
    return depth


@pytest.mark.parametrize("seed", range(10))
def test_a_machine_that_changes_is_followed_and_the_length_settles(seed: int) -> None:
    """Prevents: drafts that cost more than they save on a throttled laptop; a length that goes to and fro."""
    before, after = ((1, 1.0), (2, 1.1), (4, 1.2), (8, 1.5)), ((1, 1.0), (2, 1.2), (4, 1.6), (8, 4.5))
    rng, profile, lengths = random.Random(seed), replace(PROFILE, costs=replace(COSTS, verify=before)), list[int]()
    for n_answers in range(60):
        k = chosen(profile.costs)
        lengths.append(k)
        curve = before if n_answers < 20 else after
        said = answer([0, 1, 2, k, k, k, k] * 6, curve, 0.1, rng=rng)
        profile = learned(profile, said, NONE, greedy=True)
    for curve, answers in ((before, lengths[5:20]), (after, lengths[-25:])):
        true = CostProfile(verify=curve, draft=((1, 0.1), (16, 0.5)))
        rates = [speedup(true, 0.8, k) for k in range(8)]
        assert fmean(rates[k] for k in answers) > 0.97 * max(rates)
    assert sum(a != b for a, b in pairwise(lengths[-25:])) <= 6


def test_a_long_context_teaches_the_attention_and_not_the_weights() -> None:
    """Prevents: long drafts where every row reads 3,500 tokens of context; short ones in the next short chat."""
    flat, a = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8)), 1e-4
    costs = replace(COSTS, verify=flat)
    profile, rng = replace(PROFILE, costs=costs), random.Random(1)
    for _ in range(15):
        said = answer([0, 1, 3, 7] * 8, flat, 0.2, rng=rng, depth=3500, attention=a)
        profile = learned(profile, said, NONE, greedy=True)
    assert profile.costs.verify == flat
    assert profile.costs.attention == pytest.approx(a, rel=0.3)
    assert profile.costs.verify_cost(8, 3500) == pytest.approx((1.8 + 8 * 0.35) / 1.35, rel=0.15)
    assert chosen(profile.costs, 3500) < chosen(profile.costs)
    again = profile
    for _ in range(15):
        again = learned(again, answer([0, 1, 3, 7] * 8, flat, 0.2, rng=rng), NONE, greedy=True)
    assert again.costs == profile.costs


@pytest.mark.parametrize("lengths", [[3], [0, 3]])
def test_a_known_attention_is_not_learned_as_the_cost_of_rows(lengths: list[int]) -> None:
    """Prevents: a T(n) that grows with every answer, because its own error or the attention feeds it."""
    flat, a = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8)), 1e-4
    profile = replace(PROFILE, costs=replace(COSTS, verify=flat, attention=a))
    for _ in range(20):
        profile = learned(profile, answer(lengths * 20, flat, 0.2, depth=1000, attention=a), NONE, greedy=True)
    assert profile.costs.verify == flat


def test_rows_are_not_learned_without_a_pass_of_one_row() -> None:
    """Prevents: a wrong T(4) that is confirmed by a T(1) computed from it."""
    slower = ((1, 1.0), (2, 1.5), (4, 3.0), (8, 3.0))
    assert learned(PROFILE, answer([3, 7] * 20, slower, 0.2), NONE, greedy=True).costs.verify == VERIFY


def test_a_long_context_does_not_teach_the_draft() -> None:
    """Prevents: the draft's attention over 3,500 tokens taken for its cost in a short chat."""
    said = answer([0, 3, 3] * 20, VERIFY, 0.4, depth=3500, attention=1e-4)
    assert learned(PROFILE, said, NONE, greedy=True).costs.draft == COSTS.draft


def test_the_acceptance_of_a_pair_is_learned_by_temperature() -> None:
    """Prevents: greedy answers that begin with the acceptance of sampling; one strange answer that decides."""
    said = answer([0, 1, 3] * 8, VERIFY, 0.2)
    once = learned(PROFILE, said, Tally(2, 0.2, 1.8), greedy=True)
    assert once.prior(greedy=True) == PROFILE.prior(greedy=True)
    profile = PROFILE
    for _ in range(6):
        profile = learned(profile, said, Tally(100, 50.0, 70.0), greedy=False)
    assert profile.prior(greedy=True) == PROFILE.prior(greedy=True)
    assert profile.prior(greedy=False).typical == pytest.approx(0.5)
    assert profile.prior(greedy=False).at(0.7) == pytest.approx(0.5)
    tuned = replace(PROFILE, source="thorough", classes=(ClassFigures("code", False, 0.9, 0.7, 4, 1.5),))
    assert learned(tuned, said, Tally(100, 85.0, 70.0), greedy=False).habits == ()
    for _ in range(3):
        tuned = learned(tuned, said, Tally(100, 50.0, 70.0), greedy=False)
    assert 0.5 < tuned.prior(greedy=False).typical < 0.9


@pytest.fixture
def subject(home: Path) -> ProfileKey:
    home.mkdir()
    for name in ("target", "draft"):
        (home / name).write_bytes(b"weights")
    return ProfileKey(home / "target", LoadOptions(), home / "draft", LoadOptions())


def test_two_processes_teach_one_profile(subject: ProfileKey) -> None:
    """Prevents: the later process overwriting what the earlier one learned, or a profile of `tune`."""
    profiles.save(subject, PROFILE)
    slower = [replace(PROFILE, step_s=2.0), replace(PROFILE, step_s=3.0)]
    profiles.update(subject, PROFILE, lambda kept: replace(kept, step_s=kept.step_s + 1.0))
    changed = profiles.update(subject, slower[0], lambda kept: replace(kept, step_s=kept.step_s + 1.0))
    assert changed is not None
    assert profiles.find(subject).profile == changed == replace(PROFILE, step_s=PROFILE.step_s + 2.0)
    newer = replace(PROFILE, made="2026-02-02T03:04:05+00:00")
    path = profiles.save(subject, newer)
    assert profiles.update(subject, PROFILE, lambda kept: slower[1]) is None
    first = replace(PROFILE, strategy="lookup", step_s=0.0)
    alone = ProfileKey(subject.target, LoadOptions())
    for _ in range(2):
        profiles.begin(alone, first, lambda kept: replace(kept, step_s=kept.step_s + 1.0), {})
    assert profiles.find(alone).profile == replace(first, step_s=2.0)
    path.write_text("[]")
    assert profiles.update(subject, newer, lambda kept: kept) is None
    assert json.loads(path.read_text()) == []


def test_the_fastest_loads_are_kept_with_and_without_a_draft() -> None:
    """Prevents: a cold disk at the first use that counts for good; the target's load taken for that of both."""
    seen = LoadSeconds()
    for both, target in ((9.0, 0.0), (2.0, 0.0), (3.0, 0.0), (0.0, 1.5), (0.0, 4.0)):
        seen = seen.least(LoadSeconds(both, target))
    assert seen == LoadSeconds(both=2.0, target=1.5)
    assert (seen.of_draft(0.25), LoadSeconds(both=2.0).of_draft(0.25), LoadSeconds().of_draft(0.25)) == (0.5, 0.5, 0.0)
    assert LoadSeconds(both=1.0, target=1.5).of_draft(0.25) == 0.0
    assert LoadSeconds(both=9.0, target=1.5).of_draft(0.25) == 1.5


def test_a_width_that_answers_show_is_no_longer_assumed() -> None:
    """Prevents: an assumed cost that outweighs an answer; a gain that stays unknown."""
    assumed = replace(PROFILE, costs=replace(COSTS, assumed=(2, 8)))
    same = learned(assumed, answer([0, 1] * 20, VERIFY, 0.2), NONE, greedy=True)
    assert same.costs == replace(COSTS, assumed=(8,))
    lower = ((1, 1.0), (2, 1.1), (4, 2.0), (8, 3.0))
    known, guessed = (learned(each, answer([0, 1] * 20, lower, 0.2), NONE, greedy=True) for each in (PROFILE, assumed))
    assert guessed.costs.verify_cost(2) < known.costs.verify_cost(2)
