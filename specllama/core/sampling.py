"""Sampling: (logits, tokens so far) -> Distribution, and the random chooser that draws from it.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature. Everything is computed from the
logits and the tokens that lead to them, so a rejected draft leaves nothing behind that would have to be rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specllama.base.errors import AllForbidden, NumericsError, UsageError
from specllama.core.arrays import Float64Array, FloatArray, IntArray, scratch32
from specllama.core.distribution import Distribution

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

    def window(self, tokens: Sequence[int], end: int | None = None) -> Sequence[int]:
        """The part of `tokens[:end]` that penalties look at."""
        if not self.penalised:
            return ()
        if self.repeat_last_n < 0:
            return tokens if end is None else tokens[:end]
        end = len(tokens) if end is None else end
        return tokens[max(end - self.repeat_last_n, 0) : end]


@dataclass(frozen=True, slots=True)
class _Changes:
    """The cells of a row that bias and penalties change, ascending, and what they hold then.  both (n,)

    Kept apart from the row: it stays in the model's memory and in float32, where looking at it is cheap.
    """

    cells: IntArray
    values: Float64Array

    def without(self, cells: IntArray) -> IntArray:
        """`cells` that are not changed."""
        if not self.cells.size or not cells.size:
            return cells
        at = np.minimum(self.cells.searchsorted(cells), self.cells.size - 1)
        unchanged: IntArray = cells[self.cells[at] != cells]
        return unchanged

    def merged(self, row: FloatArray, cells: IntArray) -> tuple[IntArray, Float64Array]:
        """The unchanged `cells` of the row and the changed ones, ascending, with their values.  both (n,)

        Forbidden ones are left out where all changed ones are forbidden.
        """
        values = row[cells].astype(np.float64)
        if not self.cells.size or (values.size and float(self.values.max()) == -math.inf):
            return cells, values
        cells, values = np.concatenate((cells, self.cells)), np.concatenate((values, self.values))
        order = cells.argsort()
        return cells[order], values[order]


_UNCHANGED = _Changes(np.empty(0, np.int64), np.empty(0, np.float64))


def _changes(row: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None) -> _Changes:
    """What bias and penalties make of a row.  row: (n,); ids: see `law`"""
    window = params.window(history)
    if not window and not params.logit_bias:
        return _UNCHANGED
    if window:
        tokens, at = np.unique([*window, *params.logit_bias], return_inverse=True)
        n_seen = np.bincount(at[: len(window)], minlength=tokens.size)
        biases = np.zeros(tokens.size)
        biases[at[len(window) :]] = list(params.logit_bias.values())
    else:
        tokens = np.array(sorted(params.logit_bias), dtype=np.int64)
        n_seen = np.zeros(tokens.size, dtype=np.int64)
        biases = np.array([params.logit_bias[token] for token in tokens.tolist()])
    cells = tokens if ids is None else np.minimum(ids.searchsorted(tokens), ids.size - 1)
    known = tokens < row.size if ids is None else ids[cells] == tokens
    if not known.all():
        cells, n_seen, biases = cells[known], n_seen[known], biases[known]
    values = row[cells] + biases
    if window:
        with np.errstate(over="ignore", invalid="ignore"):  # numbers out of range are reported by `law`
            seen = np.where(values <= 0.0, values * params.repeat_penalty, values / params.repeat_penalty)
            seen = seen - n_seen * params.frequency_penalty - params.presence_penalty
        values = np.where(n_seen > 0, seen, values)
    return _Changes(cells, values)


def _require_finite(peak: float) -> None:
    """Raises NumericsError where the largest logit of a row tells that no law can come of it.

    numpy's max prefers NaN, so the largest entry tells of every NaN and of +inf; -inf means all masked.
    """
    if not math.isfinite(peak):
        found = "every token is masked" if peak == -math.inf else f"the largest logit is {peak}"
        raise NumericsError(
            f"the model's logits cannot be turned into probabilities: {found}",
            hint="check the model file's checksum, and the build with `specllama doctor`",
        )


def _require_sound(peak: float) -> None:
    """The same of a sound row after bias and penalties. Raises AllForbidden where they leave no token."""
    if peak == -math.inf:
        raise AllForbidden("the logit bias forbids every token", hint="forbid fewer of them (--logit-bias)")
    if not math.isfinite(peak):
        raise NumericsError(
            f"bias and penalties leave the range of numbers: the largest logit is {peak}",
            hint="use smaller biases and penalties",
        )


def _grid(row: FloatArray) -> FloatArray:
    """The row, up to its last few entries, as 64 lines.  (64, n // 64)"""
    return row[: row.size - row.size % 64].reshape(64, -1)


def _at_least(row: FloatArray, bound: FloatArray | np.floating[Any], peaks: FloatArray | None = None) -> IntArray:
    """Ids, ascending, of the entries that reach `bound`.  peaks: the maxima of the columns of `_grid`.  (n,)

    Where few columns hold such entries only these are looked at: several times cheaper than `nonzero` of the whole row.
    """
    if row.size < 64:
        return (row >= bound).nonzero()[0]
    peaks = _grid(row).max(axis=0) if peaks is None else peaks
    columns = (peaks >= bound).nonzero()[0]
    if 12 * columns.size > peaks.size:
        return (row >= bound).nonzero()[0]
    ids = (columns + peaks.size * np.arange(64)[:, None]).ravel()  # line by line, so ids ascend
    ids = np.concatenate((ids, np.arange(64 * peaks.size, row.size)))
    found: IntArray = ids[row[ids] >= bound]
    return found


def _largest(row: FloatArray, k: int) -> IntArray:
    """Ids of the `k` largest entries, ascending; ties at the edge go to the lowest ids.  (k,)

    The maxima of many columns bound the k-th largest entry from below, so only a few columns are looked at closely:
    for 152k tokens several times cheaper than partitioning the row.
    """
    ids: IntArray
    if row.size // 64 >= 4 * k:
        peaks = _grid(row).max(axis=0)
        ids = _at_least(row, np.partition(peaks, peaks.size - k)[peaks.size - k], peaks)
        values = row[ids]
    else:
        ids, values = np.arange(row.size), row
    if ids.size <= k:
        return ids
    edge = np.partition(values, ids.size - k)[ids.size - k]
    above = (values > edge).nonzero()[0]
    ties = (values == edge).nonzero()[0][: k - above.size]
    ids = np.sort(ids[np.concatenate((above, ties))])
    return ids


def _lowered(bound: float, row: FloatArray) -> np.floating[Any]:
    """A number of the row's precision just below `bound`, so that no entry that reaches `bound` is lost.

    Lowered by far more than the roundings of float64 in a bound made of the peak and a logarithm (below 1e-15 of its
    size), and then by one step of the row's precision, which is more than its own rounding can raise it.
    """
    with np.errstate(over="ignore"):  # lower than any number is low enough
        lowest: np.floating[Any] = np.nextafter(
            row.dtype.type(bound - 1e-6 * (1.0 + abs(bound))), row.dtype.type(-np.inf)
        )
    return lowest


def _ranked(values: Float64Array) -> IntArray:
    """Indices of `values`, the largest first; ties go to the lowest index."""
    return (-values).argsort(kind="stable")


def _nucleus(values: Float64Array, weights: Float64Array, share: float) -> IntArray:
    """Indices of the fewest entries, largest first, whose weights reach `share`; ties go to the lowest index."""
    n = 256
    while True:  # sorting a few hundred is enough for most rows
        head = _largest(values, min(n, values.size))
        order = head[_ranked(values[head])]
        reached = np.cumsum(weights[order]) >= share
        if reached[-1]:
            return order[: int(reached.argmax()) + 1]
        if n >= weights.size:
            return order
        n *= 8


def _unchanged(row: FloatArray, k: int, changes: _Changes) -> IntArray:
    """The `k` largest unchanged cells at least, ascending; fewer where there are not so many."""
    n = changes.cells.size
    for n_more in (0 if n <= 8 else 8, n):  # mostly few of the largest are changed
        near = changes.without(_largest(row, k + n_more))
        if near.size >= k:
            break
    return near


def _best(row: FloatArray, largest: int, changes: _Changes) -> IntArray:
    """The largest unchanged cell, the lowest of equals; none where all are changed.  (1,) or (0,)"""
    best = changes.without(np.array((largest,)))
    if best.size or not changes.cells.size:
        return best
    near = _unchanged(row, 1, changes)
    return near[row[near].argmax()][None] if near.size else near


def _share_in_head(
    row: FloatArray, changes: _Changes, peak: float, params: SamplingParams
) -> tuple[IntArray, Float64Array] | None:
    """What top-p and min-p leave of the whole row, without float64 exponentials of all of it; None = cannot be told.

    Top-p needs the mass of the whole row, but only a few entries are kept. The weights of these few are computed in
    float64, the mass of the others in float32 with a bound on its error. Where every mass within the bound leads to the
    same cut, it is the cut. Returns cells, ascending, and their values minus `peak`.
    """
    # Roundings of `peak` and of the differences, which lie above -104 where the exponential is no zero; then those of
    # float32's exp (4 units in the last place allowed for) and of a pairwise sum.
    error = 2.0**-23 * (abs(peak) + 104.0) + 2.0**-18
    if row.dtype != np.float32 or error > 1e-3:
        return None
    rest = scratch32(row.size)
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(row, np.float32(peak), out=rest)
        np.exp(rest, out=rest)
    rest[changes.cells] = 0.0
    for depth in (6.0, 14.0):
        bound = _lowered(peak - depth, row)
        near = changes.without(_at_least(row, bound))
        rest[near] = 0.0
        cells, values = changes.merged(row, near)
        # A changed cell below the bound has a weight, and no place in the ranking: what lies between is not known.
        inside = values >= bound
        values -= peak
        weights = np.exp(values)
        head, tail = float(weights.sum()), float(rest.sum())
        low, high = (head + tail * (1.0 - error)) * (1.0 - 1e-12), (head + tail * (1.0 + error)) * (1.0 + 1e-12) + 1e-30
        kept = (inside & (weights >= params.min_p)).nonzero()[0]
        order = kept[_ranked(values[kept])]
        n_low, n_high = weights[order].cumsum().searchsorted((params.top_p * low, params.top_p * high))
        # Where all that min-p keeps is inside, top-p may have nothing more to cut.
        closed = math.exp(float(bound) - peak) < params.min_p
        if n_low == n_high and (n_low < order.size or closed):
            kept = np.sort(order[: n_low + 1])
            return cells[kept], values[kept]
    return None


def law(
    logits: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None = None
) -> Distribution:
    """The law of the next token after all sampler settings.

    logits: (n,), any float type, -inf for masked tokens. `history` is prompt + answer + draft path, or at least as much
    of its end as `params.window` looks at. `ids`: the token of every cell, ascending; None = 0, 1, 2, ...  Raises
    NumericsError for NaN, +inf and rows with every token masked.
    """
    by_rank = not params.greedy and 0 < params.top_k < logits.size
    largest = -1 if by_rank else int(logits.argmax())  # the first of equals: ties go to the lowest id
    # Of the whole row: what follows compares, and NaN compares with nothing.
    _require_finite(float(logits.max() if by_rank else logits[largest]))
    changes = _changes(logits, history, params, ids)
    if by_rank:
        cells, values = changes.merged(logits, _unchanged(logits, params.top_k, changes))
        if cells.size > params.top_k:
            top = _largest(values, params.top_k)
            cells, values = cells[top], values[top]
        _require_sound(peak := float(values.max()))
        values -= peak
        return _cut(cells, values, params, ids)
    cells, values = changes.merged(logits, _best(logits, largest, changes))
    best = int(values.argmax())
    _require_sound(peak := float(values[best]))
    if params.greedy:
        token = int(cells[best])
        return Distribution.point(token if ids is None else int(ids[token]))
    if params.top_p >= 1.0 and params.min_p > 0.0:
        cells, values = changes.merged(
            logits, changes.without(_at_least(logits, _lowered(peak + math.log(params.min_p), logits)))
        )
        values -= peak
        return _cut(cells, values, params, ids)
    if params.top_p < 1.0 and (found := _share_in_head(logits, changes, peak, params)) is not None:
        return _softened(*found, params, ids)
    values = logits.astype(np.float64)
    values[changes.cells] = changes.values
    values -= peak
    return _cut(None, values, params, ids)


def _cut(cells: IntArray | None, values: Float64Array, params: SamplingParams, ids: IntArray | None) -> Distribution:
    """Top-p, min-p and temperature on logits minus the largest.  cells, ascending, None = all; values: (n,)"""
    if params.top_p < 1.0 or params.min_p > 0.0:
        cells = np.arange(values.size) if cells is None else cells
        # Both filters keep a prefix of the tokens by rank, so min-p may go first and spare top-p the sorting,
        # as long as top-p's share is taken of the mass before min-p.
        weights = np.exp(values)
        total = float(weights.sum())
        kept = (weights >= params.min_p).nonzero()[0]
        if params.top_p < 1.0:
            kept = kept[_nucleus(values[kept], weights[kept], params.top_p * total)]
        kept.sort()
        cells, values = cells[kept], values[kept]
    return _softened(cells, values, params, ids)


def _softened(
    cells: IntArray | None, values: Float64Array, params: SamplingParams, ids: IntArray | None
) -> Distribution:
    """The law of what the filters left, at the temperature. Takes `values` over.  both (n,)"""
    probs = np.divide(values, params.temperature, out=values)
    np.exp(probs, out=probs)
    probs /= probs.sum()
    tokens = cells if ids is None else ids if cells is None else ids[cells]
    # Made here, finite, ids ascending: nothing to check or to copy.
    probs.setflags(write=False)
    if tokens is not None:
        tokens.setflags(write=False)
    return Distribution(tokens, probs)


def peak_share(row: FloatArray) -> float:
    """The largest probability at temperature 1 without filters, in (0, 1], to float32's precision.  row: (n,)"""
    weights = scratch32(row.size)
    np.subtract(row, row.max(), out=weights)
    np.exp(weights, out=weights)
    return 1.0 / float(weights.sum())


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
