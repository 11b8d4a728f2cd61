"""The engine's thread: order of events, errors, an early end; and the signals that end a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from specllama.base.errors import Interrupted, NumericsError
from specllama.cli.screen.ending import ending_in_order
from specllama.cli.screen.worker import Worker, interruptible
from specllama.core.events import Event, Notice
from specllama.core.types import Cancel


def _say(*texts: str, pause_s: float = 0.0) -> Iterator[Event]:
    for text in texts:
        time.sleep(pause_s)
        yield Notice(text)


def _until(cancel: Cancel, seconds: float = 60.0) -> Iterator[Event]:
    """Events until `cancel` is set."""
    deadline = time.monotonic() + seconds
    while not cancel.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)
        yield Notice("more")


def _texts(batches: list[list[Event]]) -> list[str]:
    return [event.text for batch in batches for event in batch if isinstance(event, Notice)]


def test_every_event_arrives_once_and_in_order() -> None:
    """A lost or doubled token at the border of two batches."""
    said = [str(n) for n in range(500)]
    with Worker(_say(*said), Cancel()) as worker:
        assert _texts(list(worker.batches())) == said


def test_events_that_come_together_make_one_batch() -> None:
    """A main thread that wakes for every token and takes the interpreter from the engine."""
    with Worker(_say(*map(str, range(200))), Cancel()) as worker:
        assert len([batch for batch in worker.batches() if batch]) <= 5


def test_batches_keep_their_distance() -> None:
    """Figures that are drawn as often as tokens come."""
    with Worker(_say(*map(str, range(30)), pause_s=0.01), Cancel()) as worker:
        times = [time.monotonic() for _ in worker.batches(gap_s=0.1)]
    assert len(times) <= (times[-1] - times[0]) / 0.1 + 2, "the first and the last come when they come"


def test_an_error_arrives_after_the_events_before_it() -> None:
    """An answer that loses its last words, or hangs, because the engine failed."""

    def failing() -> Iterator[Event]:
        yield Notice("said")
        raise NumericsError("NaN")

    seen: list[list[Event]] = []
    with pytest.raises(NumericsError, match="NaN"), Worker(failing(), Cancel()) as worker:
        seen.extend(worker.batches())
    assert _texts(seen) == ["said"]


def test_leaving_early_cancels_and_waits() -> None:
    """An engine that runs on after the reader of stdout has gone."""
    cancel = Cancel()
    started = time.monotonic()
    with pytest.raises(BrokenPipeError), Worker(_until(cancel), cancel) as worker:
        for _ in worker.batches():
            raise BrokenPipeError
    assert cancel.is_set()
    assert time.monotonic() - started < 30
    assert not any(thread.name == "engine" for thread in threading.enumerate())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_and_the_batches_end(number: signal.Signals) -> None:
    """Ctrl-C that raises in the middle of drawing, or is not noticed while nothing happens."""
    cancel, drawn = Cancel(), list[list[Event]]()
    with pytest.raises(SystemExit) as ended, interruptible(cancel, lambda: None):
        with Worker(_until(cancel), cancel) as worker:
            batches = worker.batches()
            next(batches)
            os.kill(os.getpid(), number)
            started = time.monotonic()
            drawn.extend(batches)
        assert time.monotonic() - started < 30
    assert (cancel.is_set(), bool(drawn), ended.value.code) == (True, True, 128 + number)


@pytest.mark.parametrize("error", [Interrupted("stopped"), None])
def test_a_signal_that_changes_nothing_is_still_the_reason_of_the_end(error: Exception | None) -> None:
    """Exit code 0 after a SIGTERM during the summary, or 1 and 'loading was stopped on request'."""
    with pytest.raises(SystemExit) as ended, interruptible(Cancel(), lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
        if error is not None:
            raise error
    assert ended.value.code == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_a_second_sighup_waits_for_the_end(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: minutes of measuring lost, as the shell and the system of a closing terminal send a SIGHUP each."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(SystemExit), interruptible(Cancel(), lambda: None):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)
        assert left == []
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]


def test_afterwards_signals_do_what_they_did_before() -> None:
    """A program in which Ctrl-C never raises again after the first answer."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(ValueError, match="x"), interruptible(Cancel(), lambda: None):
        raise ValueError("x")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("handling", [lambda: interruptible(Cancel(), lambda: None), ending_in_order])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_process_ignores_stays_ignored(
    handling: Callable[[], AbstractContextManager[None]], number: signal.Signals
) -> None:
    """An answer under `nohup` that ends when the terminal closes; a Ctrl-C that ends a script's background job."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with handling():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_like_an_exception(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a draft in the cache and a running child after a service manager stopped the program."""
    before = signal.signal(number, signal.SIG_DFL)
    tidied: list[Any] = []
    try:
        with pytest.raises(SystemExit) as ended, ending_in_order():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), signal.SIGHUP)  # the system's, after that of the shell
                tidied.append(signal.getsignal(signal.SIGTERM))
        assert ended.value.code == 128 + number
        monkeypatch.setattr(os, "_exit", tidied.append)  # the next SIGTERM ends the process at once
        tidied[0](signal.SIGTERM, None)
        assert tidied[1] == 128 + signal.SIGTERM
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
