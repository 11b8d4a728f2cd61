"""What two tokenizers have in common: the rows of the compatibility report that speak of tokens."""

from __future__ import annotations

from specllama.core.arrays import IntArray
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.token_map import NO_TOKEN, map_by_text
from specllama.pairs.fit import OWN_FAMILY, FitReport, fit, size_note, special_notes
from specllama.pairs.overlap_rows import BY_TEXT, by_text_rows, mapped_rows, overlap, overlap_row
from specllama.pairs.report import CheckRow, RowMark
from specllama.pairs.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Tokenizer

_N_SHOWN_IDS = 3

# llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible).
LLAMA_CPP_MAX_SIZE_DIFFERENCE = 128
LLAMA_CPP_FIRST_TOKEN = 5


def token_rows(target: Tokenizer, draft: Tokenizer, *, strategy: str = SIMPLE) -> tuple[CheckRow, ...]:
    """One row per test of the two tokenizers, for a draft that drafts with `strategy`."""
    if strategy == TRANSLATED:
        return (*by_text_rows(target, draft), _llama_cpp_row(target, draft))
    if draft.vocab_map is not None:
        rows, report = mapped_rows(target, draft)
        texts = _text_row(report, OWN_FAMILY)
        own = _kind_row(report, OWN_FAMILY), texts, _pre_row(target, draft), _llama_cpp_row(target, draft)
        return (own[0], rows[0], *own[1:3], *rows[1:], own[3])
    return _own_rows(target, draft)


def _own_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, ...]:
    """The rows of a pair where the draft's ids are to be the target's."""
    report = fit(target, draft)
    to_target = None if report.fits else map_by_text(target, draft)
    found = None if to_target is None else overlap(target, to_target)
    remedy = BY_TEXT if found is not None and found.can_serve else OWN_FAMILY
    rows = [
        _kind_row(report, remedy),
        _size_row(target, draft),
        _text_row(report, remedy, to_target),
        _pre_row(target, draft),
        _merges_row(target, draft),
        _types_row(target, draft),
        _special_row(target, draft),
        _end_row(target, draft),
    ]
    if found is not None:
        rows.append(overlap_row(found, RowMark.WARN, remedy))
    rows.append(_llama_cpp_row(target, draft))
    return tuple(rows)


def _row(test: str, target: object, draft: object, mark: RowMark, reason: str = "", remedy: str = "") -> CheckRow:
    """A row whose reason is said only where it has one to say."""
    return CheckRow(test, mark, str(target), str(draft), reason, remedy)


def _kind_row(report: FitReport, remedy: str) -> CheckRow:
    values = report.target_kind, report.draft_kind
    if not report.kind_reason:
        return _row("tokenizer", *values, RowMark.PASS)
    return _row("tokenizer", *values, RowMark.FAIL, report.kind_reason, remedy)


def _size_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    """Padding at the end of one of them does no harm."""
    reason = size_note(target, draft)
    return _row("vocabulary", f"{target.size:,} tokens", f"{draft.size:,} tokens", RowMark.PASS, reason)


def _text_row(report: FitReport, remedy: str, to_target: IntArray | None = None) -> CheckRow:
    """`to_target`: what a map of ids could make of it, where nothing was mapped yet."""
    n_shared = min(report.target_size, report.draft_size)
    if report.n_differing == 0:
        return _row("token texts", f"{n_shared:,} compared", "all equal", RowMark.PASS)
    return CheckRow(
        "token texts",
        RowMark.FAIL,
        f"{n_shared:,} compared",
        f"{report.n_differing:,} differ",
        report.text_reason if to_target is None else f"{report.text_reason}; {_bridge(to_target)}",
        remedy,
        tuple(f"{item.token}: {item.target_text!r} | {item.draft_text!r}" for item in report.differing),
    )


def _bridge(to_target: IntArray) -> str:
    """Could a map of ids make the draft fit?"""
    n_without = int((to_target == NO_TOKEN).sum())
    if n_without == 0:
        return "a map of ids could bridge that: the target has every text of the draft under some id"
    return f"a map of ids could bridge that only in part: {n_without:,} of the draft's texts are no token of the target"


def _pre_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    if target.pre == draft.pre:
        return _row("pre-tokenizer", target.pre, draft.pre, RowMark.PASS)
    reason = "both read the target's tokens, but the draft was trained on text that was cut otherwise"
    return _row(
        "pre-tokenizer", target.pre, draft.pre, RowMark.WARN, reason, "expect fewer accepted tokens, or measure"
    )


