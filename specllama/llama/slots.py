"""Many texts in one KV cache: a second context on the weights of a loaded model, and one pass for all of them.

Attention adds in the order of the cells. So the cells of a text must ascend, or its logits are not those that it has
alone. llama.cpp fills the lowest free cells; therefore none is free below the highest used one. The cells that a slot
gives back (rejected tokens, a finished answer) go to spare lines of the slot. Before a pass, exactly as many of them as
it fills are freed, lowest first, and the tokens of the pass are sorted by the cells that they will take.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from specllama.base.errors import RollbackRefused, UnsupportedModel
from specllama.core.arrays import FloatArray
from specllama.core.types import Caps, Part, require_chain
from specllama.llama.context import Context
from specllama.llama.load_plan import n_copies_of_lines, plan_slots
from specllama.llama.memory import memory_free
from specllama.llama.model import LlamaModel
from specllama.llama.open import Native, open_context
from specllama.llama.tree import Growth, Tree, TreeLines

Place = tuple[int, int]  # (line of the slot, position): how a cell is found


class _Slot:
    """What the KV cache holds of one text."""

    def __init__(self, first: int, n_leaves: int) -> None:
        self.lines = TreeLines(first, n_leaves)
        self.first_spare = first + n_leaves
        self.clear()

    def clear(self) -> None:
        self.text: list[int] = []  # the tokens in the KV cache, then held ones, which are computed with the next part
        self.n_decoded = 0
        self.tree: Tree | None = None  # of the last part with rows; a model for chains keeps none
        self.n_shared = 0  # the first so many tokens lie in cells that other slots may hold as well
        self.cells: list[int] = []  # of the other tokens, ascending; the spare cells follow
        self.spare: deque[Place] = deque()  # where the spare cells are
        self.n_spare_at: Counter[Place] = Counter()
        self.lines.cut(0)

    @property
    def branches(self) -> Tree | None:
        """The tree, if it has some."""
        return self.tree if self.tree is not None and self.tree.branches else None

    @property
    def n_used(self) -> int:
        """Cells of its own with tokens."""
        return self.n_decoded - self.n_shared

    def n_taken(self, n: int) -> int:
        """How many spare cells must be freed for `n` tokens: `n`, or more where two cells share a place."""
        n = min(n, len(self.spare))
        while tied := {place for place in islice(self.spare, n) if self.n_spare_at[place] > 1}:
            end = 1 + max(index for index, place in enumerate(self.spare) if place in tied)
            if end <= n:
                break
            n = end
        return n

    def take(self, n: int) -> list[Place]:
        """The places of the first `n` spare cells, which are no longer spare."""
        places = [self.spare.popleft() for _ in range(n)]
        self.n_spare_at.subtract(places)
        for place in places:
            if not self.n_spare_at[place]:
                del self.n_spare_at[place]
        return places


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part that can be computed, and what comes with it."""

    slot: _Slot
    part: Part
    tokens: list[int]  # held ones, those of the part, padding
    positions: list[int]
    growth: Growth | None
    n_padding: int
    n_taken: int  # of the spare cells

    @property
    def n_before(self) -> int:
        """Tokens before the nodes."""
        return len(self.tokens) - self.n_padding - (len(self.growth.tokens) if self.growth else 0)

    @property
    def last_line(self) -> int:
        return self.growth.lines[-1][0] if self.growth and self.growth.lines else 0


def _spans(places: Sequence[Place]) -> Iterator[tuple[int, int, int]]:
    """(line, begin, end) of positions that follow each other in a line."""
    ordered = enumerate(sorted(set(places)))
    for (line, _), run in groupby(ordered, key=lambda each: (each[1][0], each[1][1] - each[0])):
        positions = [position for _, (_, position) in run]
        yield line, positions[0], positions[-1] + 1


