"""`ChainDrafter`: which source drafts, the laws of its tokens, and the model's KV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.events import StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Caps, Decision, Draft, DraftPlan, Observation, Verdict
from specllama.drafters.chain import ChainDrafter
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import BROKEN, PROBE_CONTEXT, ModelDrafter
from tests.exact.reference import token_law
from tests.fakes import FakeModel, RandomTable, always, replaced, table_of

N_VOCAB = 12
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)
TOKENS = (1, 2, 3, 4, 5, 6, 1, 2, 3)  # a lookup says 4, 5, 6


class Scripted:
    """A planner that gives prepared plans and allows everything within them."""

    def __init__(self, *plans: DraftPlan, looks: bool = True) -> None:
        self.plans = list(plans)
        self.looks = looks
        self.asked: list[tuple[int, int, int | None]] = []  # limit, tokens offered, lag
        self.learned: list[tuple[float, float]] = []
        self.n_observed = 0

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
        self.asked.append((limit, len(offer), lag))
        return self.plans.pop(0) if self.plans else DraftPlan()

    def look(self, depth: int) -> bool:
        return self.looks

    def go_on(self, depth: int, confidence: float) -> bool:
        return True

    def learn(self, confidence: float, acceptance: float) -> None:
        self.learned.append((confidence, acceptance))

    def observe(self, seen: Observation) -> None:
        self.n_observed += 1


def chain_of(planner: Scripted | None, *, table: Callable[..., object] | None = None, n_max: int = 8) -> ChainDrafter:
    model = FakeModel(table or RandomTable(N_VOCAB, 1), N_VOCAB)  # type: ignore[arg-type]
    drafter = ChainDrafter(ModelDrafter(model, n_max=n_max, policy=planner), LookupDrafter(n_max=n_max))
    drafter.begin(TOKENS)
    return drafter


def fake(drafter: ChainDrafter) -> FakeModel:
    assert isinstance(drafter.model.model, FakeModel)
    return drafter.model.model


def test_a_mixed_chain_carries_the_law_of_every_token() -> None:
    """A looked-up token with the model's law beside it, or a drawn one without: both are biases."""
    drafter = chain_of(Scripted(DraftPlan(n_given=2, n_drawn=2)))
    draft = drafter.propose(TOKENS, 8, SAMPLED, RandomChooser(0))
    assert draft.tokens[:2] == (4, 5)
    assert len(draft.tokens) == 4
    assert draft.probs is not None
    assert draft.probs[:2] == (Distribution.point(4), Distribution.point(5))
    assert all(len(law.support()) == N_VOCAB for law in draft.probs[2:])


@pytest.mark.parametrize("plan", [DraftPlan(n_given=2), DraftPlan(n_given=2, n_drawn=2)])
def test_a_chain_without_chance_is_a_point_mass(plan: DraftPlan) -> None:
    """Laws computed in vain: temperature 0, or a chain that was looked up as a whole."""
    drafter = chain_of(Scripted(plan))
    draft = drafter.propose(TOKENS, 8, GREEDY if plan.n_drawn else SAMPLED, RandomChooser(0))
    assert len(draft.tokens) == plan.n_given + plan.n_drawn
    assert draft.probs is None


def test_the_model_reads_what_was_looked_up_before_it_draws() -> None:
    """Tokens drawn as if the looked-up ones were not there: they would hardly ever be accepted."""
    drafter = chain_of(Scripted(DraftPlan(n_given=2, n_drawn=2)))
    draft = drafter.propose(TOKENS, 8, GREEDY, RandomChooser(0))
    history = [*TOKENS, 4, 5]
    for token in draft.tokens[2:]:
        assert token == int(RandomTable(N_VOCAB, 1)(tuple(history)).argmax())
        history.append(token)
    assert fake(drafter).tokens == tuple(history[:-1])


@pytest.mark.parametrize(("limit", "n_max", "n_offered"), [(8, 8, 8), (3, 8, 3), (8, 2, 2), (0, 8, 0)])
def test_no_more_is_looked_up_than_may_be_drafted(limit: int, n_max: int, n_offered: int) -> None:
    """Time for guesses that no plan can take."""
    planner = Scripted()
    chain_of(planner, n_max=n_max).propose(TOKENS, limit, SAMPLED, RandomChooser(0))
    assert [asked[:2] for asked in planner.asked] == [(n_offered, n_offered)]


