"""From load options to numbers: context size, GPU layers, memory mapping."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from specllama.base.cpu import usable_cpus
from specllama.base.disk import size_text
from specllama.base.errors import UsageError
from specllama.base.ranges import AUTO
from specllama.base.text import counted
from specllama.files.gguf_header import TYPES, TensorInfo
from specllama.kernels.library import BUFFER_TYPE, COARSE, COARSE_ROWS, PACKED
from specllama.llama.header import EMBEDDING, HEAD, PLAIN_TYPES, Header, has_states, n_kept_states
from specllama.llama.memory import KV_TYPE_BYTES, MemoryNeed, fit_context, layers_that_fit, need_for, require_memory
from specllama.llama.rollback import KEPT, TRUNCATION, WAYS, WINDOW
from specllama.llama.ways import ASKED, WayBack, by_kind, possible

_GPU_RESERVE = 512 * 1024 * 1024  # a GPU also needs memory for its runtime and for the screen
_KV_BLOCKS = {each.name: each.n_values for each in TYPES.values() if each.name in KV_TYPE_BYTES}  # 1 = not quantized
# The most that the CPU's extra buffer types can hold; the CPU and the shape of each tensor decide.
_REPACKED_ANYWHERE = {"q1_0", "q2_k", "q4_0", "q4_k", "iq4_nl", "mxfp4"}
_REPACKED_ON_ARM = {"q5_k", "q6_k", "q8_0"}
_AMX = {"q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs"}
# llama.cpp's AMX kernels read uninitialized memory if a row is one block of 32: with MALLOC_PERTURB_=1 all logits of
# such a model are NaN (llama-cpp-python 0.3.36). Rows of 64 numbers are computed correctly.
AMX_SHORTEST_ROW = 64
MOST_LINES = 256  # of llama.cpp's sequences in a context
_TOLERATED_COPY = 0.1  # a file is mapped if at most this share is kept twice: it loads faster and is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model. Invalid values raise UsageError when the model is loaded."""

    n_ctx: int = 4096  # tokens; 0 = the model's own context, as far as memory allows
    n_batch: int = 512  # most tokens in one llama.cpp call
    n_ubatch: int = 512  # most tokens computed at once
    n_threads: int | None = None  # None = the physical cores
    n_threads_batch: int | None = None  # for more than one token at once; None = like n_threads
    n_gpu_layers: int | Literal["auto", "all"] = "auto"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: str = "f16"  # see memory.KV_TYPE_BYTES
    type_v: str = "f16"
    use_extra_bufts: bool = True  # llama.cpp rearranges weights for faster kernels
    kernels: bool = True  # our kernels for the weights that they take, where they are built and tested
    coarse_head: bool = False  # with our kernels, low logits may be inexact, as a draft's may: see kernels/README.md
    max_block: int = 33  # longest eval: the draft and the pending token
    max_leaves: int = 1  # most leaves of a tree; 1 = chains only
    use_mmap: bool | None = None  # None = unless that keeps weights twice
    rollback: str = AUTO  # of ROLLBACKS, for models that have it
    rollback_why: str = ASKED
    rpc: tuple[str, ...] = ()  # servers that compute layers: HOST:PORT

    @property
    def n_outputs(self) -> int:
        """Rows of logits that llama.cpp keeps room for: at least one for each sequence."""
        return max(self.max_block, self.max_leaves)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The GPU memory of the installed build."""

    supported: bool  # built with a GPU backend
    n_free: int  # bytes on all GPUs together
    shared: bool  # the GPU uses main memory (Apple silicon, integrated graphics)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The numbers a model is loaded with."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    n_gpu_layers: int  # the output layer counts as one
    on_gpu: float  # share of the model in memory that only the GPU has
    max_block: int
    n_lines: int  # llama.cpp's sequences, one for each leaf of a tree
    way_back: WayBack
    n_kept_states: int  # of recurrent layers before the last one, if the architecture keeps them
    use_mmap: bool
    use_extra_bufts: bool
    kernels: bool
    need: MemoryNeed
    warnings: tuple[str, ...]
    options: LoadOptions


def plan_load(header: Header, options: LoadOptions, *, free: int, gpu: GpuMemory, extra: tuple[str, ...]) -> LoadPlan:
    """The numbers for these options. `free` is main memory in bytes, `extra` the names of extra buffer types.

    Raises UsageError for invalid options and MemoryShort if the model does not fit.
    """
    check_options(header, options)
    wish: dict[str, Any] = {"type_k": options.type_k, "type_v": options.type_v, "n_outputs": options.n_outputs}
    wish |= {"flash_attn": options.flash_attn, "n_more": bytes_beyond_file(header, options, extra)}
    room = free + (gpu.n_free if _may_offload(options, gpu) and not gpu.shared else 0)
    ways = possible(header)
    asked = (options.rollback,) if options.rollback in ways else ()
    if options.max_leaves > 1:  # a cache of the window holds no trees
        ways = tuple(way for way in ways if way != WINDOW)
    smallest = (asked or tuple(way for way in ways if way == WINDOW) or ways)[0]
    n_ctx = options.n_ctx or fit_context(header, room, n_ubatch=options.n_ubatch, way_back=smallest, **wish)
    n_batch = min(options.n_batch, n_ctx)
    n_ubatch = min(options.n_ubatch, n_batch)
    needs = {way: need_for(header, n_ctx=n_ctx, n_ubatch=n_ubatch, way_back=way, **wish) for way in asked or ways}
    way_back = WayBack(asked[0], options.rollback_why) if asked else _way_back(needs, room)
    need = needs[way_back.way]
    n_gpu_layers = _gpu_layers(header, options, need, gpu)
    on_gpu = 0.0 if gpu.shared else n_gpu_layers / (header.n_layer + 1)
    require_memory(header.path.name, int(need.total * (1.0 - on_gpu)), free, n_ctx)
    n_threads = options.n_threads or physical_cores()
    return LoadPlan(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_threads=n_threads,
        n_threads_batch=options.n_threads_batch or n_threads,
        n_gpu_layers=n_gpu_layers,
        on_gpu=on_gpu,
        max_block=min(options.max_block, n_batch),
        n_lines=1 if has_states(header) or way_back.way == WINDOW else options.max_leaves,
        way_back=way_back,
        n_kept_states=n_kept_states(header, min(options.max_block, n_ubatch)) if way_back.way == KEPT else 0,
        use_mmap=_use_mmap(header, options, extra, n_gpu_layers),
        use_extra_bufts=options.use_extra_bufts and not _spoiled_by_amx(header, extra),
        kernels=options.kernels and BUFFER_TYPE in extra,
        need=need,
        warnings=_warnings(header, options, gpu, n_ctx),
        options=options,
    )


def n_copies_of_lines(n_swa: int) -> int:
    """Sequences of llama.cpp for a line in a cache of many texts. `n_swa`: its window, also if the file names none.

    A cell that one sequence holds, outside its window, counts as free in llama.cpp. So two hold it.
    """
    return 2 if n_swa else 1


def plan_slots(
    header: Header,
    loaded: LoadPlan,
    *,
    n_slots: int,
    n_ctx: int,
    max_rows: int,
    max_outputs: int,
    n_leaves: int,
    n_swa: int,
    free: int,
) -> LoadPlan:
    """The numbers of a second context on a loaded model, for `n_slots` texts of `n_ctx` tokens; see slots.py.

    Trees have fewer than `n_leaves` leaves if there are too many lines. Raises UsageError and MemoryShort.
    """
    for name, value, lowest in (("n_slots", n_slots, 1), ("n_ctx", n_ctx, 2), ("max_rows", max_rows, 1)):
        if value < lowest:
            raise UsageError(f"{name} is {value}, expected at least {lowest}")
    n_per_leaf = 2 * n_copies_of_lines(n_swa) * n_slots  # with one for spare cells
    if n_per_leaf > MOST_LINES:
        raise UsageError(
            f"{n_slots} requests at once were asked for, expected at most {n_slots * MOST_LINES // n_per_leaf}",
            hint="use fewer (--parallel)",
        )
    n_lines = n_per_leaf * min(n_leaves, MOST_LINES // n_per_leaf)
    n_cells, options = n_slots * n_ctx, loaded.options
    need = need_for(
        header,
        n_ctx=n_cells,
        n_ubatch=max_rows,
        n_outputs=max(max_outputs, n_lines),
        type_k=options.type_k,
        type_v=options.type_v,
        flash_attn=options.flash_attn,
    )
    need = replace(need, weights=0, vocabulary=0)
    what = f"{counted(n_slots, 'request')} at once"
    fewer = "fewer requests at once (--parallel)"
    require_memory(what, int(need.total * (1.0 - loaded.on_gpu)), free, n_ctx, fewer)
    return replace(
        loaded,
        n_ctx=n_cells,
        n_batch=n_cells,
        n_ubatch=max_rows,
        max_block=max_outputs,
        n_lines=n_lines,
        way_back=by_kind(TRUNCATION),
        need=need,
    )


def _way_back(needs: Mapping[str, MemoryNeed], room: int) -> WayBack:
    """The way to prefer, unless memory decides: a whole cache takes back any number of tokens, and serves trees."""
    first = next(iter(needs))
    if WINDOW not in needs:
        return by_kind(first)
    whole, window = needs[TRUNCATION], needs[WINDOW]
    sizes = f"the whole cache takes {size_text(whole.kv)}, that of the window {size_text(window.kv)}"
    if whole.total <= room or window.kv >= whole.kv:
        return WayBack(TRUNCATION, sizes)
    return WayBack(WINDOW, f"{sizes}; {size_text(room)} are free")


def _spoiled_by_amx(header: Header, extra: tuple[str, ...]) -> bool:
    return "AMX" in extra and 0 < header.shortest_row < AMX_SHORTEST_ROW


def physical_cores() -> int:
    """Physical cores that this process may use; a second thread on a core makes both slower."""
    usable = usable_cpus()
    return min(psutil.cpu_count(logical=False) or usable, usable)  # some containers and boards do not say


def thread_choices() -> tuple[int, ...]:
    """Thread counts to try: the physical cores, half of them, and the logical cores."""
    cores = physical_cores()
    return tuple(dict.fromkeys((cores, max(cores // 2, 1), usable_cpus())))


def check_options(header: Header, options: LoadOptions) -> None:
    """Raise UsageError for options that contradict each other or the model."""
    if options.n_ctx == 1:
        raise UsageError("the context is 1 token, expected at least 2")
    for name, lowest in (("n_ctx", 0), ("n_batch", 2), ("n_ubatch", 1), ("max_block", 1)):
        value = getattr(options, name)
        if not isinstance(value, int) or not lowest <= value < 1 << 31:
            raise UsageError(f"{name} is {value}, expected a whole number of at least {lowest}")
    if not 1 <= options.max_leaves <= MOST_LINES:
        raise UsageError(f"max_leaves is {options.max_leaves}, expected a whole number from 1 to {MOST_LINES}")
    for name in ("n_threads", "n_threads_batch"):
        value = getattr(options, name)
        if value is not None and not (isinstance(value, int) and 1 <= value <= 1024):
            raise UsageError(f"{name} is {value}, expected a whole number from 1 to 1024")
    if options.rollback not in (AUTO, *WAYS):
        raise UsageError(f"rollback is {options.rollback!r}, expected {AUTO}, {', '.join(WAYS)}")
    if options.flash_attn not in ("auto", "on", "off"):
        raise UsageError(f"flash_attn is {options.flash_attn!r}, expected on, off or auto")
    layers = options.n_gpu_layers
    if layers not in ("auto", "all") and not (isinstance(layers, int) and layers >= 0):
        raise UsageError(f"n_gpu_layers is {layers!r}, expected a number, auto or all")
    if _KV_BLOCKS.get(options.type_v, 1) > 1 and options.flash_attn == "off":
        raise UsageError(
            f"a V cache of type {options.type_v} needs flash attention", hint="leave out --flash-attn off, or use f16"
        )
    for kind, length in ((options.type_k, header.key_length), (options.type_v, header.value_length)):
        if length % (n := _KV_BLOCKS.get(kind, 1)):  # without flash attention llama.cpp aborts
            raise UsageError(
                f"the heads of {header.path.name} have {length} values "
                f"(a KV cache of type {kind} needs a multiple of {n})",
                hint="use f16",
            )


def _may_offload(options: LoadOptions, gpu: GpuMemory) -> bool:
    return gpu.supported and options.n_gpu_layers != 0


def _gpu_layers(header: Header, options: LoadOptions, need: MemoryNeed, gpu: GpuMemory) -> int:
    if not _may_offload(options, gpu):
        return 0
    n_all = header.n_layer + 1
    if options.n_gpu_layers == "auto":
        return layers_that_fit(header, need, gpu.n_free - _GPU_RESERVE)
    if options.n_gpu_layers == "all" or options.n_gpu_layers < 0:
        return n_all
    return min(options.n_gpu_layers, n_all)


def _use_mmap(header: Header, options: LoadOptions, extra: tuple[str, ...], n_gpu_layers: int) -> bool:
    """Map the file, unless rearranged weights would be a second copy beside the mapped pages.

    Our kernels take what they can first, and drop the pages that they have packed, except on Windows.
    """
    if options.use_mmap is not None:
        return options.use_mmap
    if n_gpu_layers > header.n_layer:
        return True
    twice = set(_rearranged(header, extra if options.use_extra_bufts else ()))
    if sys.platform != "win32" and BUFFER_TYPE in extra:
        twice -= PACKED.keys()
    return _bytes_of(header, twice) <= _TOLERATED_COPY * header.n_weight_bytes


def rearranged_bytes(header: Header, buffers: Sequence[str]) -> int:
    """Bytes of weights that these extra buffer types can hold, at most."""
    return _bytes_of(header, _rearranged(header, buffers))


def _bytes_of(header: Header, kinds: Collection[str]) -> int:
    return sum(size for kind, size in header.weight_bytes.items() if kind.lower() in kinds)


def bytes_beyond_file(header: Header, options: LoadOptions, extra: Sequence[str]) -> int:
    """The bytes of weights in memory that the file does not have.

    Packed weights may be larger. An output matrix that is also the token embedding is kept twice if it is rearranged.
    That of a draft has a coarse copy.
    """
    taken = _rearranged(header, extra if options.use_extra_bufts else ())
    weights = [each for file in header.files for each in file.tensors if len(each.shape) > 1]
    tied = not any(each.name == HEAD for each in weights)
    more = 0.0
    for each in weights:
        growth = taken.get(TYPES[each.kind].name.lower())
        if growth is not None and (each.name != EMBEDDING or tied):
            more += each.n_bytes * (growth if each.name == EMBEDDING else growth - 1.0)
            if each.name in (HEAD, EMBEDDING) and options.coarse_head and BUFFER_TYPE in extra:
                more += _coarse_copy(each, growth)
    return round(more)


def _coarse_copy(head: TensorInfo, growth: float) -> float:
    """Bytes of the coarse copy of a head, 0 if it has none; the rule is `Head::pays` in kernels/src/backend.cpp."""
    copy = COARSE * head.n_elements
    pays = head.shape[0] % 64 == 0 and head.shape[1] >= COARSE_ROWS and 1.5 * copy < growth * head.n_bytes
    return copy if pays else 0.0


def _rearranged(header: Header, buffers: Sequence[str]) -> Mapping[str, float]:
    """The types of weights that these extra buffer types may hold, and their bytes in parts of those in the file."""
    found: set[str] = set()
    for name in buffers:
        if name == "AMX":
            found |= _AMX
        elif name == "CPU_REPACK":
            found |= _REPACKED_ANYWHERE
            found |= set() if platform.machine().lower() in ("x86_64", "amd64") else _REPACKED_ON_ARM
        elif name != BUFFER_TYPE:
            found |= {kind.lower() for kind in header.weight_bytes if kind not in PLAIN_TYPES}
    return {**dict.fromkeys(found, 1.0), **(PACKED if BUFFER_TYPE in buffers else {})}


def _warnings(header: Header, options: LoadOptions, gpu: GpuMemory, n_ctx: int) -> tuple[str, ...]:
    found = []
    asked = options.n_gpu_layers
    if asked not in ("auto", 0) and not gpu.supported:
        found.append(
            f"-ngl {asked} has no effect: the installed llama.cpp is a CPU build. For a GPU build: "
            'CMAKE_ARGS="-DGGML_CUDA=on" (NVIDIA) or CMAKE_ARGS="-DGGML_METAL=on" (Apple), then '
            "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
        )
    if 0 < header.n_ctx_train < n_ctx:
        found.append(f"the context of {n_ctx} tokens is longer than the model was trained for ({header.n_ctx_train})")
    return tuple(found)
