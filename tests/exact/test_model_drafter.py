"""`ModelDrafter` alone: its laws, its lengths and its KV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specllama.base.errors import UsageError
from specllama.core import sampling
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Draft, DraftPlan, Observation, Verdict
from specllama.drafters.model import FIRST_TOKEN_FIRST, FORBIDDEN, PREFILL_AT_ONCE, ModelDrafter
from tests.enumeration import as_dict
from tests.exact.harness import GREEDY, PLAIN
from tests.exact.reference import History, token_law
from tests.fakes import FakeModel, RandomTable, replaced

N_VOCAB = 30
TOKENS = (3, 1, 4, 1, 5)
NARROW = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repeat_penalty=1.3, repeat_last_n=4)


class Recording(RandomChooser):
    """Records every drawn token and its law."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.draws: list[tuple[int, Distribution]] = []

    def pick(self, law: Distribution) -> int:
        token = super().pick(law)
        self.draws.append((token, law))
        return token


class Asked:
    """A policy that agrees `n` times. It records each question and how many tokens were drawn before it."""

    def __init__(self, n: int, choose: Recording) -> None:
        self._n = n
        self._choose = choose
        self.questions: list[tuple[int, float, int]] = []
        self.seen: list[Observation] = []

    def go_on(self, depth: int, confidence: float) -> bool:
        self.questions.append((depth, confidence, len(self._choose.draws)))
        return depth < self._n

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def model(n_vocab: int = N_VOCAB, seed: int = 50, **settings: object) -> FakeModel:
    return FakeModel(RandomTable(n_vocab, seed), n_vocab, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_temperature", [None, 1.5])
def test_q_is_the_very_law_each_token_was_drawn_from(draft_temperature: float | None) -> None:
    """q before top-k, at another temperature, or recomputed with other penalties."""
    choose, fake = Recording(), model()
    drafter = ModelDrafter(fake, n_max=6, temperature=draft_temperature, vocab_size=N_VOCAB)
    draft = drafter.propose(TOKENS, 6, NARROW, choose)
    assert draft.probs is not None
    assert [(token, law) for token, law in zip(draft.tokens, draft.probs, strict=True)] == choose.draws
    params = NARROW if draft_temperature is None else replace(NARROW, temperature=draft_temperature)
    for i, law in enumerate(draft.probs):
        history = (*TOKENS, *draft.tokens[:i])
        assert as_dict(law) == pytest.approx(token_law(fake.table(history).tolist(), history, params))
        assert len(law.support()) <= 20


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(0.0, None), (1.0, 0.0)])
def test_a_greedy_draft_is_a_point_mass(temperature: float, draft_temperature: float | None) -> None:
    """Argmax tokens beside a dense q."""
    fake = model()
    drafter = ModelDrafter(fake, n_max=4, temperature=draft_temperature)
    draft = drafter.propose(TOKENS, 4, replace(PLAIN, temperature=temperature), RandomChooser(0))
    assert draft.probs is None
    history: History = TOKENS
    for token in draft.tokens:
        assert token == int(fake.table(history).argmax())
        history = (*history, token)


def test_other_settings_of_the_target_reach_the_draft() -> None:
    """A draft with a temperature of its own that keeps the filters of the first answer."""
    drafter = ModelDrafter(model(), n_max=1, temperature=1.5)
    for params in (PLAIN, NARROW, PLAIN):
        drafter.begin(TOKENS)
        (q,) = drafter.propose(TOKENS, 1, params, RandomChooser(0)).probs or ()
        assert as_dict(q) == pytest.approx(
            token_law(RandomTable(N_VOCAB, 50)(TOKENS), TOKENS, replace(params, temperature=1.5))
        )


