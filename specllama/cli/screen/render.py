"""Styles of tokens by origin, the live figures, and the summary line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.color import ColorSystem
from rich.style import Style

from specllama.base.text import counted
from specllama.cli.screen.output import Stream
from specllama.cli.screen.visible import Raw, in_one_line
from specllama.core.events import Event, Notice, PromptProgress, StepEvent, TokenEvent
from specllama.core.gain import Gain
from specllama.core.stats import SpecStats

# Each origin has its own colour and, without colour, its own mix of bold and underline. Cyan, yellow and magenta can be
# told apart with the common kinds of colour blindness, and follow the terminal's theme.
STYLES = {
    "draft": Style(color="cyan"),
    "correction": Style(color="yellow", bold=True, underline=True),
    "bonus": Style(color="magenta", underline=True),
    "target": Style(bold=True),
    "label": Style(dim=True),
    "value": Style(),
}
LEGEND = (("draft", "drafted"), ("correction", "correction"), ("bonus", "bonus"), ("target", "target"))
RECENT_S = 2.0  # 'now' is the mean over the steps of the last two seconds
MAX_POSITIONS = 16  # bars
GAIN_STEP = 0.03  # more passes, as a share, after which the gain is calculated again: 4,000 take 16 ms

StyledSpan: TypeAlias = tuple[str, str]  # style, text
Item: TypeAlias = Sequence[StyledSpan]  # kept on one line


@dataclass(frozen=True, slots=True)
class Palette:
    """Codes that switch each style on and off; empty on a stream without styles."""

    codes: dict[str, tuple[Raw, Raw]]
    bar: str  # one cell of a bar, empty to full
    edge: str  # marks the end of a full bar
    rule: str  # one cell of a line

    def paint(self, style: str, text: str) -> Raw:
        on, off = self.codes[style]
        return on + text + off


def codes_of(style: Style, stream: Stream) -> tuple[Raw, Raw]:
    """The codes that switch a style on and off on `stream`."""
    allowed = style if stream.coloured else style.without_color
    shown = allowed.render("|", color_system=ColorSystem.STANDARD) if stream.styled else "|"
    on, _, off = shown.partition("|")
    return Raw(on), Raw(off)


def palette_of(stream: Stream) -> Palette:
    """The styles and bar characters that `stream` can show."""
    codes = {name: codes_of(style, stream) for name, style in STYLES.items()}
    smooth = " ▏▎▍▌▋▊▉█"
    return Palette(codes, smooth, "▏", "─") if stream.encodes(smooth + "─") else Palette(codes, " #", "|", "-")


def bar(share: float, width: int, cells: str) -> str:
    """A bar of `width` cells, filled to `share`."""
    n_levels = len(cells) - 1
    filled = round(min(max(share, 0.0), 1.0) * width * n_levels)
    full, rest = divmod(filled, n_levels)
    return (cells[-1] * full + (cells[rest] if full < width else "")).ljust(width)


def percent(share: float | None, digits: int = 0) -> str:
    """A share as percent, or n/a for None."""
    if share is None:
        return "n/a"
    return "<1 %" if 0.0 < share < 0.005 else f"{100 * share:.{digits}f} %"


def clock(seconds: float) -> str:
    """A duration in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def rate(per_s: float | None, unit: str) -> str:
    """A rate with its unit, or n/a for None."""
    return f"n/a {unit}" if per_s is None else f"{per_s:.1f} {unit}"


def times_plain(gain: Gain, *, spread: bool = False) -> str:
    """The speed over plain decoding; `spread`: with its quartiles."""
    return f"{gain.value:.1f}x plain" + (f" ({gain.low:.1f}-{gain.high:.1f})" if spread else "")


