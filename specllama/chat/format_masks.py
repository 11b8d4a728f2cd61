"""The tokens that a format allows: llguidance's masks over a model's vocabulary, as a `core.constraint.Constraint`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from specllama.base.errors import UsageError
from specllama.base.signals import held
from specllama.chat.format import AnswerFormat, limits, too_much_work
from specllama.core.arrays import IntArray
from specllama.core.constraint import NOTHING, Allowed
from specllama.core.types import common_prefix

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Bits: TypeAlias = npt.NDArray[np.uint8]

MOST_FORCED = 64  # tokens that are looked for at once
MOST_KNOWN = 16


class FormatVocabulary(Protocol):
    """What the masks need of a vocabulary; `llama.Vocabulary` has it."""

    size: int

    @property
    def end_tokens(self) -> frozenset[int]: ...
    def piece(self, token: int) -> bytes: ...
    def pieces(self) -> list[bytes]: ...
    def tokenize(self, text: str, *, special: bool) -> list[int]: ...


class _Tokens:
    """A vocabulary as llguidance's TokenizerWrapper wants it. Control tokens have no bytes, so they never fit."""

    bos_token_id = None

    def __init__(self, vocab: FormatVocabulary) -> None:
        self._vocab = weakref.ref(vocab)  # the tokenizer is kept as long as the vocabulary, not longer
        self.tokens = vocab.pieces()
        self.special_token_ids = sorted(vocab.end_tokens)
        self.eos_token_id = self.special_token_ids[0]
        # Some tokenizers put a space before every text; a line break before it keeps the space away.
        plain = b"".join(self.tokens[token] for token in vocab.tokenize("a", special=False)) == b"a"
        self._before = "" if plain else "\n"

    def __call__(self, text: str | bytes) -> list[int]:
        vocab = self._vocab()
        if vocab is None:
            raise ValueError("the model of this vocabulary was closed")
        whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
        tokens = vocab.tokenize(self._before + whole, special=False)
        spelled = b""
        for i, token in enumerate(tokens if self._before else ()):
            spelled += self.tokens[token]
            if spelled.endswith(self._before.encode()):
                return tokens[i + 1 :]
        return tokens


_known: WeakKeyDictionary[FormatVocabulary, LLTokenizer] = WeakKeyDictionary()


