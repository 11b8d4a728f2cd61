"""The rows of the compatibility report that compare two tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specllama.base.text import counted, figure
from specllama.core.arrays import IntArray
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.token_map import NO_TOKEN, map_by_text
from specllama.pairs.report import MEASURE, MEASURE_BY_TEXT, OWN_FAMILY, CheckRow, RowMark, warned
from specllama.pairs.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Tokenizer

# If less than this share of a text's tokens can be drafted, drafting cannot pay: with half of them accepted, a draft of
# one token gives 1.5 tokens per step, and on almost every machine its verification costs more than that.
_LEAST_USED = 0.5
_LEAST_TRIMMED = 0.9  # of a text's tokens; below that, a trimmed draft gets a warning

BY_TEXT = "draft-tli (--spec-type draft-tli) drafts over the shared tokens and stays exact; or " + OWN_FAMILY
_N_SHOWN_IDS = 3
_N_SHOWN_TEXTS = 10
_SPLIT = "the draft was trained on text that was split differently"
_FEWER = f"expect fewer accepted tokens; {MEASURE}"

# llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible).
_LLAMA_CPP_MAX_SIZE_DIFFERENCE = 128
_LLAMA_CPP_FIRST_TOKEN = 5


def token_rows(target: Tokenizer, draft: Tokenizer, *, strategy: str = SIMPLE) -> tuple[CheckRow, ...]:
    """One row per test of the two tokenizers, for a draft that drafts with `strategy`."""
    if strategy == TRANSLATED:
        rows = _by_text_rows(target, draft)
    elif draft.vocab_map is not None:
        rows = _trimmed_rows(target, draft, draft.vocab_map)
    else:
        rows = _own_rows(target, draft)
    return (*rows, _llama_cpp_row(target, draft))


def _own_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, ...]:
    """The rows of a pair that shares its token ids."""
    differing = _differing(target, draft)
    fits = target.kind == draft.kind and not differing
    to_target = None if fits else map_by_text(target, draft)
    found = None if to_target is None else overlap(target, to_target)
    remedy = BY_TEXT if found is not None and found.can_serve else OWN_FAMILY
    return (
        _kind_row(target, draft, remedy),
        _size_row(target, draft),
        _text_row(target, draft, differing, remedy, to_target),
        _pre_row(target, draft),
        _merges_row(target, draft),
        _types_row(target, draft),
        _special_row(target, draft),
        _end_row(target, draft),
        *([] if found is None else [found.row(RowMark.WARN, remedy)]),
    )


def _differing(target: Tokenizer, draft: Tokenizer) -> list[int]:
    """The ids that both have, with different texts.

    Ids beyond the shorter vocabulary are padding: models of one family are padded to different sizes.
    """
    texts = zip(target.entries, draft.entries, strict=False)
    return [token for token, (ours, theirs) in enumerate(texts) if ours != theirs]


def _kind_row(target: Tokenizer, draft: Tokenizer, remedy: str) -> CheckRow:
    values = target.kind, draft.kind
    if target.kind == draft.kind:
        return CheckRow("tokenizer", RowMark.PASS, *values)
    reason = f"the target's tokenizer is {target.kind}, the draft's is {draft.kind}"
    return CheckRow("tokenizer", RowMark.FAIL, *values, reason, remedy)


def _size_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    reason, n_more = "", target.size - draft.size
    if n_more > 0:
        ends = "more token id at the end; it is never drafted", "more token ids at the end; they are never drafted"
        reason = f"the target has {counted(n_more, *ends)}"
    elif n_more < 0:
        ends = "more token id at the end; it is masked", "more token ids at the end; they are masked"
        reason = f"the draft has {counted(-n_more, *ends)}"
    return CheckRow("vocabulary", RowMark.PASS, counted(target.size, "token"), counted(draft.size, "token"), reason)


def _text_row(
    target: Tokenizer, draft: Tokenizer, differing: list[int], remedy: str, to_target: IntArray | None = None
) -> CheckRow:
    """`to_target`: a map by text that could be used instead."""
    n_shared = min(target.size, draft.size)
    if not differing:
        return CheckRow("token texts", RowMark.PASS, f"{figure(n_shared)} compared", "all equal")
    texts = [(token, *_as_read(target, draft, token)) for token in differing[:_N_SHOWN_TEXTS]]
    first, ours, theirs = texts[0]
    reason = (
        f"{figure(len(differing))} of {figure(n_shared)} token ids differ, the first is {first}: "
        f"the target reads {ours}, the draft {theirs}"
    )
    if to_target is not None and (n_without := int((to_target == NO_TOKEN).sum())):
        lacking = counted(n_without, "text of the draft is", "texts of the draft are")
        reason += f"; {lacking} not in the target's vocabulary"
    elif to_target is not None:
        reason += "; the target has every text of the draft under some id"
    return CheckRow(
        "token texts",
        RowMark.FAIL,
        f"{figure(n_shared)} compared",
        f"{figure(len(differing))} differ",
        reason,
        remedy,
        tuple(f"{token}: {ours} | {theirs}" for token, ours, theirs in texts),
    )


def _as_read(target: Tokenizer, draft: Tokenizer, token: int) -> tuple[str, str]:
    """The token's text in both models for a person; as the files spell it if the texts are equal."""
    ours, theirs = _text(target, token), _text(draft, token)
    return (repr(target.entries[token]), repr(draft.entries[token])) if ours == theirs else (ours, theirs)


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text that the token adds, its bytes if they are no text by themselves, or the name of a control token."""
    spelled = tokenizer.spellings[token] if tokenizer.spellings else b""
    try:
        return repr(spelled.decode() or tokenizer.entries[token])
    except UnicodeDecodeError:
        return repr(spelled)


def _pre_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    reason = "" if target.pre == draft.pre else _SPLIT
    return warned("pre-tokenizer", (target.pre, draft.pre), reason, _FEWER)


def _merges_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    reason = "" if target.merges_sum == draft.merges_sum else f"the merges differ: {_SPLIT}"
    return warned("merges", (figure(target.n_merges), figure(draft.n_merges)), reason, _FEWER)


def _types_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    types = enumerate(zip(target.types, draft.types, strict=False))
    differing = [token for token, (ours, theirs) in types if ours != theirs]
    reason = ""
    if differing:
        reason = (
            f"{counted(len(differing), 'id has', 'ids have')} another type, the first is {differing[0]}: a control "
            "token of one model may be plain text in the other"
        )
    return warned("token types", (_types(target), _types(draft)), reason, "nothing to do: the target's are used")


def _types(tokenizer: Tokenizer) -> str:
    n_special = sum(kind in (UNKNOWN, CONTROL, USER_DEFINED) for kind in tokenizer.types)
    return f"{figure(n_special)} special" if tokenizer.types else "not given"


def _special_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    ids = ("BOS", target.bos, draft.bos), ("EOS", target.eos, draft.eos), ("EOT", target.eot, draft.eot)
    notes = [f"{name} is {ours} for the target, {theirs} for the draft" for name, ours, theirs in ids if ours != theirs]
    for name, ours, theirs in (("BOS", target.add_bos, draft.add_bos), ("EOS", target.add_eos, draft.add_eos)):
        if ours != theirs:
            notes.append(f"only the {'target' if ours else 'draft'} adds {name}")
    values = _specials(target), _specials(draft)
    return warned("begin and end", values, "; ".join(notes), "nothing to do: the target's are used")


def _specials(tokenizer: Tokenizer) -> str:
    added = "".join(f"+{name}" for name, adds in (("BOS", tokenizer.add_bos), ("EOS", tokenizer.add_eos)) if adds)
    ids = "/".join("-" if token is None else str(token) for token in (tokenizer.bos, tokenizer.eos, tokenizer.eot))
    return f"{ids} {added or '+none'}"


def _end_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    reason = "the target's end tokens end the answer; the draft's differ, so it drafts past the end or stops early"
    values = _listed(target.end_tokens), _listed(draft.end_tokens)
    return warned("end tokens", values, "" if target.end_tokens == draft.end_tokens else reason, "nothing to do")


def _listed(tokens: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:_N_SHOWN_IDS]))
    more = len(tokens) - _N_SHOWN_IDS
    return f"{shown} +{more}" if more > 0 else shown or "none"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which of the target's tokens the draft can propose."""

    n_shared: int
    share: float  # of the target's vocabulary
    used: float  # of the tokens of a text; without a text, as `share`
    n_sample: int  # tokens of that text

    @property
    def can_serve(self) -> bool:
        return self.used >= _LEAST_USED

    def row(self, mark: RowMark, remedy: str) -> CheckRow:
        reason = (
            f"{100 * self.share:.0f} % of the target's tokens have the same text in the draft; they are "
            f"{100 * self.used:.0f} % of a sample of {figure(self.n_sample)} tokens (code, prose, figures, other "
            "languages), the upper limit of the acceptance rate"
        )
        values = f"{100 * self.share:.0f} % shared", f"{100 * self.used:.0f} % by use"
        return CheckRow("overlap", mark, *values, reason, remedy)


