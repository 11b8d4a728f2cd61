"""The style of streaming text: Markdown, code, thinking; and no character is lost."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specllama.cli.screen.markdown import AnswerReading

KINDS = {"text": "", "heading": "h", "bold": "b", "code": "c", "block": "c", "fence": "m", "mark": "m", "think": "t"}


def looks(text: str, *, starts_thinking: bool = False, n: int = 1) -> str:
    """The text with the look of each piece, such as `m(**)b(word)m(**)`, fed `n` characters at a time."""
    reading = AnswerReading(starts_thinking=starts_thinking)
    shown = [one for i in range(0, len(text), n) for one in reading.feed(text[i : i + n], "draft")]
    shown += reading.finish()
    pieces = [(kind, "".join(char for char, _, _ in group)) for kind, group in groupby(shown, key=lambda one: one[2])]
    return "".join(f"{KINDS[kind]}({piece})" if KINDS[kind] else piece for kind, piece in pieces)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", "plain text"),
        ("# Title\nbody", "m(#)h( Title\n)body"),
        ("#hashtag and #1", "#hashtag and #1"),
        ("a **b c** d", "a m(**)b(b c)m(**) d"),
        ("2 ** 3 and a * b * c", "2 ** 3 and a * b * c"),
        ("use `x**2` here", "use m(`)c(x**2)m(`) here"),
        ("``a`b`` c", "m(``)c(a`b)m(``) c"),
        ("`open\nnext", "m(`)c(open\n)next"),
        ("**open\nnext", "m(**)b(open\n)next"),
        ("```py\nx = '**'\n# no title\n```\nafter", "m(```py\n)c(x = '**'\n# no title\n)m(```\n)after"),
        ("~~~\n```\n~~~", "m(~~~\n)c(```\n)m(~~~)"),
        ("```\n`` `\n``` x\n```", "m(```\n)c(`` `\n``` x\n)m(```)"),
        ("```\nx\n``` \nafter", "m(```\n)c(x\n)m(``` \n)after"),
        ("```\r\nx\n```\r\nafter", "m(```\r\n)c(x\n)m(```\r\n)after"),
        ("- a\n    - b\n      ```\n      x\n      ```\nc", "- a\n    - b\nm(      ```\n)c(      x\n)m(      ```\n)c"),
        ("a\n    ```\nb", "a\n    m(```)c(\n)b"),
        ("```x``` and\n```a`b", "m(```)c(x)m(```) and\nm(```)c(a`b)"),
        ("* item\n- item", "* item\n- item"),
        ("```", "m(```)"),
        ("", ""),
    ],
)
def test_markdown_is_seen_as_it_streams(text: str, expected: str) -> None:
    """A fence that is never closed, a star in code taken for bold, an open mark that styles the rest of the answer."""
    assert looks(text) == looks(text, n=7) == expected


@pytest.mark.parametrize(
    ("text", "starts", "expected"),
    [
        ("<think>a < b</think>\nyes", False, "t(<think>a < b</think>)\nyes"),
        ("\n<think>a</think>b", False, "\nt(<think>a</think>)b"),
        ("a</thi</think>**b**", True, "t(a</thi</think>)m(**)b(b)m(**)"),
        ("so <think> is a tag", False, "so <think> is a tag"),
        ("<thin", False, "<thin"),
        ("<think>open", False, "t(<think>open)"),
    ],
)
def test_thinking_is_told_from_the_answer(text: str, starts: bool, expected: str) -> None:
    """An answer dimmed because it contains the tag, or thinking that never ends."""
    assert looks(text, starts_thinking=starts) == expected


def test_what_was_thought_is_kept() -> None:
    """`/think` with nothing to show."""
    reading = AnswerReading()
    list(reading.feed("<think>\nwell\n</think>yes", "draft"))
    assert reading.thought == "well"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab \r\n*`#~<>/think-", max_size=60), st.booleans())
def test_no_character_is_lost_or_moved(text: str, starts: bool) -> None:
    """Text that vanishes with its marks: a copy of the screen must be the answer."""
    reading = AnswerReading(starts_thinking=starts)
    shown = [*reading.feed(text, "draft"), *reading.finish()]
    assert "".join(char for char, _, _ in shown) == text


def test_a_long_line_is_not_held_to_its_end() -> None:
    """A line behind three backticks that appears after minutes, in seconds of work for its characters."""
    for mark in ("```", "```" * 80, " " * 300, "~~~"):
        reading = AnswerReading()
        assert len(list(reading.feed(f"{mark}{'x' * 20_000}", ""))) > 19_000


def test_little_is_held_back() -> None:
    """A stream that stops because something may still become Markdown."""
    reading, n_shown = AnswerReading(), 0
    for n_fed, char in enumerate("# A title\n\nand **bold** `code`\n```py\nx\n```\n" * 3, 1):
        n_shown += len(list(reading.feed(char, "draft")))
        assert n_fed - n_shown <= len("```py")
