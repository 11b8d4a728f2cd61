"""Builds the programs of llama.cpp from the source of the installed bindings, with the same flags.

    python benchmarks/peers.py            # builds them once and prints the folder

The source is in the source distribution of llama-cpp-python; flags and compilers are those of `make`. Needs cmake and
ninja. With `SPECLLAMA_PEERS=FOLDER` it uses existing programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from toolchain import make_plan  # noqa: E402
from wheelhouse import build_env, cache_home, n_cores  # noqa: E402

PROGRAMS = (
    "llama-speculative-simple", "llama-speculative", "llama-completion", "llama-server", "llama-bench",
    "llama-batched-bench",
)  # fmt: skip
# Flags of the bindings that leave the programs out.
OWN_FLAGS = ("-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAVA_BUILD=OFF")
PROGRAM_FLAGS = ("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF")


def programs() -> Path:
    """The folder of the programs; builds missing ones."""
    if ready := os.environ.get("SPECLLAMA_PEERS"):
        return Path(ready)
    plan = make_plan(os.environ)
    home = cache_home(os.environ) / "peers" / plan.key
    folder = home / "build" / "bin"
    if all((folder / name).exists() for name in PROGRAMS):
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        if not list(home.glob("llama_cpp_python-*/vendor/llama.cpp")):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d",
                 temporary, f"llama-cpp-python=={plan.bindings}"],
                check=True,
            )  # fmt: skip
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(home, filter="data")
        (source,) = home.glob("llama_cpp_python-*/vendor/llama.cpp")
        env = build_env(plan, os.environ, Path(temporary))
        flags = [flag for flag in plan.flags if flag not in OWN_FLAGS]
        subprocess.run(
            ["cmake", "-S", str(source), "-B", str(home / "build"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *flags,
             *PROGRAM_FLAGS],
            check=True,
            env=env,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        command = ["cmake", "--build", str(home / "build"), "-j", str(n_cores()), "--target", *PROGRAMS]
        subprocess.run(command, check=True, env=env)
    return folder


if __name__ == "__main__":
    print(programs())
