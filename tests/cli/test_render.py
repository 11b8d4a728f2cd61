"""Figures, bars, live lines and the summary, in any width and without colour; see docs/reference.md."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from specllama.cli.screen import render
from specllama.cli.screen.look import AnswerLook
from specllama.cli.screen.output import Stream
from specllama.cli.screen.render import (
    MARKED,
    ORIGINS,
    Figures,
    Palette,
    bar,
    flow,
    origin_style,
    palette_of,
    percent,
    progress,
    strip,
    summary,
    times_plain,
)
from specllama.core.events import Notice, PromptProgress, StepEvent, TokenEvent
from specllama.core.gain import Gain
from specllama.core.stats import SpecStats

SGR = re.compile(r"\x1b\[[0-9;]*m")


def _palette(*, coloured: bool = True, styled: bool = True, encoding: str = "utf-8", colors: str = "full") -> Palette:
    return palette_of(Stream(io.TextIOWrapper(io.BytesIO(), encoding), True, styled, coloured, styled), colors)


def _figures(steps: list[tuple[int, int]], *, drafts: bool = True, cost: float | None = None, **look: str) -> Figures:
    """Figures after steps of (drafted, accepted) tokens and half a second each; `cost`: of each pass in T(1)."""
    figures = Figures(4096, drafts, look=AnswerLook(**{"colors": "full", "strip": "full", **look}))
    parts = {"draft_s": 0.15, "eval_s": 0.3, "sample_s": 0.03, "kv_s": 0.02}
    figures.take(PromptProgress(99, 100))
    for step, (n_drafted, n_accepted) in enumerate(steps):
        for _ in range(n_accepted):
            figures.take(TokenEvent(1, "draft", step))
        figures.take(TokenEvent(2, "correction" if n_accepted < n_drafted else "bonus", step))
        drafted = tuple(range(n_drafted))
        of_pass = {"n_rows": n_drafted + 1, "cost": cost}
        event = StepEvent(step, drafted, n_accepted, "draft-simple", (), **parts, step_s=0.5, loop_s=0.001, **of_pass)
        figures.take(event)
    return figures


def _plain(lines: list[str]) -> str:
    return SGR.sub("", "\n".join(lines))


def test_the_live_lines_show_every_figure() -> None:
    """A documented figure that is missing."""
    figures = _figures([(4, 4), (4, 2), (4, 0), (4, 3)])
    figures.take(Notice("the draft's context is full"))
    shown = _plain(strip(figures, 100, _palette()))
    assert "the draft's context is full" in shown
    assert "56.2 % accepted" in shown
    assert "9 of 16 accepted" in shown
    assert "3.2 tok/step" in shown
    assert "k 4" in shown
    assert "6.5 t/s now" in shown  # 13 tokens in four steps of half a second
    assert shown.splitlines()[1].startswith("5.3 t/s  56.2 % accepted")  # 8 tokens in the three steps after the first
    assert re.search(r"1 \S+ +75 % +2 \S+ +75 % +3 \S+ +50 % +4 \S+ +25 %", shown)
    assert "draft 30 %  verify 60 %  other 10 %" in shown
    assert "3 % of 4096" in shown
    assert "drafted  correction  bonus  target" in shown


def test_now_looks_at_the_last_seconds_only() -> None:
    """A speed 'now' that still remembers the first minute."""
    figures = _figures([(4, 0)] * 50 + [(4, 4)] * 4)
    assert figures.tok_s_now == 10.0
    assert figures.stats.decode_tok_s is not None
    assert figures.stats.decode_tok_s < 3


def test_the_gain_of_a_long_answer_is_not_calculated_at_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a tenth of a core for the live lines, taken from the engine."""
    found = list[int]()
    monkeypatch.setattr(SpecStats, "gain", property(lambda stats: found.append(len(stats.passes))))
    figures = _figures([])
    for step in range(1000):
        figures.take(StepEvent(step, (1,), 1, "draft-simple", (), 0.0, 0.1, 0.0, 0.0, 0.1, 0.0, n_rows=2, cost=1.1))
        strip(figures, 100, _palette())
    assert found[0] == 1
    assert found[-1] > 960
    assert len(found) < 170


