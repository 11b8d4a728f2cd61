"""The findings of `specllama doctor` as data: the llama.cpp build, the machine, the files, and what to do."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from specllama import llama
from specllama.base.cpu import DECISIVE, Cpu, this_cpu
from specllama.base.disk import models_dir, size_text
from specllama.base.errors import ConfigError, SpecllamaError
from specllama.base.jsonable import to_plain
from specllama.base.text import counted
from specllama.files import catalog as pairs
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.kernels import build as kernel_build
from specllama.llama import BuildInfo, LoadOptions, crash_test, tested_kernels
from specllama.llama.crash_test import ProbeResult, State
from specllama.llama.load_plan import physical_cores
from specllama.llama.ways import WayBack
from specllama.pairs import profile as profiles

_GPU_BUILDS = {"NVIDIA": "-DGGML_CUDA=on", "Apple": "-DGGML_METAL=on"}  # arguments for CMake


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # good to know
    ATTENTION = "attention"  # should be changed; exit code 1


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    found: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """All findings and the facts behind them."""

    findings: tuple[Finding, ...]
    cpu: Cpu
    probe: ProbeResult
    build: BuildInfo | None  # None = it cannot be loaded, or crashes the process
    memory_free: int  # bytes
    disk_free: int
    models: Mapping[str, Path]  # those that are on this machine
    config_files: tuple[Path, ...]

    @property
    def needs_attention(self) -> bool:
        return any(finding.level is Level.ATTENTION for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        cpu = {**to_plain(self.cpu), "features": sorted(self.cpu.features)}
        return {"ok": not self.needs_attention, **to_plain(self), "cpu": cpu}


def look() -> Checkup:
    """Check everything. Raises nothing: an error is a finding."""
    cpu, probed = this_cpu(), crash_test.installed()
    build, build_findings = _look_at_build(probed, cpu)
    catalog, config = _look_at_config()
    found = {} if catalog is None else {name: hub.find(model) for name, model in catalog.models.items()}
    models = {name: path for name, path in found.items() if path is not None}
    memory_free, disk_free = llama.memory_free(), _disk_free(models_dir())
    program = f"{version('specllama')} in {Path(__file__).parents[1]}, Python {platform.python_version()}"
    findings = [Finding("specllama", Level.OK, program), *build_findings, config]
    findings.append(about_cache(user_cache_path("specllama")))
    if catalog is not None:
        findings += [about_memory(catalog, memory_free), *about_models(catalog, models, disk_free)]
        if build is not None:
            findings += [*_look_at_tuning(catalog, models), *about_rollback(_ways_back(models))]
    return Checkup(
        findings=tuple(findings),
        cpu=cpu,
        probe=probed,
        build=build,
        memory_free=memory_free,
        disk_free=disk_free,
        models=models,
        config_files=() if catalog is None else catalog.files,
    )


def about_decode(probed: ProbeResult) -> Finding:
    """Whether the build can decode."""
    if probed.state is State.OK:
        return Finding("decode", Level.OK, "llama.cpp works: it has answered with a tiny model")
    return Finding("decode", Level.ATTENTION, probed.detail, probed.hint)


def about_build(build: BuildInfo) -> Finding:
    """The versions of llama-cpp-python and llama.cpp."""
    # In a build from a package, git names the commit of the folder that the package was unpacked in, as "-dirty".
    commit = "" if build.commit == "unknown" or build.commit.endswith("-dirty") else f", commit {build.commit}"
    folders = sorted({str(path.parent) for path in build.libraries})
    found = f"llama-cpp-python {build.bindings}, llama.cpp {build.llama_cpp}{commit}, in {', '.join(folders)}"
    return Finding("llama.cpp", Level.OK, found)


def about_cpu(cpu: Cpu, build: BuildInfo) -> Finding:
    """Whether the build uses all instruction sets of the CPU."""
    used = {name.removeprefix("CPU.") for name in build.features if name.startswith("CPU.")}
    layouts = f"; weights are rearranged for it by {', '.join(build.extra_buffer_types)}"
    machine, known = f"{cpu.model}, {counted(physical_cores(), 'core')}", _listed(cpu.features & used)
    unused = cpu.features - used
    if not unused:
        found = f"{machine}; llama.cpp uses all of its fast instructions: {known}"
    else:
        found = f"{machine}; llama.cpp uses {known}, but was built without {_listed(unused)}, which this CPU has"
    found += layouts if build.extra_buffer_types else ""
    if unused & DECISIVE:
        return Finding(
            "CPU", Level.ATTENTION, f"{found}: answers are slower than they could be", crash_test.rebuild_hint()
        )
    return Finding("CPU", Level.NOTE if unused else Level.OK, found)


def about_kernels(reason: str, isa: str, cpu: Cpu) -> Finding:
    """Whether our kernels are used (`reason`: why not), and with the best instruction set of the CPU."""
    hint = "compile and test them: specllama doctor --fix"
    if reason:
        found = f"specllama's own CPU code, which makes drafts pay more, is not used: {reason}"
        if tested_kernels.is_fault(reason):
            return Finding("kernels", Level.ATTENTION, found, hint)
        return Finding("kernels", Level.NOTE, found, "" if kernel_build.unsupported() else hint)
    found = f"specllama's own CPU code computes, with {isa}: drafts cost less to verify"
    best = next((name for name, needs in kernel_build.NEEDS.items() if needs <= cpu.features), isa)
    if best == isa or tested_kernels.wanted_isa():
        return Finding("kernels", Level.OK, found)
    hint = f"install a newer C++ compiler, then {hint}"
    return Finding("kernels", Level.NOTE, f"{found}; it was compiled without {best}, which this CPU has", hint)


def about_gpu(build: BuildInfo, on_board: str) -> Finding:
    """Whether the machine has a GPU (`on_board`: "NVIDIA", "Apple" or "") and the build uses it."""
    gpus = [
        f"{gpu.name} ({gpu.description}, {size_text(gpu.memory_free)} of {size_text(gpu.memory_total)} free)"
        for gpu in build.devices
        if gpu.is_gpu
    ]
    if gpus:
        return Finding("GPU", Level.OK, ", ".join(gpus))
    if on_board:
        found = f"this machine has an {on_board} GPU, but the build computes on the CPU only"
        return Finding("GPU", Level.ATTENTION, found, crash_test.rebuild_hint(_GPU_BUILDS[on_board]))
    return Finding("GPU", Level.OK, "none; this build computes on the CPU")


def about_memory(catalog: Catalog, free: int) -> Finding:
    """Whether the default pair fits into the free memory."""
    pair = catalog.pair()
    needed = (pair.target.size or 0) + (pair.draft.size or 0)
    found = f"{size_text(free)} free"
    if free >= needed:
        return Finding("memory", Level.OK, found)
    found += f", but the default pair {pair.name} has {size_text(needed)} of weights"
    return Finding("memory", Level.ATTENTION, found, "Close other programs, or choose a smaller pair.")


def about_models(catalog: Catalog, models: Mapping[str, Path], disk_free: int) -> list[Finding]:
    """Which models are here, and whether the disk has room for the rest of the default pair."""
    pair = catalog.pair()
    absent = [model for model in (pair.target, pair.draft) if model.name not in models]
    here = f"{len(models)} here: {', '.join(models)}" if models else "none here"
    room = f"{size_text(disk_free)} free for models in {models_dir()}"
    disk = Finding("disk", Level.OK, room)
    if not absent:
        return [Finding("models", Level.OK, here), disk]
    needed = sum(model.size or 0 for model in absent)
    found = f"{here}; the default pair {pair.name} is not complete ({size_text(needed)} to fetch)"
    if needed > disk_free:
        hint = "Make room, or set XDG_CACHE_HOME and HF_HOME to a larger disk."
        disk = Finding("disk", Level.ATTENTION, f"{room}, {size_text(needed)} needed", hint)
    fetch = f"The first `specllama run` fetches it, or: specllama models pull {pair.name}"
    return [Finding("models", Level.NOTE, found, fetch), disk]


def about_tuning(pair: str, found: profiles.FoundProfile) -> Finding:
    """Whether the pair was tuned on this machine, and its kernel paths."""
    profile = found.profile
    if profile is None or profile.source == "use":
        why = f"the profile of {pair} is not used: {found.stale}" if found.stale else f"{pair} was not tuned"
        hint = "Answers measure as they go. To find the fastest settings at once: specllama tune"
        return Finding("tuning", Level.NOTE, why, hint)
    paths = f"{profile.target_path.name} for the target, {profile.draft_path.name} for the draft"
    return Finding("tuning", Level.OK, f"{pair} was {profile.origin}; fastest here: {paths}")


def about_cache(folder: Path) -> Finding:
    """Whether the cache can be written."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding("cache", Level.OK, str(folder))
    wrong = "cannot be written" if there == folder else f"cannot be made in {there}"
    return Finding(
        "cache",
        Level.ATTENTION,
        f"{folder} {wrong}: models cannot be fetched, and facts about this build are not kept",
        "Make it writable, or set XDG_CACHE_HOME to a writable folder.",
    )


