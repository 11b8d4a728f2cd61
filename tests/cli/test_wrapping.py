"""Word wrap of streaming answers, on windows of many sizes, as pyte shows them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specllama.cli.screen.terminal import StyledText
from specllama.cli.screen.wrapping import Wrapper
from tests.cli.test_terminal import LIVE, Window, pieces_of

PROSE = (
    "Speculative decoding lets a small model propose words, and the large one check them all in one pass. Nothing of "
    "the text changes; only the time does, where the two of them agree.\n\n"
    "- a point of a list that is long enough to need a second line, and a third\n"
    "  1. one below it, with a path/to/some/file and a few words more\n"
    "12) twelve of them, which is more than anybody wants to read\n"
)
CODE = "```python\nprint('a line of code that is longer than any of these narrow windows', 1, 2, 3, 4)\n```\n"
WIDE = "東京は日本の首都です。人口は約千四百万人で、世界でも最大級の都市です。「とても大きい」と言えます。\n"


def _written(text: str, columns: int, *, pieces: Sequence[str] | None = None, live: bool = True) -> Window:
    """A window on which `text` was streamed in pieces."""
    window = Window(columns, 10, Wrapper())
    for piece in pieces_of(text, columns) if pieces is None else pieces:
        window.screen.add(StyledText(piece))
        window.screen.draw(LIVE if live else [])
    window.screen.finish()
    return window


@pytest.mark.parametrize("columns", [8, 40, 41])
@pytest.mark.parametrize("text", [PROSE, WIDE, "word " * 40, "\tindented  text\n\n\n    more " * 3])
def test_no_word_is_torn_and_nothing_is_lost(text: str, columns: int) -> None:
    """Words in two halves, a word written twice, a line that sticks out, or lines that depend on the pieces."""
    window = _written(text, columns)
    words = [word for word in text.split() if len(word) <= columns]
    shown = window.sent.split()
    if text is not WIDE:
        assert [word for word in shown if word in words] == words
    assert "".join(shown) == "".join(text.split())
    longest = max(map(len, text.split()))
    if longest <= columns:  # the terminal itself breaks no line
        assert window.lines == [line.expandtabs().rstrip() for line in window.sent.rstrip().split("\n")]
    assert window.sent == _written(text, columns, pieces=[text]).sent
    assert window.sent == _written(text, columns, live=False).sent
    assert window.sent.count("\n\n\n") == text.count("\n\n\n")


def test_lines_of_a_list_go_on_below_its_text() -> None:
    """A list whose marks cannot be found among its lines."""
    lines = _written(PROSE, 40).lines
    at = lines.index("- a point of a list that is long enough")
    assert lines[at : at + 6] == [
        "- a point of a list that is long enough",
        "  to need a second line, and a third",
        "  1. one below it, with a",
        "     path/to/some/file and a few words",
        "     more",
        "12) twelve of them, which is more than",
    ]


def test_code_is_left_as_it_is_and_the_text_behind_it_is_not() -> None:
    """Code that is copied with line ends of ours in it, or a block that never ends."""
    sent = _written(f"Look at\n{CODE}and then something long enough for lines of its own.", 30).sent
    assert f"\n{CODE}and then something long enough\nfor lines of its own." in sent
    nested = "````\n```\nstill inside of the outer block, which has four of them\n```\n````\n"
    assert _written(nested, 30).sent == nested


def test_scripts_without_spaces_break_between_characters_but_not_before_a_full_stop() -> None:
    """A sentence in Japanese that moves down whole, a line that begins with a comma, half a character at the margin."""
    for columns in (9, 10, 11, 40):
        lines = _written(WIDE, columns).lines
        assert all(line[0] not in "。、」" and line[-1] != "「" for line in lines)
        assert all(2 * len(line) in range(columns - 5, columns + 1) for line in lines[:-1])


def test_a_word_wider_than_the_window_does_not_wait_for_its_end() -> None:
    """An address that appears seconds late, or never."""
    window = Window(20, 10, Wrapper())
    window.screen.add(StyledText("see " + "x" * 30))
    window.screen.draw(LIVE)
    assert window.sent == "see " + "x" * 30
    window.screen.add(StyledText("x and more of it"))
    window.screen.finish()
    assert window.lines == ["see " + "x" * 16, "x" * 15 + " and", "more of it"]


def test_the_first_word_of_an_answer_does_not_wait_for_the_second() -> None:
    """A first token that is not shown for seconds on a slow machine."""
    window = Window(20, 10, Wrapper())
    for piece, sent in (("On", "On"), ("ce", "Once"), (" up", "Once"), ("on", "Once"), (" a", "Once upon")):
        window.screen.add(StyledText(piece))
        window.screen.draw(LIVE)
        assert window.sent == sent


def test_the_style_of_a_word_stays_with_it() -> None:
    """A drafted token that looks like the target's own because it went to the next line."""
    pieces = Wrapper().feed([StyledText("one two th"), StyledText("ree ", "<", ">"), StyledText("x ")], 0, 10)
    assert "".join(map(str, pieces)) == "one two\nth<ree >x"


@pytest.mark.parametrize("columns", [20, 60])
def test_a_resize_in_the_middle_counts_from_the_next_word_on(columns: int) -> None:
    """Lines of the old width after the window changed."""
    window = Window(40, 10, Wrapper())
    for n, piece in enumerate(pieces_of("word " * 60, 1)):
        if n == 30:
            window.display.resize(columns=columns)
            n_before = window.sent.count("\n")
        window.screen.add(StyledText(piece))
        window.screen.draw(LIVE)
    window.screen.finish()
    lines = window.sent.split("\n")
    assert all(len(line.rstrip()) == (columns + 1) // 5 * 5 - 1 for line in lines[n_before + 1 : -1])
    assert len(lines) > n_before + 2
    assert window.sent.split() == ["word"] * 60
