"""Views of an answer's events: text for a person or a pipe, JSON for a program."""

from __future__ import annotations

from typing import TypeAlias

from rich.style import Style

from specllama.chat.stream import TaggedText, TextStream
from specllama.cli.record import Record
from specllama.cli.screen.code_block import CodeBlock
from specllama.cli.screen.output import Output
from specllama.cli.screen.render import Figures, codes_of, palette_of, strip, summary
from specllama.cli.screen.terminal import Screen, StyledText
from specllama.cli.screen.wrapping import Wrapper
from specllama.core.events import Event, Finished, Notice, TokenEvent
from specllama.core.stats import SpecStats

FRAME_S = 0.1  # live lines are drawn at most ten times a second


class AnswerView:
    """The answer as text: styled by the origin of each token, verbatim on a pipe.

    On a terminal the text becomes visible. A missing newline at the end is added. `take` gets every event, `refresh`
    follows a batch of them at least `gap_s` after the last, and `close` comes last, also after a failure.
    """

    def __init__(self, output: Output, answer: TextStream, figures: Figures, *, live: bool) -> None:
        self.gap_s = FRAME_S if live else 0.0
        self._screen = Screen(output.out, output.err, breaks=Wrapper() if output.out.is_terminal else None)
        self._live = live
        self._output = output
        self._answer = answer
        self._figures = figures
        self._palette = palette_of(output.out, figures.look.colors)
        self._live_palette = palette_of(output.err, figures.look.colors)
        self._held_return = ""  # a carriage return that a newline may follow
        self._notices: list[str] = []

    def take(self, event: Event) -> None:
        self._figures.take(event)
        if isinstance(event, TokenEvent):
            self._add(self._answer.push(event.token, event.origin))
        elif isinstance(event, Notice):
            self._notices.append(event.text)
            if not self._output.out.is_terminal and not self._figures.stats.n_emitted:
                self._say_notices()
        elif isinstance(event, Finished):
            self._add(self._answer.finish())

    def _add(self, spans: list[TaggedText]) -> None:
        for span in spans:
            text = self._with_newlines(span.text)
            on, off = self._palette.codes[span.tag] if self._figures.drafts else ("", "")
            word = text.lstrip()  # an underlined space looks like a gap to fill in
            self._screen.add(StyledText(text[: len(text) - len(word)]))
            self._screen.add(StyledText(word, on, off))

    def _with_newlines(self, text: str) -> str:
        """`text`; for a terminal, Windows line ends become newlines."""
        if not self._output.out.reaches_a_terminal:
            return text
        text = (self._held_return + text).replace("\r\n", "\n")
        self._held_return = "\r" if text.endswith("\r") else ""
        return text.removesuffix("\r")

    def _draw(self) -> None:
        """Write the queued text and draw the figures; without `live`, a terminal shows only the progress of prefill."""
        if self._live or (self._output.live and not self._figures.stats.n_emitted):
            self._screen.draw(strip(self._figures, self._screen.size[0], self._live_palette))
        else:
            self._screen.clear()

    def refresh(self) -> None:
        """Show what was taken. Notices after the first token wait until `close`, not to interrupt the answer."""
        self._draw()

    def _say_notices(self) -> None:
        while self._notices:
            self._output.note(f"note: {self._notices.pop(0)}")

    def close(self) -> None:
        """Erase the live figures, end the line, and print the notices."""
        if self._held_return:
            self._screen.add(StyledText(self._held_return))
        self._screen.finish()
        if self._screen.mid_line:
            self._output.out.write("\n")
        self._say_notices()


class CodeView(AnswerView):
    """The first code block of the answer; the whole answer if it has none, with a warning."""

    def __init__(
        self, output: Output, answer: TextStream, figures: Figures, *, live: bool, starts_thinking: bool
    ) -> None:
        super().__init__(output, answer, figures, live=live)
        self._block = CodeBlock(starts_thinking=starts_thinking)

    def take(self, event: Event) -> None:
        super().take(event)
        if isinstance(event, Finished):
            rest = self._block.finish() if self._block.found else self._answer.text
            super()._add([TaggedText(rest, "target")])

    def _add(self, spans: list[TaggedText]) -> None:
        super()._add([TaggedText(self._block.feed(span.text), span.tag) for span in spans])

    def close(self) -> None:
        super().close()
        if not self._block.found:
            self._output.warn("the answer has no code block: all of it was printed")


class RecordView(AnswerView):
    """Nothing on stdout before the record at the end, only live figures where they are wanted."""

    def _add(self, spans: list[TaggedText]) -> None:
        pass

    def refresh(self) -> None:
        self._draw()

    def close(self) -> None:
        self._screen.clear()


class EventView:
    """Every event as one line of JSON; a token's line has the text that it completes."""

    gap_s = 0.0

    def __init__(self, output: Output, answer: TextStream, record: Record) -> None:
        self._output = output
        self._answer = answer
        self._record = record

    def take(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            text = "".join(span.text for span in self._answer.push(event.token))
            self._output.data({**event.to_json(), "text": text})
        elif isinstance(event, Finished):
            # Text held back for a possible stop string or an incomplete character; no token's line has it.
            tail = "".join(span.text for span in self._answer.finish())
            self._output.data({**event.to_json(), "tail": tail, **self._record.outcome(event, self._answer)})
        else:
            self._output.data(event.to_json())

    def refresh(self) -> None:
        """`take` has printed everything."""

    def close(self) -> None:
        """There is nothing to erase."""


View: TypeAlias = AnswerView | EventView


def say_summary(output: Output, stats: SpecStats, end: str = "") -> None:
    """Print the line after an answer on stderr, dimmed."""
    if not output.quiet:
        on, off = codes_of(Style(dim=True), output.err)
        output.err.line(on + summary(stats, output.err.width, end) + off)
