"""Reports that took minutes, where stdout cannot take them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import SpecllamaError
from specllama.cli import reports
from specllama.cli.screen.output import open_output, prepare_streams
from specllama.cli.screen.worker import interruptible
from specllama.core.types import Cancel
from tests.cli.conftest import Pair
from tests.cli.test_tune import CALM

_BENCH = ["-n", "8", "--spec-draft-n-max", "2", "--temp", "0", "-r", "1", "--prompts", "p.jsonl"]
COMMANDS = {
    "bench": [*_BENCH, "--format", "json"],
    "bench lines": [*_BENCH, "--format", "jsonl"],
    "audit": ["--quick", "--json", "--top-k", "4", "--spec-draft-n-max", "2", "--spec-type", "lookup"],
    "tune": ["--quick", "--json"],
    "check": ["--probe", "--budget", "1s", "--json"],
}


# Examining the machine takes a second.
_SHORT = {
    "bench": "from specllama.bench import machine\nmachine.others_load = machine.memory_bandwidth = lambda *_: None\n",
}
PROMPTS = [{"id": f"q{i}", "category": "coding", "language": "en", "turns": [f"say {i}"]} for i in range(4)]


@dataclass(frozen=True)
class Place:
    """Where a command runs, and where it keeps what it cannot print."""

    kept: Path
    state: Path
    pair: Pair

    def program(self, command: str) -> list[str]:
        name = command.split()[0]
        return [sys.executable, "-c", _SHORT.get(name, "") + CALM, name, *self.pair.options, *COMMANDS[command]]

    def saved(self, command: str, hint: str) -> list[Any]:
        """The lines of the file that the hint names."""
        place = Path(hint.rpartition(" in ")[2])
        assert place.is_relative_to(self.state if command == "tune" else self.kept)
        return self.read(place)

    def read(self, place: Path) -> list[Any]:
        text = place.read_text()
        if place.suffix == ".md":
            assert text.strip()
            return []
        return [json.loads(line) for line in (text.splitlines() if place.suffix == ".jsonl" else [text])]


def read_until(terminal: int, sign: bytes, n: int) -> None:
    """Read until `sign` came `n` times."""
    seen, deadline = b"", time.monotonic() + 240
    while seen.count(sign) < n:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], seen[-1000:]
        seen += os.read(terminal, 1 << 16)


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that holds all it can; a write does not block."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(ours, bytes(1 << 12)):
            pass
    return theirs, ours


def until_blocked(pid: int) -> None:
    """Wait until the main thread of a process waits in a write to a pipe."""
    deadline = time.monotonic() + 240
    while "pipe_write" not in Path(f"/proc/{pid}/wchan").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def place(short_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "kept"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return Place(tmp_path / "kept", tmp_path / "state", short_pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirection"),
    [("bench", ">/dev/full"), ("bench lines", "| true"), ("audit", "| true"), ("tune", ">/dev/full")],
)
def test_a_stdout_that_cannot_be_written_loses_no_report(place: Place, command: str, redirection: str) -> None:
    """Prevents: minutes of measuring lost to a full disk, or to a reader that has ended; -q hides where they are."""
    shell = ["bash", "-c", f'set -o pipefail; "$@" -q {redirection}', "sh", *place.program(command)]
    found = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == (1 if "full" in redirection else 141), found.stderr
    assert found.stdout == ""
    hint = found.stderr.splitlines()[-1]
    assert hint.startswith("hint: ")
    assert all(isinstance(line, dict) for line in place.saved(command, hint))


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_is_full_and_does_not_block_loses_no_report(
    place: Place, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    """Prevents: the same where another program made the pipe non-blocking and reads nothing."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    theirs, ours = full_pipe()
    with subprocess.Popen(place.program("check"), stdout=ours, stderr=subprocess.PIPE, text=True) as child:
        try:
            _, err = child.communicate(timeout=240)
        finally:
            child.kill()
            os.close(theirs)
            os.close(ours)
    assert child.returncode == 2, err  # of `check`, for each error
    assert place.saved("check", err.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("command", ["bench lines", "check"])
def test_ctrl_c_behind_a_pipe_that_nobody_reads_loses_no_report(place: Place, command: str) -> None:
    """Prevents: minutes of measuring lost to the only way out of a write that blocks."""
    is_lines = command == "bench lines"  # they fill the pipe after some runs
    theirs, ours = os.pipe() if is_lines else full_pipe()
    os.set_blocking(ours, True)
    program = [*place.program(command), *(["-r", "5000"] if is_lines else [])]
    with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=ours, stderr=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(2):  # the first ends the measuring
                until_blocked(child.pid)
                child.send_signal(signal.SIGINT)
                time.sleep(0.3)
            _, err = child.communicate(timeout=60)
        finally:
            child.kill()
            os.close(theirs)
            os.close(ours)
    assert child.returncode == 130, err
    assert all(isinstance(line, dict) for line in place.saved(command, err.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench lines", "check", "audit"])
def test_a_terminal_that_vanishes_loses_no_report(place: Place, command: str) -> None:
    """Prevents: minutes of measuring lost with the window or the connection in which they were started."""
    theirs, ours = os.openpty()
    with subprocess.Popen(
        place.program(command), stdin=subprocess.DEVNULL, stdout=ours, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        os.close(ours)
        assert child.stderr is not None
        try:
            if command == "bench lines":
                read_until(theirs, b"{", 1)
            os.close(theirs)
            _, err = child.communicate(timeout=240)
        finally:
            child.kill()
    assert child.returncode == 129
    hint = err.decode().splitlines()[-1]
    assert hint.startswith("hint: "), err
    assert all(isinstance(line, dict) for line in place.saved(command, hint))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sign", "n", "is_its_own"), [("jsonl", b'"event": "run"', 12, True), ("md", b"prompt 2 of", 1, False)]
)
def test_a_terminal_that_takes_stderr_along_ends_the_measuring_and_keeps_it(
    place: Place, form: str, sign: bytes, n: int, is_its_own: bool
) -> None:
    """Prevents: the same where the progress is drawn first, by EIO alone or with the SIGHUP of a session's terminal."""
    theirs, ours = os.openpty()
    with subprocess.Popen(
        [*place.program("bench"), "--format", form, "-n", "64", "-r", "200"],
        stdin=ours,
        stdout=ours,
        stderr=ours,
        start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if is_its_own else None,
    ) as child:
        os.close(ours)
        try:
            read_until(theirs, sign, n)
            os.close(theirs)
            assert child.wait(240) == 129
        finally:
            child.kill()
    (file,) = place.kept.glob(f"specllama-*.{form}")
    assert form == "md" or json.loads(file.read_text().splitlines()[-1])["partial"]


@pytest.mark.parametrize("n_signals", [2, 3])
def test_a_second_ctrl_c_ends_a_write_that_blocks_and_the_report_is_saved(
    n_signals: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: the only way out of a full pipe loses minutes of measuring; an impatient third Ctrl-C as well."""
    theirs, ours = os.pipe()
    with os.fdopen(ours, "w", closefd=False) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        prepare_streams()
        output, cancel = open_output(), Cancel()

        def interrupt() -> None:
            while select.select([], [ours], [], 0)[1]:  # until the write blocks
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            while not cancel.is_set():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        def text() -> str:
            if n_signals == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return "the report"

        thread = threading.Thread(target=interrupt)
        with pytest.raises(SystemExit) as ended, interruptible(cancel, lambda: None):
            thread.start()
            with reports.not_lost(output, ".md", text):
                output.text("x" * 1_000_000)
        thread.join()
    monkeypatch.undo()
    os.close(theirs)
    os.close(ours)
    place = Path(capsys.readouterr().err.strip().rpartition(" in ")[2])
    assert (ended.value.code, cancel.is_set(), place.read_text()) == (130, True, "the report\n")
    place.unlink()


def test_a_quiet_command_says_where_its_report_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prevents: a path that -q hides."""
    with pytest.raises(BrokenPipeError), reports.not_lost(replace(open_output(), quiet=True), ".md", lambda: "it"):
        raise BrokenPipeError
    place = Path(capsys.readouterr().err.strip().rpartition(" in ")[2])
    assert place.read_text() == "it\n"
    place.unlink()


def test_without_room_in_the_folder_for_temporary_files_the_report_is_in_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a report lost because one disk is full."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    error = SpecllamaError("stdout cannot be written", hint="first")
    with pytest.raises(SpecllamaError) as caught, reports.not_lost(open_output(), ".md", lambda: "the report"):
        raise error
    (place,) = (tmp_path / "state" / "specllama").glob("specllama-*.md")
    assert place.read_text() == "the report\n"
    assert caught.value.hint == f"first; what was measured is in {place}"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.symlink_to("nowhere/file"), "there is no such folder"),
        (lambda path: path.symlink_to("folder"), "it is a folder"),
        (lambda path: path.write_text("before"), ""),
        (lambda path: path.symlink_to("/dev/null"), ""),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before_the_minutes(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    """Prevents: minutes of measuring for a report that has no place."""
    (tmp_path / "folder").mkdir()
    make(tmp_path / "report")
    if not reason:
        assert reports.writable("-o", "report") == Path("report")
        return
    with pytest.raises(SpecllamaError) as caught:
        reports.writable("-o", "report")
    assert str(caught.value) == f"-o report cannot be written: {reason}"
