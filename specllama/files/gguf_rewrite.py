"""Write a GGUF file from another one: other metadata, tensors under other names, left out, or with some of their rows.

What is not changed is copied byte for byte and nothing is converted, so neither llama.cpp nor memory for the weights is
needed: rows of quantised matrices are blocks of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from specllama.base.errors import ModelFileError
from specllama.core.arrays import IntArray
from specllama.files.gguf_check import walk_file
from specllama.files.gguf_header import Walked

TellShare = Callable[[float], None]  # told the share that is written

# ggml's types: numbers in a block, and its bytes.
BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
}

_ALIGNMENT, _ALIGNMENT_KEY = 32, "general.alignment"
_VERSION = 3
_U32, _I32, _STRING, _ARRAY = 4, 5, 8, 9  # GGUF's value types
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and where its bytes are."""

    name: str
    shape: tuple[int, ...]  # the length of a row first
    kind: int
    path: Path
    start: int  # in the file
    n_bytes: int
    rows: IntArray | None = None  # which of its rows are wanted; None = all  (n,)

    @property
    def n_rows(self) -> int:
        """Along the last dimension; a vector's rows are its numbers."""
        return self.shape[-1]

    @property
    def new_shape(self) -> tuple[int, ...]:
        """With the wanted rows alone."""
        return self.shape if self.rows is None else (*self.shape[:-1], len(self.rows))

    @property
    def n_new_bytes(self) -> int:
        """With the wanted rows alone."""
        return self.n_bytes if self.rows is None else self.n_bytes // self.n_rows * len(self.rows)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A model's files, read as far as their headers go."""

    path: Path  # the first of them
    walked: Walked  # its header
    tensors: tuple[SourceTensor, ...]  # of all parts

    def value(self, key: str) -> Any:
        """A single number or text of the metadata; None where there is none."""
        entry = self.walked.entries.get(key)
        if entry is None or entry.count is not None:
            return None
        if entry.kind == _STRING:
            return self.walked.text(key)
        return np.frombuffer(self.walked.data, _DTYPES[entry.kind], 1, entry.start)[0].item()

    def count(self, key: str) -> int | None:
        """The length of an array of the metadata; None where there is no such array."""
        entry = self.walked.entries.get(key)
        return None if entry is None else entry.count


_DTYPES = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_DTYPES.update({10: "<u8", 11: "<i8", 12: "<f8"})


def read_source(parts: Sequence[Path]) -> SourceFile:
    """The headers of a model's files, in order. Raises ModelFileError."""
    walks = [walk_file(part) for part in parts]
    tensors = [tensor for part, walked in zip(parts, walks, strict=True) for tensor in _tensors(part, walked)]
    return SourceFile(parts[0], walks[0], tuple(tensors))


def _tensors(path: Path, walked: Walked) -> Iterator[SourceTensor]:
    alignment = _alignment(path, walked)
    start = walked.end + -walked.end % alignment
    n_file_bytes = path.stat().st_size
    for each in walked.tensors:
        if each.kind not in BLOCKS:
            raise ModelFileError(f"{path}: tensor {each.name!r} is of a type ({each.kind}) that is not known here")
        n_values, n_block_bytes = BLOCKS[each.kind]
        n_bytes = each.n_elements // n_values * n_block_bytes
        if not each.shape or each.shape[0] % n_values or start + each.offset + n_bytes > n_file_bytes:
            raise ModelFileError(f"{path} is damaged: tensor {each.name!r} is not whole", hint="download it again")
        yield SourceTensor(each.name, each.shape, each.kind, path, start + each.offset, n_bytes)


def _alignment(path: Path, walked: Walked) -> int:
    entry = walked.entries.get(_ALIGNMENT_KEY)
    found = _ALIGNMENT if entry is None else int(np.frombuffer(walked.data, "<u4", 1, entry.start)[0])
    if found < 1 or found & (found - 1):
        raise ModelFileError(f"{path} is damaged: its alignment is {found}", hint="download it again")
    return found


