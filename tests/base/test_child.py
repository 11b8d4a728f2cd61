"""Children: what they say arrives as what it was."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from specllama.base import child as children
from specllama.base.child import Tell
from specllama.base.errors import BackendError, DiskFull


@dataclass
class Pipe:
    """The child's end of a connection; `broken` after so many messages."""

    broken: int = 99
    sent: list[object] = field(default_factory=list)

    def send(self, message: object) -> None:
        if len(self.sent) == self.broken:
            raise BrokenPipeError
        self.sent.append(message)


def _live(work: Callable[[Tell], object], pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(children.signal, "signal", lambda *_args: None)
    children._child(work, pipe)  # type: ignore[arg-type]
    return pipe.sent


def _full(_tell: Tell) -> None:
    raise DiskFull("no room", hint="make some")


def _defect(_tell: Tell) -> None:
    raise ZeroDivisionError("division by zero")


def test_an_error_keeps_its_class_and_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk told as a failure of llama.cpp, without the advice."""
    (failed,) = _live(_full, Pipe(), monkeypatch)
    error = failed.error()  # type: ignore[attr-defined]
    assert (type(error), str(error), error.hint) == (DiskFull, "no room", "make some")


def test_a_defect_is_one_sentence_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Forty lines of a child's traceback in the middle of the progress."""
    (failed,) = _live(_defect, Pipe(), monkeypatch)
    error = failed.error()  # type: ignore[attr-defined]
    assert isinstance(error, BackendError)
    assert "ZeroDivisionError: division by zero" in str(error)
    assert capfd.readouterr() == ("", "")


def _sleep(tell: Tell) -> None:
    tell("asleep", 0.0)
    time.sleep(60)


def test_a_child_ends_with_its_parent_however_that_ended() -> None:
    """Minutes of quantising for nobody, on all cores, after a parent that was killed."""
    source = "from specllama.base import child as children\nfrom tests.base.test_child import _sleep\n"
    source += "children.run(_sleep, lambda what, share: print(what, flush=True))\n"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        parent.kill()
        assert parent.stdout.read() == ""  # returns when nobody holds the pipe any more: the child is gone


def test_a_child_whose_parent_is_gone_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback on the terminal of somebody who pressed Ctrl-C."""

    def work(tell: Tell) -> int:
        tell("working", 0.5)
        tell("working", 0.6)
        return 1

    assert len(_live(work, Pipe(broken=1), monkeypatch)) == 1
    told, done = _live(lambda tell: tell("x", 0.5) or 7, Pipe(), monkeypatch)
    assert (told.what, told.share, done.result) == ("x", 0.5, 7)  # type: ignore[attr-defined]
