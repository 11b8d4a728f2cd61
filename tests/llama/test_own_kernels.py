"""Our kernels inside llama.cpp: every type, every width, any number of threads, beside models without them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.core.arrays import FloatArray
from specllama.kernels import build
from specllama.kernels.library import BUFFER_TYPE, COARSE_ROWS, ISA_VARIABLE, PACKED
from specllama.llama import LlamaModel, tested_kernels
from tests import tiny
from tests.marks import slow

pytestmark = pytest.mark.skipif(bool(build.unsupported() or not build.compiler()), reason="no kernels on this machine")

TOKENS = [5 + (7 * i) % 90 for i in range(48)]
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 33)
FEW = (6, 12, 33)  # tokens in passes of 1, 4 and 33: beside other tests, two threads wait for each other in every pass
ROUNDING = 0.05  # see `_distance`: two ways to round activations to eight bits
MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "output"),
    *("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"),
)
# The self-test of the kernels (tests/kernels/test_arithmetic.py) covers every type in any case.
KINDS = (
    *("q4_0", "q8_0", "q4_k_s", "q6_k"),
    *map(slow, ("q4_1", "q5_0", "q5_1", "iq4_nl", "q2_k", "q3_k_s", "q5_k_s", "iq4_xs")),
)


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """Compiled and tested; the other tests of this process may have looked before."""
    build.build()
    assert tested_kernels.problem() == ""
    if llama.own_kernels() is None:
        pytest.skip("llama.cpp listed its buffer types before the kernels were built")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows fill superblocks."""
    path = tmp_path_factory.mktemp("wide") / "f32.gguf"
    return tiny.write_model(
        path, vocabulary=tiny.ascii_level(), n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_ctx=2048
    )


@pytest.fixture(scope="module", params=KINDS)
def quantized(request: pytest.FixtureRequest, wide: Path) -> Path:
    """The model in one quantization."""
    return tiny.requantized(wide, request.param)


def _rows(model: LlamaModel, width: int, tokens: list[int]) -> FloatArray:
    model.truncate(0)
    parts = [np.array(model.eval(tokens[at : at + width])) for at in range(0, len(tokens), width)]
    return np.concatenate(parts)


def _distance(found: FloatArray, expected: FloatArray) -> float:
    """The root mean square of the differences, in parts of the logits' own spread."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def test_logits_are_those_of_llama_cpp_for_every_type(quantized: Path) -> None:
    """Prevents: a layout or scale that is read wrongly. llama.cpp rounds activations in its own way."""
    with tiny.load(quantized, kernels=False) as model:
        expected = _rows(model, 16, TOKENS)
    with tiny.load(quantized, kernels=True) as model:
        assert model.plan.kernels
        found = _rows(model, 16, TOKENS)
    assert _distance(found, expected) < ROUNDING
    assert not np.array_equal(found, expected)  # it was not llama.cpp that computed both


def test_a_row_is_the_same_at_every_width_and_thread_count(quantized: Path) -> None:
    """Prevents: greedy text that depends on how many tokens were drafted."""
    with tiny.load(quantized, kernels=True) as model:
        one = _rows(model, 1, TOKENS)
        for width in WIDTHS[1:]:
            assert np.array_equal(_rows(model, width, TOKENS), one), width
    with tiny.load(quantized, kernels=True, n_threads=2) as model:
        for width, n in zip((1, 4, 33), FEW, strict=True):
            assert np.array_equal(_rows(model, width, TOKENS[:n]), one[:n]), width


@pytest.mark.parametrize("arch", ["llama", *map(slow, ("qwen2", "gemma3"))])
def test_attention_is_the_same_at_every_width_in_a_long_context(tmp_path: Path, arch: str) -> None:
    """Prevents: llama.cpp's own attention, which splits a single row by threads from 512 positions on."""
    path = tmp_path / "f32.gguf"
    window = {"sliding_window": 64} if arch == "gemma3" else {}
    tiny.write_model(
        path, arch=arch, vocabulary=tiny.ascii_level(), n_embd=64, n_head=4, n_head_kv=2, n_ctx=1024, **window
    )
    quantized = tiny.requantized(path, "q4_0")
    prompt = [5 + (11 * i) % 90 for i in range(600)]
    found = []
    for threads, sizes in ((1, (33, 33, 33)), (2, FEW)):
        with tiny.load(quantized, kernels=True, n_ctx=1024, n_threads=threads) as model:
            for width, n in zip((1, 4, 33), sizes, strict=True):
                model.truncate(0)
                model.feed(prompt)
                found.append(
                    np.concatenate([np.array(model.eval(TOKENS[at : at + width])) for at in range(0, n, width)])[:n]
                )
    assert all(np.array_equal(each, found[0][: len(each)]) for each in found)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_mixture_of_experts_is_the_same_at_every_width(tmp_path: Path, kind: str) -> None:
    """Prevents: another expert, or other bits, for a token that is verified beside others: the router is F32."""
    path = tmp_path / "experts.gguf"
    tiny.write_model(path, vocabulary=tiny.ascii_level(), n_embd=64, kinds=dict.fromkeys(MATRICES, kind), n_expert=5)
    with tiny.load(path, kernels=False) as model:
        expected = _rows(model, 16, TOKENS)
    with tiny.load(path, kernels=True) as model:
        one = _rows(model, 1, TOKENS)
        assert 0 < _distance(one, expected) < ROUNDING
        for width in (2, 4, 33):
            assert np.array_equal(_rows(model, width, TOKENS), one), width
    with tiny.load(path, kernels=True, n_threads=2) as model:
        for width, n in zip((1, 4, 33), FEW, strict=True):
            assert np.array_equal(_rows(model, width, TOKENS[:n]), one[:n]), width


