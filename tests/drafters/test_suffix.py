"""`SuffixIndex` against a search of the whole text, on texts that repeat themselves in every way."""

from __future__ import annotations

import random
from collections import Counter

from specllama.drafters.suffix import COUNTED_CONTEXTS, SuffixIndex
from tests.marks import looped


def index_of(text: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    for token in text:
        index.append(token)
    return index


def longest_match(text: list[int]) -> tuple[int, list[int]]:
    """(length of the longest end that occurred before, what followed each earlier occurrence, in order)."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        at = [i for i in range(len(text) - length) if text[i : i + length] == end]
        if at:
            return length, [text[i + length] for i in at]
    return 0, []


def texts(seed: int) -> list[int]:
    """Random tokens mixed with copies of earlier ones."""
    rng = random.Random(seed)
    n_vocab, text = rng.choice([2, 3, 5, 12]), [0]
    while len(text) < rng.randint(2, 80):
        if rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 9)]
        else:
            text.append(rng.randrange(n_vocab))
    return text


@looped(seed=range(40))
def test_match_and_continuations_are_those_of_a_search_through_the_text(seed: int) -> None:
    """A clone that forgets a transition, or counts that miss or double an occurrence: wrong tokens are proposed."""
    text = texts(seed)
    index = SuffixIndex()
    for n, token in enumerate(text):
        match = index.match()
        length, followed = longest_match(text[:n])
        assert match.length == length
        if length:
            assert index.n_seen(match) == len(followed) + 1
            found = Counter(followed)
            favourite = index.favourite(match)
            assert favourite is not None
            assert favourite.alone == (len(found) == 1)
            assert favourite.n_followed == max(found.values())
            most = [other for other in followed if found[other] == favourite.n_followed]
            assert favourite.token == most[-1], "the latest among the most frequent"
        else:
            assert index.favourite(match) is None
        index.append(token)


def test_a_text_of_one_token_is_matched_in_full() -> None:
    """Counting every context of such a text would take quadratic time; leaving out the short ones must not lose it."""
    index = index_of([7] * (3 * COUNTED_CONTEXTS))
    match = index.match()
    assert match.length == 3 * COUNTED_CONTEXTS - 1
    assert len(index._next) == 3 * COUNTED_CONTEXTS + 1, "no state is split in vain"
    favourite = index.favourite(match)
    assert favourite is not None
    assert favourite.token == 7


def test_a_draft_can_be_followed_beyond_the_end_of_the_text() -> None:
    """A period that was said twice is likely to come a third time: the walk must not end where the text does."""
    index = index_of([1, 2, 3, 1, 2, 3])
    match, walked = index.match(), []
    for _ in range(7):
        match = index.continued(match)
        favourite = index.favourite(match)
        assert favourite is not None
        walked.append(favourite.token)
        match = index.advance(match, favourite.token)
    assert walked == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_matches_in_a_text_without_repetition() -> None:
    """The empty match, which every token continues, taken for a match."""
    assert index_of([]).match().length == 0
    assert index_of([4]).match().length == 0
    index = index_of([1, 2, 3])
    assert index.match().length == 0
    assert index.favourite(index.match()) is None
