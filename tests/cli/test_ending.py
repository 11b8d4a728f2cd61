"""SIGTERM and SIGHUP: every `finally` runs before the process ends."""

from __future__ import annotations

import os
import signal

import pytest

from specllama.cli.screen.ending import ending_in_order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_like_an_exception(number: signal.Signals) -> None:
    """Half a draft in the cache and a running child after a service manager stopped the program."""
    before = signal.signal(number, signal.SIG_DFL)
    tidied = []
    try:
        with pytest.raises(SystemExit) as ended, ending_in_order():
            try:
                os.kill(os.getpid(), number)
            finally:
                tidied.append(signal.getsignal(number))  # the next one ends the process at once
        assert ended.value.code == 128 + number
        assert tidied == [signal.SIG_DFL]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_is_ignored_stays_ignored() -> None:
    """A search for a draft under `nohup` that ends with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
