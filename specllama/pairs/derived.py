"""The store of derived drafts: their files, their provenance, and whether the provenance still holds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from platformdirs import user_cache_path

from specllama.base import disk
from specllama.base.disk import Stamp
from specllama.base.errors import ConfigError, ModelFileError
from specllama.base.jsonable import UNREADABLE, from_plain, parsed, to_plain
from specllama.base.text import counted
from specllama.files.inventory import files_of
from specllama.llama import build_info
from specllama.pairs.profile import ClassFigures

_VERSION = 1  # of the record
_N_LISTED = 4  # layers in a name; more become a number and a checksum
_MODEL, _RECORD = ".gguf", ".json"
LOCK = "drafts"  # held while drafts are made or measured: two at a time would disturb each other's figures
MAKE: Final = "make"
TUNE: Final = "tune"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The changes to the parent, in this order. No change = the parent itself."""

    n_vocab: int = 0  # tokens kept; 0 = all
    dropped: tuple[int, ...] = ()  # layers left out
    quant: str = ""  # a name in QUANTS; empty = weights as in the parent

    @property
    def name(self) -> str:
        """For file names: "q4_0+v32000+drop4.7"."""
        parts = [self.quant.lower()] if self.quant else []
        parts += [f"v{self.n_vocab}"] if self.n_vocab else []
        if self.dropped:
            layers = ".".join(map(str, self.dropped))
            n_left_out = f"{len(self.dropped)}-{sha256(layers.encode()).hexdigest()[:6]}"
            parts.append(f"drop{layers if len(self.dropped) <= _N_LISTED else n_left_out}")
        return "+".join(parts)

    @property
    def summary(self) -> str:
        parts = [f"weights in {self.quant}"] if self.quant else []
        parts += [counted(self.n_vocab, "token")] if self.n_vocab else []
        parts += [f"without layers {', '.join(map(str, self.dropped))}"] if self.dropped else []
        return ", ".join(parts) or "as it is"


@dataclass(frozen=True, slots=True)
class Parent:
    """A file that a draft was made of."""

    path: Path
    sha256: str
    seen: Stamp | None = None  # when the sum was computed; None in older records


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of a draft for one target on one machine."""

    target: str  # the file's name
    target_sha256: str
    cpu: str  # model and fingerprint
    made: str  # UTC, ISO 8601
    step_s: float  # T(1) of the target
    cost: float  # c, of one drafted token, in T(1)
    speed: float  # predicted, over plain decoding; MAKE drafts in every class of prompts, TUNE only where it pays
    parent_cost: float | None  # of the parent; None = not measured
    parent_speed: float | None
    classes: tuple[ClassFigures, ...]
    by: Literal["make", "tune"] = MAKE  # the command that measured (see docs/drafts.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A derived draft and its provenance, which is kept beside it as JSON."""

    path: Path
    recipe: Recipe
    parent: Parent
    parent_parts: tuple[Parent, ...] = ()  # the other parts of a split parent
    n_bytes: int
    sha256: str
    build: str  # the llama.cpp that made it
    made: str  # UTC, ISO 8601
    measurements: tuple[Measurement, ...] = ()
    seen: Stamp | None = None  # as of a `Parent`

    def __post_init__(self) -> None:
        if not 0 <= self.n_bytes < 2**63:
            raise ValueError("its n_bytes is not the size of a file")

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def spoken(self) -> str:
        """What `-md` takes: the name in the folder, the path elsewhere."""
        return self.name if self.path.parent == folder() else str(self.path)

    def to_json(self) -> dict[str, object]:
        """Plain data without the path."""
        facts = to_plain(self)
        facts.pop("path")
        return {"version": _VERSION, **facts}


def folder() -> Path:
    """The default folder. It is a cache: derived drafts can be made again."""
    return user_cache_path("specllama") / "drafts"


def room_hint(path: Path) -> str:
    """What to do if the disk is full under `path`, a draft or a folder for its making."""
    if path.is_relative_to(folder()):
        return "make room (`specllama draft remove`), or set XDG_CACHE_HOME to a folder on a larger disk"
    return "make room on that disk, or give -o a FILE on another one"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """The block writes `path`. Raises DiskFull, and ModelFileError if it cannot be written for another reason."""
    try:
        with disk.named_disk_full(path.name, room_hint(path)):
            yield
    except OSError as error:
        elsewhere = "set XDG_CACHE_HOME" if path.is_relative_to(folder()) else "give -o another FILE"
        raise ModelFileError(
            f"{path} cannot be written: {error.strerror or error}", hint=f"make the folder writable, or {elsewhere}"
        ) from error


def place(parent: Path, recipe: Recipe) -> Path:
    """The draft's path in the folder."""
    return folder() / f"{parent.stem}+{recipe.name}{_MODEL}"


