"""`specllama run` on the real default pair: few tokens, whole programs, pipes and a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama.files.catalog import load_catalog
from tests.cli.conftest import SPECLLAMA, Terminal
from tests.real.conftest import DRAFT, SMALL, TARGET

pytestmark = pytest.mark.model

Files = Callable[[str], Path]
CODE = "Write a Python function that returns the n-th Fibonacci number."


def _run(*args: str) -> subprocess.CompletedProcess[bytes]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}
    return subprocess.run(
        [sys.executable, "-m", "specllama", "run", *args], env=plain, stdin=subprocess.DEVNULL, capture_output=True
    )


def _json(*args: str) -> dict[str, Any]:
    result = _run(*args, "--json")
    assert result.returncode == 0, result.stderr.decode()
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


@pytest.fixture
def default_pair(model_file: Files) -> None:
    """The files of the default pair are here."""
    model_file(TARGET)
    model_file(DRAFT)


@pytest.mark.usefixtures("default_pair")
def test_the_default_pair_says_what_the_target_says_and_reports_it() -> None:
    """The command of the README, wrong in any part: other text, no drafts, a record that names other files."""
    args = ("--offline", "--temp", "0", "-n", "40", CODE)
    fast, plain = _json(*args), _json(*args, "--spec-type", "none")
    assert fast["text"] == plain["text"]
    assert fast["acceptance"]["rate"] > 0.5
    assert fast["acceptance"]["steps"] < 20
    assert plain["acceptance"]["steps"] == 40
    pair = load_catalog().pair()
    assert fast["models"]["target"]["sha256"] == pair.target.sha256
    assert fast["models"]["draft"]["sha256"] == pair.draft.sha256
    assert plain["models"]["draft"] is None
    assert 0 < fast["overhead"]["share"] < 0.05  # 1 % is measured on a quiet machine, see benchmarks/


@pytest.mark.usefixtures("default_pair")
def test_characters_of_several_tokens_come_whole_through_a_pipe() -> None:
    """Emoji and CJK cut at the border of a block (FIELD_CASES 29)."""
    said = 'cities = ["東京", "大阪", "京都"]\nfruits = ["🍎", "🍌", "🍇"]\n'
    prompt = f"{said}# the same again\n{said}# and again\n"
    result = _run("--offline", "--raw", "--temp", "0", "-n", "40", "--draft-max", "8", prompt)
    assert result.returncode == 0
    text = result.stdout.decode("utf-8")
    assert "東京" in text
    assert "🍎" in text
    assert "\ufffd" not in text


@pytest.mark.usefixtures("default_pair")
def test_on_a_terminal_the_pair_answers_with_figures() -> None:
    """A program that works in every test but not where people use it."""
    shown = Terminal([*SPECLLAMA, "run", "--offline", "--temp", "0", "-n", "60", CODE], 90, 30, {})
    shown.wait_for(lambda t: "loading" in t.text, 120)
    shown.wait_for(lambda t: "% accepted" in t.text and "t/s now" in t.text, 180)
    assert shown.finish(180) == 0
    assert "def fibonacci" in shown.text
    assert "% accepted" not in shown.text
    assert "[ Prompt: " in shown.text


def test_a_draft_of_another_family_is_refused_in_seconds(model_file: Files) -> None:
    """An honest mismatch that drafts nonsense, or is silently left out (FIELD_CASES 15)."""
    result = _run("-m", str(model_file(TARGET)), "-md", str(model_file(SMALL)), "hi")
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"error: the draft does not fit the target: " in result.stderr


def test_the_small_model_as_its_own_draft_accepts_everything(model_file: Files) -> None:
    """A cache that is off by one after some block, seen from outside (FIELD_CASES 8)."""
    file = str(model_file(SMALL))
    record = _json("-m", file, "-md", file, "--temp", "0", "-n", "60", "Tell me a story about a fox.")
    assert record["acceptance"]["rate"] == 1.0
    assert record["acceptance"]["steps"] <= 16


def test_ctrl_c_in_a_long_prompt_is_back_within_a_second(model_file: Files, tmp_path: Path) -> None:
    """Eight thousand tokens that are read to the end although nobody wants the answer any more (FIELD_CASES 37)."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The quick brown fox jumps over the lazy dog. " * 790)
    command = [sys.executable, "-m", "specllama", "run", "-m", str(model_file(SMALL)), "-c", "8192", "-f", str(prompt)]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--jsonl"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the header: the model is loaded, the prompt is being read
        loading_s = time.monotonic() - began
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, err = process.communicate(timeout=60)
        # A second, and one for a machine that is busy otherwise; or what is quick for one that starts so slowly.
        assert time.monotonic() - started < max(2.0, loading_s)
    assert (process.returncode, err) == (130, b"")
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["reason"] == "cancelled"
    assert all(event["event"] == "prompt" for event in events[:-1])
