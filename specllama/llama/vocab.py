"""A model's vocabulary: text to tokens and back, special tokens, end tokens."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specllama.base.disk import FileRecord
from specllama.base.errors import PromptError, UnsupportedModel
from specllama.base.text import counted, figure
from specllama.llama import library_hash
from specllama.llama.header import Header

_KINDS = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
_LOSSLESS = ("bpe", "spm", "rwkv")  # the others normalize text, or make one token of an unknown word
_MAX_TEXT_BYTES = 2**31 - 1  # lengths are 32-bit in llama.cpp
_PIECE_BYTES = 64  # nearly all pieces are shorter; a longer one takes a second call
_MANY = 10_000  # tokens: asking llama.cpp for something of each takes longer than reading a record
_ENDS, _SPECIALS, _VERSION = "end tokens", "special tokens", 1  # kinds and version of the records
_UNKNOWN, _CONTROL = 1 << 0, 1 << 3  # llama_token_attr


def token_records(lib: Any, about: Header) -> dict[str, FileRecord]:
    """Where a `Vocabulary` keeps what takes a call for each token; empty for a small one. Made before the model."""
    if about.n_vocab < _MANY:
        return {}
    by = [_VERSION, library_hash.of(Path(lib.llama_cpp._base_path))]
    return {kind: FileRecord(kind, *about.parts, by=by) for kind in (_ENDS, _SPECIALS)}


class Vocabulary:
    """The vocabulary of a loaded model. The reference to `owner` keeps the model alive."""

    def __init__(
        self, lib: Any, handle: int, owner: object, records: Mapping[str, FileRecord] = MappingProxyType({})
    ) -> None:
        """`records`: see `token_records`."""
        self._lib = lib
        self._records = records
        self._handle = handle
        self._owner: object | None = owner
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.size: int = lib.llama_vocab_n_tokens(handle)
        self.kind = _KINDS.get(lib.llama_vocab_type(handle), "unknown")
        self.bos = self._special(lib.llama_vocab_bos)
        self.eos = self._special(lib.llama_vocab_eos)
        self.eot = self._special(lib.llama_vocab_eot)
        self.add_bos = bool(lib.llama_vocab_get_add_bos(handle))
        self.add_eos = bool(lib.llama_vocab_get_add_eos(handle))
        self._parts = self._rwkv_parts() if self.kind == "rwkv" else None

    def close(self) -> None:
        """Release the model. Cached values stay available; other calls raise ValueError."""
        self._owner = None

    def tokenize(self, text: str | bytes, *, special: bool, bos: bool = False) -> list[int]:
        """The tokens of `text`. With `special`, text like `<|im_end|>` becomes the control token; without, plain text.

        `bos` puts the begin token in front, if the vocabulary has one. Bytes that are not UTF-8 become U+FFFD; null
        bytes are text. Raises PromptError if llama.cpp cannot tokenize the text.
        """
        self._check()
        data = _clean_utf8(text)
        if len(data) > _MAX_TEXT_BYTES:
            raise PromptError(f"the text has {counted(len(data), 'byte')} (expected at most {figure(_MAX_TEXT_BYTES)})")
        parts = [data] if special or self._parts is None else self._parts.split(data)
        tokens = [token for part in parts if part for token in self._tokenize(part, special)]
        return [self.bos, *tokens] if bos and self.bos is not None else tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of `token` in a text; control tokens have none unless `special`. Cached."""
        key = (token, special)
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._piece(token, special)
        return found

    def text(self, token: int) -> str:
        """The raw entry, such as `Ġthe` or `▁the`."""
        self._check(token)
        return (self._lib.llama_vocab_get_text(self._handle, token) or b"").decode("utf-8", "replace")

    def texts(self) -> list[str]:
        """All raw entries in order, to compare vocabularies."""
        self._check()
        get, handle = self._lib.llama_vocab_get_text, self._handle
        return [(get(handle, token) or b"").decode("utf-8", "replace") for token in range(self.size)]

    def pieces(self) -> list[bytes]:
        """`piece` of every token, in order."""
        self._check()
        get, handle, capacity = self._lib.llama_token_to_piece, self._handle, _PIECE_BYTES
        buffer, pieces = ctypes.create_string_buffer(capacity), list[bytes]()
        for token in range(self.size):
            count = get(handle, token, buffer, capacity, 0, False)
            pieces.append(buffer.raw[:count] if count >= 0 else self._piece(token, special=False))
        return pieces

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """All tokens that end an answer (end of text, of turn, of message)."""
        return frozenset(self._those(_ENDS, self._find_end_tokens))

    def _find_end_tokens(self) -> list[int]:
        self._check()
        is_end, handle = self._lib.llama_vocab_is_eog, self._handle
        return [token for token in range(self.size) if is_end(handle, token)]

    def special_texts(self) -> tuple[str, ...]:
        """The texts that `tokenize` turns into one token only with `special`. Cached.

        User-defined tokens, such as Gemma's `\\n\\n`, are excluded: llama.cpp finds them in any text.
        """
        return self._special_texts

    @functools.cached_property
    def _special_texts(self) -> tuple[str, ...]:
        return tuple(map(self.text, self._those(_SPECIALS, self._find_special)))

    def _find_special(self) -> list[int]:
        self._check()
        attributes = map(self._lib.llama_vocab_get_attr, itertools.repeat(self._handle), range(self.size))
        return [token for token, bits in enumerate(attributes) if bits & (_UNKNOWN | _CONTROL)]

    def _those(self, kind: str, find: Callable[[], list[int]]) -> list[int]:
        """The tokens that `find` finds, or a record of them; the file that holds it is not trusted to be in range."""
        record = self._records.get(kind)
        known = None if record is None else record.value(list[int])
        if known is not None and all(0 <= token < self.size for token in known):
            return known
        found = find()
        if record is not None:
            record.keep(found)
        return found

    def least_tokens(self, text: str) -> int:
        """A bound from below of the tokens of `text`, without tokenizing it; 0 if the tokenizer may shorten text."""
        return len(text.encode("utf-8", "replace")) // self._most_bytes if self.kind in _LOSSLESS else 0

    @functools.cached_property
    def _most_bytes(self) -> int:
        """Most bytes of a text that one token stands for."""
        return max(map(len, (*self.pieces(), *(text.encode() for text in self._special_texts))))

    def _special(self, getter: Callable[[int], int]) -> int | None:
        token = getter(self._handle)
        return token if 0 <= token < self.size else None

    def _check(self, token: int = 0) -> None:
        if self._owner is None:
            raise ValueError("the model of this vocabulary was closed")
        if not 0 <= token < self.size:  # llama.cpp would throw a C++ exception through C, which ends the process
            raise ValueError(f"token {token} is outside the vocabulary of {self.size} tokens")

    def _rwkv_parts(self) -> re.Pattern[bytes] | None:
        """Where to cut plain text, so that llama.cpp's RWKV tokenizer takes no text for a control token.

        Raises UnsupportedModel for a vocabulary on which that tokenizer may never end.
        """
        if sum(len(piece) == 1 for piece in set(self.pieces())) < 256:
            raise UnsupportedModel(
                "the vocabulary lacks tokens of one byte (expected all 256 in an RWKV vocabulary)",
                hint="the file may be damaged: download it again",
            )
        marks = [text.encode() for text in self._special_texts]
        cuts = [b"(?<=" + re.escape(mark[:1]) + b")(?=" + re.escape(mark[1:]) + b")" for mark in marks if mark[1:]]
        return re.compile(b"|".join(cuts)) if cuts else None

    def _tokenize(self, data: bytes, special: bool) -> list[int]:
        capacity = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            count = self._lib.llama_tokenize(self._handle, data, len(data), buffer, capacity, False, special)
            if 0 <= count <= capacity:
                return buffer[:count]
            if -count <= capacity:
                raise PromptError(f"llama.cpp cannot tokenize this text of {len(data)} bytes")
            capacity = -count

    def _piece(self, token: int, special: bool) -> bytes:
        self._check(token)
        capacity = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            count = self._lib.llama_token_to_piece(self._handle, token, buffer, capacity, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count


def _clean_utf8(text: str | bytes) -> bytes:
    """Valid UTF-8, which llama.cpp's tokenizers need; surrogates of undecodable arguments become their bytes first."""
    data = text.encode("utf-8", "surrogateescape" if _escaped(text) else "replace") if isinstance(text, str) else text
    return data.decode("utf-8", "replace").encode("utf-8")


def _escaped(text: str) -> bool:
    """True if every surrogate in `text` is a byte that Python could not decode."""
    return all(0xDC80 <= ord(char) <= 0xDCFF for char in text if 0xD800 <= ord(char) <= 0xDFFF)
