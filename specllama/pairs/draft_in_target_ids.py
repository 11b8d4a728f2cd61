"""Adapt a loaded draft with another vocabulary to the target's token ids."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from specllama.base import disk
from specllama.base.errors import ModelFileError, PairError
from specllama.base.text import figure
from specllama.core.arrays import IntArray
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.token_map import NO_TOKEN, Speller, map_by_text
from specllama.drafters.translated import TranslatedModel
from specllama.files.gguf_header import TOKENS
from specllama.llama import LlamaModel, build_info
from specllama.llama.header import Header
from specllama.pairs.report import OWN_FAMILY

# In the file of a trimmed draft: for each of its tokens the parent's id of it. These must be the target's ids.
VOCAB_MAP = "specllama.vocab_map"

_TEXT_MAP = "text maps"
_VERSION = 1  # of a map by text; remembered maps of other versions are not used
_MOST_ID = 2**31 - 1  # token ids are 32-bit in llama.cpp

DraftModel: TypeAlias = LlamaModel | TranslatedModel


def read_vocab_map(header: Header) -> IntArray | None:
    """The map in a trimmed draft's file; None without one. Raises ModelFileError if it is damaged.  (n_vocab,)"""
    numbers, n_tokens = header.gguf.numbers(VOCAB_MAP), header.gguf.count(TOKENS) or 0
    if numbers is None:
        return None
    if (
        numbers.dtype.kind not in "iu"
        or not numbers.size == n_tokens > 0
        or not 0 <= numbers.min() <= numbers.max() <= _MOST_ID
        or np.unique(numbers).size != numbers.size
    ):
        raise ModelFileError(
            f"{header.path} is damaged: {VOCAB_MAP} does not hold {figure(n_tokens)} different token ids",
            hint="make the draft again: specllama draft make",
        )
    return numbers.astype(np.int64)


def _remembered(record: disk.FileRecord, n_target: int, n_draft: int) -> IntArray | None:
    """A remembered map; None if it is not valid for this pair. The file that holds it is not trusted."""
    try:
        found = np.array(record.value(list), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    mapped = found[found != NO_TOKEN]
    sound = found.shape == (n_draft,) and ((mapped >= 0) & (mapped < n_target)).all()
    return found if sound and np.unique(mapped).size == mapped.size else None


def _text_map(target: LlamaModel, draft: LlamaModel) -> IntArray:
    """`map_by_text`, remembered until one of the files changes: comparing 200,000 texts takes about a second."""
    record = disk.FileRecord(
        _TEXT_MAP, *target.header.parts, *draft.header.parts, by=[_VERSION, build_info().fingerprint]
    )
    known = _remembered(record, target.vocab_size, draft.vocab_size)
    if known is not None:
        return known
    found = map_by_text(target.vocab, draft.vocab)
    record.keep(found.tolist())
    return found


def in_target_ids(target: LlamaModel, draft: LlamaModel, *, strategy: str = SIMPLE) -> DraftModel:
    """`draft` in the token ids of `target`. Close the result before `draft`; that closes `draft` as well.

    TRANSLATED maps the tokens with equal texts (drafting over the intersection of two vocabularies). Otherwise the map
    in the draft's file is used; without one, the ids are the target's. Raises ModelFileError for a damaged map, and
    PairError if the two have no token in common.
    """
    if strategy == TRANSLATED:
        to_target = _text_map(target, draft)
    elif (trimmed := read_vocab_map(draft.header)) is not None:
        to_target = np.where(trimmed < target.vocab_size, trimmed, NO_TOKEN)
    else:
        return draft
    if (to_target == NO_TOKEN).all():
        raise PairError(f"{draft.path.name} and {target.path.name} have no token in common", hint=OWN_FAMILY)
    spell = Speller(target.vocab, draft.vocab, to_target)
    return TranslatedModel(draft, to_target, spell, vocab_size=target.vocab_size)
