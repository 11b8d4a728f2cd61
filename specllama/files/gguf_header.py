"""A reader of GGUF headers that checks every count and length against the size of the file.

llama.cpp's own reader allocates by counts that it has not checked, and some damage ends the process with a failed
assertion. So every header is read here before llama.cpp sees the file. The reader needs only the beginning of a file,
from a disk or piece by piece from a network.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specllama.base.errors import ModelFileError
from specllama.base.text import counted, figure

Read = Callable[[int, int], bytes]  # (start, stop) -> the bytes between; fewer where the file ends

# Headers of today's models have up to 20 MB, vocabularies 300,000 entries. A file beyond these limits is damaged.
MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY = 1 << 23
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10
MAX_TENSOR_NAME_BYTES = 63  # llama.cpp's
MAX_INTEGER = 2**31 - 1  # llama.cpp counts in 32 bits

TOKENS, TOKENIZER = "tokenizer.ggml.tokens", "tokenizer.ggml.model"

_FIRST_BYTES = 24  # magic, version and the two counts
_COUNTS = struct.Struct("<8xQQ")
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_U32, _BOOL, STRING, ARRAY = 4, 7, 8, 9  # GGUF's value types
_MANY_TEXTS = 4096
_NUMBERS: Mapping[int, str] = {  # numpy's names
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMS = 4
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
_SENTENCEPIECE = "llama"  # the value of TOKENIZER
_BYTES_OF_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml tensor type."""

    name: str
    n_values: int  # in a block
    n_bytes: int  # of a block


TYPES: Mapping[int, TensorType] = {
    0: TensorType("f32", 1, 4),
    1: TensorType("f16", 1, 2),
    2: TensorType("q4_0", 32, 18),
    3: TensorType("q4_1", 32, 20),
    6: TensorType("q5_0", 32, 22),
    7: TensorType("q5_1", 32, 24),
    8: TensorType("q8_0", 32, 34),
    9: TensorType("q8_1", 32, 36),
    10: TensorType("q2_K", 256, 84),
    11: TensorType("q3_K", 256, 110),
    12: TensorType("q4_K", 256, 144),
    13: TensorType("q5_K", 256, 176),
    14: TensorType("q6_K", 256, 210),
    15: TensorType("q8_K", 256, 292),
    16: TensorType("iq2_xxs", 256, 66),
    17: TensorType("iq2_xs", 256, 74),
    18: TensorType("iq3_xxs", 256, 98),
    19: TensorType("iq1_s", 256, 50),
    20: TensorType("iq4_nl", 32, 18),
    21: TensorType("iq3_s", 256, 110),
    22: TensorType("iq2_s", 256, 82),
    23: TensorType("iq4_xs", 256, 136),
    24: TensorType("i8", 1, 1),
    25: TensorType("i16", 1, 2),
    26: TensorType("i32", 1, 4),
    27: TensorType("i64", 1, 8),
    28: TensorType("f64", 1, 8),
    29: TensorType("iq1_m", 256, 56),
    30: TensorType("bf16", 1, 2),
    34: TensorType("tq1_0", 256, 54),
    35: TensorType("tq2_0", 256, 66),
    39: TensorType("mxfp4", 32, 17),
    40: TensorType("nvfp4", 64, 36),
    41: TensorType("q1_0", 128, 18),
    42: TensorType("q2_0", 64, 18),
}


class Unsound(Exception):
    """The header is damaged; the message says how."""


