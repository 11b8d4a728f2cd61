"""Test builds and model files in a child process, because llama.cpp may crash.

A build for another CPU, or a miscompiled one (docs/design.md), ends the process at its first decode with a signal that
Python cannot catch; so does a model file with values that llama.cpp asserts or does not check. Each build and each
file is tested once. The child uses a model as an answer does. A build is tried with a tiny model, first with the extra
buffer types (AMX, repacked), and after a crash without them.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import platformdirs

from specllama.base import child as children
from specllama.base import disk as storage
from specllama.base import errors, with_parent
from specllama.base.cpu import this_cpu
from specllama.base.errors import BackendError, ModelFileError, SpecllamaError
from specllama.base.jsonable import UNREADABLE, from_plain, parsed, to_plain, typed
from specllama.files import gguf_tiny
from specllama.files.catalog import shipped_checksums
from specllama.llama import library_hash
from specllama.llama.header import Header

TIMEOUT_S = 120.0
_SLOWEST_DISK = 20e6  # bytes per second: a file gets this much time beside TIMEOUT_S
_VERSION = 1  # increase it when the test changes: old results are then ignored
_WIDTHS = (48, 6, 1)  # tokens per decode: each width uses other kernels
SOUND = "sound"  # the kind of record about a tried file: whether its weights were read

# The signals of a bad build. Any other signal came from outside (no memory, a time limit).
_CRASHES = {"SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP"}
_WINDOWS_CRASHES = {0xC000001D: "SIGILL", 0xC0000005: "SIGSEGV", 0xC0000409: "SIGABRT"}

_CHILD = "from specllama.llama import crash_test; crash_test.child()"

# With these flags GCC keeps the stores that fill the AMX tile configuration (see scripts/toolchain.py).
GCC_FLAGS = "-fno-tree-dse -fno-dse"


class State(Enum):
    """The state of the installed llama.cpp."""

    OK = "ok"
    FALLBACK = "fallback"  # crashes with extra buffer types, works without
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Use:
    """What the child does with a model."""

    path: str
    use_extra_bufts: bool = False
    weights: bool = True  # False = build everything, read no weights
    widths: tuple[int, ...] = ()  # tokens per decode, whose logits must be finite
    kernels: str = ""  # the library of our kernels, to be tested and used
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class _End:
    """How the child ended."""

    signal: str  # that ended it: "SIGILL"
    error: SpecllamaError | None
    said: str  # its last line on stderr, such as a failed assertion


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


def require_working() -> None:
    """Raise BackendError if llama.cpp would end this process. The parent of a child process has asked already."""
    if not children.is_child:
        installed().require()


def _read(path: Path) -> dict[str, ProbeResult]:
    """The results so far, by contents of the libraries and CPU."""
    try:
        return typed(dict[str, ProbeResult], parsed(path.read_text(encoding="utf-8"))["results"])  # type: ignore[no-any-return]
    except (OSError, *UNREADABLE):
        return {}


@contextlib.contextmanager
def _tiny_model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="specllama-probe-") as folder:
        model = Path(folder) / "tiny.gguf"
        with storage.named_disk_full(str(model), "free some space, or set TMPDIR to a folder on another disk"):
            model.write_bytes(gguf_tiny.tiny_gguf())
        yield model


def check() -> ProbeResult:
    """Test now, without the cache."""
    with _tiny_model() as model:
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


def require_sound(models: Mapping[Header, bool]) -> None:
    """Use each model once in a child process, before llama.cpp sees the file in this one; all of them at the same time.

    models: header -> whether the weights are read. The result is remembered until the file or llama.cpp changes; the
    models of the shipped catalog are known to be sound. Raises ModelFileError if a child dies, and the errors of
    loading.
    """
    folder = library_folder()
    if folder is None:
        return  # loading says so
    build, tried = library_hash.of(folder), []
    with ExitStack() as children:
        for model, weights in models.items():
            record = storage.FileRecord(SOUND, *model.parts, by=build)
            tried_with = record.value(bool)
            if tried_with is not None and tried_with >= weights:
                continue
            if {storage.known_checksum(part) for part in model.parts} <= shipped_checksums():
                record.keep(True)
                continue
            timeout_s = TIMEOUT_S + model.n_file_bytes / _SLOWEST_DISK
            use = Use(str(model.path), weights=weights, timeout_s=timeout_s)
            tried.append((model, record, use, children.enter_context(_started(use))))
        for model, record, use, process in tried:
            _require_survival(model, process, use.timeout_s)
            record.keep(use.weights)


def _require_survival(model: Header, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        end = _end_of(process, timeout_s)
    except subprocess.TimeoutExpired:
        raise ModelFileError(
            f"llama.cpp does not load {model.path} within {timeout_s:.0f} seconds",
            hint="check whether the machine is overloaded; the file may be damaged: download it again",
        ) from None
    if end.signal and end.signal not in _CRASHES:
        raise BackendError(
            f"{end.signal} ended the test of {model.path} from outside", hint="check the free memory, then try again"
        )
    if end.signal:
        raise ModelFileError(
            f"llama.cpp crashes with {end.signal} on {model.path}: {end.said or 'no reason given'}",
            hint="the file is damaged or does not fit this llama.cpp: download it again, or choose another file",
        )
    if end.error is not None:
        raise end.error


def child() -> None:
    """Entry point of the child: use the model, and print the error as one line of JSON. The parent handles Ctrl-C."""
    children.is_child = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with_parent.watch()
    use = from_plain(Use, json.loads(sys.argv[1]))
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file: a crash is expected
        most_s = math.ceil(use.timeout_s)  # one thread does the work
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    error = None
    try:
        from specllama.llama.model import rehearse

        _model = rehearse(use)
    except SpecllamaError as caught:
        error = type(caught).__name__, str(caught), caught.hint
    except Exception as caught:
        error = BackendError.__name__, f"{type(caught).__name__}: {caught}", ""
    print(json.dumps({"error": error}), flush=True)
    # Skip the teardown: some back ends crash at the exit of the interpreter, which does not matter here.
    os._exit(0)


def kernels_problem(library: Path) -> str:
    """What the self-test of our kernels and a tiny decode found wrong; empty if nothing.

    Raises BackendError if the test could not be made, such as on a machine without memory.
    """
    use = Use("", use_extra_bufts=True, widths=_WIDTHS, kernels=str(library))
    try:
        with _tiny_model() as model, _started(replace(use, path=str(model))) as process:
            end = _end_of(process, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BackendError(f"their test did not end within {TIMEOUT_S:.0f} seconds") from None
    except OSError as error:
        raise BackendError(f"their test cannot be started: {error}") from error
    if end.signal and end.signal not in _CRASHES:
        raise BackendError(f"{end.signal} ended their test from outside")
    return f"their test crashes with {end.signal}" if end.signal else str(end.error or "")


def _started(use: Use) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return children.started(
        _CHILD,
        json.dumps(to_plain(use)),
        stderr=subprocess.PIPE,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # a failed assertion would start a debugger
    )


def _end_of(process: subprocess.Popen[bytes], timeout_s: float) -> _End:
    """Wait for the child's end. Raises subprocess.TimeoutExpired."""
    stdout, stderr = (text.decode("utf-8", "replace") for text in process.communicate(timeout=timeout_s))
    said = re.sub(r"^\S+:\d+: |^\s*what\(\):\s*", "", stderr.strip().rpartition("\n")[2])
    if died_of := _signal_name(process.returncode):
        return _End(died_of, None, said)
    try:
        error = json.loads(stdout.strip().splitlines()[-1])["error"]
    except (ValueError, KeyError, IndexError, TypeError):
        error = BackendError.__name__, " ".join(stderr.split()[-40:]) or "no output", ""
    if error is None:
        return _End("", None, said)
    name, message, hint = error
    kind: type[SpecllamaError] = getattr(errors, name)
    return _End("", kind(message, hint=hint), said)


def _try(model: Path, *, use_extra_bufts: bool) -> ProbeResult:
    try:
        with _started(Use(str(model), use_extra_bufts, widths=_WIDTHS)) as process:
            end = _end_of(process, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ProbeResult(
            State.BROKEN,
            detail=f"The installed llama.cpp did not finish a tiny decode within {TIMEOUT_S:.0f} seconds.",
            hint="Check whether the machine is overloaded, then run: specllama doctor",
        )
    if end.signal:
        return ProbeResult(
            State.BROKEN,
            signal=end.signal,
            detail=f"The installed llama.cpp crashes with {end.signal} on a tiny decode.",
            hint=rebuild_hint() if end.signal in _CRASHES else "Another process ended it; check the free memory.",
        )
    if end.error is None:
        return ProbeResult(State.OK)
    problem = str(end.error)
    return ProbeResult(State.BROKEN, detail=f"The installed llama.cpp does not work: {problem}.", hint=_hint(problem))


def _hint(problem: str) -> str:
    if missing := re.search(r"(\S+): cannot open shared object file|Library not loaded: (\S+)", problem):
        library = Path(missing[1] or missing[2]).name
        return f"Install the package with the system library {library}. Or: {rebuild_hint()}"
    return rebuild_hint()


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
