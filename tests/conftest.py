"""What every test runs under."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import typing
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from tests.homes import children, home, hub_server, index, pip, watch  # noqa: F401  # fixtures

if sys.version_info < (3, 12):  # which finds a protocol's names once, not at every `isinstance`: 20 % of an enumeration
    for name in ("_get_protocol_attrs", "_is_callable_members_only"):
        setattr(typing, name, functools.cache(getattr(typing, name)))

# What is too large for every session to have its own; the rest of a cache is what programs found out for themselves.
SHARED = ("specllama/models", "specllama/kernels", "specllama/peers", "huggingface")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays. Looking through it for garbage took up to a quarter of a process's start."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def places_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither see nor change what a user keeps on this machine, except for model files and kernels."""
    theirs, ours = user_cache_path(), tmp_path_factory.mktemp("places")
    for name in SHARED:
        (ours / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        if (theirs / name).is_dir():
            (ours / "cache" / name).symlink_to(theirs / name)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cache", "config", "state"):
            patch.setenv(f"XDG_{name.upper()}_HOME", str(ours / name))
        yield


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children() -> None:
    """A shell's background jobs ignore Ctrl-C, and `nohup`'s hang-ups; so would what a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def sound_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No child process that tests the build, which takes seconds, and no profile except a test's."""
    from specllama.llama import crash_test

    monkeypatch.setattr(crash_test, "installed", lambda: crash_test.ProbeResult(crash_test.State.OK))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
