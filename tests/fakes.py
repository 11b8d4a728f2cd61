"""Fakes: tables of logits, a model with a checked KV, drafters and stoppers that follow a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

import numpy as np

from specllama.audit.enumeration import ContractBroken
from specllama.base.errors import BackendError, ContextFull, Interrupted
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.types import Cancel, Caps, Chooser, Draft, Observation, Part

History: TypeAlias = tuple[int, ...]
Table: TypeAlias = Callable[[History], FloatArray]  # history -> logits (V,)
Probs: TypeAlias = tuple[float, ...]
Laws: TypeAlias = Callable[[History], Probs]  # history -> probabilities (V,)
Hook: TypeAlias = Callable[[int, str], None]  # before every model call: its number (from 0) and its name


class RandomTable:
    """Seeded random logits that depend on the whole history, so that one wrong token in a KV changes them all.

    `ties` rounds to whole numbers, which makes equal logits common. `masked` is the share of entries at -inf; the
    largest entry stays finite. Rows are kept: a table is shared between the many replays of one enumeration.
    """

    def __init__(
        self, vocab_size: int, seed: int, *, spread: float = 1.5, ties: bool = False, masked: float = 0.0
    ) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._spread = spread
        self._ties = ties
        self._masked = masked
        self._rows: dict[History, FloatArray] = {}

    def __call__(self, history: History) -> FloatArray:
        if history not in self._rows:
            self._rows[history] = self._draw(history)
        return self._rows[history]

    def _draw(self, history: History) -> FloatArray:
        # The length is part of the seed, and ids start at 1: a SeedSequence ignores trailing zeros.
        rng = np.random.default_rng([self._seed, len(history), *(token + 1 for token in history)])
        row = self._spread * rng.standard_normal(self.vocab_size)
        if self._ties:
            row = np.round(row)
        hidden = rng.random(self.vocab_size) < self._masked
        hidden[int(row.argmax())] = False
        row[hidden] = -np.inf
        return row.astype(np.float32)


def table_of(laws: Laws) -> Table:
    """Logits whose softmax is `laws`, up to the rounding of float32."""

    def table(history: History) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(laws(history), dtype=np.float64)).astype(np.float32)

    return table


@cache
def dense(probs: Probs) -> Distribution:
    """`Distribution.dense`, cached: an enumeration asks for the same few again and again."""
    return Distribution.dense(probs)


def always(probs: Probs) -> Laws:
    """The same law after every history."""
    return lambda history: probs


def replaced(table: Table, at_length: int, value: float, token: int = 0) -> Table:
    """`table`, with one logit replaced in every row that follows a history of `at_length` tokens."""

    def changed(history: History) -> FloatArray:
        row = table(history)
        if len(history) == at_length:
            row = row.copy()
            row[token] = value
        return row

    return changed


def random_laws(vocab_size: int, seed: int, *, zeros: float = 0.0) -> Laws:
    """Seeded random probabilities that depend on the whole history; `zeros` is the share of exact zeros."""
    table = RandomTable(vocab_size, seed, masked=zeros)

    @cache
    def laws(history: History) -> Probs:
        weights = [math.exp(logit) for logit in table(history).tolist()]
        return tuple(weight / math.fsum(weights) for weight in weights)

    return laws


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a fake model, as recorded."""

    name: str
    tokens: tuple[int, ...] = ()
    length: int = 0  # of the KV, before the call


