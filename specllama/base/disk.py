"""Files on disk: folders, atomic writes, free space, locks, checksums, and cached facts about files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

from platformdirs import user_cache_path

from specllama.base.errors import ConfigError, DiskFull, DownloadError, UsageError
from specllama.base.jsonable import UNREADABLE, parsed, to_plain, typed

T = TypeVar("T")

_CHUNK = 1 << 20
_BLOCK, _N_BLOCKS = 4096, 16  # of a sample: a few seeks on a slow disk, 0.1 ms on a fast one
_HEAD = 8 << 20  # the header of a model with a large vocabulary
_SUMS = "sums"
_LOCKED_WITHIN_S = 1.0  # a new file
_ABANDONED_S = 86400.0  # a file that was not written for so long, where a file system has no locks
MOST_RECORDS = 512  # of a kind: more than a user has models; a few kB each, a token map 1 MB
MOST_BYTES = 256 << 20  # of a file that is read as a whole: reports, conversations, prompts
# A file system that cannot hold files of this length (FAT) answers EFBIG; for the user that is a full disk.
NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class FetchWatch(Protocol):
    """Receives the progress of slow work on files. Calls may come from another thread."""

    def begin(self, what: str, total: int | None) -> None:
        """A step begins: `total` bytes, None if unknown."""

    def advance(self, n_bytes: int) -> None:
        """`n_bytes` more; negative if an estimate was too high."""

    def note(self, text: str) -> None:
        """One sentence for the user."""

    def end(self) -> None:
        """The latest step has ended, also after an error."""


class Silent:
    """A `FetchWatch` that shows nothing."""

    def begin(self, what: str, total: int | None) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


@contextmanager
def work(watch: FetchWatch, what: str, total: int | None) -> Iterator[None]:
    """One step of `watch`."""
    watch.begin(what, total)
    try:
        yield
    finally:
        watch.end()


def size_text(n_bytes: int) -> str:
    """A size in decimal units, as the Hub shows it: "1.12 GB"."""
    size, units = float(n_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def meant(text: str) -> Path:
    """The path with `~` expanded; `~name` of an unknown user stays as it is. Raises UsageError."""
    if "\0" in text:
        raise UsageError("a path has a null character, which no file name can have", hint="write it without it")
    return Path(os.path.expanduser(text))


def working_folder() -> Path | None:
    """The working directory; None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def require_home() -> None:
    """Raise ConfigError without a home folder: files would go into a folder named ~ in the working directory."""
    if os.path.expanduser("~") == "~":
        raise ConfigError(
            "there is no home folder: HOME is not set and the system does not know this user", hint="set HOME"
        )


def models_dir() -> Path:
    """The folder for model files that do not come from the Hub."""
    return user_cache_path("specllama") / "models"


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises OSError, also for more than MOST_BYTES: a device may have no end."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


@contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes the name `path` in one step at the end of the block; an error leaves what was there.

    A link of that name is replaced, not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    temporary = path.with_name(f".{secrets.token_hex(8)}.new")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            _lock(file)
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove the files of `new_file` that killed processes left: they are not locked."""
    for path in folder.glob(f".{16 * '[0-9a-f]'}.new"):
        # NFS locks only what is open for writing. A pipe would wait for a writer, a link may point anywhere.
        with suppress(OSError), open(path, "r+b", buffering=0, opener=_at_once) as file:
            status, is_free = os.fstat(file.fileno()), _lock(file)
            least_s = _ABANDONED_S if is_free is None else _LOCKED_WITHIN_S
            if stat.S_ISREG(status.st_mode) and is_free is not False and time.time() - status.st_mtime > least_s:
                path.unlink()


def _at_once(name: str, flags: int) -> int:
    """An opener that waits for no other process and follows no link."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))  # missing on Windows


def write_own(path: Path, data: bytes) -> None:
    """Replace a file of our own, see `new_file`."""
    with new_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str, *, like: Path | None = None) -> None:
    """Replace a file that the user named, in one step, so that no reader and no crash leaves half of it.

    A link stays a link: its target is replaced. The file keeps its mode; a new file takes the mode of `like`. A device
    or a pipe is written to.
    """
    path, data = Path(os.path.realpath(path)), text.replace("\n", os.linesep).encode("utf-8")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    example = next((file for file in (path, like) if file is not None and file.exists()), None)
    with new_file(path, 0o666 if example is None else 0o600) as file:  # private until it has its mode
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a crash after the replacement would leave neither text
        if example is not None:
            shutil.copymode(example, file.name)