def test_a_pure_lookup_leaves_the_model_alone() -> None:
    """A draft model that is fed for tokens it has no part in costs what the lookup saved."""
    drafter = chain_of(Scripted(DraftPlan(n_given=3)))
    drafter.propose(TOKENS, 8, SAMPLED, RandomChooser(0))
    assert fake(drafter).calls == []


def test_the_models_cache_follows_the_drafts_of_both_sources() -> None:
    """A hole after a lookup that was accepted whole, or tokens left over from one that was not."""
    planner = Scripted(DraftPlan(n_given=1, n_drawn=1), DraftPlan(n_given=2), DraftPlan(n_drawn=1))
    drafter = chain_of(planner)
    tokens = list(TOKENS)
    first = drafter.propose(tokens, 8, GREEDY, RandomChooser(0))
    assert first.tokens[0] == 4
    tokens += [4, 7]  # the looked-up token was accepted, the drawn one corrected
    drafter.observe(Observation(tokens, first, Verdict((0,), 7), "chain"))
    assert fake(drafter).tokens == (*TOKENS, 4)
    second = drafter.propose(tokens, 8, GREEDY, RandomChooser(0))
    tokens += [9, 9]  # the model was not fed
    drafter.observe(Observation(tokens, second, Verdict((), 9), "chain"))
    drafter.propose(tokens, 8, GREEDY, RandomChooser(0))
    assert fake(drafter).tokens == tuple(tokens)
    assert planner.n_observed == 2, "the policy observes every verification once"
    assert planner.asked[0] == (8, 8, 8), "limit, tokens offered, lag"
    assert [lag for _, _, lag in planner.asked] == [8, 0, 2]


def test_an_end_token_that_was_looked_up_ends_the_draft() -> None:
    """Passes of the model for what follows an end token, taken from an earlier turn."""
    drafter = chain_of(Scripted(DraftPlan(n_given=3, n_drawn=3)))
    fake(drafter).end_tokens = frozenset({5})
    draft = drafter.propose(TOKENS, 8, SAMPLED, RandomChooser(0))
    assert draft.until({5}) == Draft((4, 5))
    assert fake(drafter).calls == []


def test_without_a_planner_sure_lookups_come_first_and_the_model_behind_them() -> None:
    """A chain that drafts nothing without measured costs."""
    drafter = chain_of(None, n_max=6)
    draft = drafter.propose(TOKENS, 8, SAMPLED, RandomChooser(0))
    assert len(draft.tokens) == 6
    n_drawn = fake(drafter).count("eval")
    assert n_drawn > 0
    assert draft.tokens[: 6 - n_drawn] == (4, 5, 6)[: 6 - n_drawn]
    assert [decision.depth for decision in drafter.report().decisions] == list(range(6))


def test_without_a_planner_the_policy_decides_about_looked_up_tokens_too() -> None:
    """A longest draft, or a confidence to stop at, that only the model obeys."""

    class Two:
        def go_on(self, depth: int, confidence: float) -> bool:
            return depth < 2

        def observe(self, seen: Observation) -> None: ...

    tokens = tuple(range(6)) * 5
    model = ModelDrafter(FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB), n_max=8, policy=Two(), n_at_once=99)
    drafter = ChainDrafter(model, LookupDrafter(n_max=8))
    drafter.begin(tokens)
    assert drafter.propose(tokens, 8, SAMPLED, RandomChooser(0)).tokens == (0, 1)
    assert [(each.depth, each.go_on) for each in drafter.report().decisions][:3] == [(0, True), (1, True), (2, False)]


def test_a_refused_look_is_reported() -> None:
    """A draft that ends without a reason in the report."""
    plan = DraftPlan(n_drawn=3)
    drafter = chain_of(Scripted(plan, looks=False))
    assert len(drafter.propose(TOKENS, 8, SAMPLED, RandomChooser(0)).tokens) == 1
    planned, drawn, refused = drafter.report().decisions
    assert (planned, refused) == (Decision(0, 0.0, go_on=True, plan=plan), Decision(1, 0.0, go_on=False))
    assert (drawn.depth, drawn.go_on, drawn.plan) == (0, True, None)
    assert drawn.confidence > 0.0


def test_another_text_is_drafted_as_by_a_new_drafter() -> None:
    """Lookups in the text before, which is no part of this conversation."""
    texts = (TOKENS, (7, 8, 1, 2, 3), (7, 8, 1, 2, 3, 9, 7, 8))
    plans = [DraftPlan(n_given=3, n_drawn=1)] * len(texts)
    used = chain_of(Scripted(*plans))
    for text in texts:
        fresh = chain_of(Scripted(plans[0]))
        for drafter in (used, fresh):
            drafter.begin(text)
        drafts = [drafter.propose(text, 4, SAMPLED, RandomChooser(0)) for drafter in (used, fresh)]
        assert drafts[0] == drafts[1]


