"""The benchmark's run matrix: fixed before the first counted run, and fitted to the time there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from math import gcd
from typing import TypeVar

from specllama.bench.report import Arm, BenchPlan, Condition, Load, PlannedPrompt
from specllama.drafters import REGISTRY
from specllama.drafters.length import DraftLength
from specllama.prompts.load import BenchPrompt

LEAST_PROMPTS = 2  # one to pick by, one to confirm with
MOST_REPETITIONS = 3  # where every prompt fits, the rest of the time repeats them
# (tokens of an answer, prompts): answers get shorter where fewer prompts than that fit; the last ones are always taken.
LENGTHS = ((128, 12), (64, 12), (32, 0))

T = TypeVar("T")


def in_turn(items: Sequence[T], at: int) -> list[T]:
    """All items, in another order for every `at`: each begins as often.

    Of three or more nobody always comes behind the same one: whoever always came behind the heaviest would
    perhaps always find the warmest machine.
    """
    n = len(items)
    strides = [stride for stride in range(1, max(n, 2)) if gcd(stride, n) == 1]
    stride = strides[at % len(strides)]
    return [items[(at + stride * i) % n] for i in range(n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for. Every tuple is a sweep; sweeps are crossed with each other."""

    loads: tuple[Load, ...]
    drafts: tuple[str, ...]  # names; may be empty
    n_swept: int | None = None  # of them, those that fixed lengths are measured with, the first ones; None = all
    strategies: tuple[str, ...]
    lengths: tuple[DraftLength, ...]  # 0 is plain decoding, which is always there
    auto_strategy: str = ""  # with what `auto` drafts; empty: there is no profile, so there is no `auto`
    auto_draft: int = 0  # the draft that the profile is of
    rules: tuple[str, ...] = ("block",)
    temperatures: tuple[float, ...] = (0.0,)
    depths: tuple[int, ...] = (0,)
    n_prompt: tuple[int, ...] = (0,)
    n_predict: tuple[int, ...] = ()  # empty: as long as the budget allows
    n_prompts: int | None = None  # at most so many
    n_repetitions: int | None = None
    fixed_length: bool = True
    delay_s: float = 0.0
    budget_s: float | None = None


# --------------------------------------------------------------------------------------------------------------- matrix


def differences(load: Load, loads: Sequence[Load]) -> list[str]:
    """What tells a load from the others."""
    words = (("t", "n_threads"), ("ctk", "type_k"), ("ctv", "type_v"), ("ctkd", "type_k_draft"))
    return [
        f"{word}={getattr(load, name)}"
        for word, name in words
        if len({getattr(each, name) for each in loads}) > 1
    ]  # fmt: skip


def _settings(wishes: Wishes) -> Iterable[tuple[str, int | None, DraftLength, str]]:
    """(strategy, draft, length, rule) of every speculative setting."""
    for rule, length in product(wishes.rules, (each for each in wishes.lengths if each.longest)):
        strategies: Sequence[str] = wishes.strategies
        if length.is_auto:
            strategies = (wishes.auto_strategy,) if wishes.auto_strategy else ()
        for strategy in strategies:
            # What the controller knows was measured with one draft.
            swept = range(len(wishes.drafts[: wishes.n_swept]))
            known: Sequence[int] = (wishes.auto_draft,) if length.is_auto else swept
            drafts: Sequence[int | None] = known if REGISTRY[strategy].needs_model else (None,)
            for draft in drafts:
                yield strategy, draft, length, rule


def arms(wishes: Wishes) -> tuple[Arm, ...]:
    """Every setting under every load, plain decoding first in each; names say what differs."""
    found: list[Arm] = []
    settings = [each for each in dict.fromkeys(_settings(wishes)) if each[0] != "none"]
    strategies = {strategy for strategy, _, length, _ in settings if not length.is_auto}
    for index, load in enumerate(wishes.loads):
        where = differences(load, wishes.loads)
        found.append(Arm(name=" ".join(["plain", *where]), load=index))
        for strategy, draft, length, rule in settings:
            words = ["auto" if length.is_auto else f"K={length}"]
            if not length.is_auto and (len(strategies) > 1 or strategy != "draft-simple"):
                words.append(strategy)
            if draft is not None and not length.is_auto and len(wishes.drafts[: wishes.n_swept]) > 1:
                words.append(wishes.drafts[draft])
            words += [rule] if len(wishes.rules) > 1 else []
            name = " ".join([*words, *where])
            found.append(
                Arm(
                    name=name,
                    load=index,
                    draft=draft,
                    spec_type=strategy,
                    n_max=None if length.is_auto else length.longest,
                    verify_rule=rule,
                )
            )
    return tuple(found)


def conditions(wishes: Wishes, n_predict: Sequence[int]) -> tuple[Condition, ...]:
    """Every combination of temperature and lengths."""
    crossed = product(wishes.depths, wishes.n_prompt, n_predict, wishes.temperatures)
    return tuple(
        Condition(temperature=temperature, n_depth=depth, n_prompt=n_prompt, n_predict=n)
        for depth, n_prompt, n, temperature in dict.fromkeys(crossed)
    )


