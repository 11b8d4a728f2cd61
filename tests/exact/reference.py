"""What the law of the answer must be, from the definitions of docs/design.md in plain Python.

Slow and obvious on purpose. It uses neither numpy nor specllama, so it shares no code with what it tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Protocol, TypeAlias

History: TypeAlias = tuple[int, ...]
TokenLaw: TypeAlias = dict[int, float]  # tokens of positive probability only
Answer: TypeAlias = tuple[History, str]  # (emitted tokens, finish reason)


class Settings(Protocol):
    """The sampler settings by their public names."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: dict[int, float]


def token_law(logits: Iterable[float], history: Sequence[int], params: Settings) -> TokenLaw:
    """The law of the next token: bias, penalties, top-k, top-p, min-p, temperature, in this order."""
    row = dict(enumerate(float(logit) for logit in logits))
    for token, bias in params.logit_bias.items():
        if token in row:
            row[token] += bias
    row = _penalised(row, history, params)
    ranked = sorted((token for token in row if row[token] > -math.inf), key=lambda token: (-row[token], token))
    if params.temperature <= 1e-6:
        return {ranked[0]: 1.0}
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        ranked = _top_p(ranked, _softmax(row, ranked, 1.0), params.top_p)
    if params.min_p > 0.0:
        probs = _softmax(row, ranked, 1.0)
        ranked = [token for token in ranked if probs[token] >= params.min_p * probs[ranked[0]]]
    law = _softmax(row, ranked, params.temperature)
    return {token: prob for token, prob in law.items() if prob > 0.0}


def _penalised(row: TokenLaw, history: Sequence[int], params: Settings) -> TokenLaw:
    """Every token of the last N is lowered: by a factor, once for presence, and for frequency each time."""
    if params.repeat_last_n == 0:
        return row
    window = list(history) if params.repeat_last_n < 0 else list(history)[-params.repeat_last_n :]
    changed = dict(row)
    for token in set(window) & set(row):
        logit = row[token]
        logit = logit / params.repeat_penalty if logit > 0 else logit * params.repeat_penalty
        changed[token] = logit - params.presence_penalty - params.frequency_penalty * window.count(token)
    return changed


def _softmax(row: TokenLaw, tokens: Sequence[int], temperature: float) -> TokenLaw:
    peak = max(row[token] for token in tokens)
    weights = {token: math.exp((row[token] - peak) / temperature) for token in tokens}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _top_p(ranked: Sequence[int], probs: TokenLaw, top_p: float) -> list[int]:
    """The fewest tokens, most likely first, whose mass reaches `top_p` up to a part in 10^10."""
    kept: list[int] = []
    mass = Fraction(0)  # exact: a rounded sum could reach the share one token too early
    for token in ranked:
        kept.append(token)
        mass += Fraction(probs[token])
        if mass >= Fraction(top_p) * (1 - Fraction(1, 10**10)):
            break
    return kept


def answer_law(
    law_at: Callable[[History], TokenLaw],
    prompt: Sequence[int],
    n_max: int,
    *,
    end_tokens: Iterable[int] = (),
    stops: Iterable[History] = (),
) -> dict[Answer, float]:
    """The law of plain decoding's whole answer after `prompt`: one token at a time, each from `law_at`.

    An end token ends the answer and is not part of it. One of `stops` ends it and is part of it. After `n_max` tokens
    the answer is cut; a stop is checked before the cut.
    """
    ends, stop_list = frozenset(end_tokens), [tuple(stop) for stop in stops]
    law: dict[Answer, float] = {}

    def extend(emitted: History, weight: float) -> None:
        if any(emitted[-len(stop) :] == stop for stop in stop_list):
            law[emitted, "stop"] = law.get((emitted, "stop"), 0.0) + weight
        elif len(emitted) == n_max:
            law[emitted, "length"] = law.get((emitted, "length"), 0.0) + weight
        else:
            for token, prob in law_at((*prompt, *emitted)).items():
                if token in ends:
                    law[emitted, "stop"] = law.get((emitted, "stop"), 0.0) + weight * prob
                else:
                    extend((*emitted, token), weight * prob)

    extend((), 1.0)
    return law


def first_tokens(law_at: Callable[[History], TokenLaw], prompt: Sequence[int], n: int) -> dict[History, float]:
    """The law of the first `n` tokens of plain decoding, without end tokens."""
    return {tokens: weight for (tokens, _), weight in answer_law(law_at, prompt, n).items()}
