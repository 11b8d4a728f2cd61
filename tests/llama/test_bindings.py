"""What is read from llama.cpp beyond its Python bindings, with functions in place of its libraries."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from specllama.base.errors import BackendError
from specllama.kernels.library import HOST_FUNCTIONS
from specllama.llama import bindings as room
from specllama.llama import tested_kernels

NAMES = {1: b"CUDA0", 2: b"CPU", 3: None, 4: b"iGPU", 5: b"BLAS", 6: b"all"}
TYPES = {1: 1, 2: 0, 3: 99, 4: 2, 5: 3, 6: 4}


class FakeBuild:
    """A build with six devices. The CPU has `n_buffers` extra buffer types, numbered from 11; the iGPU has one."""

    def __init__(self, n_buffers: int | None = 2) -> None:
        array = (ctypes.c_void_p * ((n_buffers or 0) + 1))(*range(11, 11 + (n_buffers or 0)), None)
        other = (ctypes.c_void_p * 2)(99, None)
        callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

        def types_of(device: int) -> int | None:
            return (
                ctypes.addressof(other) if device != 2 else ctypes.addressof(array) if n_buffers is not None else None
            )

        self.ready = False  # our kernels are attached, if there are any
        self._kept = [array, callback(types_of), other]
        self._list_types = ctypes.cast(self._kept[1], ctypes.c_void_p).value  # type: ignore[arg-type]

    def symbol(self, name: str, restype: object, *argtypes: object) -> Callable[..., object]:
        return getattr(self, name)  # type: ignore[no-any-return]

    def ggml_backend_dev_count(self) -> int:
        return len(NAMES)

    def ggml_backend_dev_get(self, index: int) -> int:
        return index + 1

    def ggml_backend_dev_name(self, handle: int) -> bytes | None:
        return NAMES[handle]

    def ggml_backend_dev_description(self, handle: int) -> bytes:
        return b"device \xff"

    def ggml_backend_dev_type(self, handle: int) -> int:
        return TYPES[handle]

    def ggml_backend_dev_memory(self, handle: int, free: ctypes.c_size_t, total: ctypes.c_size_t) -> None:
        free.value, total.value = 10 * handle, 100 * handle

    def ggml_backend_dev_backend_reg(self, handle: int) -> int:
        return 1000 + handle

    def ggml_backend_reg_get_proc_address(self, registry: int, name: bytes) -> int | None:
        assert self.ready, "llama.cpp lists its buffer types once"
        return self._list_types if registry in (1002, 1004) and name == b"ggml_backend_dev_get_extra_bufts" else None

    def ggml_backend_buft_name(self, handle: int) -> bytes:
        return b"SPECLLAMA" if handle == 11 else f"buffer {handle}".encode()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(n_buffers: int | None = 2) -> None:
        made = FakeBuild(n_buffers)
        monkeypatch.setattr(room, "symbol", made.symbol)
        monkeypatch.setattr(room, "own_kernels", lambda: setattr(made, "ready", True))

    return install


def test_every_device_is_described(build: Callable[..., None]) -> None:
    """Prevents: a GPU that is taken for a CPU, its memory for another's, or a new kind of device that is an error."""
    build()
    found = room.devices()
    assert [(each.name, each.kind, each.is_gpu) for each in found] == [
        ("CUDA0", "gpu", True),
        ("CPU", "cpu", False),
        ("", "other", False),
        ("iGPU", "igpu", True),
        ("BLAS", "accel", False),
        ("all", "meta", False),
    ]
    assert [(each.memory_free, each.memory_total) for each in found] == [(10 * n, 100 * n) for n in NAMES]
    assert {each.description for each in found} == {"device \ufffd"}


