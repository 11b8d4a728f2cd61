"""The output of `/stats`: the last answer and the session side by side, and bars by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from specllama.base.text import counted
from specllama.chat.session import ChatSession, KvUse
from specllama.cli.record import figures
from specllama.cli.screen.render import Palette, bar, percent, rate, times_plain
from specllama.cli.screen.visible import Raw, wrapped
from specllama.cli.tuned import strategy_text
from specllama.core.stats import SpecStats


def _length(stats: SpecStats) -> str:
    value = stats.mean_acceptance_length
    return "n/a" if value is None else f"{value:.2f}"


def _time(stats: SpecStats, seconds: float) -> str:
    return percent(seconds / stats.decode_s if stats.decode_s else None)


_FIGURES: tuple[tuple[str, Callable[[SpecStats], str]], ...] = (
    ("tokens", lambda s: str(s.n_emitted)),
    ("acceptance", lambda s: percent(s.acceptance_rate, 1)),
    ("accepted", lambda s: f"{s.n_accepted}/{s.n_drafted}"),
    ("per token", lambda s: percent(s.alpha, 1)),
    ("tok/step", _length),
    ("from draft", lambda s: percent(s.from_draft)),
    ("speed", lambda s: rate(s.decode_tok_s, "t/s")),
    ("prompt", lambda s: str(s.n_prompt)),
    ("cached", lambda s: str(s.n_cached)),
    ("draft time", lambda s: _time(s, s.draft_s)),
    ("verify time", lambda s: _time(s, s.eval_s)),
    ("other time", lambda s: _time(s, s.sample_s + s.kv_s)),
)


_OF_DRAFTS = ("acceptance", "accepted", "per token", "tok/step", "from draft", "draft time")


def _table(last: SpecStats, session: SpecStats, palette: Palette) -> Iterator[Raw]:
    figures = [each for each in _FIGURES if session.n_drafted or each[0] not in _OF_DRAFTS]
    rows = [("", "last", "session"), *((name, cell(last), cell(session)) for name, cell in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        values = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield palette.paint("label", name.ljust(widths[0])) + "  " + palette.paint("value", values)


def _bars(title: str, shares: Sequence[tuple[str, float]], width: int, palette: Palette) -> Iterator[Raw]:
    if not shares:
        return
    yield palette.paint("label", title)
    n_cells = max(min(width - 14, 30), 5)
    for label, share in shares:
        cells = palette.paint("value", bar(share, n_cells, palette.bar)) + palette.paint("label", palette.edge)
        yield f"{label:>4} " + cells + f" {percent(share)}"


def _kv(name: str, use: KvUse) -> str:
    return f"{name} KV {use.n_used}/{counted(use.n_ctx, 'token')} ({percent(use.n_used / use.n_ctx)})"


def _gain(last: SpecStats, session: SpecStats) -> str:
    found = (("the last answer", last.gain), ("the session", session.gain))
    known = [f"{times_plain(gain, spread=True)} in {where}" for where, gain in found if gain is not None]
    return f"speed: {', '.join(known)}" if known else ""


def _sources(stats: SpecStats) -> str:
    """What each source of drafts gave, where there are two."""
    n_model = stats.n_drafted - stats.n_looked_up
    if not stats.n_looked_up or not n_model:
        return ""
    n_accepted = stats.n_accepted - stats.n_looked_up_accepted
    return (
        f"accepted in the session: {stats.n_looked_up_accepted}/{stats.n_looked_up} looked up or forced by the format, "
        f"{n_accepted}/{n_model} of the draft model"
    )


def _reuse(session: ChatSession) -> str:
    reuse = session.reuse
    if reuse is None:
        return ""
    draft = "" if reuse.n_draft is None else f", {reuse.n_draft} in the draft's"
    return f"last prompt: {counted(reuse.n_prompt, 'token')}, {reuse.n_target} of them in the target's KV cache{draft}"


def stats_lines(session: ChatSession, width: int, palette: Palette) -> Iterator[str]:
    """The lines of `/stats`, at most `width` wide if that is at least 40."""
    if not session.answers:
        yield "no answers yet"
        return
    last, whole = session.answers[-1], session.stats
    yield from _table(last, whole, palette)
    n_spec = whole.n_spec_steps or 1
    per_position = [(str(i), share) for i, share in enumerate(whole.acceptance_per_position, 1)]
    lengths = [(str(i), n / n_spec) for i, n in enumerate(whole.accepted_lengths)]
    yield from _bars("acceptance rate by position", per_position, width, palette)
    yield from _bars("accepted tokens per step", lengths, width, palette)
    sentences = [
        _gain(last, whole),
        strategy_text(session.settings.drafter),
        _sources(whole),
        _reuse(session),
        _kv("target", session.target_kv),
    ]
    if session.draft_kv is not None:
        sentences.append(_kv("draft", session.draft_kv))
    if session.n_dropped:
        sentences.append(f"{session.n_dropped} of {len(session.turns)} turns dropped")
    for sentence in filter(None, sentences):
        yield from wrapped(sentence, width).split("\n")


def stats_json(session: ChatSession) -> dict[str, object]:
    """The figures of `/stats` as JSON."""
    return {
        "event": "stats",
        "session": figures(session.stats),
        "last": figures(session.answers[-1]) if session.answers else None,
        "reuse": asdict(session.reuse) if session.reuse else None,
        "target_kv": asdict(session.target_kv),
        "draft_kv": asdict(session.draft_kv) if session.draft_kv else None,
        "turns": len(session.turns),
        "dropped_turns": session.n_dropped,
    }
