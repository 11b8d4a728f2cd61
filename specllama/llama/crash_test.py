"""Test once per build, in a child process, whether the installed llama.cpp can decode on this CPU.

A build for another CPU, or a miscompiled one (docs/design.md), ends the process at its first decode with a signal that
Python cannot catch. The child decodes with a tiny model, first with the extra buffer types (AMX, repacked), and after a
crash without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import platformdirs

from specllama.base import disk as storage
from specllama.base.cpu import this_cpu
from specllama.base.errors import BackendError
from specllama.base.jsonable import UNREADABLE, parsed, to_plain, typed
from specllama.files import gguf_tiny
from specllama.llama import library_hash

TIMEOUT_S = 120.0
_VERSION = 1  # increase it when the test changes: old results are then ignored
_BATCHES = (48, 6, 1)  # tokens per decode: each width uses other kernels

# The signals of a bad build. Any other signal came from outside (no memory, a time limit).
_CRASHES = {"SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP"}
_WINDOWS_CRASHES = {0xC000001D: "SIGILL", 0xC0000005: "SIGSEGV", 0xC0000409: "SIGABRT"}

# `-I` ignores the user's folder and environment; the child gets the parent's import path instead.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);from specllama.llama import crash_test; crash_test.child()"
)

# With these flags GCC keeps the stores that fill the AMX tile configuration (see scripts/toolchain.py).
GCC_FLAGS = "-fno-tree-dse -fno-dse"


class State(Enum):
    """The state of the installed llama.cpp."""

    OK = "ok"
    FALLBACK = "fallback"  # crashes with extra buffer types, works without
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result for one build."""

    state: State
    use_extra_bufts: bool = True  # to load models with
    signal: str = ""  # that ended the child: "SIGILL"
    detail: str = ""  # what was found, one sentence
    hint: str = ""  # what to do about it

    def require(self) -> None:
        """Raise BackendError if this build cannot decode."""
        if self.state is State.BROKEN:
            raise BackendError(self.detail, hint=self.hint)


def installed() -> ProbeResult:
    """The result for the installed llama.cpp, from the cache or a new test."""
    folder = library_folder()
    if folder is None:
        return ProbeResult(
            State.BROKEN,
            detail=f"llama-cpp-python is not installed in {sys.prefix}.",
            hint="In a checkout of specllama run: make setup. Elsewhere: pip install specllama.",
        )
    path = platformdirs.user_cache_path("specllama") / "probe.json"
    results = _read(path)
    text = f"{_VERSION}\n{library_hash.of(folder)}\n{this_cpu().fingerprint}"
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    if key in results:
        return results[key]
    result = check()
    if result.state is not State.BROKEN:  # a missing system library may be installed later
        facts = {"results": to_plain({**results, key: result})}
        with contextlib.suppress(OSError):
            storage.write_own(path, json.dumps(facts, indent=1).encode("utf-8"))
    return result


def _read(path: Path) -> dict[str, ProbeResult]:
    """The results so far, by contents of the libraries and CPU."""
    try:
        return typed(dict[str, ProbeResult], parsed(path.read_text(encoding="utf-8"))["results"])  # type: ignore[no-any-return]
    except (OSError, *UNREADABLE):
        return {}


def check() -> ProbeResult:
    """Test now, without the cache."""
    with tempfile.TemporaryDirectory(prefix="specllama-probe-") as folder:
        model = Path(folder) / "tiny.gguf"
        with storage.named_disk_full(str(model), "free some space, or set TMPDIR to a folder on another disk"):
            model.write_bytes(gguf_tiny.tiny_gguf())
        first = _try(model, use_extra_bufts=True)
        if first.state is State.BROKEN and first.signal in _CRASHES:
            second = _try(model, use_extra_bufts=False)
            if second.state is State.OK:
                return ProbeResult(
                    State.FALLBACK,
                    use_extra_bufts=False,
                    signal=first.signal,
                    detail=f"The installed llama.cpp crashes with {first.signal} on its fast weight layouts (AMX, "
                    "repacked). They are off, which makes verification slower.",
                    hint=rebuild_hint(),
                )
        return first


def library_folder() -> Path | None:
    """The folder of llama.cpp's libraries, found without importing the bindings."""
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        return Path(os.environ["LLAMA_CPP_LIB_PATH"])
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib"


