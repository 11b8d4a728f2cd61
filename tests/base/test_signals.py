"""Signals that wait for the end of a call."""

from __future__ import annotations

import signal
from threading import Thread

import pytest

from specllama.base.signals import held


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
