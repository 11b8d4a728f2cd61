"""Traces: what a draft would have been worth at every token of an answer; recorded once, replayed through any costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, SamplingParams, law
from specllama.core.types import LanguageModel
from specllama.drafters.controller import LEAST_RATE, CostProfile
from specllama.drafters.model import confidence_of

TellShare = Callable[[float], None]  # told the share that is done

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer: at every token the chance that the draft's token would have been accepted, all before it being so."""

    name: str  # the class of the prompt
    greedy: bool  # judged at temperature 0
    acceptance: tuple[float, ...]  # sum of min(p, q)
    confidence: tuple[float, ...]  # the largest mass of q, as `ModelDrafter` tells it to its policy


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """What the target said, and the laws it said it with: any draft can be judged by it, also in another process."""

    name: str  # the class of the prompt
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    n_vocab: int  # of the target
    params: SamplingParams
    laws: tuple[Distribution, ...]  # before every token, and before the end token where one came
    greedy_laws: tuple[Distribution, ...]  # the same rows at temperature 0


def answer(
    target: LanguageModel,
    name: str,
    prompt: Sequence[int],
    *,
    n_tokens: int,
    params: SamplingParams | None = None,
    progress: TellShare = lambda share: None,
) -> TracedAnswer:
    """Up to `n_tokens` of the target's own, always from the same seed. The target is empty afterwards."""
    params = params or SamplingParams()
    choose = RandomChooser(0)
    tokens, laws, greedy_laws = list(prompt), list[Distribution](), list[Distribution]()
    try:
        target.truncate(0)
        target.feed(prompt[:-1])
        for i in range(n_tokens):
            progress(i / n_tokens)
            row = target.eval(tokens[-1:])[0]
            laws.append(law(row, tokens, params))
            greedy_laws.append(law(row, tokens, GREEDY))
            token = choose.pick(laws[-1])
            if token in target.end_tokens:
                break
            tokens.append(token)
    finally:
        target.truncate(0)
    said = tuple(tokens[len(prompt) :])
    return TracedAnswer(name, tuple(prompt), said, target.vocab_size, params, tuple(laws), tuple(greedy_laws))


def head(whole: TracedAnswer, n_tokens: int) -> TracedAnswer:
    """The beginning of an answer, at most `n_tokens` long."""
    laws, greedy_laws = whole.laws[:n_tokens], whole.greedy_laws[:n_tokens]
    return replace(whole, tokens=whole.tokens[:n_tokens], laws=laws, greedy_laws=greedy_laws)


def _rows(draft: LanguageModel, prompt: Sequence[int], said: Sequence[int], n_vocab: int) -> list[FloatArray]:
    """The draft's logits before each token of what was said, and after the last one, in blocks.  each: (n_vocab,)"""
    draft.truncate(0)
    draft.feed(prompt[:-1])
    line = [prompt[-1], *said]
    found: list[FloatArray] = []
    for at in range(0, len(line), draft.caps.max_block):
        rows = draft.eval(line[at : at + draft.caps.max_block])
        found.extend(row[:n_vocab].copy() for row in rows)
    return found


def judged(draft: LanguageModel, by: TracedAnswer) -> tuple[Trace, Trace]:
    """Traces of an answer as it was sampled, and of the same answer judged at temperature 0.

    The draft reads what the target said, in a few passes, which is much cheaper than drafting. It is empty afterwards.
    Every token must be known to it.
    """
    n_vocab = min(by.n_vocab, draft.vocab_size)
    try:
        rows = _rows(draft, by.prompt, by.tokens[: len(by.laws) - 1], n_vocab)
    finally:
        draft.truncate(0)
    history = [*by.prompt, *by.tokens]
    sampled, greedy = [], []
    for i, row in enumerate(rows):
        before = history[: len(by.prompt) + i]
        q = law(row, before, by.params)
        sampled.append((by.laws[i].overlap(q), confidence_of(row, q, greedy=False)))
        q = law(row, before, GREEDY)
        greedy.append((by.greedy_laws[i].overlap(q), confidence_of(row, q, greedy=True)))
    return _trace(by.name, sampled, greedy=False), _trace(by.name, greedy, greedy=True)


def record(
    target: LanguageModel,
    draft: LanguageModel,
    name: str,
    prompt: Sequence[int],
    *,
    n_tokens: int,
    params: SamplingParams | None = None,
) -> tuple[Trace, Trace]:
    """`answer` and `judged` at once."""
    return judged(draft, answer(target, name, prompt, n_tokens=n_tokens, params=params))


def _trace(name: str, pairs: Sequence[tuple[float, float]], *, greedy: bool) -> Trace:
    return Trace(name, greedy, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def acceptance(traces: Sequence[Trace]) -> float:
    """The mean over all tokens of all traces."""
    return fmean(chance for trace in traces for chance in trace.acceptance)


def confidence(traces: Sequence[Trace]) -> float:
    """The same for the confidence."""
    return fmean(chance for trace in traces for chance in trace.confidence)


def _replayed(chances: Sequence[float], k: int, costs: CostProfile) -> float:
    """The expected cost, in T(1), of an answer drafted with a fixed length; `chances` as in a `Trace`.

    Every way through the answer is followed with its weight: a step that begins at token t and has j accepted emits
    j + 1 tokens. Near the end it drafts no more than fits, as the engine does.
    """
    n = len(chances)
    begins = [1.0, *[0.0] * n]  # chance that a step begins at a token
    cost = 0.0
    reread = max(costs.draft_cost(2) - costs.draft_cost(), 0.0)
    for t in range(n):
        reach, n_drafted = begins[t], min(k, n - t - 1)
        cost += reach * (n_drafted * costs.draft_cost() + costs.verify_cost(n_drafted + 1))
        for j in range(n_drafted):
            begins[t + j + 1] += reach * (1.0 - chances[t + j])
            reach *= chances[t + j]
        begins[t + n_drafted + 1] += reach
        if n_drafted:  # accepted whole, it leaves its last token to be read
            cost += reach * reread
    return cost


def rate(traces: Sequence[Trace], costs: CostProfile, n_max: int) -> float:
    """Tokens per T(1) with drafts of a fixed length."""
    n_tokens = sum(len(trace.acceptance) for trace in traces)
    return n_tokens / sum(_replayed(trace.acceptance, n_max, costs) for trace in traces)


def best_drafted(traces: Sequence[Trace], costs: CostProfile) -> tuple[int, float]:
    """(draft length, tokens per T(1)) of the best length from 1 on, be it slower than plain decoding."""
    lengths = range(1, max(costs.verify[-1][0], 2))
    return max(((k, rate(traces, costs, k)) for k in lengths), key=lambda found: (found[1], -found[0]))


def best_length(traces: Sequence[Trace], costs: CostProfile) -> tuple[int, float]:
    """(fixed draft length, tokens per T(1)) of the best one; 0 where none pays, the smaller of equals."""
    best, best_rate = 0, 1.0
    for k in range(1, costs.verify[-1][0]):
        found = rate(traces, costs, k)
        if found > max(best_rate, LEAST_RATE):
            best, best_rate = k, found
    return best, best_rate
