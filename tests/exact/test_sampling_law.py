"""`sampling.law` against the plain-Python reference, and the random chooser."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.base.errors import AllForbidden, NumericsError, UsageError
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, SamplingParams, law
from tests.enumeration import as_dict
from tests.exact.harness import params_of
from tests.exact.reference import TokenLaw, token_law
from tests.marks import looped

QWEN_VOCAB = 151_936
LARGE_VOCAB = 20_011  # large enough for every shortcut; the definitions take a second for that of Qwen


def assert_same(found: TokenLaw, expected: TokenLaw) -> None:
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[token], expected[token], rel_tol=1e-9, abs_tol=1e-15) for token in expected)


@dataclass(frozen=True)
class Drawn:
    """A random row with the history and the settings that it is sampled with."""

    logits: FloatArray
    history: list[int]
    params: SamplingParams


@st.composite
def rows(draw: st.DrawFn) -> Drawn:
    """Rows of 1 to 6001 logits and settings of every kind, with everything that the shortcuts could get wrong.

    Ties and plateaus at the edges of filters, masked, forbidden and lifted tokens among the largest, sizes that 64 does
    not divide, temperatures from nearly greedy to flat.
    """
    n_vocab = draw(st.integers(1, 40) | st.sampled_from([63, 64, 65, 300, 2049, 5000, 6001]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = draw(st.sampled_from([0.01, 0.5, 1.0, 4.0, 30.0])) * rng.standard_normal(n_vocab)
    kind = draw(st.sampled_from(["smooth", "smooth", "whole", "halves", "two values"]))
    if kind == "whole":
        logits = np.round(logits)
    elif kind == "halves":
        logits = np.round(logits * 2.0) / 2.0
    elif kind == "two values":
        edge = np.quantile(logits, draw(st.sampled_from([0.5, 0.99])))
        logits = np.where(logits > edge, 3.0, draw(st.sampled_from([2.0, -3.0, -20.0])))
    masked = rng.random(n_vocab) < draw(st.sampled_from([0.0, 0.0, 0.5]))
    masked[int(logits.argmax())] = False
    logits[masked] = -np.inf
    logits = (logits + draw(st.sampled_from([0.0, 0.0, 40.0, -3000.0]))).astype(np.float32)
    near = st.sampled_from(np.argsort(-logits, kind="stable")[:50].tolist())
    anywhere = st.integers(0, n_vocab - 1)
    bias = st.sampled_from([-math.inf, -1e9, -100.0, -0.5, 0.25, 30.0])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 1.1e-6, 1e-3, 0.3, 0.8, 1.0, 2.0, 50.0])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 20, 40])),
        # Odd shares: at a sum that rounds to the share itself, two right orders of summation may disagree.
        top_p=draw(st.sampled_from([1.0, 0.9531, 0.7013, 0.3137, 0.0137, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0507, 0.3011, 1.0])),
    )
    if draw(st.booleans()):  # half the rows stay as they are: one lifted token would hide what the filters do
        return Drawn(logits, [], params)
    params = replace(
        params,
        repeat_penalty=draw(st.sampled_from([1.0, 1.3, 0.9])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.4])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.35, -0.35])),
        repeat_last_n=draw(st.sampled_from([-1, 0, 2, 64])),
        logit_bias=draw(st.dictionaries(near | st.integers(0, n_vocab + 3), bias, max_size=12)),
    )
    allowed = set(range(n_vocab)) - {token for token, value in params.logit_bias.items() if value == -math.inf}
    if not any(logits[token] > -math.inf for token in allowed):
        params = replace(params, logit_bias={})
    return Drawn(logits, draw(st.lists(near | anywhere, max_size=70)), params)


@pytest.mark.slow
@given(rows())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_the_law_of_any_row_is_the_one_of_the_definitions(drawn: Drawn) -> None:
    """Prevents: filters in another order or with other ties, and a shortcut that loses a token or moves a cut."""
    found = law(drawn.logits, drawn.history, drawn.params)
    probs = as_dict(found)
    assert_same(probs, token_law(drawn.logits.tolist(), drawn.history, drawn.params))
    assert all(found.prob(token) == prob for token, prob in probs.items()), "each token is stored once"
    assert abs(found.mass() - 1.0) < 1e-9


@given(rows(), st.integers(0, 2**32), st.sampled_from([0.02, 0.5, 1.0]))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_a_row_of_some_tokens_has_the_law_of_the_row_that_masks_the_others(
    drawn: Drawn, seed: int, share: float
) -> None:
    """Prevents: bias, penalties or ties that look at columns where they should look at token ids."""
    known = np.random.default_rng(seed).random(drawn.logits.size) <= share
    known[int(drawn.logits.argmax())] = True
    ids = known.nonzero()[0]
    masked = np.where(known, drawn.logits, np.float32(-np.inf))
    params = replace(
        drawn.params, logit_bias={token: bias for token, bias in drawn.params.logit_bias.items() if bias > -math.inf}
    )
    found = as_dict(law(drawn.logits[ids], drawn.history, params, ids))
    expected = as_dict(law(masked, drawn.history, params))
    assert found.keys() == expected.keys()
    assert max(abs(found[token] - expected[token]) for token in expected) < 1e-12


@pytest.mark.parametrize("token", [0, 2, 4, 5, 7, 9, 10])
def test_a_row_of_some_tokens_changes_the_cell_of_the_token_and_no_other(token: int) -> None:
    """Prevents: the first or last known token that bias and penalties miss, or an unknown one that they hit."""
    ids = np.array([2, 5, 9])
    expected = {each: math.exp(0.5 * (each == token)) for each in ids.tolist()}
    for params, history in ((params_of(logit_bias={token: 0.5}), ()), (params_of(presence_penalty=-0.5), (token,))):
        found = as_dict(law(np.zeros(3), history, params, ids))
        assert found == pytest.approx({each: weight / sum(expected.values()) for each, weight in expected.items()})


@pytest.mark.parametrize("n_vocab", [256, 5001, QWEN_VOCAB])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_that_lands_exactly_on_a_tie_keeps_what_the_definitions_keep(n_vocab: int, top_p: float) -> None:
    """Prevents: a mass in float32 that reaches a share a token too early or too late. All sums here are exact."""
    row = np.full(n_vocab, -200.0, dtype=np.float32)
    row[[7, 64, 130, 255]] = 3.0  # a quarter each, the others nothing
    kept = [7, 64, 130, 255][: round(4 * top_p)]
    assert as_dict(law(row, (), params_of(top_p=top_p))) == dict.fromkeys(kept, 1.0 / len(kept))
    between = params_of(top_p=top_p + 1e-9)
    assert list(as_dict(law(row, (), between))) == [7, 64, 130, 255][: round(4 * top_p) + 1]


@pytest.mark.parametrize("n_equal", [3, 7, 10, 100, 1000])
def test_top_p_keeps_no_more_equal_tokens_than_it_says(n_equal: int) -> None:
    """Prevents: 56 of 100 equal tokens at 0.55, because 0.55 * 100 is a rounding above 55."""
    for n_kept in range(1, n_equal, max(n_equal // 100, 1)):
        found = law(np.zeros(n_equal, np.float32), (), params_of(top_p=n_kept / n_equal))
        assert found.support().tolist() == list(range(n_kept))


def test_top_p_that_falls_on_a_sum_keeps_the_tokens_of_that_sum() -> None:
    """Prevents: a token more, or less, where the masses of unequal tokens add up to the share but for a rounding."""
    probs = np.array([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    for n_kept in range(1, 8):
        top_p = round(float(probs[:n_kept].sum()), 2)
        assert law(np.log(probs), (), params_of(top_p=top_p)).support().tolist() == list(range(n_kept))


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("n_rest", [0, 1, 17, 40, 63])
def test_top_k_finds_the_largest_wherever_they_are(k: int, n_rest: int) -> None:
    """Prevents: a large row whose last tokens, which make no whole line of 64, are left out."""
    rng = np.random.default_rng([k, n_rest])
    for n_vocab in (64 * (4 * k - 1) + n_rest, 64 * 4 * k + n_rest, 64 * 40 + n_rest):
        for n_tail in {0, min(1, n_rest), min(k, n_rest)}:
            row = np.round(3.0 * rng.standard_normal(n_vocab)).astype(np.float32)
            row[n_vocab - n_tail :] = row.max() + rng.permutation(n_tail)
            expected = np.argsort(-row, kind="stable")[:k]
            assert law(row, (), params_of(top_k=k)).support().tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("n_vocab", [65, 300, 5001, QWEN_VOCAB - 1])
@pytest.mark.parametrize(
    "params", [params_of(top_k=1), params_of(top_p=0.5), params_of(min_p=0.5), params_of(top_k=2, min_p=0.5)]
)
def test_the_last_few_tokens_of_a_vocabulary_are_not_forgotten(n_vocab: int, params: SamplingParams) -> None:
    """Prevents: a shortcut over 64 lines that leaves out what 64 does not divide."""
    row = np.zeros(n_vocab, dtype=np.float32)
    row[-1] = 30.0
    assert set(as_dict(law(row, (), params))) == {n_vocab - 1}


def test_every_filter_on_a_row_small_enough_to_check_by_hand() -> None:
    """The reference and the code making the same mistake: these figures were computed on paper."""
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert_same(as_dict(law(row, (), params_of())), {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05})
    assert_same(as_dict(law(row, (), params_of(top_k=2))), {0: 0.625, 1: 0.375})
    assert_same(as_dict(law(row, (), params_of(top_p=0.7))), {0: 0.625, 1: 0.375})
    assert_same(as_dict(law(row, (), params_of(min_p=0.29))), {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95})
    assert_same(as_dict(law(row, (), params_of(temperature=0.5, top_k=2))), {0: 0.25 / 0.34, 1: 0.09 / 0.34})
    assert_same(as_dict(law(row, (), params_of(temperature=0.0))), {0: 1.0})
    assert_same(as_dict(law(row, (), params_of(logit_bias={0: -100.0}, top_k=1))), {1: 1.0})


def test_top_p_looks_at_the_mass_after_top_k() -> None:
    """top-p over the whole row would need three tokens for 0.85; of the two that top-k left, it needs both."""
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert set(as_dict(law(row, (), params_of(top_k=3, top_p=0.84)))) == {0, 1}
    assert set(as_dict(law(row, (), params_of(top_p=0.84)))) == {0, 1, 2}
    assert set(as_dict(law(row, (), params_of(top_p=0.84, min_p=0.2)))) == {0, 1, 2}, "min-p comes after top-p"


def test_filters_look_at_the_row_before_temperature() -> None:
    """Temperature first, as some samplers have it, would let a hot row keep more tokens."""
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for temperature in (0.2, 1.0, 5.0):
        assert set(as_dict(law(row, (), params_of(temperature=temperature, top_p=0.7)))) == {0, 1}
        assert set(as_dict(law(row, (), params_of(temperature=temperature, min_p=0.5)))) == {0, 1}


def test_bias_comes_before_penalties_and_both_before_the_filters() -> None:
    """A bias that a repeat penalty does not scale, or a banned token that still takes a place in top-k."""
    row = np.array([3.0, 1.0, 0.0])
    biased = as_dict(law(row, (0,), params_of(repeat_penalty=2.0, logit_bias={0: 1.0})))
    assert biased[0] / biased[1] == pytest.approx(math.exp((3.0 + 1.0) / 2.0 - 1.0))
    assert set(as_dict(law(row, (), params_of(top_k=2, logit_bias={0: -math.inf})))) == {1, 2}
    assert set(as_dict(law(row, (0,), params_of(top_k=1, presence_penalty=2.5)))) == {1}
    ids, _ = law(row, (1,), params_of(top_k=5, presence_penalty=2.5)).cells()
    assert ids is not None
    assert ids.tolist() == [0, 1, 2], "a changed token is stored once"


def test_penalties_count_within_the_window_only() -> None:
    """A window of the wrong length, or one that counts a token once where frequency asks for every time."""
    row = np.zeros(3)
    ratio = as_dict(law(row, (0, 1, 1), params_of(frequency_penalty=0.5, repeat_last_n=2)))
    assert ratio[0] == pytest.approx(ratio[2])
    assert ratio[1] / ratio[2] == pytest.approx(math.exp(-1.0))
    for n_last in (3, 4, 5, 9):  # also a window that reaches before the text
        ratio = as_dict(law(row, (0, 1, 1), params_of(frequency_penalty=0.5, repeat_last_n=n_last)))
        assert ratio[0] / ratio[2] == pytest.approx(math.exp(-0.5))
        assert ratio[1] / ratio[2] == pytest.approx(math.exp(-1.0))
    ratio = as_dict(law(row, (0, 1, 1), params_of(presence_penalty=0.5, repeat_last_n=-1)))
    assert ratio[0] == pytest.approx(ratio[1])
    assert ratio[0] / ratio[2] == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("n_last", [-1, 1, 2, 5, 9])
def test_a_window_is_the_end_of_what_was_said_before_it(n_last: int) -> None:
    """Tokens counted that come later, or, where the text is shorter than the window, those of its end alone."""
    text = list(range(7))
    for n in range(len(text) + 1):
        for end in (None, *range(n + 1)):
            said = text[:n][:end]
            params = params_of(presence_penalty=0.5, repeat_last_n=n_last)
            assert params.window(text[:n], end) == [
                token for i, token in enumerate(said) if n_last < 0 or i >= len(said) - n_last
            ]
    assert (params_of().window(text), params_of(presence_penalty=0.5, repeat_last_n=0).window(text)) == ((), ())


@pytest.mark.parametrize("name", ["repeat_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [0.5, 1.0, 2.0])
def test_each_penalty_alone_is_one(name: str, value: float) -> None:
    """A penalty that works only beside another one, or at any value but one."""
    params = params_of(**{name: value})
    assert params.penalised == (name != "repeat_penalty" or value != 1.0)
    assert not replace(params, repeat_last_n=0).penalised
    ratio = as_dict(law(np.ones(2), (0,), params))
    logit = 1.0 / value if name == "repeat_penalty" else 1.0 - value
    assert ratio[0] / ratio[1] == pytest.approx(math.exp(logit - 1.0))


def test_a_repeat_penalty_makes_negative_logits_smaller_too() -> None:
    """Dividing a negative logit would reward the repetition."""
    found = as_dict(law(np.array([-2.0, -2.0]), (0,), params_of(repeat_penalty=2.0)))
    assert found[0] / found[1] == pytest.approx(math.exp(-2.0))


@pytest.mark.parametrize("n_vocab", [5, 300, 5000, QWEN_VOCAB])
def test_ties_go_to_the_lowest_ids(n_vocab: int) -> None:
    """Draft and target that break the same tie differently: exactness kept, acceptance lost, greedy text changed."""
    row = np.zeros(n_vocab, dtype=np.float32)
    row[3] = 1.0
    assert as_dict(law(row, (), params_of(temperature=0.0))) == {3: 1.0}
    assert set(as_dict(law(row, (), params_of(top_k=3)))) == {0, 1, 3}
    assert as_dict(law(np.zeros(n_vocab), (), params_of(temperature=0.0))) == {0: 1.0}
    # Equal logits have equal mass, so a share of 2.5 tokens needs three of them.
    assert set(as_dict(law(np.zeros(n_vocab), (), params_of(top_p=2.5 / n_vocab)))) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6])
def test_one_cut_off_decides_greedy(temperature: float) -> None:
    """A temperature that is greedy in one room and a division by almost nothing in another."""
    assert params_of(temperature=temperature).greedy
    assert as_dict(law(np.array([1.0, 1.0 + 1e-7]), (), params_of(temperature=temperature))) == {1: 1.0}
    assert not params_of(temperature=1.1e-6).greedy


def test_a_tiny_temperature_does_not_overflow() -> None:
    """exp(logit / T) without subtracting the maximum first."""
    found = as_dict(law(np.array([500.0, 499.0, -500.0], dtype=np.float32), (), params_of(temperature=1e-5)))
    assert found == {0: 1.0}


SETTINGS_OF_ALL_KINDS = [
    params_of(),
    params_of(temperature=0.0),
    params_of(top_k=2),
    params_of(top_k=40),
    params_of(top_p=0.9),
    params_of(min_p=0.1),
    SamplingParams(),
    params_of(repeat_penalty=1.3, temperature=0.0),
    params_of(logit_bias={2: -math.inf}, top_k=2),
]


@looped(params=SETTINGS_OF_ALL_KINDS, n_vocab=(4, 200, 2000, QWEN_VOCAB), value=(math.nan, math.inf))
def test_nan_and_inf_logits_are_a_named_error(value: float, n_vocab: int, params: SamplingParams) -> None:
    """A NaN that a partial sort hides; it comes out as silence, an endless loop or an id out of range."""
    for n_bad in (1, n_vocab):
        row = np.linspace(0.0, 1.0, n_vocab, dtype=np.float32)
        row[n_vocab // 2 : n_vocab // 2 + n_bad] = value
        with pytest.raises(NumericsError):
            law(row, (1, 2), params)


@looped(params=SETTINGS_OF_ALL_KINDS, n_vocab=(4, 200, QWEN_VOCAB))
def test_a_row_with_every_token_masked_is_a_named_error(n_vocab: int, params: SamplingParams) -> None:
    """A law of 0/0, or token 0 by default."""
    with pytest.raises(NumericsError):
        law(np.full(n_vocab, -np.inf, dtype=np.float32), (1, 2), params)


def test_the_cause_of_a_row_without_a_law_is_told_apart() -> None:
    """A model blamed for a bias, or a bias for a broken model; a draft that a NaN silences for a whole answer."""
    row = np.array([1e30, 1.0, -np.inf], np.float32)
    for params in (params_of(logit_bias={0: -math.inf, 1: -math.inf}), params_of(frequency_penalty=1e308)):
        with pytest.raises(AllForbidden):
            law(row, (0, 0, 1, 1), params)
    with pytest.raises(NumericsError, match="too large"):
        law(row, (0,), params_of(repeat_penalty=1e-300))
    for params in (params_of(), params_of(logit_bias={0: -math.inf})):
        for broken in (np.full(3, -np.inf), np.array([1.0, math.nan, 1.0])):
            with pytest.raises(NumericsError, match="model's logits"):
                law(broken, (), params)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("penalty", [1.0, 1e-300])
def test_an_error_names_the_number_that_gives_no_law(worst: float, penalty: float) -> None:
    """A report of masked tokens for a NaN or an overflow, or of the logit -inf for masked tokens."""
    row = np.full(3, worst, np.float32) if penalty == 1.0 else np.array([1e30, 1.0, worst], np.float32)
    with pytest.raises(NumericsError) as caught:
        law(row, (0,), params_of(repeat_penalty=penalty))
    named = worst if penalty == 1.0 or math.isnan(worst) else math.inf
    assert re.findall(r"-?\b(?:nan|inf)\b", str(caught.value)) == ([] if named == -math.inf else [str(named)])


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"repeat_penalty": 0.0},
        {"logit_bias": {0: math.nan}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {0: math.inf}},
        {"logit_bias": {0: "1"}},
        {"logit_bias": {0.5: 1.0}},
        {"logit_bias": [1.0]},
        {"temperature": "0.5"},
        {"top_k": 1.5},
        {"top_k": "5"},
        {"repeat_last_n": -2},
        {"repeat_last_n": 2.5},
        {"repeat_penalty": "1.1"},
        {"repeat_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -math.inf},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, object]) -> None:
    """A law that is silently wrong for a whole answer because of one typing error."""
    with pytest.raises(UsageError):
        params_of(**change)


def test_the_defaults_are_those_of_llama_cpp() -> None:
    """Another text than llama.cpp's own programs write with the same model and seed."""
    penalties = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_last_n": 64}
    assert SamplingParams() == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, **penalties)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [SamplingParams(), params_of(), params_of(top_p=0.9), params_of(min_p=0.01)])
