"""The answers of a batch in a file: one JSON object a line, appended as they come, and found again after any end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specllama.base.disk import held, is_held, named_disk_full
from specllama.base.errors import UsageError
from specllama.base.jsonable import parsed, shown
from specllama.batch.requests import Asked, BadLine, RequestId

SCHEMA = {
    "name": "specllama.batch",
    "version": 1,
    "units": "rates and shares are fractions of 1 (null: nothing was counted), *_s are seconds, *_ms milliseconds",
}
START, ANSWER, ERROR = "start", "answer", "error"
_BEGIN = b'{"event": "start", "schema": {"name": "specllama.batch", "version": 1,'  # of every such file


@dataclass(slots=True)
class Kept:
    """What a file of answers holds."""

    header: Mapping[str, Any] = field(default_factory=dict)  # empty for a new file
    done: dict[RequestId, str] = field(default_factory=dict)  # id -> digest, of answers
    failed: set[tuple[RequestId, str]] = field(default_factory=set)  # id, else number of the line, and digest of errors
    n_errors: int = 0
    n_bytes: int = 0  # of whole lines; a line that was cut follows
    ends: bool = True  # the last line has its end

    def waits(self, each: Asked | BadLine) -> bool:
        """False if the file has the answer or the error. Raises UsageError if its id is that of another request."""
        if (each.n_line if each.id is None else each.id, each.digest) in self.failed:
            return False
        digest = None if each.id is None else self.done.get(each.id)
        if digest not in (None, each.digest):
            raise UsageError(
                f"line {each.n_line} is another request than the one that was answered as {shown(each.id)}",
                hint="use another file for the answers; requests with an id may stand in any line",
            )
        return digest is None

    def require(self, settings: Mapping[str, object]) -> None:
        """Raise UsageError if the answers were made with other settings."""
        before = self.header["settings"] if self.header else settings
        changed = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        if changed:
            found = ", ".join(f"{name} {shown(before.get(name))}, now {shown(settings.get(name))}" for name in changed)
            raise UsageError(
                f"the answers were made with other settings ({found})",
                hint="resume with the options that they were made with, or use another file",
            )


def kept_in(path: Path) -> Kept:
    """What a file holds. Raises UsageError if it is no file of answers, or is damaged before its last line."""
    found = Kept()
    with _told(path), path.open("rb") as file:
        begin = file.read(len(_BEGIN))
        if not _BEGIN.startswith(begin):  # a header that was cut is ours, and so is an empty file
            raise UsageError(f"{path} holds no answers of specllama batch", hint="use another file")
        file.seek(0)
        for n_line, line in enumerate(file, 1):
            try:
                _take(found, parsed(line.decode()))
            except (ValueError, LookupError, TypeError):
                if file.read(1):
                    what, hint = ("answer", "remove that line") if found.header else ("start", "use another file")
                    raise UsageError(f"{path}, line {n_line} is no {what} of specllama batch", hint=hint) from None
                break
            found.ends = line.endswith(b"\n")
            found.n_bytes += len(line)
    return found


def _take(found: Kept, entry: Mapping[str, Any]) -> None:
    """Add a line to `found`. Raises ValueError, LookupError or TypeError for one that is damaged."""
    event = entry["event"]
    if event not in ((ANSWER, ERROR) if found.header else (START,)):
        raise ValueError(event)
    if event == START:
        if not isinstance(entry["settings"], dict):
            raise TypeError("settings")
        found.header = entry
        return
    found.n_errors += event == ERROR
    if event == ERROR:
        found.failed.add((entry["line"] if entry["id"] is None else entry["id"], entry["request"]))
    else:
        found.done[entry["id"]] = entry["request"]


def already_there(path: Path) -> UsageError:
    """The error for a file that a new batch would write into."""
    return UsageError(
        f"{path} exists", hint="to answer the requests that it does not hold: --resume; or use another file"
    )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """An OSError of opening as a UsageError."""
    try:
        yield
    except FileExistsError:
        raise already_there(path) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}", hint="name another file") from None


class AnswerFile:
    """A file of answers, open to append to it. A context manager.

    A line is written at once, without a buffer, so it survives the end of this process. `add` also waits for the disk:
    after a power failure at most the unfinished answers are missing. That takes milliseconds, an answer much longer.
    """

    def __init__(self, path: Path, kept: Kept | None = None) -> None:
        """A new file, or one that holds `kept`. Raises UsageError if it exists, or if another program writes it."""
        self._path, self._n_bytes = path, 0
        with _told(path):
            self._file = path.open("xb" if kept is None else "r+b", buffering=0)
        self._lock = held(self._file)
        if self._lock is None and is_held(path):
            self._file.close()
            raise UsageError(f"another specllama is writing {path}", hint="wait for its end, or use another file")
        if kept is not None:
            self._n_bytes = kept.n_bytes
            self._cut()
            if not kept.ends:
                self._write(b"\n")

    def add(self, lines: Iterable[str]) -> None:
        """Append lines. Raises DiskFull; the file then ends with a whole line."""
        with named_disk_full(f"to {self._path}", "free some space, then go on with --resume"):
            try:
                for line in lines:
                    self._write(line.encode("utf-8", "replace") + b"\n")
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._cut()
                raise

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # near the end of a disk, only a part is written
            rest = rest[self._file.write(rest) or 0 :]
        self._n_bytes += len(data)

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        self._file.truncate(self._n_bytes)
        self._file.seek(self._n_bytes)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._file.close()
