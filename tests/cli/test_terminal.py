"""The screen: text that only grows and live lines below it, on terminals of many sizes, as pyte shows them."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from threading import Event

import pyte
import pytest

from specllama.cli import loading
from specllama.cli.screen.output import Output, Stream
from specllama.cli.screen.terminal import Screen, StyledText, column_after
from specllama.cli.screen.wrapping import Wrapper
from tests.cli.conftest import TerminalScreen

LIVE = ["~~~~~~~~", "live one", "live two"]


class Window:
    """A terminal whose two streams end on one screen; it counts what was sent as text."""

    def __init__(self, columns: int, rows: int, breaks: Wrapper | None = None) -> None:
        self.display = TerminalScreen(columns, rows)
        self.display.set_mode(pyte.modes.LNM)  # a newline returns the carriage, as the terminal driver does
        self._terminal = pyte.Stream(self.display)
        self.sent = ""
        streams = self._stream(is_text=True), self._stream(is_text=False)
        self.screen = Screen(*streams, lambda _: (self.display.columns, self.display.lines), breaks)

    def _stream(self, *, is_text: bool) -> Stream:
        window = self

        class File(io.StringIO):
            def write(self, text: str) -> int:
                if is_text:
                    window.sent += text
                window._terminal.feed(text)
                return len(text)

        return Stream(File(), True, True, True, True)

    @property
    def lines(self) -> list[str]:
        return self.display.text_lines


def pieces_of(text: str, seed: int) -> Sequence[str]:
    """`text` in some hundred pieces, some of them a single character."""
    rng, at, pieces = random.Random(seed), 0, []
    while at < len(text):
        n = rng.choice([1, rng.randint(1, max(len(text) // 60, 9))])
        pieces.append(text[at : at + n])
        at += n
    return pieces


def _shown_alone(text: str, columns: int, rows: int) -> list[str]:
    """What a terminal shows of `text` and nothing else."""
    window = Window(columns, rows)
    window.screen.add(StyledText(text))
    window.screen.clear()
    return window.lines


TEXTS = {
    "short": "one line",
    "tall": "\n".join(f"line {n} of two hundred" for n in range(200)),
    "one endless line": "word " * 400,
    "wide": "東京は日本の首都です。" * 30 + "\n" + "한국어 中文 " * 20,
    "tabs": "a\tb\tc\td\te\tf\tg\th\ti\tj\tk\n\tindented\t\ttwice" * 3,
    "exactly the width": ("x" * 40 + "\n") * 3 + "y" * 80 + "z" * 40,
    "empty lines": "\n\n\na\n\n\nb\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (80, 24), (41, 6), (7, 3), (20, 1)])
def test_the_text_is_written_once_with_live_lines_below_it(text: str, columns: int, rows: int) -> None:
    """An answer taller than the window that repeats, flickers, or loses a line to the figures below it."""
    window = Window(columns, rows)
    for piece in pieces_of(text, seed=columns):
        window.screen.add(StyledText(piece))
        window.screen.draw(LIVE)
    window.screen.clear()
    assert window.sent == text
    assert window.lines == _shown_alone(text, columns, rows)


def test_the_live_lines_stand_below_the_text_while_it_grows() -> None:
    """Figures in the middle of the answer, or twice."""
    window = Window(30, 12)
    for n in range(40):
        window.screen.add(StyledText(f"line {n}\n" if n % 3 else f"part {n} "))
        window.screen.draw(LIVE)
        assert window.lines[-3:] == LIVE
        assert sum(line == "live one" for line in window.lines) == 1


def test_ctrl_z_erases_the_live_lines_and_the_text_goes_on_below_the_shell() -> None:
    """Prevents: a shell that writes into the figures, and text that is placed as if the shell had written nothing."""
    window = Window(30, 12)
    window.screen.add(StyledText("the answer"))
    window.screen.draw(LIVE)
    window.screen.suspend()
    assert window.lines == ["the answer"]
    window._terminal.feed("\r\nStopped\r\n$ fg\r\n")
    window.screen.resume()
    window.screen.add(StyledText("x" * 29))
    window.screen.draw(LIVE)
    window.screen.add(StyledText("y"))
    window.screen.finish()
    assert window.lines == ["the answer", "Stopped", "$ fg", "x" * 29 + "y"]


def test_a_line_whose_start_was_scrolled_out_is_not_written_again() -> None:
    """A line of code that stands twice in the scrollback: the live lines have pushed its first rows out of reach."""
    for n_characters in (200, 299, 300, 500):
        window, line = Window(50, 12), "x" * n_characters
        for piece in (line[:150], line[150:]):
            window.screen.add(StyledText(piece))
            window.screen.draw(["live"] * 6)
        window.screen.repaint([StyledText(line)])
        window.screen.add(StyledText("\n"))
        window.screen.finish()
        assert window.lines == _shown_alone(line, 50, 12)


def test_at_most_half_of_a_small_window_is_taken() -> None:
    """A window of six lines in which the answer cannot be read for figures."""
    window = Window(40, 4)
    window.screen.add(StyledText("the answer"))
    window.screen.draw(["1", "2", "3", "4", "5"])
    assert window.lines == ["the answer", "1", "2"]


def test_work_is_mentioned_only_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: seconds without a word at the first start, and a line that flickers at every later one."""
    monkeypatch.setattr(loading, "_SOON_S", 0.01)
    file = io.StringIO()
    said = loading.Said(Output(*(Stream(file, True, True, True, True) for _ in range(2))))
    drawn = Event()
    monkeypatch.setattr(loading.StatusLine, "show", lambda *_: drawn.set())
    with said.working("testing the files"):
        assert drawn.wait(5.0)
    drawn.clear()
    monkeypatch.setattr(loading, "_SOON_S", 60.0)
    with said.working("testing the files"):
        pass
    assert not drawn.is_set()


