"""Placing weights by tensor type, on the real llama.cpp with tiny files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.base.errors import BackendError, ModelFileError, UsageError
from specllama.llama import LoadOptions, buffers
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath, Matrix, candidates, without_ours
from specllama.llama.load_plan import GpuMemory, plan_load
from tests import tiny

PROMPT = [0, 1, 2, 3, 0, 1, 2, 3]
# CPU_REPACK holds Q4_0 and IQ4_NL on every CPU that has it; AMX holds Q4_0 only.
KINDS = {"ffn_up": "Q4_0", "ffn_gate": "Q4_0", "ffn_down": "IQ4_NL", "attn_q": "Q8_0"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Matrices of three types; two of them can be rearranged on a CPU with extra buffer types."""
    return tiny.write_model(tmp_path / "mixed.gguf", n_embd=64, n_ff=128, kinds=KINDS)


@pytest.fixture
def by_name(path: Path) -> dict[str, Matrix]:
    """Its matrices. Skips if this CPU can rearrange neither type."""
    found = {matrix.name: matrix for matrix in llama.matrices(path)}
    if not all(found[f"blk.0.{name}.weight"].fits for name in ("ffn_up", "ffn_down")):
        pytest.skip("this CPU or build rearranges no Q4_0 and IQ4_NL weights")
    return found


def _load(path: Path, way: KernelPath) -> tuple[dict[str, float], np.ndarray]:
    """(MiB by buffer, as llama.cpp logs them; logits)"""
    heard: list[str] = []
    llama.set_log(lambda _level, text: heard.append(text))
    try:
        with tiny.load(path, use_extra_bufts=way.extra_bufts, placed=way.placed, kernels=way.own) as model:
            logits = np.array(model.eval(PROMPT))
    finally:
        llama.set_log(None)
    sizes = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", "".join(heard))
    return {name: float(size) for name, size in sizes}, logits


def _mib(by_name: dict[str, Matrix], way: KernelPath, buffer: str) -> float:
    return sum(matrix.n_bytes for matrix in by_name.values() if way.buffer_of(matrix) == buffer) / (1 << 20)


def test_every_path_places_the_weights_and_gives_the_same_logits(path: Path, by_name: dict[str, Matrix]) -> None:
    """Prevents: a placement that llama.cpp ignores, so that one path is measured twice; one with wrong logits."""
    ways = candidates(list(by_name.values()), llama.read_header(path).n_weight_bytes)
    assert len(ways) >= 4  # both, neither, and each of the two types alone
    _, expected = _load(path, AS_IN_FILE)
    for way in ways:
        sizes, logits = _load(path, way)
        used = {buffer for matrix in by_name.values() if (buffer := way.buffer_of(matrix))}
        assert set(sizes) - {"CPU", "CPU_Mapped"} == used, way.name
        for buffer in used:
            # llama.cpp logs two decimals; AMX pads its weights.
            assert sizes[buffer] == pytest.approx(_mib(by_name, way, buffer), rel=0.25, abs=0.011), way.name
        assert np.abs(logits - expected).max() < 0.1 * np.ptp(expected), way.name


def test_only_matrices_of_usable_types_are_asked_about(path: Path) -> None:
    """Prevents: a rearranged token embedding or norm, which llama.cpp would read wrongly."""
    names = {matrix.name for matrix in llama.matrices(path)}
    assert names == {f"blk.{layer}.{name}.weight" for layer in (0, 1) for name in KINDS}
    assert {matrix.kind for matrix in llama.matrices(path)} == {"q4_0", "iq4_nl", "q8_0"}


def test_a_shape_that_does_not_fit_is_not_placed_with_the_others(tmp_path: Path, by_name: dict[str, Matrix]) -> None:
    """Prevents: a crash by one tensor of a type that fits otherwise."""
    odd = tiny.write_model(tmp_path / "odd.gguf", n_embd=64, n_ff=128, n_vocab=13, kinds={"output": "Q4_0", **KINDS})
    fits = {matrix.name: without_ours(matrix).fits for matrix in llama.matrices(odd)}
    assert fits["output.weight"] == ()
    assert fits["blk.0.ffn_up.weight"] == without_ours(by_name["blk.0.ffn_up.weight"]).fits
    way = KernelPath(False, (("q4_0", fits["blk.0.ffn_up.weight"][0]),))
    sizes, logits = _load(odd, way)
    assert way.placed[0][1] in sizes
    assert np.isfinite(logits).all()