class LlamaSlots(Context):
    """A model with a KV cache for `n_slots` texts; implements `types.SlotModel`.

    Its weights are those of `model`; closing `model` closes it.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_slots: int,
        n_ctx: int,
        max_rows: int,
        max_outputs: int | None = None,
        n_leaves: int = 1,
    ) -> None:
        """Open the context. `n_ctx`: tokens of one slot. `max_rows`: tokens of a pass; `max_outputs`: of them with
        logits, None = all. `n_leaves`: most of a tree, as far as `model` takes trees and llama.cpp has sequences for
        them.

        Raises UnsupportedModel for models with recurrent layers, UsageError, MemoryShort and BackendError.
        """
        if model.has_states:
            raise UnsupportedModel(
                f"{model.path.name} ({model.architecture}) has recurrent layers, which this program computes for one "
                "text at a time",
                hint="run one request at a time (--parallel 1), or choose another model",
            )
        n_swa = model._native.pointers.lib.llama_model_n_swa(model._native.pointers.model)
        max_outputs = min(max_outputs or max_rows, max_rows)
        plan = plan_slots(
            model.header,
            model.plan,
            n_slots=n_slots,
            n_ctx=n_ctx,
            max_rows=max_rows,
            max_outputs=max_outputs,
            n_leaves=min(n_leaves, model.caps.max_leaves),
            n_swa=n_swa,
            free=memory_free(),
        )
        n_copies = n_copies_of_lines(n_swa)
        n_leaves = plan.n_lines // (2 * n_copies * n_slots)
        native = Native(model._native.pointers.lib, model._native.pointers.model, owner=model._native)
        try:
            open_context(native, model.header, plan)
            super().__init__(native, model.header, plan, model.vocab_size, n_copies * n_leaves)
        except BaseException:
            native.close()
            raise
        self._offsets = range(0, plan.n_lines, plan.n_lines // n_copies)  # from a line to its copies
        self._slots = [_Slot(2 * n_leaves * slot, n_leaves) for slot in range(n_slots)]
        self._n_cells = 0  # the highest used cell is the one before
        self.n_slots, self.n_ctx, self.max_rows, self.max_outputs = n_slots, n_ctx, max_rows, max_outputs
        self.end_tokens = model.end_tokens
        self.caps = Caps(tree=n_leaves > 1, max_leaves=n_leaves, max_block=min(model.caps.max_block, max_outputs))

    def length(self, slot: int) -> int:
        """Tokens of the slot in the KV cache, with held and shared ones."""
        return len(self._slots[slot].text)

    def run(self, parts: Sequence[Part]) -> list[FloatArray]:
        """Compute the parts in one pass, see `types.SlotModel`. Rows are float32 and read-only.

        Raises ContextFull and ValueError for parts that cannot be computed: nothing has changed. After every other
        error all slots are empty.
        """
        pieces = [self._piece(part) for part in parts]
        if len({part.slot for part in parts}) < len(parts) or sum(len(part.tokens) for part in parts) > self.max_rows:
            raise ValueError(f"a pass holds one part for a slot, and {self.max_rows} tokens")
        if sum(part.n_rows for part in parts) > self.max_outputs:
            raise ValueError(f"a pass gives logits of {self.max_outputs} tokens")
        if not pieces:
            return []
        with self._emptied_by_errors():
            rows = self._decode(pieces)
            for piece in pieces:
                self._record(piece)
        return self._views_of(rows)

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens of the slot from `length` on."""
        it = self._slots[slot]
        if not 0 <= length <= len(it.text):
            raise ValueError(f"cannot truncate {len(it.text)} tokens to {length}")
        if (tree := it.branches) and length > tree.root + 1:
            raise ValueError(f"cannot truncate to {length} tokens, within a tree: use keep")
        self._cut(it, length)

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        """As `LlamaModel.keep`, in the slot."""
        it = self._slots[slot]
        if (tree := it.branches) is None:
            require_chain(kept=path)
            self.truncate(slot, length + len(path))
            return
        n_kept, again = tree.kept(length, path)
        self._cut(it, length + n_kept)
        it.text += again

    def share(self, tokens: Sequence[int]) -> None:
        """Read `tokens` once, for all slots. Raises ContextFull; after another error all slots are empty."""
        if any(len(slot.text) > slot.n_shared for slot in self._slots):
            raise ValueError("a slot is in use, expected empty slots")
        first, *others = self._slots
        self._clear()
        self._require_room(0, len(tokens))
        with self._emptied_by_errors():
            for at in range(0, len(tokens), self.max_rows):
                self.run([Part(0, tuple(tokens[at : at + self.max_rows]), 0)])
            first.cells.clear()
            for slot in others:
                self._copy(first.lines.first, slot.lines.first, 0, len(tokens))
                slot.text, slot.n_decoded = list(tokens), len(tokens)
            for slot in self._slots:
                slot.n_shared = len(tokens)

    def _piece(self, part: Part) -> _Piece:
        """Raises ContextFull and ValueError, with everything as before."""
        slot, n_new, n_rows = self._slots[part.slot], len(part.tokens), part.n_rows
        if not 0 <= n_rows <= n_new or not n_new or n_rows > self.caps.max_block:
            raise ValueError(f"a part of {n_new} tokens has {n_rows} rows (expected 0 to {self.caps.max_block})")
        if wrong := [token for token in part.tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size} tokens")
        self._require_room(len(slot.text), n_new)
        growth, n_held = None, len(slot.text) - slot.n_decoded
        if part.grows:
            if slot.tree is None or part.parents is None:
                raise ValueError("there is no tree that can grow")
            growth = slot.tree.growth(part.tokens, part.parents)
        elif slot.branches:
            raise ValueError("the slot holds a tree, expected keep or truncate first")
        elif self.caps.tree and n_rows:
            parents = range(-1, n_rows - 2) if part.parents is None else part.parents
            growth = Tree(len(slot.text) + n_new - n_rows).growth(part.tokens[n_new - n_rows + 1 :], parents)
        else:
            require_chain(part.parents)
        if growth is not None and growth.n_lines > self.caps.max_leaves:
            raise ValueError(f"a tree has {growth.n_lines} leaves (expected 1 to {self.caps.max_leaves})")
        n_tokens = n_held + n_new
        n_taken = slot.n_taken(n_tokens)
        n_padding = max(n_taken - n_tokens, 0)  # no freed cell may stay free
        nodes = growth.positions if growth else ()
        positions = [*range(slot.n_decoded, slot.n_decoded + n_tokens - len(nodes)), *nodes]
        positions += range(positions[-1] + 1, positions[-1] + 1 + n_padding)
        tokens = [*slot.text[slot.n_decoded :], *part.tokens, *[0] * n_padding]
        return _Piece(slot, part, tokens, positions, growth, n_padding, n_taken)

    def _decode(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        """Compute the pieces; returns the numbers of the rows of each."""
        tokens, positions, lines, outputs = list[int](), list[int](), list[Sequence[int]](), list[bool]()
        cells = list[int]()
        for piece in pieces:
            slot, n = piece.slot, len(piece.tokens)
            for line, begin, end in _spans(slot.take(piece.n_taken)):
                self._remove(slot.first_spare + line, begin, end)
            slot.cells += range(self._n_cells, self._n_cells + n - piece.n_taken)
            self._n_cells += n - piece.n_taken
            for source, line, begin, end in slot.lines.join(piece.growth, slot.n_decoded):
                self._copy(source, line, begin, end)
            cells += slot.cells[slot.n_used : slot.n_used + n]
            tokens += piece.tokens
            positions += piece.positions
            lines += slot.lines.of(piece.n_before, piece.growth)
            lines += [(slot.lines.first + piece.last_line,)] * piece.n_padding
            ends = [False] * (n - piece.n_padding - piece.part.n_rows), [False] * piece.n_padding
            outputs += [*ends[0], *[True] * piece.part.n_rows, *ends[1]]
        if len(self._offsets) > 1:
            lines = [[offset + line for offset in self._offsets for line in each] for each in lines]
        order = np.argsort(cells)
        numbers = order.tolist()
        self._batch.fill(
            [tokens[each] for each in numbers],
            [positions[each] for each in numbers],
            [lines[each] for each in numbers],
            [outputs[each] for each in numbers],
        )
        self._compute(tokens)
        row_of = np.empty(len(order), np.intp)
        row_of[order] = np.cumsum(np.array(outputs)[order]) - 1
        rows = iter(row_of[np.array(outputs)].tolist())
        return [list(islice(rows, piece.part.n_rows)) for piece in pieces]

    def _record(self, piece: _Piece) -> None:
        """The piece is computed; its padding becomes spare."""
        slot = piece.slot
        n = len(piece.tokens) - piece.n_padding
        slot.text += piece.part.tokens
        slot.n_decoded += n
        slot.tree = slot.lines.grown(piece.growth)
        if piece.n_padding:
            self._give(slot, [(piece.last_line, position) for position in piece.positions[n:]])
            self._remove(slot.lines.first + piece.last_line, piece.positions[n], -1)

    def _views_of(self, rows: Sequence[Sequence[int]]) -> list[FloatArray]:
        logits = self._logits(sum(map(len, rows))) if any(rows) else np.empty((0, self.vocab_size), np.float32)
        return [
            logits[each[0] : each[-1] + 1] if each and each[-1] - each[0] == len(each) - 1 else logits[each, :]
            for each in map(list, rows)
        ]

    def _cut(self, slot: _Slot, length: int) -> None:
        """Keep `length` tokens of the slot, those of a tree in its first line. The other cells become spare."""
        if length < slot.n_decoded:
            tree, start = slot.branches, length
            n_text = slot.n_decoded if tree is None else tree.root + 1
            if length < slot.n_shared:
                others = [each.n_shared for each in self._slots if each is not slot]
                start = min(max([length, *others]), slot.n_shared)
                slot.cells[:0] = range(start, slot.n_shared)  # shared tokens lie in the first cells
            places = [(0, position) for position in range(start, n_text)]
            if tree is not None:
                nodes = range(max(length - n_text, 0), len(tree.tokens))
                places += [(tree.line(node), tree.position(node)) for node in nodes]
            with self._emptied_by_errors():
                self._give(slot, places)
                for line, limit in [(slot.lines.first, length), *slot.lines.limits(length, tree)]:
                    self._remove(line, limit, -1)
                    slot.lines.cut(limit, line)
            slot.n_decoded, slot.n_shared = length, min(length, slot.n_shared)
        del slot.text[length:]
        slot.tree = None

    def _give(self, slot: _Slot, places: Sequence[Place]) -> None:
        """The cells at `places`, those before the spare ones, become spare as well."""
        spare_line = dict[int, int]()
        for line, begin, end in _spans(places):
            each = range(slot.lines.n)
            is_free = (not any(slot.n_spare_at[to, position] for position in range(begin, end)) for to in each)
            spare_line[line] = next((to for to, free in zip(each, is_free, strict=True) if free), line)
            self._copy(slot.lines.first + line, slot.first_spare + spare_line[line], begin, end)
            slot.n_spare_at.update((spare_line[line], position) for position in range(begin, end))
        slot.spare.extendleft((spare_line[line], position) for line, position in reversed(places))

    def _copy(self, source: int, line: int, begin: int, end: int) -> None:
        """Positions `begin` to `end` - 1 of a line are also in another one."""
        for offset in self._offsets:
            self._call("llama_memory_seq_cp", self._memory, offset + source, offset + line, begin, end)

    def _remove(self, line: int, begin: int, end: int) -> None:
        """Positions `begin` to `end` - 1 (-1 = the last) are no longer in the line. Raises RollbackRefused."""
        for offset in self._offsets:
            if not self._call("llama_memory_seq_rm", self._memory, offset + line, begin, end):
                raise RollbackRefused(f"llama.cpp did not remove the tokens from {begin} on from its memory")

    @contextmanager
    def _emptied_by_errors(self) -> Iterator[None]:
        """Free cells among the others would break their order."""
        try:
            yield
        except BaseException:  # Ctrl-C arrives when a call returns
            self._clear()
            raise

    def _clear(self) -> None:
        for slot in self._slots:
            slot.clear()
        self._n_cells = 0
        self._call("llama_memory_clear", self._memory, False)