# ------------------------------------------------------------------------------------------------------------- values


def u32(number: int) -> bytes:
    """A whole number as a metadata value."""
    return struct.pack("<II", _U32, number)


def text(value: str) -> bytes:
    """A text as a metadata value."""
    return struct.pack("<I", _STRING) + _packed(value.encode("utf-8"))


def integers(numbers: IntArray) -> bytes:
    """An array of whole numbers as a metadata value.  (n,)"""
    return _array(_I32, len(numbers), np.asarray(numbers, "<i4").tobytes())


def strings(items: Sequence[bytes]) -> bytes:
    """An array of texts as a metadata value."""
    return _array(_STRING, len(items), b"".join(map(_packed, items)))


def picked(walked: Walked, key: str, keep: IntArray) -> bytes:
    """The items `keep` of an array of the metadata, as a metadata value of the same type.  keep: (n,)"""
    entry = walked.entries[key]
    if entry.kind == _STRING:
        items = walked.strings(key)
        return strings([items[index] for index in keep])
    numbers: npt.NDArray[Any] | None = walked.numbers(key)
    assert numbers is not None, "the walk knows arrays of strings and of numbers only"
    return _array(entry.kind, len(keep), numbers[keep].tobytes())


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + data


def _packed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _copied(walked: Walked, key: str) -> bytes:
    """A metadata value as it is."""
    entry = walked.entries[key]
    data = walked.data[entry.start : entry.end]
    return struct.pack("<I", entry.kind) + data if entry.count is None else _array(entry.kind, entry.count, data)


# ------------------------------------------------------------------------------------------------------------ writing


def write(
    source: SourceFile,
    destination: Path,
    *,
    values: Mapping[str, bytes | None],
    tensors: Sequence[SourceTensor],
    tell: TellShare | None = None,
) -> None:
    """Write `tensors` with the metadata of `source`, of which `values` replaces some and adds some; None removes.

    That a model came in parts is forgotten: it goes into one file. Raises OSError; then the file is worthless.
    """
    dropped = {key: None for key in source.walked.entries if key.startswith("split.")}
    changes = {**dropped, _ALIGNMENT_KEY: None, **values}
    kept = {key: _copied(source.walked, key) for key in source.walked.entries if key not in changes}
    entries = {**kept, **{key: value for key, value in changes.items() if value is not None}}
    head = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(entries))
    head += b"".join(_packed(key.encode("utf-8")) + value for key, value in entries.items())
    offset = 0
    for each in tensors:
        shape = each.new_shape
        head += _packed(each.name.encode("utf-8")) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, each.kind, offset
        )
        offset += each.n_new_bytes + -each.n_new_bytes % _ALIGNMENT
    n_done, n_all = 0, max(sum(each.n_new_bytes for each in tensors), 1)
    with destination.open("wb") as file:
        _write_padded(file, [head])
        for each in tensors:
            _write_padded(file, _pieces(each))
            n_done += each.n_new_bytes
            if tell is not None:
                tell(n_done / n_all)


def _write_padded(file: IO[bytes], pieces: Iterator[bytes] | list[bytes]) -> None:
    n_bytes = sum(file.write(piece) for piece in pieces)
    file.write(bytes(-n_bytes % _ALIGNMENT))


def _pieces(tensor: SourceTensor) -> Iterator[bytes]:
    """The wanted bytes, some megabytes at a time."""
    if tensor.n_bytes == 0:
        return
    n_row_bytes = tensor.n_bytes // tensor.n_rows
    shape = (tensor.n_rows, n_row_bytes)
    stored = np.memmap(tensor.path, np.uint8, "r", tensor.start, shape)
    n_at_once = max(_CHUNK // n_row_bytes, 1)
    n_wanted = tensor.new_shape[-1]
    for first in range(0, n_wanted, n_at_once):
        rows = slice(first, first + n_at_once)
        yield (stored[rows] if tensor.rows is None else stored[tensor.rows[rows]]).tobytes()
