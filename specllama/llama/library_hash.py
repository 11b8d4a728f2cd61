"""A hash of the contents of llama.cpp's libraries, independent of their folder and dates.

Reading 20 MB of libraries takes time, so the hash is stored until one of them changes.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from specllama.base import disk as storage

_KIND = "builds"


@functools.cache  # a command asks eight times, and each look at the files takes milliseconds
def of(folder: Path) -> str:
    """The hash of the files in `folder`, as they are when a process asks first."""
    paths = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    record = storage.FileRecord(_KIND, *paths)
    known = record.value(str)
    if known is not None:
        return known
    digest = hashlib.sha256()
    for path in paths:  # one at a time: those of a GPU build have several hundred megabytes
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    found = digest.hexdigest()[:32]
    record.keep(found)
    return found
