"""Cut a model's vocabulary to its most frequent tokens (FR-Spec, VocabTrim).

The head is a large part of what a draft step of a small model reads, and most of its rows are for rare tokens. Kept
tokens get new ids; the file holds the parent's ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specllama.base.errors import UnsupportedModel, UsageError
from specllama.base.text import figure
from specllama.core.arrays import IntArray
from specllama.files import gguf_rewrite
from specllama.files.gguf_header import GgufHeader
from specllama.files.gguf_rewrite import SourceFile, SourceTensor
from specllama.llama.header import Header
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.tokenizer import BYTE, CONTROL, MERGES, UNKNOWN, USER_DEFINED, Tokenizer

MULTIPLE = 64  # some kernels need a head matrix with a multiple of this many rows
_LEAST_TOKENS = 512

_TOKENIZER = "tokenizer.ggml."
_ID_ENDINGS = ("_token_id", "_token_ids", "suppress_tokens")
_PER_TOKEN = ("token_embd.weight", "output.weight", "output.bias")  # tensors with a row for each token
_KINDS = ("bpe", "spm")
_OTHER_RECIPES = "derive a draft with --quant or --drop-layers"


def kept_tokens(source: SourceFile, tokenizer: Tokenizer, n_tokens: int) -> IntArray:
    """The ids to keep, ascending: special tokens, single bytes, and the lowest of the others.

    The lowest ids of a BPE or SPM vocabulary are the first merges, so the most frequent. Single bytes spell the tokens
    that are cut.  (n_tokens, rounded up to a multiple of MULTIPLE)
    """
    if tokenizer.kind not in _KINDS:
        raise UnsupportedModel(
            f"a vocabulary of the kind {tokenizer.kind} cannot be cut: its tokens may not be ordered by frequency",
            hint=_OTHER_RECIPES,
        )
    special = _special(source, tokenizer)
    wanted = n_tokens + -n_tokens % MULTIPLE
    if wanted >= tokenizer.size:
        raise UsageError(
            f"a vocabulary of {figure(n_tokens)} tokens is no smaller than the model's own, {figure(tokenizer.size)}"
        )
    least = max(len(special), _LEAST_TOKENS)
    if wanted < least:
        raise UsageError(
            f"a vocabulary of {figure(n_tokens)} tokens is too small (expected at least {figure(least)}; "
            f"{figure(len(special))} are special tokens and single bytes)"
        )
    others = [token for token in range(tokenizer.size) if token not in special]
    return np.array(sorted([*special, *others[: wanted - len(special)]]))


def _special(source: SourceFile, tokenizer: Tokenizer) -> set[int]:
    """Control tokens, single bytes, and the tokens that the metadata names."""
    control = {UNKNOWN, CONTROL, USER_DEFINED, BYTE}
    found = {token for token, kind in enumerate(tokenizer.types) if kind in control}
    single = [token for token, piece in enumerate(tokenizer.spellings) if len(piece) == 1]
    found |= set(single)
    known = {tokenizer.spellings[token][0] for token in single}
    others = (piece for token, piece in enumerate(tokenizer.spellings) if token not in found)
    missing = {byte for piece in others for byte in piece} - known
    if missing:
        raise UnsupportedModel(
            f"{source.header.path.name} has no token for some single bytes that its tokens contain ({len(missing)} of "
            "256): a smaller vocabulary could not spell them",
            hint=_OTHER_RECIPES,
        )
    gguf = source.header
    named = (_id(gguf, key) for key in gguf.entries if _is_id(key) and gguf.count(key) is None)
    found |= {token for token in named if 0 <= token < tokenizer.size}
    return found | {token for token in tokenizer.end_tokens if token < tokenizer.size}


def _is_id(key: str) -> bool:
    return key.startswith(_TOKENIZER) and key.endswith(_ID_ENDINGS)


def _id(gguf: GgufHeader, key: str) -> int:
    """A token id; -1, stored as a large number, means no such token."""
    return gguf.integer(key, -1, 2**32 - 1)


def with_vocabulary(
    source: SourceFile, header: Header, tensors: Sequence[SourceTensor], kept: IntArray
) -> tuple[Mapping[str, bytes | None], list[SourceTensor]]:
    """(changed metadata, tensors with the rows of `kept`). Raises UnsupportedModel.  kept: (n,)"""
    n_before = source.header.count(f"{_TOKENIZER}tokens")
    rows = [tensor for tensor in tensors if tensor.name in _PER_TOKEN]
    if n_before is None or not rows or any(tensor.n_rows != n_before for tensor in rows):
        raise UnsupportedModel(f"{header.path.name} cannot be cut: its matrices do not have one row per token")
    outside = [tensor for tensor in tensors if not tensor.name.startswith("blk.") and tensor.name not in _PER_TOKEN]
    if any(tensor.n_rows == n_before for tensor in outside):
        raise UnsupportedModel(
            f"{header.path.name} ({header.architecture}) cannot be cut: it has unknown matrices with one row per token"
        )
    left = [replace(tensor, rows=kept) if tensor.name in _PER_TOKEN else tensor for tensor in tensors]
    return {**_tokenizer_values(source, header, kept, n_before), VOCAB_MAP: gguf_rewrite.integers(kept)}, left


def _tokenizer_values(source: SourceFile, header: Header, kept: IntArray, n_before: int) -> dict[str, bytes | None]:
    """The tokenizer's metadata for the kept tokens."""
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
        else:
            token = number.get(_id(gguf, key))
            values[key] = None if token is None else gguf_rewrite.u32(token)
    if f"{header.architecture}.vocab_size" in gguf.entries:
        values[f"{header.architecture}.vocab_size"] = gguf_rewrite.u32(len(kept))
    return values


def _merges_within(merges: Sequence[bytes], texts: set[bytes]) -> list[bytes]:
    """The merges whose parts and result are all kept. Entries without a space have an unknown form and are dropped."""
    found = []
    for merge in merges:
        left, space, right = merge.partition(b" ")
        if space and left in texts and right in texts and left + right in texts:
            found.append(merge)
    return found
