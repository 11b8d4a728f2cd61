"""Resolve a name: a file, a model or pair of the catalog, a derived draft, or a repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from specllama.base.disk import meant
from specllama.base.errors import ConfigError
from specllama.files.catalog import load_catalog
from specllama.files.model import Model
from specllama.pairs import derived

Wanted: TypeAlias = Model | Path | str  # a model of the catalog, a file, or `user/repo[:quant]`

_BEGINS_A_PATH = ("/", "./", "../", "~")


def named(text: str, *, draft: bool = False) -> Wanted:
    """The model that `text` names; of a pair its target, or its `draft`. Raises ConfigError.

    The order is: a derived draft, an existing file, a name of the catalog, a repository.
    """
    if draft and (path := derived.named(text)) is not None:
        return path
    looks_like_path = text.startswith(_BEGINS_A_PATH) or "\\" in text or (text.endswith(".gguf") and ":" not in text)
    if looks_like_path or os.path.isfile(meant(text)):
        return meant(text)
    catalog = load_catalog()
    try:
        return catalog.resolve(text)[-1 if draft else 0]
    except ConfigError as error:
        if "/" in text:
            return text
        if os.path.exists(meant(text)):  # a folder: reading its header raises the error
            return meant(text)
        what = "file, pair, model or derived draft" if draft else "file, pair or model"
        raise ConfigError(f"there is no {what} named {text!r}", hint=error.hint) from None
