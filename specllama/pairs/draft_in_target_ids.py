"""A loaded draft as its target needs it: in the target's token ids, whatever vocabulary its own file has."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from specllama.base import disk as storage
from specllama.base.errors import ModelFileError, PairError
from specllama.core.arrays import IntArray
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.token_map import NO_TOKEN, Speller, map_by_text
from specllama.drafters.translated import TranslatedModel
from specllama.files.gguf_header import TOKENS
from specllama.llama import LlamaModel, build_info
from specllama.llama.header import Header

# In the file of a draft whose vocabulary was trimmed: an array of numbers, for each of its tokens the id that its
# parent has for it. The parent's id is the target's, or the pair does not fit.
VOCAB_MAP = "specllama.vocab_map"

_TEXT_MAP = "text maps"
_VERSION = 1  # of what a map by text is; another one makes what was remembered worthless
_MOST_ID = 2**31 - 1  # token ids are 32-bit in llama.cpp

DraftModel: TypeAlias = LlamaModel | TranslatedModel


def read_vocab_map(header: Header) -> IntArray | None:
    """The map that a trimmed draft's file holds, (its vocabulary's size,); None where there is none.

    Raises ModelFileError where it is damaged: not one id of its own for every token.
    """
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
            f"{header.path} is damaged: {VOCAB_MAP} does not give an id of its own to each of its {n_tokens:,} tokens",
            hint="make the draft again",
        )
    return numbers.astype(np.int64)


def _remembered(known: object, stamp: list[object], n_target: int, n_draft: int) -> IntArray | None:
    """A map that was remembered; None where it is another's, or none at all: anybody may have written that file."""
    if not isinstance(known, dict) or known.get("stamp") != stamp:
        return None
    try:
        found = np.array(known["map"], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    mapped = found[found != NO_TOKEN]
    sound = found.shape == (n_draft,) and ((mapped >= 0) & (mapped < n_target)).all()
    return found if sound and np.unique(mapped).size == mapped.size else None


def _text_map(target: LlamaModel, draft: LlamaModel) -> IntArray:
    """`map_by_text`, remembered until one of the files changes: asking for 200,000 texts takes about a second."""
    stamp = [_VERSION, build_info().fingerprint]
    known = _remembered(storage.recall(_TEXT_MAP, target.path, draft.path), stamp, target.vocab_size, draft.vocab_size)
    if known is not None:
        return known
    found = map_by_text(target.vocab, draft.vocab)
    storage.remember(_TEXT_MAP, {"stamp": stamp, "map": found.tolist()}, target.path, draft.path)
    return found


def in_target_ids(target: LlamaModel, draft: LlamaModel, *, strategy: str = SIMPLE) -> DraftModel:
    """`draft` as `target` understands it. Closing what is returned closes `draft`, and has to come first.

    With TRANSLATED it is translated by the texts of the tokens that both have (drafting over the intersection of two
    vocabularies). Else by the map in its file; where there is none, its ids are the target's. Raises ModelFileError for
    a damaged map, and PairError where the two have no token in common.
    """
    if strategy == TRANSLATED:
        to_target = _text_map(target, draft)
    elif (trimmed := read_vocab_map(draft.header)) is not None:
        to_target = np.where(trimmed < target.vocab_size, trimmed, NO_TOKEN)
    else:
        return draft
    if (to_target == NO_TOKEN).all():
        raise PairError(
            f"{draft.path.name} and {target.path.name} have no token in common",
            hint="take a draft of the target's own family; `specllama models list` shows pairs that fit",
        )
    spell = Speller(target.vocab, draft.vocab, to_target)
    return TranslatedModel(draft, to_target, spell, vocab_size=target.vocab_size)
