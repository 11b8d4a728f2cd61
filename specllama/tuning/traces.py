"""Traces: the chance of acceptance at every token of an answer, recorded once and replayed with any costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from specllama.base.child import TellShare
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser, SamplingParams, law
from specllama.core.types import LanguageModel
from specllama.drafters.controller import LEAST_RATE, CostProfile
from specllama.drafters.model import confidence_of

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer: the chance at every token that the draft's token is accepted, given that all before it are."""

    name: str  # the class of the prompt
    greedy: bool  # judged at temperature 0
    acceptance: tuple[float, ...]  # sum of min(p, q)
    confidence: tuple[float, ...]  # the largest mass of q, as the policy sees it


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """An answer of the target with its laws, enough to judge any draft, also in another process."""

    name: str  # the class of the prompt
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    n_vocab: int  # of the target
    params: SamplingParams
    laws: tuple[Distribution, ...]  # of every token, and of the end token if there is one
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
    """Up to `n_tokens` of plain decoding, always with the same seed. The target is empty afterwards."""
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


def rows(model: LanguageModel, prompt: Sequence[int], said: Sequence[int], n_vocab: int) -> list[FloatArray]:
    """The logits for each token of the answer and the one after it, computed in blocks.  each: (n_vocab,)"""
    model.truncate(0)
    model.feed(prompt[:-1])
    line = [prompt[-1], *said]
    found: list[FloatArray] = []
    for at in range(0, len(line), model.caps.max_block):
        found.extend(row[:n_vocab].copy() for row in model.eval(line[at : at + model.caps.max_block]))
    return found


def judged(draft: LanguageModel, by: TracedAnswer) -> tuple[Trace, Trace]:
    """Traces of an answer as it was sampled, and of the same answer judged at temperature 0.

    The draft reads the answer in a few passes, much cheaper than drafting. It is empty afterwards. It must know every
    token.
    """
    n_vocab = min(by.n_vocab, draft.vocab_size)
    try:
        read = rows(draft, by.prompt, by.tokens[: len(by.laws) - 1], n_vocab)
    finally:
        draft.truncate(0)
    history = [*by.prompt, *by.tokens]

    def trace(params: SamplingParams, laws: Sequence[Distribution], *, greedy: bool) -> Trace:
        acceptance, confidence = list[float](), list[float]()
        for i, row in enumerate(read):
            q = law(row, history[: len(by.prompt) + i], params)
            acceptance.append(laws[i].overlap(q))
            confidence.append(confidence_of(row, q, greedy=greedy))
        return Trace(by.name, greedy, tuple(acceptance), tuple(confidence))

    return trace(by.params, by.laws, greedy=False), trace(GREEDY, by.greedy_laws, greedy=True)


def acceptance(traces: Sequence[Trace]) -> float:
    """The mean acceptance over all tokens of all traces."""
    return fmean(chance for trace in traces for chance in trace.acceptance)


def confidence(traces: Sequence[Trace]) -> float:
    """The mean confidence over all tokens of all traces."""
    return fmean(chance for trace in traces for chance in trace.confidence)


def _replayed(chances: Sequence[float], k: int, costs: CostProfile) -> float:
    """The expected cost, in T(1), of an answer drafted with length `k`; `chances`: `Trace.acceptance`.

    Adds up all ways through the answer by their probability: a step at token t with j accepted tokens emits j + 1.
    Near the end it drafts no more than fits, as the engine does.
    """
    n = len(chances)
    begins = [1.0, *[0.0] * n]  # probability that a step begins at a token
    cost = 0.0
    reread = max(costs.draft_cost(2) - costs.draft_cost(), 0.0)
    for t in range(n):
        reach, n_drafted = begins[t], min(k, n - t - 1)
        cost += reach * (n_drafted * costs.draft_cost() + costs.verify_cost(n_drafted + 1))
        for j in range(n_drafted):
            begins[t + j + 1] += reach * (1.0 - chances[t + j])
            reach *= chances[t + j]
        begins[t + n_drafted + 1] += reach
        if n_drafted:  # after a fully accepted draft its last token must be read
            cost += reach * reread
    return cost


def rate(traces: Sequence[Trace], costs: CostProfile, n_max: int) -> float:
    """Tokens per T(1) with drafts of a fixed length."""
    n_tokens = sum(len(trace.acceptance) for trace in traces)
    return n_tokens / sum(_replayed(trace.acceptance, n_max, costs) for trace in traces)


def best_drafted(traces: Sequence[Trace], costs: CostProfile) -> tuple[int, float]:
    """(draft length, tokens per T(1)) of the best length from 1 on, even if plain decoding is faster."""
    lengths = range(1, max(costs.verify[-1][0], 2))
    return max(((k, rate(traces, costs, k)) for k in lengths), key=lambda found: (found[1], -found[0]))


def best_length(traces: Sequence[Trace], costs: CostProfile) -> tuple[int, float]:
    """(draft length, tokens per T(1)) of the best fixed length, the shorter of equals; (0, 1) if none pays."""
    found = best_drafted(traces, costs)
    return found if found[1] > LEAST_RATE else (0, 1.0)