class MoreNeeded(Exception):
    """The bytes given end inside the header."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """The position of one metadata value in the header."""

    kind: int  # of the value, or of each item of an array
    count: int | None  # items of an array; None = a single value
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's description."""

    name: str
    shape: tuple[int, ...]  # the length of a row first, as in GGUF
    kind: int  # its ggml type, in TYPES
    offset: int  # from `data_start`
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GgufHeader:
    """The header of one file. The getters raise ModelFileError with the key, what was found and what is expected.

    Arrays are read on demand: the tokens and merges of a vocabulary are 300,000 texts.
    """

    path: Path
    n_file_bytes: int
    data: bytes  # of the header alone
    entries: Mapping[str, KeyValue]
    tensors: tuple[TensorInfo, ...]
    end: int  # of the header
    data_start: int  # of the tensors' bytes

    @property
    def n_elements(self) -> int:
        """The number of parameters."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def data_end(self) -> int:
        """The end of the last tensor in the file."""
        return self.data_start + max((tensor.offset + tensor.n_bytes for tensor in self.tensors), default=0)

    @property
    def tensor_bytes(self) -> Counter[str]:
        """Bytes of all tensors by type, such as "q4_K"."""
        total: Counter[str] = Counter()
        for tensor in self.tensors:
            total[TYPES[tensor.kind].name] += tensor.n_bytes
        return total

    def _value(self, key: str) -> int | float | bool | str | None:
        """A single value; None for a missing key or an array. A text ends at a null byte, as in llama.cpp."""
        entry = self.entries.get(key)
        if entry is None or entry.count is not None:
            return None
        if entry.kind == STRING:
            return self.data[entry.start + 8 : entry.end].partition(b"\0")[0].decode("utf-8", "replace")
        number: int | float = np.frombuffer(self.data, _NUMBERS[entry.kind], 1, entry.start)[0].item()
        return bool(number) if entry.kind == _BOOL else number

    def integer(self, key: str, low: int = 0, high: int = MAX_INTEGER, default: int = 0) -> int:
        """A whole number from `low` to `high`."""
        return self._in_range(key, self._value(key), low, high) if key in self.entries else default

    def number(self, key: str, low: float, high: float, default: float = 0.0) -> float:
        """A number from `low` to `high`."""
        found = self._value(key) if key in self.entries else default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not low <= found <= high:
            raise self._refuse(key, found, f"a number from {low:g} to {high:g}")
        return found

    def text(self, key: str, default: str = "") -> str:
        found = self._value(key) if key in self.entries else default
        if not isinstance(found, str):
            raise self._refuse(key, found, "a text")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self._value(key) if key in self.entries else default
        if not isinstance(found, bool):
            raise self._refuse(key, found, "true or false")
        return found

    def count(self, key: str) -> int | None:
        """The length of an array; None if there is no such array."""
        entry = self.entries.get(key)
        return None if entry is None else entry.count

    def strings(self, key: str) -> list[bytes]:
        """The items of an array of texts; empty if the key is missing."""
        entry = self.entries.get(key)
        if entry is None:
            return []
        if entry.count is None or entry.kind != STRING:
            raise self._refuse(key, self._value(key), "a list of texts")
        data, at, length_at, items = self.data, entry.start, _LENGTH.unpack_from, []
        for _ in range(entry.count):
            start = at + 8
            at = start + length_at(data, at)[0]
            items.append(data[start:at])
        return items

    def numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        """The items of an array of numbers; None if the key is missing."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        if entry.count is None or entry.kind not in _NUMBERS:
            raise self._refuse(key, self._value(key), "a list of numbers")
        return np.frombuffer(self.data, _NUMBERS[entry.kind], entry.count, entry.start)

    def per_layer(self, key: str, n_layer: int, low: int = 0, high: int = MAX_INTEGER, default: int = 0) -> list[int]:
        """A whole number for each layer, from a list or from one number for all layers."""
        if self.count(key) is None:
            return [self.integer(key, low, high, default)] * n_layer
        items = self.numbers(key)
        assert items is not None
        return [self._in_range(key, item, low, high) for item in items[:n_layer].tolist()]

    def _in_range(self, key: str, found: object, low: int, high: int) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise self._refuse(key, found, f"a whole number from {figure(low)} to {figure(high)}")
        return found

    def _refuse(self, key: str, found: object, expected: str) -> ModelFileError:
        shown = "a list" if self.count(key) is not None else repr(found)[:60]
        return damaged(self.path, f"{key} is {shown}, expected {expected}")


def damaged(path: Path, what: str) -> ModelFileError:
    """The error for a header with an impossible value."""
    return ModelFileError(f"{path} is damaged or newer than this llama.cpp: {what}", hint="download it again")


