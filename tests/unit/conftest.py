"""What several unit tests share: a home of their own, and a stand-in for the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.hubserver import HubServer

_HUB_VARIABLES = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_ENDPOINT",
    "SPECLLAMA_MODELS",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: no cache, no configuration, no state, and an empty working directory."""
    place = tmp_path / "home"
    work = tmp_path / "work"
    work.mkdir()
    for name in _HUB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(place))
    for name, folder in (("CACHE", "cache"), ("CONFIG", "config"), ("STATE", "state"), ("DATA", "data")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(place / folder))
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    monkeypatch.chdir(work)
    return place


@pytest.fixture
def hub_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub without repositories, which HF_ENDPOINT points to."""
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@dataclass
class Watch:
    """A FetchWatch that remembers; `stop_after` bytes it raises KeyboardInterrupt, like Ctrl-C."""

    notes: list[str] = field(default_factory=list)
    begun: list[tuple[str, int | None]] = field(default_factory=list)
    n_bytes: int = 0
    n_open: int = 0
    stop_after: int | None = None

    def begin(self, what: str, total: int | None) -> None:
        self.begun.append((what, total))
        self.n_open += 1

    def advance(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self.stop_after is not None and self.n_bytes >= self.stop_after:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None:
        self.n_open -= 1

    @property
    def n_checked(self) -> int:
        """How often a file was read for its sum."""
        return sum(what.startswith("checking") for what, _ in self.begun)


@pytest.fixture
def watch() -> Watch:
    """A watch that remembers."""
    return Watch()