@dataclass(slots=True)
class Figures:
    """Figures of the events of one answer so far."""

    n_ctx: int
    drafts: bool  # False in plain decoding
    stats: SpecStats = field(default_factory=SpecStats)
    prompt: PromptProgress | None = None
    notice: str = ""
    legend: bool = True  # the text shows the origin of each token
    n_cached: int | None = None  # prompt tokens that the KV cache held already; None hides it
    k: int = 0  # drafted tokens of the last step
    _gain: Gain | None = None
    _n_gained: int = 0  # passes of `_gain`
    _recent: deque[tuple[int, float]] = field(default_factory=deque)  # tokens and seconds of the last steps
    _n_pending: int = 0  # tokens whose StepEvent has not come yet

    def take(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.stats.n_emitted += 1
            self.stats.n_from_draft += event.origin == "draft"
            self._n_pending += 1
        elif isinstance(event, StepEvent):
            self._take_step(event)
        elif isinstance(event, PromptProgress):
            self.prompt = event
            self.stats.n_prompt = event.total
        elif isinstance(event, Notice):
            self.notice = event.text

    def _take_step(self, event: StepEvent) -> None:
        self.k = len(event.drafted)
        self.stats.take(event, event.accepted < self.k, drafts=self.drafts)
        self._recent.append((self._n_pending, event.step_s))
        self._n_pending = 0
        while len(self._recent) > 1 and sum(s for _, s in self._recent) - self._recent[0][1] >= RECENT_S:
            self._recent.popleft()

    @property
    def gain(self) -> Gain | None:
        """The gain so far. The last few passes may be missing: see GAIN_STEP."""
        if (n_passes := len(self.stats.passes)) > self._n_gained * (1 + GAIN_STEP):
            self._gain, self._n_gained = self.stats.gain, n_passes
        return self._gain

    @property
    def tok_s_now(self) -> float | None:
        """Tokens per second over the last RECENT_S seconds."""
        seconds = sum(s for _, s in self._recent)
        return sum(n for n, _ in self._recent) / seconds if seconds else None


def _labelled(value: str, label: str) -> Item:
    return (("value", value), ("label", f" {label}"))


def _acceptance(figures: Figures) -> Iterator[Item]:
    stats = figures.stats
    counts = f" ({stats.n_accepted}/{stats.n_drafted})" if stats.n_drafted else ""
    length = stats.mean_acceptance_length
    yield (("value", percent(stats.acceptance_rate, 1)), ("label", f" accepted{counts}"))
    yield _labelled("n/a" if length is None else f"{length:.1f}", "tok/step")
    yield (("label", "k "), ("value", str(figures.k)))


def _speed(figures: Figures) -> Iterator[Item]:
    if (gain := figures.gain) is not None:
        yield (("value", times_plain(gain)),)
    yield _labelled(rate(figures.tok_s_now, "t/s"), "now")
    yield _labelled(rate(figures.stats.decode_tok_s, "t/s"), "average")


def _positions(figures: Figures, width: int, palette: Palette) -> Iterator[Item]:
    """One bar a position: the share of drafts whose token there was accepted."""
    shares = figures.stats.acceptance_per_position[:MAX_POSITIONS]
    n_cells = min(max(width // max(len(shares), 1) - 10, 1), 8)
    for position, share in enumerate(shares, 1):
        yield (
            ("label", f"{position} "),
            ("draft", bar(share, n_cells, palette.bar)),
            ("value", f" {100 * share:.0f} %"),
        )


def _times(figures: Figures) -> Iterator[Item]:
    stats = figures.stats
    whole = stats.decode_s or None
    other = stats.sample_s + stats.kv_s
    for label, seconds in (("draft", stats.draft_s), ("verify", stats.eval_s), ("other", other)):
        if label != "draft" or figures.drafts:
            yield (("label", f"{label} "), ("value", percent(seconds / whole if whole else None)))


def _context(figures: Figures, palette: Palette) -> Iterator[Item]:
    used = figures.stats.n_prompt + figures.stats.n_emitted
    share = used / figures.n_ctx
    yield (
        ("label", "context "),
        ("value", bar(share, 5, palette.bar)),
        ("label", palette.edge),
        ("value", f" {percent(share)}"),
        ("label", f" of {figures.n_ctx}"),
    )
    if figures.n_cached is not None:
        yield (("label", "cached "), ("value", str(figures.n_cached)))
        yield (("label", "read "), ("value", str(figures.stats.n_prompt - figures.n_cached)))


def flow(items: Iterable[Item], width: int, palette: Palette) -> Iterator[Raw]:
    """Items two spaces apart in lines of at most `width`; an item wider than that is cut."""
    line, used = Raw(), 0
    for spans in items:
        item = [(style, in_one_line(text)) for style, text in spans]
        n_cells = sum(len(text) for _, text in item)
        if line and used + 2 + n_cells > width:
            yield line
            line, used = Raw(), 0
        if line:
            line, used = line + "  ", used + 2
        left = width - used
        for style, text in item:
            line += palette.paint(style, text[: max(left, 0)])
            left -= len(text)
        used += n_cells
    if line:
        yield line


def strip(figures: Figures, width: int, palette: Palette) -> list[Raw]:
    """The live lines, at most `width` wide: one group of figures after the other, the most important first."""
    if not figures.stats.n_steps:
        return list(flow(_reading(figures, width, palette), width, palette))
    groups: list[Iterable[Item]] = [(*_times(figures), *_context(figures, palette))]
    if figures.drafts:
        groups.insert(0, (*_speed(figures), *_acceptance(figures)))
        groups.insert(1, _positions(figures, width, palette))
        if figures.legend:
            groups.append([((origin, word),) for origin, word in LEGEND])
    else:
        groups.insert(0, _speed(figures))
    if figures.notice:
        groups.append([(("label", figures.notice),)])
    rule = palette.paint("label", palette.rule * width)
    return [rule, *(line for group in groups for line in flow(group, width, palette))]


def _reading(figures: Figures, width: int, palette: Palette) -> Iterator[Item]:
    if figures.prompt is None:
        yield (("label", "reading the prompt"),)
        return
    done, total = figures.prompt.done, figures.prompt.total
    cached = f", {figures.n_cached} cached" if figures.n_cached else ""
    yield from progress("reading the prompt", done / total, f"{done}/{counted(total, 'token')}{cached}", width, palette)


def progress(what: str, share: float | None, detail: str, width: int, palette: Palette) -> Iterator[Item]:
    """A progress bar between `what` and `detail`; no bar if the share is unknown."""
    n_cells = min(max(width - len(what) - len(detail) - 14, 4), 30)
    if share is None:
        yield (("label", what),)
    else:
        yield (
            ("label", f"{what} "),
            ("draft", bar(share, n_cells, palette.bar)),
            ("label", palette.edge),
            ("value", f"{100 * share:3.0f} %"),
        )
    yield (("label", detail),)


def summary(stats: SpecStats, *, drafts: bool = True) -> str:
    """The line after an answer; `drafts`: a drafter was active."""
    counts = f" ({stats.n_accepted}/{stats.n_drafted})" if stats.n_drafted else ""
    length = stats.mean_acceptance_length
    parts = [f"Prompt: {rate(stats.prompt_tok_s, 't/s')}", f"Generation: {rate(stats.decode_tok_s, 't/s')}"]
    if (gain := stats.gain) is not None:
        parts.append(times_plain(gain))
    if drafts:
        parts.append(f"Draft: {percent(stats.acceptance_rate, 1)}{counts}")
        parts.append("n/a tok/step" if length is None else f"{length:.1f} tok/step")
    return f"[ {' | '.join(parts)} ]"
