"""What a model's KV is known to hold, and the lease that lets one answer at a time change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import ClassVar
from weakref import WeakValueDictionary

from specllama.base.errors import ContextFull, ModelBusy, PairError, PromptError
from specllama.base.text import counted
from specllama.core.arrays import FloatArray
from specllama.core.types import Adapter, Growing, LanguageModel, Narrow, Recording, Resuming, common_prefix


class KeptPrefix:
    """The tokens in the KV of `model`, as far as they are known. All users of a model share its `KeptPrefix.of`."""

    # By the model's id. An entry keeps its model alive, so the id is not given to another model meanwhile.
    _known: ClassVar[WeakValueDictionary[int, KeptPrefix]] = WeakValueDictionary()
    _making: ClassVar[RLock] = RLock()  # two threads must not make two records for one model

    @classmethod
    def of(cls, model: LanguageModel) -> KeptPrefix:
        """The only record of this model: with two records, each user would take the other's tokens for its own."""
        with cls._making:
            if (known := cls._known.get(id(model))) is None:
                known = cls._known[id(model)] = cls(model)
            return known

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        # Kept as long as the record of an adapter, or the next answer would not know who had the last one.
        self._owner = KeptPrefix.of(model.model) if isinstance(model, Adapter) else self
        self._growing = model if isinstance(model, Growing) else None
        self._resuming = model if isinstance(model, Resuming) else None
        self._tokens: list[int] = []
        self._tree: list[tuple[int, int]] = []  # (token, parent) of the nodes that `grow` added after them
        self._line: object = None  # marks the text that the record was last compared with
        self._n_same = 0  # tokens of the record that lead to it
        self._in_use = Lock()
        self._left: tuple[LanguageModel, list[int] | None] | None = None  # by the last answer: its model, what was held

    @contextmanager
    def lease(self) -> Iterator[None]:
        """The KV belongs to one answer until the block ends. Raises ModelBusy if it belongs to another."""
        if not self._in_use.acquire(blocking=False):
            raise ModelBusy(
                "the model is busy with another answer (one answer at a time)",
                hint="read the first answer to its end, or call close() on its iterator",
            )
        try:
            yield
        finally:
            self._in_use.release()

    @contextmanager
    def used_by(self, model: LanguageModel) -> Iterator[None]:
        """An answer uses the KV through `model`, an adapter or the model itself.

        The KV is emptied first if another user changed it since the last answer: records that go by its length, in
        adapters as well, would take other tokens of the same number for their own.
        """
        if self._left is not None and (self._left[0] is not model or self._left[1] != self._held()):
            model.truncate(0)
        try:
            yield
        finally:
            self._left = model, self._held()

    def _held(self) -> list[int] | None:
        """The tokens in the KV; None if the model does not record them."""
        return list(self._model.tokens) if isinstance(self._model, Recording) else None

    def rewind(self, tokens: Sequence[int], line: object = None) -> int:
        """Cut the KV to the longest prefix of `tokens[:-1]` that it need not compute again; returns its length.

        `line` marks a text that only grows; a call without the mark of the last one begins an answer. The tokens kept
        by the last call with the same mark are not compared again: over a long context the comparison takes longer than
        the sampling of a step.
        """
        # After another user, the contents are unknown (see `used_by`).
        if self._model.length != len(self._tokens) + len(self._tree):
            self._tokens, self._tree, self._line = [], [], None
        same_text = line is not None and line is self._line
        if same_text and not self._tree and self._n_same == len(self._tokens) < len(tokens):
            return self._n_same  # the text has only grown, as in steps without this model
        n_same = self._n_same if same_text else 0
        n_kept = n_same + common_prefix(self._tokens[n_same:], tokens[n_same : len(self._tokens)])
        n_kept = min(n_kept, len(tokens) - 1)
        path = self._path(tokens[n_kept:-1]) if self._tree and n_kept == len(self._tokens) else []
        if self._resuming is not None and not path:
            n_kept = self._resuming.resume_at(n_kept)
        if path:
            self._model.keep(n_kept, path)
        else:
            self._cut(n_kept)
        self._tokens[n_kept:] = (self._tree[node][0] for node in path)
        self._tree.clear()
        if self._resuming is not None and (line is None or line is not self._line):
            self._resuming.expect_return(tokens[len(self._tokens) : -1])
        self._line, self._n_same = line, len(self._tokens)
        return len(self._tokens)

    def _path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the tree that hold the longest beginning of `tokens`."""
        path: list[int] = []
        for token in tokens:
            step = (token, path[-1] if path else -1)
            if step not in self._tree:
                break
            path.append(self._tree.index(step))
        return path

    def feed(self, tokens: Sequence[int]) -> None:
        """`model.feed`, recorded as far as it came."""
        if tokens:
            self._tokens.extend(tokens)
            try:
                self._model.feed(tokens)
            finally:
                self._settle()

    def eval(self, tokens: Sequence[int], known: Narrow | None = None) -> FloatArray:
        """`model.eval` of a chain, recorded; `known.eval_known` if `known` is given.  (len(tokens), V)"""
        self._tokens.extend(tokens)
        try:
            return self._model.eval(tokens) if known is None else known.eval_known(tokens)
        finally:
            self._settle()

    def grow(self, tokens: Sequence[int], parents: Sequence[int], known: Narrow | None = None) -> FloatArray:
        """`model.grow` after an `eval` of one token, recorded; `known.grow_known` if `known` is given.

        Siblings must differ.  (len(tokens), V)
        """
        assert self._growing is not None, "a tree for a model that reads only chains"
        self._tree.extend(zip(tokens, parents, strict=True))
        try:
            return self._growing.grow(tokens, parents) if known is None else known.grow_known(tokens, parents)
        finally:
            self._settle()

    def _settle(self) -> None:
        """After a call that may have failed: the record is no longer than the KV."""
        del self._tree[max(self._model.length - len(self._tokens), 0) :]
        del self._tokens[self._model.length :]
        self._n_same = min(self._n_same, len(self._tokens))

    def hold(self, tokens: Sequence[int]) -> None:
        """Cut the KV to `tokens[:-1]`, or to the part of it that was prefilled, and record it."""
        n_held = min(self._model.length, len(tokens) - 1)
        self._cut(n_held)
        self._tokens, self._tree = list(tokens[:n_held]), []

    def _cut(self, length: int) -> None:
        if self._model.length > length:
            self._model.truncate(length)


def require_fitting(prompt: Sequence[int], n_ctx: int) -> None:
    """Raises PromptError for a prompt without tokens, or with more than the KV holds."""
    if not prompt:
        raise PromptError("the prompt has no tokens", hint="give some text, or a template that begins with a token")
    if len(prompt) > n_ctx:
        raise PromptError(
            f"the prompt has {counted(len(prompt), 'token')}, the context holds {n_ctx}",
            hint="shorten it, or use a longer context if the model was trained for one",
        )


def require_room(n_ctx: int, n_held: int, n_new: int) -> None:
    """Raises ContextFull if a KV of `n_ctx` tokens that holds `n_held` cannot take `n_new` more."""
    if n_held + n_new > n_ctx:
        raise ContextFull(
            f"the context of {n_ctx} tokens has no room for {counted(n_new, 'token')} after {n_held}",
            hint="use a longer context (--ctx-size)",
        )


def kv_owners(*models: LanguageModel) -> list[LanguageModel]:
    """The models whose KVs `models` use, behind their adapters. Raises PairError if two use the same KV."""
    owners: list[LanguageModel] = []
    for model in models:
        while isinstance(model, Adapter):
            model = model.model
        if any(model is other for other in owners):
            raise PairError(
                "target and draft are the same loaded model (two models were expected)",
                hint="load the draft a second time, or draft without a model",
            )
        owners.append(model)
    return owners


@contextmanager
def leased(*models: LanguageModel) -> Iterator[None]:
    """Lease the KVs of all `models` for one answer. Raises as `KeptPrefix.lease` and `kv_owners` do."""
    with ExitStack() as stack:
        for owner, model in zip(kv_owners(*models), models, strict=True):
            record = KeptPrefix.of(owner)
            stack.enter_context(record.lease())
            stack.enter_context(record.used_by(model))
        yield