def _look_at_build(probed: ProbeResult, cpu: Cpu) -> tuple[BuildInfo | None, list[Finding]]:
    """The build is not loaded here if it crashed the child process."""
    decode = about_decode(probed)
    if probed.state is State.BROKEN:
        return None, [decode]
    tested_kernels.problem()  # before llama.cpp is loaded here
    try:
        build = llama.build_info()
    except SpecllamaError as error:
        return None, [decode, Finding("llama.cpp", Level.ATTENTION, str(error), error.hint)]
    own = llama.own_kernels()
    kernels = about_kernels(
        tested_kernels.problem() or ("" if own else "they cannot be attached"), own.isa if own else "", cpu
    )
    return build, [about_build(build), decode, about_cpu(cpu, build), kernels, about_gpu(build, _gpu_on_board(cpu))]


def _look_at_config() -> tuple[Catalog | None, Finding]:
    try:
        catalog = pairs.load_catalog()
    except ConfigError as error:
        return None, Finding("configuration", Level.ATTENTION, str(error), error.hint)
    own = [str(path) for path in catalog.files[1:]]
    found = ", ".join(own) if own else f"as shipped; {pairs.user_file()} can extend it"
    return catalog, Finding("configuration", Level.OK, "; ".join([found, *catalog.notes]))


