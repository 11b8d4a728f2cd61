"""Wrappers of a model: one that caches its rows, and one that records its calls so that they can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specllama.core.arrays import FloatArray
from specllama.core.types import LanguageModel, Spelling, common_prefix, room_after


class Passing:
    """A model that forwards every call."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.n_ctx = model.n_ctx
        self.caps = model.caps

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.model.end_tokens

    @property
    def length(self) -> int:
        return self.model.length

    def room_after(self, tokens: Sequence[int]) -> int:
        return room_after(self.model, tokens)

    def feed(self, tokens: Sequence[int]) -> None:
        self.model.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        return self.model.eval(tokens, parents)

    def truncate(self, length: int) -> None:
        self.model.truncate(length)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.model.keep(length, path)


class Remembered(Passing):
    """A model that computes the logits after a text once: they are a function of the text alone.

    An enumeration can then read a text thousands of times, and its result is exact although the last bits of
    llama.cpp's logits depend on the block size. `forget` frees the rows.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._tokens: list[int] = []
        self._held: list[int] = []  # tokens in the KV of the wrapped model
        self._rows: dict[tuple[int, ...], FloatArray] = {}

    @property
    def length(self) -> int:
        return len(self._tokens)

    def room_after(self, tokens: Sequence[int]) -> int:
        """The room of the wrapped model after the same text; see `types.Spelling`."""
        if not isinstance(self.model, Spelling):
            return self.n_ctx - self.length - len(tokens)
        text = (*self._tokens, *tokens)
        self._cut(common_prefix(self._held, text))
        return self.model.room_after(text[len(self._held) :])

    def feed(self, tokens: Sequence[int]) -> None:
        """Appends tokens; the wrapped model reads them when a later row is needed."""
        self._tokens.extend(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        text = (*self._tokens, *tokens)
        rows = np.stack(self._after(text, len(self._tokens)))
        rows.setflags(write=False)
        self._tokens.extend(tokens)
        return rows

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def keep(self, length: int, path: Sequence[int]) -> None:
        del self._tokens[length + len(path) :]

    def row(self, text: Sequence[int]) -> FloatArray:
        """The logits after `text`.  (V,)"""
        return self._after(tuple(text), len(text) - 1)[0]

    def forget(self) -> None:
        self._rows.clear()

    def _after(self, text: tuple[int, ...], n_before: int) -> list[FloatArray]:
        """The rows of `text` without its first `n_before` tokens; reads `text` from the first unknown row on."""
        prefixes = [text[: n + 1] for n in range(n_before, len(text))]
        for i, prefix in enumerate(prefixes):
            if prefix not in self._rows:
                self._read(text, n_before + i)
                break
        return [self._rows[prefix] for prefix in prefixes]

    def _cut(self, length: int) -> None:
        self.model.truncate(length)
        del self._held[length:]

    def _read(self, text: tuple[int, ...], n_known: int) -> None:
        """Reads `text` and stores its rows after the first `n_known` tokens."""
        n_kept = min(common_prefix(self._held, text), n_known)
        self._cut(n_kept)
        self.model.feed(text[n_kept:n_known])
        self._held.extend(text[n_kept:n_known])
        for at in range(n_known, len(text), self.caps.max_block):
            block = text[at : at + self.caps.max_block]
            rows = self.model.eval(block)
            self._held.extend(block)
            for i in range(len(block)):
                self._rows.setdefault(text[: at + i + 1], np.array(rows[i]))


class Undecided(Passing):
    """A draft that makes its favourite the third choice after two of three tokens.

    Any target accepts and rejects it in turn, even if it is the same file. So no fault stays hidden because a draft is
    too good.
    """

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        start = self.length
        rows = np.array(self.model.eval(tokens, parents))
        for i, token in enumerate(tokens):
            if (start + i + token) % 3:
                best = np.argpartition(rows[i], -3)[-3:]
                first, second, third = best[np.argsort(-rows[i, best], kind="stable")]
                rows[i, [first, second, third]] = rows[i, [second, third, first]]
        return rows


class Heard(Passing):
    """A model that calls `beat` after every pass."""

    def __init__(self, model: LanguageModel, beat: Callable[[], None]) -> None:
        super().__init__(model)
        self._beat = beat

    def feed(self, tokens: Sequence[int]) -> None:
        super().feed(tokens)
        self._beat()

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = super().eval(tokens, parents)
        self._beat()
        return rows


@dataclass(frozen=True, slots=True)
class Op:
    """A call that changed a KV cache: appended tokens at `at`, or cut off everything from `at` on."""

    kind: Literal["feed", "eval", "cut"]
    at: int
    tokens: tuple[int, ...] = ()


class Recorded(Passing):
    """A model that records the calls that made its KV cache."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.ops: list[Op] = []

    def empty(self) -> None:
        """Clears the KV cache and the record."""
        self.model.truncate(0)
        self.ops.clear()

    def feed(self, tokens: Sequence[int]) -> None:
        self.ops.append(Op("feed", self.length, tuple(tokens)))
        self.model.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self.ops.append(Op("eval", self.length, tuple(tokens)))
        return self.model.eval(tokens, parents)

    def truncate(self, length: int) -> None:
        self.ops.append(Op("cut", length))
        self.model.truncate(length)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.ops.append(Op("cut", length + len(path)))
        self.model.keep(length, path)


def _owners(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """(op, index) of the token at each position of the final KV cache."""
    owners: list[tuple[int, int]] = []
    for i, op in enumerate(ops):
        del owners[op.at :]
        owners.extend((i, j) for j in range(len(op.tokens)))
    return owners


def _kept(ops: Sequence[Op]) -> list[list[bool]]:
    """For every token of every op: is it in the final KV cache?"""
    kept = [[False] * len(op.tokens) for op in ops]
    for i, j in _owners(ops):
        kept[i][j] = True
    return kept


def held(ops: Sequence[Op]) -> tuple[int, ...]:
    """The tokens that these calls leave in the KV cache."""
    return tuple(ops[i].tokens[j] for i, j in _owners(ops))


def n_dropped(ops: Sequence[Op]) -> int:
    """Number of tokens that were read and cut off."""
    return sum(not here for each in _kept(ops) for here in each)


Change = Callable[[int, int], int]  # (position, token) -> token


def again(
    model: LanguageModel,
    ops: Sequence[Op],
    *,
    stale: Change | None = None,
    kept: Change = lambda position, token: token,
    want: int | None = None,
) -> FloatArray | None:
    """Clears `model` and repeats the calls, without a draft; returns the row at position `want`.

    `stale` replaces the tokens that were cut off, in blocks of the same width: a correct rollback leaves no trace of
    them. Without `stale` they are not read. `kept` may change the other tokens.
    """
    model.truncate(0)
    found = None
    for op, here in zip(ops, _kept(ops), strict=True):
        if op.kind == "cut":
            if stale is not None:
                model.truncate(op.at)
            continue
        tokens = [
            kept(op.at + j, token) if stays else stale(op.at + j, token) if stale is not None else -1
            for j, (token, stays) in enumerate(zip(op.tokens, here, strict=True))
        ]
        if stale is None:
            tokens = tokens[: sum(here)]
        if not tokens:
            continue
        if op.kind == "feed":
            model.feed(tokens)
            continue
        rows = model.eval(tokens)
        if want is not None and op.at <= want < op.at + len(tokens) and here[want - op.at]:
            found = np.array(rows[want - op.at])
    return found
