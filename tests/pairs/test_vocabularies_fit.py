"""Whether a draft's vocabulary fits its target's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specllama.pairs.fit import VocabDifference, fit, size_note, special_notes

TEXTS = [f"t{i}" for i in range(300)]


@dataclass
class Vocab:
    """A vocabulary by hand."""

    entries: list[str] = field(default_factory=lambda: list(TEXTS))
    kind: str = "bpe"
    bos: int | None = 1
    eos: int | None = 2
    add_bos: bool = False

    @property
    def size(self) -> int:
        return len(self.entries)

    def texts(self) -> list[str]:
        return self.entries


def changed(*tokens: int) -> Vocab:
    return Vocab([f"other{i}" if i in tokens else text for i, text in enumerate(TEXTS)])


def test_equal_vocabularies_fit_without_a_word() -> None:
    """Prevents: notes about nothing."""
    report = fit(Vocab(), Vocab())
    assert report.fits
    assert report.kind_reason == report.text_reason == size_note(Vocab(), Vocab()) == ""
    assert special_notes(Vocab(), Vocab()) == []


def test_one_differing_id_is_found_and_shown_with_both_texts() -> None:
    """Prevents: a gate that only looks at sizes and samples (case 17)."""
    report = fit(Vocab(), changed(299))
    assert not report.fits
    assert report.differing == (VocabDifference(299, "t299", "other299"),)
    reason = "1 of 300 token ids differ, the first is 299: the target reads 't299', the draft 'other299'"
    assert report.text_reason == reason


def test_many_differing_ids_are_counted_and_ten_are_shown() -> None:
    """Prevents: a report of 250,000 lines."""
    report = fit(Vocab(), changed(*range(5, 105)))
    assert report.n_differing == 100
    assert [item.token for item in report.differing] == list(range(5, 15))


@pytest.mark.parametrize("draft_is_shorter", [True, False])
def test_rows_at_the_end_of_one_of_them_are_padding(draft_is_shorter: bool) -> None:
    """Prevents: refusing Qwen2.5 0.5B for 7B, whose vocabularies differ in padding alone (case 16)."""
    short, long = Vocab(TEXTS[:-28]), Vocab()
    pair = (long, short) if draft_is_shorter else (short, long)
    assert fit(*pair).fits
    expected = "the target's alone and are never drafted" if draft_is_shorter else "the draft's alone and are masked"
    assert size_note(*pair) == f"28 token ids at the end are {expected}"


def test_an_id_inserted_in_the_middle_is_no_padding() -> None:
    """Prevents: taking a shifted vocabulary for a padded one."""
    report = fit(Vocab(), Vocab([*TEXTS[:10], "new", *TEXTS[10:]]))
    assert not report.fits
    assert report.n_differing == 290


def test_another_kind_of_tokenizer_does_not_fit_whatever_its_texts() -> None:
    """Prevents: a SentencePiece draft for a BPE target, whose pieces only look alike."""
    report = fit(Vocab(), Vocab(kind="spm"))
    assert not report.fits
    assert report.kind_reason == "the target's tokenizer is bpe, the draft's is spm"


def test_other_end_and_begin_tokens_are_notes() -> None:
    """Prevents: refusing a pair for metadata that does no harm, or keeping it secret (case 18)."""
    draft = Vocab(eos=7, bos=None, add_bos=True)
    assert fit(Vocab(), draft).fits
    assert special_notes(Vocab(), draft) == [
        "BOS is 1 for the target, None for the draft: the target's is used",
        "EOS is 2 for the target, 7 for the draft: the target's is used",
        "only one of the two wants a BOS in front: the target's wish is followed",
    ]
