"""The files that `specllama check` looks at: on this disk, or only their headers from the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specllama.base.disk import FetchWatch
from specllama.files import hub
from specllama.files.hub_headers import header_only
from specllama.files.model import Model
from specllama.pairs.naming import Wanted


@contextmanager
def look_at(wanted: Wanted, *, offline: bool = False, watch: FetchWatch | None = None) -> Iterator[Path]:
    """The model's file on this disk, or its header from the Hub. Raises DownloadError and UsageError."""
    if isinstance(wanted, Path):
        yield wanted
        return
    model = wanted if isinstance(wanted, Model) else hub.repo_model(wanted, offline=offline, watch=watch)
    if path := hub.find(model):
        yield path
        return
    with header_only(model, offline=offline, watch=watch) as path:
        yield path
