"""An answer of a chat on the screen: origin of tokens, Markdown, thinking, and the summary line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.style import Style

from specllama.base.text import counted
from specllama.chat.session import Reuse
from specllama.chat.stream import TaggedText, TextStream
from specllama.cli.screen.markdown import AnswerReading, Kind, Shown
from specllama.cli.screen.output import Output
from specllama.cli.screen.render import STYLES, Figures, codes_of, percent, rate, times_plain
from specllama.cli.screen.terminal import StyledText
from specllama.cli.screen.view import AnswerView
from specllama.core.events import Event, Finished, PromptProgress

# Colours, bold and underline show the origin of a token; with them, Markdown uses only dim and italic.
_BESIDE_ORIGINS: dict[Kind, Style] = {
    "text": Style(),
    "heading": Style(italic=True),
    "bold": Style(italic=True),
    "code": Style(),
    "mark": Style(dim=True),
    "think": Style(dim=True),
}
_BY_ITSELF: dict[Kind, Style] = {
    "text": Style(),
    "heading": Style(bold=True, underline=True),
    "bold": Style(bold=True),
    "code": Style(color="cyan"),
    "mark": Style(dim=True),
    "think": Style(dim=True),
}


@dataclass(slots=True)
class AnswerLook:
    """The look of answers, changed by `/set`."""

    colors: bool = True  # by the origin of each token
    fold: bool = False  # hide the thinking, except for its length


class ChatView(AnswerView):
    """An answer with its styles; verbatim if stdout has no styles."""

    def __init__(
        self,
        output: Output,
        answer: TextStream,
        figures: Figures,
        look: AnswerLook,
        *,
        live: bool,
        starts_thinking: bool,
    ) -> None:
        super().__init__(output, answer, figures, live=live)
        self.reading = AnswerReading(starts_thinking=starts_thinking)
        self._origins = look.colors and figures.drafts
        self._folds = look.fold
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
            styles = _BESIDE_ORIGINS if self._origins else _BY_ITSELF
            style = STYLES[tag] + styles[kind] if self._origins else styles[kind]
            self._codes[key] = codes_of(style, self._stream)
        return self._codes[key]

    def close(self) -> None:
        """Write the rest of the text and erase the live figures."""
        self._finish()
        super().close()


def _parts(finished: Finished, reuse: Reuse) -> Iterator[str]:
    """The parts of the summary, the most important first."""
    stats = finished.stats
    if finished.reason == "cancelled":
        yield "stopped"
    elif finished.reason == "length":
        yield "cut off at the limit"
    yield rate(stats.decode_tok_s, "t/s")
    if (gain := stats.gain) is not None:
        yield times_plain(gain)
    if stats.n_drafted:
        yield f"{percent(stats.acceptance_rate, 1)} accepted ({stats.n_accepted}/{stats.n_drafted})"
    yield f"cached {reuse.n_target}, read {reuse.n_read}"
    if stats.mean_acceptance_length is not None:
        yield f"{stats.mean_acceptance_length:.1f} tok/step"


def turn_summary(finished: Finished, reuse: Reuse, width: int) -> str:
    """The summary line after an answer. To fit into `width`, counts are left out first, then the last parts."""
    parts = list(_parts(finished, reuse))
    if len(_joined(parts)) > width:
        parts = [part.partition(" (")[0] for part in parts]
    while len(parts) > 1 and len(_joined(parts)) > width:
        parts.pop()
    return _joined(parts)


def _joined(parts: Iterable[str]) -> str:
    return f"[ {' | '.join(parts)} ]"