class _Walker:
    """A position in the header; moves only forward and never past the end of the file."""

    def __init__(self, data: bytes, n_file_bytes: int, text_ends: Mapping[int, int]) -> None:
        self._data = data
        self._n_file_bytes = n_file_bytes
        self._text_ends = text_ends
        self.at = _FIRST_BYTES

    def skip(self, n_bytes: int, what: str) -> None:
        """Go on by `n_bytes`. Raises Unsound past the end of the file, MoreNeeded past the end of the data."""
        self.at += n_bytes
        if self.at > self._n_file_bytes:
            raise Unsound(f"{what} would end at byte {figure(self.at)} of {figure(self._n_file_bytes)}")
        if self.at > MAX_HEADER_BYTES:
            raise Unsound(f"{what} would end at byte {figure(self.at)}, more than any header has")
        if self.at > len(self._data):
            raise MoreNeeded

    def take(self, shape: struct.Struct, what: str) -> int:
        start = self.at
        self.skip(shape.size, what)
        value: int = shape.unpack_from(self._data, start)[0]
        return value

    def name(self, what: str) -> str:
        length = self.take(_LENGTH, what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise Unsound(f"{what} has a name of {figure(length)} bytes")
        start = self.at
        self.skip(length, what)
        return self._data[start : self.at].decode("utf-8", "replace")

    def skip_strings(self, count: int, what: str) -> None:
        """Go on behind `count` strings. A vocabulary takes half a million steps, so the loop calls no functions."""
        if self.at in self._text_ends:
            self.skip(self._text_ends[self.at] - self.at, what)
            return
        data, at, n_known, length_at = self._data, self.at, len(self._data), _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > n_known:
                break
            at += 8 + length_at(data, at)[0]
        else:
            at -= 8
        self.at = at
        self.skip(8, what)  # the checks, at the end or where the loop had to stop

    def value(self, what: str) -> KeyValue:
        kind, count = self.take(_KIND, what), None
        if kind == ARRAY:
            kind, count = self.take(_KIND, what), self.take(_LENGTH, what)
            if count > MAX_ARRAY:
                raise Unsound(f"{what} claims {counted(count, 'entry', 'entries')}")
        start = self.at
        if kind == STRING and count != 0:
            self.skip_strings(1 if count is None else count, what)
        elif kind in _NUMBERS:
            self.skip(np.dtype(_NUMBERS[kind]).itemsize * (1 if count is None else count), what)
        elif kind != STRING:
            raise Unsound(f"{what} is of type {kind}, which does not exist")
        return KeyValue(kind, count, start, self.at)

    def tensor(self, what: str, offset: int) -> TensorInfo:
        """Read one tensor's description; its bytes must begin at `offset`, behind the tensor before."""
        name = self.name(what)
        what = f"tensor {name!r}"
        if len(name.encode()) > MAX_TENSOR_NAME_BYTES:
            raise Unsound(f"{what} has a name of {figure(len(name.encode()))} bytes")
        n_dims = self.take(_KIND, what)
        if n_dims > _MAX_DIMS:
            raise Unsound(f"{what} has {counted(n_dims, 'dimension')}")
        shape = tuple(self.take(_LENGTH, what) for _ in range(n_dims))
        n_elements = math.prod(shape)
        if n_elements == 0:
            raise Unsound(f"{what} has a dimension of 0")
        if n_elements >= 1 << 63:
            raise Unsound(f"{what} claims {counted(n_elements, 'number')}")
        kind, found = self.take(_KIND, what), self.take(_LENGTH, what)
        stored = TYPES.get(kind)
        if stored is None:
            raise Unsound(f"{what} is of type {kind}, which this llama.cpp does not have")
        if (shape or (1,))[0] % stored.n_values:
            raise Unsound(f"{what} has rows of {figure((shape or (1,))[0])} (expected a multiple of {stored.n_values})")
        if found != offset:
            raise Unsound(f"{what} begins at {figure(found)}, expected {figure(offset)}")
        return TensorInfo(name, shape, kind, offset, n_elements // stored.n_values * stored.n_bytes)


def walk(
    data: bytes, n_file_bytes: int, path: Path = Path(), *, text_ends: Mapping[int, int] | None = None
) -> GgufHeader:
    """Read the header at the beginning of `data`, which belongs to the file `path` of `n_file_bytes`.

    `text_ends` maps the start of an array of texts to its end (see `long_texts`). Raises Unsound, and MoreNeeded if
    `data` ends before the header.
    """
    if len(data) < _FIRST_BYTES:
        raise MoreNeeded
    n_tensors, n_keys = _COUNTS.unpack_from(data)
    for n, most, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "keys")):
        if n > most:
            raise Unsound(f"it announces {figure(n)} {what}")
    walker, entries = _Walker(data, n_file_bytes, text_ends or {}), dict[str, KeyValue]()
    for index in range(n_keys):
        key = walker.name(f"key {index}")
        if key in entries:
            raise Unsound(f"key {key!r} occurs twice")
        entries[key] = walker.value(f"key {key!r}")
    alignment = _alignment(data, entries.get(ALIGNMENT_KEY))
    tensors, offset = dict[str, TensorInfo](), 0
    for index in range(n_tensors):
        tensor = walker.tensor(f"tensor {index}", offset)
        if tensor.name in tensors:
            raise Unsound(f"tensor {tensor.name!r} occurs twice")
        tensors[tensor.name] = tensor
        offset += padded(tensor.n_bytes, alignment)
    end = walker.at
    return GgufHeader(path, n_file_bytes, data[:end], entries, tuple(tensors.values()), end, padded(end, alignment))