def _tokenizer(vocab: FormatVocabulary) -> LLTokenizer:
    """llguidance's view of a vocabulary; made once, in about a second for 152k tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if vocab not in _known:
        tokens = _Tokens(vocab)
        with held():  # it calls `tokens`, and hides what a handler raises there
            wrapped = TokenizerWrapper(tokens)
        _known[vocab] = LLTokenizer(wrapped, n_vocab=vocab.size, eos_token=tokens.special_token_ids)
    return _known[vocab]


@dataclass(frozen=True, slots=True)
class _State:
    """What may follow a path."""

    allowed: Allowed
    forced: tuple[int, ...] = ()  # the tokens that must follow, as far as the tokenizer is sure of them


_NOTHING = _State(NOTHING)


def _set_bits(bits: Bits, n: int) -> IntArray:
    """The places of the bits that are set among the first `n`, ascending: only bytes that are not 0 are unpacked.

    numpy finds True several times faster than numbers that are not 0.
    """
    at = (bits != 0).nonzero()[0]
    found = np.unpackbits(bits[at], bitorder="little").view(np.bool_).nonzero()[0]
    places: IntArray = at[found >> 3] * 8 + (found & 7)
    return places[: places.searchsorted(n)]


class FormatConstraint:
    """A `Constraint` for one answer.

    Where the format forces text, only the tokens into which the tokenizer splits it are allowed. They are found when
    the text before them is complete, and hold until the last of them: so the masks depend on the answer alone, not on
    how it was drafted.
    """

    def __init__(self, form: AnswerFormat, vocab: FormatVocabulary) -> None:
        from llguidance import LLMatcher

        if not vocab.end_tokens:
            raise UsageError("the target has no end token, so an answer in a format could not end")
        self._vocab, self._ends = vocab, vocab.end_tokens
        self._new = partial(LLMatcher, _tokenizer(vocab), form.rules, log_level=0, limits=limits())
        self._matcher = self._new()
        self._settled: list[int] = []  # committed tokens that the matcher has read
        self._read: list[int] = []  # tokens that the matcher has read, without those that cannot change any more
        self._line: list[int] = []  # committed tokens, from the same one on
        self._states: dict[tuple[int, ...], _State] = {}  # by path
        self._known: dict[bytes, Allowed] = {}  # the last masks: within a string they repeat

    def allowed(self, path: Sequence[int]) -> Allowed:
        return self._after(tuple(path)).allowed

    def forced(self) -> Sequence[int]:
        path: tuple[int, ...] = ()
        while len(path) < MOST_FORCED and (forced := self._after(path).forced):
            path += forced
        return path

    def advance(self, tokens: Sequence[int]) -> None:
        here = self._after(tuple(tokens))
        self._states = {(): here}
        self._line.extend(tokens)
        n_sure = common_prefix(self._read, self._line)
        self._settled += self._read[:n_sure]
        del self._read[:n_sure], self._line[:n_sure]

    def _after(self, path: tuple[int, ...]) -> _State:
        """The state after a path; those of its beginnings come first, because each depends on the one before."""
        if (state := self._states.get(path)) is None:
            state = self._next(self._after(path[:-1]), path) if path else self._fresh(path)
            self._states[path] = state
        return state

    def _next(self, before: _State, path: tuple[int, ...]) -> _State:
        token = path[-1]
        if before is _NOTHING or token in self._ends:
            return _NOTHING
        if before.forced:
            if token != before.forced[0]:
                return _NOTHING
            if rest := before.forced[1:]:
                return _State(Allowed(np.array(rest[:1])), rest)
        return self._fresh(path)

    def _fresh(self, path: tuple[int, ...]) -> _State:
        """The state by the matcher. Raises UsageError if the format takes too much work."""
        state = self._here() if self._go(path) else _NOTHING
        if self._matcher.is_error():
            reason, found = self._matcher.stop_reason(), self._matcher.get_error()
            self._restart()
            if "NoExtension" in (reason + found):  # no token of the vocabulary goes on
                return _NOTHING
            raise too_much_work("the format", found)
        return state

    def _here(self) -> _State:
        """The state where the matcher is."""
        text, tokens = self._matcher.compute_ff_bytes(), tuple[int, ...]()
        if text:
            with held():  # it calls the tokenizer, and takes what a handler raises there for a bad format
                tokens = tuple(self._matcher.compute_ff_tokens())
        if tokens and text.startswith(b"".join(map(self._vocab.piece, tokens))):
            return _State(Allowed(np.array(tokens[:1])), tokens)
        mask = self._mask()
        if tokens and not mask.all_but:  # the tokenizer loses a part of the text, which llguidance does not notice
            fitting = [token for token in mask.ids.tolist() if text.startswith(self._vocab.piece(token) or b"\0")]
            mask = Allowed(np.array(fitting, dtype=np.int64))
        return _State(mask)

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher behind a path; False if the path does not fit.

        After a signal's exception in here the matcher may be a token ahead: the answer has ended, and with it this.
        """
        wanted = [*self._line, *path]
        n_same = common_prefix(self._read, wanted)
        self._matcher.rollback(len(self._read) - n_same)
        del self._read[n_same:]
        n_read = self._matcher.try_consume_tokens(wanted[n_same:])
        self._read += wanted[n_same : n_same + n_read]
        return n_same + n_read == len(wanted)

    def _restart(self) -> None:
        """After an error, which a matcher does not leave."""
        self._matcher = self._new()
        self._line = [*self._settled, *self._line]
        self._settled, self._read = [], []

    def _mask(self) -> Allowed:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            return NOTHING
        if (known := self._known.pop(mask, None)) is None:
            bits = np.frombuffer(mask, np.uint8)
            few = np.count_nonzero(bits) * 2 <= bits.size
            known = Allowed(_set_bits(bits if few else ~bits, self._vocab.size), all_but=not few)
        self._known[mask] = known
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known


def constraint_of(form: AnswerFormat | None, vocab: FormatVocabulary) -> FormatConstraint | None:
    """A new constraint for an answer; None for free text."""
    return None if form is None else FormatConstraint(form, vocab)
