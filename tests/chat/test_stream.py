"""Tokens to text: whole characters, stop strings, and whose token showed what."""

from __future__ import annotations

import codecs
import time
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.chat.stream import StopWatch, TaggedText, TextStream

# Few letters, so that stop strings overlap each other and themselves; characters of 1 to 4 bytes; bytes that are not
# UTF-8.
letters = st.sampled_from(["a", "b", "é", "語", "😀"])
fragments = st.one_of(letters.map(str.encode), st.sampled_from([b"\xff", b"\xf0\x9f", b"\xe8\xaa", b"\x80", b"\xc3"]))
streams = st.lists(fragments, max_size=12).map(b"".join)
stop_lists = st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), max_size=3)


@st.composite
def answers(draw):
    """The pieces of an answer (its tokens are their indices), some of them empty, cut at random places."""
    stream = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    borders = [0, *cuts, len(stream)]
    return [stream[a:b] for a, b in pairwise(borders)]


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def stopping_token(pieces: list[bytes], stops: list[str]) -> int | None:
    """The first token after which some stop string is among the bytes so far, found the slow way."""
    for token in range(len(pieces)):
        data = b"".join(pieces[: token + 1])
        if any(stop.encode() in data for stop in stops):
            return token
    return None


def streamed(pieces: list[bytes], stops: list[str] = ()):
    """The stream after all tokens, and the spans of every push and of `finish`; the tags are the tokens."""
    stream = TextStream(pieces.__getitem__, stops)
    spans = [stream.push(token, str(token)) for token in range(len(pieces))]
    return stream, [*spans, stream.finish()]


def shown_bytes(pieces: list[bytes], stops: list[str]) -> bytes:
    """The bytes before the first stop string, found the slow way."""
    stopping = stopping_token(pieces, stops)
    if stopping is None:
        return b"".join(pieces)
    data = b"".join(pieces[: stopping + 1])
    return data[: min(at for stop in stops if (at := data.find(stop.encode())) >= 0)]


def joined(spans: list[list[TaggedText]]) -> str:
    return "".join(span.text for group in spans for span in group)


@given(answers(), stop_lists)
def test_stop_watch_says_true_exactly_at_the_token_that_completes_the_first_stop(pieces, stops):
    """A stop was missed where it was split over tokens, or where a false start overlapped the real one."""
    watch = StopWatch(stops, pieces.__getitem__)
    stopping = stopping_token(pieces, stops)
    upto = len(pieces) if stopping is None else stopping + 1
    assert [watch.push(token) for token in range(upto)] == [token == stopping for token in range(upto)]


def test_a_false_start_that_overlaps_the_stop_string_does_not_hide_it():
    """Prevents: starting over after a mismatch, which loses `aab` in `aaab` (all stop strings in all short texts)."""
    for stop in ("".join(letters) for n in range(1, 5) for letters in product("ab", repeat=n)):
        for text in map("".join, product("ab", repeat=6)):
            watch = StopWatch([stop], lambda token: b"ab"[token : token + 1])
            assert ([watch.push("ab".index(char)) for char in text] + [True]).index(True) == (
                text.index(stop) + len(stop) - 1 if stop in text else len(text)
            )


def test_reset_forgets_half_a_stop_string_of_the_answer_before():
    """The last answer ended in '<' and the next began with 'end>': it was stopped at once."""
    pieces = [b"<", b"end>"]
    watch = StopWatch(["<end>"], pieces.__getitem__)
    assert not watch.push(0)
    watch.reset()
    assert not watch.push(1)
    assert not watch.push(0)
    assert watch.push(1)


def test_a_stop_string_counts_once():
    """What was matched before the stop string was still there after it, and the next token stopped again."""
    watch = StopWatch(["ab"], [b"a", b"b"].__getitem__)
    assert [watch.push(token) for token in (0, 1, 1, 0, 1)] == [False, True, False, False, True]


def test_one_string_in_place_of_a_list_of_stop_strings_is_a_programming_error():
    """`stops="END"` silently meant the three stop strings E, N and D."""
    with pytest.raises(TypeError, match="sequence"):
        StopWatch("END", [].__getitem__)


