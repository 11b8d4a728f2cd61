"""Atomic writes, size limits, and cached facts about files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from platformdirs import user_cache_path, user_config_path, user_state_path

from specllama.base import disk
from tests.homes import Watch, file_size_limit


def _append(path: Path) -> None:
    with disk.open_own(path) as file:
        file.write(b"ours")


def _fill(path: Path) -> None:
    with disk.work_folder(path) as folder:
        (folder / "file").write_bytes(b"ours")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "folder link"])
@pytest.mark.parametrize("write", [lambda path: disk.write_own(path, b"ours"), _append, _fill])
def test_a_link_in_place_of_our_file_is_replaced_and_not_written_through(
    tmp_path: Path, kind: str, write: Callable[[Path], None]
) -> None:
    """Prevents: a link in a shared cache through which a download, a record or a lock overwrites another file."""
    theirs, ours = tmp_path / "theirs", tmp_path / "cache" / "ours"
    ours.parent.mkdir()
    file = theirs / "file" if kind == "folder link" else theirs
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"theirs")
    if kind == "hard link":
        ours.hardlink_to(theirs)
    else:
        ours.symlink_to(theirs)
    write(ours)
    assert file.read_bytes() == b"theirs"
    assert not ours.is_symlink()
    assert write is _fill or ours.read_bytes() == b"ours"
    assert [path.name for path in ours.parent.iterdir()] == ([] if write is _fill else ["ours"])


def test_a_lock_that_is_a_link_empties_no_file(home: Path, tmp_path: Path) -> None:
    """Prevents: a file emptied by a link of a lock's name."""
    (tmp_path / "theirs").write_bytes(b"theirs")
    locks = user_cache_path("specllama") / "locks"
    locks.mkdir(parents=True)
    (locks / "name.lock").symlink_to(tmp_path / "theirs")
    with disk.only_one("name", Watch()):
        assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    """Prevents: half a file under the final name, or beside it."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    for write in (lambda: disk.write_own(path, b"x" * 9), lambda: disk.write_text(path, "x" * 9)):
        with file_size_limit(8), pytest.raises(OSError) as caught:
            write()
        assert caught.value.errno in disk.NO_ROOM
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", sorted(disk.NO_ROOM))
def test_a_full_disk_is_known_in_the_words_of_other_programs(number: int) -> None:
    """Prevents: 'no reason given' for a full disk, or in a language other than English."""
    assert disk.tells_of_no_room(f"ERROR: Could not install packages due to an OSError: [Errno {number}] Kein Platz")
    assert disk.tells_of_no_room(f"I/O error: Kein Platz (os error {number})")
    assert not disk.tells_of_no_room(f"[Errno {errno.EACCES}] {number}")


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
