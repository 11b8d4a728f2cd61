"""Open models and contexts, own their C objects, and raise an error of ours with llama.cpp's reason."""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

from specllama.base.errors import BackendError, Interrupted, MemoryShort, ModelFileError, SpecllamaError
from specllama.core.types import Cancel
from specllama.llama.bindings import bindings, log
from specllama.llama.header import Header, cannot_roll_back, not_left_to_right, refuse_architecture
from specllama.llama.load_plan import LoadOptions, LoadPlan
from specllama.llama.memory import KV_TYPE_NUMBERS

LoadProgress = Callable[[float], bool]  # receives the share that is loaded; False stops the loading

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_LOAD_READ, _LOAD_MMAP = 0, 1  # llama_load_mode
_PATIENCE_S = 2.0  # a CPU back end stops within one graph node; others ignore the flag
_NEWER_FILE = ("unknown model architecture", "unknown pre-tokenizer", "unknown tokenizer")
_ALLOCATION = ("allocate", "bad_alloc", "out of memory")
_UPDATE = "the file is newer than the bindings: update specllama and llama-cpp-python"
_LESS_MEMORY = "use a shorter context (--ctx-size), a smaller model, or close other programs"
_NO_REASON = "no reason given"

_alive: weakref.WeakSet[Native] = weakref.WeakSet()  # stopped at exit


@dataclass(slots=True)
class Pointers:
    """The C objects of one model."""

    lib: Any  # the module llama_cpp
    model: int
    context: int | None = None
    batch: Any = None
    in_call: bool = False  # llama.cpp is computing with them
    cancel: Cancel = field(default_factory=Cancel)  # stops the computation
    callbacks: list[object] = field(default_factory=list)  # objects that C may still call or read
    overrides: Any = None


class Native:
    """Owns C objects and frees them exactly once: on `close` or on garbage collection."""

    def __init__(self, lib: Any, model: int) -> None:
        self.pointers = Pointers(lib, model)
        self.close = weakref.finalize(self, _free, self.pointers)
        self.close.atexit = False
        _alive.add(self)


def load_model(about: Header, plan: LoadPlan, progress: LoadProgress | None, overrides: Any = None) -> Native:
    """Load the weights; `overrides` (see buffers.py) may place some of them.

    Raises ModelFileError, MemoryShort, and Interrupted if `progress` returns False.
    """
    params = bindings().llama_model_default_params()
    params.n_gpu_layers = plan.n_gpu_layers
    params.load_mode = _LOAD_MMAP if plan.use_mmap else _LOAD_READ
    params.use_extra_bufts = plan.use_extra_bufts
    if overrides is not None:
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    native = _load(about, params, progress)
    native.pointers.overrides = overrides  # the model keeps this address in its parameters
    return native


def load_vocabulary_only(about: Header) -> Native:
    """Load the vocabulary without weights. Raises ModelFileError and UnsupportedModel."""
    refuse_architecture(about)
    params = bindings().llama_model_default_params()
    params.vocab_only = True
    return _load(about, params, None)


def refuse_kind(native: Native, about: Header) -> None:
    """`header.refuse_architecture`, by llama.cpp's answers instead of names. Raises UnsupportedModel."""
    lib, model = native.pointers.lib, native.pointers.model
    if lib.llama_model_is_recurrent(model):
        raise cannot_roll_back(about.path, "a recurrent model", about.architecture)
    if lib.llama_model_is_hybrid(model):
        raise cannot_roll_back(about.path, "a model with recurrent layers", about.architecture)
    if lib.llama_model_is_diffusion(model):
        raise not_left_to_right(about.path, "a diffusion model", about.architecture)
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        raise not_left_to_right(about.path, "a model with an encoder", about.architecture)


