"""`specllama run` with its streams in pipes: the prompt, the answer, seeds, and the messages on stderr."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specllama.chat.conversation import RenderedPrompt
from specllama.cli import prompting, run
from specllama.cli.app import main
from specllama.cli.prompting import PromptParts
from tests import tiny
from tests.cli.conftest import ENDLESS, Pair, Result, Run, forbidden, record_of

NEEDS_DEVICES = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no endless device")


def test_a_pipe_gets_the_bare_answer_and_one_newline(specllama: Run, pair: Pair) -> None:
    """Prevents: the prompt, statistics or escape sequences on stdout."""
    args = ["run", *pair.options, "--raw", "abc", "--seed", "3", "-n", "12", *ENDLESS]
    text = record_of(specllama(*args, "--json"))["text"]
    result = specllama(*args)
    assert (result.code, result.out) == (0, f"{text}\n")
    assert len(text) == 12
    assert re.match(r"\[ [\d.]+ t/s", result.err)


def test_an_answer_that_ends_with_a_newline_gets_no_second_one(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a blank line at the end of generated files."""
    newline = tiny.token_id(tiny.byte_level(), "Ċ")
    result = specllama("run", *byte_pair.options, "hi", "-n", "3", "--temp", "0", "--logit-bias", f"{newline}=100")
    assert result.out == "\n\n\n"


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_byte_reaches_a_stream_that_is_no_terminal(
    specllama: Run, pair: Pair, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: colour codes in a log file (FIELD_CASES 43)."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "20", "--live", *ENDLESS)
    assert (result.code, bool(result.out), bool(result.err)) == (0, True, True)
    assert "\x1b" not in result.out + result.err


def test_color_always_colours_a_pipe_without_cursor_moves(specllama: Run, pair: Pair) -> None:
    """Prevents: `--color always` without effect in a pager, or live figures there."""
    result = specllama(
        "run", *pair.options, "--raw", "abc", "-n", "20", "--temp", "0", "--color", "always", "--live", *ENDLESS
    )
    assert "\x1b[4;35m" in result.out
    codes = {part.partition("m")[0] for part in result.out.split("\x1b[")[1:]}
    assert all(set(code) <= set("0123456789;") for code in codes)


def test_the_answer_stops_before_a_stop_string(specllama: Run, pair: Pair) -> None:
    """Prevents: the stop string in the text or in the tokens."""
    args = ["run", *pair.options, "--raw", "abc", "--temp", "0", "-n", "30", "--json", *ENDLESS]
    text = record_of(specllama(*args))["text"]
    stop = text[7:9]
    record = record_of(specllama(*args, "--stop", stop))
    assert record["finish_reason"] == "stop"
    assert record["text"] == text[: text.index(stop)]
    assert len(record["tokens"]) == len(record["text"])  # a letter a token


def test_plain_decoding_has_no_draft_figures(specllama: Run, pair: Pair) -> None:
    """Prevents: '0.0 %' or a division by zero without drafts (FIELD_CASES 44)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "5", "--spec-type", "none", *ENDLESS]
    assert re.search(r"^\[ [\d.]+ t/s \| prompt [^|]+ \]$", specllama(*args).err, re.MULTILINE)
    record = record_of(specllama(*args, "--json"))["acceptance"]
    assert (record["drafted"], record["accepted"], record["rate"], record["alpha"]) == (0, 0, None, None)


def test_quiet_leaves_nothing_on_stderr_and_an_empty_answer_is_empty(specllama: Run, pair: Pair) -> None:
    """Prevents: statistics in the mails of a cron job; a newline or a crash if the model ends at once."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "3", "-q"]
    assert specllama(*args, *ENDLESS).err == ""
    assert specllama(*args, "--logit-bias", "10=100") == Result(0, "", "")


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["abc"], b"", "abc"),
        (["abc"], b"ba\n", "ba\n\nabc"),
        ([], b"ba\nab\n", "ba\nab"),
        (["-"], b"ba\r\n", "ba"),
        (["-f", "prompt.txt"], b"", "cab"),
        (["-f", "-"], b"ba\n", "ba"),
        (["-f", "-", "abc"], b"ba\n", "ba\n\nabc"),
        (["-f", "prompt.txt", "abc"], b"ba\n", "ba\n\ncab\n\nabc"),
        (["--raw", "abc"], b"ba\n", "ba\nabc"),
        (["--raw", "-f", "prompt.txt"], b"", "cab\n"),
        ([], b"\xef\xbb\xbfab", "ab"),
    ],
)
def test_stdin_comes_first_then_the_file_then_the_argument(
    specllama: Run,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
    stdin: bytes,
    prompt: str,
) -> None:
    """Prevents: `cat report | specllama run 'Sum it up'` without the report, or with the question first."""
    (tmp_path / "prompt.txt").write_bytes(b"cab\n")
    seen: list[str] = []
    original = run.rendered

    def spy(parts: PromptParts, *rest: Any) -> RenderedPrompt:
        seen.append(parts.text)
        return original(parts, *rest)

    monkeypatch.setattr(run, "rendered", spy)
    assert specllama("run", *pair.options, "-n", "1", *args, stdin=stdin).code == 0
    assert seen == [prompt]


