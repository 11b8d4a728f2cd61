"""One slot of a shared model, as the `LanguageModel` of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specllama.base.clock import perf_counter
from specllama.base.errors import BackendError, SpecllamaError, error_of_request
from specllama.core.arrays import FloatArray
from specllama.core.kept_prefix import require_room
from specllama.core.types import Cancel, Part, Resuming, SlotModel


@dataclass(slots=True, eq=False)
class Want:
    """What a request waits for: logits after `tokens`, which follow `unread`."""

    view: SlotView
    unread: list[int]  # read first, without logits, in as many passes as it takes
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None
    grows: bool
    asked_s: float = field(default_factory=perf_counter)
    in_passes_s: float = 0.0  # spent in passes that read some of it

    @property
    def is_chain(self) -> bool:
        return self.parents is None and not self.grows

    def reading(self, n: int) -> Part:
        """The next `n` unread tokens."""
        return Part(self.view.slot, tuple(self.unread[:n]), 0)

    def whole(self) -> Part:
        """All that is left."""
        return Part(self.view.slot, (*self.unread, *self.tokens), len(self.tokens), self.parents, self.grows)


class SlotView:
    """Implements `types.LanguageModel`, `Growing` and `Resuming`.

    `wait` has a want computed in a pass for many requests.
    Tokens of `feed` are read with the next `eval`, which takes one pass instead of two if they are few.
    """

    def __init__(self, slots: SlotModel, slot: int, wait: Callable[[Want], FloatArray]) -> None:
        self.slots, self.slot, self._wait = slots, slot, wait
        self.vocab_size, self.n_ctx, self.end_tokens = slots.vocab_size, slots.n_ctx, slots.end_tokens
        self.caps = replace(slots.caps, max_block=min(slots.caps.max_block, slots.max_rows, slots.max_outputs))
        self._resuming = slots if isinstance(slots, Resuming) else None
        self._unread: list[int] = []
        self.busy_s = 0.0  # in calls: in passes, and waiting for them
        self.kv_s = 0.0  # in `truncate` and `keep`
        self.failure: SpecllamaError | None = None  # of `truncate` or `keep`: the slots of others may be empty

    @property
    def length(self) -> int:
        return self.slots.length(self.slot) + len(self._unread)

    def feed(self, tokens: Sequence[int]) -> None:
        require_room(self.n_ctx, self.length, len(tokens))
        self._unread.extend(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Raises ContextFull, and what a pass raises; unread tokens that no pass has read are then gone."""
        return self._computed(tokens, None if parents is None else tuple(parents), grows=False)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        return self._computed(tokens, tuple(parents), grows=True)

    def _computed(self, tokens: Sequence[int], parents: tuple[int, ...] | None, *, grows: bool) -> FloatArray:
        require_room(self.n_ctx, self.length, len(tokens))
        want = Want(self, self._unread, tuple(tokens), parents, grows)
        try:
            return self._wait(want)
        finally:
            self._unread = []
            self.busy_s += perf_counter() - want.asked_s

    def truncate(self, length: int) -> None:
        n_read = self.slots.length(self.slot)
        del self._unread[max(length - n_read, 0) :]
        if length < n_read:
            with self._changing():
                self.slots.truncate(self.slot, length)

    def resume_at(self, length: int) -> int:
        return length if self._resuming is None else self._resuming.resume_at(length)

    def expect_return(self, tokens: Sequence[int]) -> None:
        if self._resuming is not None:
            self._resuming.expect_return([*self._unread, *tokens])

    def keep(self, length: int, path: Sequence[int]) -> None:
        with self._changing():
            self.slots.keep(self.slot, length, path)

    def watch(self, cancel: Cancel | None) -> None:
        """The pool watches for all slots."""

    def close(self) -> None:
        """The pool closes the model."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The time of a change of the KV, and its failure."""
        start_s = perf_counter()
        try:
            yield
        except Exception as error:
            self.failure = error_of_request(error)
            if self.failure is error:
                raise
            self.failure = BackendError(str(self.failure), hint=self.failure.hint)
            raise self.failure from error
        seconds = perf_counter() - start_s
        self.busy_s += seconds
        self.kv_s += seconds
