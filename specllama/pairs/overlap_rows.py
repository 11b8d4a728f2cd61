"""Drafts whose ids are not the target's: the rows of the compatibility report that speak of a translation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from specllama.core.arrays import IntArray
from specllama.drafters.token_map import NO_TOKEN, map_by_text
from specllama.pairs.fit import OWN_FAMILY, FitReport, fit
from specllama.pairs.report import CheckRow, RowMark
from specllama.pairs.tokenizer import Tokenizer

# Where less than this share of a text's tokens can be drafted at all, drafting cannot pay: with half of them accepted a
# draft of one token earns 1.5 tokens, and the step that checks it costs more than that almost everywhere.
MIN_USED = 0.5

_MEASURE = "measure it here: specllama check --spec-type draft-tli --probe"
BY_TEXT = "--spec-type draft-tli drafts over the tokens that both have, and stays exact; or " + OWN_FAMILY
_TRIMMED_TOO_FAR = 0.9  # of a text's tokens; below, a trimmed draft says so


@dataclass(frozen=True, slots=True)
class Overlap:
    """What of the target's tokens the draft can propose."""

    n_shared: int
    share: float  # of the target's vocabulary
    used: float  # of the tokens of a text; without one, the share of the vocabulary
    n_sample: int  # tokens of that text

    @property
    def can_serve(self) -> bool:
        """Is it enough to draft with?"""
        return self.used >= MIN_USED

    @property
    def reason(self) -> str:
        """What it allows, and how that was found."""
        return (
            f"{100 * self.share:.0f} % of the target's tokens have the same text in the draft; they are "
            f"{100 * self.used:.0f} % of a sample of {self.n_sample:,} tokens (code, prose, figures, other languages), "
            "and no more than that can be accepted"
        )


def overlap(target: Tokenizer, to_target: IntArray) -> Overlap:
    """How much of the target's vocabulary, and of the text it writes, a map of the draft's ids reaches.

    A token that the draft has no id for is never drafted, so acceptance cannot exceed the share of the others.
    """
    reached = np.zeros(target.size, bool)
    reached[to_target[(to_target != NO_TOKEN) & (to_target < target.size)]] = True
    share = float(reached.mean()) if target.size else 0.0
    used = float(reached[list(target.sample)].mean()) if target.sample else share
    return Overlap(int(reached.sum()), share, used, len(target.sample))


def overlap_row(found: Overlap, mark: RowMark, remedy: str) -> CheckRow:
    """What both have, as a row of the report."""
    return CheckRow(
        "overlap", mark, f"{100 * found.share:.0f} % shared", f"{100 * found.used:.0f} % by use", found.reason, remedy
    )


def by_text_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, ...]:
    """The rows of a pair that is translated by the texts of its tokens: only what both have decides."""
    to_target = map_by_text(target, draft)
    found = overlap(target, to_target)
    fits = found.can_serve
    sizes = f"{target.size:,} tokens", f"{draft.size:,} tokens"
    return (
        CheckRow("tokenizer", RowMark.PASS, target.kind, draft.kind),
        CheckRow(
            "vocabulary", RowMark.PASS, *sizes, f"{found.n_shared:,} tokens have the same text, whatever their ids"
        ),
        overlap_row(found, RowMark.WARN if fits else RowMark.FAIL, _MEASURE if fits else OWN_FAMILY),
        _end_row(target, draft, to_target),
    )


def mapped_rows(target: Tokenizer, draft: Tokenizer) -> tuple[tuple[CheckRow, ...], FitReport]:
    """The rows of a trimmed draft, whose file says which of its parent's tokens it kept; and how the texts compare."""
    assert draft.vocab_map is not None
    kept = [(token, parent) for token, parent in enumerate(draft.vocab_map) if parent < target.size]
    to_target = np.full(draft.size, NO_TOKEN, np.int64)
    to_target[[token for token, _ in kept]] = [parent for _, parent in kept]
    # Compared in the draft's order: what the target has where the map says so, and what the draft has.
    theirs = replace(draft, entries=[draft.entries[token] for token, _ in kept])
    report = fit(replace(target, entries=[target.entries[parent] for _, parent in kept]), theirs)
    found = overlap(target, to_target)
    enough = found.used >= _TRIMMED_TOO_FAR
    note = "the draft was trimmed: it spells the other tokens for itself and never proposes them"
    sizes = f"{target.size:,} tokens", f"{draft.size:,} of them"
    if kept:
        vocabulary = CheckRow("vocabulary", RowMark.PASS, *sizes, note)
    else:
        none = "every token that the draft kept of its parent lies outside the target's vocabulary"
        vocabulary = CheckRow("vocabulary", RowMark.FAIL, sizes[0], "none of them", none, OWN_FAMILY)
    rows = (
        vocabulary,
        overlap_row(
            found, RowMark.PASS if enough else RowMark.WARN, "" if enough else "trim it less: draft make --vocab"
        ),
        _end_row(target, draft, to_target),
    )
    return rows, report


def _end_row(target: Tokenizer, draft: Tokenizer, to_target: IntArray) -> CheckRow:
    """Can the draft propose the end?"""
    ends = {int(to_target[token]) for token in draft.end_tokens} & target.end_tokens
    values = f"{len(target.end_tokens)} of them", f"{len(ends)} in common"
    if ends or not target.end_tokens:
        return CheckRow("end tokens", RowMark.PASS, *values)
    reason = "the draft can never propose the end of an answer: that token is always the target's"
    return CheckRow("end tokens", RowMark.WARN, *values, reason, "nothing to do")
