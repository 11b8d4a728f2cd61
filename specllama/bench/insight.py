"""Acceptance of a draft by its entropy and by the place in the sentence.

After the timed runs both models read the answers of plain decoding in a few passes. This gives both distributions at
every token, and so the acceptance there if all tokens before it were accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from specllama.bench.report import Bucket, Insight
from specllama.core.arrays import FloatArray
from specllama.core.sampling import SamplingParams, law
from specllama.core.types import LanguageModel, PieceOf, room_after
from specllama.tuning.traces import rows

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0)  # nats
N_FIRST = 3  # tokens that count as the beginning of a sentence
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")  # ASCII, and Chinese and Japanese


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """One answer of plain decoding."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token of an answer."""

    entropy: float  # of the draft's distribution
    place: int  # number of tokens before it in the sentence
    acceptance: float  # sum(min(p, q))


def entropy_of(row: FloatArray) -> float:
    """Entropy of a row of logits at temperature 1, in nats.  row: (V,)"""
    values = row.astype(np.float64)
    values -= values.max()
    weights = np.exp(values)
    total = float(weights.sum())
    finite = weights > 0.0
    return max(math.log(total) - float((weights[finite] * values[finite]).sum()) / total, 0.0)


def places(answer: Sequence[int], piece: PieceOf) -> list[int]:
    """The number of tokens before each token in its sentence."""
    found, place = [], 0
    for token in answer:
        found.append(place)
        text = piece(token).decode("utf-8", "ignore")
        place = 0 if "\n" in text or text.rstrip().endswith(_ENDS) else place + 1
    return found


def samples(
    target: LanguageModel, draft: LanguageModel, said: PlainAnswer, params: SamplingParams, piece: PieceOf
) -> list[Sample]:
    """A sample for every token of the answer; empty if the draft cannot read it. Clears both caches."""
    n_vocab = min(target.vocab_size, draft.vocab_size)
    if not said.answer or max((*said.prompt, *said.answer)) >= n_vocab:
        return []
    draft.truncate(0)
    if room_after(draft, (*said.prompt, *said.answer)) < 0:
        return []
    try:
        q_rows = rows(draft, said.prompt, said.answer[:-1], n_vocab)
        # At temperature 0 the target's law is the token of the answer: no pass needed.
        p_rows = [] if params.greedy else rows(target, said.prompt, said.answer[:-1], target.vocab_size)
    finally:
        target.truncate(0)
        draft.truncate(0)
    history = [*said.prompt, *said.answer]
    found = []
    for i, (row, place) in enumerate(zip(q_rows, places(said.answer, piece), strict=True)):
        before = history[: len(said.prompt) + i]
        q = law(row, before, params)
        acceptance = q.prob(said.answer[i]) if params.greedy else law(p_rows[i], before, params).overlap(q)
        found.append(Sample(entropy_of(row), place, acceptance))
    return found


def _bucket(label: str, chosen: Sequence[Sample]) -> Bucket:
    return Bucket(
        label=label, n_tokens=len(chosen), acceptance=fmean(each.acceptance for each in chosen) if chosen else None
    )


def insight(draft: int, temperature: float, found: Sequence[Sample]) -> Insight:
    """Sorts the samples of one draft at one temperature into buckets."""
    by_entropy = []
    for low, high in pairwise((0.0, *ENTROPY_EDGES, math.inf)):
        label = f"{low:g} and more" if high == math.inf else f"{low:g} to {high:g}"
        by_entropy.append(_bucket(label, [each for each in found if low <= each.entropy < high]))
    return Insight(
        draft=draft,
        temperature=temperature,
        by_entropy=tuple(by_entropy),
        by_place=(
            _bucket(f"the first {N_FIRST} tokens of a sentence", [each for each in found if each.place < N_FIRST]),
            _bucket("later tokens", [each for each in found if each.place >= N_FIRST]),
        ),
    )