@pytest.mark.slow
def test_the_instruction_set_of_the_environment_is_used(wide: Path, tmp_path: Path) -> None:
    """Prevents: a measurement or test of AVX2 that computes with the best set; an unknown set that goes unnoticed."""
    quantized = tiny.requantized(wide, "q4_k_s")
    program = f"""
import numpy as np
from pathlib import Path
from specllama import llama
from specllama.llama import tested_kernels
from tests.llama import test_own_kernels as here
print(bool(tested_kernels.problem()), llama.own_kernels() and llama.own_kernels().isa)
with here.tiny.load(Path({str(quantized)!r})) as model:
    np.save({str(tmp_path / "rows.npy")!r}, here._rows(model, 4, here.TOKENS))
"""
    with tiny.load(quantized, kernels=True) as model:
        expected = _rows(model, 4, TOKENS)
    for isa, said in (("avx2", "False avx2"), ("neon", "True None")):
        env = {**os.environ, ISA_VARIABLE: isa}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said
        assert _distance(np.load(tmp_path / "rows.npy"), expected) < ROUNDING


def test_models_with_and_without_our_kernels_live_side_by_side(quantized: Path) -> None:
    """Prevents: a model that computes with packed weights as if they were not, or the other way round."""
    with tiny.load(quantized, kernels=False) as plain:
        alone = _rows(plain, 4, TOKENS)
    with tiny.load(quantized, kernels=True) as ours, tiny.load(quantized, kernels=False) as plain:
        assert _distance(_rows(plain, 4, TOKENS), alone) < ROUNDING
        packed = _rows(ours, 4, TOKENS)
        assert np.array_equal(_rows(ours, 1, TOKENS), packed)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("n_expert", [0, 5])
def test_floating_point_weights_and_experts_are_taken(tmp_path: Path, kind: str, n_expert: int) -> None:
    """Prevents: a type that is packed and not computed, or computed from the wrong bits."""
    kinds = {} if kind == "F32" else dict.fromkeys(MATRICES, kind)
    path = tmp_path / "float.gguf"
    tiny.write_model(path, vocabulary=tiny.ascii_level(), kinds=kinds, n_expert=n_expert)
    with tiny.load(path, kernels=False) as model:
        expected = _rows(model, 16, TOKENS)
    with tiny.load(path, kernels=True) as model:
        found = _rows(model, 16, TOKENS)
        assert np.array_equal(_rows(model, 1, TOKENS), found)
    assert 0 < _distance(found, expected) < ROUNDING


def test_low_logits_of_a_draft_are_coarse_and_the_high_ones_exact(tmp_path: Path) -> None:
    """Prevents: a draft that reads its whole head for each token, or whose likeliest tokens are others than before; a
    law that depends on the tokens beside it, so that a seed gives another text with other requests.
    """
    path = tmp_path / "large.gguf"
    vocabulary = tiny.byte_level(extra_tokens=[f"<{i}>" for i in range(COARSE_ROWS)])
    tiny.write_model(path, vocabulary=vocabulary, n_embd=64, kinds=dict.fromkeys(MATRICES, "Q8_0"))
    with tiny.load(path, kernels=True) as model:
        exact = _rows(model, 16, TOKENS)
    with tiny.load(path, kernels=True, coarse_head=True) as model:
        draft = _rows(model, 16, TOKENS)
        assert np.array_equal(_rows(model, 1, TOKENS), draft)
    with tiny.load(path, kernels=True, coarse_head=True, n_threads=2) as model:
        assert np.array_equal(_rows(model, 4, TOKENS[:12]), draft[:12])
    assert np.array_equal(draft.argmax(axis=1), exact.argmax(axis=1))
    assert 0.05 < (draft == exact).mean() < 0.95
    high = exact > exact.max(axis=1, keepdims=True) - exact.std(axis=1, keepdims=True)
    assert (draft == exact)[high].all()
    with tiny.load(path, kernels=False) as model:
        expected = _rows(model, 16, TOKENS)
    with tiny.load(path, kernels=False, coarse_head=True) as model:  # llama.cpp has no coarse head
        assert np.array_equal(_rows(model, 16, TOKENS), expected)


def test_two_contexts_compute_in_two_threads(quantized: Path) -> None:
    """Prevents: a buffer of activations, or a counter of chunks, that two models share."""
    with tiny.load(quantized, kernels=True) as first, tiny.load(quantized, kernels=True, n_threads=2) as second:
        expected = _rows(first, 4, TOKENS)
        wrong = []

        def compare(model: LlamaModel) -> None:
            wrong.extend(n for n in range(10) if not np.array_equal(_rows(model, 1 + n % 5, TOKENS), expected))

        threads = [threading.Thread(target=compare, args=(model,)) for model in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_weights_are_in_our_buffer_and_in_no_other(quantized: Path) -> None:
    """Prevents: kernels that are loaded and never used."""
    heard: list[str] = []
    llama.set_log(lambda _level, text: heard.append(text))
    try:
        with tiny.load(quantized, kernels=True):
            pass
    finally:
        llama.set_log(None)
    sizes = [line for line in "".join(heard).splitlines() if "buffer size" in line and BUFFER_TYPE in line]
    assert sizes


def test_the_types_and_their_sizes_are_those_of_the_library() -> None:
    """Prevents: an estimate of memory, or a choice of kernel paths, for types that the library does not take."""
    kernels = llama.own_kernels()
    assert kernels is not None
    kernels._library.specllama_kernels_types.restype = ctypes.c_char_p
    words = kernels._library.specllama_kernels_types().decode().lower().split()
    assert dict(zip(words[::2], map(float, words[1::2]), strict=True)) == PACKED
