"""The compiled kernels in this process: load the library and hand it the functions of ggml that it needs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specllama.base.errors import BackendError

BUFFER_TYPE = "SPECLLAMA"  # the name of the buffer type of packed weights
# The types of weights that are packed, and their bytes in parts of those in the file: a test compares them with the
# library's.
PACKED = {
    "f32": 1.0, "f16": 1.0, "bf16": 1.0, "q4_0": 1.0, "q4_1": 1.0, "q5_0": 1.0, "q5_1": 1.0, "q8_0": 1.0,
    "q2_k": 1.1905, "q3_k": 1.0364, "q4_k": 1.0278, "q5_k": 1.0227, "q6_k": 1.0, "iq4_nl": 1.0, "iq4_xs": 1.0147,
}  # fmt: skip
COARSE = 18 / 64  # bytes a weight in the coarse copy of a draft's head
COARSE_ROWS = 4096  # a smaller head has none
ISA_VARIABLE = "SPECLLAMA_ISA"  # an environment variable that names the instruction set; for tests and benchmarks

# The functions of ggml that the kernels call, in the order of `Host` in src/ggml_private.h.
HOST_FUNCTIONS = (
    "_Z39ggml_backend_cpu_get_extra_buffer_typesv", "ggml_barrier", "ggml_threadpool_chunk_set",
    "ggml_threadpool_chunk_add", "ggml_backend_buffer_init", "ggml_backend_buft_is_host", "ggml_tensor_overhead",
    "ggml_type_name", "ggml_type_size", "ggml_blck_size", "ggml_op_name", "ggml_backend_dev_backend_reg",
    "ggml_compute_forward_flash_attn_ext", "ggml_get_type_traits",
)  # fmt: skip


class _Host(ctypes.Structure):
    _fields_ = (
        *((f"function_{index}", ctypes.c_void_p) for index in range(len(HOST_FUNCTIONS))),
        ("cpu", ctypes.c_void_p),
    )


class Kernels:
    """The library, attached to llama.cpp's CPU back end."""

    def __init__(self, library: Any, isa: str) -> None:
        self._library = library
        library.specllama_kernels_packed.restype = ctypes.c_int64
        self.isa = isa  # the instruction set: "avx2", "avxvnni" or "avx512vnni"

    def enable(self, n_threads: int, *, coarse_head: bool = False, is_mapped: bool = False) -> None:
        """Pack the weights of models that this thread loads from now on with so many threads; 0: leave them to
        llama.cpp.

        `coarse_head`: logits may be inexact where they are low, as a draft's may be. `is_mapped`: llama.cpp maps the
        files, so the pages of packed weights leave this process.
        """
        self._library.specllama_kernels_enable(n_threads, int(coarse_head), int(is_mapped))

    @property
    def n_packed(self) -> int:
        """Weights that were packed so far. From the first one on, attention is ours as well, in every model.

        Not from `attach` on, which also precedes `--kernels off`: that is llama.cpp's own path. So no other thread may
        compute with a model while the first one with our kernels is loaded.
        """
        return int(self._library.specllama_kernels_packed())


def attach(path: Path, functions: Mapping[str, int], cpu: int) -> Kernels:
    """Load the library and add its buffer type to the CPU's. Before llama.cpp first lists its buffer types.

    `functions` has the addresses of HOST_FUNCTIONS, `cpu` is ggml's handle of the CPU. The instruction set is the best,
    or the one in ISA_VARIABLE. Raises BackendError if the library cannot be loaded or does not fit.
    """
    try:
        library = ctypes.CDLL(str(path))
        entry = library.specllama_kernels_attach
    except (OSError, AttributeError) as error:
        raise BackendError(f"the kernels cannot be loaded: {error}") from error
    host = _Host(*(functions[name] for name in HOST_FUNCTIONS), cpu)
    entry.restype = ctypes.c_char_p
    entry.argtypes = [ctypes.POINTER(_Host), ctypes.POINTER(ctypes.c_char_p)]
    reason = ctypes.c_char_p()
    found = entry(ctypes.byref(host), ctypes.byref(reason))
    if not found:
        raise BackendError(f"the kernels cannot be used: {(reason.value or b'').decode()}")
    return Kernels(library, found.decode())


def self_test(path: Path, isa: str = "") -> str:
    """Compare the library with plain C++, in this process. `isa`: as in `attach`, one, or "all" that the CPU has.

    Returns what is wrong; empty if nothing is.
    """
    try:
        test = ctypes.CDLL(str(path)).specllama_kernels_self_test
    except (OSError, AttributeError) as error:
        return f"the library cannot be loaded: {error}"
    test.restype, test.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    return (test(isa.encode() or None) or b"").decode()
