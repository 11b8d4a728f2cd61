"""The look of an answer in a chat: by origin or by Markdown, thinking dimmed or folded, and the line after it."""

from __future__ import annotations

import io
import re

import pyte
import pytest

from specllama.chat.stream import TextStream
from specllama.cli.chat.view import ChatView
from specllama.cli.screen.look import AnswerLook
from specllama.cli.screen.output import Output, Stream
from specllama.cli.screen.render import Figures
from specllama.core.events import Finished, Notice, PromptProgress, TokenEvent
from specllama.core.stats import SpecStats

PIECES = ["<think>", "a b", "</think>", "\n", "# T", "\n", "say ", "**yes**", "\x1b[2J"]


def show(
    look: AnswerLook, *, styled: bool = True, drafts: bool = True, starts_thinking: bool = False
) -> tuple[str, ChatView]:
    """What is written for an answer of all PIECES, every other one drafted; the first of them is the template's own."""
    paper = io.StringIO()
    stream = Stream(paper, styled, styled, styled, styled)
    figures = Figures(100, drafts=drafts, look=look)
    answer = TextStream(lambda token: PIECES[token].encode())
    view = ChatView(Output(stream, stream), answer, figures, live=False, starts_thinking=starts_thinking)
    view.take(PromptProgress(7, 20))
    view.take(PromptProgress(19, 20))
    for token in range(int(starts_thinking), len(PIECES)):
        view.take(TokenEvent(token, "draft" if token % 2 else "bonus", token))
        view.refresh()
    view.take(Finished("stop", SpecStats()))
    view.close()
    return paper.getvalue(), view


def test_notices_stay_out_of_an_answer_on_a_pipe() -> None:
    """Prevents: a note in the middle of a sentence where stdout and stderr are one file."""
    stream = Stream(paper := io.StringIO(), False, False, False, False)
    answer = TextStream(lambda token: b"ab"[token : token + 1])
    view = ChatView(Output(stream, stream), answer, Figures(100, drafts=False), live=False, starts_thinking=False)
    for event in (Notice("first"), TokenEvent(0, "bonus", 0), Notice("second"), TokenEvent(1, "bonus", 1)):
        view.take(event)
    view.refresh()
    view.take(Finished("stop", SpecStats()))
    view.close()
    assert paper.getvalue() == "note: first\nab\nnote: second\n"


def plain(written: str) -> str:
    return re.sub(r"\x1b(\[[\d;?]*[A-Za-z]|[78D])", "", written)


@pytest.mark.parametrize("look", [AnswerLook(), AnswerLook(colors="full"), AnswerLook(colors="off")])
def test_every_character_is_written_once_and_none_can_steer(look: AnswerLook) -> None:
    """Text lost to a style, a mark that vanishes, or a model that clears the screen."""
    written, view = show(look)
    assert plain(written) == "<think>a b</think>\n# T\nsay **yes**\\x1b[2J\n"
    assert view.reading.thought == "a b"
    assert view._figures.n_cached == 7


def test_origins_are_coloured_and_markdown_keeps_out_of_their_way() -> None:
    """Bold that looks like a correction where colours tell who wrote what; `/set colors off` that leaves colours."""
    written, _ = show(AnswerLook(colors="full"))
    assert "\x1b[3;36mye" in written  # drafted, in italics
    assert "\x1b[1" not in written
    written, _ = show(AnswerLook())
    assert "\x1b[3mye" in written
    assert "\x1b[4;35m" in written  # bonus
    assert "36m" not in written
    written, _ = show(AnswerLook(colors="off"))
    assert "\x1b[1myes" in written
    assert "\x1b[1;4mT" in written
    assert not re.search(r"\x1b\[[\d;]*3[56]", written)