def test_no_live_line_wraps() -> None:
    """A figure line longer than the window, which moves everything below it."""
    window = Window(20, 10)
    for _ in range(3):
        window.screen.add(StyledText("text "))
        window.screen.draw(["x" * 50, "second"])
        assert window.lines[0].startswith("text")
        assert window.lines[2] == "second"


@pytest.mark.parametrize("smaller", [(50, 8), (30, 24), (80, 5)])
def test_a_resize_leaves_nothing_behind(smaller: tuple[int, int]) -> None:
    """Remains of the figures between the lines of the answer after the window changed."""
    window = Window(80, 24)
    text = "".join(f"line {n} is a little longer than thirty cells\n" for n in range(12))
    for n, piece in enumerate(pieces_of(text, seed=1)):
        if n == 40:
            window.display.resize(lines=smaller[1], columns=smaller[0])
        window.screen.add(StyledText(piece))
        window.screen.draw(LIVE)
    window.screen.clear()
    assert window.sent == text
    assert not any("live" in line or "~" in line for line in window.lines)


def test_a_character_at_the_margin_waits_for_the_next() -> None:
    """The cursor between two rows, where terminals differ: the next character overwrites the last."""
    window = Window(10, 5)
    window.screen.add(StyledText("0123456789", "<", ">"))
    window.screen.draw(LIVE[:1])
    assert window.sent == "<012345678>"
    window.screen.draw(LIVE[:1])
    assert window.sent == "<012345678>"
    window.screen.clear()
    assert window.sent == "<012345678><9>"


def test_the_margin_is_found_again_after_a_resize() -> None:
    """A cursor computed with the old width, so that the character at the new margin is written too early."""
    window = Window(10, 5)
    window.screen.add(StyledText("01234567"))
    window.screen.draw(LIVE[:1])
    window.display.resize(columns=6)  # the terminal breaks the line anew: the text now ends in column 2
    window.screen.add(StyledText("89ab"))
    window.screen.draw(LIVE[:1])
    assert window.sent == "0123456789a"


def test_an_empty_frame_sends_no_text() -> None:
    """An escape sequence on stdout for a refresh without text."""
    window = Window(20, 5)
    window.screen.draw(LIVE)
    window.screen.draw(LIVE)
    window.screen.clear()
    assert window.sent == ""
    assert window.lines == []


@pytest.mark.parametrize(
    ("text", "column", "width", "after"),
    [
        ("abc", 0, 10, 3),
        ("abc", 8, 10, 1),
        ("ab", 8, 10, 10),
        ("a\nbc", 5, 10, 2),
        ("\t", 3, 80, 8),
        ("\t", 78, 80, 79),
        ("東", 8, 10, 10),
        ("東", 9, 10, 2),
        ("e\u0301", 0, 10, 1),
    ],
)
def test_columns_are_counted_as_terminals_do(text: str, column: int, width: int, after: int) -> None:
    """Wide characters, tabs and accents that put the cursor elsewhere."""
    assert column_after(text, column, width) == after