@pytest.mark.parametrize("n_buffers", [None, 0, 1, 3, 70])
def test_the_extra_buffer_types_are_those_of_the_cpu_in_their_order(
    build: Callable[..., None], n_buffers: int | None
) -> None:
    """Prevents: a read behind the end of the list; the types of a GPU; our kernels listed where they are off."""
    build(n_buffers)
    handles = range(11, 11 + min(n_buffers or 0, 64))
    names = ["SPECLLAMA" if handle == 11 else f"buffer {handle}" for handle in handles]
    assert room.extra_buffer_types() == tuple(names)
    assert room.extra_buffer_types(kernels=False) == tuple(names[1:])


def test_the_kernels_get_the_addresses_of_ggml_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a null pointer, or the handle of another device, that the kernels call."""
    given: list[tuple[Path, dict[str, int], int]] = []
    monkeypatch.setattr(room, "attach", lambda *args: given.append(args))
    room.attach_kernels(Path("kernels.so"))
    ((path, functions, cpu),) = given
    assert path == Path("kernels.so")
    assert tuple(functions) == HOST_FUNCTIONS
    assert all(functions.values())
    assert len(set(functions.values())) == len(HOST_FUNCTIONS)
    assert [handle for handle in room._device_handles() if room._device(handle).kind == "cpu"] == [cpu]
    monkeypatch.setattr(room, "_device", lambda handle: SimpleNamespace(kind=("gpu", "cpu", "cpu")[handle]))
    monkeypatch.setattr(room, "_device_handles", lambda: iter(range(3)))
    room.attach_kernels(Path("kernels.so"))
    assert given[-1][2] == 1
    monkeypatch.setattr(room, "_device_handles", lambda: iter(()))
    with pytest.raises(BackendError, match="no CPU"):
        room.attach_kernels(Path("kernels.so"))


def test_kernels_that_cannot_be_attached_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: every command that fails because of kernels without which it could compute."""
    attached: list[Path] = []
    monkeypatch.setattr(room, "attach_kernels", lambda path: attached.append(path) or "kernels")
    monkeypatch.setattr(tested_kernels, "usable", lambda: None)
    assert room.own_kernels.__wrapped__() is None
    monkeypatch.setattr(tested_kernels, "usable", lambda: Path("kernels.so"))
    assert room.own_kernels.__wrapped__() == "kernels"
    assert attached == [Path("kernels.so")]

    def fail(path: Path) -> None:
        raise BackendError("does not fit")

    monkeypatch.setattr(room, "attach_kernels", fail)
    assert room.own_kernels.__wrapped__() is None


