"""Kernel paths: the layout of a model's weights, which decides the kernels that compute with them.

llama.cpp keeps a matrix as in the file, or rearranged in one of the CPU's extra buffer types. Each layout has its own
kernels, with their own cost of a block against one row. A path is fixed when a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specllama.kernels.library import BUFFER_TYPE
from specllama.llama.load_plan import LoadOptions, LoadPlan

# A tensor type with a smaller share of the weights makes no measurable difference.
LEAST_SHARE = 0.05
_WORD = re.compile(r"[\w.+-]{1,64}")  # of a name that comes from a file


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that hidden states are multiplied with."""

    name: str  # "blk.0.ffn_down.weight"
    kind: str  # its type, such as "q4_K"
    n_bytes: int
    fits: tuple[str, ...]  # the extra buffer types that can hold it, in llama.cpp's order of preference
    placeable: bool = True  # False if it is also the token embedding, which no buffer type can hold


@dataclass(frozen=True, slots=True)
class KernelPath:
    """llama.cpp's choice of layouts or those of the file, except for the tensor types in `placed`."""

    extra_bufts: bool = True
    placed: tuple[tuple[str, str], ...] = ()  # (tensor type, extra buffer type); the first that fits counts
    own: bool = False  # our kernels come before llama.cpp's

    def __post_init__(self) -> None:
        if not all(_WORD.fullmatch(word) for pair in self.placed for word in pair):
            raise ValueError("a kernel path has an invalid name of a tensor type or buffer type")

    @classmethod
    def of(cls, options: LoadOptions | LoadPlan) -> KernelPath:
        return cls(options.use_extra_bufts, options.placed, options.kernels)

    def applied(self, options: LoadOptions) -> LoadOptions:
        """The options on this path; our kernels stay off where the options switch them off."""
        kernels = self.own and options.kernels
        return replace(options, use_extra_bufts=self.extra_bufts, placed=self.placed, kernels=kernels)

    @property
    def name(self) -> str:
        """For reports: "specllama's kernels", "rearranged weights, Q4_K in CPU_REPACK"."""
        kinds: dict[str, list[str]] = {}
        for kind, buffer in self.placed:
            kinds.setdefault(buffer, []).append(kind.upper())
        exceptions = [f"{' and '.join(several)} in {buffer}" for buffer, several in kinds.items()]
        rearranged = "specllama's kernels" if self.own else "rearranged weights"
        return ", ".join([rearranged if self.extra_bufts else "weights as in the file", *exceptions])

    def buffer_of(self, matrix: Matrix) -> str:
        """The extra buffer type that holds a matrix; empty if it stays as in the file."""
        if matrix.placeable:
            for kind, buffer in self.placed:
                if kind == matrix.kind and buffer in matrix.fits:
                    return buffer
        fits = matrix.fits if self.own else without_ours(matrix).fits
        return fits[0] if self.extra_bufts and fits else ""

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "extra_bufts": self.extra_bufts,
            "placed": [list(pair) for pair in self.placed],
            "own": self.own,
        }


def without_ours(matrix: Matrix) -> Matrix:
    """The matrix as llama.cpp knows it without our kernels."""
    return replace(matrix, fits=tuple(name for name in matrix.fits if name != BUFFER_TYPE))


DEFAULT = KernelPath()  # llama.cpp's own choice
OWN = KernelPath(own=True)  # our kernels, and llama.cpp's choice for the rest
AS_IN_FILE = KernelPath(extra_bufts=False)


def candidates(matrices: Sequence[Matrix], n_bytes: int) -> tuple[KernelPath, ...]:
    """The paths to measure for a file with `n_bytes` of weights.

    Our kernels (where they take any of the weights), llama.cpp's default, weights as in the file, then paths that
    differ from the default in one tensor type, the largest types first. No two paths are equal for this file; if no
    weight can be rearranged, there is only the default.
    """
    everything, matrices = matrices, tuple(map(without_ours, matrices))
    has_ours = any(BUFFER_TYPE in matrix.fits for matrix in everything)
    bytes_of: dict[str, int] = {}
    for matrix in matrices:
        if matrix.placeable and matrix.fits:
            bytes_of[matrix.kind] = bytes_of.get(matrix.kind, 0) + matrix.n_bytes
    large = [kind for kind, size in bytes_of.items() if size >= LEAST_SHARE * n_bytes]
    tried = [*([OWN] if has_ours else []), DEFAULT, AS_IN_FILE]
    for kind in sorted(large, key=lambda kind: -bytes_of[kind]):
        tried += _deviations(kind, [matrix for matrix in matrices if matrix.placeable and matrix.fits])
    distinct: dict[tuple[str, ...], KernelPath] = {}
    for path in tried:
        distinct.setdefault(tuple(path.buffer_of(matrix) for matrix in everything), path)
    return tuple(distinct.values())


def _deviations(kind: str, matrices: Sequence[Matrix]) -> list[KernelPath]:
    """The paths that differ from llama.cpp's choice for this tensor type only."""
    others: dict[tuple[str, str], None] = {}  # llama.cpp's choice for the other types
    buffers: dict[str, None] = {}  # that can hold this type
    ranks: dict[str, int] = {}  # of a buffer type in llama.cpp's order of preference
    for matrix in matrices:
        for rank, buffer in enumerate(matrix.fits):
            ranks[buffer] = max(rank, ranks.get(buffer, 0))
        if matrix.kind == kind:
            buffers.update(dict.fromkeys(matrix.fits))
        else:
            others[matrix.kind, matrix.fits[0]] = None
    # Matrices of one type may differ in the buffers that can hold them; the first entry that fits counts.
    ranked = tuple(sorted(others, key=lambda order: ranks[order[1]]))
    return [KernelPath(placed=((kind, buffer),)) for buffer in buffers] + [KernelPath(False, ranked)]
