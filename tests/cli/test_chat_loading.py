"""Ctrl-C at the end of loading a model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from specllama import llama
from specllama.cli.codes import INTERRUPTED
from tests.cli.conftest import Pair, Result


@pytest.mark.parametrize("command", [["chat"], ["run", "abc", "-n", "3"]])
@pytest.mark.parametrize("n_loaded", [1, 2])
def test_ctrl_c_behind_the_last_progress_of_a_load_is_heard(
    specllama: Callable[..., Result], pair: Pair, monkeypatch: pytest.MonkeyPatch, command: list[str], n_loaded: int
) -> None:
    """A Ctrl-C that is ignored: a piped chat went on waiting for a message."""
    load, n_calls = llama.load, 0

    def interrupted(*args: Any, **options: Any) -> llama.LlamaModel:
        nonlocal n_calls
        model = load(*args, **options)
        n_calls += 1
        if n_calls == n_loaded:
            signal.raise_signal(signal.SIGINT)
        return model

    monkeypatch.setattr(llama, "load", interrupted)
    found = specllama(*command, *pair.options)
    assert (found.code, found.out) == (INTERRUPTED, "")
