"""Which machines can build the kernels, and the key of the library. No compiler is started."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base.errors import BackendError
from specllama.kernels import build

HEADERS = ("ggml.h", "ggml-backend.h")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The sources and the headers, on a machine that can build them."""
    shutil.copytree(build.SOURCES, tmp_path / "src")
    (tmp_path / "include").mkdir()
    for name in HEADERS:
        (tmp_path / "include" / name).write_text(name)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "headers", lambda: tmp_path / "include")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / "src", tmp_path / "include"


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("machine", "system", "reason"),
    [
        ("x86_64", "linux", ""),
        ("AMD64", "darwin", ""),
        ("aarch64", "linux", "aarch64"),
        ("arm64", "darwin", "arm64"),
        ("AMD64", "win32", "Linux and macOS"),
    ],
)
def test_a_machine_that_cannot_run_the_kernels_is_told_why(
    monkeypatch: pytest.MonkeyPatch, machine: str, system: str, reason: str
) -> None:
    """Prevents: a compiler that fails at every setup, with words that say nothing of the cause."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    assert reason in build.unsupported()
    assert bool(build.unsupported()) == bool(reason)
    if reason:
        with pytest.raises(BackendError, match=reason):
            build.build()


@pytest.mark.parametrize("name", HEADERS)
def test_without_each_header_there_are_no_kernels(folders: tuple[Path, Path], name: str) -> None:
    """Prevents: an internal error where llama-cpp-python comes without its headers, or is not installed."""
    (folders[1] / name).unlink()
    assert "headers" in build.unsupported()


def test_without_the_bindings_there_are_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an internal error where llama-cpp-python is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build.headers() == Path("include")


def _add(folder: Path) -> None:
    (folder / "zz.h").touch()


def _rename(folder: Path) -> None:
    """To a name at the same place of the order."""
    last = max(folder.glob("*.[ch]*"))
    last.rename(last.with_stem(f"{last.stem}_"))


def _change(folder: Path) -> None:
    path = min(folder.glob("*.[ch]*"))
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(("which", "change"), [(0, _add), (0, _rename), (0, _change), (1, _change)])
def test_other_sources_have_another_library(
    folders: tuple[Path, Path], which: int, change: Callable[[Path], None]
) -> None:
    """Prevents: kernels of the last version, or of another llama.cpp, in this process."""
    before = build.library()
    assert re.fullmatch("[0-9a-f]{20}", before.parent.name), "a folder that is removed when it is old"
    assert before == build.library()
    change(folders[which])
    assert before.parent.name != build.library().parent.name


@pytest.mark.parametrize("name", ["FLAGS", "PATHS"])
@pytest.mark.usefixtures("folders")
def test_other_flags_have_another_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Prevents: kernels with the instructions or the order of sums of another version."""
    before = build.library()
    monkeypatch.setattr(build, name, ())
    assert before != build.library()


def test_a_repository_that_moves_keeps_its_library(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: kernels compiled again and profiles lost because a folder has another name."""
    found = {build.library()}
    for name in ("a", "z"):
        shutil.copytree(folders[0], tmp_path / name)
        monkeypatch.setattr(build, "SOURCES", tmp_path / name)
        found.add(build.library())
    assert len(found) == 1
