"""Costs, calibration and single decisions of the controller; test_controller_replay judges whole answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain
from specllama.core.types import Draft, DraftPlan, Observation, Planner, Verdict
from specllama.drafters.calibration import Calibration, Prior
from specllama.drafters.controller import (
    BLIND_INVESTMENT,
    DOUBTFUL_GAP,
    FIRST_GAP,
    GAP_PER_PROBE_COST,
    HORIZON,
    LEAST_RATE,
    PROBE_TOKENS,
    PROMISING,
    SHARE_WEIGHT,
    Controller,
    CostProfile,
    Points,
    rows_of,
)
from tests.marks import looped

FLAT = CostProfile(verify=((1, 1.0), (17, 1.0)), draft=((1, 0.1), (17, 1.7)))


def known(alpha: float, *, at: float = 0.9, n: int = 4000) -> Calibration:
    """A calibration with so many samples of one acceptance that its prior no longer counts."""
    return deepcopy(_known(alpha, at, n))


@cache
def _known(alpha: float, at: float, n: int) -> Calibration:
    calibration = Calibration(Prior(alpha, alpha, 0.0))
    for _ in range(n):
        calibration.learn(at, alpha)
    return calibration


def costs(verify: Points, c: float, *, reread: float = 1.0) -> CostProfile:
    """`reread`: cost of a second row of the draft, in units of the first."""
    return CostProfile(verify=verify, draft=((1, c), (2, (1 + reread) * c)))


def seen(n_drafted: int, n_accepted: int, **parts: object) -> Observation:
    draft = Draft(tuple(range(n_drafted)), **parts)  # type: ignore[arg-type]
    return Observation((), draft, Verdict(tuple(range(n_accepted)), 0), "test")


def best_length(calibration: Calibration, profile: CostProfile, limit: int = 16) -> tuple[int, float]:
    """The plan of docs/controller.md: the k with the highest rate, the smaller k first."""
    rates = {0: 1.0}
    chances = [calibration.typical] * limit
    for k in range(1, limit + 1):
        reach = [math.prod(chances[: i + 1]) for i in range(k)]
        reread = reach[-1] * (profile.draft_cost(2) - profile.draft_cost())
        rates[k] = (1 + sum(reach)) / (k * profile.draft_cost() + reread + profile.verify_cost(k + 1))
    best = max(rates, key=lambda k: (rates[k], -k))
    return best, rates[best]


def drafted(controller: Controller, confidences: Sequence[float]) -> int:
    """The number of tokens drafted by a drafter that asks every question."""
    plan = controller.plan(len(confidences), lag=0)
    n = 0
    while n < plan.n_drawn and (n == 0 or controller.look(n)) and controller.go_on(n, confidences[n]):
        n += 1
    return n


def test_costs_lie_on_lines_between_the_measured_points_whatever_their_shape() -> None:
    """A non-monotone T(n) that is smoothed; a block between two points counted as one of them."""
    profile = CostProfile(verify=((1, 1.0), (3, 2.0), (4, 1.5), (8, 2.3)), draft=((1, 0.2), (33, 1.0), (65, 2.6)))
    assert [profile.verify_cost(n) for n in (1, 2, 3, 4, 6, 8)] == pytest.approx([1.0, 1.5, 2.0, 1.5, 1.9, 2.3])
    assert profile.verify_cost(10) == pytest.approx(2.7)
    assert profile.draft_cost() == 0.2
    assert profile.draft_cost(17) == pytest.approx(0.6)
    assert profile.draft_cost(129) == pytest.approx(5.8), "after the last point its slope continues"
    assert replace(profile, draft=((1, 0.2),)).draft_cost(3) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "data",
    [
        {"verify": [[1, 1.0]]},
        {"verify": [], "draft": [[1, 0.1]]},
        {"verify": [[2, 1.0]], "draft": [[1, 0.1]]},
        {"verify": [[1, 1.0], [1, 1.5]], "draft": [[1, 0.1]]},
        {"verify": [[1, 1.0], [2, math.inf]], "draft": [[1, 0.1]]},
        {"verify": [[1, 1.0]], "draft": [[1, -0.1]]},
        {"verify": [[1, 1.0]], "draft": [[1, math.nan]]},
        {"verify": [[1, 2.0]], "draft": [[1, 0.1]]},
    ],
)
def test_a_profile_that_cannot_be_meant_is_an_error(data: dict[str, object]) -> None:
    """A damaged file whose costs are used."""
    with pytest.raises(ReportError, match="cost profile"):
        from_plain(CostProfile, data, "the cost profile")


def test_acceptance_is_learned_beside_the_confidence() -> None:
    """One average for everything; a bad draft that gets a new chance at every new confidence."""
    bad, fine = Calibration(), Calibration()
    assert bad.empty
    for _ in range(40):
        bad.learn(0.9, 0.0)
        fine.learn(0.6, 1.0)
    assert not bad.empty
    assert bad.typical < 0.2 < 0.9 < fine.typical
    assert Calibration().at(0.995) > 0.9
    assert 0.0 < bad.at(0.0) < bad.at(0.995) < 0.25
    assert fine.at(0.4) > Calibration().at(0.4) + 0.2


@pytest.mark.parametrize("seed", range(10))
def test_estimates_are_those_of_the_definition(seed: int) -> None:
    """docs/controller.md, Calibration: a sample or a prior that weighs more or less than it says."""
    chance = random.Random(seed)
    prior = Prior(chance.random(), 0.6 * chance.random(), chance.random())
    calibration, samples = Calibration(prior), list[tuple[float, float, float]]()  # weight, acceptance, expected
    judged = list[tuple[float, float]]()
    for _ in range(chance.randrange(30)):
        if chance.random() < 0.1:
            n_tokens = chance.randrange(50)
            calibration.age(n_tokens)
            samples = [(0.99**n_tokens * weight, *rest) for weight, *rest in samples]
        confidence, acceptance = chance.random(), chance.choice([0.0, 1.0, chance.random()])
        calibration.learn(confidence, acceptance)
        samples = [(0.99 * weight, *rest) for weight, *rest in samples]
        samples.append((1.0, acceptance, prior.base + prior.slope * confidence))
        judged.append((confidence, acceptance))
    assert calibration.judged.n == len(judged)
    assert calibration.judged.confidence == pytest.approx(sum(confidence for confidence, _ in judged))
    assert calibration.judged.accepted == pytest.approx(sum(acceptance for _, acceptance in judged))
    n = 3.0 + sum(weight for weight, _, _ in samples)
    accepted = sum(weight * acceptance for weight, acceptance, _ in samples)
    surplus = sum(weight * (acceptance - expected) for weight, acceptance, expected in samples) / n
    assert calibration.typical == pytest.approx((accepted + 3.0 * prior.typical) / n)
    for confidence in (0.0, 0.3, 0.8, 1.0):
        at = prior.base + prior.slope * confidence + surplus
        assert calibration.at(confidence) == pytest.approx(min(max(at, 0.01), 0.99))


def test_the_figures_are_those_of_the_page() -> None:
    """docs/controller.md with other figures than the code."""
    assert (LEAST_RATE, FIRST_GAP, DOUBTFUL_GAP, GAP_PER_PROBE_COST, PROMISING) == (1.02, 8, 20, 192, 0.9)
    assert (HORIZON, SHARE_WEIGHT, BLIND_INVESTMENT) == (32, 8, 0.5)


def test_old_samples_fade() -> None:
    """A bad second page drafted to its end because of a good first page."""
    calibration = Calibration()
    for acceptance, n in ((1.0, 400), (0.0, 69)):
        for _ in range(n):
            calibration.learn(0.9, acceptance)
    assert 0.4 < calibration.typical < 0.6
    calibration.age(2000)
    assert calibration.typical == pytest.approx(Prior().typical)


@looped(
    c=(0.02, 0.1, 0.2, 0.42),
    alpha=(0.2, 0.5, 0.68, 0.9, 0.97),
    verify=(
        ((1, 1.0), (17, 1.0)),  # flat
        ((1, 1.0), (2, 1.59), (4, 1.73), (8, 2.08), (17, 2.9)),  # AMX
        ((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (8, 2.3), (17, 3.4)),  # CPU_REPACK
        ((1, 1.0), (8, 1.1), (9, 2.5), (17, 2.8)),  # a cliff
    ),
)
def test_the_plan_is_the_length_of_the_highest_rate(verify: Points, alpha: float, c: float) -> None:
    """Looking one token ahead: it stops at the first token if T jumps once and is flat afterwards."""
    profile, calibration = costs(verify, c), known(alpha)
    best, rate = best_length(calibration, profile)
    controller = Controller(profile, calibration=calibration)
    plan = controller.plan(16, lag=0)
    if rate <= 1.02:
        assert plan == DraftPlan()
    else:
        assert plan.rate == pytest.approx(rate)
        assert plan.n_drawn == 16
        assert plan.n_given == 0
        assert drafted(controller, [0.9] * 16) == best


def random_profile(chance: random.Random) -> CostProfile:
    verify = [1.0]
    for _ in range(8):
        verify.append(max(verify[-1] + chance.choice([-0.1, 0.0, 0.05, 0.3, 0.8]) * chance.random(), 0.5))
    draft = [chance.choice([0.02, 0.1, 0.3])]
    for _ in range(8):
        draft.append(draft[-1] * (0.8 + chance.random()))
    return CostProfile(verify=tuple(enumerate(verify, 1)), draft=tuple(enumerate(draft, 1)))


def rate_of(profile: CostProfile, offered: Sequence[float], drawn: Sequence[float]) -> float:
    """Tokens per T(1): looked-up tokens with these chances, then some of the model."""
    chances, cost = (*offered, *drawn), 0.0
    reach = [math.prod(chances[: i + 1]) for i in range(len(chances))]
    if drawn:
        reread = reach[-1] * max(profile.draft_cost(2) - profile.draft_cost(), 0.0)
        cost = profile.draft_cost(len(offered) + 1) + (len(drawn) - 1) * profile.draft_cost() + reread
    return (1.0 + sum(reach)) / (cost + profile.verify_cost(len(chances) + 1))


@looped(seed=range(150))
def test_plans_and_answers_are_those_of_the_definitions(seed: int) -> None:
    """docs/controller.md on random costs, offers and confidences: a term left out, or counted a token too early."""
    chance = random.Random(seed)
    profile, calibration = random_profile(chance), Calibration(Prior(chance.random(), 0.1, 0.8))
    limit, typical = chance.randrange(1, 9), calibration.typical
    offer = [chance.random() ** 0.3 for _ in range(chance.randrange(limit + 1))]
    alone = {n: rate_of(profile, offer[:n], ()) for n in range(len(offer) + 1)}
    n_given = max(alone, key=lambda n: (alone[n], -n))
    mixed = {
        (start, k): rate_of(profile, offer[:start], [typical] * k)
        for start in {0, n_given}
        for k in range(1, limit - start + 1)
    }
    best = max(mixed, key=mixed.__getitem__)
    controller = Controller(profile, calibration=calibration)
    plan = controller.plan(limit, offer=offer, lag=0)
    if mixed[best] <= LEAST_RATE * alone[n_given]:
        assert (plan.n_given, plan.n_drawn, plan.probe) == (n_given, 0, 0)
        assert plan.rate == pytest.approx(alone[n_given])
        return
    assert (plan.n_given, plan.n_drawn) == (best[0], limit - best[0])
    assert plan.rate == pytest.approx(mixed[best])

    def pays(n: int, reached: float, first: float, cost: float) -> bool:
        """Some m > n saves more than it costs."""
        for m in range(n + 1, limit + 1):
            reach = [reached * first * typical**i for i in range(m - n)]
            reread = (reach[-1] - reached) * max(profile.draft_cost(2) - profile.draft_cost(), 0.0)
            rows = profile.verify_cost(m + 1) - profile.verify_cost(n + 1)
            if sum(reach) > plan.rate * (cost + (m - n - 1) * profile.draft_cost() + reread + rows):
                return True
        return False

    reached = math.prod(offer[: plan.n_given])
    for n in range(plan.n_given, limit):
        if n > plan.n_given:
            looks = pays(n, reached, typical, profile.draft_cost())
            assert controller.look(n) == looks
            if not looks:
                return
        confidence = chance.random()
        goes_on = pays(n, reached, calibration.at(confidence), 0.0)
        assert controller.go_on(n, confidence) == goes_on
        if not goes_on:
            return
        reached *= calibration.at(confidence)


@looped(seed=range(60))
def test_a_drafter_without_plans_is_answered_by_the_plan_that_it_did_not_ask_for(seed: int) -> None:
    """A drafter that only asks `go_on`, after each evaluation: another length, cost or first token than with a plan."""
    chance = random.Random(seed)
    profile, calibration = random_profile(chance), Calibration(Prior(chance.random(), 0.1, 0.8))
    asked, planned = (Controller(profile, calibration=calibration) for _ in range(2))
    plan = planned.plan(planned.n_max, lag=0)
    reached, typical, n = 1.0, calibration.typical, 0
    while True:
        confidence = chance.random()
        reach = [reached * calibration.at(confidence) * typical**i for i in range(planned.n_max - n)]
        gains = [
            sum(reach[:k])
            - plan.rate
            * (
                k * profile.draft_cost()  # a refused token has cost an evaluation, so an allowed one costs the next
                + (reach[k - 1] - reached) * max(profile.draft_cost(2) - profile.draft_cost(), 0.0)
                + profile.verify_cost(n + k + 1)
                - profile.verify_cost(n + 1)
            )
            for k in range(1, planned.n_max - n + 1)
        ]
        expected = plan.n_drawn > 0 and any(gain > 0.0 for gain in gains)
        assert asked.go_on(n, confidence) == expected
        if not expected:
            return
        reached *= calibration.at(confidence)
        n += 1


def test_blocks_that_were_not_measured_are_not_tried() -> None:
    """Longer drafts than the measured blocks, at guessed costs. Figures: docs/design.md, Cost model."""
    profile = CostProfile(verify=((1, 1.0), (5, 1.0)), draft=((1, 0.1), (2, 0.1)))
    controller = Controller(profile, calibration=known(0.8))
    assert controller.n_max == 4
    assert controller.plan(16, lag=0).rate == pytest.approx(2.401, rel=1e-3)
    assert Controller(profile, calibration=known(0.05)).plan(16, lag=0) == DraftPlan()


def test_of_two_plans_as_good_the_shorter_one_is_taken() -> None:
    """A longer block for the same rate: it loses more if the estimate is too high."""
    # Certain acceptance; T grows so that two and three tokens have the same rate: 3/1.5 and 4/2.
    verify = ((1, 1.0), (2, 1.4), (3, 1.5), (4, 2.0), (17, 17.0))
    controller = Controller(costs(verify, 0.0), calibration=known(1.0))
    assert controller.plan(16, lag=0).rate == pytest.approx(2.0, rel=1e-3)
    assert drafted(controller, [0.9] * 16) == 2


def test_confidence_cuts_a_draft_short_and_carries_it_further() -> None:
    """A length that does not depend on the confidence."""
    calibration = Calibration(Prior(0.6, 0.0, 1.0))
    profile = costs(((1, 1.0), (2, 1.2), (17, 6.0)), 0.05)
    assert drafted(Controller(profile, calibration=calibration), [0.97] * 16) > 4
    assert drafted(Controller(profile, calibration=calibration), [0.97, 0.97, 0.2, 0.97]) == 2


def test_an_evaluation_is_not_begun_where_its_token_cannot_earn_it() -> None:
    """A draft step whose cost is ignored before it is spent, or counted afterwards."""
    calibration = known(0.5)
    profile = costs(((1, 1.0), (17, 1.0)), 0.4, reread=0.0)  # rows cost nothing: only evaluations do
    controller = Controller(profile, calibration=calibration)
    assert controller.plan(16, lag=0).n_drawn
    assert controller.go_on(0, 0.9)
    assert not controller.look(1)
    assert controller.go_on(1, 0.9), "after the evaluation the token costs only its row"


def test_a_third_token_is_drawn_whatever_its_chance_where_four_rows_cost_less_than_three() -> None:
    """T of CPU_REPACK is not monotone: looking one token ahead stops before the dip."""
    verify = ((1, 1.0), (2, 1.6), (3, 2.0), (4, 1.5), (5, 4.0))
    controller = Controller(costs(verify, 0.05), calibration=known(0.8, at=0.97))
    plan = controller.plan(4, lag=0)
    assert plan.n_drawn
    assert controller.go_on(0, 0.97)
    assert controller.go_on(1, 0.01)
    assert controller.look(2)
    assert controller.go_on(2, 0.01)
    assert not controller.look(3)


def test_a_limit_is_never_exceeded() -> None:
    """More tokens than the answer or the context has room for, also at a lower limit than usual."""
    controller = Controller(FLAT, calibration=known(0.97))
    for limit in (0, 1, 3):
        assert controller.plan(limit, lag=0).n_drawn == limit
        assert not controller.go_on(limit, 1.0)
        assert not controller.look(limit)


def test_what_is_expected_to_earn_most_is_drafted_whatever_its_source() -> None:
    """A fixed order: a poor lookup before a good model, or the model before a sure copy."""
    calibration = known(0.9)
    profile = costs(((1, 1.0), (2, 1.2), (17, 2.0)), 0.05, reread=0.1)
    controller = Controller(profile, calibration=calibration)
    sure = controller.plan(16, offer=[0.99] * 16, lag=0)
    assert (sure.n_given, sure.n_drawn) == (16, 0)
    poor = controller.plan(16, offer=[0.05] * 3, lag=0)
    assert (poor.n_given, poor.n_drawn) == (0, 16)
    short = controller.plan(16, offer=[0.99] * 3, lag=0)
    assert (short.n_given, short.n_drawn) == (3, 13), "the model continues after the lookup"
    alone = controller.plan(16, offer=[0.99] * 3, lag=None)
    assert (alone.n_given, alone.n_drawn) == (3, 0)
    assert sure.rate > short.rate > max(poor.rate, alone.rate)


def test_a_looked_up_token_says_nothing_of_the_model() -> None:
    """Looked-up tokens counted for or against the model."""
    calibration = Calibration()
    controller = Controller(costs(((1, 1.0), (17, 1.1)), 0.01), calibration=calibration)
    plan = controller.plan(4, offer=[0.95, 0.95], lag=0)
    assert (plan.n_given, plan.n_drawn) == (2, 2)
    assert controller.go_on(2, 0.9)
    assert controller.go_on(3, 0.9)
    controller.observe(seen(4, 2))  # both looked-up tokens right, the model's first one wrong, its second unknown
    expected = Calibration()
    expected.learn(0.9, 0.0)
    assert calibration.typical == expected.typical < Calibration().typical


def test_a_verification_of_another_draft_teaches_nothing() -> None:
    """Verifications of other drafters counted as samples."""
    calibration = Calibration()
    controller = Controller(FLAT, calibration=calibration)
    controller.observe(seen(3, 1))
    controller.plan(4, lag=0)
    assert controller.go_on(0, 0.9)
    controller.observe(seen(3, 1, parents=(-1, -1, 0)))
    assert calibration.empty


def pass_time(controller: Controller, n_tokens: int, lag: int = 0) -> list[DraftPlan]:
    """The plans of plain steps."""
    plans = []
    for i in range(n_tokens):
        plans.append(controller.plan(8, lag=lag + i))
        controller.observe(seen(0, 0))
    return plans


HOPELESS = costs(((1, 1.0), (2, 1.6), (9, 2.2)), 0.2)


def test_a_model_that_does_not_pay_rests_and_is_probed_ever_more_rarely() -> None:
    """A probe in every step, or never again."""
    profile = CostProfile(verify=HOPELESS.verify, draft=((1, 0.2), (16, 0.6), (256, 4.6)))
    controller = Controller(profile, calibration=known(0.05))
    probes = [i for i, plan in enumerate(pass_time(controller, 1500)) if plan.probe]
    assert all(plan == DraftPlan() or plan.probe == PROBE_TOKENS for plan in pass_time(controller, 50))
    gaps = [later - earlier for earlier, later in pairwise((0, *probes))]
    assert gaps[0] == DOUBTFUL_GAP
    longer = int(GAP_PER_PROBE_COST * profile.draft_cost(PROBE_TOKENS))
    assert {later - earlier for earlier, later in pairwise(gaps)} == {longer}


def test_a_probe_that_goes_well_brings_the_model_back_in_the_same_step() -> None:
    """A good probe followed by another pause."""
    controller = Controller(HOPELESS, calibration=Calibration(Prior(typical=0.3)))
    while not controller.plan(8, lag=8).probe:
        controller.observe(seen(0, 0))
    for _ in range(PROBE_TOKENS):
        controller.learn(0.95, 1.0)
    assert controller.plan(8, lag=0).n_drawn == 8


def test_a_long_prompt_is_not_read_before_the_first_probe() -> None:
    """A useless draft that costs tens of T(1) before its first token: it is probed on a few tokens first."""
    profile = CostProfile(verify=((1, 1.0), (9, 1.2)), draft=((1, 0.1), (2, 0.12), (1001, 20.0)))
    controller = Controller(profile)
    plans = pass_time(controller, 10, lag=800)
    assert [bool(plan.probe) for plan in plans] == [i == FIRST_GAP for i in range(10)]
    assert not any(plan.n_drawn for plan in plans)
    for _ in range(PROBE_TOKENS):
        controller.learn(0.95, 1.0)
    assert controller.plan(8, lag=810).n_drawn == 8
    assert Controller(profile).plan(8, lag=20).n_drawn == 8, "a short prompt is read at once"


@pytest.mark.parametrize(("acceptance", "is_read"), [(0.9, True), (0.05, False)])
def test_what_is_known_of_a_pair_decides_whether_its_draft_reads_the_prompt(acceptance: float, is_read: bool) -> None:
    """Prevents: eight plain tokens and a probe at the start of every answer, although `tune` found that drafts pay."""
    profile = CostProfile(verify=((1, 1.0), (9, 1.2)), draft=((1, 0.1), (2, 0.12), (1001, 40.0)))
    for is_known in (False, True):
        controller = Controller(profile, calibration=Calibration(Prior(acceptance, 0.3, 0.65, known=is_known)))
        assert bool(controller.plan(8, lag=400).n_drawn) == (is_read and is_known)  # costs 16 T(1)
        assert not controller.plan(8, lag=800).n_drawn, "that costs more than it saves in a short answer"


def test_catching_up_waits_until_as_much_was_lost_by_waiting() -> None:
    """A long prompt that is never read although the answer is long, or read for an answer of ten tokens."""
    profile = CostProfile(verify=((1, 1.0), (9, 1.2)), draft=((1, 0.1), (2, 0.12), (1001, 40.0)))
    controller = Controller(profile, calibration=known(0.9))
    n_before = next(i for i, plan in enumerate(pass_time(controller, 400, lag=600)) if plan.n_drawn)
    rate = best_length(known(0.9), profile, 8)[1]
    assert n_before / 2 * (1 - 1 / rate) == pytest.approx(profile.draft_cost(600 + n_before), rel=0.1)


@pytest.mark.parametrize(
    ("cost", "offer", "n_unused", "is_read"),
    [
        (16.0, (), 0, True),  # rate 2 against 1: reading may cost half of the 32 tokens
        (16.1, (), 0, False),
        (16.1, (), 65, False),  # half of 65 tokens is 32
        (16.5, (), 66, True),
        (16.6, (), 66, False),
        (5.3, (0.5,), 0, True),  # rate 2 against 1.5: a sixth
        (5.4, (0.5,), 0, False),
    ],
)
def test_what_catching_up_may_cost(cost: float, offer: Sequence[float], n_unused: int, is_read: bool) -> None:
    """docs/controller.md: a lag counted a token too short or too long, or a gain over another rate than the best."""
    profile = CostProfile(verify=((1, 1.0), (2, 1.0)), draft=((1, 0.0), (8, 0.0), (9, cost), (10, 2.0 * cost)))
    calibration = Calibration(Prior(1.0, 1.0, 0.0))
    calibration.learn(1.0, 1.0)
    controller = Controller(profile, calibration=calibration)
    for _ in range(n_unused):
        controller.plan(1, lag=None)
        controller.observe(seen(0, 0))
    assert bool(controller.plan(1, lag=8, offer=offer).n_drawn) == is_read


def reading_costs(read: float) -> CostProfile:
    """A drafted token costs nothing, a probe 0.2. At an acceptance of 90 % 32 tokens save 32 * (1 - 1/1.9) = 15.16."""
    return CostProfile(verify=((1, 1.0), (2, 1.0)), draft=((1, 0.0), (2, 0.0), (16, 0.2), (17, read), (18, read)))


def look_up(controller: Controller, n_tokens: int) -> None:
    """Steps of one looked-up token, which is right, and one more."""
    for _ in range(n_tokens // 2):
        controller.observe(seen(1, 1, n_given=1))


@pytest.mark.parametrize(
    ("read", "n_looked_up", "n_before"),
    [
        (14.9, 0, DOUBTFUL_GAP),
        (15.1, 0, 66),  # half of 66 tokens save 15.6
        (4.1, 20, 20),  # the share of the others is (0 + 8) / (20 + 8), that of 15.16 is 4.33
        (4.3, 20, 21),  # (1 + 8) / (21 + 8): 4.7
    ],
)
def test_a_model_is_probed_only_if_a_promising_one_would_earn_the_probe_and_the_reading(
    read: float, n_looked_up: int, n_before: int
) -> None:
    """Slower than lookups alone: probes for a gain that hardly any draft can give, or that lookups have already."""
    controller = Controller(reading_costs(read), calibration=known(0.01))
    look_up(controller, n_looked_up)
    n = n_looked_up
    while not controller.plan(1, lag=99).probe and n < 99:
        controller.observe(seen(0, 0))
        n += 1
    assert n == n_before


@pytest.mark.parametrize(("read", "is_read"), [(4.3, True), (4.4, False)])
def test_tokens_that_lookups_draft_do_not_pay_for_catching_up(read: float, is_read: bool) -> None:
    """A long text that is read for a model whose tokens mostly come from lookups: 5 % slower in summaries."""
    controller = Controller(reading_costs(read), calibration=known(0.9))
    look_up(controller, 20)
    assert bool(controller.plan(1, lag=99).n_drawn) == is_read
    assert Controller(reading_costs(read), calibration=known(0.9)).plan(1, lag=99).n_drawn, "nothing was looked up"


def test_a_drafter_that_knows_no_plans_is_probed_with_one_token() -> None:
    """A model that does not pay drafting whole blocks, or never again, for a drafter that only asks `go_on`."""
    hopeless, answers = Controller(HOPELESS, calibration=known(0.05)), []
    for _ in range(DOUBTFUL_GAP + 2):
        answers.append(hopeless.go_on(0, 0.9))
        if answers[-1]:
            assert not hopeless.go_on(1, 0.9), "a probe of one token"
        hopeless.observe(seen(int(answers[-1]), 0))
    assert [i for i, answer in enumerate(answers) if answer] == [DOUBTFUL_GAP]
    assert isinstance(hopeless, Planner)


def test_equal_histories_lead_to_equal_decisions() -> None:
    """docs/design.md, invariant 7: a clock, a hash seed or a random number in a decision changes the text."""

    def decisions() -> list[object]:
        controller, found = Controller(HOPELESS), []
        for i in range(60):
            plan = controller.plan(8, offer=[0.5, 0.4][: i % 3], lag=i % 2)
            found.append(plan)
            n = plan.n_given
            while n < plan.n_given + plan.n_drawn and controller.look(n) and controller.go_on(n, (i * 7 + n) % 10 / 10):
                n += 1
            controller.observe(seen(n, n * (i % 4) // 3))
            found.append(n)
        return found

    assert decisions() == decisions()


def test_a_step_in_which_nothing_is_drafted_has_no_more_than_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: the record of a draft at every step of a text in which nothing repeats itself."""
    controller = Controller(FLAT)
    monkeypatch.setattr(Controller, "_begin_step", None)
    for offer in ((), (0.0, 1.0)):
        assert controller.plan(16, offer=offer, depth=9999) == DraftPlan()
        controller.observe(seen(0, 0))


