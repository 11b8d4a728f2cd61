"""The program around its commands: exit codes, errors in one form, help, version, quiet ends."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from specllama.base.errors import ChecksumMismatch, PairError, SpecllamaError, UsageError
from specllama.cli import app
from tests.cli.conftest import REPOSITORY, SPECLLAMA, Pair, Result, Run
from tests.homes import file_size_limit


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, specllama: Run) -> Callable[[BaseException], Result]:
    """The program with a command that raises."""

    def run(error: BaseException) -> Result:
        def fail() -> None:
            raise error

        monkeypatch.setitem(app.COMMANDS, "fail", app.LazyCommand(__name__, "fail", ""))
        monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
        app._load.cache_clear()  # of an earlier error
        return specllama("fail")

    return run


def test_a_command_runs_with_the_garbage_collector(specllama: Run) -> None:
    """Prevents: memory that grows in a long chat, because the start switches the collector off (see __main__.py)."""
    gc.disable()
    try:
        assert specllama("draft", "list").code == 0
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("x is 1, expected 2", hint="try 2"), 2), (PairError("x", hint="y"), 1), (ChecksumMismatch("x"), 1)],
)
def test_a_known_error_is_two_lines_and_its_exit_code(
    failing: Callable[[BaseException], Result], error: SpecllamaError, code: int
) -> None:
    """A traceback for something foreseen, or the wrong exit code in a script."""
    result = failing(error)
    hint = f"hint: {error.hint}\n" if error.hint else ""
    assert result == Result(code, "", f"error: {error}\n{hint}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), "aaa: File name too long"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "a system call failed: Cannot allocate memory"),
        (MemoryError(), "not enough memory"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_only_an_unexpected_error_asks_for_a_report(
    failing: Callable[[BaseException], Result], error: Exception, message: str
) -> None:
    """A request to report a full disk; a traceback that does not help a user."""
    result = failing(error)
    assert (result.code, message in result.err) == (1, True)
    assert len(result.err.splitlines()) <= 2
    assert ("SPECLLAMA_DEBUG=1" in result.err) is isinstance(error, ZeroDivisionError)


def test_ctrl_c_at_a_question_is_no_mere_no(failing: Callable[[BaseException], Result]) -> None:
    """A script that takes an interrupted removal for one that was declined."""
    interrupted, declined = typer.Abort(), typer.Abort()
    interrupted.__context__ = KeyboardInterrupt()
    assert (failing(interrupted).code, failing(declined).code) == (130, 1)


def test_the_debug_variable_shows_the_traceback(
    failing: Callable[[BaseException], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report without its traceback."""
    monkeypatch.setenv("SPECLLAMA_DEBUG", "1")
    for error in (ZeroDivisionError("zero"), PairError("does not fit")):
        shown = failing(error).err
        assert "Traceback (most recent call last)" in shown
        assert f"raise error\n{type(error).__name__}" in shown.replace("specllama.base.errors.", "")


