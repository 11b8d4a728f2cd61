"""Reads model files again and compares them with their checksums; records of earlier reads do not count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specllama.base.disk import FetchWatch, read_checksum
from specllama.files import hub_cache
from specllama.files.inventory import WantedFile, wanted_files
from specllama.files.model import HubSource, Model


@dataclass(frozen=True, slots=True)
class Verified:
    """One file of a model."""

    path: Path
    state: Literal["ok", "damaged", "unknown"]  # unknown: there is no checksum to compare with
    sha256: str
    expected: str | None


def verify(model: Model, watch: FetchWatch) -> list[Verified]:
    """The files of `model` on this disk, each read once. Empty if none is here."""
    found: list[Verified] = []
    for source in model.sources:
        for wanted in wanted_files(model, source):
            path = wanted.here() or wanted.here_damaged()
            if path is not None and path not in [each.path for each in found]:
                found.append(_verified(wanted, path, watch))
    return found


def _verified(wanted: WantedFile, path: Path, watch: FetchWatch) -> Verified:
    expected = wanted.file.sha256
    if expected is None and isinstance(wanted.source, HubSource):
        expected = hub_cache.promised_checksum(path)
    found = read_checksum(path, watch)
    return Verified(path, "unknown" if expected is None else "ok" if found == expected else "damaged", found, expected)
