"""The text files that the argument of `/read` means: a file, a folder, or words that may be patterns."""

from __future__ import annotations

import errno
import glob
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from specllama.base.disk import meant, size_text
from specllama.base.errors import UsageError, unreadable
from specllama.base.text import decoded
from specllama.cli.chat.input import bare
from specllama.cli.prompting import MAX_BYTES, read_whole

MOST_FILES = 1000  # of a folder or pattern


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file in front of a message."""

    name: str
    text: str

    @property
    def fenced(self) -> str:
        """Name and text, between fences that the text does not hold."""
        fence = "```"
        while fence in self.text:
            fence += "`"
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


@dataclass(frozen=True, slots=True)
class Found:
    """Files, and how many others are not text or cannot be read."""

    files: list[TextFile]
    n_bytes: int
    n_skipped: int = 0


def find(text: str) -> Found:
    """Read what `text` means; hidden files of folders are left out. Raises UsageError."""
    whole = meant(bare(text))
    if os.path.isdir(whole) or (not os.path.exists(whole) and _has_several(text)):
        return _several(list(islice(_paths(text), MOST_FILES + 1)), text)
    if os.path.exists(whole) and not os.path.isfile(whole):  # a pipe is waited for, a device may have no end
        raise UsageError(f"{whole} is not a regular file (expected a text file)", hint="check the path")
    try:
        with whole.open("rb") as file:
            data = read_whole(file, str(whole))
    except OSError as error:
        raise unreadable(whole, error, UsageError) from None
    return Found([TextFile(whole.name, decoded(data, str(whole), UsageError))], len(data))


def _has_several(text: str) -> bool:
    return glob.has_magic(text) or len(_words(text)) > 1


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return [text]


def _paths(text: str) -> Iterator[Path]:
    whole = meant(bare(text))
    for path in [whole] if os.path.exists(whole) else map(meant, _words(text)):
        if os.path.isdir(path):
            yield from _below(path)
        elif os.path.exists(path):
            yield path
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in islice(glob.iglob(str(path), recursive=True), MOST_FILES + 1)]
            yield from sorted(match for match in matches if match.is_file())
        else:
            raise unreadable(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), UsageError)


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _several(paths: list[Path], text: str) -> Found:
    if len(paths) > MOST_FILES:
        raise UsageError(f"{text} means more than {MOST_FILES} files", hint="name a smaller folder, or a pattern")
    files, n_bytes, n_skipped = list[TextFile](), 0, 0
    for path in dict.fromkeys(paths):
        data = _data(path, MAX_BYTES - n_bytes)
        if data is None:
            n_skipped += 1
            continue
        n_bytes += len(data)
        if n_bytes > MAX_BYTES:
            raise UsageError(f"the files of {text} hold more than {size_text(MAX_BYTES)}", hint="name fewer files")
        name = os.fsencode(path.as_posix()).decode("utf-8", "replace")
        files.append(TextFile(name, data.decode("utf-8")))
    if not files:
        raise UsageError(f"no text file matches {text}", hint="check the path or pattern")
    return Found(files, n_bytes, n_skipped)


def _data(path: Path, most: int) -> bytes | None:
    """The bytes of a regular text file, at most one more than `most`; None for another file."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(8192)
            if b"\0" in data:
                return None
            data += file.read(most + 1 - len(data)) if len(data) <= most else b""
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data
