"""Styles of tokens by origin, the live figures, and the summary line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.color import ColorSystem
from rich.style import Style

from specllama.base.text import counted
from specllama.cli.screen.look import AnswerLook
from specllama.cli.screen.output import Stream
from specllama.cli.screen.visible import Raw, in_one_line
from specllama.core.events import Event, Notice, PromptProgress, StepEvent, TokenEvent
from specllama.core.gain import Gain
from specllama.core.stats import SpecStats
from specllama.drafters import TREE

# Each origin has its own colour and, without colour, its own mix of bold and underline. Red and magenta are readable on
# white and on black, cyan on black only: the default leaves drafted text, the bulk of an answer, as it is.
ORIGINS = {
    "draft": Style(color="cyan"),
    "correction": Style(color="red", bold=True, underline=True),
    "bonus": Style(color="magenta", underline=True),
    "target": Style(bold=True),
}
MARKED = ("correction", "bonus")
STYLES = {"label": Style(dim=True), "value": Style()}
LEGEND = {"draft": "drafted", "correction": "correction", "bonus": "bonus", "target": "target"}
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
    nodes: str  # a drafted token, and an accepted one

    def paint(self, style: str, text: str) -> Raw:
        on, off = self.codes[style]
        return on + text + off


def codes_of(style: Style, stream: Stream) -> tuple[Raw, Raw]:
    """The codes that switch a style on and off on `stream`."""
    allowed = style if stream.coloured else style.without_color
    shown = allowed.render("|", color_system=ColorSystem.STANDARD) if stream.styled else "|"
    on, _, off = shown.partition("|")
    return Raw(on), Raw(off)


def origin_style(origin: str, colors: str) -> Style:
    """The style of a token of `origin` with this choice of `colors`, see `look`."""
    shown = {"full": tuple(ORIGINS), "marks": MARKED, "off": ()}[colors]
    return ORIGINS[origin] if origin in shown else Style()


def palette_of(stream: Stream, colors: str = "off") -> Palette:
    """The styles and bar characters that `stream` can show."""
    styles = {**STYLES, **{origin: origin_style(origin, colors) for origin in ORIGINS}}
    codes = {name: codes_of(style, stream) for name, style in styles.items()}
    smooth = " ▏▎▍▌▋▊▉█"
    if stream.encodes(smooth + "─○●"):
        return Palette(codes, smooth, "▏", "─", "○●")
    return Palette(codes, " #", "|", "-", "o*")


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
    look: AnswerLook = field(default_factory=AnswerLook)
    n_cached: int | None = None  # prompt tokens that the KV cache held already; None hides it
    last: StepEvent | None = None
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
        self.last = event
        self.stats.take(event, drafts=self.drafts)
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


def _speed(stats: SpecStats, gain: Gain | None) -> str:
    """The speed and its ratio to plain decoding, as far as they are known."""
    per_s = stats.decode_tok_s
    known = ("" if per_s is None else rate(per_s, "t/s"), "" if gain is None else times_plain(gain))
    return ", ".join(filter(None, known))


def _accepted(stats: SpecStats) -> str:
    """The acceptance rate; empty without drafts."""
    return f"{percent(stats.acceptance_rate, 1)} accepted" if stats.n_drafted else ""


def _counts(stats: SpecStats) -> str:
    return f" ({stats.n_accepted}/{stats.n_drafted})" if stats.n_drafted else ""


def _length(stats: SpecStats) -> str:
    length = stats.mean_acceptance_length
    return "" if length is None else f"{length:.1f} tok/step"


def _first(figures: Figures) -> Iterator[Item]:
    """The most important figures: the speed, then the acceptance."""
    stats = figures.stats
    yield (("value", _speed(stats, figures.gain) or rate(figures.tok_s_now, "t/s")),)
    if stats.n_drafted:
        yield (("value", _accepted(stats)),)


def _rest(figures: Figures, palette: Palette) -> Iterator[Item]:
    """More of the same."""
    stats = figures.stats
    yield (("value", rate(figures.tok_s_now, "t/s")), ("label", " now"))
    if stats.n_drafted:
        yield (("label", f"{stats.n_accepted} of {stats.n_drafted} accepted"),)
        yield (("value", _length(stats)),)
        step = figures.last
        assert step is not None, "a step has drafted"
        if step.drafter == TREE:
            yield (("label", "tree "), ("value", tree(step, palette.nodes)))
        else:
            yield (("label", "k "), ("value", str(len(step.drafted))))


def tree(step: StepEvent, nodes: str) -> str:
    """The drafted tokens level by level, one mark each; the accepted path is filled. "●○○ ○● ●": three levels."""
    parents: Sequence[int] = range(-1, len(step.drafted) - 1)
    path: Sequence[int] = range(step.accepted)
    if step.parents is not None and step.path is not None:
        parents, path = step.parents, step.path
    levels, depths = list[str](), list[int]()
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        levels += [""] * (depths[-1] == len(levels))
        levels[depths[-1]] += nodes[node in path]
    return " ".join(levels) or "-"


def _legend(figures: Figures) -> Iterator[Item]:
    for origin, name in LEGEND.items():
        if figures.drafts and origin_style(origin, figures.look.colors):
            yield ((origin, name),)


def _positions(figures: Figures, width: int, palette: Palette) -> Iterator[Item]:
    """One bar a position: the share of drafts whose token there was accepted."""
    shares = figures.stats.acceptance_per_position[:MAX_POSITIONS]
    n_cells = min(max(width // max(len(shares), 1) - 10, 1), 8)
    for position, share in enumerate(shares, 1):
        yield (
            ("label", f"{position} "),
            ("value", bar(share, n_cells, palette.bar)),
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
    if figures.look.strip == "brief":
        groups: list[Iterable[Item]] = [(*_first(figures), *_legend(figures))]
    else:
        groups = [(*_first(figures), *_rest(figures, palette)), _positions(figures, width, palette)]
        groups += [(*_times(figures), *_context(figures, palette)), _legend(figures)]
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
            ("value", bar(share, n_cells, palette.bar)),
            ("label", palette.edge),
            ("value", f"{100 * share:3.0f} %"),
        )
    yield (("label", detail),)


def summary(stats: SpecStats, width: int = 0, end: str = "") -> str:
    """The line after an answer, the most important first; `end`: how it ended, if not by itself.

    To fit into `width`, what is in parentheses is left out first, then the last parts; 0 = no limit.
    """
    known = (end, _speed(stats, stats.gain), _accepted(stats) + _counts(stats), _prompt(stats), _length(stats))
    parts = list(filter(None, known))
    if 0 < width < len(_in_brackets(parts)):
        parts = [part.partition(" (")[0] for part in parts]
    while len(parts) > 1 and 0 < width < len(_in_brackets(parts)):
        parts.pop()
    return _in_brackets(parts)


def _prompt(stats: SpecStats) -> str:
    if stats.prompt_tok_s is None:
        return ""
    cached = f", {stats.n_cached} cached" if stats.n_cached else ""
    read = counted(stats.n_prompt - stats.n_cached, "token")
    return f"prompt {rate(stats.prompt_tok_s, 't/s')} ({read}{cached})"


def _in_brackets(parts: Iterable[str]) -> str:
    return f"[ {' | '.join(parts)} ]"
