"""Cut a model's vocabulary to its most frequent tokens (FR-Spec, VocabTrim): which stay, and what of its file changes.

The head of a small model is a large part of what a draft step reads, and most of its rows are for tokens that hardly
ever come. The ids that stay are numbered anew; the file says what they were called before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specllama.base.errors import UnsupportedModel, UsageError
from specllama.core.arrays import IntArray
from specllama.files import gguf_rewrite
from specllama.files.gguf_rewrite import SourceFile, SourceTensor
from specllama.llama.header import Header
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.tokenizer import BYTE, CONTROL, MERGES, UNKNOWN, USER_DEFINED, Tokenizer

MULTIPLE = 64  # kernels take head matrices whose rows are a multiple of up to this only
LEAST_TOKENS = 512

_TOKENIZER = "tokenizer.ggml."
_ID_ENDINGS = ("_token_id", "_token_ids", "suppress_tokens")
_PER_TOKEN = ("token_embd.weight", "output.weight", "output.bias")  # tensors with a row for each token
_KINDS = ("bpe", "spm")


def kept_tokens(source: SourceFile, tokenizer: Tokenizer, n_tokens: int) -> IntArray:
    """The ids that stay, ascending: all that are special, all single bytes, and the lowest of the others.

    Vocabularies of the kinds that are taken here are numbered by frequency: the lowest ids are the first merges. With
    the bytes, what has no token any more can still be spelled.  (n_tokens or some more, a multiple of MULTIPLE)
    """
    if tokenizer.kind not in _KINDS:
        raise UnsupportedModel(
            f"a vocabulary of the kind {tokenizer.kind} cannot be cut: its tokens may not be ordered by frequency",
            hint="derive a draft with --quant or --drop-layers",
        )
    special = _special(source, tokenizer)
    wanted = n_tokens + -n_tokens % MULTIPLE
    if wanted >= tokenizer.size:
        raise UsageError(f"a vocabulary of {n_tokens:,} tokens is no smaller than the model's own, {tokenizer.size:,}")
    if wanted < max(len(special), LEAST_TOKENS):
        raise UsageError(
            f"a vocabulary of {n_tokens:,} tokens is too small: {len(special):,} are special tokens and single bytes, "
            f"and {LEAST_TOKENS} is the least"
        )
    others = (token for token in range(tokenizer.size) if token not in special)
    kept = [*special, *(token for token, _ in zip(others, range(wanted - len(special)), strict=False))]
    return np.array(sorted(kept))


def _special(source: SourceFile, tokenizer: Tokenizer) -> set[int]:
    """What must stay whatever its id is: tokens that steer, single bytes, and all that the metadata names."""
    steering = {UNKNOWN, CONTROL, USER_DEFINED, BYTE}
    found = {token for token, kind in enumerate(tokenizer.types) if kind in steering}
    single = [token for token, piece in enumerate(tokenizer.spellings) if len(piece) == 1]
    found |= set(single)
    known = {tokenizer.spellings[token][0] for token in single}
    others = (piece for token, piece in enumerate(tokenizer.spellings) if token not in found)
    missing = {byte for piece in others for byte in piece} - known
    if missing:
        raise UnsupportedModel(
            f"{source.header.path.name} has tokens with bytes for which it has no token ({len(missing)} of 256), "
            "so a smaller vocabulary could not spell them",
            hint="derive a draft with --quant or --drop-layers",
        )
    named = (source.header.value(key) for key in source.header.entries if _is_id(key))
    found |= {token for token in named if isinstance(token, int) and 0 <= token < tokenizer.size}
    return found | {token for token in tokenizer.end_tokens if token < tokenizer.size}


def _is_id(key: str) -> bool:
    return key.startswith(_TOKENIZER) and key.endswith(_ID_ENDINGS)


def with_vocabulary(
    source: SourceFile, header: Header, tensors: Sequence[SourceTensor], kept: IntArray
) -> tuple[Mapping[str, bytes | None], list[SourceTensor]]:
    """(metadata that changes, tensors with the rows of `kept` alone). Raises UnsupportedModel.  kept: (n,)"""
    n_before = source.header.count(f"{_TOKENIZER}tokens")
    rows = [tensor for tensor in tensors if tensor.name in _PER_TOKEN]
    if n_before is None or not rows or any(tensor.n_rows != n_before for tensor in rows):
        raise UnsupportedModel(
            f"{header.path.name} has not one row in its matrices for each token of its vocabulary, so it cannot be cut"
        )
    outside = [tensor for tensor in tensors if not tensor.name.startswith("blk.") and tensor.name not in _PER_TOKEN]
    if any(tensor.n_rows == n_before for tensor in outside):
        raise UnsupportedModel(
            f"{header.path.name} ({header.architecture}) has matrices with a row for each token that are not known here"
        )
    left = [replace(tensor, rows=kept) if tensor.name in _PER_TOKEN else tensor for tensor in tensors]
    return {**_tokenizer_values(source, header, kept, n_before), VOCAB_MAP: gguf_rewrite.integers(kept)}, left


def _tokenizer_values(source: SourceFile, header: Header, kept: IntArray, n_before: int) -> dict[str, bytes | None]:
    """The tokenizer's part of the metadata, for the tokens that stay."""
    gguf, values = source.header, dict[str, bytes | None]()
    for key in gguf.entries:
        if key.startswith(_TOKENIZER) and source.header.count(key) == n_before:
            values[key] = gguf_rewrite.picked(gguf, key, kept)
    if MERGES in gguf.entries:
        texts = gguf.strings(f"{_TOKENIZER}tokens")
        values[MERGES] = gguf_rewrite.strings(_merges_within(gguf.strings(MERGES), {texts[token] for token in kept}))
    number = {int(old): new for new, old in enumerate(kept)}
    for key in filter(_is_id, gguf.entries):
        if source.header.count(key) is not None:  # several ids of one kind
            old = gguf.numbers(key)
            new = [] if old is None else [number[int(token)] for token in old.tolist() if int(token) in number]
            values[key] = gguf_rewrite.integers(np.array(new)) if new else None
        else:  # an id that is not there (-1 as a large number) is not there in the copy either
            token = number.get(gguf.integer(key, -1, 2**32 - 1))
            values[key] = None if token is None else gguf_rewrite.u32(token)
    if f"{header.architecture}.vocab_size" in gguf.entries:
        values[f"{header.architecture}.vocab_size"] = gguf_rewrite.u32(len(kept))
    return values


def _merges_within(merges: Sequence[bytes], texts: set[bytes]) -> list[bytes]:
    """Merges of tokens that stay into one that stays. Those without the space between are of no known form and go."""
    found = []
    for merge in merges:
        left, space, right = merge.partition(b" ")
        if space and left in texts and right in texts and left + right in texts:
            found.append(merge)
    return found
