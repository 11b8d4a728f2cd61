"""The CPU's features under llama.cpp's names."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from specllama.base import cpu

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu pni ssse3 fma f16c avx avx2 bmi2 avx512f avx512cd avx512bw avx512dq avx512vl amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = """processor\t: 0
Features\t: fp asimd asimdhp asimddp i8mm sve
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_the_first_processor_of_cpuinfo_is_read() -> None:
    """Prevents: a build key that mixes processors, or sees no flags at all."""
    model, words = cpu.parse_cpuinfo(INTEL)
    described = cpu.describe("x86_64", model, words)
    assert described.model == "Intel(R) Xeon(R) Platinum 8481C"
    assert described.features == {"SSE3", "SSSE3", "FMA", "F16C", "AVX", "AVX2", "BMI2", "AVX512", "AMX_INT8"}


def test_flags_that_do_not_affect_code_are_not_in_the_fingerprint() -> None:
    """Prevents: a rebuild because a kernel update lists one more mitigation."""
    with_more = cpu.describe("x86_64", "m", frozenset({"avx2", "ibrs", "md_clear"}))
    assert with_more.fingerprint == cpu.describe("x86_64", "m", frozenset({"avx2"})).fingerprint
    assert with_more.fingerprint != cpu.describe("x86_64", "m", frozenset({"avx2", "avx512f"})).fingerprint


def test_a_part_of_avx512_is_not_avx512() -> None:
    """Prevents: doctor reporting missing instructions that llama.cpp would not use."""
    assert "AVX512" not in cpu.describe("x86_64", "", frozenset({"avx512f", "avx512cd"})).features


def test_arm_is_known_by_implementer_and_part() -> None:
    """Prevents: 'unknown CPU' for every ARM board."""
    described = cpu.describe("arm64", *cpu.parse_cpuinfo(ARM))
    assert described.model == "cpu implementer 0x41 cpu part 0xd40"
    assert described.features == {"NEON", "FP16_VA", "DOTPROD", "MATMUL_INT8", "SVE"}


def test_macos_names_are_translated() -> None:
    """Prevents: a Mac without any feature."""
    apple = {
        "machdep.cpu.brand_string": "Apple M2",
        "hw.optional.arm64": "1",
        "hw.optional.arm.FEAT_DotProd": "1",
        "hw.optional.arm.FEAT_I8MM": "1",
        "hw.optional.arm.FEAT_SME": "0",
    }
    described = cpu.describe("arm64", *cpu.parse_sysctl(apple))
    assert (described.model, described.features) == ("Apple M2", {"NEON", "DOTPROD", "MATMUL_INT8"})
    intel = {"machdep.cpu.features": "FPU SSE3 AVX1.0 FMA", "machdep.cpu.leaf7_features": "AVX2 BMI2"}
    assert cpu.describe("x86_64", *cpu.parse_sysctl(intel)).features == {"SSE3", "AVX", "FMA", "AVX2", "BMI2"}


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_unknown_facts_are_left_empty(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a program that does not start without access to /proc or sysctl."""

    def refuse(*_: object, **__: object) -> object:
        raise PermissionError

    monkeypatch.setattr(cpu.platform, "system", lambda: system)
    monkeypatch.setattr(cpu, "_CPUINFO", cpu.Path("/nonexistent"))
    monkeypatch.setattr(subprocess, "run", refuse)
    found = cpu.this_cpu()
    assert (found.model, found.flags) == ("unknown CPU", ())


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu.max": "many\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_containers_quota_is_read(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    """Prevents: 16 threads that wait for each other on the two CPUs that a container is given."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu._quota(tmp_path) == expected
    assert cpu.usable_cpus() >= 1