@dataclass(slots=True)
class FakeModel:
    """A `LanguageModel` over a table of logits, with a KV that checks how it is used.

    It raises ContractBroken unless ids lie in the vocabulary; `eval` and `grow` get 1 to `caps.max_block` tokens,
    parents before children, with at most `caps.max_leaves` leaves; `grow` follows an `eval` or `grow`; a tree with
    branches is followed by `keep`, or by a `truncate` to the pending token or below; `keep` names the pending token of
    the last `eval` and a path from its root. Rows are read-only views and turn into NaN with the next `feed`, `eval` or
    `grow`. A full context raises ContextFull. `hook` is called before every call and may raise; an Interrupted in
    `feed` leaves the first half of its tokens in the KV, as an aborted prefill does.
    """

    table: Table
    vocab_size: int
    n_ctx: int = 64
    end_tokens: frozenset[int] = frozenset()
    caps: Caps = field(default_factory=lambda: Caps(tree=True, max_leaves=32))
    hook: Hook = lambda n_call, name: None
    calls: list[Call] = field(default_factory=list)
    watched: Cancel | None = None
    closed: bool = False
    _kv: list[int] = field(default_factory=list)
    _rows: FloatArray | None = None  # owns the memory of the view that the last eval returned
    _pending_at: int | None = None  # index in the KV of the last eval's first token, while `keep` is possible
    _parents: tuple[int, ...] = ()  # of the last eval's nodes

    @property
    def length(self) -> int:
        return len(self._kv)

    @property
    def tokens(self) -> History:
        return tuple(self._kv)

    def count(self, name: str) -> int:
        return sum(call.name == name for call in self.calls)

    def feed(self, tokens: Sequence[int]) -> None:
        self._require_line()
        try:
            self._record("feed", tokens)
        except Interrupted:
            self._append(tokens[: len(tokens) // 2])
            raise
        self._append(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._require_line()
        if parents is not None and not self.caps.tree:
            raise ContractBroken("parents given to a model that cannot do trees")
        chain = range(-1, len(tokens) - 2)
        return self._decode("eval", tokens, self.length, tuple(chain if parents is None else parents))

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        if self._pending_at is None or not self.caps.tree or len(parents) != len(tokens):
            raise ContractBroken(f"grow of {len(tokens)} tokens with {len(parents)} parents; a tree must be open")
        return self._decode("grow", tokens, self._pending_at, (*self._parents, *parents))

    def _decode(self, name: str, tokens: Sequence[int], pending_at: int, layout: tuple[int, ...]) -> FloatArray:
        """Appends `tokens` to the tree whose pending token is at `pending_at`; `layout`: its parents, with the new."""
        n_nodes = self.length + len(tokens) - pending_at - 1
        if not 1 <= len(tokens) <= self.caps.max_block:
            raise ContractBroken(f"{name} of {len(tokens)} tokens, expected 1 to {self.caps.max_block}")
        if len(layout) != n_nodes or any(not -1 <= parent < i for i, parent in enumerate(layout)):
            raise ContractBroken(f"parents {layout} do not lay out {n_nodes} nodes")
        if len(set(range(n_nodes)) - set(layout)) > self.caps.max_leaves:
            raise ContractBroken(f"parents {layout} have more than {self.caps.max_leaves} leaves")
        self._record(name, tokens)
        self._append(tokens)
        self._pending_at, self._parents = pending_at, layout
        lines = [self.tokens[: pending_at + 1]]
        for token, parent in zip(self.tokens[pending_at + 1 :], layout, strict=True):
            lines.append((*lines[parent + 1], token))
        self._rows = np.array([self.table(line) for line in lines[-len(tokens) :]])
        view = self._rows.view()
        view.setflags(write=False)
        return view

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ContractBroken(f"truncate to {length} of {self.length} tokens")
        if self._branches() and self._pending_at is not None and length > self._pending_at + 1:
            raise ContractBroken("truncate into a tree, where an index is no position")
        self._record("truncate", ())
        del self._kv[length:]
        self._pending_at, self._parents = None, ()

    def keep(self, length: int, path: Sequence[int]) -> None:
        if self._pending_at is None or length != self._pending_at + 1:
            raise ContractBroken(f"keep({length}, ...), but the pending token is at {self._pending_at}")
        for parent, node in zip((-1, *path), path, strict=False):
            if not 0 <= node < len(self._parents) or self._parents[node] != parent:
                raise ContractBroken(f"path {tuple(path)} is no line from the root of {self._parents}")
        self._record("keep", ())
        self._kv[length:] = [self._kv[length + node] for node in path]
        self._pending_at, self._parents = None, ()

    def watch(self, cancel: Cancel | None) -> None:
        self.watched = cancel

    def close(self) -> None:
        self.closed = True

    def _record(self, name: str, tokens: Sequence[int]) -> None:
        n_call = len(self.calls)
        self.calls.append(Call(name, tuple(tokens), self.length))
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ContractBroken(f"token {token} in a vocabulary of {self.vocab_size}")
        self.hook(n_call, name)
        if self.length + len(tokens) > self.n_ctx:
            raise ContextFull(f"{self.length} + {len(tokens)} tokens in a context of {self.n_ctx}")

    def forget_rows(self) -> None:
        """Turn the rows of the last `eval` or `grow` into NaN."""
        if self._rows is not None:
            self._rows.fill(np.nan)
            self._rows = None

    def _append(self, tokens: Sequence[int]) -> None:
        if len(tokens):
            self.forget_rows()
        self._kv.extend(int(token) for token in tokens)
        self._pending_at, self._parents = None, ()

    def _branches(self) -> bool:
        return any(parent != node - 1 for node, parent in enumerate(self._parents))

    def _require_line(self) -> None:
        if self._branches():
            raise ContractBroken("feed or eval after a tree, before keep")


@dataclass(slots=True)
class FakeSlots:
    """A `SlotModel`: one `FakeModel` per slot, with its checks. `hook` is called before every pass and may raise.

    It raises ContractBroken for a pass without parts, of more than `max_rows` tokens, with two parts of one slot, or
    with tokens before a tree. Rows of all slots turn into NaN with the next pass. As promised, an error of a pass
    leaves every slot empty.
    """

    table: Table
    vocab_size: int
    n_slots: int
    n_ctx: int = 64
    end_tokens: frozenset[int] = frozenset()
    caps: Caps = field(default_factory=lambda: Caps(tree=True, max_leaves=32))
    max_rows: int = 64
    max_outputs: int = 64
    hook: Hook = lambda n_call, name: None
    passes: list[tuple[Part, ...]] = field(default_factory=list)
    shared: History = ()
    watched: Cancel | None = None
    slots: list[FakeModel] = field(init=False)

    def __post_init__(self) -> None:
        made = (self.table, self.vocab_size, self.n_ctx, self.end_tokens, self.caps)
        self.slots = [FakeModel(*made) for _ in range(self.n_slots)]

    def length(self, slot: int) -> int:
        return self.slots[slot].length

    def run(self, parts: Sequence[Part]) -> list[FloatArray]:
        used, n_tokens = {part.slot for part in parts}, sum(len(part.tokens) for part in parts)
        if not parts or len(used) < len(parts) or n_tokens > self.max_rows or not all(part.tokens for part in parts):
            raise ContractBroken(f"a pass of {len(parts)} parts, {len(used)} slots and {n_tokens} tokens")
        if sum(part.n_rows for part in parts) > self.max_outputs:
            raise ContractBroken(f"a pass of more than {self.max_outputs} rows of logits")
        if any((part.grows or part.parents) and part.n_rows < len(part.tokens) for part in parts):
            raise ContractBroken("tokens without logits before a tree")
        self.passes.append(tuple(parts))
        for model in self.slots:
            model.forget_rows()
        try:
            self.hook(len(self.passes) - 1, "run")
            return [self._computed(part) for part in parts]
        except BackendError:
            for slot in range(self.n_slots):
                self.truncate(slot, 0)
            raise

    def _computed(self, part: Part) -> FloatArray:
        model, n_read = self.slots[part.slot], len(part.tokens) - part.n_rows
        if n_read:
            model.feed(part.tokens[:n_read])
        if part.grows:
            assert part.parents is not None
            return model.grow(part.tokens, part.parents)
        return model.eval(part.tokens[n_read:], part.parents) if part.n_rows else np.empty((0, self.vocab_size))

    def truncate(self, slot: int, length: int) -> None:
        self.slots[slot].truncate(length)

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        self.slots[slot].keep(length, path)

    def share(self, tokens: Sequence[int]) -> None:
        if any(model.length for model in self.slots):
            raise ContractBroken("share with tokens in a slot")
        self.hook(len(self.passes), "share")
        self.shared = tuple(tokens)
        for model in self.slots:
            model.feed(tokens)

    def watch(self, cancel: Cancel | None) -> None:
        self.watched = cancel

    def close(self) -> None:
        """Nothing to free."""


Script: TypeAlias = Callable[[History, int, Chooser], Draft]  # (tokens, limit, choose) -> at most `limit` tokens


def points(tokens_at: Callable[[History], Sequence[int]]) -> Script:
    """Proposes the tokens of a function as point masses."""
    return lambda tokens, limit, choose: Draft(tuple(tokens_at(tokens))[:limit])


def drawn_chain(laws: Laws, n_max: int) -> Script:
    """Draws a chain of `n_max` tokens from `laws`."""
    return drawn_tree(laws, (1,) * n_max)


def drawn_tree(laws: Laws, widths: Sequence[int]) -> Script:
    """Draws a tree from `laws`: every node of depth d has `widths[d]` children, drawn without replacement.

    Each sibling's `probs` entry is the law before any sibling was removed. Levels are drawn until `limit` nodes stand.
    """

    def script(tokens: History, limit: int, choose: Chooser) -> Draft:
        lines, drawn, probs, parents = [tokens], [], [], []
        level = [-1]
        for width in widths:
            children = []
            for parent in level:
                law = laws(lines[parent + 1])
                for token in drawn_siblings(law, min(width, limit - len(drawn)), choose):
                    children.append(len(drawn))
                    lines.append((*lines[parent + 1], token))
                    drawn.append(token)
                    probs.append(dense(law))
                    parents.append(parent)
            level = children
        chain = all(width == 1 for width in widths)
        return Draft(tuple(drawn), tuple(probs), None if chain else tuple(parents))

    return script


def drawn_siblings(law: Probs, width: int, choose: Chooser, taken: History = ()) -> History:
    """At most `width` tokens drawn from `law` without replacement and without those of `taken`."""
    drawn: History = ()
    for token in taken:
        law = _without(law, token)
    while len(drawn) < width and any(law):
        drawn = (*drawn, choose.pick(dense(law)))
        law = _without(law, drawn[-1])
    return drawn


@cache
def _without(law: Probs, token: int) -> Probs:
    """`law` given that the draw is not `token`; zeros where nothing is left."""
    rest = math.fsum(prob for i, prob in enumerate(law) if i != token)
    return tuple(0.0 if i == token or not rest else prob / rest for i, prob in enumerate(law))


@dataclass(slots=True)
class ScriptedDrafter:
    """Proposes what its script says and records its calls."""

    script: Script
    name: str = "scripted"
    wants: frozenset[str] = frozenset()
    begun: list[History] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)
    closed: bool = False

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        self.begun.append(tuple(tokens))

    def propose(self, tokens: Sequence[int], limit: int, params: object, choose: Chooser) -> Draft:
        self.limits.append(limit)
        return self.script(tuple(tokens), limit, choose)

    def observe(self, seen: Observation) -> None:
        self.seen.append(replace(seen, tokens=tuple(seen.tokens), laws=None))  # `tokens` grows later

    def close(self) -> None:
        self.closed = True


@dataclass(slots=True)
class FakeStopper:
    """Stops where the tokens end with one of `stops`."""

    stops: tuple[History, ...]
    tokens: list[int] = field(default_factory=list)

    def push(self, token: int) -> bool:
        self.tokens.append(token)
        return any(tuple(self.tokens[-len(stop) :]) == stop for stop in self.stops)
