"""The clock of speeds and budgets."""

from __future__ import annotations

import signal
import sys
import time
from importlib import import_module

import pytest

from specllama.base import clock
from specllama.cli.screen import ending


@pytest.mark.skipif(sys.platform == "win32", reason="has no Ctrl-Z")
def test_time_in_ctrl_z_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an answer of 0.3 tokens/s, and a profile that learns it, because it was stopped for a minute."""
    now = iter((100.0, 160.0))
    monkeypatch.setattr(clock, "_stopped_s", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now, 161.0))
    monkeypatch.setattr(ending.signal, "raise_signal", lambda number: None)
    ending.stop(signal.SIGTSTP)
    assert clock.perf_counter() == 101.0


@pytest.mark.parametrize(
    "module", ["core.engine", "llama.model", "tuning.costs", "tuning.first_use", "tuning.budget", "bench.answer"]
)
def test_what_is_measured_uses_this_clock(module: str) -> None:
    """Prevents: speeds by one clock and the time outside the models by another."""
    assert import_module(f"specllama.{module}").perf_counter is clock.perf_counter
