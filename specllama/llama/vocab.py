"""A model's vocabulary: text to tokens and back, special tokens, the tokens that end an answer."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

from specllama.base.errors import PromptError

_KINDS = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
_MAX_TEXT_BYTES = 2**31 - 1  # lengths are 32-bit in llama.cpp
_PIECE_BYTES = 64  # nearly every piece is shorter; a longer one is asked for again
_UNKNOWN, _CONTROL = 1 << 0, 1 << 3  # llama_token_attr


class Vocabulary:
    """The vocabulary of a loaded model. `owner` is kept so that the model lives at least as long."""

    def __init__(self, lib: Any, handle: int, owner: object) -> None:
        self._lib = lib
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

    def close(self) -> None:
        """Let go of the model. What was cached can still be read; anything else raises ValueError."""
        self._owner = None

    def tokenize(self, text: str | bytes, *, special: bool, bos: bool = False) -> list[int]:
        """The tokens of `text`. With `special`, text like `<|im_end|>` becomes the control token; without, plain text.

        `bos` puts the begin token in front (where the vocabulary has one); nothing else is ever added. Bytes that are
        not UTF-8 become U+FFFD, null bytes are text. Raises PromptError where llama.cpp cannot take the text.
        """
        self._check()
        data = _clean_utf8(text)
        if len(data) > _MAX_TEXT_BYTES:
            raise PromptError(f"the text has {len(data)} bytes, more than llama.cpp can tokenise at once")
        tokens = self._tokenize(data, special) if data else []
        return [self.bos, *tokens] if bos and self.bos is not None else tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that `token` adds to a text; control tokens add none unless `special`. Cached."""
        key = (token, special)
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._piece(token, special)
        return found

    def text(self, token: int) -> str:
        """The raw entry of the vocabulary, such as `Ġthe` or `▁the`."""
        self._check(token)
        return (self._lib.llama_vocab_get_text(self._handle, token) or b"").decode("utf-8", "replace")

    def texts(self) -> list[str]:
        """All raw entries in order: what two vocabularies are compared by."""
        self._check()
        get, handle = self._lib.llama_vocab_get_text, self._handle
        return [(get(handle, token) or b"").decode("utf-8", "replace") for token in range(self.size)]

    def pieces(self) -> list[bytes]:
        """What `piece` says of every token, in order."""
        self._check()
        get, handle, capacity = self._lib.llama_token_to_piece, self._handle, _PIECE_BYTES
        buffer, pieces = ctypes.create_string_buffer(capacity), list[bytes]()
        for token in range(self.size):
            count = get(handle, token, buffer, capacity, 0, False)
            pieces.append(buffer.raw[:count] if count >= 0 else self._piece(token, special=False))
        return pieces

    def is_control(self, token: int) -> bool:
        """True for tokens that steer and are never shown, such as `<|im_start|>`."""
        self._check(token)
        return bool(self._lib.llama_vocab_is_control(self._handle, token))

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends an answer (end of text, of turn, of message); there may be several."""
        self._check()
        is_end, handle = self._lib.llama_vocab_is_eog, self._handle
        return frozenset(token for token in range(self.size) if is_end(handle, token))

    def special_texts(self) -> tuple[str, ...]:
        """The texts that `tokenize` turns into a token with `special` and reads as plain text without. Cached.

        Those of user-defined tokens are not among them: llama.cpp looks for them either way, such as Gemma's `\\n\\n`.
        """
        return self._special_texts

    @functools.cached_property
    def _special_texts(self) -> tuple[str, ...]:
        self._check()
        attributes = map(self._lib.llama_vocab_get_attr, itertools.repeat(self._handle), range(self.size))
        return tuple(self.text(token) for token, bits in enumerate(attributes) if bits & (_UNKNOWN | _CONTROL))

    def _special(self, getter: Callable[[int], int]) -> int | None:
        token = getter(self._handle)
        return token if 0 <= token < self.size else None

    def _check(self, token: int = 0) -> None:
        if self._owner is None:
            raise ValueError("the model of this vocabulary was closed")
        if not 0 <= token < self.size:  # llama.cpp would throw a C++ exception through C, which ends the process
            raise ValueError(f"token {token} is outside the vocabulary of {self.size} tokens")

    def _tokenize(self, data: bytes, special: bool) -> list[int]:
        capacity = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            count = self._lib.llama_tokenize(self._handle, data, len(data), buffer, capacity, False, special)
            if 0 <= count <= capacity:
                return buffer[:count]
            if -count <= capacity:
                raise PromptError(f"llama.cpp cannot tokenise this text of {len(data)} bytes")
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
    """UTF-8 that llama.cpp's tokenizers can walk through; undecodable arguments (surrogates) are bytes again first."""
    data = text.encode("utf-8", "surrogateescape" if _escaped(text) else "replace") if isinstance(text, str) else text
    return data.decode("utf-8", "replace").encode("utf-8")


def _escaped(text: str) -> bool:
    """True where every surrogate in `text` stands for a byte that Python could not decode."""
    return all(0xDC80 <= ord(char) <= 0xDCFF for char in text if 0xD800 <= ord(char) <= 0xDFFF)
