"""Walk a GGUF header in plain Python and believe nothing: every count and length is held against the bytes there are.

llama.cpp's own reader is fast but trusting: counts become allocations before the bytes behind them are seen, and some
damage ends the process with a failed assertion. So every header is walked here before llama.cpp is asked. The walk
needs only the beginning of a file, which may come from a disk or, piece by piece, from a network.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Read = Callable[[int, int], bytes]  # (start, stop) -> the bytes between; fewer where the file ends

# Headers of today's models have up to 20 MB, vocabularies 300,000 entries. What claims more than this is damaged.
MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY = 1 << 23
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10

TOKENS = "tokenizer.ggml.tokens"

_FIRST_BYTES = 24  # magic, version and the two counts, which `llama_file` looks at
_COUNTS = struct.Struct("<8xQQ")
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMS = 4


class Unsound(Exception):
    """The header cannot be right; the message says what is wrong with it."""


class MoreNeeded(Exception):
    """The bytes given end inside the header."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One metadata value: where it lies in the header."""

    kind: int  # of the value, or of each item of an array
    count: int | None  # items of an array; None = a single value
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's description."""

    name: str
    shape: tuple[int, ...]  # the length of a row first, as GGUF has it
    kind: int  # its ggml type
    offset: int  # from where the data begin

    @property
    def n_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Walked:
    """A header that was walked to its end."""

    data: bytes  # the beginning of the file, at least the header
    entries: Mapping[str, KeyValue]
    tensors: tuple[TensorInfo, ...]
    end: int  # where the header ends

    @property
    def n_elements(self) -> int:
        """Numbers in all tensors: the parameters."""
        return sum(tensor.n_elements for tensor in self.tensors)

    def strings(self, key: str) -> list[bytes]:
        """The items of an array of strings; empty where there is no such array."""
        entry = self.entries.get(key)
        if entry is None or entry.count is None or entry.kind != _STRING:
            return []
        data, at, items = self.data, entry.start, []
        for _ in range(entry.count):
            start = at + 8
            at = start + _LENGTH.unpack_from(data, at)[0]
            items.append(data[start:at])
        return items

    def numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        """The items of an array of numbers; None where there is no such array."""
        entry = self.entries.get(key)
        if entry is None or entry.count is None or entry.kind not in _NUMBERS:
            return None
        return np.frombuffer(self.data, _NUMBERS[entry.kind], entry.count, entry.start)

    def text(self, key: str) -> str:
        """A single string; empty where there is none."""
        entry = self.entries.get(key)
        if entry is None or entry.count is not None or entry.kind != _STRING:
            return ""
        return self.data[entry.start + 8 : entry.end].decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------------------------- steps


