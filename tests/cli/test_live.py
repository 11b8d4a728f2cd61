"""`specllama run` in a terminal: the screen, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.conftest import ENDLESS, Pair, Terminal

pytestmark = pytest.mark.slow

Start = Callable[..., Terminal]
SUMMARY = re.compile(
    r"\[[\d.]+t/s\|[\d.]+%accepted(\(\d+/\d+\))?(\|prompt[\d.]+t/s(\(\d+tokens?\))?)?(\|[\d.]+tok/step)?\]"
    r"(note:theanswerwascutafter\d+tokens\(-n\))?$"
)


def _ends_with_summary(shown: Terminal) -> bool:
    """True if the screen ends with the summary line, wrapped or not."""
    return SUMMARY.search(re.sub(r"\s", "", shown.text)) is not None


def _long(pair: Pair, *extra: str) -> list[str]:
    """An answer of letters that takes several seconds."""
    return ["run", *pair.options, "--raw", "abc", "-n", "9000", "-c", "10000", "--temp", "0.9", *ENDLESS, *extra]


def test_the_answer_streams_with_figures_below_and_ends_in_the_summary(terminal: Start, pair: Pair) -> None:
    """Figures that stay behind, an answer printed twice, no summary, or drafted and own tokens that look alike."""
    args = ["run", *pair.options, "--draft-max", "4", "--raw", "abc", "-n", "700", "--seed", "1", *ENDLESS]
    shown = terminal(*args, columns=60, rows=20)
    shown.wait_for(lambda t: "% accepted" in t.text and "correction  bonus" in t.text)
    assert shown.finish() == 0
    lines = shown.display.text_lines
    answer = "".join(line for line in lines if re.fullmatch("[a-i]+", line))
    assert len(answer) == 700
    assert _ends_with_summary(shown)
    assert not any("bonus" in line or "verify" in line or "loading" in line or "reading" in line for line in lines)
    for code in (b"\x1b[1;4;31m", b"\x1b[4;35m"):
        assert code in shown.raw


def test_no_color_a_dumb_terminal_and_an_escape_byte_of_the_model(terminal: Start, byte_pair: Pair) -> None:
    """NO_COLOR ignored, escape sequences in an editor's shell window, or a model that moves the cursor."""
    escape = tiny.token_id(tiny.byte_level(), "ě")  # how GPT-2 vocabularies spell byte 0x1b
    args = ["run", *byte_pair.options, "hi", "-n", "5", "--logit-bias", f"{escape}=100", "--temp", "0"]
    environments = ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {})
    usual = []
    for shown in [terminal(*args, env=env) for env in environments]:
        assert shown.finish() == 0
        assert "\\x1b" * 5 in shown.text
        codes = {code for found in re.findall(rb"\x1b\[([\d;]*)m", shown.raw) for code in found.split(b";")}
        usual.append((b"\x1b" in shown.raw, bool(codes & {b"1", b"4"}), codes <= {b"", b"0", b"1", b"2", b"4"}))
    assert usual == [(True, True, True), (False, False, True), (True, True, False)]


def test_without_live_figures_the_answer_just_streams(terminal: Start, pair: Pair) -> None:
    """`--no-live` that still draws."""
    shown = terminal("run", *pair.options, "--raw", "abc", "-n", "300", "--no-live", *ENDLESS)
    assert shown.finish() == 0
    assert b"bonus" not in shown.raw
    assert len(re.sub(rb"\x1b\[[\d;]*m", b"", shown.raw).split(b"\r\n[")[0].splitlines()[-1]) >= 300


def test_a_window_that_is_resized_keeps_the_answer_whole(terminal: Start, pair: Pair) -> None:
    """Lines of the answer that vanish when the window shrinks (the text is sent once, whatever the size)."""
    shown = terminal(*_long(pair, "-n", "2500"), columns=90, rows=30)
    for columns, rows in ((40, 12), (100, 8), (25, 5)):
        shown.wait_for(lambda t: "ccepted" in t.text)
        shown.child.setwinsize(rows, columns)
        shown.display.resize(lines=rows, columns=columns)
        shown.read(0.15)
    assert shown.finish() == 0
    text = re.sub(rb"\x1b(\[[\d;?]*[A-Za-z]|[78D])", b"", shown.raw)
    assert len(re.findall(rb"[a-i]", text.split(b"[ ")[0])) >= 2500


