"""Sampling: (logits, tokens so far) -> Distribution, and the random chooser that draws from it.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature. Sampling keeps no state, so a
rejected draft needs no rollback here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from specllama.base.errors import AllForbidden, NumericsError, UsageError
from specllama.base.ranges import Check, real, whole
from specllama.core.arrays import Float64Array, FloatArray, IntArray
from specllama.core.distribution import Distribution

GREEDY_BELOW = 1e-6  # a temperature up to this is greedy, everywhere
# A share is reached if this part of it is missing: more than the rounding of a sum over a vocabulary, and 0.55 itself
# is rounded. Else top-p 0.55 keeps 56 of 100 equal tokens.
ROUNDING = 1e-10

# What each number may be: for options, settings of a chat, saved files and the Python API.
RANGES: dict[str, Check] = {
    "temperature": real(0),
    "top_k": whole(0),
    "top_p": real(0, 1),
    "min_p": real(0, 1),
    "repeat_penalty": real(0, open_low=True),
    "presence_penalty": real(),
    "frequency_penalty": real(),
    "repeat_last_n": whole(-1),
}


def _number(name: str, value: object) -> object:
    """`value`; a text that looks like a number passes a range but cannot be compared."""
    if not isinstance(value, Real):
        raise UsageError(f"{name} is {value!r}, expected a number")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A filter at 0 is off; so are top_p and repeat_penalty at 1.0. Raises UsageError for bad values."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64  # how far penalties look back; -1 = everything
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, check in RANGES.items():
            check(name, _number(name, getattr(self, name)))
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias is {self.logit_bias!r}, expected numbers by token id")
        for token, bias in self.logit_bias.items():
            _number("a logit bias", bias)
            if not isinstance(token, Integral) or token < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit bias {token}={bias} is not a token id with a finite number or -inf")

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True if the tokens so far change the distribution."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    def window(self, tokens: Sequence[int], end: int | None = None) -> Sequence[int]:
        """The part of `tokens[:end]` that penalties look at."""
        if not self.penalised:
            return ()
        end = len(tokens) if end is None else end
        return tokens[0 if self.repeat_last_n < 0 else max(end - self.repeat_last_n, 0) : end]


@lru_cache(maxsize=4)
def _as_arrays(bias: tuple[tuple[int, float], ...]) -> tuple[IntArray, Float64Array]:
    """The tokens of a logit bias, ascending, and what is added to their logits; the same at every step."""
    tokens, added = zip(*sorted(bias), strict=True)
    return np.array(tokens, np.int64), np.array(added, np.float64)


def _changes(
    row: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None
) -> tuple[IntArray, Float64Array]:
    """The cells of a row that bias and penalties change, ascending, and their new values.  both (n,); ids: see `law`"""
    window, bias = params.window(history), params.logit_bias
    if not window and not bias:
        return np.empty(0, np.int64), np.empty(0)
    counts: dict[int, int] = {}
    if window:
        for token in window:
            counts[token] = counts.get(token, 0) + 1
        found = sorted(counts.keys() | bias.keys())
        tokens, added = np.array(found, np.int64), np.array([bias.get(token, 0.0) for token in found])
    else:
        tokens, added = _as_arrays(tuple(bias.items()))
    cells = tokens
    if ids is None:
        known = tokens < row.size
    else:
        cells = np.minimum(ids.searchsorted(tokens), ids.size - 1)
        known = ids[cells] == tokens
    if not known.all():
        cells, tokens, added = cells[known], tokens[known], added[known]
    with np.errstate(over="ignore", invalid="ignore"):  # `law` reports numbers out of range
        values = row[cells] + added
        if window:
            n_seen = np.array([counts.get(token, 0) for token in tokens.tolist()])
            seen = np.where(values <= 0.0, values * params.repeat_penalty, values / params.repeat_penalty)
            seen = seen - n_seen * params.frequency_penalty - params.presence_penalty
            values = np.where(n_seen > 0, seen, values)
    return cells, values


def _checked_peak(peak: float, logits: FloatArray) -> float:
    """`peak`, the largest of some logits; raises NumericsError if no distribution can come of the row.

    numpy's max prefers NaN, so the largest entry shows every NaN and +inf; -inf means that all tokens are masked.
    logits: (n,), the row before bias and penalties, which tells the two causes apart.
    """
    if math.isfinite(peak):
        return peak
    found = "every token is masked" if peak == -math.inf else f"the largest logit is {peak}"
    if not math.isfinite(float(logits.max())):
        raise NumericsError(
            f"the model's logits cannot be turned into probabilities: {found}",
            hint="check the model file's checksum, and the build with `specllama doctor`",
        )
    if peak == -math.inf:
        raise AllForbidden("the logit bias forbids every token", hint="forbid fewer of them (--logit-bias)")
    raise NumericsError(f"bias and penalties are too large: {found}", hint="use smaller values")


def _column_peaks(row: FloatArray) -> FloatArray:
    """The maxima of the columns of the row, read as 64 lines.  (n // 64,)"""
    n_columns = row.size // 64
    peaks: FloatArray = row[: 64 * n_columns].reshape(64, n_columns).max(axis=0)
    return peaks


def _peak(row: FloatArray, peaks: FloatArray) -> float:
    """The largest entry of the row; NaN if there is one."""
    rest, peak = row[64 * peaks.size :], peaks.max(initial=-np.inf)
    return float(np.maximum(peak, rest.max()) if rest.size else peak)


def _at_least(row: FloatArray, bound: np.floating[Any], peaks: FloatArray) -> IntArray:
    """Ids of all entries that reach `bound`, ascending; looks only at columns whose peak does.  (n,)"""
    columns = (peaks >= bound).nonzero()[0]
    n_in_columns = 64 * peaks.size
    cells = row[:n_in_columns].reshape(64, peaks.size).take(columns, axis=1)  # (64, columns)
    lines, which = divmod(np.flatnonzero(cells >= bound), max(columns.size, 1))  # line by line, so ids ascend
    ids: IntArray = lines * peaks.size + columns[which]
    if n_in_columns < row.size:
        ids = np.concatenate((ids, n_in_columns + (row[n_in_columns:] >= bound).nonzero()[0]))
    return ids


def _largest(row: FloatArray, k: int, peaks: FloatArray | None = None) -> IntArray:
    """Ids of the `k` largest entries, or of all; ascending, ties at the edge go to the lowest ids.  (min(k, n),)

    `peaks`: those of the row's columns, if known. They bound the k-th largest entry from below, so only a few columns
    are looked at closely: for 152k tokens several times cheaper than partitioning the row.
    """
    ids: IntArray
    if k == 1:
        return np.array((int(row.argmax()),))
    n_columns = row.size // 64
    if n_columns >= 4 * k:
        peaks = _column_peaks(row) if peaks is None else peaks
        ids = _at_least(row, np.partition(peaks, n_columns - k)[n_columns - k], peaks)
    else:
        ids = np.arange(row.size)
    if ids.size <= k:
        return ids
    values = row[ids]
    edge = np.partition(values, ids.size - k)[ids.size - k]
    above = (values > edge).nonzero()[0]
    ties = (values == edge).nonzero()[0][: k - above.size]
    ids = np.sort(ids[np.concatenate((above, ties))])
    return ids


def _with_changes(
    row: FloatArray, cells: IntArray, changed: IntArray, new_values: Float64Array
) -> tuple[IntArray, Float64Array]:
    """`cells` and `changed` together, ascending, and their values after the change.  both (n,)"""
    if changed.size:
        cells = np.concatenate((cells, changed))
        cells.sort()
        cells = np.concatenate((cells[:1], cells[1:][cells[1:] != cells[:-1]]))
    values = row[cells].astype(np.float64)
    if changed.size:
        values[cells.searchsorted(changed)] = new_values
    return cells, values


def _top(
    row: FloatArray, k: int, changed: IntArray, new_values: Float64Array, peaks: FloatArray | None = None
) -> tuple[IntArray, Float64Array]:
    """The `k` largest cells after the change, ascending, and their values.  both (min(k, n),)

    They are among the changed cells and the k + n_changed largest of the row, so the row is not copied. For k = 1 only
    its largest cell is looked at; if that changes, a masked copy is faster than a search for n_changed more.
    Raises NumericsError or AllForbidden if no distribution can come of them.
    """
    cells = _largest(row, k + changed.size if k > 1 else 1, peaks)
    if k == 1 and cells[0] in changed:
        rest = row.copy()
        rest[changed] = -np.inf
        cells = _largest(rest, 1)
    cells, values = _with_changes(row, cells, changed, new_values)
    _checked_peak(float(values.max()), row)
    if cells.size > k:
        kept = _largest(values, k)
        cells, values = cells[kept], values[kept]
    return cells, values


def _lowest(row: FloatArray, peak: float, share: float) -> np.floating[Any]:
    """A bound reached by all entries of the row whose weight exp(entry - peak) reaches `share`, and by few others.

    In the row's own precision, so that only these few need float64. The bound is lowered by far more than the
    roundings of float64 in it (below 1e-15 of |peak| + 745, the largest logarithm), and then by one step of the row's
    precision, which is more than its own rounding can raise it.
    """
    bound = peak + math.log(share) - 1e-6 * (1.0 + abs(peak))
    with np.errstate(over="ignore"):  # lower than any number is low enough
        lowest: np.floating[Any] = np.nextafter(row.dtype.type(bound), row.dtype.type(-np.inf))
    return lowest


def _nucleus(values: Float64Array, weights: Float64Array, share: float) -> IntArray:
    """Indices of the fewest entries, largest first, whose weights reach `share`; ties go to the lowest index."""
    n = 256
    while True:  # sorting a few hundred is enough for most rows
        if values.size <= n:
            order = (-values).argsort(kind="stable")
        else:
            head = _largest(values, n)
            order = head[(-values[head]).argsort(kind="stable")]
        reached = np.cumsum(weights[order]) >= share
        if reached[-1]:
            return order[: int(reached.argmax()) + 1]
        if n >= weights.size:
            return order
        n *= 8


def law(
    logits: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None = None
) -> Distribution:
    """The distribution of the next token after all sampler settings.

    logits: (n,), any float type, -inf for masked tokens. `history`: prompt + answer + draft path, or at least as much
    of its end as `params.window` looks at. `ids`: the token of every cell, ascending; None = 0, 1, 2, ...  Raises
    NumericsError for NaN, +inf and rows with every token masked, AllForbidden if bias and penalties leave no token.
    """
    changed, new_values = _changes(logits, history, params, ids)
    cells: IntArray | None = None  # those that can be kept, ascending; None = all
    if params.greedy:
        top = int(logits.argmax())  # ties go to the lowest id
        if changed.size and (top in changed or not new_values.max() < logits[top]):
            top = int(_top(logits, 1, changed, new_values)[0][0])
        else:
            _checked_peak(float(logits[top]), logits)
        return Distribution.point(top if ids is None else int(ids[top]))
    k = params.top_k
    if k > 0 or params.min_p > 0.0:
        peaks = _column_peaks(logits)  # one look at the row serves all that follows
        # Before anything is compared: NaN compares with nothing.
        peak = _checked_peak(_peak(logits, peaks), logits)
    if params.min_p > 0.0:
        lowest = _lowest(logits, peak, params.min_p)
        if np.count_nonzero(peaks >= lowest) <= 1:  # often min-p leaves one token, and nothing else matters
            near = _at_least(logits, lowest, peaks)
            if near.size == 1 and not (changed.size and (near[0] in changed or not new_values.max() < lowest)):
                return Distribution.point(int(near[0] if ids is None else ids[near[0]]))
    if k > 0:
        cells, values = _top(logits, k, changed, new_values, peaks)
        peak = float(values.max())
    elif params.min_p > 0.0:
        if changed.size:
            peak = float(_top(logits, 1, changed, new_values)[1][0])
        near = _at_least(logits, _lowest(logits, peak, params.min_p), peaks)
        cells, values = _with_changes(logits, near, changed, new_values)
    else:
        values = logits.astype(np.float64)
        values[changed] = new_values
        peak = _checked_peak(float(values.max()), logits)
    values -= peak
    if params.top_p < 1.0 or params.min_p > 0.0:
        # Both filters keep a prefix of the tokens by rank, so min-p may go first and spare top-p the sorting,
        # as long as top-p's share is taken of the mass before min-p.
        weights = np.exp(values)
        kept = (weights >= params.min_p).nonzero()[0]
        if params.top_p < 1.0 and kept.size > 1:
            total = float(weights.sum())
            if k == 0 and params.min_p > 0.0:  # `cells` are only those that min-p can keep
                every = np.subtract(logits, peak, dtype=np.float64)
                every[changed] = new_values - peak
                total = float(np.exp(every, out=every).sum())
            kept = kept[_nucleus(values[kept], weights[kept], params.top_p * total * (1.0 - ROUNDING))]
        kept.sort()
        cells, values = kept if cells is None else cells[kept], values[kept]
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
    """The largest probability at temperature 1 without filters, in (0, 1].  row: (n,)"""
    weights = np.subtract(row, row.max())
    np.exp(weights, out=weights)
    return 1.0 / float(weights.sum())


class RandomChooser:
    """A `Chooser` with a seeded generator: every flip and every pick is a fresh draw."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def flip(self, prob: float) -> bool:
        return bool(self._random.random() < prob)  # of [0, 1): certain at 1, impossible at 0

    def pick(self, law: Distribution) -> int:
        """One token by inversion of the cumulative distribution; a token of probability 0 is never drawn."""
        ids, probs = law.cells()
        share = self._random.random()
        if probs.size == 1:
            return 0 if ids is None else int(ids[0])
        upto = probs.cumsum()
        # side='right' finds the first entry above u. The mass may be a rounding below or above 1, so u is scaled;
        # u <= 1 - 2**-53, so the product is below the mass, and there is such an entry.
        i = int(upto.searchsorted(share * upto[-1], side="right"))
        return i if ids is None else int(ids[i])