def overlap(target: Tokenizer, to_target: IntArray) -> Overlap:
    """The share of the target's vocabulary, and of a text, that the draft can propose.  to_target: (draft's size,)"""
    reached = np.zeros(target.size, bool)
    reached[to_target[(to_target != NO_TOKEN) & (to_target < target.size)]] = True
    share = float(reached.mean()) if target.size else 0.0
    used = float(reached[list(target.sample)].mean()) if target.sample else share
    return Overlap(int(reached.sum()), share, used, len(target.sample))


def _by_text_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, ...]:
    """The rows of a draft that is translated by the texts of its tokens: only the shared tokens matter."""
    to_target = map_by_text(target, draft)
    found = overlap(target, to_target)
    fits = found.can_serve
    sizes = counted(target.size, "token"), counted(draft.size, "token")
    shared = f"{counted(found.n_shared, 'token')} with the same text, under any id"
    return (
        CheckRow("tokenizer", RowMark.PASS, target.kind, draft.kind),
        CheckRow("vocabulary", RowMark.PASS, *sizes, shared),
        found.row(RowMark.WARN if fits else RowMark.FAIL, MEASURE_BY_TEXT if fits else OWN_FAMILY),
        _mapped_end_row(target, draft, to_target),
    )


def _trimmed_rows(target: Tokenizer, draft: Tokenizer, parent_ids: Sequence[int]) -> tuple[CheckRow, ...]:
    """The rows of a trimmed draft, which is compared through the map in its file."""
    to_target = np.array(parent_ids, np.int64)
    to_target[to_target >= target.size] = NO_TOKEN
    found = overlap(target, to_target)
    sizes = counted(target.size, "token"), f"{figure(draft.size)} of them"
    note = "the draft was trimmed: it never proposes the other tokens"
    vocabulary = CheckRow("vocabulary", RowMark.PASS, *sizes, note)
    if not found.n_shared:
        none = "every token of the trimmed draft is outside the target's vocabulary"
        vocabulary = CheckRow("vocabulary", RowMark.FAIL, sizes[0], "none of them", none, OWN_FAMILY)
    kept = [(token, parent) for token, parent in enumerate(parent_ids) if parent < target.size]
    ours, theirs = _only(target, [parent for _, parent in kept]), _only(draft, [token for token, _ in kept])
    enough = found.used >= _LEAST_TRIMMED
    remedy = "" if enough else "keep more tokens: specllama draft make --vocab"
    return (
        _kind_row(target, draft, OWN_FAMILY),
        vocabulary,
        _text_row(ours, theirs, _differing(ours, theirs), OWN_FAMILY),
        _pre_row(target, draft),
        found.row(RowMark.PASS if enough else RowMark.WARN, remedy),
        _mapped_end_row(target, draft, to_target),
    )