def test_without_a_home_nothing_is_written_to_a_folder_named_tilde(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in the folder ~ of the working directory, for a user that the system does not know."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    result = specllama("doctor")
    assert (result.code, "HOME" in result.err, list(tmp_path.glob("~*"))) == (1, True, [])
    assert specllama("doctor", "--help").code == 0


def test_ctrl_c_ends_with_130_and_says_nothing(failing: Callable[[BaseException], Result]) -> None:
    """A traceback after Ctrl-C."""
    assert failing(KeyboardInterrupt()) == Result(130, "", "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3-4c", "did you mean qwen3-4b"),
        ("smollm2-1.7b-instruct-q4_k_m", "-m smollm2-1.7b-instruct-q4_k_m"),
        ("x.gguf", "-m x.gguf"),
        ("user/repo:Q4", "-hf user/repo:Q4"),
    ],
)
def test_a_chat_takes_a_pair_as_its_argument(specllama: Run, name: str, hint: str) -> None:
    """Prevents: `chat NAME`, as in other programs, refused, or a model in its place without the right option."""
    result = specllama("chat", name)
    assert (result.code, result.out) == (1, "")
    assert f"there is no pair named '{name}'" in result.err
    assert hint in result.err


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["rnu"], "no such command 'rnu'", "did you mean `specllama run`?"),
        (["what is this"], "no such command 'what is this'", 'specllama run "..."'),
        (["run", "--tmep", "1", "x"], "no such option: --tmep", "--temp"),
        (["run", "-p", "x"], "no such option: -p", "the prompt is an argument"),
        (["run", "x", "y"], "got unexpected extra argument", "in quotes"),
        (
            ["run", "qwen3-4b", "y"],
            "got unexpected extra argument",
            "a pair is an option: specllama run --pair qwen3-4b",
        ),
        (["run", "qwen3-4b"], "qwen3-4b is the name of a pair", "did you mean --pair qwen3-4b?"),
        (["run", "smollm2-1.7b-instruct-q4_k_m"], "is the name of a model", "did you mean -m smollm2"),
        (["chat", "qwen3-4b", "--pair", "qwen3-8b"], "PAIR and --pair exclude each other", ""),
        (["list"], "no such command 'list'", "`specllama models list`"),
        (["pull", "qwen3-4b"], "no such command 'pull'", "`specllama models pull`"),
        (["ps"], "no such command 'ps'", "`specllama models list`"),
        (["version"], "no such command 'version'", "`specllama --version`"),
        (["help"], "no such command 'help'", "`specllama --help`"),
        (["run", "x.gguf", "y"], "got unexpected extra argument", "a model is an option: specllama run -m x.gguf"),
        (["run", "--stop", "-n", "8", "hi"], "--stop has no value: the next word is the option -n", "--stop=-n"),
        (["bench", "-m", "x", "-md", ""], "--model-draft is empty", "shell variable"),
        (["models", "pull", ""], "is empty", "shell variable"),
        (["draft", "make", "-m", "x", "-md", "y"], "no such option: -md", ""),
        (["draft", "make", "-mdraft.gguf"], "-mdraft.gguf is neither -md nor -m", "hint: write -m draft.gguf\n"),
        (["check", "-mdraft.gguf"], "-mdraft.gguf is neither -md nor -m", "write -md raft.gguf or -m draft.gguf"),
        (["audit", "-m", "--json"], "-m has no value: the next word is the option --json", "--model=--json"),
        (["check", "x", "y"], "got unexpected extra argument", "see `specllama check --help`"),
        (["bench", "x", "y"], "got unexpected extra argument (y)", ""),
        (["run", "-m"], "option '-m' requires an argument", "see `specllama run --help`"),
        (["draft", "make", "--quant"], "option '--quant' requires an argument", "see `specllama draft make --help`"),
        (["run", "--temp", "x", "y"], "--temp is x", ""),
        (["run", "--bogus", "hi"], "no such option: --bogus", "see `specllama run --help`"),  # and not --verbose
        (["run", "--verbos", "hi"], "no such option: --verbos", "did you mean --verbose?"),
        (["run", "--ctx", "hi"], "no such option: --ctx", "did you mean --ctx-size?"),
        (["check", "--pair", "x"], "no such option: --pair", "as an argument: specllama check x"),
        (["bench", "--pair=a b"], "no such option: --pair", "as an argument: specllama bench 'a b'"),
        (["audit", "--pair"], "no such option: --pair", "as an argument: specllama audit PAIR"),
    ],
)
def test_wrong_use_is_said_in_our_form_with_exit_code_2(specllama: Run, args: list[str], error: str, hint: str) -> None:
    """Typer's boxes and usage lines, which hide the useful sentence."""
    result = specllama(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert error in result.err
    assert hint in result.err
    assert len(result.err.splitlines()) <= 2


def test_the_version_names_the_bindings_too(specllama: Run) -> None:
    """A report about a version that says nothing about llama.cpp."""
    result = specllama("--version")
    assert result.code == 0
    assert "specllama 0." in result.out
    assert "llama-cpp-python 0." in result.out


@pytest.mark.parametrize("args", [[], ["--help"], *([name, "--help"] for name in app.COMMANDS)])
def test_every_command_has_a_help_text_without_escape_sequences(specllama: Run, args: list[str]) -> None:
    """A command in the table whose module cannot be imported, or a help text that cannot go into a pipe."""
    result = specllama(*args)
    assert (result.code, result.err) == (0, "")
    assert "Usage: specllama" in result.out
    assert "\x1b" not in result.out


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(pair: Pair) -> None:
    """`specllama run ... | head -c 10` with a traceback about a broken pipe."""
    command = [sys.executable, "-m", "specllama", "run", *pair.options, "--raw", "abc", "-n", "4000"]
    bias = ["--logit-bias", "10=-inf", "--logit-bias", "11=-inf", "-q"]
    reader, writer = os.pipe()
    with subprocess.Popen(
        [*command, *bias], stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        assert os.read(reader, 10)
        os.close(reader)
        _, err = process.communicate(timeout=60)
    assert err == b""
    assert process.returncode == 141


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--help"], ["check", "-m", "T", "-md", "D"]])
def test_every_command_has_one_exit_code_for_a_closed_pipe(pair: Pair, args: list[str]) -> None:
    """`check ... | head -1` that exits as if the draft did not fit, and `models list | head -1` as if it had failed."""
    paths = {"T": str(pair.target), "D": str(pair.draft)}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "specllama", *(paths.get(arg, arg) for arg in args)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_output_is_utf_8_whatever_the_locale(pair: Pair) -> None:
    """A UnicodeEncodeError in the middle of an answer, because of an old variable."""
    name = "\u6771\u4eac.txt"
    result = subprocess.run(
        [sys.executable, "-m", "specllama", "run", *pair.options, "-f", name],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert result.returncode == 2
    assert name in result.stderr.decode("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "reason", "args", "code"),
    [
        (">/dev/full", "No space left on device", ["--version"], 1),
        (">/dev/full", "No space left on device", ["check", "-m", "T", "-md", "D"], 2),
        (">&-", "it is closed", ["--help"], 1),
        (">&-", "it is closed", ["models", "list"], 1),
    ],
)
def test_a_stdout_that_cannot_be_written_is_one_sentence(
    pair: Pair, redirection: str, reason: str, args: list[str], code: int
) -> None:
    """A full disk reported as an internal error, or as a draft that does not fit."""
    paths = {"T": str(pair.target), "D": str(pair.draft)}
    result = _redirected(redirection, *(paths.get(arg, arg) for arg in args))
    assert result.stderr == f"error: stdout cannot be written: {reason}\n"
    assert result.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_with_little_room_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    """Prevents: half of the output with exit code 0, as Docker images set PYTHONUNBUFFERED."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [*SPECLLAMA, "--version"]
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with (tmp_path / "out").open("w") as file, file_size_limit(20):
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert b"stdout cannot be written: File too large" in done.stderr
    assert (tmp_path / "out").stat().st_size == 20


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_an_answer_that_cannot_be_written_is_one_sentence(pair: Pair, redirection: str) -> None:
    """A full disk in the middle of an answer, reported as an internal error."""
    result = _redirected(redirection, "run", *pair.options, "--raw", "abc", "-n", "8", "--seed", "1", "-q")
    assert result.stderr.startswith("error: stdout cannot be written: ")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_cannot_be_written_loses_no_answer(specllama: Run, pair: Pair, redirection: str) -> None:
    """`2>&-` in a script, or a closed terminal: no answer and no message."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "8", "--temp", "0"]
    result = _redirected(redirection, *args)
    assert (result.returncode, result.stdout) == (0, specllama(*args).out)


def _redirected(redirection: str, *args: str) -> subprocess.CompletedProcess[str]:
    """`specllama ARGS` by a shell that redirects a stream."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "specllama", *args]
    return subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
