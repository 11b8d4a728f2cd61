"""Wrappers of a model: one that caches its rows, and one that records its calls so that they can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specllama.core.arrays import FloatArray
from specllama.core.constraint import Allowed, Constraint
from specllama.core.types import Growing, LanguageModel, Spelling, common_prefix, room_after


def growing(model: LanguageModel) -> Growing:
    """A model with `caps.tree`."""
    assert isinstance(model, Growing), "a tree for a model without caps.tree"
    return model


class Passing:
    """A model that forwards every call."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.n_ctx = model.n_ctx
        self.caps = model.caps

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.model.end_tokens

    @property
    def length(self) -> int:
        return self.model.length

    def room_after(self, tokens: Sequence[int]) -> int:
        return room_after(self.model, tokens)

    def feed(self, tokens: Sequence[int]) -> None:
        self.model.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        return self.model.eval(tokens, parents)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        return growing(self.model).grow(tokens, parents)

    def truncate(self, length: int) -> None:
        self.model.truncate(length)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.model.keep(length, path)


class Remembered(Passing):
    """A model that computes the logits after a text once: they are a function of the text alone.

    An enumeration can then read a text thousands of times, and its result is exact although the last bits of
    llama.cpp's logits depend on the block size. The wrapped model reads the paths of a tree as chains. `forget` frees
    the rows.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._tokens: list[int] = []  # by cell; after the pending token, nodes of a tree
        self._lines: list[tuple[int, ...]] = []  # the text through the pending token of the last eval, and each node
        self._held: list[int] = []  # tokens in the KV of the wrapped model
        self._rows: dict[tuple[int, ...], FloatArray] = {}

    @property
    def length(self) -> int:
        return len(self._tokens)

    def room_after(self, tokens: Sequence[int]) -> int:
        """The room of the wrapped model after the same text; see `types.Spelling`."""
        if not isinstance(self.model, Spelling):
            return self.n_ctx - self.length - len(tokens)
        text = (*self._tokens, *tokens)
        self._cut(common_prefix(self._held, text))
        return self.model.room_after(text[len(self._held) :])

    def feed(self, tokens: Sequence[int]) -> None:
        """Appends tokens; the wrapped model reads them when a later row is needed."""
        self._tokens.extend(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._lines = [(*self._tokens, tokens[0])]
        self._tokens.append(tokens[0])
        return self._add(tokens[1:], range(-1, len(tokens) - 2) if parents is None else parents, with_pending=True)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        return self._add(tokens, parents)

    def _add(self, tokens: Sequence[int], parents: Sequence[int], *, with_pending: bool = False) -> FloatArray:
        """Appends nodes and returns their rows."""
        n_known = 0 if with_pending else len(self._lines)
        for token, parent in zip(tokens, parents, strict=True):
            self._lines.append((*self._lines[parent + 1], token))
        self._tokens.extend(tokens)
        new = self._lines[n_known:]
        for line in sorted(new, key=len, reverse=True):  # a path in one pass
            self._after(line, len(self._lines[0]) - 1)
        rows = np.stack([self._rows[line] for line in new])
        rows.setflags(write=False)
        return rows

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def keep(self, length: int, path: Sequence[int]) -> None:
        self._tokens[length:] = [self._tokens[length + node] for node in path]

    def row(self, text: Sequence[int]) -> FloatArray:
        """The logits after `text`.  (V,)"""
        return self._after(tuple(text), len(text) - 1)[0]

    def forget(self) -> None:
        self._rows.clear()

    def _after(self, text: tuple[int, ...], n_before: int) -> list[FloatArray]:
        """The rows of `text` without its first `n_before` tokens; reads `text` from the first unknown row on."""
        prefixes = [text[: n + 1] for n in range(n_before, len(text))]
        for i, prefix in enumerate(prefixes):
            if prefix not in self._rows:
                self._read(text, n_before + i)
                break
        return [self._rows[prefix] for prefix in prefixes]

    def _cut(self, length: int) -> None:
        self.model.truncate(length)
        del self._held[length:]

    def _read(self, text: tuple[int, ...], n_known: int) -> None:
        """Reads `text` and stores its rows after the first `n_known` tokens."""
        n_kept = min(common_prefix(self._held, text), n_known)
        self._cut(n_kept)
        self.model.feed(text[n_kept:n_known])
        self._held.extend(text[n_kept:n_known])
        for at in range(n_known, len(text), self.caps.max_block):
            block = text[at : at + self.caps.max_block]
            rows = self.model.eval(block)
            self._held.extend(block)
            for i in range(len(block)):
                self._rows.setdefault(text[: at + i + 1], np.array(rows[i]))


class RememberedMasks:
    """What may follow each text of an answer in a format, computed once, for an enumeration of many answers."""

    def __init__(self, constraint: Constraint, said: Sequence[int], end_tokens: Collection[int]) -> None:
        """`said`: what the answers have already said."""
        constraint.advance(said)
        self._constraint, self._end_tokens = constraint, end_tokens
        self._known: dict[tuple[int, ...], Allowed] = {}

    def answer(self) -> Constraint:
        """The constraint of a new answer."""
        return _AnswerMasks(self.after, self._end_tokens)

    def after(self, text: tuple[int, ...]) -> Allowed:
        if text not in self._known:
            self._known[text] = self._constraint.allowed(text)
        return self._known[text]


class _AnswerMasks:
    def __init__(self, after: Callable[[tuple[int, ...]], Allowed], end_tokens: Collection[int]) -> None:
        self._after, self._end_tokens = after, end_tokens
        self._said: tuple[int, ...] = ()

    def allowed(self, path: Sequence[int]) -> Allowed:
        return self._after((*self._said, *path))

    def forced(self) -> Sequence[int]:
        path: list[int] = []
        while (only := self.allowed(path).only) is not None and only not in self._end_tokens:
            path.append(only)
        return path

    def advance(self, tokens: Sequence[int]) -> None:
        self._said += tuple(tokens)


class Undecided(Passing):
    """A draft that makes its favourite the third choice after two of three tokens.

    Any target accepts and rejects it in turn, even if it is the same file. So no fault stays hidden because a draft is
    too good.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._at: list[int] = []  # positions of the last eval's pending token and of the nodes after it

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._at = [self.length]
        rows = super().eval(tokens, parents)
        return self._changed(rows, tokens, range(-1, len(tokens) - 2) if parents is None else parents)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        return self._changed(super().grow(tokens, parents), tokens, parents)

    def _changed(self, rows: FloatArray, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        for parent in parents:
            self._at.append(self._at[parent + 1] + 1)
        rows = np.array(rows)
        for row, token, at in zip(rows, tokens, self._at[-len(tokens) :], strict=True):
            if (at + token) % 3:
                best = np.argpartition(row, -3)[-3:]
                first, second, third = best[np.argsort(-row[best], kind="stable")]
                row[[first, second, third]] = row[[second, third, first]]
        return rows


class Heard(Passing):
    """A model that calls `beat` after every pass."""

    def __init__(self, model: LanguageModel, beat: Callable[[], None]) -> None:
        super().__init__(model)
        self._beat = beat

    def feed(self, tokens: Sequence[int]) -> None:
        super().feed(tokens)
        self._beat()

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = super().eval(tokens, parents)
        self._beat()
        return rows


@dataclass(frozen=True, slots=True)
class Op:
    """A call that changed a KV cache; the KV had the length `at` before it, or has it after a cut."""

    kind: Literal["feed", "eval", "grow", "cut", "keep"]
    at: int
    tokens: tuple[int, ...] = ()
    nodes: tuple[int, ...] | None = None  # the parents (None = a chain), or the kept path


class Recorded(Passing):
    """A model that records the calls that made its KV cache."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.ops: list[Op] = []

    def empty(self) -> None:
        """Clears the KV cache and the record."""
        self.model.truncate(0)
        self.ops.clear()

    def feed(self, tokens: Sequence[int]) -> None:
        self.ops.append(Op("feed", self.length, tuple(tokens)))
        self.model.feed(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self.ops.append(Op("eval", self.length, tuple(tokens), None if parents is None else tuple(parents)))
        return self.model.eval(tokens, parents)

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        self.ops.append(Op("grow", self.length, tuple(tokens), tuple(parents)))
        return super().grow(tokens, parents)

    def truncate(self, length: int) -> None:
        self.ops.append(Op("cut", length))
        self.model.truncate(length)

    def keep(self, length: int, path: Sequence[int]) -> None:
        self.ops.append(Op("keep", length, nodes=tuple(path)))
        self.model.keep(length, path)


def _owners(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """(op, index) of the token at each position of the final KV cache."""
    held: list[tuple[int, int]] = []
    for i, op in enumerate(ops):
        if op.kind == "keep":
            held[op.at :] = [held[op.at + node] for node in op.nodes or ()]
        else:
            del held[op.at :]
            held.extend((i, j) for j in range(len(op.tokens)))
    return held


def _places(ops: Sequence[Op]) -> dict[tuple[int, int], int]:
    """The position in the final KV cache of every token, as (op, index), that is still there."""
    return {owner: position for position, owner in enumerate(_owners(ops))}


def held(ops: Sequence[Op]) -> tuple[int, ...]:
    """The tokens that these calls leave in the KV cache."""
    return tuple(ops[i].tokens[j] for i, j in _owners(ops))


def n_dropped(ops: Sequence[Op]) -> int:
    """Number of tokens that were read and are no longer there."""
    return sum(len(op.tokens) for op in ops) - len(_owners(ops))


Change = Callable[[int, int], int]  # (position, token) -> token


def again(
    model: LanguageModel,
    ops: Sequence[Op],
    *,
    stale: Change | None = None,
    kept: Change = lambda position, token: token,
    want: int | None = None,
) -> FloatArray | None:
    """Clears `model` and repeats the calls, without a draft; returns the row at position `want`.

    `stale` replaces the tokens that were dropped, in blocks and trees of the same shape: a correct rollback leaves no
    trace of them. Without `stale` they are not read, and what is kept of a tree is read as a chain. `kept` may change
    the other tokens.
    """
    model.truncate(0)
    found, places = None, _places(ops)
    for i, op in enumerate(ops):
        if op.kind == "cut" and stale is not None:
            model.truncate(op.at)
        elif op.kind == "keep" and stale is not None:
            model.keep(op.at, op.nodes or ())
        tokens: list[int] = []
        wanted = None
        for j, token in enumerate(op.tokens):
            position = places.get((i, j))
            if position is not None:
                wanted = len(tokens) if position == want else wanted
                tokens.append(kept(position, token))
            elif stale is not None:
                tokens.append(stale(op.at + j, token))
        if not tokens:
            continue
        if op.kind == "feed":
            model.feed(tokens)
            continue
        if stale is None:
            rows = model.eval(tokens)
        elif op.kind == "grow":
            rows = growing(model).grow(tokens, op.nodes or ())
        else:
            rows = model.eval(tokens, op.nodes)
        if wanted is not None:
            found = np.array(rows[wanted])
    return found
