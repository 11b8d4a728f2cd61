"""Sampling: (logits, tokens so far) -> Distribution, and the random chooser that draws from it.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature. Everything is computed from the
logits and the tokens that lead to them, so a rejected draft leaves nothing behind that would have to be rolled back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specllama.base.errors import AllForbidden, NumericsError, UsageError
from specllama.core.distribution import Distribution, Float64Array
from specllama.core.types import Draft, FloatArray, IntArray

GREEDY_BELOW = 1e-6  # the one cut-off that decides 'greedy'


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampler's settings; a filter at its neutral value (0, or 1.0 for top_p and repeat_penalty) is off.

    Raises UsageError where a value cannot be meant.
    """

    temperature: float = 0.8  # <= GREEDY_BELOW is greedy
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64  # how far penalties look back; -1 = everything
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, math.inf),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repeat_last_n", self.repeat_last_n, -1, math.inf),
            ("presence_penalty", self.presence_penalty, -math.inf, math.inf),
            ("frequency_penalty", self.frequency_penalty, -math.inf, math.inf),
        ):
            if not low <= value <= high or math.isinf(value):
                raise UsageError(f"{name} is {value}, expected a number from {low} to {high}")
        if not 0.0 < self.repeat_penalty < math.inf:
            raise UsageError(f"repeat_penalty is {self.repeat_penalty}, expected a number above 0", hint="1.0 is off")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit bias {token}={bias} is not a token id with a finite number or -inf")

    @property
    def greedy(self) -> bool:
        """True where the law is a point on the most likely token."""
        return self.temperature <= GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True where the tokens so far change the law."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    def window(self, tokens: Sequence[int]) -> Sequence[int]:
        """The part of `tokens` that penalties look at."""
        if not self.penalised:
            return ()
        return tokens if self.repeat_last_n < 0 else tokens[-self.repeat_last_n :]