@pytest.mark.parametrize("starts_thinking", [False, True])
def test_thinking_is_dimmed_or_folded(starts_thinking: bool) -> None:
    """A passage that looks like the answer, or is hidden without a word: Qwen3's successors and DeepSeek's templates
    write the first mark in the prompt."""
    written, view = show(AnswerLook(colors="off"), starts_thinking=starts_thinking)
    assert ("\x1b[2ma" if starts_thinking else "\x1b[2m<think>") in written
    assert view.reading.thought == "a b"
    assert plain(written).startswith("a b</think>\n# T" if starts_thinking else "<think>a b</think>\n# T")
    written, view = show(AnswerLook(fold="on"), starts_thinking=starts_thinking)
    assert plain(written).startswith("[ 2 words of thinking; /think shows them ]\n\n# T")
    assert view.reading.thought == "a b"


def test_a_pipe_gets_the_answer_byte_for_byte() -> None:
    """Markdown, folding or spelled-out bytes in a file."""
    assert show(AnswerLook(fold="on"), styled=False)[0] == "".join(PIECES) + "\n"


CODE = (
    "Here:\n\n```python\ndef merge(a, b):\n\t# a comment which is longer than a narrow window is wide: 漢字\n"
    '    """Doc\n    string."""\n\n    return sorted(a) or "x" * 12\n```\nDone `or`.\n```zzz\nor\n```\n```\nor\n```\n'
)


def screen_of(text: str, width: int, look: AnswerLook, *, height: int = 40) -> pyte.Screen:
    """The window after an answer of `text`, three characters a token, whose origins take turns."""
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    paper = io.StringIO()
    stream = Stream(paper, True, True, True, True)
    answer = TextStream(lambda token: pieces[token].encode())
    figures = Figures(100, drafts=True, look=look)
    view = ChatView(Output(stream, stream), answer, figures, live=True, starts_thinking=False)
    view._screen._size = lambda _: (width, height)
    for token in range(len(pieces)):
        view.take(TokenEvent(token, ("draft", "draft", "correction", "bonus")[token % 4], token))
        view.refresh()
    view.take(Finished("stop", SpecStats()))
    view.close()
    screen = pyte.Screen(width, height)
    pyte.Stream(screen).feed(paper.getvalue().replace("\n", "\r\n"))
    return screen


def colours_of(screen: pyte.Screen, word: str) -> list[set[str]]:
    """The colours of each `word` on the screen."""
    found = []
    for y, row in enumerate(screen.display):
        for match in re.finditer(rf"\b{word}\b", row):
            found.append({screen.buffer[y][x].fg for x in range(*match.span())})
    return found


@pytest.mark.parametrize("width", [20, 33, 80])
def test_lines_of_code_are_coloured_once_they_are_complete(width: int) -> None:
    """Code that is written twice or shifted by its colours; colours in prose or in a language that is not known."""
    shown, plain_one = screen_of(CODE, width, AnswerLook()), screen_of(CODE, width, AnswerLook(colors="full"))
    assert shown.display == plain_one.display
    shown = screen_of(CODE, width, AnswerLook(colors="off"))
    assert shown.display == plain_one.display
    assert colours_of(shown, "or") == [{"magenta"}, *[{"default"}] * 3]
    assert colours_of(shown, "def") == [{"magenta"}]
    assert colours_of(shown, "Doc") == [{"red"}]


def test_marks_stay_underlined_in_code() -> None:
    """Code whose colours hide where the draft was wrong."""
    shown = screen_of(CODE, 80, AnswerLook())
    row = next(y for y, line in enumerate(shown.display) if "return" in line)
    cells = [shown.buffer[row][x] for x in range(36) if shown.buffer[row][x].data != " "]
    assert {cell.underscore for cell in cells} == {True, False}
    assert colours_of(shown, "return") == [{"magenta"}]


def test_a_line_of_code_that_left_the_window_is_not_written_again() -> None:
    """Rows of a long line that appear twice because the cursor cannot go back to its beginning."""
    long = "```py\nx = '" + "word " * 60 + "'\ny = 1\n```\n"
    marked, full = (screen_of(long, 20, AnswerLook(colors=colors), height=6) for colors in ("off", "full"))
    assert marked.display == full.display
