"""A model for one text at a time, as a `SlotModel` with one slot: for recurrent models, which have no KV of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.base.errors import BackendError, ContextFull
from specllama.core.arrays import FloatArray
from specllama.core.optional import clock_of
from specllama.core.types import Cancel, Growing, LoadedModel, Part


class OneSlot:
    """Implements `types.SlotModel` on the KV of `model`, which it empties and does not close."""

    n_slots = 1

    def __init__(self, model: LoadedModel, *, n_ctx: int, max_rows: int) -> None:
        self.model = model
        self.vocab_size, self.caps = model.vocab_size, model.caps
        self.n_ctx, self.max_rows = min(n_ctx, model.n_ctx), max_rows
        self.end_tokens = model.end_tokens
        self._clock = clock_of((model,))
        model.truncate(0)

    @property
    def busy_s(self) -> float:
        return self._clock()

    def length(self, slot: int) -> int:
        return self.model.length

    def run(self, parts: Sequence[Part]) -> list[FloatArray]:
        """The part with logits takes a pass of its own behind that of the tokens before it."""
        try:
            return [self._run(part) for part in parts]
        except ContextFull:
            raise
        except BackendError:
            self.model.truncate(0)
            raise

    def _run(self, part: Part) -> FloatArray:
        n_before = len(part.tokens) - part.n_rows
        if part.grows:
            assert isinstance(self.model, Growing), "only a model with trees is asked to grow one"
            return self.model.grow(part.tokens, part.parents or ())
        if n_before:
            self.model.feed(part.tokens[:n_before])
        if not part.n_rows:
            return np.empty((0, self.vocab_size), np.float32)
        return self.model.eval(part.tokens[n_before:], part.parents)

    def truncate(self, slot: int, length: int) -> None:
        self.model.truncate(length)

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        self.model.keep(length, path)

    def share(self, tokens: Sequence[int]) -> None:
        self.model.feed(tokens)

    def watch(self, cancel: Cancel | None) -> None:
        self.model.watch(cancel)

    def close(self) -> None:
        """Nothing: the owner of the model closes it."""
