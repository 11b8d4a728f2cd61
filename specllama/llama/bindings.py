"""Functions of llama.cpp that llama-cpp-python does not bind: devices, buffer types, C callbacks, the log.

Each symbol is looked up on first use; a missing one disables only the functions that need it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specllama.base.errors import BackendError
from specllama.kernels.library import BUFFER_TYPE, HOST_FUNCTIONS, Kernels, attach
from specllama.llama import crash_test, library_hash, tested_kernels
from specllama.llama.log import LogBook

log = LogBook()
_keep_alive: list[object] = []  # callbacks that llama.cpp may call until the process ends


@functools.cache
def bindings() -> Any:
    """The module llama_cpp, imported once, with its log redirected and its back ends loaded. Raises BackendError.

    A child process has used this build before, since a damaged or miscompiled one ends the process.
    """
    crash_test.require_working()
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendError(
            f"the llama.cpp bindings cannot be loaded: {error}",
            hint="pip install --force-reinstall --no-cache-dir llama-cpp-python; then: specllama doctor",
        ) from error
    _route_log(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _route_log(lib: Any) -> None:
    """Send llama.cpp's log to the log book; at exit to a C function, since Python can no longer be called then."""
    receive = ctypes.cast(log.receive, lib.llama_log_callback)
    # abs(level) reads one integer and has no effect: a ready-made C function that drops the log.
    silent = ctypes.cast(_c_library().abs, lib.llama_log_callback)
    _keep_alive.extend((receive, silent))
    lib.llama_log_set(receive, None)
    atexit.register(lib.llama_log_set, silent, None)


def _c_library() -> Any:
    return ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)


def abort_callback(lib: Any) -> Any:
    """libc's strlen as a callback: true while the C string is not empty.

    llama.cpp calls it once per graph node from its own thread; strlen needs neither the GIL nor Python code. llama.cpp
    reads only the low byte of the length; our strings have at most one character.
    """
    return ctypes.cast(_c_library().strlen, lib.ggml_abort_callback)


@functools.cache
def symbol(name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
    """A function of libllama or the ggml libraries beside it. Raises BackendError if no library has it."""
    for library in _libraries():
        with contextlib.suppress(AttributeError):
            function = library[name]  # a new function object: the bindings' prototypes stay unchanged
            function.restype, function.argtypes = restype, list(argtypes)
            return function  # type: ignore[no-any-return]
    raise BackendError(
        f"the installed llama.cpp has no function {name}", hint="pip install --force-reinstall specllama"
    )


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """libllama first: on Linux and macOS a look-up there also searches its dependencies; Windows needs each by name."""
    lib = bindings()
    found = [lib.llama_cpp._lib]
    for path in library_paths():
        if "ggml" in path.name and path.suffix in (".so", ".dylib", ".dll"):
            with contextlib.suppress(OSError):
                found.append(ctypes.CDLL(str(path)))
    return tuple(found)


def library_paths() -> tuple[Path, ...]:
    """The llama and ggml libraries of the installed bindings, without the links with version numbers."""
    folder = Path(bindings().llama_cpp._base_path)
    return tuple(
        path
        for path in sorted(folder.glob("*"))
        if path.suffix in (".so", ".dylib", ".dll") and any(word in path.name for word in ("llama", "ggml"))
    )


_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}


@dataclass(frozen=True, slots=True)
class Device:
    """A device that llama.cpp can compute on."""

    name: str  # "CPU", "CUDA0", "Metal"
    kind: str  # cpu, gpu, igpu, accel
    description: str
    memory_free: int  # bytes
    memory_total: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("gpu", "igpu")


def devices() -> tuple[Device, ...]:
    """All devices of the installed build."""
    return tuple(map(_device, _device_handles()))


