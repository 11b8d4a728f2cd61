"""What two tokenizers have in common: the rows of the compatibility report that speak of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specllama import pairs
from specllama.compat import Mark, Row
from specllama.model_facts import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Tokenizer
from specllama.pairs import OWN_FAMILY, FitReport

_N_SHOWN_IDS = 3

# llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible).
LLAMA_CPP_MAX_SIZE_DIFFERENCE = 128
LLAMA_CPP_FIRST_TOKEN = 5


def token_rows(target: Tokenizer, draft: Tokenizer) -> tuple[Row, ...]:
    """One row per test of the two tokenizers."""
    report = pairs.fit(target, draft)
    rows = [
        _kind_row(report),
        _size_row(target, draft),
        _text_row(target, draft, report),
        _pre_row(target, draft),
        _merges_row(target, draft),
        _types_row(target, draft),
        _special_row(target, draft),
        _end_row(target, draft),
    ]
    if not report.fits:
        rows.append(_overlap_row(target, draft))
    rows.append(_llama_cpp_row(target, draft))
    return tuple(rows)


def _row(test: str, target: object, draft: object, mark: Mark, reason: str = "", remedy: str = "") -> Row:
    """A row whose reason is said only where it has one to say."""
    return Row(test, mark, str(target), str(draft), reason, remedy)


def _kind_row(report: FitReport) -> Row:
    mark, remedy = (Mark.FAIL, OWN_FAMILY) if report.kind_reason else (Mark.PASS, "")
    return _row("tokenizer", report.target_kind, report.draft_kind, mark, report.kind_reason, remedy)


def _size_row(target: Tokenizer, draft: Tokenizer) -> Row:
    """Padding at the end of one of them does no harm."""
    reason = pairs.size_note(target, draft)
    return _row("vocabulary", f"{target.size:,} tokens", f"{draft.size:,} tokens", Mark.PASS, reason)


def _text_row(target: Tokenizer, draft: Tokenizer, report: FitReport) -> Row:
    n_shared = min(target.size, draft.size)
    if report.n_differing == 0:
        return _row("token texts", f"{n_shared:,} compared", "all equal", Mark.PASS)
    return Row(
        "token texts",
        Mark.FAIL,
        f"{n_shared:,} compared",
        f"{report.n_differing:,} differ",
        f"{report.text_reason}; {_bridge(target, draft)}",
        OWN_FAMILY,
        tuple(f"{item.token}: {item.target_text!r} | {item.draft_text!r}" for item in report.differing),
    )


def _bridge(target: Tokenizer, draft: Tokenizer) -> str:
    """Could a map of ids make the draft fit?"""
    known = set(target.entries)
    n_known = sum(text in known for text in draft.entries)
    if n_known == draft.size:
        return "a map of ids could bridge that: the target has every text of the draft under some id"
    return f"no map of ids could bridge that: {draft.size - n_known:,} of the draft's texts are no token of the target"


def _pre_row(target: Tokenizer, draft: Tokenizer) -> Row:
    if target.pre == draft.pre:
        return _row("pre-tokenizer", target.pre, draft.pre, Mark.PASS)
    reason = "both read the target's tokens, but the draft was trained on text that was cut otherwise"
    return _row("pre-tokenizer", target.pre, draft.pre, Mark.WARN, reason, "expect fewer accepted tokens, or measure")


def _merges_row(target: Tokenizer, draft: Tokenizer) -> Row:
    values = f"{target.n_merges:,}", f"{draft.n_merges:,}"
    if target.merges_sum == draft.merges_sum:
        return _row("merges", *values, Mark.PASS)
    reason = "the merges differ: the draft was trained on text that was cut otherwise"
    return _row("merges", *values, Mark.WARN, reason, "expect fewer accepted tokens, or measure")


def _types_row(target: Tokenizer, draft: Tokenizer) -> Row:
    pairs_of_types = list(zip(target.types, draft.types, strict=False))
    differing = [token for token, (ours, theirs) in enumerate(pairs_of_types) if ours != theirs]
    values = _type_counts(target), _type_counts(draft)
    if not differing:
        return _row("token types", *values, Mark.PASS)
    reason = (
        f"{len(differing):,} ids are of another type, the first is {differing[0]}: what is a control token for one of "
        "them may be plain text for the other"
    )
    return _row("token types", *values, Mark.WARN, reason, "nothing to do: the target's types count")


def _type_counts(tokenizer: Tokenizer) -> str:
    n_special = sum(kind in (UNKNOWN, CONTROL, USER_DEFINED) for kind in tokenizer.types)
    return f"{n_special:,} special" if tokenizer.types else "not given"


def _special_row(target: Tokenizer, draft: Tokenizer) -> Row:
    values = _specials(target), _specials(draft)
    notes = pairs.special_notes(target, draft)
    if target.eot != draft.eot:
        notes.append(f"EOT is {target.eot} for the target, {draft.eot} for the draft: the target's is used")
    if target.add_eos != draft.add_eos:
        notes.append("only one of the two wants an EOS behind: the target's wish is followed")
    mark = Mark.WARN if notes else Mark.PASS
    return _row("begin and end", *values, mark, "; ".join(notes), "nothing to do" if notes else "")


def _specials(tokenizer: Tokenizer) -> str:
    added = [name for name, is_added in (("BOS", tokenizer.add_bos), ("EOS", tokenizer.add_eos)) if is_added]
    ids = "/".join("-" if token is None else str(token) for token in (tokenizer.bos, tokenizer.eos, tokenizer.eot))
    return f"{ids}, adds {' and '.join(added) or 'none'}"


def _end_row(target: Tokenizer, draft: Tokenizer) -> Row:
    values = _listed(target.end_tokens), _listed(draft.end_tokens)
    if target.end_tokens == draft.end_tokens:
        return _row("end tokens", *values, Mark.PASS)
    reason = "the target's end tokens end the answer; where the draft's differ it proposes past the end, or stops early"
    return _row("end tokens", *values, Mark.WARN, reason, "nothing to do")


def _listed(tokens: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:_N_SHOWN_IDS]))
    more = len(tokens) - _N_SHOWN_IDS
    return f"{shown} +{more}" if more > 0 else shown or "none"


# ------------------------------------------------------------------------------------------------------------ overlap


def _byte_of() -> dict[str, int]:
    """The 256 characters with which byte-level BPE vocabularies spell bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


