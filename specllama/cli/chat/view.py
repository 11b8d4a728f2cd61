"""An answer of a chat on the screen: origin of tokens, Markdown and thinking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.style import Style

from specllama.base.text import counted
from specllama.chat.stream import TaggedText, TextStream
from specllama.cli.screen.code import styles_of_last_line
from specllama.cli.screen.markdown import AnswerReading, Kind, Letter, Shown
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
    "fence": Style(dim=True),
    "mark": Style(dim=True),
    "think": Style(dim=True),
}
_BY_ITSELF: dict[Kind, Style] = {
    "text": Style(),
    "heading": Style(bold=True, underline=True),
    "bold": Style(bold=True),
    "code": Style(),
    "block": Style(),
    "fence": Style(dim=True),
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
        self._highlights = output.out.steerable and self._colors != "full"
        self._block = ""  # the code so far, in whole lines
        self._code_line: list[Letter] = []  # the last line of code, with its tags
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
        for (tag, kind, is_space, is_end), group in groupby(letters, key=_alike):
            text = "".join(char for char, _, _ in group)
            if kind == "think" and self._folds:
                self._folded = True
                continue
            if kind != "think":
                self._tell_folded()
            if self._highlights:
                self._highlight(text, tag, kind, is_end=is_end)
            self._screen.add(StyledText(text, *(("", "") if is_space else self._codes_of(tag, kind))))

    def _highlight(self, text: str, tag: str, kind: Kind, *, is_end: bool) -> None:
        """Take text before it is queued. At the end of a line of code, write the line again with the colours of code.

        The marks of corrections and bonus tokens stay underlined.
        """
        if kind != "block":
            self._block, self._code_line = "", []
        elif not is_end:
            self._code_line += [(char, tag) for char in text]
        else:
            line, self._code_line = self._code_line, []
            self._block += "".join(char for char, _ in line) + text
            styles = styles_of_last_line(self._block[: len(self._block) - len(text) + 1], self.reading.info)
            if line and styles:
                marked = [origin_style(tag, self._colors) + style for (_, tag), style in zip(line, styles, strict=True)]
                pieces = [
                    StyledText("".join(char for char, _ in line[first:end]), *codes_of(style, self._stream))
                    for style, first, end in _runs(marked)
                ]
                self._screen.repaint(pieces)

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


def _alike(shown: Shown) -> tuple[str, Kind, bool, bool]:
    """What characters of one piece have in common."""
    char, tag, kind = shown
    return tag, kind, char.isspace(), char == "\n"


def _runs(styles: list[Style]) -> Iterator[tuple[Style, int, int]]:
    """Stretches of one style: the style, the first index and the one after the last."""
    first = 0
    for style, group in groupby(styles):
        end = first + len(list(group))
        yield style, first, end
        first = end
