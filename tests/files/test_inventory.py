"""The files of a model, whole or split, and their checksum."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from specllama.base import disk
from specllama.files.inventory import checksum_of, files_of, known_checksum_of


def _write(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.write_bytes(path.name.encode())
    return paths


def test_the_files_of_a_model_are_its_parts(home: Path) -> None:
    """Prevents: a stamp, a checksum or a profile of the first part alone."""
    whole, *parts = _write(Path(), "m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
    assert files_of(whole) == (whole,)
    assert files_of(parts[0]) == tuple(parts)
    assert files_of(parts[1]) == (parts[1],), "no model by itself"
    parts[1].unlink()
    assert files_of(parts[0]) == (parts[0], parts[2])
    assert files_of(Path("gone.gguf")) == (Path("gone.gguf"),)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_checksum_of_a_model_is_that_of_all_its_files(home: Path, n: int) -> None:
    """Prevents: equal checksums in the reports of two models that share their first part."""
    (whole,) = _write(Path(), "m.gguf")
    assert known_checksum_of(whole) is None
    assert checksum_of(whole) == known_checksum_of(whole) == sha256(b"m.gguf").hexdigest()
    parts = _write(Path(), *(f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)))
    before = checksum_of(parts[0])
    assert before == known_checksum_of(parts[0]) != disk.checksum(parts[0])
    parts[n].write_bytes(b"other")
    assert known_checksum_of(parts[0]) is None
    assert checksum_of(parts[0]) != before
