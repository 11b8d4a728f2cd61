"""Kernel paths: candidates, names, and JSON."""

from __future__ import annotations

import json

import pytest

from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath, Matrix, candidates
from specllama.llama.load_plan import LoadOptions

AMX, REPACK = "AMX", "CPU_REPACK"
# A Q4_K_M file on a CPU with AMX, and on one with AVX2 alone.
ON_AMX = [
    Matrix("blk.0.ffn_up.weight", "q4_K", 700, (AMX, REPACK)),
    Matrix("blk.0.ffn_down.weight", "q6_K", 300, (AMX,)),
    Matrix("output.weight", "q6_K", 100, (AMX,)),
]
ON_AVX2 = [
    Matrix("blk.0.ffn_up.weight", "q4_K", 700, (REPACK,)),
    Matrix("blk.0.ffn_down.weight", "q6_K", 300, ()),
]


def test_each_tensor_type_is_tried_in_every_buffer_that_holds_it() -> None:
    """Prevents: paths with some rearranged types that are never measured."""
    assert candidates(ON_AMX, 1100) == (
        DEFAULT,
        AS_IN_FILE,
        KernelPath(placed=(("q4_K", REPACK),)),
        KernelPath(False, (("q6_K", AMX),)),
        KernelPath(False, (("q4_K", AMX),)),
    )


def test_equal_paths_are_measured_once() -> None:
    """Prevents: minutes for one path under three names, with a winner by noise."""
    assert candidates(ON_AVX2, 1000) == (DEFAULT, AS_IN_FILE)
    assert candidates([ON_AVX2[1]], 300) == (DEFAULT,)
    assert candidates([], 300) == (DEFAULT,)


def test_a_type_with_few_weights_is_not_tried() -> None:
    """Prevents: a child process for each type with three tensors."""
    few = [*ON_AVX2, Matrix("blk.0.attn_k.weight", "q4_0", 10, (REPACK,))]
    assert candidates(few, 1010) == (DEFAULT, AS_IN_FILE, KernelPath(False, (("q4_0", REPACK),)))
    assert [path for path in candidates(few, 1010) if path.placed == (("q4_0", AMX),)] == []
    assert candidates(few, 100_000) == (DEFAULT, AS_IN_FILE)


def test_other_types_stay_in_llama_cpps_choice_for_any_order_of_shapes() -> None:
    """Prevents: an entry for AMX without weights, which fails on loading, because an odd shape is first."""
    odd = Matrix("output.weight", "q4_0", 200, (REPACK,))  # of a shape that AMX cannot hold
    usual = Matrix("blk.0.attn_q.weight", "q4_0", 200, (AMX, REPACK))
    matrices = [odd, usual, ON_AMX[1]]
    (path,) = (each for each in candidates(matrices, 700) if not each.extra_bufts and len(each.placed) == 2)
    assert [path.buffer_of(matrix) for matrix in matrices] == [REPACK, AMX, ""]


def test_a_head_that_is_the_embedding_stays_in_llama_cpps_choice() -> None:
    """Prevents: equal paths taken for different ones, or the reverse, by the largest matrix of the file."""
    head = Matrix("token_embd.weight", "q4_K", 500, (REPACK,), placeable=False)
    placed = KernelPath(False, (("q4_K", REPACK),))
    assert (DEFAULT.buffer_of(head), placed.buffer_of(head), placed.buffer_of(ON_AVX2[0])) == (REPACK, "", REPACK)
    assert candidates([head], 500) == (DEFAULT, AS_IN_FILE)


def test_of_several_buffers_for_a_type_the_first_that_fits_counts() -> None:
    """Prevents: an override that ends the process in llama.cpp."""
    path = KernelPath(False, (("q4_K", AMX), ("q4_K", REPACK)))
    assert [path.buffer_of(matrix) for matrix in (ON_AMX[0], ON_AVX2[0], ON_AMX[1])] == [AMX, REPACK, ""]


def test_different_paths_have_different_names() -> None:
    """Prevents: two paths with one name in a report."""
    assert DEFAULT.name == "rearranged weights"
    assert AS_IN_FILE.name == "weights as in the file"
    assert KernelPath(placed=(("q4_K", REPACK),)).name == "rearranged weights, Q4_K in CPU_REPACK"
    several = KernelPath(False, (("q4_K", AMX), ("q6_K", AMX), ("q4_0", REPACK)))
    assert several.name == "weights as in the file, Q4_K and Q6_K in AMX, Q4_0 in CPU_REPACK"


def test_a_path_comes_back_from_json_and_from_load_options() -> None:
    """Prevents: a lost tensor type in the profile, so that another path is loaded than was measured."""
    for path in candidates(ON_AMX, 1100):
        assert from_plain(KernelPath, json.loads(json.dumps(path.to_json()))) == path
        assert KernelPath.of(path.applied(LoadOptions(n_ctx=99))) == path
        assert path.applied(LoadOptions(n_ctx=99)).n_ctx == 99


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"extra_bufts": 1, "placed": []},
        {"extra_bufts": True, "placed": 3},
        {"extra_bufts": True, "placed": ["q4_K"]},
        {"extra_bufts": True, "placed": [["q4_K", "\x1b[31mAMX"]]},
        {"extra_bufts": True, "placed": [["q4_K", None]]},
    ],
)
def test_a_path_with_invalid_values_is_refused(data: object) -> None:
    """Prevents: a damaged profile that crashes C code or writes to the terminal."""
    with pytest.raises(ReportError, match="kernel path"):
        from_plain(KernelPath, data, "a kernel path")
