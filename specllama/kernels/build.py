"""Compile the kernels for this machine's llama.cpp, and keep the library in the cache.

The library is independent of the CPU: it chooses its instruction set when it is loaded. Its key is a hash of its
sources, of the installed headers of ggml, and of the flags.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_path

from specllama.base.disk import work_folder
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
_TIMEOUT_S = 1200.0  # a minute on two quiet cores


def unsupported() -> str:
    """Why this machine cannot use the kernels; empty if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"they are written for x86-64 CPUs, this is {platform.machine()}"
    if sys.platform not in ("linux", "darwin"):
        return "they are built on Linux and macOS only"
    if not (headers() / "ggml.h").is_file():
        return "llama-cpp-python is installed without the headers of ggml"
    return ""


def headers() -> Path:
    """The folder with the headers that llama-cpp-python installs."""
    spec = importlib.util.find_spec("llama_cpp")
    origin = Path(spec.origin) if spec is not None and spec.origin else Path()
    return origin.parent.parent / "include"


def library() -> Path:
    """Where the library of these sources and headers lies once it is built."""
    digest = hashlib.sha256(repr((FLAGS, PATHS, sys.platform)).encode())
    for path in sorted([*SOURCES.iterdir(), headers() / "ggml.h", headers() / "ggml-backend.h"]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return user_cache_path("specllama") / "kernels" / digest.hexdigest()[:20] / NAME


def compiler() -> str:
    """The C++ compiler, as $CXX names it or the first that is found; empty without one."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), "")


def build() -> Path:
    """Compile the library unless it is there. Raises BackendError with the compiler's last lines."""
    if reason := unsupported():
        raise BackendError(f"the kernels cannot be built: {reason}")
    made = library()
    if made.is_file():
        return made
    cxx = compiler()
    if not cxx:
        raise BackendError("the kernels cannot be built: no C++ compiler was found", hint="install g++ or clang++")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(made.with_name(f"build-{os.getpid()}")) as folder:
            _link(cxx, _objects(cxx, folder), made)
    except OSError as error:
        raise BackendError(f"the kernels cannot be written to {made.parent}: {error.strerror}") from error
    return made


def _objects(cxx: str, folder: Path) -> list[Path]:
    """The compiled sources. A compiler that does not know a newer instruction set leaves it out."""
    jobs = {name: ("path.cpp", flags) for name, flags in PATHS.items()} | {"backend": ("backend.cpp", ())}
    jobs["self_test"] = ("self_test.cpp", ())
    failures = _run_all(
        [
            [cxx, *FLAGS, *flags, f"-I{headers()}", "-c", str(SOURCES / source), "-o", str(folder / f"{name}.o")]
            for name, (source, flags) in jobs.items()
        ]
    )
    for name, failure in zip(jobs, failures, strict=True):
        if failure and name not in (*PATHS,)[:-1]:
            raise BackendError(f"the kernels cannot be compiled: {failure}")
    return [folder / f"{name}.o" for name, failure in zip(jobs, failures, strict=True) if not failure]


def _link(cxx: str, objects: Sequence[Path], made: Path) -> None:
    linked = objects[0].with_name(NAME)
    (failure,) = _run_all([[cxx, "-shared", *map(str, objects), "-o", str(linked), "-pthread"]])
    if failure:
        raise BackendError(f"the kernels cannot be linked: {failure}")
    os.replace(linked, made)


def build_program(folder: Path, isa: str, *flags: str) -> Path:
    """The self-test of one instruction set as a program in `folder`, with additional flags, such as a sanitizer's."""
    include = f"-I{headers()}"
    objects = [folder / f"{name}.o" for name in (isa, "self_test")]
    sources = [("path.cpp", PATHS[isa]), ("self_test.cpp", ("-DSPECK_MAIN",))]
    failures = _run_all(
        [
            [compiler(), *FLAGS, *flags, *own, include, "-c", str(SOURCES / source), "-o", str(made)]
            for made, (source, own) in zip(objects, sources, strict=True)
        ]
    )
    program = folder / "self_test"
    failures += _run_all([[compiler(), *flags, *map(str, objects), "-o", str(program)]])
    if any(failures):
        raise BackendError("the self-test cannot be compiled: " + " ".join(failures))
    return program


def _run_all(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run compilers side by side. Returns the last words of each that fails, and empty texts for the others."""
    running: list[subprocess.Popen[str]] = []
    failures = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            )
        for process in running:
            _, text = process.communicate(timeout=_TIMEOUT_S)
            last = " ".join(text.split())[-300:] or f"the compiler ended with {process.returncode}"
            failures.append(last if process.returncode else "")
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"the kernels cannot be compiled: {error}") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
    return failures
