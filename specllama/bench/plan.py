"""The run matrix of a benchmark: fixed before the first counted run and fitted to the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product, zip_longest
from math import gcd
from statistics import median
from typing import TypeVar

from specllama.base.text import counted
from specllama.bench.report import Arm, BenchPlan, Condition, Load, PlannedPrompt
from specllama.drafters import REGISTRY, TREE
from specllama.drafters.length import DraftLength
from specllama.prompts.load import BenchPrompt

LEAST_PROMPTS = 2  # one picks the best arm, one confirms it
MOST_REPETITIONS = 3  # if every prompt fits, the rest of the budget repeats them
# (tokens of an answer, prompts): the first length with which so many prompts fit.
LENGTHS = ((128, 12), (64, 12), (32, 0))

T = TypeVar("T")


def in_turn(items: Sequence[T], at: int) -> list[T]:
    """All items, in another order for every `at`; each is first equally often.

    With three or more, none always follows the same item: an arm that always ran after the heaviest one might always
    meet the warmest machine.
    """
    n = len(items)
    strides = [stride for stride in range(1, max(n, 2)) if gcd(stride, n) == 1]
    stride = strides[at % len(strides)]
    return [items[(at + stride * i) % n] for i in range(n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options of the user. Every tuple is a sweep; sweeps are crossed with each other."""

    loads: tuple[Load, ...]
    drafts: tuple[str, ...]  # names; may be empty
    n_swept: int | None = None  # number of drafts, from the first, that fixed lengths are measured with; None = all
    strategies: tuple[str, ...]
    lengths: tuple[DraftLength, ...]  # 0 is plain decoding, which is always measured
    auto_strategy: str = ""  # strategy of `auto`; empty: no profile, so no `auto`
    auto_draft: int = 0  # index of the profile's draft
    rules: tuple[str, ...] = ("block",)
    seed_modes: tuple[str, ...] = ("draws",)
    temperatures: tuple[float, ...] = (0.0,)
    depths: tuple[int, ...] = (0,)
    n_prompt: tuple[int, ...] = (0,)
    n_predict: tuple[int, ...] = ()  # empty: the budget decides
    n_prompts: int | None = None  # upper limit
    n_repetitions: int | None = None
    fixed_length: bool = True
    delay_s: float = 0.0
    budget_s: float | None = None


def differences(load: Load, loads: Sequence[Load]) -> list[str]:
    """The values of `load` in the fields that differ between the loads."""
    words = {"t": "n_threads", "ctk": "type_k", "ctv": "type_v", "ctkd": "type_k_draft", "rollback": "rollback"}
    return [
        f"{word}={getattr(load, name)}"
        for word, name in words.items()
        if len({getattr(one, name) for one in loads}) > 1
    ]


def _settings(wishes: Wishes) -> Iterable[tuple[str, int | None, DraftLength, str, str]]:
    """(strategy, draft, length, rule, seed mode) of every speculative setting."""
    # With the noise of `same` all rules are one.
    ways = [(rule, mode) for mode in wishes.seed_modes for rule in (wishes.rules if mode == "draws" else ("match",))]
    for (rule, mode), length in product(ways, (each for each in wishes.lengths if each.longest)):
        strategies: Sequence[str] = wishes.strategies
        if length.is_auto:
            own = wishes.auto_strategy
            strategies = (own, *(TREE,) * (TREE in wishes.strategies)) if own else ()
        for strategy in strategies:
            # The controller's profile was measured with one draft.
            swept = range(len(wishes.drafts[: wishes.n_swept]))
            known: Sequence[int] = (wishes.auto_draft,) if length.is_auto else swept
            for draft in known if REGISTRY[strategy].needs_model else (None,):
                yield strategy, draft, length, rule, mode


def arms(wishes: Wishes) -> tuple[Arm, ...]:
    """Every setting under every load, plain decoding first in each; the names contain what differs."""
    found: list[Arm] = []
    settings = [each for each in dict.fromkeys(_settings(wishes)) if each[0] != "none"]
    strategies = {strategy for strategy, _, length, *_ in settings if not length.is_auto}
    for index, load in enumerate(wishes.loads):
        where = differences(load, wishes.loads)
        found.append(Arm(name=" ".join(["plain", *where]), load=index))
        for strategy, draft, length, rule, mode in settings:
            words = [f"tree {length}" if strategy == TREE else "auto" if length.is_auto else f"K={length}"]
            if not length.is_auto and strategy != TREE and (len(strategies) > 1 or strategy != "draft-simple"):
                words.append(strategy)
            if draft is not None and not length.is_auto and len(wishes.drafts[: wishes.n_swept]) > 1:
                words.append(wishes.drafts[draft])
            words += [rule] if len(wishes.rules) > 1 and mode == "draws" else []
            words += [f"seed-mode={mode}"] if len(wishes.seed_modes) > 1 and mode != "draws" else []
            found.append(
                Arm(
                    name=" ".join([*words, *where]),
                    load=index,
                    draft=draft,
                    spec_type=strategy,
                    n_max=None if length.is_auto else length.longest,
                    verify_rule=rule,
                    seed_mode=mode,
                )
            )
    return tuple(found)


