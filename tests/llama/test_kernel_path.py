"""Kernel paths: candidates, names, JSON, and what llama.cpp makes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain
from specllama.kernels.library import BUFFER_TYPE
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, OWN, KernelPath, candidates
from specllama.llama.load_plan import GpuMemory, plan_load
from tests import tiny

AMX, REPACK = "AMX", "CPU_REPACK"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """CPU_REPACK holds Q4_0 on every CPU that has it, AMX as well."""
    return tiny.write_model(tmp_path / "mixed.gguf", n_embd=64, n_ff=128, kinds={"ffn_up": "Q4_0", "attn_q": "Q8_0"})


def test_only_paths_that_hold_some_of_the_weights_are_tried(path: Path, tmp_path: Path) -> None:
    """Prevents: minutes for one path under two names, with a winner by noise; a path that is never measured."""
    header = llama.read_header(path)
    assert candidates(header, (BUFFER_TYPE, AMX, REPACK)) == (OWN, DEFAULT, AS_IN_FILE)
    assert candidates(header, (REPACK,)) == (DEFAULT, AS_IN_FILE)
    assert candidates(header, (BUFFER_TYPE,)) == (OWN, DEFAULT)
    assert candidates(header, ()) == (DEFAULT,)
    plain = llama.read_header(tiny.write_model(tmp_path / "plain.gguf"))
    assert candidates(plain, (BUFFER_TYPE, AMX, REPACK)) == (DEFAULT,)


def test_every_path_places_the_weights_and_gives_the_same_logits(path: Path) -> None:
    """Prevents: a path that llama.cpp ignores, so that one is measured twice; one with wrong logits."""
    buffers, rows = {}, {}
    for way in (DEFAULT, AS_IN_FILE):
        heard: list[str] = []
        llama.set_log(lambda _level, text, heard=heard: heard.append(text))  # type: ignore[misc]
        try:
            with llama.load(path, way.applied(LoadOptions(n_ctx=64))) as model:
                rows[way] = np.array(model.eval([0, 1, 2, 3, 0, 1, 2, 3]))
        finally:
            llama.set_log(None)
        buffers[way] = set(re.findall(r"(\S+) model buffer size", "".join(heard))) - {"CPU", "CPU_Mapped"}
    assert buffers[AS_IN_FILE] == set()
    theirs = {AMX, REPACK} & set(llama.build_info().extra_buffer_types)
    assert buffers[DEFAULT] <= theirs
    assert bool(buffers[DEFAULT]) == bool(theirs)
    assert np.abs(rows[DEFAULT] - rows[AS_IN_FILE]).max() < 0.1 * np.ptp(rows[AS_IN_FILE])


def test_different_paths_have_different_names() -> None:
    """Prevents: two paths with one name in a report."""
    names = [path.name for path in (OWN, DEFAULT, AS_IN_FILE)]
    assert names == ["specllama's kernels", "rearranged weights", "weights as in the file"]


@pytest.mark.parametrize("path", [OWN, DEFAULT, AS_IN_FILE])
def test_a_path_comes_back_from_json_and_from_load_options(path: KernelPath) -> None:
    """Prevents: a profile from which another path is loaded than was measured."""
    assert from_plain(KernelPath, json.loads(json.dumps(path.to_json()))) == path
    assert KernelPath.of(path.applied(LoadOptions(n_ctx=99))) == path
    assert path.applied(LoadOptions(n_ctx=99)).n_ctx == 99


@pytest.mark.parametrize("data", [None, {"extra_bufts": 1}, {"own": "yes"}])
def test_a_path_with_invalid_values_is_refused(data: object) -> None:
    """Prevents: a damaged profile that crashes C code or writes to the terminal."""
    with pytest.raises(ReportError, match="kernel path"):
        from_plain(KernelPath, data, "a kernel path")


def test_weights_are_mapped_unless_that_keeps_them_twice(tmp_path: Path) -> None:
    """Prevents: a second copy of the model that the estimate ignores; a slow start without need."""
    gpu = GpuMemory(supported=False, n_free=0, shared=False)
    kinds = dict.fromkeys(("ffn_up", "ffn_gate", "ffn_down"), "Q4_0")
    header = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_embd=64, n_ff=512, kinds=kinds))

    def mapped(way: KernelPath, buffer: str) -> bool:
        options = way.applied(LoadOptions(n_ctx=64))
        return plan_load(header, options, free=1 << 40, gpu=gpu, extra=(buffer,)).use_mmap

    assert mapped(AS_IN_FILE, REPACK)
    assert not mapped(DEFAULT, REPACK)
    assert mapped(OWN, BUFFER_TYPE) is (sys.platform != "win32")  # pages are dropped once they are packed


@pytest.mark.slow
def test_no_logit_depends_on_memory_that_was_never_written(tmp_path: Path) -> None:
    """Prevents: NaN now and then on CPUs with AMX, whose kernels read past rows of a single block."""
    path = tiny.requantized(tiny.write_model(tmp_path / "narrow.gguf", vocabulary=tiny.ascii_level()), "q8_0")
    code = (
        "import sys, numpy as np; from pathlib import Path; from specllama import llama\n"
        "with llama.load(Path(sys.argv[1]), llama.LoadOptions(n_ctx=64, n_threads=1)) as model:\n"
        "    model.feed(list(range(3, 43)))\n"
        "    print(np.isfinite(model.eval([3, 4, 5])).all())"
    )
    env = {**os.environ, "MALLOC_PERTURB_": "1"}  # glibc fills what it hands out
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
