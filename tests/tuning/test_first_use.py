"""The measurement at the first use of a pair: what it asks of the models, when it ends, what it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from specllama.base.errors import ContextFull
from specllama.core.arrays import FloatArray
from specllama.core.types import Cancel, Caps
from specllama.drafters.calibration import Tally
from specllama.drafters.controller import LEAST_RATE, UNMEASURED, CostProfile, Points, cost_at, rows_of
from specllama.drafters.length import DraftLength
from specllama.pairs import profile as profiles
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.learning import learned, looked
from specllama.pairs.profile import LOOK_AFTER, Evidence, Habit, RowCost
from specllama.pairs.setup import Listener, Setup, choose, load_models, prepare
from specllama.tuning import first_use
from specllama.tuning.first_use import AGREE, MOST_S, MOST_TOKENS, FirstCosts, FirstUse, can_pay, measuring
from specllama.tuning.forecast import speedup
from tests import tiny
from tests.pairs.test_learning import PROFILE, answer, chosen

STEP_S = 0.1
FLAT = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8), (16, 3.0))
STEEP = ((1, 1.0), (2, 2.0), (4, 3.0), (8, 7.0), (16, 9.0))
FLAT_LONG = ((1, 1.0), (2, 1.1), (4, 1.2), (8, 1.5), (17, 2.6))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A model whose passes take made-up time."""

    end_tokens: frozenset[int] = frozenset()
    vocab_size, n_ctx = 50, 64

    def __init__(self, clock: Clock, cost: Callable[[int], float]) -> None:
        self.caps = Caps(max_block=17)
        self.length = 5
        self.passes = list[int]()
        self._clock, self._cost, self._n_fed = clock, cost, 0

    def feed(self, tokens: Sequence[int]) -> None:
        self.length, self._n_fed = self.length + len(tokens), self._n_fed + len(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        n_rows, self._n_fed = len(tokens) + self._n_fed, 0
        if self.length + n_rows > self.n_ctx:
            raise ContextFull("full")
        self.length += len(tokens)
        self.passes.append(n_rows)
        self._clock.now += self._cost(n_rows)
        return np.zeros((len(tokens), self.vocab_size), np.float32)

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.truncate(length + len(path))


def measured(
    verify: Sequence[tuple[int, float]],
    c: float,
    noise: Callable[[], float] = lambda: 1.0,
    step_s: float = STEP_S,
    *,
    hurried: bool = False,
) -> tuple[FirstCosts, Timed, float]:
    """(result, target, seconds) on a made-up machine; `verify` also shapes the draft's blocks."""
    clock, points = Clock(), tuple(verify)
    target = Timed(clock, lambda n: step_s * cost_at(points, n) * noise())
    draft = Timed(clock, lambda n: step_s * c * cost_at(points, n) * noise())
    work = measuring(target, draft, list(range(16)), hurried=hurried, clock=clock)
    while True:
        try:
            next(work)
        except StopIteration as end:
            assert (target.length, draft.length) == (5, 5)
            return end.value, target, clock.now


def test_a_steady_machine_is_measured_in_the_time_of_a_dozen_tokens() -> None:
    """Prevents: a first answer that waits; costs that are rounded or mixed up."""
    found, target, spent_s = measured(FLAT, 0.3)
    assert dict(found.costs.verify) == pytest.approx({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.8, 17: 1.8 + 9 * 1.5 * 0.125})
    assert found.costs.assumed == (17,)
    assert dict(found.costs.draft) == pytest.approx({1: 0.3, 16: 0.9})
    assert (found.step_s, found.noise) == pytest.approx((STEP_S, 0.0))
    assert spent_s < 12 * STEP_S
    assert target.passes == [1, 1, 4, 2, 8, 1]


def test_an_answer_that_waits_does_so_for_the_time_of_five_tokens() -> None:
    """Prevents: a first answer of 64 tokens that is slower than plain decoding by a tenth."""
    for verify in (FLAT, STEEP):
        found, target, spent_s = measured(verify, 0.3, hurried=True)
        assert target.passes == [1, 1, 4]
        assert spent_s < 6 * STEP_S
        assert found.costs.verify_cost(4) == pytest.approx(dict(verify)[4])
        assert [n for n, _ in found.costs.verify] == [1, 2, 4, 8, 17]
        assert found.costs.assumed == (2, 8, 17)
        assert found.costs.draft_cost() == pytest.approx(0.3)
        # The steepest curve instead would keep a draft that pays from reading a prompt.
        assert found.costs.draft_cost(4) == pytest.approx(0.3 * dict(verify)[4])


@pytest.mark.parametrize(("c", "verify", "n_passes"), [(1.0, FLAT, 3), (0.9, STEEP, 6)])
def test_a_draft_that_cannot_pay_ends_it_at_once(c: float, verify: Sequence[tuple[int, float]], n_passes: int) -> None:
    """Prevents: a dozen passes for a draft whose first one decides."""
    found, target, spent_s = measured(verify, c)
    assert len(target.passes) == n_passes
    assert spent_s < 14 * STEP_S
    assert dict(found.costs.draft) == pytest.approx({1: c})
    assert dict(found.costs.verify) == pytest.approx(
        dict(UNMEASURED) if c == 1.0 else {1: 1.0, 2: 2.0, 4: 3.0, 17: 16.0}
    )


@pytest.mark.parametrize("hurried", [False, True])
@pytest.mark.parametrize("factor", [3.0, 8.0])
def test_another_program_during_one_pass_does_not_rule_out_a_draft(hurried: bool, factor: float) -> None:
    """Prevents: a draft that is never loaded again, because the machine was busy for a moment."""
    for spoiled in range(2, 8):
        at = iter(range(100))
        slow = lambda at=at, spoiled=spoiled: factor if next(at) == spoiled else 1.0  # noqa: E731
        assert measured(FLAT, 0.3, slow, hurried=hurried)[0].costs.best_case > LEAST_RATE


def test_a_busy_machine_does_not_make_a_draft_pay_that_is_as_slow_as_its_target() -> None:
    """Prevents: one slow pass of the target, after which every draft seems cheap: 22 % of the runs, now 2 %."""
    n_runs, n_pays = 200, 0
    for seed in range(n_runs):
        rng = random.Random(seed)
        noise = lambda rng=rng: 1.0 + (rng.expovariate(0.67) if rng.random() < 0.3 else 0.0)  # noqa: E731
        n_pays += measured(FLAT, 1.0, noise, hurried=True)[0].costs.best_case > LEAST_RATE
    assert n_pays <= 0.05 * n_runs


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [((1, 1.0), (2, 1.2), (4, 2.4), (8, 4.5), (17, 9.0)), FLAT_LONG])
@pytest.mark.parametrize("seed", range(5))
def test_a_cost_that_was_learned_too_high_is_corrected_and_a_right_one_stays(wrong: Points, seed: int) -> None:
    """Prevents: a block that is never drafted again because the machine was busy once; a length that goes to and fro.

    Noise of 10 %. The bound: a look takes the time of 20 tokens at most, once in LOOK_AFTER answers.
    """
    true = CostProfile(verify=FLAT_LONG, draft=((1, 0.1), (16, 0.3)))
    rates = [speedup(true, 0.8, k) for k in range(17)]
    rng, profile = random.Random(seed), replace(PROFILE, source="thorough", costs=replace(true, verify=wrong))
    lengths, looks_s = list[int](), list[float]()
    for _ in range(3 * LOOK_AFTER):
        k = chosen(profile.costs)
        lengths.append(k)
        profile = learned(profile, answer([0, 1, k, k, k] * 8, FLAT_LONG, 0.1, rng=rng), Tally(), greedy=True)
        if profile.is_due:
            found, _, spent_s = measured(FLAT_LONG, 0.1, lambda: rng.gauss(1.0, 0.1))
            looks_s.append(spent_s)
            profile = looked(profile, found.costs, 0)
    assert len(looks_s) == 3
    assert max(looks_s) < 20.0 * STEP_S
    assert fmean(rates[k] for k in lengths[LOOK_AFTER:]) > 0.97 * max(rates)
    assert sum(a != b for a, b in pairwise(lengths[LOOK_AFTER:])) <= LOOK_AFTER // 2


