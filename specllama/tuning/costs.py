"""Measure the cost of passes and the acceptance of a draft on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import TypeVar

from specllama.base.child import TellShare
from specllama.base.clock import perf_counter
from specllama.core.engine import Engine
from specllama.core.events import Finished
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, LanguageModel
from specllama.drafters.controller import MOST_ATTENTION, CostProfile
from specllama.drafters.model import ModelDrafter
from specllama.drafters.translated import TranslatedModel
from specllama.llama import LlamaModel

T = TypeVar("T")

Pass = Callable[[], object]

VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # T is not monotone and has jumps; short blocks matter most
FEWER_ROWS = ((1, 2, 4, 8, 16), (1, 4, 8))  # for less time
READ_ROWS = (1, 2, 8, 32, 128)  # of the draft: one token, two after a fully accepted block, more to catch up
MOST_ROUNDS, LEAST_ROUNDS = 15, 3


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians of measured passes."""

    profile: CostProfile
    step_s: float  # T(1)
    noise: float  # `spread`, the median over the passes


def finished(work: Generator[float, None, T], progress: TellShare = lambda share: None) -> T:
    """The result of a generator that yields the share that is done."""
    while True:
        try:
            progress(next(work))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # typing does not know the value of a StopIteration


def interleaving(
    passes: Sequence[Pass], *, seconds: float, clock: Callable[[], float] = perf_counter
) -> Generator[float, None, list[list[float]]]:
    """Seconds of every pass, in rounds that run each pass once, so a drift of the machine affects all alike.

    The first round warms up and does not count. Ends after `seconds`, but not before three rounds nor after fifteen.
    Yields the share that is done after every pass: a pass of many rows may take a second.
    """
    samples: list[list[float]] = [[] for _ in passes]
    started, share = clock(), 0.0
    for round_ in range(MOST_ROUNDS + 1):
        for index, run in enumerate(passes):
            before = clock()
            run()
            if round_:
                samples[index].append(clock() - before)
            n_done = round_ + (index + 1) / len(passes)
            spent = (clock() - started) / seconds if seconds > 0.0 else 1.0
            share = max(share, min(spent, n_done / (LEAST_ROUNDS + 1), 1.0), n_done / (MOST_ROUNDS + 1))
            yield share
        if round_ >= LEAST_ROUNDS and clock() - started >= seconds:
            break
    if share < 1.0:
        yield 1.0
    return samples


def measuring_costs(
    target: LanguageModel,
    draft: LanguageModel | None,
    tokens: Sequence[int],
    *,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
) -> Generator[float, None, Costs]:
    """T(n) of the target and the draft's cost of n rows, after the first half of `tokens`. Yields as `interleaving`.

    Both models are empty afterwards. `tokens` must be known to both. Without a draft its costs are placeholders.
    """
    n_before = len(tokens) // 2
    rest = tokens[n_before:]
    most = {False: min(len(rest), target.caps.max_block), True: len(rest) if draft is not None else 0}
    every = [*((n, False) for n in VERIFY_ROWS), *((n, True) for n in READ_ROWS)]
    wanted = [(n, drafts) for n, drafts in every if n <= most[drafts]]
    make = {False: partial(verifying, target), True: partial(reading, draft or target)}
    models = [target] if draft is None else [target, draft]
    try:
        for model in models:
            model.truncate(0)
            model.feed(tokens[:n_before])
        passes = [make[drafts](n_before, rest[:n]) for n, drafts in wanted]
        samples = yield from interleaving(passes, seconds=seconds, clock=clock)
    finally:
        for model in models:
            model.truncate(0)
    medians = [median(each) for each in samples]
    step_s = medians[0]
    points = {drafts: tuple((n, cost / step_s) for (n, of), cost in zip(wanted, medians, strict=True) if of == drafts)
              for drafts in most}  # fmt: skip
    profile = CostProfile(verify=points[False], draft=points[True] or ((1, 1.0),))
    return Costs(profile, step_s, median(map(spread, samples)))


