"""An answer of a chat on the screen: origin of tokens, Markdown and thinking."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.style import Style

from specllama.base.text import counted
from specllama.chat.stream import TaggedText, TextStream
from specllama.cli.screen.markdown import AnswerReading, Kind, Shown
from specllama.cli.screen.output import Output
from specllama.cli.screen.render import Figures, codes_of, origin_style
from specllama.cli.screen.terminal import StyledText
from specllama.cli.screen.view import AnswerView
from specllama.core.events import Event, Finished, PromptProgress

# Colours, bold and underline show the origin of a token; with them, Markdown uses only dim and italic.
_BESIDE_ORIGINS: dict[Kind, Style] = {
    "text": Style(),
    "heading": Style(italic=True),
    "bold": Style(italic=True),
    "code": Style(),
    "block": Style(),
    "mark": Style(dim=True),
    "think": Style(dim=True),
}
_BY_ITSELF: dict[Kind, Style] = {
    "text": Style(),
    "heading": Style(bold=True, underline=True),
    "bold": Style(bold=True),
    "code": Style(),
    "block": Style(),
    "mark": Style(dim=True),
    "think": Style(dim=True),
}


class ChatView(AnswerView):
    """An answer with its styles; verbatim if stdout has no styles."""

    def __init__(
        self,
        output: Output,
        answer: TextStream,
        figures: Figures,
        *,
        live: bool,
        starts_thinking: bool,
    ) -> None:
        super().__init__(output, answer, figures, live=live)
        self.reading = AnswerReading(starts_thinking=starts_thinking)
        self._colors = figures.look.colors if figures.drafts else "off"
        self._folds = figures.look.fold == "on"
        self._folded = False  # thinking was hidden, and the line about it is not printed yet
        self._codes: dict[tuple[str, Kind], tuple[str, str]] = {}
        self._stream = output.out

    def take(self, event: Event) -> None:
        """Count the event and queue its text; the first progress has the cached tokens of the prompt."""
        if isinstance(event, PromptProgress) and self._figures.n_cached is None:
            self._figures.n_cached = event.done
        super().take(event)
        if isinstance(event, Finished):
            self._finish()

    def _add(self, spans: list[TaggedText]) -> None:
        for span in spans:
            if self._stream.reaches_a_terminal:
                self._show(self.reading.feed(self._with_newlines(span.text), span.tag))
            else:
                self._screen.add(StyledText(span.text))

    def _finish(self) -> None:
        self._show(self.reading.finish())
        self._tell_folded()

    def _show(self, letters: Iterable[Shown]) -> None:
        """Add characters, those of one style in one piece. Spaces are not styled: underlined they look like gaps."""
        for (tag, kind, is_space), group in groupby(letters, key=lambda one: (one[1], one[2], one[0].isspace())):
            text = "".join(char for char, _, _ in group)
            if kind == "think" and self._folds:
                self._folded = True
                continue
            if kind != "think":
                self._tell_folded()
            self._screen.add(StyledText(text, *(("", "") if is_space else self._codes_of(tag, kind))))

    def _tell_folded(self) -> None:
        if self._folded:
            self._folded = False
            n_words = len(self.reading.thought.split())
            on, off = codes_of(Style(dim=True), self._stream)
            self._screen.add(StyledText(f"[ {counted(n_words, 'word')} of thinking; /think shows them ]", on, off))
            self._screen.add(StyledText("\n"))

    def _codes_of(self, tag: str, kind: Kind) -> tuple[str, str]:
        key = (tag, kind)
        if key not in self._codes:
            styles = _BY_ITSELF if self._colors == "off" else _BESIDE_ORIGINS
            self._codes[key] = codes_of(origin_style(tag, self._colors) + styles[kind], self._stream)
        return self._codes[key]

    def close(self) -> None:
        """Write the rest of the text and erase the live figures."""
        self._finish()
        super().close()