def test_a_pattern_matches_its_names_and_no_others() -> None:
    """Prevents: `blk.1.` that matches layer 11; a dot that matches any character."""
    names = ["blk.1.ffn_up.weight", "blk.10.ffn_up.weight", "blk.2.attn_q.weight", "output.weight"]
    found = buffers.patterns(names)
    assert len(found) == 3
    others = ["blk.0.ffn_up.weight", "blk.11.ffn_up.weight", "blk.1.attn_q.weight", "output_weight", "xoutput.weight"]
    for name in [*names, *others, "blk.1.ffn_up.bias", "blk.1.ffn_up.weight.x"]:
        assert sum(bool(re.search(pattern, name)) for pattern in found) == (name in names), name


def test_a_missing_buffer_type_is_named(path: Path) -> None:
    """Prevents: a null pointer as a buffer type; weights that are silently not placed."""
    with pytest.raises(BackendError, match="Q4_0 weights cannot be stored in NO_SUCH_BUFFER"):
        tiny.load(path, placed=(("q4_0", "NO_SUCH_BUFFER"),))


def test_a_type_that_the_buffer_cannot_hold_is_refused(path: Path, by_name: dict[str, Matrix]) -> None:
    """Prevents: an abort in llama.cpp; the default path under another name."""
    buffer = by_name["blk.0.ffn_down.weight"].fits[0]
    with pytest.raises(BackendError, match=f"no Q5_1 weights that {buffer} can hold"):
        tiny.load(path, placed=(("q5_1", buffer),))


def test_a_damaged_file_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """Prevents: a crash by a null pointer."""
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF, they say")
    with pytest.raises(ModelFileError, match="damaged"):
        llama.matrices(path)


def test_weights_are_mapped_unless_that_keeps_them_twice(path: Path) -> None:
    """Prevents: a second copy of the model that the estimate ignores; a slow start without need."""
    gpu = GpuMemory(supported=False, n_free=0, shared=False)
    header = llama.read_header(path)

    def mapped(way: KernelPath) -> bool:
        options = way.applied(LoadOptions(n_ctx=64))
        return plan_load(header, options, free=1 << 40, gpu=gpu, extra=("CPU_REPACK",)).use_mmap

    assert mapped(AS_IN_FILE)
    assert not mapped(DEFAULT)
    assert not mapped(KernelPath(False, (("q4_0", "CPU_REPACK"),)))
    assert mapped(KernelPath(False, (("q5_0", "CPU_REPACK"),)))


def test_no_weights_are_placed_with_layers_on_a_gpu(path: Path) -> None:
    """Prevents: weights kept off the GPU by a path that was measured without one."""
    gpu = GpuMemory(supported=True, n_free=1 << 40, shared=False)
    options = KernelPath(True, (("q4_0", "CPU_REPACK"),)).applied(LoadOptions(n_ctx=64))
    with pytest.raises(UsageError, match="GPU"):
        plan_load(llama.read_header(path), options, free=1 << 40, gpu=gpu, extra=("CPU_REPACK",))


@pytest.mark.slow
def test_no_logit_depends_on_memory_that_was_never_written(tmp_path: Path) -> None:
    """Prevents: NaN now and then on CPUs with AMX, whose kernels read past rows of a single block."""
    path = tmp_path / "q8_0.gguf"
    llama.requantize(tiny.write_model(tmp_path / "narrow.gguf", vocabulary=tiny.ascii_level()), path, "q8_0")
    code = (
        "import sys, numpy as np; from pathlib import Path; from specllama import llama\n"
        "with llama.load(Path(sys.argv[1]), llama.LoadOptions(n_ctx=64, n_threads=1)) as model:\n"
        "    model.feed(list(range(3, 43)))\n"
        "    print(np.isfinite(model.eval([3, 4, 5])).all())"
    )
    env = {**os.environ, "MALLOC_PERTURB_": "1"}  # glibc fills what it hands out
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
