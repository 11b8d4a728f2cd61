"""Signals that wait for the end of a call."""

from __future__ import annotations

import signal
from threading import Thread
from types import FrameType
from typing import Any

import pytest

from specllama.base.signals import ENDING, held


def test_a_signal_is_handled_at_the_end_of_the_block() -> None:
    """Prevents: a Ctrl-C that a library takes for a failure of its own, and a handler that stays behind."""
    before, reached = signal.getsignal(signal.SIGINT), False
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert (reached, signal.getsignal(signal.SIGINT)) == (True, before)


def test_a_signal_goes_before_the_error_of_the_block() -> None:
    """Prevents: an error that hides Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError


def test_every_signal_of_the_block_is_handled() -> None:
    """Prevents: a SIGTERM that is lost after a Ctrl-C, or because it is the second."""
    taken = list[int]()

    def end(number: int, _frame: FrameType | None) -> None:
        taken.append(number)
        raise SystemExit(128 + number)

    sent = [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    before = {number: signal.signal(number, end) for number in set(sent)}
    try:
        with pytest.raises(SystemExit) as ended, held():
            for number in sent:
                signal.raise_signal(number)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    assert (taken, ended.value.code) == (sent, 143)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_handlers_leaves_no_handler_behind(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a process that ignores SIGTERM to its end."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def set_and_raise(changed: int, handler: Any) -> None:
        set_one(changed, handler)
        if changed == number and handler is end:  # restored
            signal.raise_signal(number)

    set_one, before = signal.signal, {each: signal.signal(each, end) for each in ENDING}
    try:
        monkeypatch.setattr(signal, "signal", set_and_raise)
        with pytest.raises(KeyboardInterrupt), held():
            pass
        assert [signal.getsignal(each) for each in ENDING] == [end] * len(ENDING)
    finally:
        monkeypatch.undo()
        for each, old in before.items():
            signal.signal(each, old)


def test_an_error_without_a_signal_stays_itself_also_in_another_thread() -> None:
    """Prevents: handlers set outside the main thread, which Python refuses."""
    found: list[type[Exception]] = []

    def work() -> None:
        try:
            with held():
                raise LookupError
        except Exception as error:
            found.append(type(error))

    work()
    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [LookupError, LookupError]
