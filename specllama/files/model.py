"""What a model is, where it comes from, and what a pair is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from specllama.files.repo_files import split_names


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a Hugging Face Hub repository; for a split model, its first part."""

    repo: str
    file: str
    revision: str | None = None  # commit, tag or branch; None = main

    def __str__(self) -> str:
        return f"Hub {self.repo}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Python packages that carry the file in parts. In the patterns {n} counts parts from 1 and {i} from 0."""

    name_pattern: str
    version: str
    n_parts: int
    member_pattern: str

    def package(self, n: int) -> str:
        """The package that holds part `n` (1 = first)."""
        return self.name_pattern.format(n=n, i=n - 1)

    def member(self, n: int) -> str:
        """The path of part `n` inside its wheel."""
        return self.member_pattern.format(n=n, i=n - 1)

    def __str__(self) -> str:
        first = self.package(1)
        return f"wheels {first}..{self.n_parts} {self.version}" if self.n_parts > 1 else f"wheel {first} {self.version}"


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file that is already on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"file {self.path}"


Source: TypeAlias = HubSource | WheelSource | PathSource


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file on disk, and what is known beforehand about its bytes."""

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model, named like its file without `.gguf`; a split model like its first part."""

    name: str
    file: str
    size: int | None  # of all parts together
    sha256: str | None  # None: unpinned, or split (see `files`)
    licence: str
    sources: tuple[Source, ...]
    parts: tuple[ModelFile, ...] = ()  # of a split model, where sizes and sums are known

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Every file of the model, the one to load first."""
        if self.parts:
            return self.parts
        names = split_names(self.file)
        if len(names) > 1:
            return tuple(ModelFile(name) for name in names)
        return (ModelFile(self.file, self.size, self.sha256),)

    @property
    def only_here(self) -> bool:
        """True if no source but a path on this disk has it."""
        return all(isinstance(source, PathSource) for source in self.sources)

    @property
    def unpinned(self) -> bool:
        """True if the right SHA-256 is not known beforehand."""
        return any(file.sha256 is None for file in self.files)


@dataclass(frozen=True, slots=True)
class PairDefaults:
    """Settings that suit a pair, used where the user gives none."""

    n_max: int | None = None  # longest draft
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class CatalogPair:
    """A target, the draft that speeds it up, and the settings that suit them."""

    name: str
    target: Model
    draft: Model
    summary: str = ""
    memory_gb: int | None = None  # the memory of the laptop it suits
    defaults: PairDefaults = PairDefaults()
