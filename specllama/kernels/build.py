"""Compile the kernels for this machine's llama.cpp, and keep the library in the cache.

The library is independent of the CPU: it chooses its instruction set when it is loaded. Its key is a hash of its
sources, of the installed headers of ggml, and of the flags.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic

from platformdirs import user_cache_path

from specllama.base import with_parent
from specllama.base.disk import Silent, only_one, work_folder
from specllama.base.errors import BackendError

SOURCES = Path(__file__).parent / "src"
NAME = "libspecllama_kernels.so"
# -ffp-contract=off: a sum has the order that is written, with FMA only where it is written.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
_X86 = ("-mavx2", "-mfma", "-mf16c")
# One object of path.cpp for each instruction set, the slowest to compile first.
PATHS = {
    "avx512vnni": (*_X86, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    "avxvnni": (*_X86, "-mavxvnni"),
    "avx2": _X86,
}
# What a CPU must have for each, under the names of `base.cpu`; the best first, as in path.cpp's callers.
_AVX2 = frozenset({"AVX2", "FMA", "F16C"})
NEEDS = {
    "avx512vnni": _AVX2 | {"AVX512", "AVX512_VNNI"},
    "avxvnni": _AVX2 | {"AVX_VNNI"},
    "avx2": _AVX2,
}
# What a compiler must know for the newer ones; else it leaves them out.
_NEWER = {
    "avx512vnni": "__m512i f(__m512i a) { return _mm512_dpbusd_epi32(a, a, a); }",
    "avxvnni": "__m256i f(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }",
}
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TIMEOUT_S = 1200.0  # a minute on two quiet cores
_N_KEPT = 8  # libraries, of 1 MB each: for other versions of llama.cpp and of specllama


def unsupported() -> str:
    """Why this machine cannot use the kernels; empty if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"they are written for x86-64 CPUs, this is {platform.machine()}"
    if sys.platform not in ("linux", "darwin"):
        return "they are built on Linux and macOS only"
    if not all(header.is_file() for header in _headers_of_ggml()):
        return "llama-cpp-python is installed without the headers of ggml"
    return ""


def headers() -> Path:
    """The folder with the headers that llama-cpp-python installs."""
    spec = importlib.util.find_spec("llama_cpp")
    origin = Path(spec.origin) if spec is not None and spec.origin else Path()
    return origin.parent.parent / "include"


def _headers_of_ggml() -> list[Path]:
    return [headers() / name for name in ("ggml.h", "ggml-backend.h")]


def library() -> Path:
    """Where the library of these sources and headers lies once it is built."""
    digest = hashlib.sha256(repr((FLAGS, PATHS, sys.platform)).encode())
    files = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), *_headers_of_ggml()]
    for path in sorted(files, key=lambda path: path.name):  # the same wherever the folders lie
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return user_cache_path("specllama") / "kernels" / digest.hexdigest()[:20] / NAME


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, which may have arguments, else the first that is found; or empty."""
    given = os.environ.get("CXX", "").strip()
    commands = [["c++"], ["g++"], ["clang++"]]
    if given:
        commands = [[given]]  # a path may have spaces
        with suppress(ValueError):  # an open quote
            commands.append(shlex.split(given))
    return next(([found, *rest] for name, *rest in commands if (found := shutil.which(name))), [])


def build(*, again: bool = False) -> Path:
    """Compile the library, unless it is there and not `again`. Raises BackendError with the compiler's last words."""
    if reason := unsupported():
        raise BackendError(f"the kernels cannot be built: {reason}")
    made = library()
    if made.is_file() and not again:
        return made
    cxx = compiler()
    if not cxx:
        given = os.environ.get("CXX", "").strip()
        reason = f"CXX is {given}, which was not found" if given else "no C++ compiler was found"
        raise BackendError(f"the kernels cannot be built: {reason}", hint="install g++ or clang++, or set CXX")
    place = made.parent.parent
    try:
        with only_one("building", Silent(), place):
            if again or not made.is_file():  # else another process built it meanwhile
                with work_folder(place / "building") as folder:
                    linked = _linked(cxx, _objects(cxx, folder))
                    made.parent.mkdir(exist_ok=True)
                    for path in (place, made.parent, linked):  # their code runs in this process
                        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)
                    os.replace(linked, made)
                _forget_old(place)
    except OSError as error:
        raise BackendError(
            f"the kernels cannot be written to {made.parent}: {error.strerror}",
            hint="make room or make it writable, or set XDG_CACHE_HOME to another folder",
        ) from error
    return made