@dataclass(frozen=True, slots=True)
class Curve:
    """T(n)/T(1) of some n, after `depth` tokens."""

    depth: int
    ratios: Mapping[int, float]


def attention(shallow: Curve, deep: Curve) -> float:
    """What a token of context adds to each row, in T(1) without context (`CostProfile.attention`).

    With T(n) + n a d at depth d, the ratio of a wide pass rises with d. Ratios of the same rounds are compared, so a
    drift of the machine between the two depths does not matter.
    """
    found = []
    for n, low in shallow.ratios.items():
        high = deep.ratios[n]
        # low (1 + a d0) - n a d0 = high (1 + a d1) - n a d1, solved for a
        more = n * (deep.depth - shallow.depth) - high * deep.depth + low * shallow.depth
        found.append((high - low) / more if more > 0.0 else 0.0)
    return min(max(median(found), 0.0), MOST_ATTENTION)


def spread(samples: Sequence[float]) -> float:
    """Width of the middle half as a share of the median."""
    low, middle, high = quantiles(samples, n=4)
    return (high - low) / middle if middle else 0.0


def affordable(rows: tuple[int, ...], step_s: float, seconds: float) -> tuple[int, ...]:
    """`rows`, or the most of FEWER_ROWS that are measured in `seconds`, if a row more takes a quarter of T(1)."""
    choices = [rows, *(tuple(n for n in fewer if n <= rows[-1]) for fewer in FEWER_ROWS)]
    needed = [(LEAST_ROUNDS + 1) * step_s * sum(1 + (n - 1) / 4 for n in each) for each in choices]
    return next((each for each, cost in zip(choices, needed, strict=True) if cost <= seconds), choices[-1])


def verifying(model: LanguageModel, n_before: int, block: Sequence[int]) -> Pass:
    """A pass with logits for every row, as in a verification; of several rows also with what a rejection costs it."""
    n_again = min(model.caps.n_again, model.n_ctx - n_before - len(block)) if len(block) > 1 else 0
    again = [block[0]] * n_again

    def run() -> None:
        if again:
            model.feed(again)
        model.eval(block)
        model.truncate(n_before)

    return run


def reading(model: LanguageModel, n_before: int, block: Sequence[int]) -> Pass:
    """A pass with logits for the last row only, as in drafting."""

    def run() -> None:
        model.feed(block[:-1])
        model.eval(block[-1:])
        model.truncate(n_before)

    return run


def n_cells(draft: LlamaModel | TranslatedModel, tokens: Sequence[int]) -> int:
    """The number of draft tokens that spell `tokens`."""
    return draft.n_cells(tokens) if isinstance(draft, TranslatedModel) else len(tokens)


def known(draft: LlamaModel | TranslatedModel, text: Sequence[int]) -> Sequence[int]:
    """As many tokens as `text` has, each a single token of the draft, as drafted tokens are."""
    known = [token for token in text if n_cells(draft, (token,)) == 1] or list(text)
    return (known * -(-len(text) // len(known)))[: len(text)]


def measuring_acceptance(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
    *,
    n_max: int,
    n_tokens: int,
    seconds: float = math.inf,
    cancel: Cancel | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Generator[float, None, dict[str, SpecStats]]:
    """Statistics of drafting while `n_tokens` are generated from each prompt, always with the same seed.

    Ends after about `seconds`, shared equally by the prompts, or when `cancel` is set, with what was counted
    so far. Yields the share that is done.
    """
    drafter = ModelDrafter(draft, n_max=n_max, vocab_size=target.vocab_size)
    engine, found, began, whole = Engine(target, drafter), dict[str, SpecStats](), clock(), cancel or Cancel()
    for index, (name, prompt) in enumerate(prompts.items()):
        stop, until = Cancel(), began + seconds * (index + 1) / len(prompts)
        for event in engine.generate(prompt, params, RandomChooser(0), max_tokens=n_tokens, cancel=stop):
            yield (index + (isinstance(event, Finished))) / len(prompts)
            if isinstance(event, Finished):
                found[name] = event.stats
            elif whole.is_set() or clock() >= until:
                stop.set()
        if whole.is_set():
            break
    return found
