"""Open models and contexts, own their C objects, and raise an error of ours with llama.cpp's reason."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter, sleep
from types import MappingProxyType
from typing import Any, TypeVar

from specllama.base.disk import FileRecord
from specllama.base.errors import BackendError, Interrupted, MemoryShort, ModelFileError, SpecllamaError
from specllama.core.types import Cancel
from specllama.llama import rpc
from specllama.llama.bindings import bindings, log, own_kernels
from specllama.llama.header import Header, not_left_to_right
from specllama.llama.load_plan import LoadPlan
from specllama.llama.memory import KV_TYPE_NUMBERS
from specllama.llama.rollback import WINDOW
from specllama.llama.vocab import token_records

T = TypeVar("T")
LoadProgress = Callable[[float], bool]  # receives the share that is loaded; False stops the loading

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_LOAD_READ, _LOAD_MMAP = 0, 1  # llama_load_mode
_LOOK_S = 0.05  # between two looks at a call that runs in another thread
_PATIENCE_S = 2.0  # a CPU back end stops within one graph node; others ignore the flag
# The last is said of a name that llama.cpp knows and whose graph it lacks.
_NOT_SUPPORTED = (
    "unknown pre-tokenizer", "unknown tokenizer", "unknown model architecture", "unsupported model architecture",
)  # fmt: skip
_ALLOCATION = ("allocate", "bad_alloc", "out of memory")
_UPDATE = "update specllama and llama-cpp-python, or choose another model"
_LESS_MEMORY = "use a shorter context (--ctx-size), a smaller model, or close other programs"
_NO_REASON = "no reason given"

# Stopped at exit. No WeakSet: an exception in its callbacks is lost.
_alive: set[Pointers] = set()
_running: dict[int, Cancel] = {}  # calls in threads of their own


@dataclass(slots=True, eq=False)
class Pointers:
    """The C objects of one model."""

    lib: Any  # the module llama_cpp
    model: int
    context: int | None = None
    in_call: bool = False  # llama.cpp is computing with them
    cancel: Cancel = field(default_factory=Cancel)  # stops the computation
    callbacks: list[object] = field(default_factory=list)  # objects that C may still call or read
    owner: Pointers | None = None  # of the model, if this is another context on it
    closed: bool = False


class Native:
    """Owns C objects and frees them exactly once: on `close` or on garbage collection."""

    pointers: Pointers
    records: Mapping[str, FileRecord] = MappingProxyType({})  # of `token_records`

    def __init__(self, lib: Any, model: int, owner: Native | None = None) -> None:
        self.pointers = Pointers(lib, model, owner=None if owner is None else owner.pointers)
        self._owner = owner  # must outlive this; closing it closes this
        self.close = weakref.finalize(self, _free, self.pointers)
        self.close.atexit = False
        _alive.add(self.pointers)


@dataclass(slots=True)
class _File:
    """A model file that is loaded."""

    about: Header
    params: Any  # llama.cpp's
    prepare: Callable[[], object] = lambda: None  # called before, in the same thread
    share: float = 0.0  # that is loaded


def load_model(about: Header, plan: LoadPlan, progress: LoadProgress | None, *, weights: bool = True) -> Native:
    """Load the model. Without `weights`, none are read. Raises as `load_models`."""
    return load_models([(about, plan)], progress, weights=weights)[0]


def load_models(
    models: Sequence[tuple[Header, LoadPlan]], progress: LoadProgress | None, *, weights: bool = True
) -> list[Native]:
    """Load the models at the same time, because a load often keeps one core busy. The first failure stops the others.

    Raises ModelFileError, MemoryShort, and Interrupted if `progress` returns False.
    """
    kernels, files = own_kernels(), list[_File]()
    local = rpc.local_devices() if rpc.is_used() else None
    for about, plan in models:
        params = bindings().llama_model_default_params()
        params.n_gpu_layers = plan.n_gpu_layers
        params.load_mode = _LOAD_MMAP if plan.use_mmap else _LOAD_READ
        params.use_extra_bufts = plan.use_extra_bufts
        params.no_alloc = not weights
        if local is not None and not plan.options.rpc:
            params.devices = ctypes.cast(local, ctypes.c_void_p)
        files.append(_File(about, params))
        if kernels is not None:
            files[-1].prepare = partial(
                kernels.enable,
                plan.n_threads if plan.kernels else 0,
                coarse_head=plan.options.coarse_head,
                is_mapped=plan.use_mmap,
            )
    return _load(files, progress)


def load_vocabulary_only(about: Header) -> Native:
    """Load the vocabulary without weights. Raises ModelFileError."""
    params = bindings().llama_model_default_params()
    params.vocab_only = True
    return _load([_File(about, params)], None)[0]


def refuse_kind(native: Native, about: Header) -> None:
    """`header.refuse_architecture`, by llama.cpp's answers instead of names. Raises UnsupportedModel."""
    lib, model = native.pointers.lib, native.pointers.model
    if lib.llama_model_is_diffusion(model):
        raise not_left_to_right(about.path, "a diffusion model", about.architecture)
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        raise not_left_to_right(about.path, "a model with an encoder", about.architecture)


