"""A model for one text at a time, as a `SlotModel` with one slot: for recurrent models, which have no KV of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.base.errors import BackendError, ContextFull
from specllama.core.arrays import FloatArray
from specllama.core.types import Cancel, Growing, LoadedModel, Part, Resuming, resume_at


class OneSlot:
    """Implements `types.SlotModel` and `types.Resuming` on the KV of `model`, which it empties and does not close."""

    n_slots = 1

    def __init__(self, model: LoadedModel, *, n_ctx: int, max_rows: int) -> None:
        self.model = model
        self.vocab_size, self.caps = model.vocab_size, model.caps
        self.n_ctx, self.max_rows, self.max_outputs = min(n_ctx, model.n_ctx), max_rows, max_rows
        self.end_tokens = model.end_tokens
        model.truncate(0)

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

    def resume_at(self, length: int) -> int:
        return resume_at(self.model, length)

    def expect_return(self, tokens: Sequence[int]) -> None:
        if isinstance(self.model, Resuming):
            self.model.expect_return(tokens)

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        self.model.keep(length, path)

    def share(self, tokens: Sequence[int]) -> None:
        self.model.feed(tokens)

    def watch(self, cancel: Cancel | None) -> None:
        self.model.watch(cancel)

    def close(self) -> None:
        """Empty the KV: a record of it, made before, then has another length. The owner of the model closes it."""
        self.model.truncate(0)
