"""Constrained answers follow the target's masked law with any drafts, and forced tokens are drafted for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from specllama.audit.faults import FAULTS, Fault
from specllama.audit.parts import Parts
from specllama.base.errors import AllForbidden, NumericsError
from specllama.core.constraint import Allowed, among
from specllama.core.events import Notice
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Chooser, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import DraftLength
from specllama.drafters.tree_controller import TreeController
from tests.enumeration import law_of, tv
from tests.exact.harness import GREEDY, PLAIN, REPEAT, Pair, Rig, params_of, random_pair
from tests.exact.reference import answer_law, token_law
from tests.fakes import FakeModel, History, replaced

PROMPT = (0, 1, 1, 0, 1, 1, 0)  # repeats itself, so that lookups draft from the first step on
END = 3
Grammar = Callable[[History], tuple[int, ...]]  # tokens of the answer -> what may follow


def brackets(said: History) -> tuple[int, ...]:
    """1, then 0 forced twice, then 0 or 2; the end after four or more; 2 closes."""
    if said[-1:] == (2,):
        return (END,)
    return {0: (1, 2), 1: (0,), 2: (0,)}.get(len(said), (0, 1, 2, END) if len(said) > 3 else (0, 2))


def wide(said: History) -> tuple[int, ...]:
    """No token twice in a row."""
    return tuple(token for token in (0, 1, 2, END) if said[-1:] != (token,))


def closed(said: History) -> tuple[int, ...]:
    """One text only."""
    return ((1, 0, 2, 2, 1, END)[len(said)],) if len(said) < 6 else ()


GRAMMARS: dict[str, Grammar] = {"brackets": brackets, "wide": wide, "closed": closed}


class FakeConstraint:
    """A grammar over a few tokens, the last of which ends. What is forbidden where `masks`, else what is allowed."""

    def __init__(self, grammar: Grammar, *, masks: bool = False, end: int = END, strict: bool = True) -> None:
        """`strict`: a token that is not allowed fails the test; else nothing is allowed after it."""
        self.grammar, self.masks, self.end, self.strict = grammar, masks, end, strict
        self.said: History = ()
        self.n_forced = 0

    def _after(self, path: Sequence[int]) -> tuple[int, ...]:
        line = self.said
        for token in path:
            if token == self.end or token not in self.grammar(line):
                return ()
            line = (*line, token)
        return self.grammar(line)

    def allowed(self, path: Sequence[int]) -> Allowed:
        ids = self._after(path)
        if not self.masks or len(ids) == 1:
            return Allowed(np.array(ids, dtype=np.int64))
        return Allowed(
            np.array([token for token in range(self.end + 1) if token not in ids], dtype=np.int64), all_but=True
        )

    def forced(self) -> Sequence[int]:
        path: list[int] = []
        while len(only := self._after(path)) == 1 and only != (self.end,):
            path += only
        self.n_forced += len(path)
        return path

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.grammar(self.said):
                assert not self.strict, "a token that is not allowed was said"
                self.grammar = lambda said: ()
            self.said = (*self.said, token)


# Drafts pay only where nearly all of them are accepted.
DOUBTFUL = CostProfile(verify=((1, 1.0), (2, 1.25), (8, 2.75)), draft=((1, 0.6), (8, 5.0)))
COSTS = CostProfile(verify=((1, 1.0), (2, 1.05), (8, 1.2)), draft=((1, 0.02), (8, 0.03)))
STRATEGIES = [name for name in REGISTRY if name not in ("draft-tli", "none")]
SETTINGS = {
    "plain": PLAIN,
    "filters": params_of(temperature=0.8, top_k=2, top_p=0.9, min_p=0.05),
    "penalty": REPEAT,
    "bias": params_of(logit_bias={0: 1.5, 2: -2.0}),
    "greedy": GREEDY,
}


def a_pair(seed: int) -> Pair:
    return replace(random_pair(seed, n_vocab=4), end_tokens=frozenset({END}))


def rig_of(
    pair: Pair,
    grammar: Grammar,
    strategy: str = "none",
    rule: Rule = Rule.TOKEN,
    *,
    n_max: int = 2,
    masks: bool = False,
    auto: bool = False,
    parts: Parts | None = None,
) -> Rig:
    """An engine over new fakes, with a strategy of the registry."""
    target, draft = pair.rig().target, FakeModel(pair.draft or pair.target, 4, 64, pair.end_tokens)
    settings = DraftSettings(
        length=DraftLength(n_max), vocab_size=4, policy=Controller(COSTS) if auto else None, n_leaves=4
    )
    drafter = REGISTRY[strategy].make(draft, settings)
    constraint = partial(FakeConstraint, grammar, masks=masks)
    return Rig(target, draft, drafter, rule=rule, parts=parts or Parts(), constraint=constraint)


def masked_law(pair: Pair, grammar: Grammar, params: SamplingParams, n_max: int) -> dict[object, float]:
    """Plain decoding by the reference alone: forbidden logits are -inf before everything else."""

    @cache
    def law_at(history: History) -> dict[int, float]:
        allowed = grammar(history[len(PROMPT) :])
        row = [logit if token in allowed else -np.inf for token, logit in enumerate(pair.target(history).tolist())]
        return token_law(row, history, params)

    return dict(answer_law(law_at, PROMPT, n_max, end_tokens=pair.end_tokens))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "none"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_answers_follow_the_masked_law(grammar: str, strategy: str, rule: Rule) -> None:
    """A mask at the wrong row, a draft that is cut by it after the draw, or forced tokens that shift the rows."""
    n_tokens = 3 if grammar == "wide" else 4
    start = list(GRAMMARS).index(grammar) + 2 * len(strategy) + list(Rule).index(rule)
    for n, settings in enumerate(SETTINGS):
        if (n - start) % len(SETTINGS) not in (0, 3):  # every setting with every strategy and every rule
            continue
        pair, params = a_pair(n), SETTINGS[settings]
        found = law_of(
            lambda choose, pair=pair, params=params, n=n: rig_of(
                pair, GRAMMARS[grammar], strategy, rule, masks=bool(n % 2)
            ).answer(PROMPT, params, choose, n_tokens)
        )
        assert tv(found, masked_law(pair, GRAMMARS[grammar], params, n_tokens)) < 1e-12, settings


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.needs_format], ids=lambda fault: fault.name)
def test_a_mask_in_the_wrong_place_is_seen(fault: Fault) -> None:
    """Enumeration must see each of the audit's faults, and the audit's catalogue must have faults."""
    params, apart = params_of(top_k=2), []
    for seed in range(3):
        pair = a_pair(seed)

        def run(choose: Chooser, pair: Pair = pair) -> object:
            rig = rig_of(pair, wide, "draft-simple", parts=fault.parts)
            try:
                return rig.answer(PROMPT, params, choose, 4)
            except AssertionError:
                return "a token that is not allowed was said"

        apart.append(tv(law_of(run), masked_law(pair, wide, params, 4)))
    assert max(apart) > 1e-3


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_greedy_answers_equal_plain_ones_with_the_same_mask(grammar: str) -> None:
    """Strategy, length and the controller's decisions must not reach a constrained text."""
    for seed in range(12):
        pair = a_pair(seed)
        plain = rig_of(pair, GRAMMARS[grammar]).answer(PROMPT, GREEDY, RandomChooser(0), 12)
        for strategy in STRATEGIES:
            rig = rig_of(pair, GRAMMARS[grammar], strategy, list(Rule)[seed % 3], n_max=1 + seed % 6, auto=seed % 2 > 0)
            assert rig.answer(PROMPT, GREEDY, RandomChooser(0), 12) == plain, (seed, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forced_tokens_take_one_pass_and_no_draft(strategy: str) -> None:
    """A text that the grammar forces must not be drawn by a model, whatever the model says."""
    rig = rig_of(a_pair(1), closed, strategy, n_max=3)
    assert rig.answer(PROMPT, PLAIN, RandomChooser(0), 12) == ((1, 0, 2, 2, 1), "stop")
    first = rig.steps[0]
    assert first.drafted[:5] == (1, 0, 2, 2, 1)
    assert first.accepted == first.looked_up == len(first.drafted), "none counts as the model's"
    assert len(rig.steps) == 1
    assert rig.draft is not None
    assert rig.draft.count("eval") == 0


def test_a_step_of_forced_tokens_reports_nothing_of_the_one_before() -> None:
    """The decisions and the notice of an earlier proposal, shown again beside tokens that were not chosen."""
    rig = rig_of(a_pair(1), lambda said: (0, 1, 2) if len(said) < 2 else closed(said), "draft-simple", n_max=1)
    rig.answer(PROMPT, PLAIN, RandomChooser(0), 6)
    *before, last = rig.steps
    assert any(step.decisions for step in before)
    assert last.drafted
    assert last.decisions == ()


def test_plain_decoding_drafts_no_forced_tokens() -> None:
    """`--spec-type none` is the baseline of measurements: one token a pass."""
    rig = rig_of(a_pair(1), closed)
    rig.answer(PROMPT, PLAIN, RandomChooser(0), 12)
    assert [step.drafted for step in rig.steps] == [()] * 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_next_answer_is_free(strategy: str) -> None:
    """A mask that a drafter kept would spoil the drafts of later answers."""
    pair = replace(a_pair(2), draft=a_pair(2).target)
    rig = rig_of(pair, brackets, strategy, n_max=3)
    events = rig.run(PROMPT, PLAIN, RandomChooser(0), 12)
    for _ in zip(events, range(6), strict=False):
        pass
    events.close()  # abandoned in the middle
    rig.constraint = None
    rig.answer((2, 2, 1), PLAIN, RandomChooser(1), 12)
    fresh = Rig(pair.rig().target, None, rig_of(pair, brackets, strategy, n_max=3).drafter)
    fresh.answer((2, 2, 1), PLAIN, RandomChooser(1), 12)
    assert [step.drafted for step in rig.steps] == [step.drafted for step in fresh.steps]


def test_a_dead_end_is_an_error() -> None:
    """A grammar that allows no token must not hang, end silently, or raise from numpy."""
    for strategy in ("none", *STRATEGIES):
        rig = rig_of(a_pair(3), lambda said: (1, 2) if len(said) < 2 else (), strategy)
        with pytest.raises(AllForbidden) as caught:
            rig.answer(PROMPT, PLAIN, RandomChooser(0), 9)
        assert "format" in str(caught.value)
        assert len(rig.emitted) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_broken_row_within_forced_tokens_is_the_error_of_plain_decoding(strategy: str) -> None:
    """A drafter that takes laws for its own which the step never reached."""
    pair = replace(a_pair(4), target=replaced(a_pair(4).target, len(PROMPT) + 3, np.nan, token=2))
    for auto in (False, True):
        rig = rig_of(pair, closed, strategy, n_max=3, auto=auto)
        with pytest.raises(NumericsError):
            rig.answer(PROMPT, PLAIN, RandomChooser(0), 9)
        assert rig.emitted == (1, 0, 2)


@pytest.mark.parametrize("strategy", ["draft-simple", "tree"])
def test_a_probe_after_forced_tokens_judges_the_text_before_them(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws laid over later tokens: a draft that says what its target says would count as bad."""
    monkeypatch.setattr(Controller, "_worth_probing", lambda *_: True)
    table = a_pair(0).target
    last_only = replace(a_pair(0), target=lambda history: table(history[-1:]), n_ctx=400)  # a probe may skip text
    policy = (Controller if strategy == "draft-simple" else TreeController)(DOUBTFUL)
    learned: list[float] = []
    policy.learn = lambda confidence, acceptance: learned.append(acceptance)  # type: ignore[method-assign]
    draft = FakeModel(last_only.target, 4, 400, last_only.end_tokens)
    drafter = REGISTRY[strategy].make(
        draft, DraftSettings(length=DraftLength(4), vocab_size=4, policy=policy, n_leaves=4)
    )

    def forces_two(said: History) -> tuple[int, ...]:
        return ((0, 1, 2), (0, 1, 2), (1,), (2,))[len(said) % 4]

    rig = Rig(last_only.rig().target, draft, drafter, constraint=lambda: FakeConstraint(forces_two))
    rig.answer(PROMPT, PLAIN, RandomChooser(0), 300)
    assert learned
    assert learned == pytest.approx([1.0] * len(learned))


@pytest.mark.parametrize("strategy", ["draft-simple", "chain", "tree"])
def test_a_mask_and_a_bias_that_forbid_the_drafts_tokens_do_so_in_one_place(strategy: str) -> None:
    """A whole answer without drafts, and a false notice, because of one place where the draft has no token."""
    pair = replace(a_pair(1), end_tokens=frozenset())
    draft = FakeModel(pair.target, 4)
    drafter = REGISTRY[strategy].make(draft, DraftSettings(length=DraftLength(2), vocab_size=3, n_leaves=4))

    def grammar(said: History) -> tuple[int, ...]:
        return (0, 3) if len(said) == 1 else (0, 1, 2)  # 0 is biased away, the draft does not say 3

    rig = Rig(pair.rig().target, draft, drafter, constraint=lambda: FakeConstraint(grammar))
    rig.answer((1, 1, 2), params_of(logit_bias={0: -np.inf}), RandomChooser(0), 12)
    assert rig.emitted[1] == 3
    assert not [event for event in rig.events if isinstance(event, Notice)]
    assert any(step.drafted for step in rig.steps[2:])


def test_a_bias_against_the_only_allowed_token_is_an_error() -> None:
    """The mask comes first, so a forced token keeps its bias."""
    rig = rig_of(a_pair(3), closed, "draft-simple")
    with pytest.raises(AllForbidden):
        rig.answer(PROMPT, params_of(logit_bias={0: -np.inf}), RandomChooser(0), 9)
    assert rig.emitted == (1,)


@pytest.mark.parametrize("ids", [None, (0, 2, 5)])
def test_both_forms_give_the_same_cells(ids: tuple[int, ...] | None) -> None:
    """Rows of drafts have other columns than there are tokens."""
    known = None if ids is None else np.array(ids)
    row = np.arange(6 if ids is None else 3, dtype=np.float32)
    for allowed in ((0, 5), (2,), (1, 3), (2, 5, 7), ()):
        others = [token for token in range(8) if token not in allowed]
        forms = (Allowed(np.array(allowed, dtype=np.int64)), Allowed(np.array(others), all_but=True))
        laws = []
        for form in forms:
            cells, tokens = among(row, form, known)
            tokens = np.arange(cells.size) if tokens is None else tokens
            laws.append({int(token): cell for token, cell in zip(tokens, cells, strict=True) if cell > -np.inf})
            assert [token in form for token in range(8)] == [token in allowed for token in range(8)]
        assert laws[0] == laws[1]
        assert set(laws[0]) == set(allowed) & set(range(6) if ids is None else ids)