def test_a_probe_reads_a_few_tokens_and_leaves_no_trace_where_the_model_lags_far_behind() -> None:
    """Probed tokens that stay at wrong places in the KV: every later draft would be wrong."""
    prompt = tuple(i % N_VOCAB for i in range(60))
    planner = Scripted(DraftPlan(), DraftPlan(), DraftPlan(probe=10), DraftPlan(), DraftPlan(n_drawn=1))
    model = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB, n_ctx=200)
    target = FakeModel(RandomTable(N_VOCAB, 2), N_VOCAB, n_ctx=200)
    drafter = ModelDrafter(model, policy=planner)
    held = []
    events = Engine(target, drafter).generate(prompt, SAMPLED, RandomChooser(3), max_tokens=6)
    for event in events:
        if isinstance(event, StepEvent):
            held.append(model.length)
    assert held[2] == 0, "ten tokens were read and forgotten"
    assert [len(call.tokens) for call in model.calls if call.name in ("feed", "eval")][:2] == [8, 2]
    assert len(planner.learned) == 2, "two tokens were emitted, the others are context"
    assert held[3] > 60, "then it catches up as a whole"


def test_a_probe_within_reach_is_kept() -> None:
    """Tokens that are read for a probe and then again."""
    planner = Scripted(DraftPlan(), DraftPlan(), DraftPlan(probe=30), DraftPlan(n_drawn=2))
    model, target = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB), FakeModel(RandomTable(N_VOCAB, 2), N_VOCAB)
    events = Engine(target, ModelDrafter(model, policy=planner)).generate(
        TOKENS, SAMPLED, RandomChooser(3), max_tokens=8
    )
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert len(steps[2].drafted) == 2
    evaluated = [call for call in model.calls if call.name in ("feed", "eval")]
    assert [call.length for call in evaluated][:4] == [0, 8, 10, 11]
    assert [decision.plan for decision in steps[2].decisions][:2] == [DraftPlan(probe=30), DraftPlan(n_drawn=2)]


