"""The findings of `specllama doctor`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from specllama import llama
from specllama.base.cpu import Cpu
from specllama.base.errors import BackendError, ConfigError
from specllama.cli.screen.output import to_json
from specllama.drafters.controller import CostProfile
from specllama.files import catalog as pairs
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.llama import BuildInfo, Device, crash_test, tested_kernels
from specllama.llama.crash_test import ProbeResult, State
from specllama.llama.kernel_path import AS_IN_FILE, OWN
from specllama.pairs import checkup
from specllama.pairs.checkup import Level
from specllama.pairs.profile import FoundProfile, Profile
from tests import tiny

CPU = Cpu("A CPU", "x86_64", ("avx2", "fma"), frozenset({"AVX2", "FMA"}))
BUILD = BuildInfo(
    bindings="0.3.36",
    llama_cpp="0.5.0",
    commit="unknown",
    libraries=(Path("/lib/libllama.so"), Path("/lib/libggml.so")),
    features={"CPU.AVX2": "1", "CPU.FMA": "1", "CPU.OPENMP": "1"},
    devices=(Device("CPU", "cpu", "A CPU", 8, 16),),
    extra_buffer_types=("CPU_REPACK",),
    gpu_offload=False,
    fingerprint="x",
    system="Linux",
)
GPU = Device("CUDA0", "gpu", "A GPU", 8_000_000_000, 16_000_000_000)


@pytest.fixture
def catalog() -> Catalog:
    return pairs.load_catalog(Path("/nonexistent"))


@pytest.mark.parametrize(
    ("feature", "level"),
    [("AVX2", Level.OK), ("AVX512", Level.ATTENTION), ("AMX_INT8", Level.ATTENTION), ("AVX_VNNI", Level.NOTE)],
)
def test_an_unused_instruction_set_is_named_and_weighed(feature: str, level: Level) -> None:
    """Prevents: a slow build that is not noticed, an alarm for a feature that old compilers lack, or for no reason."""
    finding = checkup.about_cpu(replace(CPU, features=CPU.features | {feature}), BUILD)
    assert finding.level is level
    assert "CPU_REPACK" in finding.found
    assert (f"built without {feature}" in finding.found) == (level is not Level.OK)
    assert ("pip install --force-reinstall" in finding.hint) == (level is Level.ATTENTION)


@pytest.mark.parametrize(
    ("reason", "isa", "features", "level", "words"),
    [
        ("", "avx512vnni", {"AVX512", "AVX512_VNNI", "AVX_VNNI"}, Level.OK, "with avx512vnni"),
        ("", "avx2", {"AVX512", "AVX512_VNNI", "AVX_VNNI"}, Level.NOTE, "compiled without avx512vnni"),
        ("", "avx2", {"AVX_VNNI"}, Level.NOTE, "compiled without avxvnni"),
        ("", "avx2", {"AVX512"}, Level.OK, "with avx2"),
        (tested_kernels.NOT_BUILT, "", {}, Level.NOTE, "not compiled"),
        ("their test crashes with SIGILL", "", {}, Level.ATTENTION, "SIGILL"),
        ("SIGKILL ended their test from outside", "", {}, Level.ATTENTION, "SIGKILL"),
    ],
)
def test_the_kernels_name_what_they_lack_and_a_crash_needs_attention(
    reason: str, isa: str, features: set[str], level: Level, words: str
) -> None:
    """Prevents: a slow instruction set without a cause, and a crash that reads like a choice."""
    cpu = replace(CPU, features=CPU.features | {"F16C", *features})
    finding = checkup.about_kernels(reason, isa, cpu)
    assert (finding.level, words in finding.found) == (level, True)
    assert ("doctor --fix" in finding.hint) is (level is not Level.OK)


def test_a_gpu_that_the_build_cannot_use_needs_attention() -> None:
    """Prevents: a CPU-only build on a machine with a GPU without a warning (FIELD_CASES 35)."""
    finding = checkup.about_gpu(BUILD, "NVIDIA")
    assert finding.level is Level.ATTENTION
    assert 'CMAKE_ARGS="-DGGML_CUDA=on"' in finding.hint
    assert 'CMAKE_ARGS="-DGGML_METAL=on"' in checkup.about_gpu(BUILD, "Apple").hint
    assert checkup.about_gpu(BUILD, "").level is Level.OK
    used = checkup.about_gpu(replace(BUILD, devices=(*BUILD.devices, GPU)), "NVIDIA")
    assert used.level is Level.OK
    assert "CUDA0 (A GPU, 8 GB of 16 GB free)" in used.found


def test_the_fallback_needs_attention_but_is_no_failure() -> None:
    """Prevents: a slow build that is never replaced."""
    finding = checkup.about_decode(ProbeResult(State.FALLBACK, False, "SIGILL", "dies with SIGILL", "build again"))
    assert (finding.level, finding.hint) == (Level.ATTENTION, "build again")


def test_the_kernel_paths_of_a_tuned_pair_are_named() -> None:
    """Prevents: a slower answer after a change of kernel paths, without a visible cause."""
    profile = Profile(
        made="2026-01-02T03:04:05+00:00",
        target_path=OWN,
        draft_path=AS_IN_FILE,
        step_s=0.04,
        costs=CostProfile(verify=((1, 1.0),), draft=((1, 0.2),)),
        classes=(),
    )
    tuned = checkup.about_tuning("coder", FoundProfile(profile))
    assert tuned.level is Level.OK
    for fact in ("2026-01-02", "specllama's kernels for the target", "weights as in the file for the draft"):
        assert fact in tuned.found
    for found, words in (
        (FoundProfile(), "coder was not tuned"),
        (FoundProfile(stale="the CPU changed since"), "CPU changed"),
    ):
        finding = checkup.about_tuning("coder", found)
        assert (finding.level, words in finding.found, "specllama tune" in finding.hint) == (Level.NOTE, True, True)


def test_memory_is_compared_with_the_default_pair(catalog: Catalog) -> None:
    """Prevents: an error only while loading."""
    assert checkup.about_memory(catalog, 1_000_000).level is Level.ATTENTION
    assert checkup.about_memory(catalog, 10**12).level is Level.OK


def test_a_missing_default_pair_names_the_command_and_the_disk_space(catalog: Catalog) -> None:
    """Prevents: a download that fails at 90 % on a disk that is too small."""
    pair = catalog.pair()
    models, disk = checkup.about_models(catalog, {}, 10**12)
    assert (models.level, disk.level) == (Level.NOTE, Level.OK)
    assert f"specllama models pull {pair.name}" in models.hint
    _, disk = checkup.about_models(catalog, {}, 1_000_000)
    assert disk.level is Level.ATTENTION
    both = {model.name: Path("x") for model in (pair.target, pair.draft)}
    models, disk = checkup.about_models(catalog, both, 0)
    assert (models.level, disk.level) == (Level.OK, Level.OK)


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without problems."""
    monkeypatch.setattr(checkup, "this_cpu", lambda: CPU)
    monkeypatch.setattr(crash_test, "installed", lambda: ProbeResult(State.OK))
    monkeypatch.setattr(llama, "build_info", lambda: BUILD)
    monkeypatch.setattr(llama, "memory_free", lambda: 10**12)
    monkeypatch.setattr(checkup, "_disk_free", lambda folder: 10**12)
    monkeypatch.setattr(checkup, "_gpu_on_board", lambda cpu: "")
    # Whether kernels can be attached depends on the tests before this one in the process.
    monkeypatch.setattr(tested_kernels, "problem", lambda: tested_kernels.NOT_BUILT)
    monkeypatch.setattr(llama, "own_kernels", lambda: None)  # it is remembered in the process
    monkeypatch.setattr(hub, "find", lambda model: Path("/models") / model.file)
    return monkeypatch