@pytest.mark.parametrize(
    ("args", "stdin", "error"),
    [
        ([], b"", "there is no prompt"),
        (["  "], b"", "there is no prompt"),
        ([], b"\n\n", "there is no prompt"),
        (["-f", "missing.txt"], b"", "--file missing.txt cannot be read: No such file or directory"),
        (["-f", "."], b"", "--file . cannot be read: Is a directory"),
        ([], b"caf\xe9", "stdin is not UTF-8 text: byte 3 is 0xe9"),
        (["caf\udce9"], b"", "the prompt is not UTF-8 text"),
        ([], b"y\n" * (prompting.MAX_BYTES // 2 + 1), "stdin holds more than 16.8 MB"),
        pytest.param(["-f", "/dev/zero"], b"", "/dev/zero holds more than 16.8 MB", marks=NEEDS_DEVICES),
    ],
)
def test_a_prompt_that_cannot_be_read_is_wrong_use(
    specllama: Run, pair: Pair, args: list[str], stdin: bytes, error: str
) -> None:
    """Prevents: a traceback; an answer to an empty prompt."""
    result = specllama("run", *pair.options, *args, stdin=stdin)
    assert (result.code, error in result.err) == (2, True)


@pytest.mark.parametrize(
    ("n_tokens", "n_ctx"), [(600, "856"), (1900, "2048"), (2048, ""), (100_000, "")], ids=["short", "near", "at", "far"]
)
def test_a_long_prompt_is_told_a_context_that_the_model_has(
    specllama: Run, short_pair: Pair, n_tokens: int, n_ctx: str
) -> None:
    """Prevents: the advice to use a context of two million tokens with a model trained for two thousand."""
    result = specllama("run", *short_pair.options, "-c", "512", "--raw", stdin=b"x" * n_tokens)
    assert result.code == 1
    assert result.err.partition("--ctx-size ")[2].strip() == n_ctx


def test_a_silent_stdin_is_mentioned(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prevents: a program that waits forever for an open stdin without a message."""
    monkeypatch.setattr(prompting, "WAIT_S", 0.02)
    reader, writer = os.pipe()
    wait = select.select

    def wait_then_close(*args: Any) -> Any:
        ready = wait(*args)
        os.close(writer)
        return ready

    monkeypatch.setattr(select, "select", wait_then_close)
    with open(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["run", *pair.options, "--raw", "abc", "-n", "1"])
    assert code == 0
    assert capfd.readouterr().err.startswith("note: waiting for the rest of the prompt on stdin")


def test_two_runs_without_a_seed_differ_and_seed_0_repeats(specllama: Run, pair: Pair) -> None:
    """Prevents: a fixed default seed; 0 taken for 'random' (FIELD_CASES 12)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "40", "--json", *ENDLESS]
    first, second = record_of(specllama(*args)), record_of(specllama(*args))
    assert first["text"] != second["text"]
    zero, again = (record_of(specllama(*args, "--seed", "0")) for _ in range(2))
    assert zero["text"] == again["text"]
    assert zero["settings"]["seed"] == 0
    repeated = record_of(specllama(*args, "--seed", str(first["settings"]["seed"])))
    assert repeated["text"] == first["text"]


@pytest.mark.slow
def test_llama_cpps_log_stays_out_unless_verbose(pair: Pair) -> None:
    """Prevents: ggml's lines inside an answer or at the end of the process (FIELD_CASES 30, 31)."""
    command = [sys.executable, "-m", "specllama", "run", *pair.options, "--raw", "abc", "-n", "2", *ENDLESS]
    command += ["--draft-max", "4"]
    silent = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (silent.returncode, len(silent.stdout)) == (0, 3)
    assert re.fullmatch(r"\[ .* \]\nnote: .*\n", silent.stderr)
    loud = subprocess.run([*command, "--verbose"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert len(loud.stdout) == 3
    facts = ["llama_", "seed ", f"target: {pair.target}", f"draft: {pair.draft}"]
    assert [fact for fact in facts if fact not in loud.stderr] == []


@pytest.mark.parametrize("command", [["run", "--raw", "abc"], ["chat"], ["bench"], ["audit"]])
def test_a_bias_for_a_token_that_is_not_there_is_refused(specllama: Run, pair: Pair, command: list[str]) -> None:
    """Prevents: a typo in an id that is ignored."""
    result = specllama(*command, *pair.options, "--logit-bias", "999999=5")
    assert (result.code, result.out) == (2, "")
    assert "999999" in result.err


def test_a_bias_that_forbids_every_token_is_an_error_of_the_option(specllama: Run, pair: Pair) -> None:
    """Prevents: a hint to fetch the model again because of an option."""
    banned = forbidden(*range(12))
    for temp in ("0", "1"):
        result = specllama("run", *pair.options, "--raw", "abc", "--temp", temp, *banned)
        assert result.code == 1
        assert "logit bias" in result.err
        assert "checksum" not in result.err