def _look_at_tuning(catalog: Catalog, models: Mapping[str, Path]) -> list[Finding]:
    """The default pair's profile for the default options."""
    pair = catalog.pair()
    target, draft = models.get(pair.target.name), models.get(pair.draft.name)
    if target is None or draft is None:
        return []
    found = profiles.find(profiles.ProfileKey(target, LoadOptions(), draft, LoadOptions()))
    return [about_tuning(pair.name, found)]


def about_rollback(ways: Mapping[str, WayBack]) -> list[Finding]:
    """How each model removes rejected tokens, and why."""
    names: dict[WayBack, list[str]] = {}
    for name, way in ways.items():
        names.setdefault(way, []).append(name)
    found = "; ".join(f"{', '.join(some)}: {way.text} ({way.why})" for way, some in names.items())
    return [Finding("rollback", Level.OK, found)] if found else []


def _ways_back(models: Mapping[str, Path]) -> dict[str, WayBack]:
    found = {}
    for name, path in models.items():
        with suppress(SpecllamaError, OSError):  # `models verify` names a damaged file
            found[name] = llama.way_back(llama.read_header(path))
    return found


def _gpu_on_board(cpu: Cpu) -> str:
    """The vendor of a GPU that llama.cpp could use, by the system's device files; "" without one."""
    if sys.platform == "darwin":
        return "Apple" if cpu.arch == "arm64" else ""
    devices = ("/dev/nvidia0", "/dev/dxg")
    return "NVIDIA" if any(map(os.path.exists, devices)) and shutil.which("nvidia-smi") else ""


def _disk_free(folder: Path) -> int:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing special"
