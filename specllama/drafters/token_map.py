"""Which tokens of a draft are tokens of the target, too, and how to spell the target's others with the draft's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np

from specllama.core.arrays import IntArray

NO_TOKEN = -1  # in a map of ids: the target has no such token

_BYTE_TEXT = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Key: TypeAlias = bytes | str  # the bytes a token adds to a text; where it adds none, its raw text


class Words(Protocol):
    """What a map of ids is made from; `llama.Vocabulary` and `model_facts.Tokenizer` are such."""

    @property
    def size(self) -> int:
        """How many tokens."""
        ...

    @property
    def bos(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos(self) -> int | None:
        """The token that ends it."""
        ...

    @property
    def eot(self) -> int | None:
        """The token that ends a turn."""
        ...

    def texts(self) -> Sequence[str]:
        """The raw entry of every token."""
        ...

    def pieces(self) -> Sequence[bytes]:
        """The bytes that every token adds to a text; none for those that steer."""
        ...


class TargetVocabulary(Protocol):
    """The vocabulary whose tokens are to be spelled; `llama.Vocabulary` is one."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        ...

    def text(self, token: int) -> str:
        """Its raw entry."""
        ...


class DraftVocabulary(Protocol):
    """The vocabulary that spells them; `llama.Vocabulary` is one."""

    @property
    def bos(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def add_bos(self) -> bool:
        """Does every text want one?"""
        ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        """The tokens of `text`, all of it plain text unless `special`."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        ...

    def pieces(self) -> Sequence[bytes]:
        """The same of every token."""
        ...


def owners(words: Words) -> dict[Key, int]:
    """The token that stands for each text. Of several with one text it is the lowest, but byte tokens come last.

    Control tokens, which add nothing to a text, are known by their names, and never taken for plain text that reads
    the same.
    """
    texts, found = words.texts(), dict[Key, int]()
    for token, piece in enumerate(words.pieces()):
        key = piece or texts[token]
        known = found.setdefault(key, token)
        if known != token and _BYTE_TEXT.fullmatch(texts[known]) and not _BYTE_TEXT.fullmatch(texts[token]):
            found[key] = token
    return found


def map_by_text(target: Words, draft: Words) -> IntArray:
    """For every token of the draft the target's token of the same text, or NO_TOKEN.  (draft's size,)

    No two have the same one. Begin and end tokens that are named differently stand for each other. The tokens that
    both have are those of token-level intersection (Timor et al. 2502.05202, algorithm 4).
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
    """Spells the target's tokens with the draft's. A token's spelling never depends on those around it.

    So the draft's cells are a function of the committed tokens, and taking tokens back takes back whole spellings.
    """

    def __init__(self, target: TargetVocabulary, draft: DraftVocabulary, to_target: IntArray) -> None:
        self._target, self._draft = target, draft
        mapped = np.flatnonzero(to_target != NO_TOKEN).tolist()
        self._known: dict[int, tuple[int, ...]] = {int(to_target[token]): (token,) for token in mapped}
        self.first: tuple[int, ...] = ()  # what the draft wants before all else
        if draft.add_bos and draft.bos is not None:
            self.first = (draft.bos,)

    def __call__(self, token: int) -> tuple[int, ...]:
        """The draft's tokens for one of the target's; at least one.

        The same token where there is one; else tokens of the same bytes, those of a control token being its name; and
        where the draft cannot even write bytes, any token: it only spoils the draft's guess.
        """
        if token not in self._known:
            data = self._target.piece(token) or self._target.text(token).encode("utf-8", "replace")
            self._known[token] = tuple(self._spell(data)) or (self._draft.bos or 0,)
        return self._known[token]

    def _spell(self, data: bytes) -> list[int]:
        """As the draft's tokenizer would, unless that changes the text: some add a space, none can cut a character."""
        tokens = self._draft.tokenize(data, special=False)
        same = b"".join(map(self._draft.piece, tokens)) == data
        return tokens if same else list(self._longest(data))

    def _longest(self, data: bytes) -> Iterator[int]:
        """The longest token that fits, again and again; a byte that nothing fits is left out."""
        at = 0
        while at < len(data):
            lengths = range(min(len(data) - at, self._n_longest), 0, -1)
            n = next((n for n in lengths if data[at : at + n] in self._by_bytes), 0)
            if n:
                yield self._by_bytes[data[at : at + n]]
            at += n or 1

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        found = dict[bytes, int]()
        for token, piece in enumerate(self._draft.pieces()):
            if piece:
                found.setdefault(piece, token)
        return found

    @cached_property
    def _n_longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)