@pytest.mark.parametrize("depth", [0, 300, 1000])
def test_a_look_behind_an_answer_finds_the_costs_near_the_beginning(depth: int) -> None:
    """Prevents: attention that counts twice, in T(n) and beside it."""
    true = CostProfile(verify=FLAT_LONG, draft=((1, 0.1), (16, 0.3)), attention=1e-4)
    found = CostProfile(verify=tuple((n, true.verify_cost(n, depth)) for n, _ in FLAT_LONG), draft=true.draft)
    wrong = CostProfile(verify=tuple((n, 1.3 * cost if n > 1 else cost) for n, cost in FLAT_LONG), draft=true.draft)
    kept = looked(replace(PROFILE, costs=replace(wrong, attention=1e-4)), found, depth)
    assert [cost for _, cost in kept.costs.verify] == pytest.approx([cost for _, cost in FLAT_LONG])


def test_what_is_not_measured_never_rules_out_a_draft_that_could_pay() -> None:
    """Prevents: an early end that is wrong: with blocks that cost nothing more, this draft would pay."""
    assert can_pay(0.5, ((1, 1.0), (4, 3.0)))
    assert not can_pay(0.5, ((1, 1.0), (2, 2.5), (4, 5.0), (8, 9.0)))
    assert can_pay(0.97)
    assert not can_pay(0.99)