def test_the_gain_stands_before_the_acceptance_and_only_if_it_is_known() -> None:
    """Acceptance taken for gain; a gain guessed without any measured cost."""
    steps = [(4, 4)] * 8
    shown = _plain(strip(_figures(steps, cost=2.0), 100, _palette()))
    # Five tokens a pass of 0.3 s that costs 2 T(1), and 0.03 s of sampling, in half a second.
    assert shown.index("1.6x plain") < shown.index("accepted")
    assert "x plain" not in _plain(strip(_figures(steps), 100, _palette()))
    assert "x plain" not in _plain(strip(_figures(steps[:5], cost=2.0), 100, _palette())), "too few passes"
    known = _figures(steps, cost=2.0).stats
    assert summary(known).startswith("[ 10.0 t/s, 1.6x plain | 100.0 % accepted (32/32) | ")
    assert times_plain(Gain(1.62, 1.48, 1.71), spread=True) == "1.6x plain (1.5-1.7)"


def test_plain_decoding_says_nothing_about_drafts() -> None:
    """'n/a accepted' in plain decoding."""
    shown = _plain(strip(_figures([(0, 0)] * 4, drafts=False), 100, _palette()))
    assert "accepted" not in shown
    assert "drafted" not in shown
    assert "2.0 t/s now" in shown
    assert "verify 60 %" in shown


def test_before_the_first_token_the_prompt_is_counted() -> None:
    """A long prompt that looks like a hanging program."""
    figures = Figures(4096, True)
    figures.take(PromptProgress(512, 2048))
    assert re.fullmatch(
        r"reading the prompt █+\S* +▏ 25 %  512/2048 tokens", _plain(strip(figures, 100, _palette())).strip()
    )