def test_ids_that_the_target_does_not_know_are_never_drafted() -> None:
    """A padding row of the draft that happens to be likely: masked and q renormalised before the draw."""
    table = replaced(RandomTable(N_VOCAB, 51), len(TOKENS), 50.0, token=N_VOCAB - 1)
    drafter = ModelDrafter(FakeModel(table, N_VOCAB), n_max=1, vocab_size=N_VOCAB - 4)
    for params in (PLAIN, NARROW, GREEDY):
        draft = drafter.propose(TOKENS, 1, params, RandomChooser(1))
        assert draft.tokens[0] < N_VOCAB - 4
        for law in draft.probs or ():
            assert max(law.support()) < N_VOCAB - 4
            law.require_normalised()


@pytest.mark.parametrize("params", [PLAIN, NARROW])
def test_the_policy_is_asked_before_every_draw(params: SamplingParams) -> None:
    """docs/design.md, Exactness: a length decided after the draw drops tokens because of what they are."""
    choose = Recording()
    policy = Asked(3, choose)
    fake = model()
    drafter = ModelDrafter(fake, n_max=8, policy=policy)
    draft = drafter.propose(TOKENS, 8, params, choose)
    assert len(draft.tokens) == 3
    assert [(depth, n_drawn) for depth, _, n_drawn in policy.questions] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for depth, confidence, _ in policy.questions:
        history = (*TOKENS, *draft.tokens[:depth])
        assert confidence == pytest.approx(max(token_law(fake.table(history).tolist(), history, params).values()))
    decisions = drafter.report().decisions
    assert [(decision.depth, decision.go_on) for decision in decisions] == [(0, True), (1, True), (2, True), (3, False)]
    seen = Observation((*TOKENS, 7), draft, Verdict((), 7), "draft-simple")
    drafter.observe(seen)
    assert policy.seen == [seen]


@pytest.mark.parametrize(("limit", "n_max", "n_drafted"), [(5, 3, 3), (2, 3, 2), (0, 3, 0), (3, 0, 0)])
def test_the_draft_obeys_its_limits(limit: int, n_max: int, n_drafted: int) -> None:
    """A draft longer than the rest of the answer, or than the target's block."""
    fake = model()
    draft = ModelDrafter(fake, n_max=n_max).propose(TOKENS, limit, PLAIN, RandomChooser(0))
    assert len(draft.tokens) == n_drafted
    assert fake.count("eval") == n_drafted, "the last drafted token is not evaluated"


@pytest.mark.parametrize("wrong", [{"n_max": -1}, {"p_min": -0.1}, {"p_min": 1.1}, {"p_min": math.nan}])
def test_limits_that_cannot_be_meant_are_refused(wrong: dict[str, float]) -> None:
    """A draft that silently never comes."""
    with pytest.raises(UsageError):
        ModelDrafter(model(), **wrong)  # type: ignore[arg-type]
    for n_max, p_min in ((0, 0.0), (1, 1.0)):
        ModelDrafter(model(), n_max=n_max, p_min=p_min)


def test_low_confidence_ends_the_draft() -> None:
    """`--spec-draft-p-min` parsed and not used."""
    unsure = ModelDrafter(model(), n_max=8, p_min=0.999).propose(TOKENS, 8, PLAIN, RandomChooser(0))
    sure = ModelDrafter(model(), n_max=8, p_min=0.001).propose(TOKENS, 8, PLAIN, RandomChooser(0))
    assert (len(unsure.tokens), len(sure.tokens)) == (0, 8)


def test_nothing_is_drafted_behind_an_end_token() -> None:
    """Draft passes for tokens after the end."""
    table = replaced(RandomTable(N_VOCAB, 52), len(TOKENS) + 1, 50.0, token=9)
    drafter = ModelDrafter(FakeModel(table, N_VOCAB, end_tokens=frozenset({9})), n_max=8)
    draft = drafter.propose(TOKENS, 8, GREEDY, RandomChooser(0))
    assert len(draft.tokens) == 2
    assert draft.tokens[1] == 9


