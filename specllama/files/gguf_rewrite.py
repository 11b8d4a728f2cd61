"""Write a GGUF file from another one with other metadata, renamed or omitted tensors, or fewer rows.

Weights are copied byte for byte, so this needs neither llama.cpp nor memory for the weights: each row of a quantized
matrix consists of whole blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from specllama.base.child import TellShare
from specllama.base.errors import ModelFileError
from specllama.core.arrays import IntArray
from specllama.files.gguf_header import ALIGNMENT, ALIGNMENT_KEY, ARRAY, STRING, GgufHeader, padded

_VERSION = 3
_U32, _I32, _F32 = 4, 5, 6  # GGUF's value types
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and the position of its bytes."""

    name: str
    shape: tuple[int, ...]  # the length of a row first
    kind: int
    path: Path
    start: int  # in the file
    n_bytes: int
    rows: IntArray | None = None  # the rows to write; None = all  (n,)

    @property
    def n_rows(self) -> int:
        """The last dimension; each number of a vector is a row."""
        return self.shape[-1]

    @property
    def new_shape(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (*self.shape[:-1], len(self.rows))

    @property
    def n_new_bytes(self) -> int:
        return self.n_bytes if self.rows is None else self.n_bytes // self.n_rows * len(self.rows)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A model's tensors and metadata; no weights are read."""

    header: GgufHeader  # of the first of them
    tensors: tuple[SourceTensor, ...]  # of all parts


def read_source(headers: Sequence[GgufHeader]) -> SourceFile:
    """A model's tensors, from the headers of its files in order. Raises ModelFileError."""
    for each in headers:
        if each.data_end > each.n_file_bytes:
            raise ModelFileError(f"{each.path} is damaged: its last tensor is incomplete", hint="download it again")
    tensors = (
        SourceTensor(
            each.name, each.shape or (1,), each.kind, header.path, header.data_start + each.offset, each.n_bytes
        )
        for header in headers
        for each in header.tensors
    )
    return SourceFile(headers[0], tuple(tensors))


def u32(number: int) -> bytes:
    """A whole number as a metadata value."""
    return struct.pack("<II", _U32, number)


def f32(number: float) -> bytes:
    """A number as a metadata value."""
    return struct.pack("<If", _F32, number)


def text(value: str) -> bytes:
    """A text as a metadata value."""
    return struct.pack("<I", STRING) + _packed(value.encode("utf-8"))


def integers(numbers: IntArray) -> bytes:
    """An array of whole numbers as a metadata value.  (n,)"""
    return _array(_I32, len(numbers), np.asarray(numbers, "<i4").tobytes())


def strings(items: Sequence[bytes]) -> bytes:
    """An array of texts as a metadata value."""
    return _array(STRING, len(items), b"".join(map(_packed, items)))


def picked(header: GgufHeader, key: str, keep: IntArray) -> bytes:
    """The items `keep` of an array of the metadata, as a metadata value of the same type.  keep: (n,)"""
    entry = header.entries[key]
    if entry.kind == STRING:
        items = header.strings(key)
        return strings([items[index] for index in keep])
    numbers: npt.NDArray[Any] | None = header.numbers(key)
    assert numbers is not None, "the reader knows arrays of texts and of numbers only"
    return _array(entry.kind, len(keep), numbers[keep].tobytes())


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + data


def _packed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _copied(header: GgufHeader, key: str) -> bytes:
    entry = header.entries[key]
    data = header.data[entry.start : entry.end]
    return struct.pack("<I", entry.kind) + data if entry.count is None else _array(entry.kind, entry.count, data)


def packed_header(entries: Mapping[str, bytes], tensors: Sequence[tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """A header with its padding. entries: key -> value; tensors: (name, shape, type, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(entries))
    head += b"".join(_packed(key.encode("utf-8")) + value for key, value in entries.items())
    offset = 0
    for name, shape, kind, n_bytes in tensors:
        head += _packed(name.encode("utf-8")) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += padded(n_bytes, ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT)


def write(
    source: SourceFile,
    destination: Path,
    *,
    values: Mapping[str, bytes | None],
    tensors: Sequence[SourceTensor],
    tell: TellShare | None = None,
) -> None:
    """Write `tensors` with the metadata of `source` into one file; `values` replaces and adds keys, None removes one.

    Raises OSError; then delete the file.
    """
    dropped = {key: None for key in source.header.entries if key.startswith("split.")}
    changes = {**dropped, ALIGNMENT_KEY: None, **values}
    kept = {key: _copied(source.header, key) for key in source.header.entries if key not in changes}
    entries = {**kept, **{key: value for key, value in changes.items() if value is not None}}
    head = packed_header(entries, [(each.name, each.new_shape, each.kind, each.n_new_bytes) for each in tensors])
    n_done, n_all = 0, max(sum(each.n_new_bytes for each in tensors), 1)
    with destination.open("wb") as file:
        file.write(head)
        for each in tensors:
            _write_padded(file, _pieces(each))
            n_done += each.n_new_bytes
            if tell is not None:
                tell(n_done / n_all)


def _write_padded(file: IO[bytes], pieces: Iterator[bytes] | list[bytes]) -> None:
    n_bytes = sum(file.write(piece) for piece in pieces)
    file.write(bytes(-n_bytes % ALIGNMENT))


def _pieces(tensor: SourceTensor) -> Iterator[bytes]:
    """The bytes of the rows to write, some megabytes at a time."""
    n_row_bytes = tensor.n_bytes // tensor.n_rows
    shape = (tensor.n_rows, n_row_bytes)
    stored = np.memmap(tensor.path, np.uint8, "r", tensor.start, shape)
    n_at_once = max(_CHUNK // n_row_bytes, 1)
    n_wanted = tensor.new_shape[-1]
    for first in range(0, n_wanted, n_at_once):
        rows = slice(first, first + n_at_once)
        yield (stored[rows] if tensor.rows is None else stored[tensor.rows[rows]]).tobytes()