@pytest.mark.parametrize("width", [1, 7, 20, 39, 40, 41, 60, 80, 100, 200])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_no_line_is_wider_than_the_window(width: int, k: int) -> None:
    """Lines that wrap in a narrow window, or a crash in a tiny one."""
    figures = _figures([(k, k), (k, k // 2), (k, 0)])
    figures.take(Notice("a notice that is longer than a narrow window is wide"))
    lines = strip(figures, width, _palette())
    assert lines
    assert all(cell_len(SGR.sub("", line)) <= width for line in lines)


def test_at_40_columns_the_figures_are_all_there() -> None:
    """A narrow window that loses the acceptance rate."""
    shown = _plain(strip(_figures([(4, 4), (4, 2)]), 40, _palette()))
    for part in ("75.0 % accepted", "6 of 8", "4.0 tok/step", "now", "4 ", "verify 60 %", "of 4096", "correction"):
        assert part in shown


@pytest.mark.parametrize("colors", ["marks", "full"])
def test_the_brief_strip_says_one_number_first(colors: str) -> None:
    """A new user who has to find the gain among twelve figures; a mark in the text that is not explained."""
    figures = _figures([(4, 4)] * 8, cost=2.0, strip="brief", colors=colors)
    _rule, line = _plain(strip(figures, 80, _palette())).splitlines()
    legend = "drafted  correction  bonus  target" if colors == "full" else "correction  bonus"
    assert line == f"10.0 t/s, 1.6x plain  100.0 % accepted  {legend}"
    assert (
        "\n".join(_plain(strip(_figures([(0, 0)], strip="brief"), 80, _palette())).splitlines()[1:]).count("n/a") == 0
    )


def test_origins_are_told_apart_with_and_without_colour() -> None:
    """Drafted text that looks like the target's own without colours."""
    origins = ("draft", "correction", "bonus", "target")
    for palette in (_palette(), _palette(coloured=False)):
        assert len({palette.codes[origin] for origin in origins}) == 4
    assert len({(ORIGINS[origin].bold, ORIGINS[origin].underline) for origin in origins}) == 4
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert not any(colours.search(on) for on, _ in _palette(coloured=False).codes.values())


def _luminance(red: int, green: int, blue: int) -> float:
    """Relative luminance of an sRGB colour, as WCAG defines it."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("paper", [0.0, 1.0])
def test_the_default_is_readable_on_light_and_dark_backgrounds(paper: float) -> None:
    """Drafted text, the bulk of an answer, in cyan on white: a contrast of 2."""
    marked = _palette(colors="marks").codes
    assert marked["draft"] == marked["target"] == ("", "")
    for origin in MARKED:
        style = origin_style(origin, "marks")
        assert style.underline
        assert style.color is not None
        for strength in (0xAA, 0xCD):  # of VGA and of xterm
            shade = _luminance(
                *(strength * part for part in {"red": (1, 0, 0), "magenta": (1, 0, 1)}[style.color.name])
            )
            assert (max(shade, paper) + 0.05) / (min(shade, paper) + 0.05) > 2.5
    assert {_palette(colors="off").codes[origin] for origin in ORIGINS} == {("", "")}


def test_every_other_colour_is_readable_on_both_backgrounds() -> None:
    """Prevents: names and warnings in yellow or cyan, which vanish on white, or in blue, which vanishes on black."""
    colours = re.compile(r'"(?:bright_)?(cyan|yellow|blue|white|black)"')
    found = {
        (path.name, colour)
        for path in Path(render.__file__).parents[1].rglob("*.py")
        for colour in colours.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {("render.py", "cyan")}, "only `/set colors full`, which is asked for"


def test_a_stream_without_styles_gets_no_codes_and_one_without_blocks_gets_ascii() -> None:
    """Escape sequences on a dumb terminal; question marks where bars should be."""
    assert set(_palette(styled=False).codes.values()) == {("", "")}
    shown = _plain(strip(_figures([(4, 3)]), 100, _palette(encoding="ascii")))
    shown.encode("ascii")
    assert "####" in shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0.0, "    "), (1.0, "████"), (0.5, "██  "), (0.28, "█▏  "), (1.7, "████"), (-1.0, "    ")]
)
def test_a_bar_is_as_full_as_its_share(share: float, shown: str) -> None:
    """A bar that overflows, or that is one cell off."""
    assert bar(share, 4, " ▏▎▍▌▋▊▉█") == shown


def test_shares_read_as_percentages() -> None:
    """'0 %' for a small share, or '0.0 %' for one that was never counted."""
    assert [percent(share) for share in (None, 0.0, 0.001, 0.5, 1.0)] == ["n/a", "0 %", "<1 %", "50 %", "100 %"]
    assert percent(0.8446, 1) == "84.5 %"


def test_the_summary_reads_as_documented() -> None:
    """Another form than the documented one, which scripts read."""
    stats = SpecStats(
        n_prompt=451, n_emitted=138, n_first=1, n_drafted=121, n_accepted=102, n_spec_steps=35, n_steps=36
    )
    stats.prompt_s, stats.decode_s = 10.0, 10.0
    whole = "[ 13.7 t/s | 84.3 % accepted (102/121) | prompt 45.1 t/s (451 tokens) | 3.9 tok/step ]"
    assert summary(stats) == whole


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (120, "[ stopped | 10.0 t/s | 50.0 % accepted (4/8) | prompt 5.0 t/s (10 tokens, 90 cached) | 3.0 tok/step ]"),
        (80, "[ stopped | 10.0 t/s | 50.0 % accepted | prompt 5.0 t/s | 3.0 tok/step ]"),
        (65, "[ stopped | 10.0 t/s | 50.0 % accepted | prompt 5.0 t/s ]"),
        (35, "[ stopped | 10.0 t/s ]"),
        (5, "[ stopped ]"),
    ],
)
def test_the_line_after_an_answer_is_one_line(width: int, expected: str) -> None:
    """A line of figures that breaks in a narrow window."""
    stats = SpecStats(n_prompt=100, n_cached=90, n_emitted=11, n_first=1, n_drafted=8, n_accepted=4, n_spec_steps=2)
    stats.prompt_s, stats.decode_s = 2.0, 1.0
    assert summary(stats, width, "stopped") == expected


def test_the_summary_leaves_out_what_is_not_known() -> None:
    """A division by zero after Ctrl-C in the prompt; `n/a accepted` after every answer without drafts."""
    assert summary(SpecStats(), end="stopped") == "[ stopped ]"
    plain = SpecStats(n_prompt=10, n_emitted=11, n_first=1, decode_s=1.0, prompt_s=1.0)
    assert summary(plain) == "[ 10.0 t/s | prompt 10.0 t/s (10 tokens) ]"


def test_progress_fits_a_narrow_window() -> None:
    """A progress bar that wraps and stays behind."""
    for width in (20, 40, 100):
        lines = list(flow(progress("loading", 0.5, "1.61 GB", width, _palette()), width, _palette()))
        assert "50 %" in _plain(lines)
        assert all(cell_len(SGR.sub("", line)) <= width for line in lines)