def open_context(native: Native, about: Header, plan: LoadPlan, options: LoadOptions) -> None:
    """Open a context for one sequence on a loaded model. Raises MemoryShort and BackendError."""
    lib = native.pointers.lib
    params = lib.llama_context_default_params()
    params.n_ctx = plan.n_ctx
    params.n_batch = plan.n_batch
    params.n_ubatch = plan.n_ubatch
    params.n_seq_max = 1
    params.n_outputs_max = plan.max_block  # a decode with more rows ends the process
    params.n_threads = plan.n_threads
    params.n_threads_batch = plan.n_threads_batch
    params.flash_attn_type = _FLASH_ATTN[options.flash_attn]
    params.type_k = KV_TYPE_NUMBERS[options.type_k]
    params.type_v = KV_TYPE_NUMBERS[options.type_v]
    params.kv_unified = True
    params.swa_full = True  # a cache of the window alone cannot be rolled back across its edge
    params.no_perf = True
    log.clear()
    native.pointers.context = lib.llama_init_from_model(native.pointers.model, params)
    log.raise_interrupt()
    if native.pointers.context:
        return
    reason = log.reason() or _NO_REASON
    if _contains(reason, _ALLOCATION):
        raise MemoryShort(
            f"there is not enough memory for a context of {plan.n_ctx} tokens: {reason}", hint=_LESS_MEMORY
        )
    raise BackendError(f"llama.cpp cannot open a context on {about.path.name}: {reason}")


def describe(native: Native) -> str:
    """llama.cpp's one-line description, such as `qwen2 1.5B Q4_K - Medium`."""
    buffer = ctypes.create_string_buffer(256)
    native.pointers.lib.llama_model_desc(native.pointers.model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def _load(about: Header, params: Any, progress: LoadProgress | None) -> Native:
    lib = bindings()
    stopped: list[BaseException | None] = []  # the error that stopped the loading; None = `progress` returned False

    def report(done: float, _user_data: object) -> bool:
        try:
            go_on = progress is None or progress(done) is not False
        except BaseException as error:  # cannot pass C frames; raised again below
            stopped.append(error)
            return False
        if not go_on:
            stopped.append(None)
        return go_on

    callback = lib.llama_progress_callback(report)
    params.progress_callback = callback
    log.clear()
    model = lib.llama_model_load_from_file(os.fsencode(about.path), params)
    native = Native(lib, model) if model else None
    log.raise_interrupt()
    if native is not None:
        return native
    if stopped:
        raise stopped[0] or Interrupted(f"loading {about.path.name} was stopped on request")
    raise _load_failure(about, log.reason() or _NO_REASON, lib.__version__)


def _load_failure(about: Header, reason: str, version: str) -> SpecllamaError:
    if _contains(reason, _NEWER_FILE):
        return ModelFileError(f"llama-cpp-python {version} does not support {about.path}: {reason}", hint=_UPDATE)
    if _contains(reason, _ALLOCATION):
        return MemoryShort(f"there is not enough memory to load {about.path.name}: {reason}", hint=_LESS_MEMORY)
    return ModelFileError(
        f"llama.cpp cannot load {about.path}: {reason}", hint="the file may be damaged: download it again"
    )


def _contains(reason: str, words: tuple[str, ...]) -> bool:
    return any(word in reason for word in words)


def _stop(pointers: Pointers) -> bool:
    give_up_s = perf_counter() + _PATIENCE_S
    while pointers.in_call:
        pointers.cancel.set()
        if perf_counter() > give_up_s:
            return False
        sleep(0.002)
    return True


def _free(pointers: Pointers) -> None:
    if not _stop(pointers):
        return  # a leak is better than a crash
    if pointers.batch is not None:
        pointers.lib.llama_batch_free(pointers.batch)
    if pointers.context is not None:
        pointers.lib.llama_free(pointers.context)
    pointers.lib.llama_model_free(pointers.model)


def _leave() -> None:
    """At exit, stop all computations before C++ unloads its libraries.

    The system frees the memory, and a thread may still read logits, so only a GPU's objects are freed here.
    """
    for native in list(_alive):
        if _stop(native.pointers) and native.pointers.lib.llama_supports_gpu_offload():
            native.close()


atexit.register(_leave)
