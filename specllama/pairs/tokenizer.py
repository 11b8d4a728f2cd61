"""A model file's tokenizer, read from its header alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from specllama import llama
from specllama.llama.header import Header
from specllama.pairs.draft_in_target_ids import read_vocab_map
from specllama.prompts.load import sample_text

MERGES, TYPES = "tokenizer.ggml.merges", "tokenizer.ggml.token_type"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types as GGUF counts them


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary and how text is split into it. Also a `token_map.Words`."""

    kind: str  # bpe, spm, ...
    pre: str  # the pre-tokenizer; only BPE has one
    entries: Sequence[str]  # the text of every token
    types: Sequence[int]  # (size,), or empty if the file has none
    n_merges: int
    merges_sum: str  # equal for equal merges
    bos: int | None
    eos: int | None
    eot: int | None
    add_bos: bool
    add_eos: bool
    end_tokens: frozenset[int]
    spellings: Sequence[bytes] = ()  # the bytes that each token adds to a text; b"" for control tokens
    sample: Sequence[int] = ()  # the tokens of `sample_text`
    vocab_map: tuple[int, ...] | None = None  # of a trimmed draft: its parent's id of each token

    @property
    def size(self) -> int:
        return len(self.entries)

    def texts(self) -> Sequence[str]:
        return self.entries

    def pieces(self) -> Sequence[bytes]:
        return self.spellings


def read_tokenizer(header: Header) -> Tokenizer:
    """The tokenizer as llama.cpp reads it. Raises ModelFileError and UnsupportedModel."""
    gguf, vocab_map = header.gguf, read_vocab_map(header)
    types = gguf.numbers(TYPES)
    with closing(llama.load_vocabulary(header)) as vocab:
        merges = gguf.strings(MERGES)
        return Tokenizer(
            kind=vocab.kind,
            pre=gguf.text("tokenizer.ggml.pre", "default"),
            entries=vocab.texts(),
            types=[] if types is None else types.tolist(),
            n_merges=len(merges),
            merges_sum=hashlib.sha256(b"\n".join(merges)).hexdigest()[:16],
            bos=vocab.bos,
            eos=vocab.eos,
            eot=vocab.eot,
            add_bos=vocab.add_bos,
            add_eos=vocab.add_eos,
            end_tokens=vocab.end_tokens,
            spellings=vocab.pieces(),
            sample=vocab.tokenize(sample_text(), special=False),
            vocab_map=None if vocab_map is None else tuple(vocab_map.tolist()),
        )
