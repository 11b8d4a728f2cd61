"""What names a build of llama.cpp: a hash of what is in its libraries, the same wherever and whenever it was unpacked.

Reading 20 MB of libraries takes time, so the hash is remembered by the files' names, sizes and dates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs

from specllama.base import disk as storage
from specllama.base.jsonable import parsed

_MOST = 32  # builds that are remembered: those of all folders, and of all times somebody compiled into them


def of(folder: Path) -> str:
    """The hash of the files in `folder`; where it cannot be remembered, the next start reads them again."""
    look = _digest([f"{folder}\n{_look(folder)}".encode()])
    place = platformdirs.user_cache_path("specllama") / "builds.json"
    known = _known(place)
    found = known.get(look)
    if found is None:
        # One after the other: those of a GPU build are several hundred megabytes.
        found = _digest(piece for path in _libraries(folder) for piece in (path.name.encode(), path.read_bytes()))
        newest = {**dict(list(known.items())[1 - _MOST :]), look: found}
        with suppress(OSError):
            storage.write_text(place, json.dumps(newest, indent=1))
    return found


def _known(place: Path) -> dict[str, str]:
    """Hashes by looks; nothing where the file says nothing of use."""
    try:
        known = parsed(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    texts = isinstance(known, dict) and all(isinstance(value, str) and len(value) == 32 for value in known.values())
    return known if texts else {}


def _libraries(folder: Path) -> Iterator[Path]:
    """llama.cpp's own files, in a fixed order."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_file())


def _look(folder: Path) -> str:
    return "\n".join(f"{path.name} {(facts := path.stat()).st_size} {facts.st_mtime_ns}" for path in _libraries(folder))


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:32]
