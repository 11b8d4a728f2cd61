"""What is typed into `specllama chat` while models load or an answer runs."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Pair, Terminal
from tests.cli.test_chat import ENDLESS, SUMMARY, answered, ask

pytestmark = pytest.mark.slow

# `specllama`, but loading a model waits for a file.
SLOW = """
import os, sys, time
from pathlib import Path
from specllama import llama
from specllama.cli.app import main
from specllama.base.errors import Interrupted
load, gate = llama.load_together, Path(sys.argv[1])
def slow(models, progress):
    while not gate.exists():
        if not progress(0.5) and "DEAF" not in os.environ:
            raise Interrupted("stopped")
        time.sleep(0.01)
    return load(models, progress=progress)
llama.load_together = slow
sys.exit(main(sys.argv[2:]))
"""

Start = Callable[..., Terminal]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Models load once this file exists."""
    return tmp_path / "gate"


@pytest.fixture
def chat(terminal: Callable[..., Terminal], talker: Pair, gate: Path) -> Start:
    """Starts a chat whose models are not loaded yet."""

    def start(*args: str, env: dict[str, str] | None = None) -> Terminal:
        words = ["chat", *talker.options, "-n", "5", "--no-history", *ENDLESS, *args]
        command = [sys.executable, "-c", SLOW, str(gate), *words]
        shown = terminal(command=command, env={"VISUAL": "", "EDITOR": "", **(env or {})})
        shown.display.write_process_input = lambda data: shown.child.send(data.encode())  # type: ignore[method-assign]
        return shown

    return start


def settings(shown: Terminal) -> list[Any]:
    """How the terminal is set."""
    return termios.tcgetattr(shown.child.child_fd)


def loads(shown: Terminal) -> bool:
    return "loading" in shown.text


def test_lines_typed_while_models_load_are_sent_and_half_a_line_stands_in_the_prompt(chat: Start, gate: Path) -> None:
    """An Enter that became a new line in the message, a message that is lost, or one that shows among the progress."""
    shown = chat()
    shown.child.send("at once\r")  # before there is even an interpreter
    shown.wait_for(loads)
    shown.child.send("hellu\x7fo\r")
    shown.child.send("and th")
    shown.read(0.1)
    assert "hello" not in shown.text
    gate.touch()
    answered(shown, 2, "\n>>> and th")
    assert re.findall(r"^>>> ?(.*)$", shown.text, re.M) == ["at once", "hello", "and th"]
    ask(shown, "en", 3)
    assert ">>> and then\n" in shown.text
    shown.child.sendeof()
    assert shown.finish() == 0


def test_ctrl_d_and_pasted_blocks_wait_for_the_prompt(chat: Start, gate: Path) -> None:
    """A paste of several lines that becomes several messages; a Ctrl-D that the terminal keeps for itself."""
    shown = chat()
    shown.wait_for(loads)
    assert b"\x1b[?2004h" in shown.raw
    shown.child.send("\x1b[200~one\rtwo\x1b[201~")
    shown.child.send("\r\x04")
    gate.touch()
    assert shown.finish() == 0
    assert ">>> one\n... two\n" in shown.text
    assert len(SUMMARY.findall(shown.text)) == 1
    assert shown.raw.rfind(b"\x1b[?2004l") > shown.raw.rfind(b"\x1b[?2004h")


def test_a_message_typed_while_an_answer_comes_is_sent_after_it(chat: Start, gate: Path) -> None:
    """The next question in the prompt with an empty line behind it, and not asked."""
    gate.touch()
    shown = chat("-n", "2000")
    shown.wait_for(lambda t: t.text.endswith(">>>"))
    shown.child.send("hello\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    ask(shown, "/set predict 3\rand then", 2)
    assert ">>> and then\n" in shown.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_models_load_restores_the_terminal(chat: Start, number: signal.Signals, code: int) -> None:
    """A shell without echo; a message that the shell runs as a command."""
    shown = chat()
    before = settings(shown)
    shown.child.send("rm everything\r")
    shown.wait_for(loads)
    assert settings(shown) != before
    shown.child.send("rm everything\r")
    if number is signal.SIGINT:
        shown.interrupt()
    else:
        os.kill(shown.child.pid, number)
    assert shown.finish(close=False) == code
    assert settings(shown) == before
    assert "Traceback" not in shown.text
    assert shown.raw.rfind(b"\x1b[?2004l") > shown.raw.rfind(b"\x1b[?2004h") >= 0


def test_a_third_ctrl_c_gives_the_terminal_back(chat: Start) -> None:
    """A terminal without echo after a process that ends at once."""
    shown = chat(env={"DEAF": "1"})
    before = settings(shown)
    shown.wait_for(loads)
    while shown.child.isalive():
        shown.interrupt()
        shown.read(0.2)
    assert shown.finish(close=False) == 130
    assert settings(shown) == before


def test_an_editor_finds_the_terminal_as_the_shell_left_it(chat: Start, gate: Path, tmp_path: Path) -> None:
    """An editor in the terminal of the chat in which no letter shows and no line ends."""
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\necho "line, please"\nread line && printf "%s" "$line" > "$1"\n')
    editor.chmod(0o755)
    gate.touch()
    shown = chat(env={"EDITOR": str(editor)})
    shown.wait_for(lambda t: t.text.endswith(">>>"))
    ask(shown, "hello")
    shown.child.send("/edit\r")
    shown.wait_for(lambda t: "line, please" in t.text)
    ask(shown, "other words", 2)
    assert "\nother words\n" in shown.text
    shown.child.sendeof()
    assert shown.finish() == 0
