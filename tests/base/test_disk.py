"""Atomic writes, size limits, and cached facts about files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from platformdirs import user_cache_path, user_config_path, user_state_path

from specllama.base import disk
from specllama.base.errors import UsageError
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


KILLED = """
import os, signal, sys
from pathlib import Path
from specllama.base import disk
with disk.new_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Prevents: a file beside ours for each `kill -9`; the file of a process that is still writing."""
    theirs = [tmp_path / name for name in ("ours", ".mine.new", f".{16 * 'x'}.new")]
    for path in theirs[1:]:
        path.touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(theirs[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        (left,) = set(tmp_path.iterdir()) - set(theirs)
        for path in tmp_path.iterdir():
            os.utime(path, ns=(1, 1))
        disk.write_own(theirs[0], b"whole")
        assert left.read_bytes() == b"half", "its writer lives"
        process.kill()
    disk.write_own(theirs[0], b"whole")
    assert set(tmp_path.iterdir()) == set(theirs)


def test_without_locks_only_a_file_of_yesterday_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: the unfinished file of a living process removed on a file system without locks."""

    def no_locks(*_args: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ages = {f".{n:016x}.new": age_s for n, age_s in enumerate((60, 3600, 2 * 86400))}
    for name, age_s in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    disk.write_own(tmp_path / "ours", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", *list(ages)[:2]}


def test_only_what_is_open_for_writing_is_asked_for_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a lock that NFS refuses, which then looks like a file system without locks."""
    left = tmp_path / f".{0:016x}.new"
    left.touch()
    os.utime(left, (1, 1))
    modes: list[bool] = []
    lock = disk._lock
    monkeypatch.setattr(disk, "_lock", lambda file: (modes.append(file.writable()), lock(file))[1])
    disk.write_own(tmp_path / "ours", b"whole")
    assert (modes, left.exists()) == ([True, True], False)


def test_a_pipe_and_a_link_with_the_name_of_an_unfinished_file_stay(tmp_path: Path) -> None:
    """Prevents: a write that waits without end for the writer of a pipe; another file opened for writing."""
    pipe, link = (tmp_path / f".{n:016x}.new" for n in range(2))
    os.mkfifo(pipe)
    os.utime(pipe, (1, 1))
    link.symlink_to("nowhere")
    writer = threading.Thread(target=disk.write_own, args=(tmp_path / "ours", b"whole"), daemon=True)
    writer.start()
    writer.join(10)
    assert not writer.is_alive()
    assert pipe.is_fifo()
    assert link.is_symlink()


@pytest.mark.parametrize("number", sorted(disk.NO_ROOM))
def test_a_full_disk_is_known_in_the_words_of_other_programs(number: int) -> None:
    """Prevents: 'no reason given' for a full disk, or in a language other than English."""
    assert disk.tells_of_no_room(f"ERROR: Could not install packages due to an OSError: [Errno {number}] Kein Platz")
    assert disk.tells_of_no_room(f"I/O error: Kein Platz (os error {number})")
    assert not disk.tells_of_no_room(f"[Errno {errno.EACCES}] {number}")


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Prevents: `/save /dev/null` as root replacing the device by a file; a reader of a pipe that waits without end."""
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
        disk.FileRecord("things", file).keep(i)
        os.utime(disk._record_of("things", [file]), (i, i))
        if i in (5, 6, 7):
            file.unlink()
    assert [disk.FileRecord("things", file).value(int) for file in (files[0], *files[2:5])] == [None, 2, 3, 4]
    assert disk.FileRecord("things", files[8]).value(int) == 8
    assert len(list(disk._record_of("things", files).parent.iterdir())) == 4


def change_in_place(path: Path, at: int) -> None:
    """Another byte; size, inode and mtime stay. ctime does not: no user can set it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_rename(path: Path, at: int) -> None:
    """The same with another file, as `rsync -t` does."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    change_in_place(other, at)
    other.replace(path)


N_LARGE = 16 << 20
UNSAMPLED = next(at + 5000 for at in disk._sampled(N_LARGE) if at > disk._HEAD)


@pytest.mark.parametrize("change", [change_in_place, replace_by_rename])
@pytest.mark.parametrize("at", [0, UNSAMPLED])
def test_a_change_that_keeps_size_and_date_is_seen(
    home: Path, tmp_path: Path, change: Callable[[Path, int], None], at: int
) -> None:
    """Prevents: a verdict or a checksum of the old bytes after `cat new > file; touch -d`, `cp -p`, `rsync -t`."""
    file = tmp_path / "model"
    with file.open("wb") as stream:
        stream.truncate(N_LARGE)
    seen, before = disk.seen(file), disk.stamp_of(file)
    change(file, at)
    now = disk.stamp_of(file)
    assert (now.n_bytes, now.modified_ns) == (before.n_bytes, before.modified_ns)
    assert now != before
    assert (now.sample == before.sample) == (at == UNSAMPLED)
    assert disk.is_same(file, seen.sha256, seen.stamp, at_once=True) == (at == UNSAMPLED), "not read as a whole"
    assert not disk.is_same(file, seen.sha256, seen.stamp)


@pytest.mark.parametrize("field", ["n_bytes", "sample", "modified_ns", "changed_ns", "inode"])
def test_each_fact_of_a_stamp_counts(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Prevents: a file of a restored disk, or of another machine with the same cache, taken for the known one."""
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    disk.FileRecord("things", file).keep(1)
    assert disk.FileRecord("things", file).value(int) == 1
    real = disk.stamp_of(file)
    other = "0" * 32 if field == "sample" else getattr(real, field) + 1
    monkeypatch.setattr(disk, "stamp_of", lambda _path: replace(real, **{field: other}))
    assert disk.FileRecord("things", file).value(int) is None


def test_a_stamp_reads_little_of_a_large_file(tmp_path: Path) -> None:
    """Prevents: gigabytes read at each start; a header, or the end of a file, that no block covers."""
    file = tmp_path / "model"
    with file.open("wb") as stream:
        stream.truncate(5 << 30)
    places = disk._sampled(5 << 30)
    assert len(places) * disk._BLOCK <= 128 << 10
    assert (places[0], places[-1]) == (0, (5 << 30) - disk._BLOCK)
    assert sum(place < disk._HEAD for place in places) >= len(places) // 2
    start = time.process_time()  # which a busy machine does not change
    disk.stamp_of(file)
    assert time.process_time() - start < 0.2
    for n_bytes in (0, 1, disk._BLOCK, disk._BLOCK + 1):
        assert {0, max(0, n_bytes - disk._BLOCK)} <= set(disk._sampled(n_bytes))


def test_a_value_belongs_to_the_bytes_that_were_there_before_it_was_made(home: Path, tmp_path: Path) -> None:
    """Prevents: the verdict on a file kept for the file that replaced it meanwhile."""
    file = tmp_path / "model"
    file.write_bytes(b"old")
    record = disk.FileRecord("things", file)
    file.write_bytes(b"new")
    record.keep("about the old one")
    assert disk.FileRecord("things", file).value(str) is None


def test_a_value_is_found_by_its_maker_and_its_type(home: Path, tmp_path: Path) -> None:
    """Prevents: rows of another version of the code, or of another form, that are believed."""
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    disk.FileRecord("things", file, by=[1, "build"]).keep([[1, 2]])
    assert disk.FileRecord("things", file, by=[1, "build"]).value(tuple[tuple[int, int], ...]) == ((1, 2),)
    assert disk.FileRecord("things", file, by=[1, "build"]).value(str) is None
    assert disk.FileRecord("things", file, by=[2, "build"]).value(tuple[tuple[int, int], ...]) is None
    disk.FileRecord("things", tmp_path / "gone").keep(1)
    assert disk.FileRecord("things", tmp_path / "gone").value(int) is None


NESTED = "[" * 400 + "]" * 400


@pytest.mark.parametrize("kind", [tuple[tuple[int, int], ...], dict[str, disk.Stamp]])
def test_a_damaged_record_is_no_value(home: Path, tmp_path: Path, kind: type) -> None:
    """Prevents: a traceback at each start after a disk was full, or from an edited cache."""
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    place = disk._record_of("things", [file])
    disk.FileRecord("things", file).keep(None)
    good = place.read_text()
    wholes = ["", "[]", "{}", "[" * 50_000 + "]" * 50_000, '{"value":' * 50_000, "9" * 100_000, '{"stamps": []}']
    values = ["null", "7", '"text"', "1e400", f'{{"a": {NESTED}}}', f"[{NESTED}]", "9" * 5000]
    for text in (*wholes, *(good.replace('"value": null', f'"value": {value}') for value in values)):
        place.write_text(text)
        assert disk.FileRecord("things", file).value(kind) is None, text[:20]


def test_a_copy_is_the_same_file_and_read_once(home: Path, tmp_path: Path, watch: Watch) -> None:
    """Prevents: minutes of tuning after `touch`, `chmod` or a move; a file hashed at each start."""
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    seen = disk.seen(file, watch)
    os.utime(file, ns=(1, 1))
    assert disk.is_same(file, seen.sha256, None)
    assert disk.is_same(file, seen.sha256, seen.stamp)
    assert disk.checksum(file, watch) == seen.sha256
    assert watch.n_checked == 1, "the sum is known again"


@pytest.mark.parametrize(("name", "kept"), [("model.gguf", None), ("library.so", 1)])
def test_only_a_model_may_not_be_hollow(home: Path, tmp_path: Path, name: str, kept: int | None) -> None:
    """Prevents: a library that is tested at every start, because the disk compresses it to less than half."""
    file = tmp_path / name
    file.touch()
    os.truncate(file, 1 << 20)
    disk.FileRecord("things", file).keep(1)
    assert disk.FileRecord("things", file).value(int) == kept


def test_tests_have_a_cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prevents: test records in the user's cache, and a user's profile that decides a test."""
    ours = tmp_path_factory.getbasetemp()
    for place in (user_cache_path("specllama"), user_state_path("specllama"), user_config_path("specllama")):
        assert place.is_relative_to(ours), place


def test_the_home_of_an_unknown_user_is_an_ordinary_name() -> None:
    """Prevents: a traceback for a mistyped `~name`."""
    assert disk.meant("~nobody-here/x") == Path("~nobody-here/x")
    assert disk.meant("~") == Path(os.path.expanduser("~"))


def test_a_null_character_in_a_path_is_refused() -> None:
    """Prevents: an internal error for `/read`, `/save` and `/load` of such a name."""
    with pytest.raises(UsageError) as caught:
        disk.meant("a\0b")
    assert caught.value.hint