@given(answers(), stop_lists)
def test_the_spans_are_the_whole_text_cut_at_the_earliest_stop(pieces, stops):
    """Text was lost, doubled or printed past the stop at some split of the bytes."""
    stream, spans = streamed(pieces, stops)
    assert joined(spans) == stream.text == decoded(shown_bytes(pieces, stops))
    assert stream.stopped == (stopping_token(pieces, stops) is not None)


@given(answers(), stop_lists)
def test_what_was_shown_never_has_to_be_taken_back(pieces, stops):
    """Half of a stop string flashed up before the rest of it arrived."""
    stream = TextStream(pieces.__getitem__, stops)
    shown = ""
    for token in range(len(pieces)):
        shown += "".join(span.text for span in stream.push(token))
        held = decoded(b"".join(pieces[: token + 1]))[len(shown) :].strip("\ufffd")
        assert not any(stop in shown for stop in stops)
        # Nothing is held back without a reason: what is held starts like a stop, or a stop has ended the answer.
        assert stream.stopped or not held or any(stop.startswith(held) for stop in stops)
    stream.finish()
    assert stream.text.startswith(shown)


@given(answers(), stop_lists)
def test_tokens_end_with_the_last_one_that_shows_a_byte(pieces, stops):
    """Stop strings stayed among the tokens, or an empty token before one was lost (docs/design.md, invariant 6)."""
    stream, _ = streamed(pieces, stops)
    n_left, n_shown = len(shown_bytes(pieces, stops)), 0
    for token, piece in enumerate(pieces):
        if piece and n_left > 0:
            n_shown = token + 1
        n_left -= len(piece)
    assert stream.tokens == list(range(n_shown))


@given(answers(), stop_lists)
def test_every_character_carries_the_tag_of_the_token_that_completed_it(pieces, stops):
    """Text that was held back took the colour of the token that released it."""
    _, spans = streamed(pieces, stops)
    tags = [span.tag for group in spans for span in group for _ in span.text]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    expected = [str(token) for token, piece in enumerate(pieces) for _ in decoder.decode(piece)]
    # The last may be the U+FFFD of a character that was never completed, which another test covers.
    certain = slice(max(len(tags) - 1, 0))
    assert tags[certain] == expected[certain]


def test_spans_keep_the_tags_of_held_back_tokens_and_join_neighbours():
    """A held 'E' of a draft token came out under the correction's tag."""
    stream = TextStream([b"so", b"E", b"N", b"x", b"y"].__getitem__, ["END"])
    pushed = [stream.push(token, tag) for token, tag in enumerate(["draft", "draft", "correction", "draft", "bonus"])]
    assert pushed == [
        [TaggedText("so", "draft")],
        [],
        [],
        [TaggedText("E", "draft"), TaggedText("N", "correction"), TaggedText("x", "draft")],
        [TaggedText("y", "bonus")],
    ]
    joined_stream = TextStream([b"E", b"N", b"x"].__getitem__, ["END"])
    assert [joined_stream.push(token, "draft") for token in range(3)] == [[], [], [TaggedText("ENx", "draft")]]


def test_held_back_text_comes_out_at_the_end():
    """An answer that ends in the first half of a stop string lost it."""
    stream = TextStream([b"a<", b"/do"].__getitem__, ["</done>"])
    assert stream.push(0, "draft") == [TaggedText("a", "draft")]
    assert stream.push(1, "bonus") == []
    assert stream.text == "a"
    assert stream.tokens == [0]
    assert stream.finish() == [TaggedText("<", "draft"), TaggedText("/do", "bonus")]
    assert stream.finish() == []
    assert stream.tokens == [0, 1]


@pytest.mark.slow
def test_a_token_costs_the_same_at_the_end_of_a_long_answer():
    """Scanning the whole text for a stop string at every token makes a long answer quadratic."""
    pieces = [b" aaaa", b"a" * 2_000_000]
    stream = TextStream(pieces.__getitem__, ["aaaaaaab"])
    watch = StopWatch(["\nUser:"], pieces.__getitem__)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(100):
            stream.push(0, "draft")
            watch.push(0)
        return time.perf_counter() - start

    early = min(seconds() for _ in range(30))
    stream.push(1)
    watch.push(1)
    assert min(seconds() for _ in range(30)) < 4 * early
