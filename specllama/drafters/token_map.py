"""The tokens that draft and target have in common, and how to spell the target's other tokens with the draft's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np

from specllama.core.arrays import IntArray

NO_TOKEN = -1  # in a map of ids: the target lacks this token

_BYTE_TEXT = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Key: TypeAlias = bytes | str  # the bytes that a token adds to a text; its raw text if it adds none


class Words(Protocol):
    """What a map of ids is made from: `llama.Vocabulary` or `model_facts.Tokenizer`."""

    @property
    def size(self) -> int: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def eot(self) -> int | None: ...

    def texts(self) -> Sequence[str]:
        """The raw entry of every token."""

    def pieces(self) -> Sequence[bytes]:
        """The bytes that every token adds to a text; empty for control tokens."""


class Spelled(Words, Protocol):
    """A vocabulary that can also spell, e.g. `llama.Vocabulary`."""

    @property
    def add_bos(self) -> bool: ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        """The tokens of `text`; special tokens are recognised only if `special`."""

    def piece(self, token: int) -> bytes: ...

    def text(self, token: int) -> str: ...


def owners(words: Words) -> dict[Key, int]:
    """The token of each text. Of several tokens with the same text it is the lowest; byte tokens come last.

    The key of a control token, which adds nothing to a text, is its name. So it never equals a plain text that reads
    the same.
    """
    texts, found = words.texts(), dict[Key, int]()
    for token, piece in enumerate(words.pieces()):
        key = piece or texts[token]
        known = found.setdefault(key, token)
        if _BYTE_TEXT.fullmatch(texts[known]) and not _BYTE_TEXT.fullmatch(texts[token]):
            found[key] = token
    return found


def map_by_text(target: Words, draft: Words) -> IntArray:
    """For every token of the draft the target's token with the same text, or NO_TOKEN.  (draft's size,)

    No two draft tokens share a target token. Begin and end tokens correspond even if their names differ. The common
    tokens are those of token-level intersection (Timor et al. 2502.05202, algorithm 4).
    """
    known, to_target = owners(target), np.full(draft.size, NO_TOKEN, dtype=np.int64)
    for key, token in owners(draft).items():
        to_target[token] = known.get(key, NO_TOKEN)
    taken = set(to_target.tolist())
    for ours, theirs in ((target.bos, draft.bos), (target.eos, draft.eos), (target.eot, draft.eot)):
        if ours is not None and theirs is not None and ours not in taken and to_target[theirs] == NO_TOKEN:
            to_target[theirs] = ours
            taken.add(ours)
    return to_target


class Speller:
    """Spells the target's tokens with the draft's. A token's spelling does not depend on its neighbours.

    So the draft's cells are a function of the committed tokens, and a rollback removes whole spellings.
    """

    def __init__(self, target: Spelled, draft: Spelled, to_target: IntArray) -> None:
        self._target, self._draft = target, draft
        mapped = np.flatnonzero(to_target != NO_TOKEN).tolist()
        self._known: dict[int, tuple[int, ...]] = {int(to_target[token]): (token,) for token in mapped}
        # The draft's tokens at the start of every text.
        self.first: tuple[int, ...] = (draft.bos,) if draft.add_bos and draft.bos is not None else ()

    def __call__(self, token: int) -> tuple[int, ...]:
        """The draft's tokens for one of the target's; at least one.

        The common token, if any; else tokens with the same bytes (for a control token: its name). If the draft cannot
        write these bytes, any token serves: it only makes the draft's guess worse.
        """
        if token not in self._known:
            data = self._target.piece(token) or self._target.text(token).encode("utf-8", "replace")
            self._known[token] = tuple(self._spell(data)) or (self._draft.bos or 0,)
        return self._known[token]

    def _spell(self, data: bytes) -> list[int]:
        """By the draft's tokenizer, unless that changes the bytes: some add a space, none can split a character."""
        tokens = self._draft.tokenize(data, special=False)
        same = b"".join(map(self._draft.piece, tokens)) == data
        return tokens if same else list(self._longest(data))

    def _longest(self, data: bytes) -> Iterator[int]:
        """The longest token that fits, repeatedly; a byte that no token fits is left out."""
        at = 0
        while at < len(data):
            lengths = range(self._n_longest, 0, -1)  # a slice ends with `data`
            n = next((n for n in lengths if data[at : at + n] in self._by_bytes), 0)
            if n:
                yield self._by_bytes[data[at : at + n]]
            at += n or 1

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The lowest token of each piece."""
        return {piece: token for token, piece in reversed([*enumerate(self._draft.pieces())])}

    @cached_property
    def _n_longest(self) -> int:
        return max(map(len, self._by_bytes))
