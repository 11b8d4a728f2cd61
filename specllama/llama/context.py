"""A context of llama.cpp: calls that are timed and can be stopped, batches, logits, and errors with a name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from specllama.base.clock import perf_counter
from specllama.base.errors import BackendError, ContextFull, Interrupted, MemoryShort, SpecllamaError
from specllama.base.text import counted
from specllama.core.arrays import FloatArray
from specllama.core.types import Cancel
from specllama.llama.bindings import abort_callback, log
from specllama.llama.header import Header
from specllama.llama.load_plan import LoadPlan
from specllama.llama.open import Native

_OK, _NO_SLOT, _ABORTED, _INVALID_BATCH, _NO_MEMORY = 0, 1, 2, -1, -2  # what llama_decode returns
Self = TypeVar("Self", bound="Context")


class Context:
    """What `LlamaModel` and `LlamaSlots` have in common. Both know what the KV cache holds; this class does not."""

    n_ctx: int  # tokens of a text

    def __init__(self, native: Native, about: Header, plan: LoadPlan, vocab_size: int, n_shared: int) -> None:
        """`n_shared`: most of llama.cpp's sequences that one token may be in."""
        lib, pointers = native.pointers.lib, native.pointers
        self._native = native
        self._lib = lib
        self._context = pointers.context
        self._memory = lib.llama_get_memory(pointers.context)
        self._batch = Batch(lib, plan.n_batch, n_shared)
        self._views: dict[tuple[int, int], FloatArray] = {}  # (address, rows) -> logits
        self.path = about.path
        self.plan = plan
        self.vocab_size = vocab_size
        self.busy_s = 0.0  # time in llama.cpp since loading
        self.watch(None)

    def watch(self, cancel: Cancel | None) -> None:
        """Stop a long computation within one graph node of `cancel.set()`, on CPU back ends; None ends the watch."""
        self._require_open()
        pointers = self._native.pointers
        pointers.cancel = cancel or Cancel()
        buffer = pointers.cancel.buffer
        flag = (ctypes.c_char * len(buffer)).from_buffer(buffer)  # also forbids resizing the buffer
        function = abort_callback(self._lib)
        self._lib.llama_set_abort_callback(self._context, function, ctypes.addressof(flag))
        pointers.callbacks[:] = [flag, function]

    def close(self) -> None:
        """Free what C holds, and stop a computation in another thread. All logits become invalid."""
        self._views.clear()
        self._native.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._native.pointers.closed:
            raise BackendError(f"{self.path.name} is closed")

    def _require_room(self, length: int, n_new: int) -> None:
        self._require_open()
        if length + n_new > self.n_ctx:
            raise ContextFull(
                f"the context of {self.n_ctx} tokens has no room for {counted(n_new, 'token')} after {length}",
                hint="use a longer context (--ctx-size)",
            )

    def _call(self, name: str, *arguments: object) -> Any:
        return self._timed(getattr(self._lib, name), *arguments)

    def _timed(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call llama.cpp: the time counts as busy, and `close` waits."""
        pointers = self._native.pointers
        start_s = perf_counter()
        try:
            pointers.in_call = True  # before the check: `close` uses the other order
            self._require_open()
            return function(*arguments)
        finally:
            self.busy_s += perf_counter() - start_s
            pointers.in_call = False
            log.read()

    def _compute(self, tokens: Sequence[int]) -> None:
        """Decode the batch, which holds `tokens`. Raises the error of llama.cpp's return code."""
        status = self._timed(self._lib.llama_decode, self._context, self._batch.batch)
        if status != _OK:
            raise self._failure(status, tokens)

    def _failure(self, status: int, tokens: Sequence[int]) -> SpecllamaError:
        if status == _ABORTED:
            return Interrupted("the computation was stopped on request")
        if status == _NO_SLOT:
            return ContextFull(
                f"the KV cache has no room for {counted(len(tokens), 'token')}",
                hint="use a longer context (--ctx-size)",
            )
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if status == _INVALID_BATCH and wrong:
            return BackendError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size} tokens")
        reason = log.reason() or f"return code {status}"
        log.clear()  # not the reason of a later failure
        if status == _NO_MEMORY:
            return MemoryShort(f"llama.cpp ran out of memory: {reason}", hint="use a shorter context (--ctx-size)")
        return BackendError(
            f"llama.cpp failed to compute {counted(len(tokens), 'token')}: {reason}", hint="run `specllama doctor`"
        )

    def _logits(self, n_rows: int) -> FloatArray:
        """The logits of the last decode, one row per output in the order of the batch."""
        pointer = self._timed(self._lib.llama_get_logits, self._context)
        key = (ctypes.addressof(pointer.contents), n_rows)
        view = self._views.get(key)
        if view is None:  # the buffer moves only when it grows, so a session needs few views
            array = (ctypes.c_float * (n_rows * self.vocab_size)).from_address(key[0])
            view = np.ctypeslib.as_array(array).reshape(n_rows, self.vocab_size)
            view.flags.writeable = False
            self._views[key] = view
        return view


class Batch:
    """A llama_batch on arrays of numpy."""

    def __init__(self, lib: Any, capacity: int, n_lines: int) -> None:
        self._token, self._position, self._n_lines = (np.zeros(capacity, np.int32) for _ in range(3))
        self._output = np.zeros(capacity, np.int8)
        self._lines = np.zeros((capacity, n_lines), np.int32)
        rows = self._lines.ctypes.data + np.arange(capacity, dtype=np.uintp) * np.uintp(self._lines.strides[0])
        self._rows: npt.NDArray[np.uintp] = rows
        fields = {name: kind for name, kind, *_ in lib.llama_batch._fields_}
        self.batch = lib.llama_batch(
            token=ctypes.cast(self._token.ctypes.data, fields["token"]),
            pos=ctypes.cast(self._position.ctypes.data, fields["pos"]),
            n_seq_id=ctypes.cast(self._n_lines.ctypes.data, fields["n_seq_id"]),
            seq_id=ctypes.cast(self._rows.ctypes.data, fields["seq_id"]),
            logits=ctypes.cast(self._output.ctypes.data, fields["logits"]),
        )

    def fill(
        self, tokens: Sequence[int], positions: Sequence[int], lines: Sequence[Sequence[int]], outputs: Sequence[bool]
    ) -> None:
        """Put tokens at positions into the sequences `lines` of llama.cpp, one entry of each for every token.

        `outputs`: True = a row of logits.
        """
        self.batch.n_tokens = len(tokens)
        # One by one: of the few tokens of a step, faster than whole columns.
        for i, (token, position, each, output) in enumerate(zip(tokens, positions, lines, outputs, strict=True)):
            self._token[i], self._position[i], self._output[i], self._n_lines[i] = token, position, output, len(each)
            for j, line in enumerate(each):
                self._lines[i, j] = line
