"""What a model's KV is known to hold: the prefix that one answer or draft leaves and the next may keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

from specllama.core.types import FloatArray, LanguageModel, common_prefix


class KeptPrefix:
    """The tokens in the KV of `model`, as far as they are known. Whoever shares a model shares its `KeptPrefix.of`."""

    # By the model's id, which stays its own as long as an entry lives: an entry keeps its model alive.
    _known: ClassVar[WeakValueDictionary[int, KeptPrefix]] = WeakValueDictionary()

    @classmethod
    def of(cls, model: LanguageModel) -> KeptPrefix:
        """The one record for this model: users with records of their own would trust each other's leavings."""
        if (known := cls._known.get(id(model))) is None:
            known = cls._known[id(model)] = cls(model)
        return known

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._tokens: list[int] = []

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keep of the KV what leads to `tokens`, the pending one left out; returns how many tokens that are."""
        # Someone else may have used the model since: then nothing is known of what it holds.
        known = self._tokens if self._model.length == len(self._tokens) else []
        n_kept = min(common_prefix(known, tokens), len(tokens) - 1)
        self._cut(n_kept)
        self._tokens = known[:n_kept]
        return n_kept

    def feed(self, tokens: Sequence[int]) -> None:
        """`model.feed`, on record; where it is interrupted, what it got to."""
        if tokens:
            self._tokens.extend(tokens)
            try:
                self._model.feed(tokens)
            finally:
                del self._tokens[self._model.length :]

    def eval(self, tokens: Sequence[int]) -> FloatArray:
        """`model.eval` of a chain, on record.  (len(tokens), V)"""
        self._tokens.extend(tokens)
        try:
            return self._model.eval(tokens)
        finally:
            del self._tokens[self._model.length :]

    def hold(self, tokens: Sequence[int]) -> None:
        """Leave the KV with nothing but `tokens[:-1]`, or with the part of it that was prefilled."""
        n_held = min(self._model.length, len(tokens) - 1)
        self._cut(n_held)
        self._tokens = list(tokens[:n_held])

    def _cut(self, length: int) -> None:
        if self._model.length > length:
            self._model.truncate(length)