def test_a_sound_machine_needs_no_attention_and_goes_into_json(sound: pytest.MonkeyPatch) -> None:
    """Prevents: a value in the report that JSON cannot hold."""
    found = checkup.look()
    assert [each for each in found.findings if each.level is Level.ATTENTION] == []
    report = json.loads(to_json(found.to_json()))
    assert report["ok"] is True
    assert report["build"]["features"]["CPU.AVX2"] == "1"
    assert report["probe"]["state"] == "ok"
    assert {finding["name"] for finding in report["findings"]} >= {"llama.cpp", "decode", "CPU", "GPU", "models"}


def test_each_model_has_its_way_back_with_the_reason(
    sound: pytest.MonkeyPatch, tmp_path: Path, catalog: Catalog
) -> None:
    """Prevents: a choice between ways without a place that shows it; a damaged model that hides the others."""
    names = list(catalog.models)
    files = {
        names[0]: tiny.write_model(tmp_path / "a.gguf"),
        names[1]: tiny.write_model(tmp_path / "b.gguf", arch="gemma3", sliding_window=8),
        names[2]: tmp_path / "missing.gguf",
    }
    sound.setattr(hub, "find", lambda model: files.get(model.name))
    (found,) = (each.found for each in checkup.look().findings if each.name == "rollback")
    assert found.startswith(f"{names[0]}: truncation (attention alone")
    assert f"; {names[1]}: truncation (the whole cache takes" in found
    assert names[2] not in found


def test_a_broken_build_is_not_loaded_by_the_doctor_itself(sound: pytest.MonkeyPatch) -> None:
    """Prevents: a doctor that crashes with the build (FIELD_CASES 36)."""
    sound.setattr(
        crash_test, "installed", lambda: ProbeResult(State.BROKEN, signal="SIGILL", detail="dies", hint="mend")
    )
    sound.setattr(llama, "build_info", lambda: pytest.fail("loaded it"))
    found = checkup.look()
    assert found.needs_attention
    assert found.build is None
    assert [finding.hint for finding in found.findings if finding.level is Level.ATTENTION] == ["mend"]


def test_a_cache_that_cannot_be_written_is_a_finding(sound: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents: `models pull` that fails although the doctor found no problem."""
    assert checkup.about_cache(tmp_path / "new" / "specllama").level is Level.OK
    (tmp_path / "file").touch()
    sound.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = checkup.look()
    wrong = [finding for finding in found.findings if finding.level is Level.ATTENTION]
    assert [finding.name for finding in wrong] == ["cache"]
    assert "cannot be made in" in wrong[0].found
    assert "XDG_CACHE_HOME" in wrong[0].hint
    sound.setattr("os.access", lambda path, mode: False)
    assert "cannot be written" in checkup.about_cache(tmp_path).found


def test_bindings_that_do_not_load_and_a_spoilt_configuration_are_findings(sound: pytest.MonkeyPatch) -> None:
    """Prevents: an error of one part that hides all others."""
    sound.setattr(llama, "build_info", Mock(side_effect=BackendError("no such library", hint="install it")))
    sound.setattr(pairs, "load_catalog", Mock(side_effect=ConfigError("models.toml: bad line", hint="line 3")))
    found = checkup.look()
    wrong = {finding.name: finding.hint for finding in found.findings if finding.level is Level.ATTENTION}
    assert wrong == {"llama.cpp": "install it", "configuration": "line 3"}