def _merges_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    values = f"{target.n_merges:,}", f"{draft.n_merges:,}"
    if target.merges_sum == draft.merges_sum:
        return _row("merges", *values, RowMark.PASS)
    reason = "the merges differ: the draft was trained on text that was cut otherwise"
    return _row("merges", *values, RowMark.WARN, reason, "expect fewer accepted tokens, or measure")


def _types_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    pairs_of_types = list(zip(target.types, draft.types, strict=False))
    differing = [token for token, (ours, theirs) in enumerate(pairs_of_types) if ours != theirs]
    values = _type_counts(target), _type_counts(draft)
    if not differing:
        return _row("token types", *values, RowMark.PASS)
    reason = (
        f"{len(differing):,} ids are of another type, the first is {differing[0]}: what is a control token for one of "
        "them may be plain text for the other"
    )
    return _row("token types", *values, RowMark.WARN, reason, "nothing to do: the target's types count")


def _type_counts(tokenizer: Tokenizer) -> str:
    n_special = sum(kind in (UNKNOWN, CONTROL, USER_DEFINED) for kind in tokenizer.types)
    return f"{n_special:,} special" if tokenizer.types else "not given"


def _special_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    values = _specials(target), _specials(draft)
    notes = special_notes(target, draft)
    if target.eot != draft.eot:
        notes.append(f"EOT is {target.eot} for the target, {draft.eot} for the draft: the target's is used")
    if target.add_eos != draft.add_eos:
        notes.append("only one of the two wants an EOS behind: the target's wish is followed")
    mark = RowMark.WARN if notes else RowMark.PASS
    return _row("begin and end", *values, mark, "; ".join(notes), "nothing to do" if notes else "")


def _specials(tokenizer: Tokenizer) -> str:
    added = "".join(f"+{name}" for name, wants in (("BOS", tokenizer.add_bos), ("EOS", tokenizer.add_eos)) if wants)
    ids = "/".join("-" if token is None else str(token) for token in (tokenizer.bos, tokenizer.eos, tokenizer.eot))
    return f"{ids} {added or '+none'}"


def _end_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    values = _listed(target.end_tokens), _listed(draft.end_tokens)
    if target.end_tokens == draft.end_tokens:
        return _row("end tokens", *values, RowMark.PASS)
    reason = "the target's end tokens end the answer; where the draft's differ it proposes past the end, or stops early"
    return _row("end tokens", *values, RowMark.WARN, reason, "nothing to do")


def _listed(tokens: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:_N_SHOWN_IDS]))
    more = len(tokens) - _N_SHOWN_IDS
    return f"{shown} +{more}" if more > 0 else shown or "none"


# --------------------------------------------------------------------------------------------------- llama.cpp's rule


def llama_cpp_refusal(target: Tokenizer, draft: Tokenizer) -> str:
    """Why llama.cpp's own tools would not pair the two; empty if they would."""
    if target.kind != draft.kind:
        return "the kinds of tokenizer differ"
    if target.add_bos != draft.add_bos or (target.add_bos and target.bos != draft.bos):
        return "BOS, or whether it is added, differs"
    if target.add_eos != draft.add_eos or (target.add_eos and target.eos != draft.eos):
        return "EOS, or whether it is added, differs"
    if abs(target.size - draft.size) > LLAMA_CPP_MAX_SIZE_DIFFERENCE:
        return f"the vocabularies differ by more than {LLAMA_CPP_MAX_SIZE_DIFFERENCE} tokens"
    texts = zip(target.entries[LLAMA_CPP_FIRST_TOKEN:], draft.entries[LLAMA_CPP_FIRST_TOKEN:], strict=False)
    if any(ours != theirs for ours, theirs in texts):
        return f"a token text from id {LLAMA_CPP_FIRST_TOKEN} on differs"
    return ""


def _llama_cpp_row(target: Tokenizer, draft: Tokenizer) -> CheckRow:
    refusal = llama_cpp_refusal(target, draft)
    if not refusal:
        return _row("llama.cpp rule", "would pair", "them, too", RowMark.PASS)
    reason = f"llama.cpp's own tools would refuse this pair: {refusal}"
    return _row("llama.cpp rule", "would refuse", "them", RowMark.WARN, reason, "it counts for those tools, not here")