def _adjusted(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> FloatArray:
    """`logits` after bias and penalties: the same array where neither applies, else a float64 copy.  (V,)"""
    window = params.window(history)
    if not window and not params.logit_bias:
        return logits
    counts = Counter(window)
    row = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        if token < row.size:
            row[token] += bias
    ids = np.array([token for token in counts if token < row.size], dtype=np.int64)
    if ids.size:
        n_seen = np.array([counts[int(token)] for token in ids], dtype=np.float64)
        seen = row[ids]
        with np.errstate(over="ignore"):  # what leaves the range of numbers is told by `law`, once, in words
            seen = np.where(seen <= 0.0, seen * params.repeat_penalty, seen / params.repeat_penalty)
            row[ids] = seen - n_seen * params.frequency_penalty - params.presence_penalty
    return row


def _checked_peak(peak: float, logits: FloatArray) -> float:
    """`peak`, the largest logit of a row; raises NumericsError where no law can come of it.

    numpy's max and argmax prefer NaN, so the largest entry tells of every NaN and of +inf; -inf means all masked.
    logits: (V,), the row before bias and penalties, which tells who is to blame.
    """
    if math.isfinite(peak):
        return peak
    found = "every token is masked" if peak == -math.inf else f"the largest logit is {peak}"
    if math.isfinite(float(logits.max())):
        if peak == -math.inf:
            raise AllForbidden("the logit bias forbids every token", hint="forbid fewer of them (--logit-bias)")
        raise NumericsError(
            f"bias and penalties leave the range of numbers: {found}", hint="use smaller biases and penalties"
        )
    raise NumericsError(
        f"the model's logits cannot be turned into probabilities: {found}",
        hint="check the model file's checksum, and the build with `specllama doctor`",
    )


def _largest(row: FloatArray, k: int) -> IntArray:
    """Ids of the `k` largest entries, ascending; ties at the edge go to the lowest ids.  (k,)

    The maxima of many columns bound the k-th largest entry from below, so only a few columns are looked at closely:
    for 152k tokens several times cheaper than partitioning the row.
    """
    ids: IntArray
    n_columns = row.size // 64
    if n_columns >= 4 * k:
        grid = row[: 64 * n_columns].reshape(64, n_columns)
        peaks = grid.max(axis=0)
        bound = np.partition(peaks, n_columns - k)[n_columns - k]
        columns = (peaks >= bound).nonzero()[0]
        ids = (columns + n_columns * np.arange(64)[:, None]).ravel()  # row by row, so ids ascend
        ids = np.concatenate((ids, np.arange(64 * n_columns, row.size)))
        values = row[ids]
        near = values >= bound
        ids, values = ids[near], values[near]
    else:
        ids, values = np.arange(row.size), row
    if ids.size <= k:
        return ids
    edge = np.partition(values, ids.size - k)[ids.size - k]
    above = (values > edge).nonzero()[0]
    ties = (values == edge).nonzero()[0][: k - above.size]
    ids = np.sort(ids[np.concatenate((above, ties))])
    return ids


def _not_far_below(row: FloatArray, peak: float, share: float) -> IntArray:
    """Ids, ascending, of at least all entries whose weight exp(entry - peak) reaches `share`; few others.  (n,)

    Compared in the row's own precision, so that only these few need float64. The bound is lowered by far more than the
    roundings of float64 in it (below 1e-15 of |peak| + 745, the largest logarithm), and then by one step of the row's
    precision, which is more than its own rounding can raise it.
    """
    bound = peak + math.log(share) - 1e-6 * (1.0 + abs(peak))
    with np.errstate(over="ignore"):  # lower than any number is low enough
        rounded = np.nextafter(row.dtype.type(bound), row.dtype.type(-np.inf))
    ids: IntArray = (row >= rounded).nonzero()[0]
    return ids


def _nucleus(ids: IntArray, weights: Float64Array, share: float) -> IntArray:
    """Indices of the fewest entries, largest first, whose sum reaches `share`; ties go to the lowest ids."""
    n = 256
    while True:  # sorting a few hundred is enough for most rows
        head = _largest(weights, min(n, weights.size))
        order = head[np.lexsort((ids[head], -weights[head]))]
        reached = np.cumsum(weights[order]) >= share
        if reached[-1]:
            return order[: int(reached.argmax()) + 1]
        if n >= weights.size:
            return order
        n *= 8


def law(logits: FloatArray, history: Sequence[int], params: SamplingParams) -> Distribution:
    """The law of the next token after all sampler settings.

    logits: (V,), any float type, -inf for masked tokens. `history` is prompt + answer + draft path, or at least as much
    of its end as `params.window` looks at. Raises NumericsError for NaN, +inf and rows with every token masked.
    """
    row = _adjusted(logits, history, params)
    if params.greedy:
        token = int(row.argmax())  # the first of equals: ties go to the lowest id
        _checked_peak(float(row[token]), logits)
        return Distribution.point(token)
    peak = _checked_peak(
        float(row.max()), logits
    )  # of the whole row: top-k sorts by comparing, and NaN compares with nothing
    whole = not 0 < params.top_k < row.size
    if not whole:
        ids = _largest(row, params.top_k)
        values = row[ids].astype(np.float64)
    elif params.min_p > 0.0 and params.top_p >= 1.0:  # top-p would have to know the mass of all
        ids = _not_far_below(row, peak, params.min_p)
        values = row[ids].astype(np.float64)
    else:
        ids, values = np.arange(row.size), row.astype(np.float64, copy=row is logits)
    values -= peak
    if params.top_p < 1.0 or params.min_p > 0.0:
        # Both filters keep a prefix of the tokens by rank, so min-p may go first and spare top-p the sorting,
        # as long as top-p's share is taken of the mass before min-p.
        weights = np.exp(values)
        total = float(weights.sum())
        kept = (weights >= params.min_p).nonzero()[0]
        if params.top_p < 1.0:
            kept = kept[_nucleus(ids[kept], weights[kept], params.top_p * total)]
        kept.sort()
        ids, values, whole = ids[kept], values[kept], False
    probs = np.exp(values / params.temperature)
    probs /= probs.sum()
    # Made here, finite, ids ascending: nothing to check or to copy.
    for made in (ids, probs):
        made.setflags(write=False)
    return Distribution(None if whole else ids, probs)


class RowLaws(Sequence[Distribution]):
    """The laws of one verify pass, made row by row and only for the rows that are asked for.

    Row 0 follows the pending token, row i+1 follows draft node i. rows: (n+1, V), valid as long as the model's view is.
    """

    def __init__(self, rows: FloatArray, tokens: Sequence[int], draft: Draft, params: SamplingParams) -> None:
        self._rows = rows
        self._recent = list(params.window(tokens))
        self._draft = draft
        self._params = params
        self._laws: dict[int, Distribution] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def _path(self, node: int) -> list[int]:
        """Draft tokens from the root to `node`; -1 is the pending token, whose path is empty."""
        if self._draft.parents is None:
            return list(self._draft.tokens[: node + 1])
        path = []
        while node >= 0:
            path.append(self._draft.tokens[node])
            node = self._draft.parents[node]
        return path[::-1]

    def __getitem__(self, row: int) -> Distribution:  # type: ignore[override]  # rows are asked for one by one
        if row not in self._laws:
            history = self._recent + self._path(row - 1) if self._params.penalised else ()
            self._laws[row] = law(self._rows[row], history, self._params)
        return self._laws[row]


class RandomChooser:
    """A `Chooser` on a seeded generator: every flip and every pick is a fresh draw."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def flip(self, prob: float) -> bool:
        """u < prob with u in [0, 1): certain at 1, impossible at 0."""
        return bool(self._random.random() < prob)

    def pick(self, law: Distribution) -> int:
        """One token by inversion of the cumulative law; a token of probability 0 is never drawn."""
        ids, probs = law.cells()
        upto = probs.cumsum()
        # side='right' finds the first entry above u; the mass may be a rounding below or above 1, so u is scaled.
        i = int(upto.searchsorted(self._random.random() * upto[-1], side="right"))
        i = min(i, int(upto.searchsorted(upto[-1])))
        return i if ids is None else int(ids[i])
