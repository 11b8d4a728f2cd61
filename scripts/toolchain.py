"""The plan of a llama.cpp build for this machine: compiler, CPU, GPU, flags, and its key."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
WITH_PARENT = str(ROOT / "specllama" / "base" / "with_parent.py")  # runs a module until this process ends
RECIPE = 1  # increase it when this file or wheelhouse.py builds differently from the same inputs

# GCC removes the stores that fill the AMX tile configuration as dead, and the first decode crashes with an illegal
# instruction (measured with GCC 12 on a CPU with AMX; docs/design.md). Without these two passes it keeps them.
GCC_FLAGS = "-fno-tree-dse -fno-dse"

# The bindings need only libllama and ggml.
LEAN = (
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)

# Environment variables that the compiler or CMake reads; they are part of the key.
BUILD_VARIABLES = (
    "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAARCHS",
    "CUDACXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "MACOSX_DEPLOYMENT_TARGET",
)  # fmt: skip

INSTALL_COMPILER = {
    "Darwin": "xcode-select --install",
    "Linux": "sudo apt install build-essential (Debian, Ubuntu), sudo dnf install gcc-c++ (Fedora), "
    "or sudo pacman -S base-devel (Arch)",
}


class SetupError(Exception):
    """An error of the set-up, with a message for the user."""


class NoCompiler(SetupError):
    """There is no working compiler."""

    def __init__(self, found: str) -> None:
        install = INSTALL_COMPILER.get(platform.system(), "see the documentation of your system")
        super().__init__(f"{found} (required to compile llama.cpp once). To install a compiler: {install}")


@dataclass(frozen=True)
class Compiler:
    """The C and C++ compiler for CMake."""

    cc: str
    cxx: str
    version: str  # with its name: "gcc 12.2.0"

    @property
    def is_gcc(self) -> bool:
        return self.version.startswith("gcc ")


@dataclass(frozen=True)
class Plan:
    """All inputs of the build."""

    bindings: str  # version of llama-cpp-python
    flags: tuple[str, ...]  # for CMake; the user's come last and override
    environment: Mapping[str, str]
    compiler: str
    cpu: str  # fingerprint: equal for CPUs that run the same code
    cpu_model: str  # not part of the key
    system: str
    cc: str  # not part of the key
    cxx: str

    @property
    def parts(self) -> dict[str, object]:
        """The parts of the key."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("cpu_model", "cc", "cxx")}
        return {"recipe": RECIPE, **facts, "flags": list(self.flags)}  # a list, as in JSON

    @property
    def key(self) -> str:
        """The folder name of the build, different for builds that differ in any part."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def make_plan(env: Mapping[str, str], *, remembered: Compiler | None = None) -> Plan:
    """The plan for this machine. Raises NoCompiler if there is neither a compiler nor a `remembered` one."""
    cpu = load_module("cpu", ROOT / "specllama" / "base" / "cpu.py").this_cpu()
    try:
        compiler = find_compiler(env)
    except NoCompiler:
        if remembered is None:
            raise
        compiler = remembered
    return Plan(
        bindings=bindings_version((ROOT / "pyproject.toml").read_text(encoding="utf-8")),
        flags=cmake_flags(compiler, env, nvcc=find_nvcc(env)),
        environment={name: env[name] for name in BUILD_VARIABLES if env.get(name)},
        compiler=compiler.version,
        cpu=cpu.fingerprint,
        cpu_model=cpu.model,
        system=system_name(),
        cc=compiler.cc,
        cxx=compiler.cxx,
    )


def cmake_flags(compiler: Compiler, env: Mapping[str, str], *, nvcc: str | None) -> tuple[str, ...]:
    """CMake's arguments: ours first, then the user's CMAKE_ARGS, which override them."""
    flags = ["-DGGML_NATIVE=ON", *LEAN]
    if compiler.is_gcc:
        for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS")):
            # With this argument CMake ignores the variable, so add its value.
            flags.append(f"-DCMAKE_{language}_FLAGS={GCC_FLAGS} {env.get(variable, '')}".rstrip())
    if nvcc:
        flags += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    return (*flags, *shlex.split(env.get("CMAKE_ARGS", "")))


def find_compiler(env: Mapping[str, str]) -> Compiler:
    """The compilers that CMake would choose: CC and CXX, else the usual names. Raises NoCompiler."""
    cc = _first_command("CC", _C_NAMES, env)
    cxx = _first_command("CXX", _CXX_NAMES, env)
    macros = _predefined_macros(cxx)
    name = "clang" if "__clang__" in macros else "gcc" if "__GNUC__" in macros else Path(cxx).name
    version = macros.get("__VERSION__", "unknown version").strip('"')
    return Compiler(cc=cc, cxx=cxx, version=f"{name} {version}")


def find_nvcc(env: Mapping[str, str], has_gpu: Callable[[], bool] | None = None) -> str | None:
    """Path of the CUDA compiler, if there is one and a GPU, and SPECLLAMA_CPU is not set."""
    if env.get("SPECLLAMA_CPU", "0") not in ("", "0"):
        return None
    nvcc = env.get("CUDACXX") or shutil.which("nvcc", path=env.get("PATH"))
    if not nvcc and os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        nvcc = "/usr/local/cuda/bin/nvcc"
    # Build machines often have the toolkit without a GPU; a CUDA build would only take long there.
    return nvcc if nvcc and (has_gpu or _has_nvidia_gpu)() else None


def bindings_version(pyproject: str) -> str:
    """The pinned version of llama-cpp-python."""
    found = re.search(r'"llama-cpp-python==([^"\s;]+)"', pyproject)
    if not found:
        raise SetupError("pyproject.toml does not pin llama-cpp-python with ==")
    return found[1]


def system_name() -> str:
    """Operating system, architecture, and C library; its version decides where the result loads."""
    if sys.platform == "darwin":
        libc = "macOS " + platform.mac_ver()[0].split(".")[0]
    else:
        libc = " ".join(platform.libc_ver())
    return f"{platform.system()} {platform.machine()} {libc}".strip()


def load_module(name: str, path: Path) -> ModuleType:
    """One module of the package, loaded without the package, which needs numpy."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# The order in which CMake looks.
_C_NAMES = ("cc", "gcc", "clang")
_CXX_NAMES = ("c++", "g++", "clang++")


def _first_command(variable: str, usual: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The command of a compiler, which may have more than one word (`ccache g++`)."""
    path = env.get("PATH")
    if env.get(variable):
        program = shlex.split(env[variable])[0]
        if shutil.which(program, path=path) is None:
            raise NoCompiler(f"{variable} is {program}, which does not exist")
        return env[variable]
    for name in usual:
        if shutil.which(name, path=path):
            return name
    raise NoCompiler(f"no {'C++' if variable == 'CXX' else 'C'} compiler was found ({', '.join(usual)})")


def _predefined_macros(cxx: str) -> dict[str, str]:
    """The compiler's predefined macros, which identify it better than `c++ --version`."""
    command = [*shlex.split(cxx), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"the C++ compiler {cxx} does not run ({error})") from None
    words = (line.split(" ", 2) for line in done.stdout.splitlines())
    return {parts[1]: parts[2] for parts in words if len(parts) == 3}


def _has_nvidia_gpu() -> bool:
    # Device files are quick to check; nvidia-smi may take seconds at each start.
    return any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dxg"))