def test_beginning_an_answer_costs_no_pass_over_the_draft() -> None:
    """The draft's own prefill must not delay the first token."""
    fake = model(n_ctx=300)
    drafter = ModelDrafter(fake, n_max=4)
    prompt = tuple(i % N_VOCAB for i in range(200))
    drafter.begin(prompt)
    assert fake.calls == []
    first = drafter.propose(prompt, 4, GREEDY, RandomChooser(0))
    assert first == Draft(), "the first step after a long prompt goes without a draft"
    assert fake.calls == []
    assert len(drafter.propose((*prompt, 1), 4, GREEDY, RandomChooser(0)).tokens) == 4


@pytest.mark.parametrize("n_at_once", [PREFILL_AT_ONCE, FIRST_TOKEN_FIRST, 5])
def test_the_first_token_waits_for_a_few_tokens_at_most(n_at_once: int) -> None:
    """A first step that reads a prompt of the draft, or that has no draft although there is little to read."""
    assert (PREFILL_AT_ONCE, FIRST_TOKEN_FIRST) == (12, 0)
    for n in range(1, 16):
        drafter = ModelDrafter(model(), n_max=4, n_at_once=n_at_once)
        drafter.begin((1,) * n)
        draft = drafter.propose((1,) * n, 4, GREEDY, RandomChooser(0))
        assert bool(draft.tokens) == (n - 1 < n_at_once), "the pending token is no part of the prompt"


def test_the_cache_follows_what_was_committed() -> None:
    """docs/design.md, invariant 2: after a rejection nothing beyond the committed prefix, nothing below it lost."""
    fake = model()
    drafter = ModelDrafter(fake, n_max=4)
    draft = drafter.propose(TOKENS, 4, PLAIN, RandomChooser(2))
    committed = (*TOKENS, *draft.tokens[:2], 7)
    drafter.observe(Observation(committed, draft, Verdict((0, 1), 7), "draft-simple"))
    assert fake.tokens == committed[:-1]
    drafter.propose(committed, 4, PLAIN, RandomChooser(2))
    accepted = drafter.propose(committed, 4, PLAIN, RandomChooser(3))
    committed = (*committed, *accepted.tokens, 8)
    drafter.observe(Observation(committed, accepted, Verdict((0, 1, 2, 3), 8), "draft-simple"))
    assert fake.tokens == committed[:-2], "of a block that was accepted whole, the last token was never evaluated"
    fake.calls.clear()
    drafter.propose(committed, 1, PLAIN, RandomChooser(4))
    assert [(call.name, call.tokens) for call in fake.calls] == [("feed", committed[-2:-1]), ("eval", (8,))]


def test_the_tokens_of_another_strategy_are_read() -> None:
    """A KV without the tokens that another drafter proposed."""
    fake = model()
    drafter = ModelDrafter(fake, n_max=2)
    drafter.propose(TOKENS, 2, PLAIN, RandomChooser(0))
    others = Draft((11, 12, 13))
    committed = (*TOKENS, 11, 12, 13, 14)
    drafter.observe(Observation(committed, others, Verdict((0, 1, 2), 14), "lookup"))
    assert fake.tokens == committed[: fake.length]
    assert ModelDrafter(model(), n_max=2).propose(committed, 2, GREEDY, RandomChooser(0)) == drafter.propose(
        committed, 2, GREEDY, RandomChooser(0)
    )


def test_a_full_draft_context_is_explained() -> None:
    """Drafting that stops without a notice."""
    small = ModelDrafter(model(n_ctx=4), n_max=2)
    small.begin(TOKENS)
    assert small.propose(TOKENS, 2, PLAIN, RandomChooser(0)) == Draft()
    assert "4" in small.report().notice
    assert small.propose(TOKENS, 2, PLAIN, RandomChooser(0)) == Draft()
    assert small.report().notice == "", "once"
    assert small.plan(TOKENS, 2, PLAIN, RandomChooser(0)) == DraftPlan()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("tokens", [(4, 1, 0), (1, 4, 0), (1, 0, 4), (3, 0, 3)])
