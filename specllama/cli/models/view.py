"""Pairs and models as JSON, as tables, as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specllama.base.disk import size_text
from specllama.cli.screen.output import Output
from specllama.cli.screen.tables import draw_table
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.files.model import CatalogPair, HubSource, Model, Source
from specllama.files.models_toml import source_table
from specllama.files.repo_files import quant_of
from specllama.files.verify import Verified
from specllama.pairs.find_drafts import size_in_name
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
        "original": model.original,
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


# Bits of a weight, with the scales and the matrices that a recipe keeps larger; measured on published files.
_BITS = {"Q4_K_M": 4.9, "Q8_0": 8.6, "Q5_K_M": 5.7, "Q6_K": 6.6, "Q4_0": 4.6, "Q4_1": 5.1}


def _model_size_text(model: Model) -> str:
    """The size; of a model that states none, about what its name says of parameters and quantization."""
    size = _model_size(model)
    return size_text(size) if size is not None else _about(_guess(model))


def _guess(model: Model) -> int | None:
    n_params, bits = size_in_name(model.name), _BITS.get(quant_of(model.file))
    return round(n_params * bits / 8) if n_params and bits else None


def _about(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else f"~{size_text(round(n_bytes, -8))}"


def _pair_size_text(pair: CatalogPair) -> str:
    if (size := _pair_size(pair)) is not None:
        return size_text(size)
    target, draft = (_model_size(model) or _guess(model) for model in (pair.target, pair.draft))
    return _about(None if target is None or draft is None else target + draft)


def _here(names: set[str], pair: CatalogPair) -> str:
    """Which models of a pair are on this machine."""
    there = [role for role, model in (("target", pair.target), ("draft", pair.draft)) if model.name in names]
    return "yes" if len(there) == 2 else there[0] if there else "no"


def show_list(output: Output, catalog: Catalog) -> None:
    """All pairs and models: tables on a terminal, one line each elsewhere."""
    here = {model.name for model in catalog.models.values() if hub.find(model)}
    if output.out.is_terminal:
        _draw_list(output, catalog, here)
        return
    for pair in catalog.pairs.values():
        output.row(pair.name, "pair", _here(here, pair), _pair_size_text(pair))
    for model in catalog.models.values():
        output.row(model.name, "model", _yes(model.name in here), _model_size_text(model))


def _draw_list(output: Output, catalog: Catalog, here: set[str]) -> None:
    pairs = [
        (
            (pair.name, "bold"),
            f"{pair.memory_gb} GB" if pair.memory_gb else "-",
            _pair_size_text(pair),
            _here(here, pair),
            pair.summary + " (default)" * (pair.name == catalog.default),
        )
        for pair in sorted(catalog.pairs.values(), key=lambda pair: pair.memory_gb or 0)
    ]
    models = [
        (
            (model.name, "bold"),
            _model_size_text(model),
            _yes(model.name in here),
            "not yet" if model.unpinned else "known",
        )
        for model in catalog.models.values()
    ]
    heads = "pair", "memory", "size", "on disk", "what it is"
    draw_table(output, heads, pairs, figures=("size", "memory"), prose=heads[-1])
    output.line()
    draw_table(output, ("model", "size", "on disk", "SHA-256"), models, figures=("size",))


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def show_verified(output: Output, checked: Sequence[tuple[Model, Sequence[Verified]]]) -> None:
    """One line for each file: its state, its model and its path. What to do about a damaged one is a warning."""
    if output.format == "json":
        output.data({"files": [{"model": model.name, **asdict(file)} for model, files in checked for file in files]})
    words = {"ok": "ok", "damaged": "damaged", "unknown": "no checksum"}
    for model, file in ((model, file) for model, files in checked for file in files):
        if output.format != "json":
            output.row(words[file.state], model.name, str(file.path))
        if file.state == "damaged":
            name = model.name
            again = "" if model.only_here else f"specllama models remove {name}; specllama models pull {name}"
            output.warn(f"{file.path} is damaged: its SHA-256 is {file.sha256}, expected {file.expected}", again)
    if not checked:
        output.note("no named model is on this machine")


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
        ("size", _model_size_text(model)),
        *((f"sha256 of {file.name}", file.sha256 or "recorded at the first download") for file in model.files),
        ("licence", model.licence),
        *([("original", model.original)] if model.original else []),
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
    output.line(f"default: --ctx-size {pair.defaults.n_ctx or f'up to {N_CTX}'}")
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        output.line(f"{role}:")
        show_model(output, model, "  ")
