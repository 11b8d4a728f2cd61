"""Leave layers out of a model (Draft & Verify, arXiv 2309.08168)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specllama.base.errors import UnsupportedModel, UsageError
from specllama.files import gguf_rewrite
from specllama.files.gguf_rewrite import SourceFile, SourceTensor
from specllama.llama.header import Header

# Architectures whose layers are all alike to llama.cpp. In others the number of a layer decides whether it has a
# sliding window, a rotation or experts; leaving one out would move all others.
ALIKE = frozenset({
    "gemma", "granite", "internlm2", "llama", "olmo", "phi2", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "stablelm",
    "starcoder2",
})  # fmt: skip
_LEAST_LAYERS = 2

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def refuse_undroppable(header: Header) -> None:
    """Raise UnsupportedModel if a layer cannot be left out without changing what the others compute."""
    reason = ""
    if header.n_swa:
        reason = f"{header.path.name} ({header.architecture}) has sliding windows in some layers, chosen by number"
    elif header.architecture not in ALIKE:
        reason = f"layers of the architecture {header.architecture} may depend on their number"
    if reason:
        raise UnsupportedModel(f"{reason}: none can be left out", hint="derive a draft with --quant or --vocab")


def check_dropped(header: Header, dropped: Sequence[int]) -> tuple[int, ...]:
    """`dropped` in order. Raises UsageError for wrong numbers, and as `refuse_undroppable`."""
    refuse_undroppable(header)
    ordered, n_layer = tuple(sorted(dropped)), header.n_layer
    for i, layer in enumerate(ordered):
        if not 0 <= layer < n_layer:
            raise UsageError(f"{header.path.name} has no layer {layer} (expected 0 to {n_layer - 1})")
        if layer in ordered[:i]:
            raise UsageError(f"layer {layer} is listed twice")
    if n_layer - len(ordered) < _LEAST_LAYERS:
        raise UsageError(f"{len(ordered)} of {n_layer} layers cannot be left out: at least {_LEAST_LAYERS} must stay")
    return ordered


def without_layers(
    source: SourceFile, header: Header, tensors: Sequence[SourceTensor], dropped: Sequence[int]
) -> tuple[Mapping[str, bytes | None], list[SourceTensor]]:
    """(changed metadata, remaining tensors with new layer numbers).

    Arrays with an entry per layer lose the same entries; llama.cpp's own pruning leaves them whole.
    """
    prefix, kept = f"{header.architecture}.", [n for n in range(header.n_layer) if n not in set(dropped)]
    values: dict[str, bytes | None] = {f"{prefix}block_count": gguf_rewrite.u32(len(kept))}
    for key in source.header.entries:
        if key.startswith(prefix) and source.header.count(key) == header.n_layer:
            values[key] = gguf_rewrite.picked(source.header, key, np.array(kept))
    number = {old: new for new, old in enumerate(kept)}
    left = []
    for tensor in tensors:
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            left.append(tensor)
        elif int(match[1]) in number:
            left.append(replace(tensor, name=f"blk.{number[int(match[1])]}.{match[2]}"))
    return values, left
