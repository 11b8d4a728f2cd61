"""Files with the shapes of large models, and the calculations made from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import sizes
from specllama import llama
from specllama.files.catalog import load_catalog
from specllama.llama import LoadOptions
from tests import tiny


@pytest.mark.parametrize(
    ("size", "published"), [("7B", "qwen2.5-coder-7b-instruct-q4_k_m"), ("14B", "qwen2.5-coder-14b-instruct-q4_k_m")]
)
def test_a_shape_has_the_bytes_of_the_published_file(size: str, published: str) -> None:
    """Prevents: costs of a cheaper mixture of types than people load. A header has some megabytes."""
    n_bytes = load_catalog().model(published).size
    assert n_bytes is not None
    assert 0 < n_bytes - sizes.SHAPES[size].n_bytes < 10_000_000


@pytest.mark.slow
def test_a_written_model_loads_and_its_rows_are_finite(tmp_path: Path) -> None:
    """Prevents: NaN in a file of random weights, which makes passes slower; a vocabulary that llama.cpp refuses."""
    base = tmp_path / "base.gguf"
    tiny.write_model(base, arch="qwen2")
    header = llama.read_header(base)
    shape = sizes.Shape(256, 3, 4, 2, 512, header.n_vocab + 8, tied=False)
    sizes.write_model(header, shape, tmp_path / "random.gguf")
    with llama.load(tmp_path / "random.gguf", LoadOptions(n_ctx=64, n_threads=1, kernels=False)) as model:
        assert model.vocab_size == header.n_vocab + 8
        assert np.isfinite(model.eval((1, 2, 3))).all()
    written = llama.read_header(tmp_path / "random.gguf")
    assert written.n_weight_bytes == shape.n_bytes
    assert (written.n_layer, written.n_ff, written.n_head_kv[0]) == (3, 512, 2)


def test_reading_and_multiplying_at_once_bounds_the_gain_from_above() -> None:
    """Prevents: a calculated range whose ends are exchanged, or a pass that costs less than T(1)."""
    work, small = sizes.SHAPES["7B"].work, sizes.Work(485_000_000, 494_000_000)
    for paper in sizes.PAPER:
        apart, at_once = (paper.costs(work, small, both) for both in (False, True))
        assert all(1.0 <= at_once.verify_cost(n) <= apart.verify_cost(n) + 1e-9 for n in (1, 4, 8, 16))
        assert paper.pass_s(work, 1, True) < paper.pass_s(work, 1, False)