def _forget_old(place: Path) -> None:
    """Remove all but the newest libraries. A process that has loaded one keeps it."""
    kept = sorted(place.glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime)[-_N_KEPT:]
    for folder in place.glob(20 * "[0-9a-f]"):
        if folder / NAME not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _known(cxx: Sequence[str], folder: Path) -> list[str]:
    """The instruction sets that the compiler and its assembler know."""
    probes = []
    for name, code in _NEWER.items():
        source = folder / f"{name}.cpp"
        source.write_text(f"#include <immintrin.h>\n{code}\n")
        probes.append([*cxx, *PATHS[name], "-c", str(source), "-o", str(folder / f"{name}.o")])
    failures = dict(zip(_NEWER, run_all(probes, folder), strict=True))
    return [name for name in PATHS if not failures.get(name)]


def _objects(cxx: Sequence[str], folder: Path) -> list[Path]:
    """The compiled sources."""
    jobs = {name: ("path.cpp", PATHS[name]) for name in _known(cxx, folder)}
    jobs |= {name: (f"{name}.cpp", ()) for name in ("backend", "self_test")}
    failures = run_all(
        [
            [*cxx, *FLAGS, *flags, f"-I{headers()}", "-c", str(SOURCES / source), "-o", str(folder / f"{name}.o")]
            for name, (source, flags) in jobs.items()
        ],
        folder,
    )
    for failure in filter(None, failures):
        raise BackendError(f"the kernels cannot be compiled: {failure}")
    return [folder / f"{name}.o" for name in jobs]


def _linked(cxx: Sequence[str], objects: Sequence[Path]) -> Path:
    linked = objects[0].with_name(NAME)
    (failure,) = run_all([[*cxx, "-shared", *map(str, objects), "-o", str(linked), "-pthread"]], linked.parent)
    if failure:
        raise BackendError(f"the kernels cannot be linked: {failure}")
    return linked


class _Running:
    """A compiler and its own processes, in a group of their own. It also ends with this process."""

    def __init__(self, command: Sequence[str], stdin: int, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", with_parent.__file__, "--", *command],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        self._said: deque[bytes] = deque(maxlen=64)  # the last of what may be megabytes
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            self._said.extend(iter(partial(stream.read1, 4096), b""))  # type: ignore[attr-defined]

    def failure(self, timeout_s: float) -> str:
        """Its last words if it fails, else an empty text. Raises subprocess.TimeoutExpired."""
        code = self._process.wait(timeout_s)
        self._reader.join(1.0)  # a process that it left may keep the pipe open
        said = " ".join(b"".join(self._said).decode("utf-8", "replace").split())[-300:]
        return (said or f"the compiler ended with {code}") if code else ""

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run_all(commands: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """Run compilers side by side, with `folder` for their temporary files; see `_Running.failure`."""
    running: list[_Running] = []
    deadline = monotonic() + _TIMEOUT_S
    stdin, parent = os.pipe()  # the compilers end when `parent` is closed, also by kill -9
    try:
        for command in commands:
            running.append(_Running(command, stdin, folder))
        return [each.failure(deadline - monotonic()) for each in running]
    except subprocess.TimeoutExpired:
        minutes = f"{_TIMEOUT_S / 60:.0f} minutes"
        raise BackendError(
            f"the compiler {commands[0][0]} did not end within {minutes}", hint="set CXX to another"
        ) from None
    finally:
        for each in running:
            each.end()
        os.close(stdin)
        os.close(parent)
