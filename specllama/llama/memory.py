"""The memory that a model and its context need, calculated from the header, and the free memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from specllama.base.disk import size_text
from specllama.base.errors import MemoryShort, UsageError
from specllama.files.gguf_header import TYPES
from specllama.llama.header import Header, n_kept_states, state_bytes, window_layers
from specllama.llama.rollback import KEPT, MOST_SAVED, WINDOW

# The types of a KV cache: ggml's number, and bytes per number.
_BY_NAME = {each.name: (number, each.n_bytes / each.n_values) for number, each in TYPES.items()}
_KV_NAMES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KV_TYPE_NUMBERS = {name: _BY_NAME[name][0] for name in _KV_NAMES}
KV_TYPE_BYTES = {name: _BY_NAME[name][1] for name in _KV_NAMES}
CELL_STEP = 256  # llama.cpp rounds the number of KV cells up to a multiple of this
_TOKEN_BYTES = 350  # of a token in llama.cpp's tables of texts and merges; measured: 270 of 49,152 and 400 of 151,936
_MIN_FITTED_CTX = 512  # a smaller context is of no use: raise MemoryShort instead


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory of a loaded model, in bytes."""

    weights: int
    kv: int  # with the states of recurrent layers
    compute: int
    vocabulary: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute + self.vocabulary


def kv_bytes(header: Header, n_ctx: int, type_k: str, type_v: str, *, n_window: int = 0) -> int:
    """Size of the KV cache in bytes. `n_window`: cells of layers with a sliding window, 0 = those of the others."""
    n_cells = _whole(n_ctx)
    n_few = min(n_window or n_cells, n_cells)
    per_head = header.key_length * _type_bytes(type_k) + header.value_length * _type_bytes(type_v)
    layers = zip(header.n_head_kv, window_layers(header), strict=False)
    return int(per_head * sum(n_heads * (n_few if has_window else n_cells) for n_heads, has_window in layers))


def window_cells(header: Header, n_ubatch: int) -> int:
    """Cells of a cache of the window alone; 0 without such layers. As in `llama-kv-cache-iswa.cpp`."""
    return _whole(header.n_swa + n_ubatch) if any(window_layers(header)) else 0


def _whole(n_cells: int) -> int:
    return -(-n_cells // CELL_STEP) * CELL_STEP


def compute_bytes(header: Header, n_ctx: int, n_ubatch: int, n_outputs: int, flash_attn: str = "auto") -> int:
    """An estimate of the scratch memory of one forward pass, and of the output buffer.

    The widest layer and the residual stream, or the attention with the weights of all heads if `flash_attn` is "off".
    The logits of the output rows take their place at the end. Then the attention mask; and the logits once more in the
    output buffer. Without the last, which llama.cpp enlarges on demand, it is within 1 % of what llama.cpp reserves for
    SmolLM2 135M and Qwen2.5 0.5B and 1.5B (128 and 512 rows, 17 and 128 of them with logits, contexts of 512 to 8192),
    without flash attention within 5 %. For Gemma 3 270M it is up to 18 % below: the mask of the window is missing.
    """
    n_rows = min(n_ubatch, n_ctx)
    widest = n_rows * (3 * max(header.n_ff, 2 * header.n_embd) + 4 * header.n_embd) * 4
    mask = n_rows * n_ctx * 2
    if flash_attn == "off":
        widest = max(widest, n_rows * (header.n_head * n_ctx + 6 * header.n_embd) * 4)
        mask *= 2
    logits = n_outputs * header.n_vocab * 4
    return max(widest, logits) + mask + logits


def memory_free() -> int:
    """Bytes of main memory that are available without swapping."""
    return int(psutil.virtual_memory().available)


def need_for(
    header: Header,
    *,
    n_ctx: int,
    n_ubatch: int,
    n_outputs: int,
    type_k: str = "f16",
    type_v: str = "f16",
    n_more: int = 0,
    way_back: str = KEPT,
    flash_attn: str = "auto",
) -> MemoryNeed:
    """The memory of a model with a context of `n_ctx` tokens. `n_more`: bytes of weights beyond the file's."""
    # llama.cpp's own, the saved ones, and the place of the next.
    n_states = 2 + MOST_SAVED + (n_kept_states(header, min(n_outputs, n_ubatch)) if way_back == KEPT else 0)
    n_window = window_cells(header, n_ubatch) + header.n_swa if way_back == WINDOW else 0  # one window is saved
    return MemoryNeed(
        weights=header.n_weight_bytes + n_more,
        kv=kv_bytes(header, n_ctx, type_k, type_v, n_window=n_window) + n_states * state_bytes(header),
        compute=compute_bytes(header, n_ctx, n_ubatch, n_outputs, flash_attn),
        vocabulary=_TOKEN_BYTES * header.n_vocab,
    )


def fit_context(header: Header, free: int, **options: Any) -> int:
    """The longest context, up to the model's own, that fits into `free` bytes. `options` are those of `need_for`.

    Raises MemoryShort if none fits.
    """

    def total(n_ctx: int) -> int:
        return need_for(header, n_ctx=n_ctx, **options).total

    return longest_context(header.n_ctx_train or _MIN_FITTED_CTX, total, free, header.path.name)


def longest_context(longest: int, needed: Callable[[int], int], free: int, what: str) -> int:
    """The longest context, up to `longest`, for which `what` needs at most `free` bytes. Raises MemoryShort."""
    if needed(longest) <= free:
        return longest
    shortest = min(longest, _MIN_FITTED_CTX)
    require_memory(what, needed(shortest), free, shortest)
    low, high = shortest // CELL_STEP, longest // CELL_STEP  # bisect on whole steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle * CELL_STEP) <= free else (low, middle - 1)
    return max(low * CELL_STEP, shortest)


def layers_that_fit(header: Header, need: MemoryNeed, free: int) -> int:
    """The number of layers, with the output layer, that fit into `free` bytes of a GPU beside the compute buffer."""
    n_units = header.n_layer + 1
    per_unit = (need.weights + need.kv) / n_units
    return max(0, min(n_units, int((free - need.compute) // per_unit)))


def require_memory(what: str, needed: int, free: int, n_ctx: int, fewer: str = "smaller models") -> None:
    """Raise MemoryShort if a model, or several, do not fit into memory. `fewer`: what to use instead, for the hint."""
    if needed > free:
        raise MemoryShort(
            f"{size_text(needed)} are needed for {what} with a context of {n_ctx} tokens, "
            f"but only {size_text(free)} are free",
            hint=f"use a shorter context (--ctx-size), {fewer}, or close other programs",
        )


def _type_bytes(name: str) -> float:
    try:
        return KV_TYPE_BYTES[name]
    except KeyError:
        raise UsageError(f"the KV cache type is {name!r}, expected one of {', '.join(KV_TYPE_BYTES)}") from None