def record(path: Path, recipe: Recipe, parent: Path) -> Derived:
    """Keep the provenance of the draft that was just made at `path`. Computes the checksums."""
    build = build_info()
    ours, theirs = disk.seen(path), {file.resolve(): disk.seen(file) for file in files_of(parent)}
    first, *rest = (Parent(file, seen.sha256, seen.stamp) for file, seen in theirs.items())
    derived = Derived(
        path=path,
        recipe=recipe,
        parent=first,
        parent_parts=tuple(rest),
        n_bytes=ours.stamp.n_bytes,
        sha256=ours.sha256,
        seen=ours.stamp,
        build=f"llama-cpp-python {build.bindings}, llama.cpp {build.llama_cpp}, {build.fingerprint}",
        made=now(),
    )
    _save(derived)
    return derived


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def measured(derived: Derived, measurement: Measurement) -> Derived:
    """Append a measurement. It replaces one by the same command for the same target and CPU."""

    def kind(each: Measurement) -> tuple[str, str, str]:
        return each.by, each.target_sha256, each.cpu

    others = [each for each in derived.measurements if kind(each) != kind(measurement)]
    derived = replace(derived, measurements=(*others, measurement))
    _save(derived)
    return derived


def _save(derived: Derived) -> None:
    path = derived.path.with_suffix(_RECORD)
    with written(path):
        disk.write_own(path, json.dumps(derived.to_json(), indent=1).encode("utf-8"))


def read(path: Path) -> Derived | None:
    """The provenance of a draft; None if the file has none beside it. Raises ConfigError if it is damaged."""
    record = path.with_suffix(_RECORD)
    try:
        data = parsed(record.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            raise ValueError("another version of specllama wrote it")
        return from_plain(Derived, {**data, "path": str(path)}, "the record")
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(
            f"{record} cannot be read: {error}", hint="make the draft again: specllama draft make"
        ) from None


def paths() -> Iterator[Path]:
    """The drafts in the folder, sorted by name."""
    if folder().is_dir():
        yield from sorted(path for path in folder().glob(f"*{_MODEL}") if path.is_file() and path.name[0] != ".")


def named(name: str) -> Path | None:
    """The draft of that name in the folder."""
    if "/" in name or "\\" in name:
        return None
    path = folder() / f"{name.removesuffix(_MODEL)}{_MODEL}"
    try:
        return path if path.is_file() else None
    except OSError:  # the name is too long
        return None


def remove(path: Path) -> int:
    """Remove a draft and its record. Returns the draft's size in bytes."""
    n_bytes = path.stat().st_size
    path.unlink()
    path.with_suffix(_RECORD).unlink(missing_ok=True)
    return n_bytes


def moved(derived: Derived, path: Path) -> Derived:
    """Move a draft and its record, also to another disk. `path` never holds a part of it. Raises as `written`.

    The draft stays where it is until the other file and its record are complete.
    """
    moved = replace(read(derived.path) or derived, path=path)
    with written(path), disk.work_folder(path.with_name(f".{path.name}.moving")) as temporary:
        os.replace(shutil.copy2(derived.path, temporary), path)
    _save(moved)
    if not path.samefile(derived.path):  # the same name in another spelling
        discard(derived.path)
    return moved


def sweep() -> None:
    """Remove what a killed process left in the folder. The caller must hold the lock for making drafts."""
    for pattern in (".*.making", ".*.layers"):
        for path in folder().glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a draft if it exists, even an incomplete one."""
    with suppress(FileNotFoundError):
        remove(path)


def stale(derived: Derived, *, at_once: bool = False) -> str:
    """Why the draft's record no longer holds; empty if it does.

    `at_once`: read no gigabytes; see `disk.is_same`.
    """
    try:
        has_size = derived.path.stat().st_size == derived.n_bytes  # older records have no stamp
        if not (has_size and disk.is_same(derived.path, derived.sha256, derived.seen, at_once=at_once)):
            return "the file is not the one that was made"
        for parent in (derived.parent, *derived.parent_parts):
            if not parent.path.is_file():
                return f"its parent {parent.path.name} is gone"
            if not disk.is_same(parent.path, parent.sha256, parent.seen, at_once=at_once):
                return f"its parent {parent.path.name} has changed since"
    except OSError as error:
        return f"it cannot be compared with its parent: {error.strerror}"
    return ""


def children_of(parent: Path) -> list[Derived]:
    """The drafts in the folder that were made of this file and are not stale."""
    found = []
    for path in paths():
        try:
            derived = read(path)
        except ConfigError:
            continue
        if derived is not None and derived.parent.path == parent.resolve() and not stale(derived):
            found.append(derived)
    return found