class _Walker:
    """A position in the header; moves only forward and never past what can be there."""

    def __init__(self, data: bytes, n_file_bytes: int) -> None:
        self._data = data
        self._n_file_bytes = n_file_bytes
        self.at = _FIRST_BYTES

    def skip(self, n_bytes: int, what: str) -> None:
        """Go on by `n_bytes`. Raises Unsound past the end of the file, MoreNeeded past the end of what is known."""
        self.at += n_bytes
        if self.at > self._n_file_bytes:
            raise Unsound(f"{what} would end at byte {self.at:,} of {self._n_file_bytes:,}")
        if self.at > MAX_HEADER_BYTES:
            raise Unsound(f"{what} would end at byte {self.at:,}, and no header is that long")
        if self.at > len(self._data):
            raise MoreNeeded

    def take(self, shape: struct.Struct, what: str) -> int:
        """Read one number."""
        start = self.at
        self.skip(shape.size, what)
        value: int = shape.unpack_from(self._data, start)[0]
        return value

    def name(self, what: str) -> str:
        """Read a short string."""
        length = self.take(_LENGTH, what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise Unsound(f"{what} has a name of {length:,} bytes")
        start = self.at
        self.skip(length, what)
        return self._data[start : self.at].decode("utf-8", "replace")

    def skip_strings(self, count: int, what: str) -> None:
        """Go on behind `count` strings. The tokens and merges of a vocabulary: half a million steps, so no calls."""
        data, at, n_known, length_at = self._data, self.at, len(self._data), _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > n_known:
                break
            at += 8 + length_at(data, at)[0]
        else:
            at -= 8
        self.at = at
        self.skip(8, what)  # the checks, at the end or where the loop could not go on

    def value(self, what: str) -> KeyValue:
        """Go on behind one metadata value."""
        kind, count = self.take(_KIND, what), None
        if kind == _ARRAY:
            kind, count = self.take(_KIND, what), self.take(_LENGTH, what)
            if count > MAX_ARRAY:
                raise Unsound(f"{what} claims {count:,} entries")
        start = self.at
        if kind == _STRING and count != 0:
            self.skip_strings(1 if count is None else count, what)
        elif kind in _NUMBERS:
            self.skip(np.dtype(_NUMBERS[kind]).itemsize * (1 if count is None else count), what)
        elif kind != _STRING:
            raise Unsound(f"{what} is of type {kind}, which does not exist")
        return KeyValue(kind, count, start, self.at)

    def tensor(self, what: str) -> TensorInfo:
        """Go on behind one tensor's description."""
        name = self.name(what)
        what = f"tensor {name!r}"
        n_dims = self.take(_KIND, what)
        if n_dims > _MAX_DIMS:
            raise Unsound(f"{what} has {n_dims:,} dimensions")
        shape = tuple(self.take(_LENGTH, what) for _ in range(n_dims))
        if math.prod(shape) >= 1 << 63:
            raise Unsound(f"{what} claims {math.prod(shape):,} numbers")
        return TensorInfo(name, shape, self.take(_KIND, what), self.take(_LENGTH, what))


def walk(data: bytes, n_file_bytes: int) -> Walked:
    """Walk the header at the beginning of `data`, which belongs to a file of `n_file_bytes`.

    Raises Unsound, and MoreNeeded where `data` ends before the header does.
    """
    if len(data) < _FIRST_BYTES:
        raise MoreNeeded
    n_tensors, n_keys = _COUNTS.unpack_from(data)
    for n, most, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "keys")):
        if n > most:
            raise Unsound(f"it announces {n:,} {what}")
    walker, entries = _Walker(data, n_file_bytes), {}
    for index in range(n_keys):
        key = walker.name(f"key {index}")
        if key in entries:
            raise Unsound(f"key {key!r} is there twice")
        entries[key] = walker.value(f"key {key!r}")
    tensors = tuple(walker.tensor(f"tensor {index}") for index in range(n_tensors))
    return Walked(data, entries, tensors, walker.at)


def walk_from(read: Read, n_file_bytes: int, *, first: int, step: int) -> Walked:
    """Walk a header that is read piece by piece: `first` bytes, then `step` more at a time. Raises Unsound."""
    data, wanted = b"", first
    while True:
        data += read(len(data), min(wanted, n_file_bytes))
        try:
            return walk(data, n_file_bytes)
        except MoreNeeded:
            if len(data) < min(wanted, n_file_bytes) or len(data) >= n_file_bytes:
                raise Unsound(f"it ends inside its header, after {len(data):,} bytes") from None
        wanted += step


# -------------------------------------------------------------------------------------------------- what is in there


def require_sound_values(walked: Walked) -> None:
    """Raise Unsound for values that no model has and that llama.cpp does not survive or computes nonsense from."""
    for key, entry in walked.entries.items():
        if entry.kind in _NUMBERS and "f" in _NUMBERS[entry.kind]:
            count = 1 if entry.count is None else entry.count
            if np.isnan(np.frombuffer(walked.data, _NUMBERS[entry.kind], count, entry.start)).any():
                raise Unsound(f"key {key!r} holds a number that is none (NaN)")
    _require_distinct(_as_read(walked.strings(TOKENS)))


def _as_read(tokens: list[bytes]) -> list[bytes]:
    """Token texts as llama.cpp reads them: up to a null byte, and a name of its own for an empty one."""
    return [text.partition(b"\0")[0] or b"[EMPTY_%d]" % token for token, text in enumerate(tokens)]


def _require_distinct(texts: list[bytes]) -> None:
    """Raise Unsound where two tokens share a text: an assertion in llama.cpp."""
    if len(set(texts)) == len(texts):
        return
    first: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text in first:
            shown = text[:40].decode("utf-8", "replace")
            raise Unsound(f"tokens {first[text]} and {token} of its vocabulary share the text {shown!r}")
        first[text] = token
