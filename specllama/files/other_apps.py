"""GGUF files that other programs left on this disk: ollama, LM Studio, llama.cpp and the tools of the Hub.

Nothing is changed or copied. What these folders hold is not trusted: a digest must be one, a manifest is small.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specllama.base.disk import models_dir
from specllama.base.jsonable import parsed
from specllama.files import hub_cache
from specllama.files.repo_files import model_files

_MOST_BYTES = 1 << 20  # of a manifest
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model file, and where it is from."""

    program: str
    name: str  # as the program has it
    path: Path


def folders() -> dict[str, tuple[Path, ...]]:
    """The folders of each program that are looked at; they need not exist."""
    home = Path.home()
    shared = (Path("/usr/share/ollama/.ollama/models"),) if sys.platform == "linux" else ()
    ollama, llama_cpp = os.environ.get("OLLAMA_MODELS"), os.environ.get("LLAMA_CACHE")
    return {
        "ollama": (Path(ollama),) if ollama else (home / ".ollama" / "models", *shared),
        "LM Studio": (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"),
        "llama.cpp": (Path(llama_cpp) if llama_cpp else user_cache_path("llama.cpp", appauthor=False),),
        "Hub": (hub_cache.cache_dir(),),
        "specllama": (models_dir(),),
    }


def found_models() -> Iterator[FoundModel]:
    """Every model file, once; of split models the first part."""
    seen: set[Path] = set()
    for program, places in folders().items():
        for place in places:
            for name, path in _of_ollama(place) if program == "ollama" else _files_below(place, program):
                with suppress(OSError):  # such as a folder of another user
                    if path.is_file() and (real := path.resolve()) not in seen:
                        seen.add(real)
                        yield FoundModel(program, name, path)


def _of_ollama(folder: Path) -> Iterator[tuple[str, Path]]:
    """The models of ollama by their manifests: `REGISTRY/NAMESPACE/MODEL/TAG` names the blob of the weights."""
    root = folder / "manifests"
    for manifest in sorted(root.glob("*/*/*/*")):
        _, namespace, model, tag = manifest.relative_to(root).parts
        digest = _weights_of(manifest)
        if digest:
            owner = "" if namespace == "library" else f"{namespace}/"
            yield f"{owner}{model}:{tag}", folder / "blobs" / digest.replace(":", "-")


def _weights_of(manifest: Path) -> str | None:
    """The digest of the weights; None if the file is no manifest of a model."""
    try:
        with manifest.open("rb") as file:
            data: Any = parsed(file.read(_MOST_BYTES).decode())
        layers = [layer for layer in data["layers"] if layer["mediaType"] == _OLLAMA_MODEL]
        digest = str(layers[0]["digest"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return digest if _DIGEST.fullmatch(digest) else None


def _files_below(folder: Path, program: str) -> Iterator[tuple[str, Path]]:
    """The GGUF files below a folder; those of the Hub's cache by repository."""
    for path in sorted(folder.rglob("*.gguf")):
        if not model_files([path.name]):
            continue
        parts = path.relative_to(folder).parts
        if program != "Hub":
            yield "/".join(parts), path
        elif len(parts) > 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
            yield "/".join((*parts[0].split("--")[1:], *parts[3:])), path
