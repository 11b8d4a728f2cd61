"""`run --log` and `specllama logs`."""

from __future__ import annotations

import json
import stat
import sys

import pytest

from specllama.cli.logs import log_file
from tests.cli.conftest import ENDLESS, EVIL, Pair, Run, record_of


def test_nothing_is_logged_unless_asked(specllama: Run, pair: Pair) -> None:
    """Prevents: prompts on the disk of someone who did not ask for it."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "3", *ENDLESS]
    assert specllama(*args).code == 0
    assert not log_file().exists()
    assert specllama("logs").out == ""


def test_an_answer_is_logged_as_its_json(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a log in another form than --json, or one that others can read."""
    args = ["run", *pair.options, "--raw", "abc", "--temp", "0", "-n", "3", *ENDLESS]
    printed = record_of(specllama(*args, "--json", "--log"))
    monkeypatch.setenv("SPECLLAMA_LOG", "1")
    assert specllama(*args).code == 0
    assert specllama(*args, "--no-log").code == 0
    first, second = map(json.loads, log_file().read_text().splitlines())
    assert {key: first[key] for key in printed} == printed
    assert (second["prompt"], second["text"]) == ("abc", printed["text"])
    if sys.platform != "win32":
        assert stat.S_IMODE(log_file().stat().st_mode) == 0o600
    assert specllama("logs", "--json", "-n", "1").out.count("\n") == 1
    assert f"> abc\n{printed['text']}\n" in specllama("logs").out
    assert specllama("logs", "--path").out == f"{log_file()}\n"


def test_a_damaged_log_shows_what_can_be_read(specllama: Run) -> None:
    """Prevents: a log that a killed program makes useless, and a log that writes to the terminal."""
    log_file().parent.mkdir(parents=True)
    good = json.dumps({"at": EVIL, "prompt": EVIL, "text": EVIL, "models": {"target": {"file": EVIL}}})
    log_file().write_text(f'{{"prompt": "x"\n[]\n{{"at": 1}}\n{good}\n')
    result = specllama("logs")
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "3 lines" in result.err
    styled = specllama("logs", "--color", "always").out
    assert styled.startswith("\x1b[1m")
    assert "\x1b[2J" not in styled
    assert "\\x1b[1m" not in styled


@pytest.mark.skipif(sys.platform == "win32", reason="permissions")
def test_a_log_that_cannot_be_written_costs_no_answer(specllama: Run, pair: Pair) -> None:
    """Prevents: an answer that is lost with its log."""
    log_file().mkdir(parents=True)
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "3", "--log", *ENDLESS)
    assert (result.code, len(result.out)) == (0, 4)
    assert "not logged" in result.err