def spread(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The prompts, class by class in turn, so that the first few are of many classes and languages."""
    classes: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        classes.setdefault(prompt.category, []).append(prompt)
    # Each class begins at another place of its own, or the first of every class would be in the same language.
    turned = [of_one[i % len(of_one) :] + of_one[: i % len(of_one)] for i, of_one in enumerate(classes.values())]
    return [prompt for turn in zip_longest(*turned) for prompt in turn if prompt is not None]


def halves(prompts: Sequence[BenchPrompt]) -> list[bool]:
    """Of each prompt, whether it is of the half that picks: classes and languages are in both as evenly as can be."""
    seen: dict[str, int] = {}
    picks = []
    for prompt in prompts:
        turn = seen[prompt.category] = seen.get(prompt.category, len(seen) - 1) + 1
        picks.append(turn % 2 == 0)
    if len(picks) > 1 and len(set(picks)) == 1:
        picks[-1] = not picks[-1]
    return picks


# --------------------------------------------------------------------------------------------------------------- budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast things went while warming up."""

    prefill_tok_s: float
    decode_tok_s: Sequence[float]  # of every arm
    draft_read_s: Sequence[float]  # of every arm: time for a token of the prompt that its draft takes, too


def run_seconds(wishes: Wishes, rates: Rates, condition: Condition, n_tokens: int) -> float:
    """What one prompt of `n_tokens` is expected to take under a condition, all arms together."""
    n_read = max(n_tokens, condition.n_prompt)
    decode_s = sum(condition.n_predict / rate for rate in rates.decode_tok_s)
    read_s = n_read * (len(rates.decode_tok_s) / rates.prefill_tok_s + sum(rates.draft_read_s))
    return decode_s + read_s + len(rates.decode_tok_s) * wishes.delay_s


def _seconds(wishes: Wishes, rates: Rates, n_predict: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """What every prompt is expected to take, under all conditions and arms."""
    return [sum(run_seconds(wishes, rates, each, n) for each in conditions(wishes, n_predict)) for n in lengths]


def _n_that_fit(seconds: Sequence[float], left_s: float) -> int:
    """How many of the first prompts fit."""
    spent_s = 0.0
    for i, each in enumerate(seconds):
        spent_s += each
        if spent_s > left_s:
            return i
    return len(seconds)


def _said(wishes: Wishes, n_prompts: int, n_there: int, n_repetitions: int, n_predict: Sequence[int],
          expected_s: float, spare_s: float) -> str:  # fmt: skip
    """How it came about, in one sentence."""
    tokens = " and ".join(map(str, n_predict))
    what = f"{n_prompts} of {n_there} prompts, {n_repetitions} repetition{'s' if n_repetitions > 1 else ''}"
    length = f"{'exactly' if wishes.fixed_length else 'at most'} {tokens} tokens an answer"
    if wishes.budget_s is None:
        return f"no budget: {what}, {length}"
    if expected_s > spare_s:
        return f"{what}, {length}: the least there can be, and more than the budget of {wishes.budget_s:.0f} s"
    return f"{what}, {length}: what fits a budget of {wishes.budget_s:.0f} s"


def fit(wishes: Wishes, prompts: Sequence[tuple[BenchPrompt, int]], rates: Rates, left_s: float) -> BenchPlan:
    """The plan that fits into `left_s` seconds, the most prompts first, then repetitions.

    `prompts`: in the order in which they are to be taken, each with its number of tokens. Without a budget, all.
    """
    n_there = len(prompts)
    most = min(wishes.n_prompts or n_there, n_there)
    n_tokens = [n for _, n in prompts[:most]]
    wanted = wishes.n_repetitions or 1
    for n_predict, enough in [(wishes.n_predict, 0)] if wishes.n_predict else [((n,), enough) for n, enough in LENGTHS]:
        seconds = _seconds(wishes, rates, n_predict, n_tokens)
        n = most if wishes.budget_s is None else _n_that_fit([wanted * each for each in seconds], left_s)
        if n >= min(enough, most):
            break
    n = max(n, min(LEAST_PROMPTS, most))
    once_s = sum(seconds[:n])
    n_repetitions = wanted
    if wishes.n_repetitions is None and wishes.budget_s is not None and n == most:
        n_repetitions = min(max(int(left_s / once_s), 1), MOST_REPETITIONS)
    expected_s = n_repetitions * once_s
    chosen = [prompt for prompt, _ in prompts[:n]]
    return BenchPlan(
        loads=wishes.loads,
        drafts=wishes.drafts,
        arms=arms(wishes),
        conditions=conditions(wishes, n_predict),
        prompts=tuple(
            PlannedPrompt(id=prompt.id, category=prompt.category, language=prompt.language, picks=picks)
            for prompt, picks in zip(chosen, halves(chosen), strict=True)
        ),
        n_repetitions=n_repetitions,
        fixed_length=wishes.fixed_length,
        delay_s=wishes.delay_s,
        budget_s=wishes.budget_s,
        expected_s=expected_s,
        note=_said(wishes, n, n_there, n_repetitions, n_predict, expected_s, left_s),
    )


def for_warming_up(wishes: Wishes) -> tuple[tuple[Arm, ...], Condition]:
    """All arms, and the cheapest condition."""
    cheapest = conditions(wishes, wishes.n_predict or (LENGTHS[-1][0],))[0]
    return arms(wishes), replace(cheapest, n_depth=0, n_prompt=0)
