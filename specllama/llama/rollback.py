"""How a model gets back to an earlier length.

Attention keeps each token apart, so tokens are removed; a cache of the window alone has lost the tokens before it. A
recurrent layer keeps one state of the whole text: llama.cpp keeps the last states of some architectures; else we save
the state and compute the tokens after it again. `ways.py` chooses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from specllama.base.ranges import ROLLBACKS
from specllama.llama.header import ONE_STATE

TRUNCATION, WINDOW, KEPT, SAVED, DEVICE = ROLLBACKS
WAYS = {  # name: in reports
    TRUNCATION: "truncation",
    WINDOW: "truncation of a window's cache",
    KEPT: "kept states",
    SAVED: "saved states",
    DEVICE: "states saved on the device",
}
MOST_AGAIN = 8  # most tokens after a saved state that are computed again together with the next block
MOST_SAVED = 5  # states
_EVERY = -1  # sequence
_LINE = 0  # the only sequence of such a model
# Flags of a state: only what cannot remove tokens, so no cells of full attention; left in the memory of the device, in
# one place that the next such state takes.
_PARTIAL, _ON_DEVICE = 1, 2

Call = Callable[..., Any]  # (name of a function of llama.cpp, its arguments)


class Rollback(Protocol):
    """One way back. `n_decoded`: tokens in llama.cpp's memory."""

    n_again: int  # tokens, about, that the block after a rejection computes again
    no_tree: str  # why the memory cannot hold a tree of tokens; "" = it can

    def expect_return(self, length: int) -> None:
        """An answer begins after `length` tokens; see `types.Resuming`."""

    def n_first(self, n_decoded: int, n_held: int) -> int:
        """How many of the held tokens should be computed before a block, so that the way back is short."""

    def before(self, call: Call, n_decoded: int, n_rows: int) -> None:
        """A decode comes. The tokens of its last `n_rows` - 1 rows may be rejected."""

    def after(self, n_tokens: int) -> None:
        """A decode of `n_tokens` succeeded."""

    def back(self, call: Call, n_decoded: int, length: int) -> int | None:
        """Bring the memory to at most `length` tokens; returns how many it holds. None: it refused, unchanged."""

    def nearest(self, call: Call, n_decoded: int, length: int) -> int:
        """How many tokens the memory would hold after `back`."""

    def forget(self) -> None:
        """The memory is empty."""