def test_what_a_model_could_earn_is_computed_once_while_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: two searches for the best draft at every step in which the model is not used."""
    asked = list[int]()
    monkeypatch.setattr(CostProfile, "draft_cost", lambda self, n=1: asked.append(n) or 9.0)
    controller = Controller(FLAT)
    for _ in range(6):
        asked.clear()
        assert controller.plan(16, lag=0) == DraftPlan()
        controller.observe(seen(0, 0))
    assert not asked


@pytest.mark.parametrize(
    ("assumed", "measured"),
    [((2, 8), [1, 4]), ((2,), [1, 4, 5, 6, 7, 8, 9]), ((8,), [1, 2, 3, 4]), ((4,), [1, 2, 8, 9])],
)
def test_a_cost_between_assumed_points_is_not_measured(assumed: tuple[int, ...], measured: list[int]) -> None:
    """Prevents: a gain that is computed from a curve that was only assumed."""
    costs = CostProfile(verify=((1, 1.0), (2, 1.5), (4, 2.0), (8, 3.0)), draft=((1, 0.2),), assumed=assumed)
    assert [n for n in range(1, 10) if costs.measured_cost(n) is not None] == measured
    assert costs.measured_cost(1, 1000) == costs.verify_cost(1, 1000)


def test_after_the_last_point_a_cost_never_falls() -> None:
    """A block of many rows that costs nothing, or less than nothing, because the last points fall."""
    falling = CostProfile(verify=((1, 1.0), (2, 2.0), (4, 1.5)), draft=((1, 0.2),))
    assert [falling.verify_cost(n) for n in (4, 5, 99)] == [1.5, 1.5, 1.5]
    assert rows_of(falling.verify) == (2, 4)


def test_rows_share_the_weights_and_not_the_attention() -> None:
    """Blocks as cheap behind a long text as at its beginning."""
    profile = CostProfile(verify=((1, 1.0), (4, 2.0)), draft=((1, 0.2),), attention=0.001)
    assert [profile.verify_cost(n, 1000) for n in (1, 4)] == pytest.approx([1.0, (2.0 + 4.0) / 2.0])
    assert profile.verify_cost(4) == profile.measured_cost(4) == 2.0


@pytest.mark.parametrize("verify", [((1, 1.0), (2, 1.4), (5, 1.9), (9, 4.0)), ((1, 1.0),)])
def test_the_best_case_is_the_highest_rate_of_all_lengths(verify: Points) -> None:
    """A draft that is not loaded although it could pay, or measured although it cannot."""
    profile = CostProfile(verify=verify, draft=((1, 0.3),))
    rates = [(k + 1) / (k * 0.3 + profile.verify_cost(k + 1)) for k in range(1, verify[-1][0])]
    assert profile.best_case == max(rates, default=0.0)


def test_the_longest_draft_is_the_shorter_of_wish_and_measurement() -> None:
    """Blocks that were not measured, or longer ones than were asked for; no draft at all after one measured pass."""
    assert [Controller(FLAT, n_max=n).n_max for n in (3, 16, 99)] == [3, 16, 16]
    assert Controller(CostProfile(verify=((1, 1.0),), draft=((1, 0.1),))).n_max == 1


def test_costs_follow_the_length_of_the_text() -> None:
    """A plan for the beginning of the text behind 30,000 tokens, and back at the start of the next answer."""
    profile = CostProfile(verify=((1, 1.0), (9, 1.4)), draft=((1, 0.1),), attention=0.001)
    controller, at = Controller(profile, calibration=known(0.9)), 0
    for depth in (0, 255, 256, 511, 512, 300, 256, 0):
        at = depth if abs(depth - at) >= 256 else at
        there = replace(profile, verify=tuple((n, profile.verify_cost(n, at)) for n in range(1, 10)), attention=0.0)
        expected = Controller(there, calibration=known(0.9)).plan(8, lag=0)
        assert controller.plan(8, lag=0, depth=depth).rate == pytest.approx(expected.rate), depth


def test_a_draft_that_was_cut_teaches_as_far_as_it_was_verified() -> None:
    """A token behind an end token, which was never verified, counted as a wrong guess of the model."""
    calibration, expected = Calibration(), Calibration()
    controller = Controller(FLAT, calibration=calibration)
    assert controller.plan(4, lag=0).n_drawn
    assert controller.go_on(0, 0.9)
    assert controller.go_on(1, 0.8)
    controller.observe(seen(1, 1))
    expected.learn(0.9, 1.0)
    assert calibration.judged == expected.judged


@pytest.mark.parametrize(("n_drafted", "n_until"), [(1, FIRST_GAP), (0, DOUBTFUL_GAP - 1)])
def test_the_pause_of_a_model_counts_from_its_last_draft(n_drafted: int, n_until: int) -> None:
    """A model that drafted well until now and is probed only after a long pause, or one probed for nothing."""
    controller = Controller(HOPELESS, calibration=known(0.95))
    assert controller.plan(8, lag=0).n_drawn
    assert n_drafted == 0 or controller.go_on(0, 0.9)
    controller.observe(seen(n_drafted, 0))
    controller.calibration = known(0.05)  # the text has changed
    assert next(i for i, plan in enumerate(pass_time(controller, 40)) if plan.probe) == n_until


def test_a_probe_lets_old_samples_fade_by_the_tokens_since_the_last() -> None:
    """A model that stays judged by a page that is long over."""
    calibration, expected = (Calibration(Prior(typical=0.5)) for _ in range(2))
    for each in (calibration, expected):
        for _ in range(100):
            each.learn(0.9, 0.05)
    before = expected.typical
    pass_time(Controller(HOPELESS, calibration=calibration), DOUBTFUL_GAP + 1)
    expected.age(DOUBTFUL_GAP)
    assert calibration.typical == pytest.approx(expected.typical)
    assert expected.typical > before + 0.001


def test_a_model_that_would_pay_is_probed_again_soon() -> None:
    """Probes ever more rarely of a model that only waits for its long prompt."""
    profile = CostProfile(verify=((1, 1.0), (9, 1.2)), draft=((1, 0.1), (2, 0.12), (1001, 20.0)))
    probes = [i for i, plan in enumerate(pass_time(Controller(profile), 40, lag=800)) if plan.probe]
    assert probes == [n * FIRST_GAP for n in range(1, 5)]
