"""What every test runs under."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_reaches_children() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
