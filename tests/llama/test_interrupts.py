"""An exception of a signal handler is never lost while llama.cpp loads, and ends the load."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specllama import llama
from specllama.llama import LoadOptions
from specllama.llama.log import LogBook
from tests import tiny

pytestmark = pytest.mark.slow  # starts programs

ROOT = Path(__file__).resolve().parents[2]
timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timer signals")

LOADS = """
import random, signal, sys, time
from pathlib import Path
from specllama import llama

class Alarm(BaseException):
    pass

def handler(number, frame):
    raise raised

draw = random.Random(12)
header, options = llama.read_header(Path(sys.argv[1])), llama.LoadOptions(n_threads=1, n_ctx=256)
llama.load(header, options).close()  # later imports are done
signal.signal(signal.SIGALRM, handler)
for index in range(200):
    raised = (KeyboardInterrupt, SystemExit, Alarm)[index % 3]
    kept = []  # no finalizer runs in the meantime: Python drops what is raised in one
    until = time.monotonic() + 10
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.02))
        while time.monotonic() < until:
            kept.append(llama.load(header, options) if index % 2 else llama.load_vocabulary(header))
        print("lost:", index)
    except raised:
        pass
"""

TWICE = """
import signal, time
from specllama.core.types import Cancel
from specllama.llama.open import apart

def handler(number, frame):
    raise SystemExit(number)

def call():
    while not stop.is_set():
        time.sleep(0.01)
    signal.raise_signal(signal.SIGTERM)  # a second signal, while the first waits for the call
    time.sleep(0.3)
    print("returned", flush=True)

def look():
    raise KeyboardInterrupt

stop = Cancel()
signal.signal(signal.SIGTERM, handler)
apart(call, look, stop)
"""


def run(program: str, *args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python program."""
    command = [sys.executable, "-c", program, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@timers
def test_no_interrupt_of_a_load_is_lost(tmp_path: Path) -> None:
    """Prevents: a Ctrl-C that is printed as 'Exception ignored' in a callback, after which the program goes on."""
    assert run(LOADS, tiny.write_model(tmp_path / "m.gguf", vocabulary=tiny.byte_level())) == (0, "", "")


def test_a_second_interrupt_does_not_wait_and_the_end_of_the_program_does() -> None:
    """Prevents: a program that only SIGKILL stops; C++ that is unloaded while llama.cpp runs in it."""
    assert run(TWICE) == (signal.SIGTERM, "returned\n", "")


def test_an_interrupt_stops_a_load_early(tmp_path: Path) -> None:
    """Prevents: a Ctrl-C that waits until a large model is read."""
    path, shares = tiny.write_model(tmp_path / "m.gguf"), list[float]()

    def interrupted(share: float) -> bool:
        shares.append(share)
        signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(KeyboardInterrupt):
        llama.load(path, LoadOptions(n_threads=1), progress=interrupted)
    assert len(shares) == 1


def test_the_log_callback_runs_no_python_code() -> None:
    """Prevents: a signal handler that runs in the callback, where Python prints and drops its exception."""
    book, ran = LogBook(), list[str]()
    sys.setprofile(lambda _frame, event, _arg: ran.append(event))
    try:
        book.receive(b"\4", b"a line\n")
    finally:
        sys.setprofile(None)
    assert "call" not in ran
    assert book.reason() == "a line"