def test_a_busy_machine_is_measured_longer_but_never_too_long() -> None:
    """Prevents: one sample that another program disturbed; a first answer that waits for minutes."""
    for seed in range(20):
        rng = random.Random(seed)
        found, target, spent_s = measured(FLAT, 0.3, lambda rng=rng: rng.uniform(1.0, 1.6))
        assert spent_s < max(MOST_S, MOST_TOKENS * 1.6 * STEP_S) + 3 * STEP_S
        assert (found.noise < AGREE - 1.0) == (len(target.passes) == 6) or len(target.passes) > 6
    found, target, spent_s = measured(FLAT, 0.3, random.Random(1).random, step_s=0.001)
    assert len(target.passes) <= 22
    assert all(cost >= 0.9 for _, cost in found.costs.verify)


@pytest.fixture
def setup(tmp_path: Path, sound_build: None) -> Setup:
    """A tiny pair that was never measured."""
    target, draft = tiny.write_pair(tmp_path)
    return prepared(Ask(names=Names(target=str(target), draft=str(draft)), hardware=Hardware(n_ctx=256, n_threads=1)))


def prepared(ask: Ask) -> Setup:
    return prepare(choose(ask, Listener()), Listener())


def ask_again(setup: Setup, drafting: Drafting | None = None) -> Setup:
    """The same pair at the next start."""
    assert setup.draft is not None
    names = Names(target=str(setup.target.path), draft=str(setup.draft.path))
    return prepared(Ask(names=names, drafting=drafting or Drafting(), hardware=setup.hardware))


def test_a_loaded_pair_is_measured_once_with_pauses_and_keeps_what_it_holds(setup: Setup) -> None:
    """Prevents: a measurement that spoils a conversation, begins anew after each line, or comes back at every start."""
    assert (setup.measures, setup.strategy, setup.profile) == (True, "lookup", None)
    with load_models(setup, Listener(), Cancel()) as models:
        ticks = count()  # every pass takes the same time: on a busy machine the result is not kept at once
        work, n_passes = FirstUse(setup, models, clock=lambda: STEP_S * next(ticks)), 0
        models.target.feed([1, 2, 3])
        while not work.done:
            for share in work:  # one pass for each line that is typed
                n_passes += 1
                assert 0.0 < share <= 1.0
                break
            assert models.draft is not None
            assert (models.target.length, models.draft.length) == (3, 0)
    assert n_passes >= 4
    profile = work.setup.profile
    assert profile is not None
    assert (profile.source, work.setup.measures) == ("use", False)
    assert profiles.find(setup.subject).profile == profile
    again = ask_again(setup)
    assert (again.profile, again.measures) == (profile, False)
    assert (again.draft is not None) == profile.draft_can_pay