def open_own(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file of our own to append to it. A link, also another file's second name, is removed first."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
            path.unlink()
    no_link = getattr(os, "O_NOFOLLOW", 0)  # missing on Windows
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | no_link, mode))


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """A new folder, removed at the end of the block. What a killed process left in its place is removed first."""
    with suppress(OSError):  # of a folder
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(parents=True)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def room_hint(variable: str) -> str:
    """What to do about a full disk under a folder that this environment variable moves."""
    return f"free some space (`specllama models remove`), or set {variable} to a larger disk, and pull again"


def most_of(n_bytes: int) -> int:
    """The most bytes to accept where `n_bytes` are announced: a wheel holds a little more than its part."""
    return n_bytes + n_bytes // 100 + _CHUNK


def check_room(folder: Path, n_bytes: int, what: str, hint: str) -> None:
    """Raise DiskFull if `n_bytes` more do not fit on the disk of `folder`, which need not exist yet."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if n_bytes > free:
        raise DiskFull(f"{what} needs {size_text(n_bytes)}, the disk of {there} has {size_text(free)} left", hint=hint)


@contextmanager
def named_disk_full(what: str, hint: str) -> Iterator[None]:
    """Raise DiskFull if the disk fills up in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise DiskFull(f"no space left while writing {what} ({error.strerror})", hint=hint) from error


def tells_of_no_room(text: str) -> bool:
    """True if an error message of another program, written in Python or Rust, means a full disk."""
    return any(f"[Errno {number}]" in text or f"(os error {number})" in text for number in NO_ROOM)


