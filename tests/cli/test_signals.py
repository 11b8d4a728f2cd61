"""SIGINT, SIGTERM and SIGHUP end every command with 130, 143 and 129, from its first line to its last."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ENDLESS, REPOSITORY, SPECLLAMA, Pair

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# `specllama ARGS`, with a signal at the n-th import, in Python's own end, or the first time that llama.cpp reads a
# model, that a model computes, or that a child process sends something.
PROGRAM = """
import atexit, importlib.abc, os, pickle, signal, sys
import specllama.__main__ as program

number, moment, value = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]

def send():
    os.kill(os.getpid(), number)

sent = []

def after_signal(call):

    def patched(*args, **options):
        if not sent:
            sent.append(True)
            send()
        return call(*args, **options)

    return patched

class AtImport(importlib.abc.MetaPathFinder):
    n_left = value

    def find_spec(self, name, path=None, target=None):
        self.n_left -= 1
        if self.n_left == 0:
            send()

if moment == "import":
    sys.meta_path.insert(0, AtImport())
elif moment == "count":
    sys.meta_path.insert(0, AtImport())
    atexit.register(lambda: print(-sys.meta_path[0].n_left, file=sys.stderr))
elif moment == "load":
    from specllama.llama import open as opening

    apart = opening.apart
    opening.apart = lambda call, *rest: apart(after_signal(call), *rest)  # sent by the thread that reads
elif moment == "pass":
    from specllama.llama import LlamaModel

    LlamaModel.eval = after_signal(LlamaModel.eval)
elif moment == "child":
    pickle.load = after_signal(pickle.load)
else:
    atexit.register(send)
sys.exit(program.main())
"""


def ended(number: int, moment: str, value: int, *args: str) -> tuple[int, str]:
    """Exit code and stderr of a command that gets a signal."""
    command = [sys.executable, "-c", PROGRAM, str(int(number)), moment, str(value), *args]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    return done.returncode, done.stderr


def test_a_signal_during_the_imports_ends_the_process_silently(pair: Pair) -> None:
    """A traceback, or a death by the signal, in the first tenths of a second."""
    args = ["run", *pair.options, "--raw", "abc", "-q", "-n", "5", *ENDLESS]
    code, count = ended(0, "count", 0, *args)
    assert (code, int(count) > 100) == (0, True)
    draw = random.Random(1)
    for number in SIGNALS:
        n_imports = draw.randint(1, int(count))
        assert ended(number, "import", n_imports, *args) == (128 + number, ""), n_imports


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_the_end_of_python_ends_the_process_silently(number: signal.Signals) -> None:
    """'Exception ignored in atexit callback', and exit code 0."""
    assert ended(number, "exit", 0, "--version") == (128 + number, "")


@pytest.mark.parametrize(
    ("moment", "command", "number"),
    [
        *(
            (moment, command, number)
            for moment in ("load", "pass")
            for command, number in zip(("run", "audit", "bench"), SIGNALS, strict=True)
        ),
        ("child", "tune", signal.SIGTERM),
    ],
)
def test_a_signal_while_models_are_read_or_compute_ends_a_command_silently(
    short_pair: Pair, moment: str, command: str, number: signal.Signals
) -> None:
    """A signal that is lost while llama.cpp reads a model, or with the code of another one."""
    more = {"run": ["--raw", "abc"], "bench": ["-n", "8"], "tune": ["--kernels", "off"]}.get(command, [])
    assert ended(number, moment, 0, command, *short_pair.options, "-q", *more) == (128 + number, "")


@pytest.mark.parametrize(
    ("stderr_too", "command"),
    [
        (True, ("run", "--raw", "abc", "-n", "-1", "-c", "190000", *ENDLESS)),
        (False, ("chat", "-c", "90000", "-n", "-1")),
        (True, ("check",)),
        (False, ("doctor",)),
        (True, ("models", "list")),
        *((stderr_too, ("bench", "--format", "jsonl")) for stderr_too in (False, True)),
    ],
)
def test_a_terminal_that_vanishes_ends_a_command_silently(
    pair: Pair, talker: Pair, command: tuple[str, ...], stderr_too: bool, tmp_path: Path
) -> None:
    """'internal error: OSError: Input/output error', or minutes of measuring for a terminal that is gone."""
    files = {"run": pair, "chat": talker, "check": pair, "bench": talker}.get(command[0])
    theirs, ours = os.openpty()
    with (tmp_path / "err").open("w+b") as err:
        # In a session without a controlling terminal: it gets no SIGHUP.
        child = subprocess.Popen(
            [*SPECLLAMA, *command, *(files.options if files else [])],
            stdin=ours,
            stdout=ours,
            stderr=ours if stderr_too else err,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        )
    os.close(ours)
    if command[0] == "chat":
        os.write(theirs, b"abc\r")
    if command[0] in ("run", "chat"):
        os.read(theirs, 1)
    os.close(theirs)
    try:
        assert child.wait(60) == 129
    finally:
        child.kill()
        child.wait()
    assert b"rror" not in (tmp_path / "err").read_bytes()
