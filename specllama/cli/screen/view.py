"""How the events of an answer become what a person, a pipe or a program reads."""

from __future__ import annotations

from typing import Protocol

from specllama.chat.stream import TaggedText, TextStream
from specllama.cli.record import Record
from specllama.cli.screen.output import Output, visible
from specllama.cli.screen.render import Figures, palette_of, strip
from specllama.cli.screen.terminal import Screen, StyledText
from specllama.cli.screen.wrapping import Wrapper
from specllama.core.events import Event, Finished, Notice, TokenEvent

FRAME_S = 0.1  # live lines are drawn at most ten times a second


class View(Protocol):
    """Takes the events of one answer in batches and shows them."""

    gap_s: float  # least time between two batches

    def take(self, event: Event) -> None:
        """One event."""
        ...

    def refresh(self) -> None:
        """A batch was taken, perhaps an empty one."""
        ...

    def close(self) -> None:
        """Nothing more comes, or the work failed: leave the streams as they should be."""
        ...


class Board:
    """A screen with the live figures below its text, where they are wanted.

    Where they are not, a terminal still shows how far the prompt is read: until then nothing else happens.
    """

    def __init__(self, output: Output, figures: Figures, *, live: bool) -> None:
        self.gap_s = FRAME_S if live else 0.0
        self.screen = Screen(output.out, output.err, breaks=Wrapper() if output.out.is_terminal else None)
        self._figures = figures
        self._palette = palette_of(output.err)
        self._live = live
        self._waits = output.live

    def refresh(self) -> None:
        """Show the text that waits, and the figures as they are now."""
        if self._live or (self._waits and not self._figures.stats.n_emitted):
            self.screen.draw(strip(self._figures, self.screen.size[0], self._palette))
        else:
            self.screen.clear()


class AnswerView:
    """The answer as text: styled by who wrote each token where stdout may be styled, verbatim on a pipe.

    On a terminal control characters are spelled out. An answer that does not end with a newline is given one.
    """

    def __init__(self, output: Output, answer: TextStream, figures: Figures, *, live: bool) -> None:
        self._board = Board(output, figures, live=live)
        self.gap_s = self._board.gap_s
        self._output = output
        self._answer = answer
        self._figures = figures
        self._palette = palette_of(output.out)
        self._spelled = output.out.is_terminal or output.out.styled
        self._held_return = ""  # a carriage return whose newline may still come
        self._notices: list[str] = []

    def take(self, event: Event) -> None:
        """Count the event and keep its text for the next refresh."""
        self._figures.take(event)
        if isinstance(event, TokenEvent):
            self._add(self._answer.push(event.token, event.origin))
        elif isinstance(event, Notice):
            self._notices.append(event.text)
        elif isinstance(event, Finished):
            self._add(self._answer.finish())

    def _add(self, spans: list[TaggedText]) -> None:
        for span in spans:
            text = self._on_screen(span.text) if self._spelled else span.text
            on, off = self._palette.codes[span.tag] if self._figures.drafts else ("", "")
            word = text.lstrip()  # underlined space says nothing and looks like a gap to fill in
            self._board.screen.add(StyledText(text[: len(text) - len(word)]))
            self._board.screen.add(StyledText(word, on, off))

    def _on_screen(self, text: str) -> str:
        """`text` for a terminal; Windows line ends become newlines."""
        text = (self._held_return + text).replace("\r\n", "\n")
        self._held_return = "\r" if text.endswith("\r") else ""
        return visible(text.removesuffix("\r"))

    def refresh(self) -> None:
        """Show what was taken. Notices wait on a terminal, where they would tear the answer apart."""
        self._board.refresh()
        if not self._output.out.is_terminal:
            self._say_notices()

    def _say_notices(self) -> None:
        while self._notices:
            self._output.note(f"note: {self._notices.pop(0)}")

    def close(self) -> None:
        """Take the live figures away, end the line, and say what had to wait."""
        if self._held_return:
            self._board.screen.add(StyledText(visible(self._held_return)))
        self._board.screen.finish()
        if self._board.screen.mid_line:
            self._output.out.write("\n")
        self._say_notices()


class RecordView:
    """Nothing on stdout until the record at the end; the figures are live meanwhile where they are wanted."""

    def __init__(self, output: Output, answer: TextStream, figures: Figures, *, live: bool) -> None:
        self._board = Board(output, figures, live=live)
        self.gap_s = self._board.gap_s
        self._answer = answer
        self._figures = figures

    def take(self, event: Event) -> None:
        """Count the event and keep its text."""
        self._figures.take(event)
        if isinstance(event, TokenEvent):
            self._answer.push(event.token)
        elif isinstance(event, Finished):
            self._answer.finish()

    def refresh(self) -> None:
        """Draw the figures."""
        self._board.refresh()

    def close(self) -> None:
        """Take them away."""
        self._board.screen.clear()


class EventView:
    """Every event as one line of JSON, at once; a token's line carries the text that it completes."""

    gap_s = 0.0

    def __init__(self, output: Output, answer: TextStream, record: Record) -> None:
        self._output = output
        self._answer = answer
        self._record = record

    def take(self, event: Event) -> None:
        """Print the event."""
        if isinstance(event, TokenEvent):
            text = "".join(span.text for span in self._answer.push(event.token))
            self._output.data({**event.to_json(), "text": text})
        elif isinstance(event, Finished):
            # What waited for the rest of a stop string or of a character, and belongs to no token's line.
            tail = "".join(span.text for span in self._answer.finish())
            self._output.data({**event.to_json(), "tail": tail, **self._record.outcome(event, self._answer)})
        else:
            self._output.data(event.to_json())

    def refresh(self) -> None:
        """Everything is printed already."""

    def close(self) -> None:
        """Nothing was drawn."""