def _lock(file: IO[bytes]) -> bool | None:
    """Take the lock if it is free; None if this file system has no locks. The system frees it when the process ends."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK) else None
    return True


def is_held(path: Path) -> bool:
    """True if a process has the lock of this file."""
    try:
        with open(path, "r+b") as file:
            return _lock(file) is False
    except OSError:
        return False


def held(file: IO[bytes]) -> int | None:
    """A descriptor that keeps the lock of `file` until it is closed; None on Windows, where an open file stays."""
    return None if sys.platform == "win32" or not _lock(file) else os.dup(file.fileno())


@contextmanager
def only_one(name: str, watch: FetchWatch, folder: Path | None = None) -> Iterator[None]:
    """Hold a lock of this name against other processes; tells `watch` if it has to wait."""
    folder = folder or user_cache_path("specllama") / "locks"
    try:
        with named_disk_full(f"to {folder}", "free some space, or set XDG_CACHE_HOME to a larger disk"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = open_own(folder / f"{name}.lock")
    except OSError as error:
        raise DownloadError(
            f"{folder} cannot be written: {error.strerror}", hint="make it writable, or set XDG_CACHE_HOME"
        ) from None
    with lock as file:
        if _lock(file) is False:
            watch.note(f"another specllama is working on {name}: waiting for it")
            while _lock(file) is False:
                time.sleep(0.2)
        yield


@dataclass(frozen=True, slots=True)
class Stamp:
    """Shows whether a file changed, without reading all of it.

    A write in place changes `changed_ns` (ctime), which no user can set back; on Windows it is the time of creation. A
    file that replaces another has its own `inode`. The sample differs where all of these agree by chance or by a
    restored disk image. Network and FAT disks may give a file another inode at each mount: it then counts as changed.
    """

    n_bytes: int
    sample: str  # a hash of some blocks at fixed places
    modified_ns: int
    changed_ns: int
    inode: int


def stamp_of(path: Path) -> Stamp:
    """The stamp of a regular file. Raises OSError."""
    with path.open("rb", buffering=0) as file:  # opening asks a network disk for the latest state
        status, digest = os.fstat(file.fileno()), hashlib.sha256()
        for place in _sampled(status.st_size):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return Stamp(status.st_size, digest.hexdigest()[:32], status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _sampled(n_bytes: int) -> list[int]:
    """Where the blocks of a sample begin: half of them where a header is, half over the file, its end included."""
    lasts = [max(0, end - _BLOCK) for end in (min(n_bytes, _HEAD), n_bytes)]
    return sorted({last * i // (_N_BLOCKS - 1) for last in lasts for i in range(_N_BLOCKS)})


@dataclass(frozen=True, slots=True)
class Seen:
    """The contents of a file at one time."""

    sha256: str
    stamp: Stamp


def seen(path: Path, watch: FetchWatch | None = None) -> Seen:
    """What `is_same` needs later. Raises OSError."""
    stamp = stamp_of(path)  # first: a change while the sum is computed must show
    return Seen(checksum(path, watch), stamp)


def seen_at_once(path: Path) -> Seen:
    """As `seen`, without reading gigabytes: if the sum is not known, another date means another file."""
    stamp = stamp_of(path)
    return Seen(known_checksum(path) or "", stamp)


def is_same(path: Path, sha256: str, stamp: Stamp | None, *, at_once: bool = False) -> bool:
    """True if the file still has the contents that had this checksum and this stamp. Raises OSError.

    Contents decide, not dates: a copy is the same file. `at_once`: never read gigabytes; without a known
    checksum, only the sample is compared.
    """
    now = stamp_of(path)
    if now == stamp:
        return True
    if stamp is not None and (now.n_bytes, now.sample) != (stamp.n_bytes, stamp.sample):
        return False
    if not (sha256 or at_once):  # see `seen_at_once`
        return False
    return (known_checksum(path) if at_once else checksum(path)) in (None, sha256)


def _record_of(kind: str, paths: Sequence[Path]) -> Path:
    """The record about `paths`; a file each, so that no two processes rewrite the same one."""
    key = hashlib.sha256(b"\0".join(os.fsencode(os.path.realpath(path)) for path in paths)).hexdigest()[:32]
    return user_cache_path("specllama") / kind / f"{key}.json"


class FileRecord:
    """A stored value about files, valid until one of them changes.

    Make the record before the files are read: they are looked at here, so a value is never kept for bytes that came
    later. `by`: what else the value depends on, as JSON data, such as the version of the code that made it.
    """

    def __init__(self, kind: str, *paths: Path, by: object = None) -> None:
        self._place, self._paths, self._by = _record_of(kind, paths), paths, by
        self._stamps: list[object] | None = None  # the caller reads the files next and has the better message
        with suppress(OSError):
            self._stamps = [to_plain(stamp_of(path)) for path in paths]

    def value(self, kind: type[T]) -> T | None:
        """The stored value; None without one of this type, or if a file or `by` changed since."""
        try:
            record = parsed(self._place.read_text(encoding="utf-8"))
            if self._stamps is None or (record["stamps"], record["by"]) != (self._stamps, self._by):
                return None
            found: T = typed(kind, record["value"])
            return found
        except (OSError, *UNREADABLE):
            return None

    def keep(self, value: object) -> None:
        """Store plain data or dataclasses. Does nothing if the cache cannot be written.

        Sparse models, which `hub_headers` makes of files on the Hub, are skipped.
        """
        with suppress(OSError):
            if self._stamps is None or any(map(_is_hollow, self._paths)):
                return
            paths = [str(path) for path in self._paths]
            record = {"paths": paths, "stamps": self._stamps, "by": self._by, "value": to_plain(value)}
            write_own(self._place, json.dumps(record).encode("utf-8"))
            _forget_some(self._place.parent)


def _is_hollow(path: Path) -> bool:
    """True for a sparse model. Other files, such as libraries, take as little room where the disk compresses them."""
    if path.suffix != ".gguf":
        return False
    status = os.stat(path)
    n_blocks = getattr(status, "st_blocks", None)  # of 512 bytes; missing on Windows
    return n_blocks is not None and n_blocks * 512 < status.st_size // 2


def _forget_some(folder: Path) -> None:
    """Bound the number of records: those about missing files go first, then the oldest."""
    records = list(folder.glob("*.json"))
    if len(records) <= MOST_RECORDS:
        return
    ages = {path: status.st_mtime_ns for path in records if (status := _status(path)) is not None}
    spare = sorted(ages, key=lambda path: (not _is_stale(path), ages[path]))
    for path in spare[: -MOST_RECORDS // 2]:
        path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # another process removed it
        return None


def _is_stale(record: Path) -> bool:
    """True for a damaged record, or one about missing files."""
    try:
        return not all(os.path.exists(path) for path in parsed(record.read_text(encoding="utf-8"))["paths"])
    except (OSError, *UNREADABLE):
        return True


def known_checksum(path: Path) -> str | None:
    """The file's SHA-256, if it was computed before and the file has not changed since."""
    return FileRecord(_SUMS, path).value(str)


def checksum(path: Path, watch: FetchWatch | None = None) -> str:
    """The file's SHA-256, stored until the file changes."""
    record = FileRecord(_SUMS, path)
    known = record.value(str)
    if known is not None:
        return known
    found = read_checksum(path, watch)
    record.keep(found)
    return found


def read_checksum(path: Path, watch: FetchWatch | None = None) -> str:
    """The file's SHA-256, whatever is stored of it."""
    watch, digest = watch or Silent(), hashlib.sha256()
    label = f"checking {path.name.removesuffix('.part')}"
    with work(watch, label, path.stat().st_size), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            watch.advance(len(chunk))
    return digest.hexdigest()


def move(source: Path, destination: Path) -> None:
    """Give a checked file its final name in one step; its checksum moves with it."""
    known = known_checksum(source)
    os.replace(source, destination)
    if known is not None:
        FileRecord(_SUMS, destination).keep(known)
