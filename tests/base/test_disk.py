"""Files written in one step, and what stands in their place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from platformdirs import user_cache_path, user_config_path, user_state_path

from specllama.base import disk as storage


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`/save /dev/null` of root making a file of the machine's null device; a pipe whose reader waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    storage.write_text(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--prompts /dev/zero` until the system kills the program, or others."""
    monkeypatch.setattr(storage, "MOST_BYTES", 4)
    (tmp_path / "file").write_bytes(b"four")
    assert storage.read_bytes(tmp_path / "file") == b"four"
    (tmp_path / "file").write_bytes(b"fives")
    with pytest.raises(OSError, match="too large"):
        storage.read_bytes(tmp_path / "file")


def test_a_folder_is_refused_as_what_it_is(tmp_path: Path) -> None:
    """A traceback about an empty name for the root folder."""
    for folder in (Path("/"), tmp_path):
        with pytest.raises(IsADirectoryError):
            storage.write_text(folder, "text")
    assert list(tmp_path.iterdir()) == []


def test_what_is_remembered_is_bounded_and_files_that_are_gone_go_first(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that grows for as long as there are new files; a large model's sum lost to files that are long gone."""
    monkeypatch.setattr(storage, "MOST_RECORDS", 8)
    files = [tmp_path / f"file{i}" for i in range(9)]
    for i, file in enumerate(files):
        file.write_text("text")
        storage.remember("things", i, file)
        os.utime(storage._record_of("things", [file]), (i, i))
        if i in (5, 6, 7):
            file.unlink()
    assert [storage.recall("things", file) for file in (files[0], *files[2:5])] == [None, 2, 3, 4]
    assert storage.recall("things", files[8]) == 8
    assert len(list(storage._record_of("things", files).parent.iterdir())) == 4


def test_tests_have_a_cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hundreds of records about files of tests in the cache of whoever ran them, and a profile that decides a test."""
    ours = tmp_path_factory.getbasetemp()
    for place in (user_cache_path("specllama"), user_state_path("specllama"), user_config_path("specllama")):
        assert place.is_relative_to(ours), place


def test_a_home_of_nobody_is_a_name_like_others() -> None:
    """A traceback for a mistyped `~name`."""
    assert storage.meant("~nobody-here/x") == Path("~nobody-here/x")
    assert storage.meant("~") == Path(os.path.expanduser("~"))