def test_a_function_is_found_with_its_types_or_named_as_missing() -> None:
    """Prevents: an address cut to 32 bits; types that another user of the bindings set or gets."""
    count = room.symbol("ggml_backend_dev_count", ctypes.c_size_t)
    assert (count.restype, count.argtypes) == (ctypes.c_size_t, [])  # type: ignore[attr-defined]
    get = room.symbol("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    assert (get.restype, get.argtypes) == (ctypes.c_void_p, [ctypes.c_size_t])  # type: ignore[attr-defined]
    assert room.bindings().llama_cpp._lib.ggml_backend_dev_get is not get
    assert 0 < count() < 64
    with pytest.raises(BackendError, match="no_such_function"):
        room.symbol("no_such_function", None)


def test_the_libraries_are_those_of_llama_and_ggml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a file of another kind loaded as a library; one library twice, by its links."""
    ours = {"libggml-base.so", "libllama.so", "ggml.dll", "libllama.dylib"}
    for name in (*ours, "libllama.so.0", "libmtmd.so", "llama.h", "ggml.txt"):
        (tmp_path / name).write_text("no library")
    lib = SimpleNamespace(llama_cpp=SimpleNamespace(_base_path=str(tmp_path), _lib="libllama"))
    monkeypatch.setattr(room, "bindings", lambda: lib)
    assert room.library_paths() == tuple(tmp_path / name for name in sorted(ours))
    loaded: list[str] = []

    def load(path: str) -> str:
        loaded.append(Path(path).name)
        if path.endswith(".dll"):
            raise OSError("no library")
        return path

    monkeypatch.setattr(room.ctypes, "CDLL", load)
    assert room._libraries.__wrapped__() == ("libllama", str(tmp_path / "libggml-base.so"))
    assert loaded == ["ggml.dll", "libggml-base.so"]


def test_features_are_read_by_device() -> None:
    """Prevents: a feature of the GPU shown as one of the CPU, or one that is off shown as on."""
    line = "CPU : SSE3 = 1 | AVX = 0 |  | CUDA : ARCHS = 500,610 | USE GRAPHS = 1 | REPACK | = 3 | "
    assert room._parse_features(line) == {
        "CPU.SSE3": "1",
        "CPU.AVX": "0",
        "CUDA.ARCHS": "500,610",
        "CUDA.USE GRAPHS": "1",
    }
    assert room._parse_features("AVX = 1") == {".AVX": "1"}


def test_a_version_that_the_build_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: `doctor` that fails on a build without version functions."""
    texts: dict[str, bytes | None] = {"ggml_version": b"0.9\xff", "llama_version": None}

    def symbol(name: str, restype: object) -> Callable[[], bytes | None]:
        if name not in texts:
            raise BackendError(name)
        return lambda: texts[name]

    monkeypatch.setattr(room, "symbol", symbol)
    assert [room._optional_text(name) for name in ("ggml_version", "llama_version", "x")] == ["0.9\ufffd", "", ""]


def test_the_build_is_described_by_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: one version shown as another; a hash of another folder."""
    texts = {"llama_version": "b123", "ggml_version": "0.9", "ggml_commit": "abc"}
    monkeypatch.setattr(room, "_optional_text", lambda name: texts.get(name, ""))
    monkeypatch.setattr(room.library_hash, "of", lambda folder: f"{folder.name}-{'0' * 40}")
    info = room.build_info()
    assert (info.llama_cpp, info.commit) == ("b123", "abc")
    assert info.fingerprint == f"{Path(room.bindings().llama_cpp._base_path).name}-{'0' * 40}"[:16]
    assert info.devices == room.devices()
    assert info.extra_buffer_types == room.extra_buffer_types()
    del texts["llama_version"], texts["ggml_commit"]
    info = room.build_info()
    assert (info.llama_cpp, info.commit) == ("0.9", "unknown")


def test_a_flag_that_is_set_stops_llama_cpp(tmp_path: Path) -> None:
    """Prevents: a callback that is always or never true."""
    stop = room.abort_callback(room.bindings())
    buffer = ctypes.create_string_buffer(2)
    assert not stop(ctypes.addressof(buffer))
    buffer[0] = b"\1"
    assert stop(ctypes.addressof(buffer))


def test_the_bindings_are_made_ready_or_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a GPU that is not found because no back end was loaded; a traceback without llama-cpp-python."""
    calls: list[str] = []
    lib = SimpleNamespace(
        llama_backend_init=lambda: calls.append("init"),
        llama_log_set=lambda callback, data: calls.append("log"),
        llama_log_callback=ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    )
    monkeypatch.setattr(room.crash_test, "require_working", lambda: calls.append("tested"))
    monkeypatch.setattr(room.atexit, "register", lambda function, silent, data: calls.append("at exit"))
    monkeypatch.setitem(sys.modules, "llama_cpp", lib)
    n_kept = len(room._keep_alive)
    assert room.bindings.__wrapped__() is lib
    assert calls == ["tested", "log", "at exit", "init"]
    assert len(room._keep_alive) == n_kept + 2, "llama.cpp may call them until the end"
    for error in (ImportError, OSError, RuntimeError, AttributeError):

        class Broken:
            @staticmethod
            def find_spec(name: str, path: object, target: object = None, error: type[Exception] = error) -> None:
                if name == "llama_cpp":
                    raise error("cannot be loaded")

        monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
        with pytest.raises(BackendError) as caught:
            room.bindings.__wrapped__()
        assert caught.value.hint
