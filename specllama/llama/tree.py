"""A tree of tokens in one KV cache: which of llama.cpp's sequences hold which node.

A cell may belong to several sequences, and a token sees the earlier positions of its own. So there is a sequence, here
called line, for each leaf: it holds the text and the path to the leaf. A first child continues the line of its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """New nodes of a tree, before they are computed."""

    tree: Tree
    tokens: Sequence[int]
    parents: Sequence[int]
    positions: Sequence[int]
    lines: Sequence[Sequence[int]]  # those that hold each node
    joins: Sequence[tuple[int, int]]  # (old node, new line): the line branches off there
    tips: Mapping[int, int]  # of the whole tree: a node without children, and the line that ends there

    @property
    def n_lines(self) -> int:
        """TreeLines of the whole tree."""
        return len(self.tips)


class Tree:
    """The nodes after a pending token, parents before children; node -1 is the pending token."""

    def __init__(self, root: int) -> None:
        self.root = root  # position of the pending token
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._positions = [root]  # this list and the next begin with node -1
        self._lines = [[0]]
        self._tips: Mapping[int, int] = {-1: 0}  # see `Growth.tips`

    @property
    def n_lines(self) -> int:
        return len(self._tips)

    @property
    def branches(self) -> bool:
        return self.n_lines > 1

    def position(self, node: int) -> int:
        return self._positions[node + 1]

    def line(self, node: int) -> int:
        """A line that holds the node."""
        return self._lines[node + 1][0]

    def growth(self, tokens: Sequence[int], parents: Sequence[int]) -> Growth:
        """The places of new nodes. Raises ValueError if `parents` do not lay them out."""
        n_old = len(self.tokens)
        if len(parents) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(parents, n_old)):
            raise ValueError(f"parents {tuple(parents)} do not lay out {len(tokens)} nodes after {n_old}")
        tips, positions, lines = dict(self._tips), list[int](), list[list[int]]()
        joins: list[tuple[int, int]] = []
        for node, parent in enumerate(parents, n_old):
            line = tips.pop(parent, None)
            if line is None:
                line, above = len(tips), parent
                while above >= n_old:
                    lines[above - n_old].append(line)
                    above = parents[above - n_old]
                joins.append((above, line))
            tips[node] = line
            lines.append([line])
            positions.append(1 + (positions[parent - n_old] if parent >= n_old else self.position(parent)))
        return Growth(self, tokens, parents, positions, lines, joins, tips)

    def add(self, growth: Growth) -> None:
        """The nodes are computed."""
        for old, line in growth.joins:
            for node in self._up(old):
                self._lines[node + 1].append(line)
        self.tokens += growth.tokens
        self._parents += growth.parents
        self._positions += growth.positions
        self._lines += map(list, growth.lines)
        self._tips = growth.tips

    def _up(self, node: int) -> list[int]:
        """The node and its ancestors, the pending token last."""
        found = [node]
        while found[-1] >= 0:
            found.append(self._parents[found[-1]])
        return found

    def kept(self, length: int, path: Sequence[int]) -> tuple[int, list[int]]:
        """(how many first nodes stay in the cache, tokens of the rest of `path`) if `length` tokens and `path` stay.

        Raises ValueError if `length` does not end with the pending token, or `path` does not begin there.
        """
        if length != self.root + 1:
            raise ValueError(f"cannot keep {length} tokens: the pending token is number {self.root + 1}")
        n_kept = self.in_order(path)
        return n_kept, [self.tokens[node] for node in path[n_kept:]]

    def in_order(self, path: Sequence[int]) -> int:
        """How many nodes of `path` follow each other in the cache from the pending token on.

        Raises ValueError if it is no path from the pending token.
        """
        if any(
            not 0 <= node < len(self.tokens) or self._parents[node] != above
            for above, node in zip((-1, *path), path, strict=False)
        ):
            raise ValueError(f"{tuple(path)} is no path from the pending token")
        return next((n for n, node in enumerate(path) if n != node), len(path))

    def n_shared(self, line: int, n: int) -> int:
        """How many of the first `n` nodes, which are a path, the line holds."""
        return next((node for node in range(n) if line not in self._lines[node + 1]), n)


class TreeLines:
    """The lines of one text: numbers `first` to `first + n - 1` of llama.cpp's sequences."""

    def __init__(self, first: int, n: int) -> None:
        self.first = first
        self.n = n
        self._reach = [0] * n  # the positions from 0 on that each line holds

    def of(self, n_text: int, growth: Growth | None) -> list[Sequence[int]]:
        """The lines of `n_text` tokens before a growth, and of its nodes."""
        if growth is None or growth.n_lines == 1:
            return [(self.first,)] * (n_text + (len(growth.tokens) if growth else 0))
        every = range(self.first, self.first + growth.n_lines)
        return [every] * n_text + [[self.first + line for line in lines] for lines in growth.lines]

    def join(self, growth: Growth | None, n_decoded: int) -> Iterator[tuple[int, int, int, int]]:
        """New lines take the cells of the text and of the nodes from which they branch off, as far as computed.

        Yields (source, line, begin, end): positions begin to end-1 are to be copied.
        """
        if growth is None:
            return
        for old, line in growth.joins:
            begin, end = self._reach[line], min(growth.tree.position(old) + 1, n_decoded)
            if begin < end:
                yield self.first + growth.tree.line(old), self.first + line, begin, end
                self._reach[line] = end

    def grown(self, growth: Growth | None) -> Tree | None:
        """The growth is computed; returns the tree."""
        if growth is None:
            return None
        growth.tree.add(growth)
        for line in range(growth.n_lines):
            self._reach[line] = max(self._reach[line], growth.tree.root + 1)
        for position, lines in zip(growth.positions, growth.lines, strict=True):
            for line in lines:
                self._reach[line] = position + 1
        return growth.tree

    def limits(self, length: int, tree: Tree | None) -> Iterator[tuple[int, int]]:
        """To keep `length` tokens, those of `tree` on the first line: what the others must give up as well.

        Yields (line, start): from position `start` on.
        """
        for line in range(1, self.n):
            limit = length
            if tree is not None and line < tree.n_lines and length > tree.root:
                limit = tree.root + 1 + tree.n_shared(line, length - tree.root - 1)
            if limit < self._reach[line]:
                yield self.first + line, limit

    def cut(self, start: int, line: int | None = None) -> None:
        """A line, by default every line, holds no position from `start` on."""
        for each in range(self.n) if line is None else (line - self.first,):
            self._reach[each] = min(self._reach[each], start)
