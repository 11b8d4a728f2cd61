"""Drafts with other token ids than the target: the rows of the compatibility report about the translation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specllama.core.arrays import IntArray
from specllama.drafters.token_map import NO_TOKEN, map_by_text
from specllama.pairs.report import OWN_FAMILY, CheckRow, RowMark, warned
from specllama.pairs.tokenizer import Tokenizer

# If less than this share of a text's tokens can be drafted, drafting cannot pay: with half of them accepted, a draft of
# one token gives 1.5 tokens per step, and on almost every machine its verification costs more than that.
MIN_USED = 0.5

BY_TEXT = "the strategy draft-tli drafts over the shared tokens and stays exact; or " + OWN_FAMILY
_MEASURE = "measure it: specllama check --spec-type draft-tli --probe"
_LEAST_TRIMMED = 0.9  # of a text's tokens; below that, a trimmed draft gets a warning


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which of the target's tokens the draft can propose."""

    n_shared: int
    share: float  # of the target's vocabulary
    used: float  # of the tokens of a text; without a text, as `share`
    n_sample: int  # tokens of that text

    @property
    def can_serve(self) -> bool:
        return self.used >= MIN_USED

    def row(self, mark: RowMark, remedy: str) -> CheckRow:
        reason = (
            f"{100 * self.share:.0f} % of the target's tokens have the same text in the draft; they are "
            f"{100 * self.used:.0f} % of a sample of {self.n_sample:,} tokens (code, prose, figures, other languages), "
            "the upper limit of the acceptance rate"
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


def by_text_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, ...]:
    """The rows of a draft that is translated by the texts of its tokens: only the shared tokens matter."""
    to_target = map_by_text(target, draft)
    found = overlap(target, to_target)
    fits = found.can_serve
    sizes = f"{target.size:,} tokens", f"{draft.size:,} tokens"
    shared = f"{found.n_shared:,} tokens have the same text, under any id"
    return (
        CheckRow("tokenizer", RowMark.PASS, target.kind, draft.kind),
        CheckRow("vocabulary", RowMark.PASS, *sizes, shared),
        found.row(RowMark.WARN if fits else RowMark.FAIL, _MEASURE if fits else OWN_FAMILY),
        _end_row(target, draft, to_target),
    )


def trimmed_rows(target: Tokenizer, draft: Tokenizer) -> tuple[CheckRow, CheckRow, CheckRow]:
    """The vocabulary, overlap and end rows of a trimmed draft, by the map in its file."""
    assert draft.vocab_map is not None
    to_target = np.array(draft.vocab_map, np.int64)
    to_target[to_target >= target.size] = NO_TOKEN
    found = overlap(target, to_target)
    sizes = f"{target.size:,} tokens", f"{draft.size:,} of them"
    note = "the draft was trimmed: it never proposes the other tokens"
    vocabulary = CheckRow("vocabulary", RowMark.PASS, *sizes, note)
    if not found.n_shared:
        none = "every token of the trimmed draft is outside the target's vocabulary"
        vocabulary = CheckRow("vocabulary", RowMark.FAIL, sizes[0], "none of them", none, OWN_FAMILY)
    enough = found.used >= _LEAST_TRIMMED
    remedy = "" if enough else "keep more tokens: specllama draft make --vocab"
    return (
        vocabulary,
        found.row(RowMark.PASS if enough else RowMark.WARN, remedy),
        _end_row(target, draft, to_target),
    )


def _end_row(target: Tokenizer, draft: Tokenizer, to_target: IntArray) -> CheckRow:
    ends = {int(to_target[token]) for token in draft.end_tokens} & target.end_tokens
    values = f"{len(target.end_tokens)} of them", f"{len(ends)} in common"
    reason = "" if ends or not target.end_tokens else "the draft cannot propose an end token: the target always adds it"
    return warned("end tokens", values, reason, "nothing to do")