def test_the_mean_of_a_probe_is_the_acceptance_of_a_draft() -> None:
    """A wrong estimate, which uses a bad draft, or pauses a good one, for hundreds of tokens."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
    mean = 0.0
    for token, weight in enumerate(p):
        planner = Scripted(DraftPlan(probe=30))
        model = FakeModel(table_of(always(q)), 3)
        drafter = ModelDrafter(model, policy=planner)
        tokens = [0, 1, 0, 1, 0, 1, 0, 1, 0]
        drafter.begin(tokens)
        drafter.observe(
            Observation([*tokens, token], Draft(), Verdict((), token), "none", laws=(Distribution.dense(p),))
        )
        drafter.propose([*tokens, token], 4, SAMPLED, RandomChooser(0))
        ((confidence, acceptance),) = planner.learned
        assert confidence == pytest.approx(0.6)
        mean += weight * acceptance
    assert mean == pytest.approx(sum(min(each) for each in zip(p, q, strict=True)), abs=1e-6)


@pytest.mark.parametrize(("n_said", "max_block", "n_judged"), [(2, 32, 2), (7, 32, 7), (20, 4, 4), (40, 32, 32)])
def test_a_probe_judges_the_last_tokens_by_the_laws_at_their_places(n_said: int, max_block: int, n_judged: int) -> None:
    """A token compared with the row of its neighbour, or with a law without penalties."""
    params = replace(SAMPLED, repeat_penalty=1.5, repeat_last_n=4)
    planner = Scripted(*[DraftPlan()] * n_said, DraftPlan(probe=99))
    target, model = (
        FakeModel(RandomTable(N_VOCAB, seed), N_VOCAB, 200, caps=Caps(max_block=max_block)) for seed in (1, 2)
    )
    events = Engine(target, ModelDrafter(model, policy=planner)).generate(
        TOKENS, params, RandomChooser(3), max_tokens=n_said + 2
    )
    text = (*TOKENS, *(event.token for event in events if isinstance(event, TokenEvent)))[: len(TOKENS) + n_said]
    expected = []
    for n in range(len(text) - n_judged, len(text)):
        p, q = (token_law(each.table(text[:n]).tolist(), text[:n], params) for each in (target, model))
        expected.append((max(q.values()), min(1.0, q[text[n]] / p[text[n]])))
    assert planner.learned == [pytest.approx(each) for each in expected]


RISING = Distribution.dense([n / 78 for n in range(1, N_VOCAB + 1)])


def plain_step(drafter: ModelDrafter, tokens: Sequence[int]) -> None:
    """The last token was drawn from `RISING`, without a draft."""
    drafter.observe(Observation(tokens, Draft(), Verdict((), tokens[-1]), "none", laws=(RISING,)))


@pytest.mark.parametrize("n_held", [1, 3, 7, 8, 9, 12])
def test_a_probe_judges_what_the_model_has_not_read(n_held: int) -> None:
    """Tokens read twice, or judged by the row of another, where the KV is nearly empty or holds all but a few."""
    text = tuple(5 * i % N_VOCAB for i in range(n_held + 10))
    planner = Scripted(DraftPlan(n_drawn=1), DraftPlan(probe=99))
    model = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB)
    drafter = ModelDrafter(model, policy=planner)
    drafter.begin(text[:n_held])
    drafter.propose(text[:n_held], 1, SAMPLED, RandomChooser(0))
    for n in range(n_held + 1, len(text) + 1):
        plain_step(drafter, text[:n])
    drafter.propose(text, 1, SAMPLED, RandomChooser(0))
    assert model.tokens == text[:-1]
    expected = []
    for n in range(n_held + 1 + max(0, PROBE_CONTEXT - n_held), len(text)):
        q = token_law(model.table(text[:n]).tolist(), text[:n], SAMPLED)
        expected.append((max(q.values()), min(1.0, q[text[n]] / RISING.prob(text[n]))))
    assert planner.learned == [pytest.approx(each) for each in expected]


def test_an_answer_teaches_nothing_of_the_answer_before_it() -> None:
    """A probe that takes the laws of another text, or a token that was not drawn before an answer was given up."""

    class Refusing(Scripted):
        def go_on(self, depth: int, confidence: float) -> bool:
            return False

    planner = Refusing(*[DraftPlan(n_drawn=1)] * 3, DraftPlan(probe=99))
    drafter = ModelDrafter(FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB), policy=planner)
    for n in range(7, 10):
        drafter.propose(TOKENS[:n], 1, SAMPLED, RandomChooser(0))
        if n < 9:
            plain_step(drafter, TOKENS[: n + 1])
    assert len(planner.learned) == 2, "a refused token of each step that was verified"
    planner.learned.clear()
    drafter.begin(text := 2 * TOKENS[::-1])
    plain_step(drafter, (*text, 0))
    assert planner.learned == []
    drafter.propose((*text, 0), 1, SAMPLED, RandomChooser(0))
    assert len(planner.learned) == 1, "the token of this answer"


def test_a_probe_ends_at_a_row_without_a_law() -> None:
    """An internal error because a draft that is only probed computes NaN."""
    table = replaced(RandomTable(N_VOCAB, 1), len(TOKENS) + 1, math.nan)
    planner = Scripted(DraftPlan(probe=99))
    drafter = ModelDrafter(FakeModel(table, N_VOCAB), policy=planner)
    drafter.begin(TOKENS)
    text = (*TOKENS, 4, 5, 6)
    for n in range(len(TOKENS) + 1, len(text) + 1):
        plain_step(drafter, text[:n])
    assert drafter.propose(text, 1, SAMPLED, RandomChooser(0)) == Draft()
    assert len(planner.learned) == 1, "the token before that row"
    assert drafter.report().notice == BROKEN


@pytest.mark.parametrize(("confidence", "n_given"), [(0.69, 0), (0.7, 1), (1.0, 1)])
def test_without_a_planner_an_offer_is_taken_from_a_fair_chance_on(confidence: float, n_given: int) -> None:
    """An unlikely guess before a model that would have been right."""
    drafter = chain_of(None).model
    assert drafter.plan(TOKENS, 4, SAMPLED, RandomChooser(0), [confidence, 1.0, 0.1]) == DraftPlan(
        2 * n_given, 4 - 2 * n_given
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_token_that_was_evaluated_and_not_drawn_still_teaches(seed: int) -> None:
    """A planner that never learns about confidences below those that it draws, or learns from another step."""

    class Careful(Scripted):
        def go_on(self, depth: int, confidence: float) -> bool:
            return depth < 1

    planner = Careful(*(DraftPlan(n_drawn=4) for _ in range(40)))
    model, target = FakeModel(RandomTable(N_VOCAB, seed), N_VOCAB), FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB)
    events = Engine(target, ModelDrafter(model, policy=planner)).generate(
        TOKENS, SAMPLED, RandomChooser(0), max_tokens=20
    )
    steps = [event for event in events if isinstance(event, StepEvent) and event.drafted]
    taught = [step for step in steps if step.accepted == len(step.drafted) and not step.decisions[-1].go_on]
    assert len(planner.learned) == len(taught) > 0
    assert all((acceptance > 0.999) == (seed == 1) for _, acceptance in planner.learned), "target and draft are one"


def test_greedy_confidence_is_the_largest_mass_at_temperature_1() -> None:
    """At temperature 0 q is a point: a confidence of 1 for every token would be useless to a policy."""
    seen: list[float] = []

    class Listening(Scripted):
        def go_on(self, depth: int, confidence: float) -> bool:
            seen.append(confidence)
            return True

    drafter = ModelDrafter(FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB), policy=Listening(DraftPlan(n_drawn=3)))
    drafter.propose(TOKENS, 3, GREEDY, RandomChooser(0))
    sampled = ModelDrafter(FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB), policy=Listening(DraftPlan(n_drawn=1)))
    sampled.propose(TOKENS, 1, SAMPLED, RandomChooser(0))
    assert len(seen) == 4
    assert seen[0] == pytest.approx(seen[3])
    assert all(confidence < 0.9 for confidence in seen)


def test_copying_text_is_drafted_by_lookup_and_the_rest_by_the_model() -> None:
    """A source that is not used where it is the better one; the whole chain with the real controller."""
    answer = [*range(3, 11), *range(3, 11), *range(3, 11)]

    def says(history: tuple[int, ...]) -> object:
        row = RandomTable(N_VOCAB, 1)(history).copy()
        row[answer[(len(history) - len(TOKENS)) % len(answer)]] = 9.0
        return row

    costs = CostProfile(verify=((1, 1.0), (17, 1.5)), draft=((1, 0.2), (17, 1.0)))
    model, target = FakeModel(says, N_VOCAB, n_ctx=200), FakeModel(says, N_VOCAB, n_ctx=200)  # type: ignore[arg-type]
    drafter = ChainDrafter(ModelDrafter(model, n_max=16, policy=Controller(costs)), LookupDrafter(n_max=16))
    events = list(Engine(target, drafter).generate(TOKENS, GREEDY, RandomChooser(0), max_tokens=120))
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    assert tokens == (answer * 6)[:120]
    plans = [decision.plan for event in events if isinstance(event, StepEvent) for decision in event.decisions]
    made = [plan for plan in plans if plan is not None]
    assert any(plan.n_given for plan in made)
    assert any(plan.n_drawn and not plan.n_given for plan in made)
    assert model.count("eval") < 40, "what can be looked up is not drafted"
    assert max(len(event.drafted) for event in events if isinstance(event, StepEvent)) == 16


@pytest.mark.parametrize("c", [0.2, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_rests_is_not_asked_and_no_step_changes(
    seed: int, c: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work for a model that cannot pay, or a probe that comes at another time or compares other tokens."""
    costs = CostProfile(verify=((1, 1.0), (2, 1.6), (17, 8.0)), draft=((1, c), (16, 2.0 * c)))
    asked = [0, 0]

    def steps(n: int) -> list[tuple[object, ...]]:
        target, model = (FakeModel(RandomTable(60, i), 60, n_ctx=800) for i in (seed, seed + 9))
        reader = ModelDrafter(model, n_max=16, policy=(policy := Controller(costs)))
        drafter = ChainDrafter(reader, LookupDrafter(n_max=16, policy=policy))
        lag = reader._lag

        def counted(tokens: Sequence[int]) -> int | None:
            asked[n] += 1
            return lag(tokens)

        monkeypatch.setattr(reader, "_lag", counted)
        if n:
            monkeypatch.setattr(reader, "rests", lambda tokens, limit: False)
        events = Engine(target, drafter).generate(TOKENS, SAMPLED, RandomChooser(seed), max_tokens=400)
        return [
            (*(event.drafted, event.accepted, event.n_rows), model.length, policy.calibration.typical)
            for event in events
            if isinstance(event, StepEvent)
        ]

    assert steps(0) == steps(1)
    assert asked[0] < asked[1]
