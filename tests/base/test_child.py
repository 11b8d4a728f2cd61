"""Child processes: results, progress and errors reach the parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from specllama.base import child
from specllama.base.child import Tell
from specllama.base.errors import BackendError, DiskFull

pytestmark = pytest.mark.slow  # starts programs


def _count(tell: Tell) -> int:
    tell("counting", 0.5)
    return 7


def _full(_tell: Tell) -> None:
    raise DiskFull("no room", hint="make some")


def _defect(_tell: Tell) -> None:
    raise ZeroDivisionError("division by zero")


def _print(_tell: Tell) -> int:
    os.write(1, b"printed by C code")
    return 8


def _die(_tell: Tell) -> None:
    os._exit(5)


def _sleep(tell: Tell) -> None:
    tell("asleep", 0.0)
    time.sleep(60)
    os.write(1, b"left over")


def _handed(_tell: Tell) -> tuple[bool, dict[tuple[str, ...], str]]:
    return child.is_child, child.known


class BrokenPipe:
    """The child's end of a pipe whose parent is gone."""

    def write(self, _data: bytes) -> int:
        raise BrokenPipeError


def test_progress_and_result_arrive() -> None:
    """Prevents: a progress bar that stands still; a lost result."""
    told: list[tuple[str, float]] = []
    assert child.run(_count, lambda what, share: told.append((what, share))) == 7
    assert told == [("counting", 0.5)]


def test_what_the_work_prints_is_no_message() -> None:
    """Prevents: a result lost because llama.cpp printed a line."""
    assert child.run(_print, lambda _what, _share: None) == 8


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_closed_streams_cost_no_result(closed: str) -> None:
    """Prevents: a lost result in a service without stdin and stderr, because a pipe gets the number of one of them."""
    source = "from specllama.base import child\nfrom tests.base.test_child import _print\n"
    source += "print(child.run(_print, lambda what, share: None))"
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, source]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n")


def test_a_child_that_dies_is_an_error_with_its_code() -> None:
    """Prevents: a parent that waits for a dead child."""
    with pytest.raises(BackendError, match="ended with code 5"):
        child.run(_die, lambda _what, _share: None)


def test_a_child_knows_what_its_parent_has_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: other kernels in the child than in its parent where no cache can be written."""
    assert not child.is_child
    monkeypatch.setattr(child, "known", {("a", "b"): "fact"})
    assert child.run(_handed, lambda _what, _share: None) == (True, {("a", "b"): "fact"})


def test_an_error_keeps_its_class_and_its_hint() -> None:
    """Prevents: a full disk reported as a failure of llama.cpp, without the hint."""
    with pytest.raises(DiskFull, match="no room") as caught:
        child.run(_full, lambda _what, _share: None)
    assert caught.value.hint == "make some"


def test_a_defect_is_one_sentence_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Prevents: forty lines of a child's traceback in the middle of the progress."""
    with pytest.raises(BackendError, match="ZeroDivisionError: division by zero"):
        child.run(_defect, lambda _what, _share: None)
    assert capfd.readouterr() == ("", "")


def test_a_child_ends_with_its_parent() -> None:
    """Prevents: minutes of quantization on all cores after the parent was killed."""
    source = "from specllama.base import child\nfrom tests.base.test_child import _sleep\n"
    source += "child.run(_sleep, lambda what, share: print(what, flush=True))\n"
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        parent.kill()
        assert parent.stdout.read() == ""  # returns when the child has also closed the pipe


def test_a_child_whose_parent_is_gone_ends_quietly() -> None:
    """Prevents: a traceback on the terminal after Ctrl-C."""
    child.answer(_count, BrokenPipe())  # type: ignore[arg-type]  # raises nothing