def open_context(native: Native, about: Header, plan: LoadPlan) -> None:
    """Open a context on a loaded model, in place of that it has. Raises MemoryShort and BackendError."""
    lib = native.pointers.lib
    _free_context(native.pointers)
    params = lib.llama_context_default_params()
    params.n_ctx = plan.n_ctx
    params.n_batch = plan.n_batch
    params.n_ubatch = plan.n_ubatch
    params.n_seq_max = plan.n_lines
    params.n_rs_seq = plan.n_kept_states
    # A decode with more rows ends the process; so does a context for more sequences than rows.
    params.n_outputs_max = max(plan.max_block, plan.n_lines)
    params.n_threads = plan.n_threads
    params.n_threads_batch = plan.n_threads_batch
    params.flash_attn_type = _FLASH_ATTN[plan.options.flash_attn]
    params.type_k = KV_TYPE_NUMBERS[plan.options.type_k]
    params.type_v = KV_TYPE_NUMBERS[plan.options.type_v]
    params.kv_unified = True
    params.swa_full = plan.way_back.way != WINDOW
    params.no_perf = True
    log.clear()
    native.pointers.context = lib.llama_init_from_model(native.pointers.model, params)
    if native.pointers.context:
        return
    reason = log.reason() or _NO_REASON
    if _contains(reason, _ALLOCATION):
        raise MemoryShort(
            f"there is not enough memory for a context of {plan.n_ctx} tokens: {reason}", hint=_LESS_MEMORY
        )
    raise BackendError(f"llama.cpp cannot open a context on {about.path.name}: {reason}")


def describe(native: Native, n_params: int) -> str:
    """llama.cpp's one-line description, such as `qwen2 1.54B Q4_K - Medium`, with the true number of parameters.

    llama.cpp takes the number from the count of layers: another model's.
    """
    buffer = ctypes.create_string_buffer(256)
    native.pointers.lib.llama_model_desc(native.pointers.model, buffer, len(buffer))
    architecture, _, kind = buffer.value.decode("utf-8", "replace").split(" ", 2)
    size = f"{n_params / 1e9:.3g}B" if n_params >= 999.5e6 else f"{n_params / 1e6:.3g}M"
    return f"{architecture} {size} {kind}"


