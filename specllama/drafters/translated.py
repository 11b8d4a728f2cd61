"""A draft model with another vocabulary, as a `LanguageModel` in the target's token ids.

Rows are scattered into the target's width, -inf where the draft has no such token: q is zero there and normalised over
the rest before anything is drawn, so the verifier stays exact and need not know. What was committed is read to the
draft in its own tokens, see `token_map`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from specllama.base.errors import ContextFull
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.types import Cancel, LoadedModel, require_chain
from specllama.drafters.token_map import NO_TOKEN


class Spell(Protocol):
    """How the draft reads the target's tokens; `token_map.Speller` is one."""

    @property
    def first(self) -> Sequence[int]:
        """Draft tokens that stand before all else, unless the first spelling begins with them."""
        ...

    def __call__(self, token: int) -> Sequence[int]:
        """At least one draft token; the one that `to_target` maps to `token` where there is one."""
        ...


class TranslatedModel:
    """Speaks the target's ids and reads them to `model` in its own.

    Invariant: `model`'s KV holds the spellings of the committed tokens, one after the other and each of them whole,
    whatever happened. A chain is all it can do.
    """

    def __init__(self, model: LoadedModel, to_target: IntArray, spell: Spell, *, vocab_size: int) -> None:
        """`to_target`: for every id of `model` the target's, or NO_TOKEN, no two alike; `vocab_size` the target's."""
        mapped = np.flatnonzero(to_target != NO_TOKEN)
        if to_target.shape != (model.vocab_size,) or not mapped.size:
            raise ValueError(f"a map of {mapped.size} of {to_target.size} ids for a draft with {model.vocab_size}")
        mapped = mapped[np.argsort(to_target[mapped])]  # writes go through memory in order
        self._draft_ids, self._target_ids = mapped, to_target[mapped]
        # A trimmed draft's own order is mostly the target's: then its rows serve as they are.
        in_order = np.array_equal(mapped, np.arange(mapped.size))
        self._columns: IntArray | slice = slice(mapped.size) if in_order else mapped
        if self._target_ids[0] < 0 or self._target_ids[-1] >= vocab_size or not np.diff(self._target_ids).all():
            raise ValueError(f"a map of ids must lead to different ones from 0 to {vocab_size - 1}")
        self.model = model
        self._spell = spell
        self.vocab_size = vocab_size
        self.n_ctx = model.n_ctx  # at most: see `room_after`
        self.caps = replace(model.caps, tree=False, features=False)
        ends = (int(to_target[token]) for token in model.end_tokens)
        self._end_tokens = frozenset(token for token in ends if token != NO_TOKEN)
        self._ends: list[int] = []  # the draft's length behind every token that is held
        self._rows = np.empty((0, vocab_size), np.float32)
        self._known_rows = np.empty((0, mapped.size), np.float32)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Those of the draft's end tokens that the target has."""
        return self._end_tokens

    @property
    def length(self) -> int:
        """Tokens now in the KV, counted as the target does."""
        return len(self._ends)

    @property
    def known(self) -> IntArray:
        """The target's tokens that the draft can propose, ascending.  (n,)"""
        return self._target_ids

    def n_cells(self, tokens: Sequence[int]) -> int:
        """How many of the draft's own tokens spell `tokens`."""
        return sum(len(self._spell(token)) for token in tokens)

    @property
    def busy_s(self) -> float:
        """Seconds spent so far inside the draft's own calls."""
        return self.model.busy_s

    def watch(self, cancel: Cancel | None) -> None:
        """Stop a long computation of the draft when `cancel` is set."""
        self.model.watch(cancel)

    def close(self) -> None:
        """Free the draft."""
        self.model.close()

    def _end(self, length: int) -> int:
        """The draft's length behind the first `length` tokens."""
        return self._ends[length - 1] if length else 0

    def _spelled(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """The draft's tokens for each of `tokens`, if they follow what is held."""
        spelled = [self._spell(token) for token in tokens]
        first = tuple(self._spell.first)
        if first and spelled and not self._ends and tuple(spelled[0][: len(first)]) != first:
            spelled[0] = (*first, *spelled[0])
        return spelled

    def room_after(self, tokens: Sequence[int]) -> int:
        """Tokens that both models know and that still fit once `tokens` were appended; below 0 where these do not."""
        return self.model.n_ctx - self.model.length - sum(map(len, self._spelled(tokens)))

    def _ends_of(self, spelled: Sequence[Sequence[int]]) -> list[int]:
        """The draft's length behind each of `spelled`. Raises ContextFull where they do not fit."""
        ends = list(accumulate(map(len, spelled), initial=self.model.length))[1:]
        if ends and ends[-1] > self.model.n_ctx:
            raise ContextFull(
                f"{self.model.length} tokens and {ends[-1] - self.model.length} more do not fit into the draft's "
                f"context of {self.model.n_ctx}",
                hint="use a longer context (--ctx-size)",
            )
        return ends

    def _settle(self, ends: list[int]) -> None:
        """After an error: count what the draft still holds of `ends`, and drop a spelling that was cut."""
        self._ends = [end for end in ends if end <= self.model.length]
        if self.model.length > self._end(self.length):
            self.model.truncate(self._end(self.length))

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without asking for logits. After an interruption `length` says how far it came."""
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

        `parents` may only describe a chain. After an error the KV is as before.
        """
        require_chain(parents)
        rows = self.eval_known(tokens)
        if len(tokens) > len(self._rows):
            self._rows = np.full((len(tokens), self.vocab_size), -np.inf, np.float32)
        self._rows[: len(tokens), self._target_ids] = rows
        return _read_only(self._rows[: len(tokens)])

    def eval_known(self, tokens: Sequence[int]) -> FloatArray:
        """`eval`, without the tokens that the draft does not know: column i belongs to token `known[i]`."""
        spelled = self._spelled(tokens)
        ends = self._ends_of(spelled)
        passes = list(_passes(spelled))
        if len(passes) > 1 and len(tokens) > len(self._known_rows):
            self._known_rows = np.empty((len(tokens), self._target_ids.size), np.float32)
        try:
            n_done = 0
            for unseen, seen in passes:
                if unseen:
                    self.model.feed(unseen)
                rows = self.model.eval(seen)[:, self._columns]
                if len(passes) > 1:
                    self._known_rows[n_done : n_done + len(seen)] = rows
                n_done += len(seen)
        except BaseException:
            self._settle(self._ends)
            raise
        self._ends += ends
        return _read_only(rows if len(passes) == 1 else self._known_rows[: len(tokens)])

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on. Raises RollbackRefused, and then drops nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.model.truncate(self._end(length))
        del self._ends[length:]

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Of the last eval keep the KV up to `length` (the pending token) and the nodes of `path`."""
        require_chain(kept=path)
        self.truncate(length + len(path))


def _read_only(rows: FloatArray) -> FloatArray:
    view: FloatArray = rows.view()
    view.flags.writeable = False
    return view


def _passes(spelled: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """(cells whose rows nobody asked for, cells that are the last of a token): together the cells, in order."""
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
