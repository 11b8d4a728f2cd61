"""A llama_batch that is allocated once and filled through numpy views of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.llama.open import Pointers

SEQUENCE = 0  # the one sequence that a chain needs


class BatchSlots:
    """A llama_batch allocated once, and numpy views of its arrays."""

    def __init__(self, lib: Any, pointers: Pointers, capacity: int) -> None:
        self.batch = pointers.batch = lib.llama_batch_init(capacity, 0, 1)
        self._token = _view(self.batch.token, np.int32, capacity)
        self._position = _view(self.batch.pos, np.int32, capacity)
        self._output = _view(self.batch.logits, np.int8, capacity)
        self._offsets = np.arange(capacity, dtype=np.int32)
        _view(self.batch.n_seq_id, np.int32, capacity)[:] = 1
        for index in range(capacity):
            self.batch.seq_id[index][0] = SEQUENCE

    def fill(self, tokens: Sequence[int], start: int, n_rows: int) -> None:
        """Put `tokens` at positions from `start` on; the last `n_rows` of them want logits."""
        count = len(tokens)
        self._token[:count] = tokens
        np.add(self._offsets[:count], start, out=self._position[:count])
        self._output[:count] = 0
        self._output[count - n_rows : count] = 1
        self.batch.n_tokens = count


def _view(pointer: Any, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    return np.ctypeslib.as_array(pointer, (count,)).view(dtype)
