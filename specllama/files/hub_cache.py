"""The shared cache of the Hugging Face Hub, read without its library, which takes long to import.

Its layout is public: `models--USER--REPO` holds `refs/BRANCH` (a commit), `snapshots/COMMIT/FILE` (links) and
`blobs/NAME`, where the name of a large file is its SHA-256.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specllama.files.model import ModelFile

_CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
SHA256 = re.compile(r"[0-9a-f]{64}")


def is_offline() -> bool:
    """True if the user forbids the network with the Hub's own variables."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def variable() -> str:
    """The environment variable that decides where the cache is."""
    return next((name for name in _CACHE_VARIABLES if os.environ.get(name)), "HF_HOME")


def cache_dir() -> Path:
    """The cache's folder, by the variables that the Hub's library reads."""
    name = variable()
    if name in _CACHE_VARIABLES:
        place = os.environ[name]
    else:
        xdg = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.environ.get("HF_HOME") or os.path.join(xdg, "huggingface")
        place = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(place)))


def _repo_dir(repo: str) -> Path:
    return cache_dir() / f"models--{repo.replace('/', '--')}"


def _commit_named(repo: str, revision: str | None) -> str | None:
    """The commit of a branch or tag (None: main) at the last download; a commit is its own name."""
    ref = _repo_dir(repo) / "refs" / (revision or "main")
    return ref.read_text(encoding="utf-8", errors="replace").strip() if ref.is_file() else revision


def _snapshots(repo: str, first: str | None) -> list[Path]:
    """The cached snapshots: of the commit `first`, then the others, newest first."""
    try:
        places = [place for place in (_repo_dir(repo) / "snapshots").iterdir() if place.is_dir()]
    except OSError:
        return []
    return sorted(places, key=lambda place: (place.name == first, place.stat().st_mtime), reverse=True)


def find_file(repo: str, path: str, revision: str | None, wanted: ModelFile) -> Path | None:
    """The cached file `path` of the repository, if it has the expected size.

    A file of another commit counts only if its blob's name is the expected SHA-256, or if neither a SHA-256 nor a
    revision is given.
    """
    commit = _commit_named(repo, revision)
    for snapshot in _snapshots(repo, commit):
        found = snapshot / path
        if not found.is_file() or (wanted.size is not None and found.stat().st_size != wanted.size):
            continue
        is_same = promised_checksum(found) == wanted.sha256 if wanted.sha256 else revision is None
        if snapshot.name == commit or is_same:
            return found
    return None


def promised_checksum(found: Path) -> str | None:
    """The SHA-256 that the Hub gave for a cached file: the name of its blob. None if it gave none."""
    name = os.path.basename(os.readlink(found)) if found.is_symlink() else ""
    return name if SHA256.fullmatch(name) else None


def commit_of(found: Path) -> str | None:
    """The commit of a cached file."""
    try:
        return found.relative_to(cache_dir()).parts[2]
    except (ValueError, IndexError):
        return None


def cached_repos() -> list[str]:
    """The repositories of models in the cache, sorted."""
    return sorted(place.name[len("models--") :].replace("--", "/", 1) for place in cache_dir().glob("models--*--*"))


def files_of(repo: str) -> list[str]:
    """The cached files of main, or of the newest snapshot, as paths in the repository."""
    for snapshot in _snapshots(repo, _commit_named(repo, None)):
        files = [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if path.is_file()]
        if files:
            return files
    return []


def delete_files(cache: Any, repo: str, places: Sequence[str]) -> list[Path]:
    """Remove files of a repository in all its revisions, except blobs that other files use.

    `cache` is the result of the library's scan of the cache.
    """
    doomed, kept_blobs = [], set()
    for revision in (each for cached in cache.repos if cached.repo_id == repo for each in cached.revisions):
        for file in revision.files:
            if file.file_path.relative_to(revision.snapshot_path).as_posix() in places:
                doomed.append(file)
            else:
                kept_blobs.add(file.blob_path)
    if hasattr(cache, "delete_files"):  # new versions share blobs between repositories
        cache.delete_files(*doomed).execute()
    for file in doomed:
        file.file_path.unlink(missing_ok=True)
        if file.blob_path not in kept_blobs:
            file.blob_path.unlink(missing_ok=True)
    return [file.file_path for file in doomed]
