"""Atomic writes, size limits, and cached facts about files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from platformdirs import user_cache_path, user_config_path, user_state_path

from specllama.base import disk


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Prevents: `/save /dev/null` as root replacing the device by a file; a reader of a pipe that waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    disk.write_text(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: reading `--prompts /dev/zero` until the memory is full."""
    monkeypatch.setattr(disk, "MOST_BYTES", 4)
    (tmp_path / "file").write_bytes(b"four")
    assert disk.read_bytes(tmp_path / "file") == b"four"
    (tmp_path / "file").write_bytes(b"fives")
    with pytest.raises(OSError, match="too large"):
        disk.read_bytes(tmp_path / "file")


def test_a_folder_is_refused_as_what_it_is(tmp_path: Path) -> None:
    """Prevents: a traceback about an empty name for the root folder."""
    for folder in (Path("/"), tmp_path):
        with pytest.raises(IsADirectoryError):
            disk.write_text(folder, "text")
    assert list(tmp_path.iterdir()) == []


def test_what_is_remembered_is_bounded_and_files_that_are_gone_go_first(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a cache without bound; the checksum of a large model dropped before records of missing files."""
    monkeypatch.setattr(disk, "MOST_RECORDS", 8)
    files = [tmp_path / f"file{i}" for i in range(9)]
    for i, file in enumerate(files):
        file.write_text("text")
        disk.remember("things", i, file)
        os.utime(disk._record_of("things", [file]), (i, i))
        if i in (5, 6, 7):
            file.unlink()
    assert [disk.recall("things", file) for file in (files[0], *files[2:5])] == [None, 2, 3, 4]
    assert disk.recall("things", files[8]) == 8
    assert len(list(disk._record_of("things", files).parent.iterdir())) == 4


def test_tests_have_a_cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prevents: test records in the user's cache, and a user's profile that decides a test."""
    ours = tmp_path_factory.getbasetemp()
    for place in (user_cache_path("specllama"), user_state_path("specllama"), user_config_path("specllama")):
        assert place.is_relative_to(ours), place


def test_the_home_of_an_unknown_user_is_an_ordinary_name() -> None:
    """Prevents: a traceback for a mistyped `~name`."""
    assert disk.meant("~nobody-here/x") == Path("~nobody-here/x")
    assert disk.meant("~") == Path(os.path.expanduser("~"))