def apart(call: Callable[[], T], look: Callable[[], None], stop: Cancel) -> T:
    """The result of `call()`, made in another thread; `look` is called many times a second, and once after its end.

    Python runs signal handlers in the main thread only, so none runs while llama.cpp calls back in the other thread.
    An exception of a handler or of `look` sets `stop` and is raised after the call. A second one is raised at once.
    """
    task, outcome, done = [call], list[tuple[T | None, BaseException | None]](), SimpleQueue[None]()

    def work() -> None:
        _running[id(task)] = stop
        try:
            outcome.append((task.pop()(), None))
        except BaseException as error:
            outcome.append((None, error))
        del _running[id(task)]
        done.put(None)

    def wait() -> None:
        with contextlib.suppress(Empty):
            done.get(timeout=_LOOK_S)

    try:
        start_new_thread(work, ())  # not a Thread: an exception in the middle of its `start` leaves it half started
        ended = False
        while not ended:
            wait()
            ended = bool(outcome)  # before `look`, which therefore sees the end of the fastest call
            look()
    except BaseException:
        stop.set()
        begun = True
        with contextlib.suppress(IndexError):
            task.pop()
            begun = False
        while begun and not outcome:
            wait()
        raise
    result, error = outcome.pop()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _load(files: Sequence[_File], progress: LoadProgress | None) -> list[Native]:
    lib, stop, failed = bindings(), Cancel(), list[tuple[Header, BaseException | None]]()
    natives = dict[int, Native]()  # not in the files, which their callbacks keep in a cycle
    n_bytes = sum(file.about.n_file_bytes for file in files)

    def load(index: int) -> None:
        file = files[index]

        def report(share: float, _user_data: object) -> bool:
            file.share = share
            return not stop.is_set()

        error = None
        try:
            file.params.progress_callback = lib.llama_progress_callback(report)
            file.prepare()
            records = token_records(lib, file.about)
            if model := lib.llama_model_load_from_file(os.fsencode(file.about.path), file.params):
                natives[index] = Native(lib, model)
                natives[index].records = records
        except BaseException as caught:
            error = caught
        if index not in natives:
            failed.append((file.about, error))
            stop.set()

    def load_all() -> None:
        with contextlib.ExitStack() as started:
            for index in range(1, len(files)):
                other = Thread(target=load, args=(index,), daemon=True)
                other.start()
                started.callback(other.join)
            load(0)

    def look() -> None:
        log.read()
        share = sum(file.share * file.about.n_file_bytes for file in files) / n_bytes
        if progress is not None and progress(share) is False:
            names = " and ".join(file.about.path.name for file in files)
            raise Interrupted(f"loading {names} was stopped on request")

    log.clear()
    try:
        apart(load_all, look, stop)
        if failed:
            about, error = failed[0]
            raise error or _load_failure(about, log.reason() or _NO_REASON, lib.__version__)
        return [natives[index] for index in range(len(files))]
    except BaseException:
        for native in list(natives.values()):
            native.close()
        raise


def _load_failure(about: Header, reason: str, version: str) -> SpecllamaError:
    if _contains(reason, _NOT_SUPPORTED):
        return ModelFileError(f"llama-cpp-python {version} does not support {about.path}: {reason}", hint=_UPDATE)
    if _contains(reason, _ALLOCATION):
        return MemoryShort(f"there is not enough memory to load {about.path.name}: {reason}", hint=_LESS_MEMORY)
    return ModelFileError(
        f"llama.cpp cannot load {about.path}: {reason}", hint="the file may be damaged: download it again"
    )


def _contains(reason: str, words: tuple[str, ...]) -> bool:
    return any(word in reason for word in words)


def _waited(cancel: Cancel, is_busy: Callable[[], bool]) -> bool:
    """Set `cancel` and wait for the end of a call; False if it takes too long."""
    give_up_s = perf_counter() + _PATIENCE_S
    while is_busy():
        cancel.set()
        if perf_counter() > give_up_s:
            return False
        sleep(0.002)
    return True


def _stop(pointers: Pointers) -> bool:
    return _waited(pointers.cancel, lambda: pointers.in_call)


def _free(pointers: Pointers) -> None:
    pointers.closed = True  # before the look at `in_call`: a call uses the other order
    others = [each for each in _alive if each.owner is pointers]
    for other in others:
        _free(other)
    if pointers not in _alive or not _alive.isdisjoint(others) or not _stop(pointers):
        return  # a leak is better than a crash
    _alive.discard(pointers)
    _free_context(pointers)
    if pointers.owner is None:
        pointers.lib.llama_model_free(pointers.model)


def _free_context(pointers: Pointers) -> None:
    context, pointers.context = pointers.context, None
    if context is not None:
        pointers.lib.llama_free(context)


def _leave() -> None:
    """At exit, stop all calls before C++ unloads its libraries.

    The system frees the memory, and a thread may still read logits, so only a GPU's objects are freed here.
    """
    for call, stop in list(_running.items()):
        _waited(stop, partial(_running.__contains__, call))
    for pointers in list(_alive):
        if (
            _waited(pointers.cancel, partial(getattr, pointers, "in_call"))
            and pointers.lib.llama_supports_gpu_offload()
        ):
            _free(pointers)


atexit.register(_leave)
