"""A second implementation of p, for the audit: it shares no code with the sampler that it checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specllama.core.arrays import FloatArray
from specllama.core.constraint import Allowed
from specllama.core.noise import SharedNoise
from specllama.core.sampling import GREEDY_BELOW, SamplingParams

FILTERED = -1e3  # score of a token that a filter, a bias or a mask removed: below any other


def adjusted(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> FloatArray:
    """Logits after bias and penalties, in float64.  (V,)"""
    row = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        if token < len(row):
            row[token] += bias
    n_last = len(history) if params.repeat_last_n < 0 else min(params.repeat_last_n, len(history))
    for token, n_seen in Counter(history[len(history) - n_last :]).items():
        if token < len(row):
            factor = params.repeat_penalty
            row[token] = row[token] * factor if row[token] <= 0.0 else row[token] / factor
            row[token] -= params.presence_penalty + n_seen * params.frequency_penalty
    return row


def masked(logits: FloatArray, allowed: Allowed) -> FloatArray:
    """The logits, -inf for tokens that are not allowed.  (V,)"""
    inside = np.zeros(len(logits), dtype=bool)
    inside[allowed.ids[allowed.ids < len(logits)]] = True
    return np.where(inside != allowed.all_but, logits, -np.inf)


def target_law(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """The law of the token after `history`: bias, penalties, top-k, top-p, min-p, temperature; ties to the lowest ids.

    Sorts all tokens that top-k leaves: slow without a top-k.
    """
    row = adjusted(logits, history, params)
    if params.temperature <= GREEDY_BELOW:
        return {int(row.argmax()): 1.0}
    n_left = params.top_k if 0 < params.top_k < len(row) else len(row)
    edge = np.partition(row, len(row) - n_left)[len(row) - n_left]
    ids = np.flatnonzero((row >= edge) & (row > -np.inf))
    ids = ids[np.argsort(-row[ids], kind="stable")][:n_left]
    weights = np.exp(row[ids] - row[ids[0]])
    if params.top_p < 1.0:
        short = np.cumsum(weights / weights.sum()) < params.top_p
        n_left = min(int(short.sum()) + 1, len(ids))
        ids, weights = ids[:n_left], weights[:n_left]
    likely = weights >= params.min_p * weights[0]
    ids = ids[likely]
    weights = np.exp((row[ids] - row[ids[0]]) / params.temperature)
    probs = weights / weights.sum()
    return {int(token): float(prob) for token, prob in zip(ids, probs, strict=True) if prob > 0.0}


def scores(
    logits: FloatArray, history: Sequence[int], params: SamplingParams, noise: SharedNoise | None = None
) -> FloatArray:
    """What decides about the token after `history`: the largest score is said.  (V,)

    Of a greedy answer the adjusted logits; with `noise` the logarithms of p with Gumbel noise added.
    """
    if noise is None:
        return np.maximum(adjusted(logits, history, params), FILTERED)
    law = target_law(logits, history, params)
    ids = np.array(list(law))
    found = np.full(len(logits), FILTERED)
    found[ids] = np.log(list(law.values())) - np.log(noise.arrivals(ids, len(history)))
    return found
