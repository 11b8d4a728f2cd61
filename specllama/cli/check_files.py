"""The files that `specllama check` looks at: on this disk, or only their headers from the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specllama import hub
from specllama.cli.loading import Wanted
from specllama.hub_headers import header_only
from specllama.model_types import Model
from specllama.pairs import load_catalog
from specllama.storage import FetchWatch, meant


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


def named(text: str) -> Wanted:
    """What a person means by one word: a file, a pair's target, a model, or a repository. Raises ConfigError."""
    path, catalog = meant(text), load_catalog()
    if path.exists() or (text.endswith(".gguf") and ":" not in text):
        return path
    if text in catalog.pairs:
        return catalog.pairs[text].target
    return text if "/" in text else catalog.model(text)