def padded(n_bytes: int, alignment: int) -> int:
    """`n_bytes`, rounded up to a multiple of `alignment`."""
    return n_bytes + -n_bytes % alignment


def _alignment(data: bytes, entry: KeyValue | None) -> int:
    if entry is None:
        return ALIGNMENT
    if (entry.kind, entry.count) != (_U32, None):
        raise Unsound(f"{ALIGNMENT_KEY} is not a 32-bit number")
    found: int = _KIND.unpack_from(data, entry.start)[0]
    if found < 1 or found & (found - 1):
        raise Unsound(f"{ALIGNMENT_KEY} is {figure(found)} (expected a power of two)")
    return found


def long_texts(header: GgufHeader) -> dict[int, int]:
    """Start -> end of the header's long arrays of texts; finding the ends is most of the reading time."""
    return {
        entry.start: entry.end
        for entry in header.entries.values()
        if entry.kind == STRING and (entry.count or 0) > _MANY_TEXTS
    }


def walk_from(
    read: Read,
    n_file_bytes: int,
    path: Path = Path(),
    *,
    first: int,
    step: int,
    text_ends: Mapping[int, int] | None = None,
) -> GgufHeader:
    """`walk` with data read piece by piece: `first` bytes, then `step` more at a time. Raises Unsound."""
    data, wanted = b"", first
    while True:
        data += read(len(data), min(wanted, n_file_bytes))
        try:
            return walk(data, n_file_bytes, path, text_ends=text_ends)
        except MoreNeeded:
            if len(data) < min(wanted, n_file_bytes) or len(data) >= n_file_bytes:
                raise Unsound(f"it ends inside its header, after {counted(len(data), 'byte')}") from None
        wanted += step


def require_sound_values(header: GgufHeader) -> None:
    """Raise Unsound for NaN, and for a vocabulary that ends llama.cpp: no text, equal texts, or a byte without a token.

    Raises ModelFileError for a vocabulary of another type.
    """
    for key, entry in header.entries.items():
        if entry.kind in _NUMBERS and "f" in _NUMBERS[entry.kind]:
            count = 1 if entry.count is None else entry.count
            if np.isnan(np.frombuffer(header.data, _NUMBERS[entry.kind], count, entry.start)).any():
                raise Unsound(f"key {key!r} holds NaN")
    texts = _as_read(header.strings(TOKENS))
    if TOKENS in header.entries and not texts:
        raise Unsound("its vocabulary is empty")
    _require_distinct(texts)
    if texts and header.text(TOKENIZER) == _SENTENCEPIECE:
        _require_bytes(frozenset(texts))


def _as_read(tokens: list[bytes]) -> list[bytes]:
    """Token texts as llama.cpp reads them: up to a null byte, and a generated name for an empty one."""
    return [text.partition(b"\0")[0] or b"[EMPTY_%d]" % token for token, text in enumerate(tokens)]


def _require_bytes(texts: frozenset[bytes]) -> None:
    """llama.cpp spells a character without a token with these, and ends the process if one is missing."""
    missing = [name for byte in _BYTES_OF_UTF8 if not {name := b"<0x%02X>" % byte, bytes([byte])} & texts]
    if missing:
        raise Unsound(f"its vocabulary has no {missing[0].decode()} (it lacks {counted(len(missing), 'byte token')})")


def _require_distinct(texts: list[bytes]) -> None:
    if len(set(texts)) == len(texts):
        return
    first: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text in first:
            shown = text[:40].decode("utf-8", "replace")
            raise Unsound(f"tokens {first[text]} and {token} of its vocabulary share the text {shown!r}")
        first[text] = token
