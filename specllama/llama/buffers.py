"""Which weights of a file fit into which extra buffer type, and the overrides that put them there.

llama.cpp answers by the type and shape of a weight; no weights are read.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specllama.base.errors import BackendError
from specllama.files.gguf_header import TYPES, TensorInfo
from specllama.llama.bindings import ExtraBuffer, extra_buffers, symbol
from specllama.llama.header import Header
from specllama.llama.kernel_path import KernelPath, Matrix
from specllama.llama.load_plan import AMX_SHORTEST_ROW

# Weights that llama.cpp uses in matrix products only, in every architecture. Other operations (row look-up,
# convolution) would read a rearranged weight wrongly, so no other weight is ever placed.
_IN_LAYERS = (
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_gate", "attn_q_a", "attn_q_b", "attn_kv_a_mqa",
    "attn_kv_b", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
_LAYER_NAME = re.compile(rf"blk\.(\d+)\.({'|'.join(_IN_LAYERS)})\.weight")
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_F32 = 0  # ggml's number of the type
_N_ROWS = 512  # of the other factor, as in llama.cpp's own check


class _ContextParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def matrices(header: Header) -> tuple[Matrix, ...]:
    """The matrices of a model file, and which extra buffer types can hold each."""
    buffers = extra_buffers()
    weights = [each for file in header.files for each in file.tensors if _is_matrix(each)]
    tied = not any(weight.name == _HEAD for weight in weights)
    return tuple(
        Matrix(
            name=weight.name,
            kind=TYPES[weight.kind].name,
            n_bytes=weight.n_bytes,
            fits=tuple(each.name for each in buffers if _fits(each, weight.kind, *weight.shape[:2])),
            placeable=weight.name != _EMBEDDING,
        )
        for weight in weights
        if weight.name == _HEAD or _LAYER_NAME.fullmatch(weight.name) or (tied and weight.name == _EMBEDDING)
    )


def _is_matrix(tensor: TensorInfo) -> bool:
    shape = tensor.shape
    return tensor.kind != _F32 and len(shape) > 1 and shape[1] > 1 and all(n == 1 for n in shape[2:])


def overrides(header: Header, path: KernelPath) -> Any:
    """llama.cpp's overrides for loading: an array of patterns and buffer types, ended by nulls; None for none.

    Keep it alive while the model is. Raises BackendError for a missing buffer type, or one that can hold no weight.
    """
    if not path.placed:
        return None
    handles = {each.name: each.handle for each in extra_buffers()}
    for kind, buffer in path.placed:
        if buffer not in handles:
            there = ", ".join(handles) or "none"
            raise BackendError(
                f"{kind.upper()} weights cannot be stored in {buffer} (this build of llama.cpp has {there})",
                hint="run `specllama tune` again",
            )
    names: dict[str, list[str]] = {}
    found = matrices(header)
    for matrix in found:
        if matrix.placeable and (buffer := path.buffer_of(matrix)) and (matrix.kind, buffer) in path.placed:
            names.setdefault(buffer, []).append(matrix.name)
    for kind, buffer in path.placed:
        if not any(matrix.kind == kind and path.buffer_of(matrix) == buffer for matrix in found if matrix.placeable):
            raise BackendError(
                f"{header.path.name} has no {kind.upper()} weights that {buffer} can hold",
                hint="run `specllama tune` again",
            )
    orders = [(pattern, handles[buffer]) for buffer, several in names.items() for pattern in patterns(several)]
    array = (_Override * (len(orders) + 1))()
    for index, (pattern, handle) in enumerate(orders):
        array[index] = _Override(pattern.encode(), handle)
    return array


def patterns(names: Sequence[str]) -> list[str]:
    """Regular expressions that match these names of matrices and no others.

    One per kind of matrix, since llama.cpp compiles every pattern again for every tensor.
    """
    layers: dict[str, list[str]] = {}
    whole = []
    for name in names:
        if in_layer := _LAYER_NAME.fullmatch(name):
            layers.setdefault(in_layer[2], []).append(in_layer[1])
        else:
            whole.append(f"^{re.escape(name)}$")
    return [rf"^blk\.({'|'.join(numbers)})\.{matrix}\.weight$" for matrix, numbers in layers.items()] + whole


@contextmanager
def _room() -> Iterator[int]:
    """A ggml context for tensors without data."""
    size = 8 * symbol("ggml_tensor_overhead", ctypes.c_size_t)()
    context = symbol("ggml_init", ctypes.c_void_p, _ContextParams)(_ContextParams(size, None, True))
    if not context:
        raise BackendError("llama.cpp is out of memory")
    try:
        yield context
    finally:
        symbol("ggml_free", None, ctypes.c_void_p)(context)


@functools.cache
def _fits(buffer: ExtraBuffer, kind: int, n_in: int, n_out: int) -> bool:
    """True if the buffer type can hold and multiply a matrix of this type and shape, as llama.cpp checks on loading.

    The buffer is as large as the weight, but nothing is written to it, so it takes almost no memory.
    """
    if buffer.name == "AMX" and n_in < AMX_SHORTEST_ROW:
        return False
    new = symbol("ggml_new_tensor_2d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    place = symbol("ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    multiply = symbol("ggml_mul_mat", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    supports = symbol("ggml_backend_dev_supports_op", ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)
    with _room() as held, _room() as work:
        weight = new(held, kind, n_in, n_out)
        memory = place(held, buffer.handle)
        if not memory:
            return False
        try:
            return bool(supports(buffer.device, multiply(work, weight, new(work, _F32, n_in, _N_ROWS))))
        finally:
            symbol("ggml_backend_buffer_free", None, ctypes.c_void_p)(memory)