def conditions(wishes: Wishes, n_predict: Sequence[int]) -> tuple[Condition, ...]:
    """Every combination of depth, prompt length, answer length and temperature."""
    crossed = product(wishes.depths, wishes.n_prompt, n_predict, wishes.temperatures)
    return tuple(
        Condition(temperature=temperature, n_depth=depth, n_prompt=n_prompt, n_predict=n)
        for depth, n_prompt, n, temperature in dict.fromkeys(crossed)
    )


def spread(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The prompts, class by class in turn, so that the first few cover many classes and languages."""
    classes: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        classes.setdefault(prompt.category, []).append(prompt)
    # Each class starts at another place, because the first prompts of all classes are in the same language.
    turned = [of_one[i % len(of_one) :] + of_one[: i % len(of_one)] for i, of_one in enumerate(classes.values())]
    return [prompt for turn in zip_longest(*turned) for prompt in turn if prompt is not None]


def halves(prompts: Sequence[BenchPrompt]) -> list[bool]:
    """True for each prompt of the half that picks; both halves get the classes and languages as evenly as possible."""
    seen: dict[str, int] = {}
    picks = []
    for prompt in prompts:
        turn = seen[prompt.category] = seen.get(prompt.category, len(seen) - 1) + 1
        picks.append(turn % 2 == 0)
    if len(picks) > 1 and len(set(picks)) == 1:
        picks[-1] = not picks[-1]
    return picks


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpeed:
    """Speed of an arm during its warm-up."""

    prefill_tok_s: float
    decode_tok_s: float  # after both models have read the prompt
    draft_read_s: float = 0.0  # time of the draft for one token of the prompt


def run_seconds(wishes: Wishes, speeds: Sequence[ArmSpeed], condition: Condition, n_tokens: int) -> float:
    """Expected time of one prompt of `n_tokens` under a condition, all arms together."""
    n_read = max(n_tokens, condition.n_prompt)
    prefill_s = 1.0 / median(each.prefill_tok_s for each in speeds)  # the target's, so the same for every arm
    return sum(
        condition.n_predict / each.decode_tok_s + n_read * (prefill_s + each.draft_read_s) + wishes.delay_s
        for each in speeds
    )


def _note(wishes: Wishes, counts: str, n_predict: Sequence[int], fits: bool) -> str:
    lengths = " and ".join(counted(n, "token") for n in n_predict)
    what = f"{counts}, {'exactly' if wishes.fixed_length else 'at most'} {lengths} an answer"
    if wishes.budget_s is None:
        return f"no budget: {what}"
    if fits:
        return f"{what}: fits the budget of {wishes.budget_s:.0f} s"
    return f"{what}: the minimum, which exceeds the budget of {wishes.budget_s:.0f} s"


def fit(
    wishes: Wishes, prompts: Sequence[tuple[BenchPrompt, int]], speeds: Sequence[ArmSpeed], left_s: float
) -> BenchPlan:
    """The plan that fits into `left_s` seconds: first as many prompts as possible, then repetitions.

    `prompts`: in the order of the plan, each with its number of tokens. Without a budget the plan has all of them.
    """
    n_there = len(prompts)
    most = min(wishes.n_prompts or n_there, n_there)
    n_tokens = [n for _, n in prompts[:most]]
    wanted = wishes.n_repetitions or 1
    for n_predict, enough in [(wishes.n_predict, 0)] if wishes.n_predict else [((n,), enough) for n, enough in LENGTHS]:
        crossed = conditions(wishes, n_predict)
        seconds = [sum(run_seconds(wishes, speeds, each, n) for each in crossed) for n in n_tokens]
        n = most if wishes.budget_s is None else sum(wanted * spent_s <= left_s for spent_s in accumulate(seconds))
        if n >= min(enough, most):
            break
    n = max(n, min(LEAST_PROMPTS, most))
    once_s = sum(seconds[:n])
    n_repetitions = wanted
    if wishes.n_repetitions is None and wishes.budget_s is not None and n == most:
        n_repetitions = min(max(int(left_s / once_s), 1), MOST_REPETITIONS)
    expected_s = n_repetitions * once_s
    chosen = [prompt for prompt, _ in prompts[:n]]
    counts = f"{n} of {n_there} prompts, {counted(n_repetitions, 'repetition')}"
    return BenchPlan(
        loads=wishes.loads,
        drafts=wishes.drafts,
        arms=arms(wishes),
        conditions=crossed,
        prompts=tuple(
            PlannedPrompt(id=prompt.id, category=prompt.category, language=prompt.language, picks=picks)
            for prompt, picks in zip(chosen, halves(chosen), strict=True)
        ),
        n_repetitions=n_repetitions,
        fixed_length=wishes.fixed_length,
        delay_s=wishes.delay_s,
        budget_s=wishes.budget_s,
        expected_s=expected_s,
        note=_note(wishes, counts, n_predict, expected_s <= left_s),
    )