def rebuild_hint(cmake_args: str = "") -> str:
    """How to build llama.cpp for this machine."""
    variables = [f'CMAKE_ARGS="{cmake_args}"'] if cmake_args else []
    if sys.platform.startswith("linux"):  # the compiler is usually GCC
        variables += [f'CFLAGS="{GCC_FLAGS}"', f'CXXFLAGS="{GCC_FLAGS}"']
    install = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python"
    command = " ".join([*variables, install, _bindings_requirement()])
    return f"Build llama.cpp again for this machine. In a checkout of specllama: make setup. Elsewhere: {command}"


def child() -> None:
    """Entry point of the child: decode, and print the result as one line of JSON."""
    _, model, layout = sys.argv[1:]
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file: a crash is expected
    try:
        problem = _decode(Path(model), use_extra_bufts=layout == "extra")
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps({"problem": problem}), flush=True)
    # Skip the teardown: some back ends crash at the exit of the interpreter, which does not matter here.
    os._exit(0)


def _try(model: Path, *, use_extra_bufts: bool) -> ProbeResult:
    command = [sys.executable, "-I", "-c", _CHILD, json.dumps(sys.path), str(model)]
    command.append("extra" if use_extra_bufts else "plain")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ProbeResult(
            State.BROKEN,
            detail=f"The installed llama.cpp did not finish a tiny decode within {TIMEOUT_S:.0f} seconds.",
            hint="Check whether the machine is overloaded, then run: specllama doctor",
        )
    if died_of := _signal_name(done.returncode):
        return ProbeResult(
            State.BROKEN,
            signal=died_of,
            detail=f"The installed llama.cpp crashes with {died_of} on a tiny decode.",
            hint=rebuild_hint() if died_of in _CRASHES else "Another process ended it; check the free memory.",
        )
    last = done.stdout.strip().splitlines()[-1:]
    try:
        problem = json.loads(last[0])["problem"]
    except (ValueError, KeyError, IndexError, TypeError):
        problem = " ".join(done.stderr.split()[-40:]) or "no output"
    if not problem:
        return ProbeResult(State.OK)
    return ProbeResult(State.BROKEN, detail=f"The installed llama.cpp does not work: {problem}.", hint=_hint(problem))


def _hint(problem: str) -> str:
    if missing := re.search(r"(\S+): cannot open shared object file|Library not loaded: (\S+)", problem):
        library = Path(missing[1] or missing[2]).name
        return f"Install the package with the system library {library}. Or: {rebuild_hint()}"
    return rebuild_hint()


def _decode(model_path: Path, *, use_extra_bufts: bool) -> str:
    """Decode some tokens with the tiny model. Returns the problem, or an empty string."""
    import llama_cpp as bindings

    lib: Any = bindings
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0  # the test is about the CPU
    model_params.use_extra_bufts = use_extra_bufts
    model = lib.llama_model_load_from_file(str(model_path).encode(), model_params)
    if not model:
        return "it cannot load a tiny model"
    context_params = lib.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = gguf_tiny.N_CTX
    context_params.n_threads = context_params.n_threads_batch = 2
    context = lib.llama_init_from_model(model, context_params)
    if not context:
        return "it cannot open a context on a tiny model"
    for n_tokens in _BATCHES:
        tokens = (ctypes.c_int32 * n_tokens)(*(token % gguf_tiny.N_VOCAB for token in range(n_tokens)))
        status = lib.llama_decode(context, lib.llama_batch_get_one(tokens, n_tokens))
        if status != 0:
            return f"a decode of {n_tokens} tokens returned {status}"
        logits = lib.llama_get_logits_ith(context, -1)
        if not all(math.isfinite(logits[token]) for token in range(gguf_tiny.N_VOCAB)):
            return f"a decode of {n_tokens} tokens gave NaN or infinite logits"
    return ""


def _signal_name(status: int) -> str:
    if status >= 0:
        return _WINDOWS_CRASHES.get(status, "")
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _bindings_requirement() -> str:
    from importlib import metadata

    for line in metadata.requires("specllama") or ():
        if line.startswith("llama-cpp-python"):
            return line.split(";")[0].strip()
    return "llama-cpp-python"
