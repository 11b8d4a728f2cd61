"""The files of a model, which of them are downloaded, and their checksum. Uses no network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specllama.base import disk as storage
from specllama.base.disk import FetchWatch
from specllama.base.errors import ModelFileError
from specllama.files import hub_cache
from specllama.files.model import HubSource, Model, ModelFile, PathSource, Source, WheelSource
from specllama.files.pins import pins
from specllama.files.repo_files import split_names


@dataclass(frozen=True, slots=True)
class WantedFile:
    """One file of a model in one of its sources."""

    source: Source
    file: ModelFile  # size and SHA-256 from models.toml, or from the first pull
    place: str  # path in the repository, or on this disk
    revision: str | None = None

    @property
    def key(self) -> str:
        """The key of its pin."""
        return f"{self.source.repo}/{self.place}" if isinstance(self.source, HubSource) else self.file.name

    def here(self) -> Path | None:
        """The path of the file, if it is on this disk with the right size."""
        return self._look(self.file)

    def here_damaged(self) -> Path | None:
        """The path of the file, if it is on this disk with a wrong size."""
        found = self._look(replace(self.file, size=None))
        return found if found is not None and self.file.size not in (None, found.stat().st_size) else None

    def _look(self, file: ModelFile) -> Path | None:
        if isinstance(self.source, HubSource):
            return hub_cache.find_file(self.source.repo, self.place, self.revision, file)
        path = Path(self.place)
        return path if path.is_file() and file.size in (None, path.stat().st_size) else None


def wanted_files(model: Model, source: Source) -> tuple[WantedFile, ...]:
    """The files of `model` in `source`, with the records of the first pull of an unpinned model."""
    known = pins() if model.is_named and model.unpinned and not isinstance(source, PathSource) else {}
    revision = source.revision if isinstance(source, HubSource) else None
    wanted = []
    for file, place in zip(model.files, _places(model, source), strict=True):
        item = WantedFile(source, file, place, revision)
        pin = known.get(item.key) if file.sha256 is None else None
        if pin is not None:
            item = replace(item, file=ModelFile(file.name, pin.size, pin.sha256), revision=pin.commit or revision)
        wanted.append(item)
    return tuple(wanted)


def _places(model: Model, source: Source) -> Sequence[str]:
    if isinstance(source, WheelSource):
        return [str(storage.models_dir() / model.file)]
    first = source.file if isinstance(source, HubSource) else str(source.path)
    if len(model.files) == 1:
        return [first]
    base = os.path.basename(first)
    return [first.removesuffix(base) + name for name in split_names(base)]


def all_here(wanted: Sequence[WantedFile]) -> list[Path]:
    """Their paths, if all of them are on this disk; else an empty list."""
    paths = []
    for item in wanted:
        path = item.here()
        if path is None:
            return []
        paths.append(path)
    return paths


def find(model: Model) -> Path | None:
    """The file to load, if all files of `model` are on this disk with the right sizes."""
    found = (all_here(wanted_files(model, source)) for source in model.sources)
    return next((paths[0] for paths in found if paths), None)


def files_of(path: Path) -> tuple[Path, ...]:
    """The model file, or all parts of a split model by its first part; without missing parts."""
    try:
        parts = [path.with_name(name) for name in split_names(path.name)]
    except ModelFileError:  # not the first part
        parts = [path]
    return tuple(part for part in parts if part == path or part.is_file())


def checksum_of(path: Path, watch: FetchWatch | None = None) -> str:
    """The SHA-256 of a model file; for a split model that of the list of its parts' checksums."""
    return joined([storage.checksum(part, watch) for part in files_of(path)])


def known_checksum_of(path: Path) -> str | None:
    """`checksum_of`, if all files were read before and have not changed since."""
    sums = [storage.known_checksum(part) for part in files_of(path)]
    return None if None in sums else joined([each for each in sums if each is not None])


def joined(sums: Sequence[str]) -> str:
    """The checksum of a model by those of its files."""
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()