def test_ctrl_c_keeps_what_was_said_and_ends_with_130(terminal: Start, pair: Pair) -> None:
    """A lost answer, a traceback, figures left on the screen, or a terminal that no longer echoes."""
    shown = terminal(*_long(pair), columns=70, rows=20)
    shown.wait_for(lambda t: "accepted" in t.text)
    shown.interrupt()
    started = time.monotonic()
    assert shown.finish() == 130
    assert time.monotonic() - started < 10 * shown.at_once_s
    lines = shown.display.text_lines
    assert any(re.fullmatch("[a-i]+", line) for line in lines)
    assert not any("bonus" in line or "Traceback" in line or "^C" in line for line in lines)
    assert _ends_with_summary(shown)


def test_ctrl_c_in_a_long_prompt_is_back_within_a_second(terminal: Start, pair: Pair, tmp_path: Path) -> None:
    """A prompt of many thousand tokens that must be read to its end first (FIELD_CASES 37)."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("abcdefghi" * 20_000)
    shown = terminal("run", *pair.options, "--raw", "-f", str(prompt), "-c", "190000", "-n", "5", *ENDLESS)
    shown.wait_for(lambda t: "reading the prompt" in t.text)
    shown.read(0.3)
    shown.wait_for(lambda t: "reading the prompt" in t.text)
    shown.interrupt()
    started = time.monotonic()
    assert shown.finish() == 130
    assert time.monotonic() - started < max(2.0, 2 * shown.at_once_s)  # a second, and one for a machine that is busy
    assert not shown.text


def test_a_second_ctrl_c_leaves_at_once(terminal: Start, pair: Pair) -> None:
    """A program that cannot be stopped while llama.cpp computes, or a terminal without echo after it."""
    for _ in range(4):
        shown = terminal(*_long(pair))
        shown.wait_for(lambda t: "accepted" in t.text)
        assert not termios.tcgetattr(shown.child.child_fd)[3] & termios.ECHO
        os.kill(shown.child.pid, signal.SIGSTOP)  # so that both arrive before the first can end the answer
        os.kill(shown.child.pid, signal.SIGINT)
        os.kill(shown.child.pid, signal.SIGTERM)
        os.kill(shown.child.pid, signal.SIGCONT)
        code = shown.finish(close=False)
        assert termios.tcgetattr(shown.child.child_fd)[3] & termios.ECHO
        if code == 143:
            break
        assert code == 130, "the system may hand the second signal to a thread that comes late"
    assert code == 143
    assert not _ends_with_summary(shown)


def test_a_piped_answer_still_shows_how_far_the_prompt_is(terminal: Start, pair: Pair, tmp_path: Path) -> None:
    """A minute of silence during a long prefill because the answer goes into a pipe."""
    prompt, answer = tmp_path / "prompt.txt", tmp_path / "answer.txt"
    prompt.write_text("abcdefghi" * 1000)
    command = shlex.join(
        [sys.executable, "-m", "specllama", "run", *pair.options, "--raw", "-f", str(prompt), "-c", "10000", "-n", "9"]
    )
    shown = terminal(command=["sh", "-c", f"{command} {shlex.join(ENDLESS)} | cat > {answer}"])
    assert shown.finish() == 0
    assert re.search(rb"reading the prompt .*/9000 tokens", shown.raw)
    assert "bonus" not in shown.raw.decode()
    assert SUMMARY.match(re.sub(r"\s", "", shown.text))
    assert re.fullmatch("[a-i]{9}\n", answer.read_text())


def test_json_on_a_terminal_shows_figures_and_then_only_json(terminal: Start, pair: Pair) -> None:
    """A long silence before the object, or figures left above it."""
    shown = terminal("run", *pair.options, "--raw", "abc", "-n", "800", "--json", *ENDLESS, columns=100, rows=30)
    shown.wait_for(lambda t: "% accepted" in t.text)
    assert shown.finish() == 0
    text = "".join(line.ljust(100) for line in shown.display.text_lines)
    assert json.loads(text)["acceptance"]["emitted"] == 800