def _only(tokenizer: Tokenizer, tokens: Sequence[int]) -> Tokenizer:
    """The tokenizer with the texts of these tokens alone, in this order."""
    entries, spellings = tokenizer.entries, tokenizer.spellings
    spellings = spellings and [spellings[token] for token in tokens]
    return replace(tokenizer, entries=[entries[token] for token in tokens], spellings=spellings)


def _mapped_end_row(target: Tokenizer, draft: Tokenizer, to_target: IntArray) -> CheckRow:
    ends = {int(to_target[token]) for token in draft.end_tokens} & target.end_tokens
    values = f"{len(target.end_tokens)} of them", f"{len(ends)} in common"
    reason = "" if ends or not target.end_tokens else "the draft cannot propose an end token: the target always adds it"
    return warned("end tokens", values, reason, "nothing to do")


def llama_cpp_refusal(target: Tokenizer, draft: Tokenizer) -> str:
    """Why llama.cpp's own tools refuse the pair; empty if they accept it."""
    if target.kind != draft.kind:
        return "the kinds of tokenizer differ"
    if target.add_bos != draft.add_bos or (target.add_bos and target.bos != draft.bos):
        return "BOS, or whether it is added, differs"
    if target.add_eos != draft.add_eos or (target.add_eos and target.eos != draft.eos):
        return "EOS, or whether it is added, differs"
    if abs(target.size - draft.size) > _LLAMA_CPP_MAX_SIZE_DIFFERENCE:
        return f"the vocabularies differ by more than {_LLAMA_CPP_MAX_SIZE_DIFFERENCE} tokens"
    if any(token >= _LLAMA_CPP_FIRST_TOKEN for token in _differing(target, draft)):
        return f"a token text from id {_LLAMA_CPP_FIRST_TOKEN} on differs"
    return ""


def _llama_cpp_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    refusal = llama_cpp_refusal(target, draft)
    values = ("refused", "refused") if refusal else ("accepted", "accepted")
    reason = refusal and f"llama.cpp's own tools refuse this pair: {refusal}"
    return warned("llama.cpp rule", values, reason, "nothing to do: this rule is not used here")