def test_a_hurried_profile_is_completed_and_keeps_what_answers_taught(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an assumed T(2) or T(8) that holds for good, because no draft is as long as the wrong one."""

    def flat(*_args: object, hurried: bool, **_options: object) -> Generator[None, None, FirstCosts]:
        yield
        costs = CostProfile(verify=FLAT, draft=((1, 0.2),), assumed=(2, 8, 17) if hurried else (17,))
        return FirstCosts(costs, STEP_S, 0.0)

    monkeypatch.setattr(first_use, "measuring", flat)
    habit = Habit(greedy=True, acceptance=0.7, confidence=0.6, weight=2.0)
    with load_models(setup, Listener(), Cancel()) as models:
        first = FirstUse(setup, models, hurried=True).finish()
        assert first.profile is not None
        assert (first.completes, first.profile.costs.assumed) == (True, (2, 8, 17))
        assert list(FirstUse(first, models, hurried=True)) == []
        profiles.update(setup.subject, first.profile, lambda kept: replace(kept, habits=(habit,)))
        done = FirstUse(first, models).finish()
    assert done.profile is not None
    assert (done.completes, done.profile.costs.assumed, done.profile.habits) == (False, (17,), (habit,))
    assert profiles.find(setup.subject).profile == done.profile
    assert not ask_again(setup).completes


def test_a_draft_that_answers_made_too_expensive_is_looked_at_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a draft that is never loaded again; one that was measured as hopeless and is loaded ever again."""

    def cheap(*_args: object, **_options: object) -> Generator[None, None, FirstCosts]:
        yield
        return FirstCosts(CostProfile(verify=FLAT, draft=((1, 0.2),)), STEP_S, 0.0)

    monkeypatch.setattr(first_use, "measuring", cheap)
    slow = CostProfile(verify=FLAT, draft=((1, 1.5),))
    for source, taught in (("use", True), ("thorough", True), ("use", False)):
        draft = RowCost(1, 1.5, 1.0) if taught else None
        profile = replace(PROFILE, source=source, costs=slow, evidence=Evidence(draft=draft, n_answers=LOOK_AFTER))
        profiles.save(setup.subject, profile)
        again = ask_again(setup)
        assert (again.draft is not None, again.completes) == (taught, taught)
        if taught:
            with load_models(again, Listener(), Cancel()) as models:
                FirstUse(again, models).finish()
            kept = profiles.find(setup.subject).profile
            assert kept is not None
            assert (kept.source, kept.costs.draft_cost(), kept.evidence) == (source, pytest.approx(0.2), Evidence())
            profiles.path_of(setup.subject, kept.source).unlink()


def test_a_look_at_a_busy_machine_takes_no_draft_away(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a tuned draft that is lost because other programs slowed its passes once."""

    def busy(*_args: object, **_options: object) -> Generator[None, None, FirstCosts]:
        yield
        return FirstCosts(CostProfile(verify=FLAT, draft=((1, 2.0),)), STEP_S, 0.5)

    monkeypatch.setattr(first_use, "measuring", busy)
    costs = CostProfile(verify=FLAT, draft=((1, 0.2),))
    profiles.save(setup.subject, replace(PROFILE, costs=costs, evidence=Evidence(n_answers=LOOK_AFTER)))
    again = ask_again(setup)
    assert again.completes
    with load_models(again, Listener(), Cancel()) as models:
        FirstUse(again, models).finish()
    kept = profiles.find(setup.subject).profile
    assert kept is not None
    assert (kept.costs, kept.evidence.n_answers) == (costs, 0)


def test_a_look_is_left_out_in_a_long_context_and_where_nothing_is_measured(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: T(n) measured where attention hides it; a draft in memory for a look that never comes."""
    slow = CostProfile(verify=FLAT, draft=((1, 1.5),))
    evidence = Evidence(draft=RowCost(1, 1.5, 1.0), n_answers=LOOK_AFTER)
    profiles.save(setup.subject, replace(PROFILE, costs=slow, evidence=evidence))
    assert ask_again(setup, Drafting(measure=False)).draft is None
    again = ask_again(setup)
    monkeypatch.setattr(first_use, "DEEP", 3)
    with load_models(again, Listener(), Cancel()) as models:
        models.target.feed([1, 2, 3])
        assert list(FirstUse(again, models)) == []
    kept = profiles.find(setup.subject).profile
    assert kept is not None
    assert kept.evidence == evidence


def test_a_busy_machine_that_finds_the_same_twice_is_believed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a hopeless draft that is loaded and measured at every start, on a machine that is always busy."""

    def hopeless(*_args: object, **_options: object) -> Generator[None, None, FirstCosts]:
        yield
        costs = CostProfile(verify=UNMEASURED, draft=((1, 2.0),), assumed=rows_of(UNMEASURED))
        return FirstCosts(costs, STEP_S, 0.5)

    monkeypatch.setattr(first_use, "measuring", hopeless)
    for n_found in range(2):
        assert ask_again(setup).measures
        with load_models(setup, Listener(), Cancel()) as models:
            assert FirstUse(setup, models).finish().draft is None
        kept = profiles.find(setup.subject).profile
        assert (kept is not None) == (n_found == 1)
    assert ask_again(setup).draft is None


def test_an_explicit_length_or_never_needs_no_measurement(setup: Setup) -> None:
    """Prevents: seconds for a number that was asked for; a draft in memory that nothing will use."""
    fixed = ask_again(setup, Drafting(length=DraftLength(4)))
    assert (fixed.measures, fixed.strategy, fixed.policy(greedy=True)) == (False, "draft-simple", None)
    never = ask_again(setup, Drafting(measure=False))
    assert (never.measures, never.strategy, never.draft) == (False, "lookup", None)
    named = ask_again(setup, Drafting(spec_type="draft-simple"))
    assert (named.measures, named.strategy) == (True, "draft-simple")


def test_a_context_without_room_is_no_error(setup: Setup) -> None:
    """Prevents: a chat with a full context that ends while its user types."""
    with load_models(setup, Listener(), Cancel()) as models:
        models.target.feed([1] * models.target.n_ctx)
        work = FirstUse(setup, models)
        assert list(work) == []
        assert (work.done, work.setup) == (True, setup)


def test_a_state_folder_that_cannot_be_written_costs_only_the_next_measurement(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: no answer on a full disk."""

    def full(*_args: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiles, "save", full)
    with load_models(setup, Listener(), Cancel()) as models:
        work = FirstUse(setup, models)
        list(work)
    assert work.setup.profile is not None
    assert ask_again(setup).profile is None
