"""This CPU's features, under llama.cpp's names. Standard library only: the build scripts load this file alone."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")

# llama.cpp's name of a feature -> the operating system's flags; all of them are required.
_X86: dict[str, tuple[str, ...]] = {
    "SSE3": ("pni",),
    "SSSE3": ("ssse3",),
    "AVX": ("avx",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX512": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_tile", "amx_int8"),
}
_ARM: dict[str, tuple[str, ...]] = {
    "NEON": ("asimd",),
    "FP16_VA": ("asimdhp",),
    "DOTPROD": ("asimddp",),
    "MATMUL_INT8": ("i8mm",),
    "SVE": ("sve",),
    "SME": ("sme",),
}
_MAC_X86 = {"sse3": "pni", "avx1.0": "avx", "avx512vnni": "avx512_vnni"}  # macOS's name -> Linux's
_MAC_ARM = {"FEAT_FP16": "asimdhp", "FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_SME": "sme"}

# A build without one of these is so much slower that it is worth a rebuild.
DECISIVE = frozenset({"AVX", "AVX2", "F16C", "FMA", "AVX512", "AMX_INT8", "NEON", "DOTPROD", "MATMUL_INT8"})

# Flags that affect compiled code. The other flags of /proc/cpuinfo (caches, virtualisation, mitigations) change with
# the kernel and would cause needless builds.
_CODE_FLAGS = re.compile(
    r"pni|ssse3|sse\d|sse4|avx|amx|fma|f16c|bmi|abm|lzcnt|popcnt|movbe|adx|aes|vaes|v?pclmul|sha|gfni|xop|tbm|movdir"
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """One CPU and its features."""

    model: str
    arch: str  # x86_64, arm64, ...
    flags: tuple[str, ...]  # the operating system's names, sorted; only those that affect compiled code
    features: frozenset[str]  # llama.cpp's names

    @property
    def fingerprint(self) -> str:
        """Equal for two CPUs that can run the same code."""
        return " ".join((self.arch, *self.flags))


def usable_cpus() -> int:
    """Logical CPUs that this process may use: by its affinity, and by the quota of its control group (Linux)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(min(count, _quota(_CGROUPS))), 1)


def _quota(root: Path) -> float:
    """CPUs of the control group of a container, as `docker run --cpus` limits it; infinite without a limit."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):  # version 2, version 1
        with contextlib.suppress(OSError, ValueError):
            words = (root / name).read_text().split()
            period = words[1] if len(words) > 1 else (root / "cpu/cpu.cfs_period_us").read_text()
            if (quota := float(words[0])) > 0:  # "max" or -1: no limit
                return quota / float(period)
    return math.inf


def this_cpu() -> Cpu:
    """The CPU this runs on. Never raises; unknown fields stay empty."""
    arch = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    try:
        facts = _macos_facts() if platform.system() == "Darwin" else _linux_facts()
    except (OSError, ValueError, subprocess.SubprocessError):
        facts = ("", frozenset())
    return describe(arch, *facts)


def describe(arch: str, model: str, words: frozenset[str]) -> Cpu:
    """A `Cpu` from the operating system's flags."""
    table = {"x86_64": _X86, "arm64": _ARM}.get(arch, {})
    flags = sorted(word for word in words if arch != "x86_64" or _CODE_FLAGS.match(word))
    return Cpu(
        model=model or "unknown CPU",
        arch=arch,
        flags=tuple(flags),
        features=frozenset(name for name, needs in table.items() if words.issuperset(needs)),
    )


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Model name and flags of the first processor of a Linux /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    # ARM gives no model name; implementer and part identify it.
    model = fields.get("model name") or " ".join(
        f"{key} {fields[key]}" for key in ("cpu implementer", "cpu part") if key in fields
    )
    return model, frozenset((fields.get("flags") or fields.get("features") or "").split())


def parse_sysctl(values: Mapping[str, str]) -> tuple[str, frozenset[str]]:
    """Model name and flags, under Linux's names, from macOS's `sysctl` values."""
    words: set[str] = set()
    for key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
        words.update(_MAC_X86.get(word, word) for word in values.get(key, "").lower().split())
    words.update(word for name, word in _MAC_ARM.items() if values.get(f"hw.optional.arm.{name}") == "1")
    if values.get("hw.optional.arm64") == "1":
        words.add("asimd")
    return values.get("machdep.cpu.brand_string", ""), frozenset(words)


def _linux_facts() -> tuple[str, frozenset[str]]:
    # The kernel generates this file on reading. The first processor is enough; there may be hundreds.
    with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
        return parse_cpuinfo(file.read(8192).split("\n\n")[0])


def _macos_facts() -> tuple[str, frozenset[str]]:
    command = ["sysctl", "machdep.cpu", "hw.optional"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    pairs = (line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    return parse_sysctl({key: value.strip() for key, value in pairs})