def test_a_row_of_a_large_vocabulary_gives_the_law_of_the_definitions(params: SamplingParams) -> None:
    """A shortcut for large rows (columns, partial sorts) that loses a token."""
    row = (3.0 * np.random.default_rng(0).standard_normal(LARGE_VOCAB)).astype(np.float32)
    assert_same(as_dict(law(row, (), params)), token_law(row.tolist(), (), params))


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("change", [{}, {3: 4.0}, {3: -math.inf}, {9: 18.0}, {9: 17.0}, {699: 2.5}, {5: -1.0}])
@pytest.mark.parametrize("second", [9.0, 17.0, 17.004, 17.01, 19.0])
def test_where_min_p_leaves_one_token_it_is_the_only_one(second: float, change: dict[int, float], top_k: int) -> None:
    """A shortcut for such rows that overlooks a second token, or one that a bias lifts or forbids; ln 20 is 2.9957."""
    row = np.zeros(700, np.float32)
    row[3], row[699] = 20.0, second
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.05, logit_bias=change)
    assert_same(as_dict(law(row, (), params)), token_law(row.tolist(), (), params))


class Uniforms(np.random.Generator):
    """A generator whose uniforms are given: the edges that a real one shows once in 2^53 draws."""

    def __init__(self, *values: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._values = list(values)

    def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
        return self._values.pop(0)


def chooser_with(monkeypatch: pytest.MonkeyPatch, *uniforms: float) -> RandomChooser:
    chooser = RandomChooser(0)
    (name,) = [name for name in vars(chooser) if isinstance(getattr(chooser, name), np.random.Generator)]
    monkeypatch.setattr(chooser, name, Uniforms(*uniforms))
    return chooser


LARGEST = 1.0 - 2.0**-53  # what a generator on [0, 1) returns at most


def test_a_uniform_of_zero_does_not_let_the_impossible_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`u <= prob` accepts with prob 0 when u is 0; a cumulative search from the left draws a token without mass."""
    chooser = chooser_with(monkeypatch, 0.0, 0.0)
    assert not chooser.flip(0.0)
    assert chooser.pick(Distribution.dense([0.0, 0.0, 1.0, 0.0])) == 2


def test_the_largest_uniform_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mass a rounding below 1 lets the search run past the end: an id out of range, or a token without mass."""
    chooser = chooser_with(monkeypatch, LARGEST, LARGEST, LARGEST)
    assert chooser.flip(1.0)
    assert chooser.pick(Distribution.dense([0.1] * 10 + [0.0, 0.0])) == 9
    assert chooser.pick(Distribution.on([4, 9], [0.5, 0.5 - 1e-12])) == 9
    rng = np.random.default_rng(0)
    for n in range(1, 200):
        probs = rng.random(n) * rng.choice([1.0, 1e-9, 3.0])
        last = n - 1 - int(rng.integers(n))
        probs[last + 1 :] = 0.0
        assert chooser_with(monkeypatch, LARGEST).pick(Distribution.dense(probs)) == last
    assert chooser_with(monkeypatch, 0.6).pick(Distribution.dense([0.5, 0.25])) == 0, (
        "a share of the mass, whatever it is"
    )


def test_the_same_seed_repeats_and_another_does_not() -> None:
    """Seed 0 taken for 'no seed', or a generator shared between choosers."""
    flat = Distribution.dense([0.125] * 8)

    def draws(seed: int) -> list[int]:
        chooser = RandomChooser(seed)
        return [chooser.pick(flat) + 8 * chooser.flip(0.5) for _ in range(40)]

    assert draws(0) == draws(0)
    assert len({tuple(draws(seed)) for seed in range(20)}) == 20


def test_a_certain_draw_takes_a_random_number_like_any_other() -> None:
    """A shortcut for laws of one token that gives another text for the same seed."""
    certain, drawn = RandomChooser(3), RandomChooser(3)
    certain.pick(Distribution.point(5))
    drawn.pick(Distribution.dense([0.5, 0.5]))
    flat = Distribution.dense([0.01] * 100)
    assert [certain.pick(flat) for _ in range(5)] == [drawn.pick(flat) for _ in range(5)]


def test_draws_that_follow_each_other_are_independent() -> None:
    """One uniform used for two decisions, so that an acceptance tells what the redraw will be."""
    chooser = RandomChooser(7)
    flat = Distribution.dense([0.25] * 4)
    n = 20_000
    counts = np.zeros((4, 2, 4))
    for _ in range(n):
        counts[chooser.pick(flat), int(chooser.flip(0.5)), chooser.pick(flat)] += 1
    chi_square = float(((counts - n / 32) ** 2 / (n / 32)).sum())
    assert chi_square < 82.0  # 31 degrees of freedom: p = 1.6e-6


def test_picks_follow_the_law() -> None:
    """Inversion that is off by one token, or that takes positions in the support for ids."""
    chooser = RandomChooser(11)
    n = 20_000
    for made in (Distribution.dense([0.1, 0.0, 0.2, 0.7]), Distribution.on([5, 9, 70], [0.1, 0.2, 0.7])):
        ids, probs = made.items()
        drawn = [chooser.pick(made) for _ in range(n)]
        counts = np.array([drawn.count(token) for token in ids.tolist()])
        assert counts.sum() == n
        assert float(((counts - n * probs) ** 2 / (n * probs)).sum()) < 26.8  # 2 degrees of freedom: p = 1.5e-6


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("peak", [0.0, 5.0, -3.0, 7e3, -6e4])
def test_min_p_alone_keeps_to_the_last_bit_what_float64_keeps(peak: float, dtype: type) -> None:
    """Candidates chosen in the row's own precision: one rounding too many, and a token at the edge is lost."""
    rng = np.random.default_rng(5)
    for min_p in (0.05, 0.3, 1.0, 1e-300, 5e-324):
        edge = peak + math.log(min_p)
        row = np.concatenate((edge + rng.standard_normal(60) * 10.0 ** rng.integers(-16, 1, 60), [peak] * 3, [-np.inf]))
        row = np.minimum(row, peak).astype(dtype)
        for shift in range(-3, 4):  # neighbours of the edge among the numbers of this precision
            at = np.array(min(edge, peak), dtype)
            for _ in range(abs(shift)):
                at = np.nextafter(at, dtype(np.inf if shift > 0 else -np.inf))
            row = np.append(row, min(at, dtype(peak)))
        weights = np.exp(row.astype(np.float64) - float(row.max()))
        kept = (weights >= min_p).nonzero()[0]
        found = law(row, (), params_of(min_p=min_p))
        assert found == Distribution.on(kept, weights[kept] / weights[kept].sum())


@pytest.mark.parametrize(
    "params",
    [params_of(), params_of(top_k=9), params_of(top_p=0.9), params_of(min_p=0.1), params_of(logit_bias={1: 2.0})],
)
def test_a_law_keeps_nothing_of_the_row_and_cannot_be_changed(params: SamplingParams) -> None:
    """The row is the model's own memory: it holds something else one step later. Copies are spared, not this one."""
    row = np.random.default_rng(6).standard_normal(2000).astype(np.float64)
    before = row.copy()
    found = law(row, (), params)
    assert np.array_equal(row, before)
    for cells in found.cells():
        if cells is not None:
            assert not np.shares_memory(cells, row)
            with pytest.raises(ValueError, match="read-only"):
                cells[0] = 0
