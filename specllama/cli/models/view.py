"""Pairs and models as JSON, as tables, as lines."""

from __future__ import annotations

from typing import Any

from specllama.base.disk import size_text
from specllama.cli.screen.output import Output
from specllama.cli.screen.tables import draw_table
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.files.model import CatalogPair, HubSource, Model, Source
from specllama.files.models_toml import source_table
from specllama.pairs.setup import N_CTX


def model_json(model: Model) -> dict[str, object]:
    """Everything known about a model, and its path."""
    path = hub.find(model)
    return {
        "name": model.name,
        "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in model.files],
        "size": model.size,
        "sha256": model.sha256,
        "pinned": not model.unpinned,
        "licence": model.licence,
        "sources": [source_table(source) for source in model.sources],
        "installed": path is not None,
        "path": path,
    }


def pair_json(pair: CatalogPair) -> dict[str, object]:
    """Everything known about a pair."""
    return {
        "name": pair.name,
        "target": pair.target.name,
        "draft": pair.draft.name,
        "summary": pair.summary,
        "memory_gb": pair.memory_gb,
        "defaults": {"n_max": pair.defaults.n_max, "n_ctx": pair.defaults.n_ctx},
        "size": _pair_size(pair),
        "installed": hub.find(pair.target) is not None and hub.find(pair.draft) is not None,
    }


def _model_size(model: Model) -> int | None:
    """Bytes of the model, from models.toml, else from the disk if it is one file."""
    path = hub.find(model) if model.size is None and len(model.files) == 1 else None
    return path.stat().st_size if path else model.size


def _pair_size(pair: CatalogPair) -> int | None:
    target, draft = _model_size(pair.target), _model_size(pair.draft)
    return None if target is None or draft is None else target + draft


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else size_text(n_bytes)


def _here(names: set[str], *models: Model) -> str:
    count = sum(model.name in names for model in models)
    return "here" if count == len(models) else "half here" if count else "-"


def show_list(output: Output, catalog: Catalog) -> None:
    """All pairs and models: tables on a terminal, one line each elsewhere."""
    here = {model.name for model in catalog.models.values() if hub.find(model)}
    if output.out.is_terminal:
        _draw_list(output, catalog, here)
        return
    for pair in catalog.pairs.values():
        output.row(pair.name, "pair", _here(here, pair.target, pair.draft), _size(_pair_size(pair)))
    for model in catalog.models.values():
        output.row(model.name, "model", _here(here, model), _size(_model_size(model)))


def _draw_list(output: Output, catalog: Catalog, here: set[str]) -> None:
    pairs = [
        (
            (pair.name, "cyan"),
            f"{pair.memory_gb} GB" if pair.memory_gb else "-",
            _size(_pair_size(pair)),
            _here(here, pair.target, pair.draft),
            pair.summary + " (default)" * (pair.name == catalog.default),
        )
        for pair in sorted(catalog.pairs.values(), key=lambda pair: pair.memory_gb or 0)
    ]
    models = [
        (
            (model.name, "cyan"),
            _size(_model_size(model)),
            _here(here, model),
            "unpinned" if model.unpinned else "pinned",
        )
        for model in catalog.models.values()
    ]
    heads = "pair", "memory", "size", "", "what it is"
    draw_table(output, heads, pairs, figures=("size", "memory"), prose=heads[-1])
    output.line()
    draw_table(output, ("model", "size", "", "sum"), models, figures=("size",))


def how_to_get(model: Model, name: str) -> str:
    """The hint for a missing model; `name` is its own, or that of its pair."""
    if model.only_here:
        return f"models.toml expects the {model.sources[0]}: put it there, or correct its entry in models.toml"
    return f"fetch it: specllama models pull {name}"


def show_model(output: Output, model: Model, indent: str = "") -> None:
    """One model, one line for each fact."""
    path = hub.find(model)
    facts: list[tuple[str, Any]] = [
        ("model", model.name),
        ("size", _size(_model_size(model))),
        *((f"sha256 of {file.name}", file.sha256 or "unpinned") for file in model.files),
        ("licence", model.licence),
        *(("source", _source_text(source)) for source in model.sources),
        ("path", path or f"none; {how_to_get(model, model.name)}"),
    ]
    for name, value in facts:
        output.prose(f"{indent}{name}: {value}")


def _source_text(source: Source) -> str:
    if isinstance(source, HubSource):
        return f"{source}, {source.file}, revision {source.revision or 'main'}"
    return str(source)


def show_pair(output: Output, pair: CatalogPair) -> None:
    """One pair and its two models."""
    output.line(f"pair: {pair.name}")
    output.prose(f"summary: {pair.summary or '-'}")
    output.line(f"memory: {f'{pair.memory_gb} GB' if pair.memory_gb else '-'}")
    fixed = f"; {pair.defaults.n_max} with --spec-draft-p-min" if pair.defaults.n_max else ""
    output.line(f"default: --spec-draft-n-max auto{fixed}")
    output.line(f"default: --ctx-size {pair.defaults.n_ctx or N_CTX}")
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        output.line(f"{role}:")
        show_model(output, model, "  ")
