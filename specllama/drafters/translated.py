"""A draft model with another vocabulary, as a `LanguageModel` in the target's token ids.

Its rows are scattered into the target's width, with -inf for tokens that the draft lacks. There q is zero, and it is
normalised over the rest before the draw, so verification is exact as with any draft. The draft reads committed tokens
in its own spelling, see `token_map`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from specllama.base.errors import ContextFull, UnsupportedModel
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.optional import clock_of
from specllama.core.types import Cancel, Growing, LoadedModel, Resuming, require_chain
from specllama.drafters.token_map import NO_TOKEN


class Spell(Protocol):
    """How the draft reads the target's tokens, e.g. `token_map.Speller`."""

    @property
    def first(self) -> Sequence[int]:
        """Draft tokens at the start of every text, unless the first spelling begins with them."""

    def __call__(self, token: int) -> Sequence[int]:
        """At least one draft token; the one that `to_target` maps to `token`, if any."""


class TranslatedModel:
    """Takes and returns the target's ids; `model` reads their spellings in its own ids.

    The nodes of a tree must be tokens of one cell, as all are that the draft proposes. Invariant, also after any error:
    `model`'s KV holds the whole spellings of the committed tokens, in order.
    """

    def __init__(self, model: LoadedModel, to_target: IntArray, spell: Spell, *, vocab_size: int) -> None:
        """`to_target`: for every id of `model` the target's, or NO_TOKEN, no two equal. `vocab_size`: the target's."""
        mapped = np.flatnonzero(to_target != NO_TOKEN)
        if to_target.shape != (model.vocab_size,) or not mapped.size:
            raise ValueError(f"a map of {mapped.size} of {to_target.size} ids for a draft with {model.vocab_size}")
        mapped = mapped[np.argsort(to_target[mapped])]  # writes go through memory in order
        self.known = to_target[mapped]  # the target's tokens that the draft can propose, ascending
        # A trimmed draft is mostly in the target's order: then its rows need no copy.
        in_order = np.array_equal(mapped, np.arange(mapped.size))
        self._columns: IntArray | slice = slice(mapped.size) if in_order else mapped
        if self.known[0] < 0 or self.known[-1] >= vocab_size or not np.diff(self.known).all():
            raise ValueError(f"a map of ids must lead to different ids from 0 to {vocab_size - 1}")
        self.model = model
        self._to_target = to_target
        self._growing = model if isinstance(model, Growing) else None
        self._resuming = model if isinstance(model, Resuming) else None
        self._busy_s = clock_of((model,))
        self._spell = spell
        self.vocab_size = vocab_size
        self.n_ctx = model.n_ctx  # at most: see `room_after`
        self.caps = replace(model.caps, features=False)
        ends = (int(to_target[token]) for token in model.end_tokens)
        self.end_tokens = frozenset(token for token in ends if token != NO_TOKEN)
        self._ends: list[int] = []  # the draft's length after every held token; of a tree, its nodes follow in order
        self._in_tree = False  # until `keep` or `truncate`
        self._rows = np.empty((0, vocab_size), np.float32)
        self._known_rows = np.empty((0, mapped.size), np.float32)

    def over(self, model: LoadedModel) -> TranslatedModel:
        """The same translation of `model`, which has the vocabulary of the other and a KV of its own."""
        return TranslatedModel(model, self._to_target, self._spell, vocab_size=self.vocab_size)

    @property
    def length(self) -> int:
        """Tokens now in the KV, counted in the target's ids."""
        if self._ends and self.model.length < self._ends[-1]:  # a pass failed that it shared with others
            self._settle(self._ends)
        return len(self._ends)

    def n_cells(self, tokens: Sequence[int]) -> int:
        """How many of the draft's own tokens spell `tokens`."""
        return sum(len(self._spell(token)) for token in tokens)

    @property
    def busy_s(self) -> float:
        return self._busy_s()

    def watch(self, cancel: Cancel | None) -> None:
        self.model.watch(cancel)

    def close(self) -> None:
        self.model.close()

    def _end(self, length: int) -> int:
        """The draft's length after the first `length` tokens."""
        return self._ends[length - 1] if length else 0

    def _spelled(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """The draft's tokens for each of `tokens` after the held ones."""
        spelled = [self._spell(token) for token in tokens]
        first = tuple(self._spell.first)
        if first and spelled and not self._ends and tuple(spelled[0][: len(first)]) != first:
            spelled[0] = (*first, *spelled[0])
        return spelled

    def room_after(self, tokens: Sequence[int]) -> int:
        return self.model.n_ctx - self.model.length - sum(map(len, self._spelled(tokens)))

    def _ends_of(self, spelled: Sequence[Sequence[int]]) -> list[int]:
        """The draft's length after each of `spelled`. Raises ContextFull if they do not fit."""
        ends = list(accumulate(map(len, spelled), initial=self.model.length))[1:]
        if ends and ends[-1] > self.model.n_ctx:
            raise ContextFull(
                f"the draft's context of {self.model.n_ctx} tokens is too small (it holds {self.model.length}, "
                f"{ends[-1] - self.model.length} more are needed)",
                hint="use a longer context (--ctx-size)",
            )
        return ends

    def _settle(self, ends: list[int]) -> None:
        """After an error: keep the whole spellings that the draft still holds, drop a partial one."""
        self._ends = [end for end in ends if end <= self.model.length]
        if self.model.length > self._end(self.length):
            self.model.truncate(self._end(self.length))

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without logits. After an interruption `length` tells how far it came."""
        spelled = self._spelled(tokens)
        ends = [*self._ends, *self._ends_of(spelled)]
        try:
            self.model.feed([cell for cells in spelled for cell in cells])
        except BaseException:
            self._settle(ends)
            raise
        self._ends = ends

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits, (len(tokens), V): a read-only view, valid until the next call.

        After an error the KV is as before. Raises UnsupportedModel for a tree with a node of several cells.
        """
        return self._wide(self._eval(tokens, parents))

    def eval_known(self, tokens: Sequence[int]) -> FloatArray:
        """`eval` without the tokens that the draft lacks: column i belongs to token `known[i]`."""
        return self._eval(tokens, None)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """See `types.Growing`."""
        return self._wide(self.grow_known(tokens, parents))

    def grow_known(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """`grow` without the tokens that the draft lacks."""
        assert self._growing is not None, "a tree for a model without caps.tree"
        spelled = self._spelled(tokens)
        if any(len(cells) > 1 for cells in spelled):
            raise UnsupportedModel(
                "this draft spells a token of the tree with several of its own", hint="draft a chain"
            )
        ends = self._ends_of(spelled)
        try:
            rows = self._growing.grow([cells[0] for cells in spelled], parents)[:, self._columns]
        except BaseException:
            self._settle(self._ends)
            raise
        self._ends += ends
        self._in_tree = True
        return _read_only(rows)

    def _eval(self, tokens: Sequence[int], parents: Sequence[int] | None) -> FloatArray:
        spelled = self._spelled(tokens)
        ends = self._ends_of(spelled)
        passes = list(_passes(spelled))
        if len(passes) > 1 or not self.caps.tree:
            require_chain(parents)
            parents = None
        if len(passes) > 1 and len(tokens) > len(self._known_rows):
            self._known_rows = np.empty((len(tokens), self.known.size), np.float32)
        try:
            n_done = 0
            for unseen, seen in passes:
                if unseen:
                    self.model.feed(unseen)
                rows = self.model.eval(seen, parents)[:, self._columns]
                if len(passes) > 1:
                    self._known_rows[n_done : n_done + len(seen)] = rows
                n_done += len(seen)
        except BaseException:
            self._settle(self._ends)
            raise
        self._ends += ends
        self._in_tree = parents is not None
        return _read_only(rows if len(passes) == 1 else self._known_rows[: len(tokens)])

    def _wide(self, known: FloatArray) -> FloatArray:
        """Rows over all of the target's tokens."""
        if len(known) > len(self._rows):
            self._rows = np.full((len(known), self.vocab_size), -np.inf, np.float32)
        self._rows[: len(known), self.known] = known
        return _read_only(self._rows[: len(known)])

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on. Drops nothing if it raises RollbackRefused."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.model.truncate(self._end(length))
        del self._ends[length:]
        self._in_tree = False

    def resume_at(self, length: int) -> int:
        """See `types.Resuming`; the draft must get back to a whole spelling."""
        if self._resuming is not None:
            while (at := self._resuming.resume_at(self._end(length))) < self._end(length):
                length = bisect_right(self._ends, at, hi=length)
        return length

    def expect_return(self, tokens: Sequence[int]) -> None:
        """See `types.Resuming`."""
        if self._resuming is not None:
            self._resuming.expect_return([cell for cells in self._spelled(tokens) for cell in cells])

    def keep(self, length: int, path: Sequence[int]) -> None:
        if not self._in_tree:
            require_chain(kept=path)
            self.truncate(length + len(path))
            return
        self.model.keep(self._end(length), path)
        self._ends[length:] = range(self._end(length) + 1, self._end(length) + 1 + len(path))
        self._in_tree = False


def _read_only(rows: FloatArray) -> FloatArray:
    view: FloatArray = rows.view()
    view.flags.writeable = False
    return view


def _passes(spelled: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """(cells to feed, cells to evaluate: the last of a token each); together all cells, in order."""
    unseen: list[int] = []
    seen: list[int] = []
    for cells in spelled:
        if len(cells) > 1 and seen:
            yield unseen, seen
            unseen, seen = [], []
        unseen += cells[:-1]
        seen.append(cells[-1])
    if seen:
        yield unseen, seen
