"""Two models that are loaded at the same time: as each alone, and freed after any error."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specllama import llama
from specllama.base.errors import Interrupted, MemoryShort, ModelFileError
from specllama.core.arrays import FloatArray
from specllama.kernels import build
from specllama.llama import LlamaModel, LoadOptions, model, open
from tests import tiny

OPTIONS = LoadOptions(n_ctx=256, n_threads=2)
TOKENS = [1, 5, 7, 3]
N_TIMES = 30

LOADED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from specllama import llama

def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))

path = Path(sys.argv[1])
with llama.load(path, llama.LoadOptions(n_ctx=64, n_threads=1)):  # the pages of the libraries
    before = resident()
with llama.load(path, llama.LoadOptions(n_ctx=64, n_threads=1)) as model:
    assert model.plan.use_mmap and model.plan.kernels
    assert resident() - before < path.stat().st_size / 4, (resident(), before)
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tiny.write_model(tmp_path / "target.gguf"), tiny.write_model(tmp_path / "draft.gguf", seed=2, n_layer=1)


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A file that llama.cpp refuses."""
    path = tiny.write_model(tmp_path / "wrong.gguf", arch="made-up")
    tiny.trust(path)
    return path


def _rows(loaded: LlamaModel) -> FloatArray:
    return np.array(loaded.eval(TOKENS))


def test_models_that_are_loaded_together_are_those_that_are_loaded_alone(files: tuple[Path, Path]) -> None:
    """Prevents: a loader, a log or our kernels with state that two loads share."""
    expected = []
    for path, kernels in zip(files, (True, False), strict=True):
        with tiny.load(path, kernels=kernels) as loaded:
            expected.append(_rows(loaded))
    ways = LoadOptions(n_ctx=256, n_threads=2), LoadOptions(n_ctx=256, n_threads=1, kernels=False)
    for _ in range(N_TIMES):
        first, second = llama.load_together(list(zip(files, ways, strict=True)))
        with first, second:
            assert not second.plan.kernels
            for found, rows in zip((first, second), expected, strict=True):
                assert np.array_equal(_rows(found), rows)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_that_cannot_be_loaded_ends_the_other_load(
    files: tuple[Path, Path], wrong: Path, *, is_first: bool
) -> None:
    """Prevents: a message about the sound file; a model that stays in memory."""
    pair = [(wrong, OPTIONS), (files[0], OPTIONS)]
    alive = set(open._alive)
    with pytest.raises(ModelFileError, match=r"wrong\.gguf: .*unknown model architecture: 'made-up'$"):
        llama.load_together(pair if is_first else pair[::-1])
    assert open._alive == alive


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_failure_outside_of_llama_cpp_is_raised_as_itself(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], which: str
) -> None:
    """Prevents: a traceback of a thread, and a sound file that is called damaged."""

    def failing(path: Path) -> bytes:
        if path.stem == which:
            raise MemoryError(which)
        return os.fsencode(path)

    monkeypatch.setattr(open, "os", SimpleNamespace(fsencode=failing))
    with pytest.raises(MemoryError, match=which):
        llama.load_together([(path, OPTIONS) for path in files])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("n_done", [0, 1])
def test_a_load_that_is_stopped_frees_both(files: tuple[Path, Path], n_done: int) -> None:
    """Prevents: gigabytes that stay in a chat whose load was stopped."""
    alive, shares = set(open._alive), list[float]()

    def progress(share: float) -> bool:
        shares.append(share)
        return share < n_done

    with pytest.raises(Interrupted, match=r"target\.gguf and draft\.gguf"):
        llama.load_together([(path, OPTIONS) for path in files], progress=progress)
    assert open._alive == alive
    assert shares == sorted(shares)


def test_models_that_are_dropped_are_freed_at_once(files: tuple[Path, Path]) -> None:
    """Prevents: gigabytes that stay until Python looks for cycles, in a finalizer that drops a Ctrl-C."""
    alive = set(open._alive)
    gc.collect()
    gc.disable()
    try:
        loaded = llama.load_together([(path, OPTIONS) for path in files])
        assert len(open._alive - alive) == 2
        del loaded
        assert not open._alive - alive
    finally:
        gc.enable()


def test_memory_has_to_suffice_for_both(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: two models that fit alone, and end the process together."""
    needs = [llama.memory_needed(llama.read_header(path), OPTIONS).total for path in files]
    pair, alive = [(path, OPTIONS) for path in files], set(open._alive)
    monkeypatch.setattr(model, "memory_free", lambda: sum(needs) - 1)
    with pytest.raises(MemoryShort, match=r"draft\.gguf"):
        llama.load_together(pair)
    assert open._alive == alive
    monkeypatch.setattr(model, "memory_free", lambda: sum(needs))
    for loaded in llama.load_together(pair):
        loaded.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the figures are Linux's")
@pytest.mark.skipif(bool(build.unsupported() or not build.compiler()), reason="no kernels on this machine")
def test_packed_weights_of_a_mapped_file_are_in_memory_once(tmp_path: Path) -> None:
    """Prevents: a process whose memory is that of the file and of the packed weights."""
    build.build()
    path = tiny.write_model(tmp_path / "large.gguf", n_embd=512, n_ff=2048, n_layer=6)
    tiny.trust(path)
    done = subprocess.run([sys.executable, "-c", LOADED, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
