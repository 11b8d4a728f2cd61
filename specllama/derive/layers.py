"""Leave out layers of a model (Draft & Verify, 2309.08168): which models bear it, and what of their files changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specllama.base.errors import UnsupportedModel, UsageError
from specllama.files import gguf_rewrite
from specllama.files.gguf_rewrite import SourceFile, SourceTensor
from specllama.llama.header import Header

# Architectures whose layers are all alike to llama.cpp. In others the place of a layer says what it does: which ones
# see a sliding window only, skip the rotation or are dense among experts; one layer less moves all of them.
ALIKE = frozenset(
    [
        "gemma",
        "granite",
        "internlm2",
        "llama",
        "olmo",
        "phi2",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen3moe",
        "stablelm",
        "starcoder2",
    ]
)
LEAST_LAYERS = 2  # what is left must be a model

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def refuse_undroppable(header: Header) -> None:
    """Raise UnsupportedModel where leaving out a layer would make the others compute something else."""
    hint = "derive a draft of it with --quant or --vocab"
    if header.n_swa:
        raise UnsupportedModel(
            f"{header.path.name} ({header.architecture}) has sliding windows in some of its layers, by their number: "
            "without one layer the others would get the wrong window",
            hint=hint,
        )
    if header.architecture not in ALIKE:
        raise UnsupportedModel(
            f"layers of the architecture {header.architecture} may depend on their number, so none can be left out",
            hint=hint,
        )


def check_dropped(header: Header, dropped: Sequence[int]) -> tuple[int, ...]:
    """`dropped` in order. Raises UsageError for layers that are not there, and UnsupportedModel."""
    refuse_undroppable(header)
    wrong = [layer for layer in dropped if not 0 <= layer < header.n_layer]
    if wrong:
        raise UsageError(
            f"there is no layer {wrong[0]} in {header.path.name}: its layers are 0 to {header.n_layer - 1}"
        )
    if len(set(dropped)) != len(dropped):
        twice = next(layer for layer in dropped if dropped.count(layer) > 1)
        raise UsageError(f"layer {twice} stands twice in the list of layers to leave out")
    if header.n_layer - len(dropped) < LEAST_LAYERS:
        raise UsageError(
            f"{len(dropped)} of {header.n_layer} layers cannot be left out: {LEAST_LAYERS} at least must stay"
        )
    return tuple(sorted(dropped))


def without_layers(
    source: SourceFile, header: Header, tensors: Sequence[SourceTensor], dropped: Sequence[int]
) -> tuple[Mapping[str, bytes | None], list[SourceTensor]]:
    """(metadata that changes, tensors that are left, the layers numbered anew).

    Arrays with an entry for each layer lose the same entries, which llama.cpp's own pruning forgets.
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
