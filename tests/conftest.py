"""What every test runs under."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children() -> None:
    """A shell's background jobs ignore Ctrl-C, and `nohup`'s hang-ups; so would what a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
