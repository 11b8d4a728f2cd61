"""The cache of compiled llama-cpp-python wheels: one folder per build key.

pip's cache is not used, because it ignores changed compiler flags.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from progress import Stage, Ticker, run_logged, tail
from toolchain import WITH_PARENT, NoCompiler, Plan, SetupError

_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
_MAKE = re.compile(r"^\s*\[ *(\d+)%\] ")
_STAGES = (  # output of pip or scikit-build-core -> stage
    (re.compile(r"^Collecting llama-cpp-python"), "fetching the source"),
    (re.compile(r"^\s*Installing build dependencies: started"), "fetching the build tools"),
    (re.compile(r"\*\*\* Configuring CMake"), "configuring"),
    (re.compile(r"\*\*\* Making wheel"), "packing"),
)


def cache_home(env: Mapping[str, str]) -> Path:
    """specllama's cache folder, the same as that of the program."""
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "specllama"
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return usual / "specllama"


def find(plan: Plan, shelf: Path) -> Path | None:
    """The complete wheel of exactly this plan, or None."""
    folder = shelf / plan.key
    try:
        record = json.loads((folder / "build.json").read_text(encoding="utf-8"))
        wheel = folder / record["wheel"]
        whole = record["parts"] == plan.parts and record["sha256"] == _sha256(wheel)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return wheel if whole else None


def build(plan: Plan, shelf: Path, python: Path, env: Mapping[str, str]) -> Path:
    """Compile the wheel of this plan and move it to the shelf. The caller holds the lock."""
    if not plan.cxx:
        raise NoCompiler("the C++ compiler of this environment was removed")
    shelf.mkdir(parents=True, exist_ok=True)
    for left in shelf.glob(".building-*"):  # of a killed build
        shutil.rmtree(left, ignore_errors=True)
    log = shelf / f"{plan.key}.log"
    log.unlink(missing_ok=True)  # it may be a link
    log.touch()
    ticker = Ticker("llama.cpp")
    _announce(plan, log)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=shelf) as name:
        folder, temporary = Path(name, plan.key), Path(name, "tmp")
        folder.mkdir()
        temporary.mkdir()
        command = pip_wheel(python, plan, folder)
        try:
            status = run_logged(command, log=log, ticker=ticker, stage_of=stage_of, env=build_env(plan, env, temporary))
        except BaseException:
            ticker.finish("stopped")
            raise
        wheels = list(folder.glob("*.whl"))
        if status or len(wheels) != 1:
            ticker.finish("failed")
            raise SetupError(_failure(plan, log))
        _record(plan, wheels[0], took_s=time.monotonic() - start_s)
        shutil.rmtree(shelf / plan.key, ignore_errors=True)  # a damaged one
        os.replace(folder, shelf / plan.key)
    ticker.finish("built")
    return shelf / plan.key / wheels[0].name


def pip_wheel(python: Path, plan: Plan, folder: Path) -> list[str]:
    """The command that compiles from source and uses no ready-made wheel."""
    return [
        *(str(python), WITH_PARENT, "pip", "wheel", "--verbose", "--no-input", "--no-deps", "--no-cache-dir"),
        *("--no-binary", "llama-cpp-python", "--wheel-dir", str(folder)),
        f"llama-cpp-python=={plan.bindings}",
    ]


def build_env(plan: Plan, env: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """The environment of the build: the plan's flags and compilers, all cores, and a folder for 500 MB of work."""
    return {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(n_cores()),
        **env,
        "CMAKE_ARGS": shlex.join(plan.flags),
        "CC": plan.cc,
        "CXX": plan.cxx,
        "TMPDIR": str(temporary),  # removed after an interruption
        "PYTHONUNBUFFERED": "1",  # else the stages arrive late
    }


def stage_of(line: str) -> Stage | None:
    """The stage by a line of the build's output."""
    if found := _NINJA.match(line):
        return Stage("compiling", int(found[1]), int(found[2]))
    if found := _MAKE.match(line):
        return Stage("compiling", int(found[1]), 100)
    return next((Stage(what) for pattern, what in _STAGES if pattern.search(line)), None)


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _announce(plan: Plan, log: Path) -> None:
    sys.stderr.write(
        f"llama.cpp is compiled once for this machine ({plan.cpu_model}, {plan.compiler}); "
        f"this takes some minutes on {n_cores()} cores. Log: {log}\n"
    )


def _failure(plan: Plan, log: Path) -> str:
    hints = []
    if any("GGML_CUDA" in flag for flag in plan.flags):
        hints.append("SPECLLAMA_CPU=1 builds without CUDA.")
    if plan.environment:
        hints.append(f"The build used {', '.join(plan.environment)} from the environment.")
    first = f"building llama-cpp-python {plan.bindings} failed; the end of its log:"
    return "\n".join([first, tail(log), f"log: {log}", *hints])


def _record(plan: Plan, wheel: Path, *, took_s: float) -> None:
    facts = {
        "parts": plan.parts,
        "cpu_model": plan.cpu_model,
        "wheel": wheel.name,
        "sha256": _sha256(wheel),
        "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "took_s": round(took_s),
    }
    wheel.with_name("build.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
