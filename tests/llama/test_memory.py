"""Memory: the estimate, what fits, and the load plan."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from specllama.base.errors import MemoryShort, UsageError
from specllama.kernels.library import BUFFER_TYPE
from specllama.llama import LoadOptions, load_plan, memory_free, memory_needed, read_header
from specllama.llama.header import Header
from specllama.llama.load_plan import GpuMemory, LoadPlan, physical_cores, plan_load
from specllama.llama.memory import compute_bytes, fit_context, kv_bytes, layers_that_fit, need_for
from tests import tiny
from tests.headers import QWEN

GB = 1_000_000_000
NO_GPU = GpuMemory(supported=False, n_free=0, shared=False)


def plan(
    options: LoadOptions | None = None,
    *,
    header: Header = QWEN,
    free: int = 64 * GB,
    gpu: GpuMemory = NO_GPU,
    extra: tuple[str, ...] = ("CPU_REPACK",),
) -> LoadPlan:
    return plan_load(header, options or LoadOptions(), free=free, gpu=gpu, extra=extra)


def test_the_kv_size_is_the_one_llama_cpp_allocates() -> None:
    """Prevents: a wrong KV formula; llama.cpp logs 112.00 MiB for this model at 4096 tokens."""
    assert kv_bytes(QWEN, 4096, "f16", "f16") == 112 * 1024 * 1024
    assert kv_bytes(QWEN, 1, "f16", "f16") == kv_bytes(QWEN, 256, "f16", "f16") == kv_bytes(QWEN, 257, "f16", "f16") / 2
    assert kv_bytes(QWEN, 4096, "q8_0", "q8_0") == 112 * 1024 * 1024 * 34 // 64, "numbers and scales"
    mixed = dataclasses.replace(QWEN, n_layer=2, n_head_kv=(1, 3))
    even = dataclasses.replace(QWEN, n_layer=2, n_head_kv=(2, 2))
    assert kv_bytes(mixed, 512, "f16", "f16") == kv_bytes(even, 512, "f16", "f16")


def test_the_compute_estimate_is_near_what_was_measured() -> None:
    """Prevents: an estimate that rejects models that fit, or accepts ones that do not.

    llama.cpp logs these compute buffers for this model, in MiB; an output row has 0.6 MB.
    """
    row = 151936 * 4
    for buffer, n_ctx, n_ubatch, n_outputs, flash_attn in (
        (68.51, 4096, 512, 33, "on"), (72.5, 8192, 512, 17, "on"), (75.7, 4096, 128, 128, "on"),
        (17.2, 4096, 128, 17, "on"), (120.01, 4096, 512, 33, "off"), (224.01, 8192, 512, 17, "off"),
        (76.44, 4096, 128, 128, "off"), (30.0, 4096, 128, 17, "off"),
    ):  # fmt: skip
        assert compute_bytes(QWEN, n_ctx, n_ubatch, n_outputs, flash_attn) == pytest.approx(
            buffer * 1024 * 1024 + n_outputs * row, rel=0.015
        )


def test_attention_without_flash_is_planned_for() -> None:
    """Prevents: `--flash-attn off` ended by the out-of-memory killer."""
    options = LoadOptions(n_ctx=8192, flash_attn="off")
    loaded, expected = plan(options), compute_bytes(QWEN, 8192, 512, 33, "off")
    assert loaded.need.compute == memory_needed(QWEN, options).compute == expected
    slots = {
        "n_slots": 4,
        "n_ctx": 4096,
        "max_rows": 128,
        "max_outputs": 128,
        "n_leaves": 1,
        "n_swa": 0,
        "free": 64 * GB,
    }
    found = load_plan.plan_slots(QWEN, loaded, **slots).need.compute
    assert found == compute_bytes(QWEN, 16384, 128, 128, "off")


def test_too_little_memory_is_an_error_before_loading() -> None:
    """Prevents: `--ctx-size 131072` ended by the out-of-memory killer (FIELD_CASES 27)."""
    with pytest.raises(
        MemoryShort, match=r"[\d.]+ GB are needed for .* of 131072 tokens, but only 2 GB are free"
    ) as caught:
        plan(LoadOptions(n_ctx=131072), free=2 * GB)
    assert "--ctx-size" in caught.value.hint


def test_context_size_zero_is_the_models_own_or_what_fits() -> None:
    """Prevents: 0 taken literally; a long-context model rejected although a shorter context fits."""
    assert plan(LoadOptions(n_ctx=0)).n_ctx == 32768
    for free in (1_400_000_000, 1_700_000_000, 2_000_000_000):
        chosen = plan(LoadOptions(n_ctx=0), free=free)
        more = need_for(QWEN, n_ctx=chosen.n_ctx + 256, n_ubatch=512, n_outputs=33).total
        assert 512 <= chosen.n_ctx < 32768
        assert chosen.need.total <= free < more
    with pytest.raises(MemoryShort):
        fit_context(QWEN, GB, n_ubatch=512, n_outputs=33, type_k="f16", type_v="f16")


def test_a_longer_context_than_trained_has_a_warning() -> None:
    """Prevents: wrong text behind the trained length without a warning."""
    assert any("trained for" in warning for warning in plan(LoadOptions(n_ctx=40000)).warnings)
    assert plan(LoadOptions(n_ctx=4096)).warnings == ()


def test_gpu_layers_on_a_cpu_build_have_a_warning() -> None:
    """Prevents: `-ngl 99` without effect and without a warning (FIELD_CASES 35)."""
    chosen = plan(LoadOptions(n_gpu_layers=99))
    assert chosen.n_gpu_layers == 0
    assert "-ngl 99" in chosen.warnings[0]
    assert "CMAKE_ARGS" in chosen.warnings[0]
    assert plan(LoadOptions(n_gpu_layers="auto")).warnings == ()
    assert plan(LoadOptions(n_gpu_layers=0)).warnings == ()


def test_automatic_gpu_layers_are_those_that_fit() -> None:
    """Prevents: too little GPU memory; an unused GPU that can hold half the model."""
    large = plan(gpu=GpuMemory(supported=True, n_free=24 * GB, shared=False))
    small = plan(gpu=GpuMemory(supported=True, n_free=1_200_000_000, shared=False))
    assert large.n_gpu_layers == 29
    assert 0 < small.n_gpu_layers < 29
    assert plan(gpu=GpuMemory(supported=True, n_free=100_000_000, shared=False)).n_gpu_layers == 0


def test_a_model_on_the_gpu_needs_no_main_memory() -> None:
    """Prevents: rejecting a model that fits the GPU because main memory is small."""
    gpu = GpuMemory(supported=True, n_free=24 * GB, shared=False)
    assert plan(LoadOptions(n_gpu_layers="all"), free=GB // 10, gpu=gpu).n_gpu_layers == 29
    with pytest.raises(MemoryShort):
        plan(LoadOptions(n_gpu_layers="all"), free=GB // 10, gpu=dataclasses.replace(gpu, shared=True))


def test_layers_that_fit_leave_room_for_the_compute_buffer() -> None:
    """Prevents: a GPU full of weights without room for a computation."""
    need = memory_needed(QWEN)
    assert layers_that_fit(QWEN, need, need.total) == 29
    assert layers_that_fit(QWEN, need, need.compute) == 0
    assert layers_that_fit(QWEN, need, 0) == 0


def test_a_file_is_mapped_unless_many_weights_are_rearranged() -> None:
    """Prevents: 1947 MB resident for a file of 1065 MiB, the mapped pages and a rearranged copy; a slow start."""
    assert not plan().use_mmap
    assert plan(LoadOptions(use_extra_bufts=False)).use_mmap
    assert plan(extra=()).use_mmap
    assert not plan(extra=("AMX",)).use_mmap
    assert not plan(extra=("SOMETHING_NEW",)).use_mmap
    assert plan(extra=(BUFFER_TYPE, "AMX")).use_mmap is (sys.platform != "win32")
    assert plan(LoadOptions(use_mmap=True)).use_mmap
    assert not plan(LoadOptions(use_mmap=False), extra=()).use_mmap
    mostly_plain = dataclasses.replace(QWEN, weight_bytes={"q4_K": 28_000_000, "q5_0": 300_000_000, "f16": 9})
    assert plan(header=mostly_plain).use_mmap


def test_what_is_kept_twice_or_padded_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an estimate that lacks the packed copy of an output matrix that is also the embedding: a sixth."""
    kinds = {"ffn_up": "Q4_0", "token_embd": "Q8_0"}
    path = tiny.write_model(tmp_path / "untied.gguf", n_layer=1, n_embd=64, n_ff=96, kinds=kinds)
    untied = read_header(path)
    tensors = [each for each in untied.gguf.tensors if each.name != "output.weight"]
    tied = dataclasses.replace(untied, files=(dataclasses.replace(untied.gguf, tensors=tuple(tensors)),))
    embedding = next(each.n_bytes for each in tensors if each.name == "token_embd.weight")
    matrix = 64 * 96 // 32 * 18

    def more(header: Header, options: LoadOptions | None = None, *extra: str) -> int:
        return plan(options, header=header, extra=extra).need.weights - header.n_weight_bytes

    monkeypatch.setitem(load_plan.PACKED, "q8_0", 1.5)
    monkeypatch.setitem(load_plan.PACKED, "q4_0", 1.25)
    assert more(untied) == more(tied) == 0
    assert more(untied, None, "AMX") == 0
    assert more(tied, None, "AMX") == embedding
    assert more(untied, None, BUFFER_TYPE) == matrix // 4
    assert more(tied, None, BUFFER_TYPE, "AMX") == 1.5 * embedding + matrix // 4
    assert more(tied, LoadOptions(use_extra_bufts=False), BUFFER_TYPE) == 0

    draft, copy = LoadOptions(coarse_head=True), tied.n_vocab * 18
    assert more(tied, draft, BUFFER_TYPE) == 1.5 * embedding + matrix // 4  # too small for a coarse copy
    monkeypatch.setattr(load_plan, "COARSE_ROWS", tied.n_vocab)
    assert more(tied, draft, BUFFER_TYPE) == 1.5 * embedding + matrix // 4 + copy
    assert more(tied, draft, "AMX") == embedding
    assert more(tied, None, BUFFER_TYPE) == 1.5 * embedding + matrix // 4


