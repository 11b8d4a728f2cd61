"""The name of a build: what is in its files, wherever they are."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from specllama import llama
from specllama.llama import library_hash


@pytest.fixture
def folder(home: Path) -> Path:
    """Two libraries."""
    place = home / "site" / "lib"
    place.mkdir(parents=True)
    (place / "libllama.so").write_bytes(b"llama")
    (place / "libggml.so").write_bytes(b"ggml")
    return place


def test_the_same_wheel_in_another_clone_has_the_same_name(folder: Path, tmp_path: Path) -> None:
    """'The installed llama.cpp changed' in every new clone, and minutes of tuning again."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    os.utime(other / "libggml.so", (1, 1))
    assert library_hash.of(other) == library_hash.of(folder)


def test_another_content_of_the_same_size_and_date_elsewhere_has_another_name(folder: Path) -> None:
    """Costs of one build steering another one that happens to be as long."""
    before = library_hash.of(folder)
    (folder / "libggml.so").write_bytes(b"gpml")
    os.utime(folder / "libggml.so", (7, 7))
    assert library_hash.of(folder) != before


def test_the_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty megabytes read at every start."""
    found = library_hash.of(folder)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert library_hash.of(folder) == found


def test_one_library_at_a_time_is_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of memory for the name of a build for GPUs."""
    seen: list[str] = []
    real = hashlib.sha256

    class Heard:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = real(data)

        def update(self, piece: bytes) -> None:
            seen.append(piece.decode())
            self._digest.update(piece)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    def read_bytes(path: Path) -> bytes:
        seen.append("read")
        return path.name.encode()[:6]

    monkeypatch.setattr(hashlib, "sha256", Heard)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    library_hash.of(folder)
    assert seen[-6:] == ["libggml.so", "read", "libggm", "libllama.so", "read", "liblla"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "[" * 100_000])
def test_a_damaged_or_missing_memory_costs_time_and_nothing_else(folder: Path, home: Path, text: str) -> None:
    """No start any more because a cache file is damaged."""
    found = library_hash.of(folder)
    (place,) = home.rglob("builds/*.json")
    place.write_text(text)
    assert library_hash.of(folder) == found


def test_the_build_is_named_by_content() -> None:
    """A fingerprint that still follows dates."""
    info = llama.build_info()
    assert info.fingerprint == library_hash.of(info.libraries[0].parent)[:16]