class Truncation:
    """The memory removes tokens."""

    n_again = 0
    no_tree = ""

    def __init__(self, memory: object) -> None:
        self._memory = memory

    def expect_return(self, length: int) -> None:
        pass

    def n_first(self, n_decoded: int, n_held: int) -> int:
        return 0

    def before(self, call: Call, n_decoded: int, n_rows: int) -> None:
        pass

    def after(self, n_tokens: int) -> None:
        pass

    def back(self, call: Call, n_decoded: int, length: int) -> int | None:
        return length if call("llama_memory_seq_rm", self._memory, _EVERY, length, -1) else None

    def nearest(self, call: Call, n_decoded: int, length: int) -> int:
        return length

    def forget(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _State:
    data: Any  # of ctypes; the tables of a state on the device
    flags: int


class SavedStates:
    """The state at a few lengths, and the last ones that llama.cpp keeps.

    The state is saved before each block, every MOST_AGAIN tokens of plain decoding, and after single tokens were taken
    back, as a draft model's are. The state at the beginning of the answer stays.
    """

    no_tree = ONE_STATE
    most_saved = MOST_SAVED

    def __init__(self, context: object, memory: object, *, n_kept: int = 0, on_device: bool = False) -> None:
        self._context, self._memory = context, memory
        self._n_kept = n_kept  # states before the last one that llama.cpp keeps
        self._on_device = on_device  # all states but that at the beginning of the answer
        self._n_last = 0  # tokens of the last decode, whose states are kept
        self._taken_back = False  # since the last save
        self._return = 0  # length at the beginning of the answer
        self._saved: dict[int, _State] = {}  # by length, ascending
        self._spare: Any = None  # fresh memory costs more time than the copy
        self.n_again = 0 if n_kept else MOST_AGAIN // 2

    def expect_return(self, length: int) -> None:
        self._return = length

    def n_first(self, n_decoded: int, n_held: int) -> int:
        if n_held <= MOST_AGAIN:
            return 0
        n_before = self._return - n_decoded
        return n_before if 0 < n_before < n_held else n_held

    def before(self, call: Call, n_decoded: int, n_rows: int) -> None:
        n_again = n_decoded - max(self._saved, default=0)
        if n_again > 0 and (n_rows > self._n_kept + 1 or self._taken_back or n_again >= MOST_AGAIN):
            self._save(call, n_decoded)

    def after(self, n_tokens: int) -> None:
        self._n_last = n_tokens

    def back(self, call: Call, n_decoded: int, length: int) -> int | None:
        for at in [at for at in self._saved if at > length]:
            self._drop(at)
        is_kept = self._keeps(call, n_decoded, length)
        self._n_last = 0  # the kept states serve once
        if is_kept and call("llama_memory_seq_rm", self._memory, _LINE, length, -1):
            return length
        at = max(self._saved, default=0)
        if at and self._restore(call, at):
            self._taken_back = True
            return at
        call("llama_memory_clear", self._memory, False)
        self.forget()
        return 0

    def forget(self) -> None:
        self._saved.clear()
        self._n_last = 0

    def nearest(self, call: Call, n_decoded: int, length: int) -> int:
        if self._keeps(call, n_decoded, length):
            return length
        return max((at for at in self._saved if at <= length), default=0)

    def _keeps(self, call: Call, n_decoded: int, length: int) -> bool:
        # llama.cpp keeps a state for each token of the last decode, but accepts also lengths before it.
        return 0 < n_decoded - length < min(self._n_last, self._n_kept + 1)

    def _save(self, call: Call, length: int) -> None:
        flags = _PARTIAL | (_ON_DEVICE if self._on_device and length != self._return else 0)
        size = call("llama_state_seq_get_size_ext", self._context, _LINE, flags)
        buffer, self._spare = self._spare, None
        if buffer is None or len(buffer) != size:
            buffer = (ctypes.c_uint8 * size)()
        if flags & _ON_DEVICE:
            for at in [at for at, state in self._saved.items() if state.flags & _ON_DEVICE]:
                self._drop(at)
        if size and call("llama_state_seq_get_data_ext", self._context, buffer, size, _LINE, flags) == size:
            self._saved[length] = _State(buffer, flags)
            self._taken_back = False
        if len(self._saved) > self.most_saved:
            # Not the last two, the newer of which may hold rejected tokens, nor that for another answer. The closer a
            # state is to the one before, the less is computed again without it.
            stays = max((at for at in self._saved if at <= self._return), default=0)
            lengths = [0, *self._saved][:-2]
            _, at = min((high - low, high) for low, high in pairwise(lengths) if high != stays)
            self._drop(at)

    def _drop(self, length: int) -> None:
        self._spare = self._saved.pop(length).data

    def _restore(self, call: Call, length: int) -> bool:
        state = self._saved[length]
        return bool(
            call("llama_state_seq_set_data_ext", self._context, state.data, len(state.data), _LINE, state.flags)
            and call("llama_memory_seq_rm", self._memory, _LINE, length, -1)  # the cells of full attention
        )


class WindowCache(SavedStates):
    """The memory removes tokens; layers with a sliding window hold its tokens and those of one more batch.

    What a decode overwrites lies outside the window of its first token, so the tokens of the last decode can always be
    removed; more of them, as long as the window of the text that stays is there. The window at the beginning of the
    answer is saved, for another answer.
    """

    no_tree = "its cache holds the window of one path"
    most_saved = 1

    def __init__(self, context: object, memory: object, n_window: int) -> None:
        super().__init__(context, memory)
        self._n_window = n_window
        self.n_again = 0

    def n_first(self, n_decoded: int, n_held: int) -> int:
        n_before = self._return - n_decoded
        return n_before if MOST_AGAIN < n_before <= n_held else 0

    def before(self, call: Call, n_decoded: int, n_rows: int) -> None:
        near = self._return - MOST_AGAIN
        if n_rows and max(self._saved, default=0) < near <= n_decoded <= self._return:
            for at in list(self._saved):
                self._drop(at)
            self._save(call, n_decoded)

    def _keeps(self, call: Call, n_decoded: int, length: int) -> bool:
        first = max(0, length - self._n_window + 1)  # that the next token sees
        return length == 0 or call("llama_memory_seq_pos_min", self._memory, _LINE) <= first
