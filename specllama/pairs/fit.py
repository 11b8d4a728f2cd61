"""Whether a draft's token ids mean what its target's mean."""

from __future__ import annotations

from dataclasses import dataclass

from specllama.pairs.tokenizer import Tokenizer

OWN_FAMILY = "take a draft of the target's own family; `specllama models list` shows pairs that fit"


@dataclass(frozen=True, slots=True)
class VocabDifference:
    """A token id that means one text to the target and another to the draft."""

    token: int
    target_text: str
    draft_text: str


@dataclass(frozen=True, slots=True)
class FitReport:
    """Whether the draft's token ids mean what the target's mean.

    Says nothing about exactness: the verifier is exact for any draft whose law it is given. But a draft that does not
    fit proposes other words than it means, and next to nothing is accepted.
    """

    target_kind: str
    draft_kind: str
    target_size: int
    draft_size: int
    n_differing: int  # among the ids that both have
    differing: tuple[VocabDifference, ...]  # the first ten

    @property
    def fits(self) -> bool:
        """Same kind of tokenizer, and the same text for every id that both have."""
        return self.target_kind == self.draft_kind and self.n_differing == 0

    @property
    def kind_reason(self) -> str:
        """What is wrong with the kinds, in one sentence; empty if nothing is."""
        if self.target_kind == self.draft_kind:
            return ""
        return f"the target's tokenizer is {self.target_kind}, the draft's is {self.draft_kind}"

    @property
    def text_reason(self) -> str:
        """What is wrong with the texts, in one sentence; empty if nothing is."""
        if not self.n_differing:
            return ""
        first, shared = self.differing[0], min(self.target_size, self.draft_size)
        texts = f"the target reads {first.target_text!r}, the draft {first.draft_text!r}"
        return f"{self.n_differing:,} of {shared:,} token ids differ, the first is {first.token}: {texts}"


_N_SHOWN = 10


def fit(target: Tokenizer, draft: Tokenizer) -> FitReport:
    """Compare two vocabularies token by token.

    More rows at the end of one of them are allowed: models of one family are padded to different sizes. Ids that only
    the target has are never drafted, ids that only the draft has are masked.
    """
    texts = list(zip(target.texts(), draft.texts(), strict=False))  # as long as the shorter
    differing = [token for token, (ours, theirs) in enumerate(texts) if ours != theirs]
    shown = tuple(VocabDifference(token, *texts[token]) for token in differing[:_N_SHOWN])
    return FitReport(
        target_kind=str(target.kind),
        draft_kind=str(draft.kind),
        target_size=target.size,
        draft_size=draft.size,
        n_differing=len(differing),
        differing=shown,
    )


def size_note(target: Tokenizer, draft: Tokenizer) -> str:
    """What a difference in size means; empty where there is none."""
    if draft.size < target.size:
        return f"{target.size - draft.size:,} token ids at the end are the target's alone and are never drafted"
    if draft.size > target.size:
        return f"{draft.size - target.size:,} token ids at the end are the draft's alone and are masked"
    return ""


def special_notes(target: Tokenizer, draft: Tokenizer) -> list[str]:
    """Differences in special tokens; they do no harm."""
    notes = []
    for what, ours, theirs in (("BOS", target.bos, draft.bos), ("EOS", target.eos, draft.eos)):
        if ours != theirs:
            notes.append(f"{what} is {ours} for the target, {theirs} for the draft: the target's is used")
    if target.add_bos != draft.add_bos:
        notes.append("only one of the two wants a BOS in front: the target's wish is followed")
    return notes