def test_a_token_that_the_draft_lacks_is_found_wherever_it_is(tokens: History, begun: bool) -> None:
    """A token out of range that reaches the draft model."""
    fake = model(n_vocab=4)
    drafter = ModelDrafter(fake, n_max=2, vocab_size=N_VOCAB)
    if begun:
        drafter.begin(tokens)
    for more in ((), (2,), (2, 2)):
        draft = drafter.propose((*tokens, *more), 2, PLAIN, RandomChooser(0))
        assert (draft == Draft()) == (4 in tokens)
        assert bool(drafter.report().notice) == (4 in tokens and not more), "said once"
    assert (fake.calls == []) == (4 in tokens)


@pytest.mark.parametrize(("p_min", "n_read"), [(0.0, 0), (0.001, 4)])
def test_a_greedy_row_is_read_for_its_confidence_only_where_that_decides(
    p_min: float, n_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over 152k logits for each drafted token, whose result nothing uses."""
    read: list[int] = []
    monkeypatch.setattr(
        "specllama.drafters.model.peak_share", lambda row: read.append(row.size) or sampling.peak_share(row)
    )
    assert len(ModelDrafter(model(), n_max=4, p_min=p_min).propose(TOKENS, 4, GREEDY, RandomChooser(0)).tokens) == 4
    assert read == [N_VOCAB] * n_read


def test_a_draft_just_fits_into_its_context() -> None:
    """One token too few drafted, or a crash, in the last cells."""
    for n_ctx in range(len(TOKENS), len(TOKENS) + 4):
        drafter = ModelDrafter(model(n_ctx=n_ctx), n_max=8)
        draft = drafter.propose(TOKENS, 8, PLAIN, RandomChooser(0))
        assert len(draft.tokens) == n_ctx - len(TOKENS) + 1


def test_a_token_that_the_draft_lacks_is_found_in_the_next_answer() -> None:
    """A text that counts as readable because the text of the answer before it was."""
    drafter = ModelDrafter(model(n_vocab=4), n_max=2, vocab_size=N_VOCAB)
    for tokens in ((1, 2, 3, 1, 2), (1, 4, 0)):
        drafter.begin(tokens)
        assert bool(drafter.propose(tokens, 2, PLAIN, RandomChooser(0)).tokens) == (4 not in tokens)
        assert bool(drafter.report().notice) == (4 in tokens)


def test_a_bias_that_leaves_the_draft_no_token_is_reported_at_that_step() -> None:
    """A notice that comes a step later, or never if the answer ends there."""
    drafter = ModelDrafter(model(n_vocab=4), n_max=2)
    drafter.begin((1, 2, 3))
    bias = replace(PLAIN, logit_bias=dict.fromkeys(range(4), -math.inf))
    for notice in (FORBIDDEN, ""):
        assert drafter.propose((1, 2, 3), 2, bias, RandomChooser(0)) == Draft()
        assert drafter.report().notice == notice


def test_a_narrow_model_drafts_only_what_the_target_knows_too() -> None:
    """A column of a token beyond the target's vocabulary, read as a token of it."""

    class Few(FakeModel):
        known = np.array([1, 3, 5, N_VOCAB - 1])

        def eval_known(self, tokens: Sequence[int]) -> FloatArray:
            return self.eval(tokens)[:, self.known]

        def grow_known(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
            raise AssertionError

    table = replaced(RandomTable(N_VOCAB, 51), len(TOKENS), 50.0, token=N_VOCAB - 1)
    drafter = ModelDrafter(Few(table, N_VOCAB), n_max=1, vocab_size=N_VOCAB - 4)
    (q,) = drafter.propose(TOKENS, 1, PLAIN, RandomChooser(0)).probs or ()
    assert set(as_dict(q)) == {1, 3, 5}