_BYTE_OF = _byte_of()
_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelled(tokenizer: Tokenizer) -> list[bytes | None]:
    """The bytes that each token adds to a text; None for tokens that add none, such as control tokens."""
    types: Sequence[int] = tokenizer.types or [1] * tokenizer.size
    return [_spell(tokenizer.kind, text, kind) for text, kind in zip(tokenizer.entries, types, strict=False)]


def _spell(kind: str, text: str, token_type: int) -> bytes | None:
    if token_type in (UNKNOWN, CONTROL, UNUSED):
        return None
    if token_type == BYTE and (byte := _BYTE_TEXT.fullmatch(text)):
        return bytes.fromhex(byte[1])
    if token_type != USER_DEFINED and kind == "bpe" and all(char in _BYTE_OF for char in text):
        return bytes(_BYTE_OF[char] for char in text)
    return text.replace("▁", " ").encode("utf-8", "replace")


def overlap(target: Tokenizer, draft: Tokenizer) -> tuple[float, float]:
    """The share of the target's tokens whose bytes are one token of the draft, too; and that share by use.

    How often a token is used is estimated from its rank (Zipf's law: the n-th has the weight 1/n), since vocabularies
    are ordered by frequency; nothing but text could tell it better.
    """
    known = set(spelled(draft))
    shared = [piece in known for piece in spelled(target) if piece is not None]
    weights = [1.0 / rank for rank in range(1, len(shared) + 1)]
    used = sum(weight for weight, is_shared in zip(weights, shared, strict=True) if is_shared)
    return (sum(shared) / len(shared), used / sum(weights)) if shared else (0.0, 0.0)


def _overlap_row(target: Tokenizer, draft: Tokenizer) -> Row:
    share, used = overlap(target, draft)
    reason = (
        f"{100 * share:.0f} % of the target's tokens are spelled like one of the draft's, about {100 * used:.0f} % "
        "by use: no more could be accepted, and no strategy of this version drafts across tokenizers"
    )
    remedy = "take a draft with the target's own tokenizer"
    return _row("overlap", f"{100 * share:.0f} % shared", f"{100 * used:.0f} % by use", Mark.WARN, reason, remedy)


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


def _llama_cpp_row(target: Tokenizer, draft: Tokenizer) -> Row:
    refusal = llama_cpp_refusal(target, draft)
    if not refusal:
        return _row("llama.cpp rule", "would pair", "them, too", Mark.PASS)
    reason = f"llama.cpp's own tools would refuse this pair: {refusal}"
    return _row("llama.cpp rule", "would refuse", "them", Mark.WARN, reason, "it counts for those tools, not here")