def test_batches_never_exceed_the_context_nor_blocks_the_batch() -> None:
    """Prevents: failed assertions in llama.cpp."""
    chosen = plan(LoadOptions(n_ctx=64, n_batch=512, n_ubatch=1024, max_block=100))
    assert (chosen.n_batch, chosen.n_ubatch, chosen.max_block) == (64, 64, 64)


def test_threads_default_to_the_physical_cores() -> None:
    """Prevents: two threads on one core, which are half as fast."""
    assert plan().n_threads == plan().n_threads_batch == physical_cores() >= 1
    chosen = plan(LoadOptions(n_threads=3))
    assert (chosen.n_threads, chosen.n_threads_batch) == (3, 3)
    assert plan(LoadOptions(n_threads=3, n_threads_batch=5)).n_threads_batch == 5


def test_without_a_count_of_cores_every_usable_cpu_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: one thread in gVisor, some containers and on boards that do not tell cores from threads."""
    monkeypatch.setattr(load_plan.psutil, "cpu_count", lambda **_which: None)
    monkeypatch.setattr(load_plan, "usable_cpus", lambda: 6)
    assert plan().n_threads == 6


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(n_ctx=-1),
        LoadOptions(n_ctx=1),
        LoadOptions(n_batch=1),
        LoadOptions(n_ubatch=0),
        LoadOptions(max_block=0),
        LoadOptions(n_threads=0),
        LoadOptions(n_threads_batch=100_000),
        LoadOptions(type_k="q3_0"),
        LoadOptions(flash_attn="maybe"),  # type: ignore[arg-type]
        LoadOptions(n_gpu_layers="some"),  # type: ignore[arg-type]
        LoadOptions(type_v="q8_0", flash_attn="off"),
    ],
)
def test_invalid_options_are_usage_errors(options: LoadOptions) -> None:
    """Prevents: a failed assertion or a null pointer in llama.cpp."""
    with pytest.raises(UsageError):
        plan(options)


def test_free_memory_is_a_plausible_number() -> None:
    """Prevents: kilobytes taken for bytes."""
    assert 10_000_000 < memory_free() < 1 << 50
