"""The hash of a build: the contents of its libraries."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from specllama import llama
from specllama.llama import library_hash


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two libraries, in a process that looks at them anew each time."""
    monkeypatch.setattr(library_hash, "of", library_hash.of.__wrapped__)
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


def test_one_library_at_a_time_is_in_memory(folder: Path) -> None:
    """Prevents: a gigabyte of memory for the hash of a GPU build."""
    for name in ("libggml.so", "libllama.so", "libmtmd.so"):
        (folder / name).write_bytes(bytes(1 << 20))
    tracemalloc.start()
    library_hash.of(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 19


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