def _device_handles() -> Iterator[int]:
    count = symbol("ggml_backend_dev_count", ctypes.c_size_t)()
    get = symbol("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return (get(index) for index in range(count))


def _device(handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_p = ctypes.POINTER(ctypes.c_size_t)
    symbol("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)(handle, free, total)
    return Device(
        name=_text_of("ggml_backend_dev_name", handle),
        kind=_DEVICE_KINDS.get(symbol("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle), "other"),
        description=_text_of("ggml_backend_dev_description", handle),
        memory_free=free.value,
        memory_total=total.value,
    )


@functools.cache
def own_kernels() -> Kernels | None:
    """Our kernels, attached to the CPU, if they are built and have passed their test (see tested_kernels.py).

    llama.cpp lists its buffer types once, so this must come before it does.
    """
    path = tested_kernels.usable()
    try:
        return None if path is None else attach_kernels(path)
    except BackendError:
        return None


def attach_kernels(path: Path) -> Kernels:
    """Attach the library without a test. Raises BackendError."""
    functions = {name: ctypes.cast(symbol(name, None), ctypes.c_void_p).value or 0 for name in HOST_FUNCTIONS}  # type: ignore[arg-type]
    cpu = next((handle for handle in _device_handles() if _device(handle).kind == "cpu"), None)
    if cpu is None:
        raise BackendError("llama.cpp has no CPU back end")
    return attach(path, functions, cpu)


def extra_buffer_types(*, kernels: bool = True) -> tuple[str, ...]:
    """The CPU's extra buffer types, such as "AMX" and "CPU_REPACK", in the order in which llama.cpp takes the first
    that fits; without that of our kernels if not `kernels`.
    """
    own_kernels()
    find = symbol("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    registry_of = symbol("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)
    found: list[str] = []
    for device in _device_handles():
        address = find(registry_of(device), b"ggml_backend_dev_get_extra_bufts")
        if _device(device).kind == "cpu" and address:
            list_types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
            types = list_types(device)
            for index in range(64):  # the array ends with a null pointer
                if not types or not types[index]:
                    break
                found.append(_text_of("ggml_backend_buft_name", types[index]))
    return tuple(name for name in found if kernels or name != BUFFER_TYPE)


def _text_of(function: str, handle: int) -> str:
    text = symbol(function, ctypes.c_char_p, ctypes.c_void_p)(handle)
    return text.decode("utf-8", "replace") if text else ""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The installed build of llama.cpp."""

    bindings: str  # version of llama-cpp-python
    llama_cpp: str  # version of llama.cpp itself
    commit: str  # as recorded by the build; may be that of a repository around the build folder
    libraries: tuple[Path, ...]
    features: Mapping[str, str]  # per device and feature, as "CPU.AVX2": "1"
    devices: tuple[Device, ...]
    extra_buffer_types: tuple[str, ...]
    gpu_offload: bool
    fingerprint: str  # of the contents of the libraries
    system: str  # operating system and machine


def build_info() -> BuildInfo:
    """Raises BackendError if llama.cpp cannot be loaded."""
    lib = bindings()
    return BuildInfo(
        bindings=str(lib.__version__),
        llama_cpp=_optional_text("llama_version") or _optional_text("ggml_version"),
        commit=_optional_text("ggml_commit") or "unknown",
        libraries=library_paths(),
        features=_parse_features(lib.llama_print_system_info().decode("utf-8", "replace")),
        devices=devices(),
        extra_buffer_types=extra_buffer_types(),
        gpu_offload=bool(lib.llama_supports_gpu_offload()),
        fingerprint=library_hash.of(Path(lib.llama_cpp._base_path))[:16],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _optional_text(function: str) -> str:
    with contextlib.suppress(BackendError):
        text = symbol(function, ctypes.c_char_p)()
        return text.decode("utf-8", "replace") if text else ""
    return ""


def _parse_features(line: str) -> dict[str, str]:
    """`CPU : SSE3 = 1 | AVX = 1 | CUDA : ARCHS = 500 | ` as a mapping with names like "CPU.AVX"."""
    features: dict[str, str] = {}
    device = ""
    for part in line.split("|"):
        name, found, value = part.partition("=")
        head, colon, tail = name.partition(" : ")
        if colon:
            device, name = head.strip(), tail
        if found and name.strip():
            features[f"{device}.{name.strip()}"] = value.strip()
    return features
