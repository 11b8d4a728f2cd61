"""The hash of a build: the contents of its libraries."""

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


def test_the_same_libraries_elsewhere_have_the_same_hash(folder: Path, tmp_path: Path) -> None:
    """Prevents: 'the installed llama.cpp changed', and minutes of tuning, in each new clone."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    os.utime(other / "libggml.so", (1, 1))
    assert library_hash.of(other) == library_hash.of(folder)


def test_other_contents_of_the_same_size_have_another_hash(folder: Path) -> None:
    """Prevents: costs of one build used for another one of the same size."""
    before = library_hash.of(folder)
    (folder / "libggml.so").write_bytes(b"gpml")
    os.utime(folder / "libggml.so", (7, 7))
    assert library_hash.of(folder) != before


def test_the_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 20 MB read at each start."""
    found = library_hash.of(folder)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert library_hash.of(folder) == found


def test_one_library_at_a_time_is_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a gigabyte of memory for the hash of a GPU build."""
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
def test_a_damaged_record_is_ignored(folder: Path, home: Path, text: str) -> None:
    """Prevents: a program that cannot start because of a damaged cache file."""
    found = library_hash.of(folder)
    (place,) = home.rglob("builds/*.json")
    place.write_text(text)
    assert library_hash.of(folder) == found


def test_the_build_is_named_by_content() -> None:
    """Prevents: a fingerprint by dates."""
    info = llama.build_info()
    assert info.fingerprint == library_hash.of(info.libraries[0].parent)[:16]
