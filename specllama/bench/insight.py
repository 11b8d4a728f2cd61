"""When is a draft right? Its acceptance by its own entropy and by the place in the sentence, read off plain answers.

Both models read what plain decoding said, in a few passes, after everything was timed: at every token it is known what
the draft's law was there and how much of it the target shares, all tokens before it being accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from specllama.bench.report import Bucket, Insight
from specllama.core.arrays import FloatArray
from specllama.core.sampling import SamplingParams, law
from specllama.core.types import LanguageModel, room_after

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0)  # nats
N_FIRST = 3  # tokens that count as the beginning of a sentence
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")  # those of Chinese and Japanese, too

PieceOf = Callable[[int], bytes]  # what a token shows


@dataclass(frozen=True, slots=True)
class Said:
    """One plain answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token of an answer, and how the draft would have fared there."""

    entropy: float
    place: int  # tokens of the sentence before it
    acceptance: float


def entropy_of(row: FloatArray) -> float:
    """Entropy of a row of logits at temperature 1, in nats.  row: (V,)"""
    values = row.astype(np.float64)
    values -= values.max()
    weights = np.exp(values)
    total = float(weights.sum())
    finite = weights > 0.0
    return max(math.log(total) - float((weights[finite] * values[finite]).sum()) / total, 0.0)


def places(answer: Sequence[int], piece: PieceOf) -> list[int]:
    """Of every token, how many tokens of its sentence come before it."""
    found, place = [], 0
    for token in answer:
        found.append(place)
        text = piece(token).decode("utf-8", "ignore")
        place = 0 if "\n" in text or text.rstrip().endswith(_ENDS) else place + 1
    return found


def _rows(model: LanguageModel, said: Said, n_vocab: int) -> list[FloatArray]:
    """Logits before each token of the answer, read in blocks.  each: (n_vocab,)"""
    model.truncate(0)
    model.feed(said.prompt[:-1])
    line = [said.prompt[-1], *said.answer[:-1]]
    found: list[FloatArray] = []
    for at in range(0, len(line), model.caps.max_block):
        found.extend(row[:n_vocab].copy() for row in model.eval(line[at : at + model.caps.max_block]))
    return found


def samples(
    target: LanguageModel, draft: LanguageModel, said: Said, params: SamplingParams, piece: PieceOf
) -> list[Sample]:
    """One sample for every token of a plain answer; none where the draft cannot read it. Both models are empty then."""
    n_vocab = min(target.vocab_size, draft.vocab_size)
    if not said.answer or max((*said.prompt, *said.answer)) >= n_vocab:
        return []
    draft.truncate(0)
    if room_after(draft, (*said.prompt, *said.answer)) < 0:
        return []
    try:
        q_rows = _rows(draft, said, n_vocab)
        # At temperature 0 the target's law is the token that it said; no need to ask again.
        p_rows = [] if params.greedy else _rows(target, said, target.vocab_size)
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
    """The samples of one draft at one temperature, in buckets."""
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
