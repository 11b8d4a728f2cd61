"""What `specllama doctor` finds out, as data: the llama.cpp build, the machine, the files, and what can be done."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from platformdirs import user_cache_path

from specllama import llama
from specllama.base import disk as storage
from specllama.base.cpu import DECISIVE, Cpu, this_cpu
from specllama.base.errors import ConfigError, SpecllamaError
from specllama.files import catalog as pairs
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.llama import BuildInfo, LoadOptions
from specllama.llama import crash_test as probe
from specllama.llama.crash_test import ProbeResult, State
from specllama.llama.load_plan import physical_cores
from specllama.pairs import profile as profiles

CUDA_ARGS = "-DGGML_CUDA=on"
METAL_ARGS = "-DGGML_METAL=on"


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # good to know
    ATTENTION = "attention"  # worth doing something about; exit code 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    level: Level
    found: str
    hint: str = ""

    def to_json(self) -> dict[str, object]:
        """With the level by its name."""
        return {**asdict(self), "level": self.level.value}


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything looked at, and the facts behind it."""

    findings: tuple[Finding, ...]
    cpu: Cpu
    probe: ProbeResult
    build: BuildInfo | None  # None: it cannot be loaded, or would end this process
    memory_free: int  # bytes
    disk_free: int
    models: Mapping[str, Path]  # those that are on this machine
    config_files: tuple[Path, ...]

    @property
    def needs_attention(self) -> bool:
        """True if anything should be done."""
        return any(finding.level is Level.ATTENTION for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Findings first, then the facts."""
        return {
            "ok": not self.needs_attention,
            "findings": [finding.to_json() for finding in self.findings],
            "cpu": {**asdict(self.cpu), "features": sorted(self.cpu.features)},
            "probe": {**asdict(self.probe), "state": self.probe.state.value},
            "build": None if self.build is None else asdict(self.build),
            "memory_free": self.memory_free,
            "disk_free": self.disk_free,
            "models": {name: str(path) for name, path in self.models.items()},
            "config_files": [str(path) for path in self.config_files],
        }


def look() -> Checkup:
    """Look at everything. Raises nothing: what cannot be found out is a finding."""
    cpu, probed = this_cpu(), probe.installed()
    build, build_findings = _look_at_build(probed, cpu)
    catalog, config = _look_at_config()
    models = {} if catalog is None else _cached(catalog)
    memory_free, disk_free = llama.memory_free(), _disk_free(storage.models_dir())
    findings = [about_program(), *build_findings, config, about_cache(user_cache_path("specllama"))]
    if catalog is not None:
        findings += [about_memory(catalog, memory_free), *about_models(catalog, models, disk_free)]
        findings += _look_at_tuning(catalog, models) if build is not None else []
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


def about_program() -> Finding:
    """specllama itself."""
    from importlib.metadata import version

    found = f"{version('specllama')} in {Path(__file__).parents[1]}, Python {platform.python_version()}"
    return Finding("specllama", Level.OK, found)


def about_decode(probed: ProbeResult) -> Finding:
    """Does it compute at all?"""
    if probed.state is State.OK:
        return Finding("decode", Level.OK, "a tiny decode in a child process went well")
    return Finding("decode", Level.ATTENTION, probed.detail, probed.hint)


# Built from a package, llama.cpp asks git for a commit, and git answers for whatever folder that was unpacked in.
_DIRTY = " (so the build says: of the folder it was made in, -dirty where that had changes; nothing is wrong)"


def about_build(build: BuildInfo) -> Finding:
    """Which llama.cpp."""
    commit = "" if build.commit == "unknown" else f", commit {build.commit}{_DIRTY * build.commit.endswith('-dirty')}"
    folders = sorted({str(path.parent) for path in build.libraries})
    found = f"llama-cpp-python {build.bindings}, llama.cpp {build.llama_cpp}{commit}, in {', '.join(folders)}"
    return Finding("llama.cpp", Level.OK, found)


def about_cpu(cpu: Cpu, build: BuildInfo) -> Finding:
    """Does the build use what the CPU can do?"""
    used = {name.removeprefix("CPU.") for name in build.features if name.startswith("CPU.")}
    layouts = f"; weight layouts {', '.join(build.extra_buffer_types)}" if build.extra_buffer_types else ""
    found = f"{cpu.model}, {physical_cores()} cores; the build uses {_listed(cpu.features & used)}{layouts}"
    unused = cpu.features - used
    if not unused:
        return Finding("CPU", Level.OK, found)
    found += f"; it leaves {_listed(unused)} unused"
    if unused & DECISIVE:
        return Finding("CPU", Level.ATTENTION, found, probe.rebuild_hint())
    return Finding("CPU", Level.NOTE, found)


def about_gpu(build: BuildInfo, on_board: str) -> Finding:
    """Is there a GPU (`on_board`: "NVIDIA", "Apple", or nothing), and does the build use it?"""
    gpus = [device for device in build.devices if device.is_gpu]
    if gpus:
        names = [
            f"{gpu.name} ({gpu.description}, {storage.size_text(gpu.memory_free)} of "
            f"{storage.size_text(gpu.memory_total)} free)"
            for gpu in gpus
        ]
        return Finding("GPU", Level.OK, ", ".join(names))
    if on_board:
        arguments = METAL_ARGS if on_board == "Apple" else CUDA_ARGS
        found = f"this machine has an {on_board} GPU, but the build computes on the CPU only"
        return Finding("GPU", Level.ATTENTION, found, probe.rebuild_hint(arguments))
    return Finding("GPU", Level.OK, "none; this build computes on the CPU")


def about_memory(catalog: Catalog, free: int) -> Finding:
    """Is there room for the default pair?"""
    pair = catalog.pair()
    needed = (pair.target.size or 0) + (pair.draft.size or 0)
    found = f"{storage.size_text(free)} free"
    if free >= needed:
        return Finding("memory", Level.OK, found)
    found += f", but the default pair {pair.name} has {storage.size_text(needed)} of weights"
    return Finding("memory", Level.ATTENTION, found, "Close other programs, or choose a smaller pair.")


def about_models(catalog: Catalog, models: Mapping[str, Path], disk_free: int) -> list[Finding]:
    """Which models are here, and is there room for the rest of the default pair?"""
    pair = catalog.pair()
    absent = [model for model in (pair.target, pair.draft) if model.name not in models]
    here = f"{len(models)} here: {', '.join(models)}" if models else "none here"
    room = f"{storage.size_text(disk_free)} free for models in {storage.models_dir()}"
    disk = Finding("disk", Level.OK, room)
    if not absent:
        return [Finding("models", Level.OK, here), disk]
    needed = sum(model.size or 0 for model in absent)
    found = f"{here}; the default pair {pair.name} is not complete ({storage.size_text(needed)} to fetch)"
    if needed > disk_free:
        hint = "Make room, or set XDG_CACHE_HOME and HF_HOME to a larger disk."
        disk = Finding("disk", Level.ATTENTION, f"{room}, {storage.size_text(needed)} needed", hint)
    fetch = f"The first `specllama run` fetches it; so does: specllama models pull {pair.name}"
    return [Finding("models", Level.NOTE, found, fetch), disk]


def about_tuning(pair: str, found: profiles.FoundProfile) -> Finding:
    """Has anybody measured what pays here, and which kernel paths came of it?"""
    profile = found.profile
    if profile is None:
        why = f"the profile of {pair} is not used: {found.stale}" if found.stale else f"{pair} was not tuned"
        return Finding("tuning", Level.NOTE, why, "`specllama tune` finds out what pays on this machine.")
    paths = f"{profile.target_path.name} for the target, {profile.draft_path.name} for the draft"
    return Finding("tuning", Level.OK, f"{pair} was tuned {profile.made[:10]}; kernel path: {paths}")


def about_cache(folder: Path) -> Finding:
    """Can anything be kept? Without a cache every start asks everything anew, and nothing can be fetched."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding("cache", Level.OK, str(folder))
    wrong = "cannot be written" if there == folder else f"cannot be made in {there}"
    return Finding(
        "cache",
        Level.ATTENTION,
        f"{folder} {wrong}: no model can be fetched, and what was found out about this build is not kept",
        "Make it writable, or set XDG_CACHE_HOME to a folder that is.",
    )


def _look_at_build(probed: ProbeResult, cpu: Cpu) -> tuple[BuildInfo | None, list[Finding]]:
    """The build as it describes itself, unless it was just seen to end the process that loads it."""
    decode = about_decode(probed)
    if probed.state is State.BROKEN:
        return None, [decode]
    try:
        build = llama.build_info()
    except SpecllamaError as error:
        return None, [decode, Finding("llama.cpp", Level.ATTENTION, str(error), error.hint)]
    return build, [about_build(build), decode, about_cpu(cpu, build), about_gpu(build, _gpu_on_board(cpu))]


def _look_at_config() -> tuple[Catalog | None, Finding]:
    try:
        catalog = pairs.load_catalog()
    except ConfigError as error:
        return None, Finding("configuration", Level.ATTENTION, str(error), error.hint)
    own = [str(path) for path in catalog.files[1:]]
    found = ", ".join(own) if own else f"as shipped; {pairs.user_file()} would add to it"
    return catalog, Finding("configuration", Level.OK, "; ".join([found, *catalog.notes]))


def _look_at_tuning(catalog: Catalog, models: Mapping[str, Path]) -> list[Finding]:
    """The default pair's profile, for the options that count where none are given."""
    pair = catalog.pair()
    files = [models.get(model.name) for model in (pair.target, pair.draft)]
    if files[0] is None or files[1] is None:
        return []
    found = profiles.find(profiles.ProfileKey(files[0], LoadOptions(), files[1], LoadOptions()))
    return [about_tuning(pair.name, found)]


def _cached(catalog: Catalog) -> dict[str, Path]:
    found = {name: hub.find(model) for name, model in catalog.models.items()}
    return {name: path for name, path in found.items() if path is not None}


def _gpu_on_board(cpu: Cpu) -> str:
    """A GPU that llama.cpp could use, by what the system shows without any vendor's tools."""
    if sys.platform == "darwin":
        return "Apple" if cpu.arch == "arm64" else ""
    devices = ("/dev/nvidia0", "/dev/dxg")
    return "NVIDIA" if any(map(os.path.exists, devices)) and shutil.which("nvidia-smi") else ""


def _disk_free(folder: Path) -> int:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing special"
