"""Named models and pairs, from the shipped, the user's and the project's `models.toml`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from platformdirs import user_config_path

from specllama.base.disk import working_folder
from specllama.base.errors import ConfigError
from specllama.files import models_toml
from specllama.files.model import CatalogPair, Model

T = TypeVar("T")

FILE_NAME = "models.toml"
FILE_VARIABLE = "SPECLLAMA_MODELS"


@dataclass(frozen=True, slots=True)
class Catalog:
    """The models and pairs of all files."""

    pairs: Mapping[str, CatalogPair]
    models: Mapping[str, Model]
    default: str  # the name of a pair
    files: tuple[Path, ...] = ()  # later ones override
    notes: tuple[str, ...] = ()  # for the user, such as a file that was not read

    def pair(self, name: str | None = None) -> CatalogPair:
        """The pair of that name, or the default pair. Raises ConfigError with the closest names as the hint."""
        if name and name not in self.pairs:
            is_file = name.endswith(".gguf") or name in self.models
            if option := "-m" if is_file else "-hf" if "/" in name else "":
                raise ConfigError(f"there is no pair named {name!r}", hint=f"a model is an option: {option} {name}")
        return _named(self.pairs, name or self.default, "pair")

    def model(self, name: str) -> Model:
        """The model of that name, with or without `.gguf`. Raises ConfigError."""
        return _named(self.models, name.removesuffix(".gguf"), "model")

    def resolve(self, name: str) -> tuple[Model, ...]:
        """(target, draft) of a pair, (model,) of a model. Raises ConfigError."""
        if name in self.pairs:
            return (self.pairs[name].target, self.pairs[name].draft)
        either: dict[str, tuple[Model, ...]] = dict.fromkeys(self.pairs, ())
        either.update((known, (model,)) for known, model in self.models.items())
        return _named(either, name.removesuffix(".gguf"), "pair or model")


def _named(table: Mapping[str, T], name: str, kind: str) -> T:
    if name in table:
        return table[name]
    folded = {known.lower(): known for known in table}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    raise ConfigError(f"there is no {kind} named {name!r}", hint=f"{meant}`specllama models list` shows all names")


def user_file() -> Path:
    """The user's own `models.toml`; it need not exist."""
    return user_config_path("specllama") / FILE_NAME


def _shipped_file() -> Path:
    """In the package if installed, at the top of the repository in a checkout."""
    inside = Path(__file__).parent.parent / FILE_NAME
    return inside if inside.exists() else Path(__file__).parents[2] / FILE_NAME


def _project_file(folder: Path | None) -> tuple[Path | None, str]:
    """The project's file, and a note if there is one that is not read.

    Other programs also have a `models.toml`. A file without our tables is ignored; in a file with them every mistake is
    an error.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named is not None:
        return (Path(named) if named else None), ""
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.is_file() or path.samefile(_shipped_file()):
        return None, ""
    data = models_toml.load(path)
    if any(isinstance(data.get(key), dict) for key in ("models", "pairs")):
        return path, ""
    return None, f"{path} was not read: it has neither [models] nor [pairs]"


def load_catalog(project_dir: Path | None = None) -> Catalog:
    """The shipped file, overridden by the user's file, overridden by the project's.

    The project's file is `models.toml` in `project_dir` (default: the working directory). The environment variable
    SPECLLAMA_MODELS names another file; if empty, no project file is read. Raises ConfigError with file, table and key.
    """
    layers = [_read(_shipped_file())]
    if user_file().exists():
        layers.append(_read(user_file()))
    try:
        project, note = _project_file(project_dir or working_folder())
        layers += [_read(project)] if project else []
    except ConfigError as error:
        hint = error.hint or f"if the file belongs to another program, set {FILE_VARIABLE}= (empty)"
        raise ConfigError(str(error), hint=hint) from error
    return _merge(layers, (note,) if note else ())


def shipped_checksums() -> frozenset[str | None]:
    """The SHA-256 of every model file that the shipped `models.toml` pins."""
    files = (file for model in _read(_shipped_file()).models for file in model.files)
    return frozenset(file.sha256 for file in files if file.sha256 is not None)


def _read(path: Path) -> models_toml.Layer:
    return models_toml.layer(models_toml.load(path), path)


def _merge(layers: list[models_toml.Layer], notes: tuple[str, ...]) -> Catalog:
    """A later table replaces an earlier one of the same name. The first layer is the shipped one."""
    models = {model.name: model for layer in layers for model in layer.models}
    entries = {entry.name: entry for layer in layers for entry in layer.pairs}
    pairs = {name: _join(entry, models) for name, entry in entries.items()}
    shipped = {model.name: model for model in layers[0].models}
    for entry in layers[0].pairs:
        pair = pairs[entry.name]
        if (pair.target, pair.draft) == (shipped[entry.target], shipped[entry.draft]):
            pairs[entry.name] = replace(pair, recommended=True)
    default = [(layer.default, layer.path) for layer in layers if layer.default is not None][-1]
    if default[0] not in pairs:
        raise ConfigError(f"{default[1]}: default = {default[0]!r} is not the name of a pair")
    return Catalog(pairs, models, default[0], tuple(layer.path for layer in layers), notes)


def _join(entry: models_toml.PairEntry, models: Mapping[str, Model]) -> CatalogPair:
    for role, name in (("target", entry.target), ("draft", entry.draft)):
        if name not in models:
            raise ConfigError(f"{entry.where}: {role} = {name!r} is not the name of a model")
    target, draft = models[entry.target], models[entry.draft]
    return CatalogPair(entry.name, target, draft, entry.summary, entry.memory_gb, entry.defaults)
