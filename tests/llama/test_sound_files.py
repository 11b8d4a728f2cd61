"""The first load of a model file, in a child process: what would end the program is an error."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from specllama import llama
from specllama.base import disk
from specllama.base.errors import BackendError, ModelFileError, SpecllamaError
from specllama.llama import crash_test, library_hash
from specllama.llama import model as model_module
from specllama.llama.bindings import bindings
from specllama.llama.crash_test import Use
from tests import tiny

pytestmark = pytest.mark.slow  # starts programs


@pytest.fixture(autouse=True)
def tested_build() -> None:
    """The first use of llama.cpp asks a child as well, which must not get the end that a test makes up."""
    bindings()


@pytest.fixture(autouse=True)
def untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is known to be sound."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "trust", lambda *parts: None)


@pytest.mark.parametrize(
    ("arch", "extra", "reason"),
    [
        ("qwen2", {"attention.key_length": 8, "rope.dimension_count": 8}, "GGML_ASSERT(n_embd_head"),
        ("gemma3", {"attention.sliding_window": 4, "attention.sliding_window_pattern": [False]}, "GGML_ASSERT("),
        ("llama", {"attention.head_count": 0}, ""),
        ("llama", {"rope.freq_base": "text"}, "rope.freq_base"),
        ("jamba", {"ssm.inner_size": 48}, "GGML_ASSERT(2 * n_embd == d_inner"),
        ("rwkv7", {"token_shift_count": 3}, "GGML_ASSERT(hparams.token_shift_count == 2"),
    ],
)
def test_a_file_that_ends_llama_cpp_or_does_not_load_is_an_error(
    tmp_path: Path, arch: str, extra: dict[str, object], reason: str
) -> None:
    """Prevents: a signal, or 'It fits' for a file that does not load, since `check` reads the vocabulary alone."""
    values = {f"{arch}.{key}": value for key, value in extra.items()}
    path = tiny.write_model(tmp_path / "odd.gguf", arch=arch, n_layer=1, extra=values)
    with pytest.raises(ModelFileError) as caught:
        llama.load_vocabulary(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.hint


def test_a_file_whose_graph_llama_cpp_lacks_is_not_called_damaged(tmp_path: Path) -> None:
    """Prevents: the advice to download a sound file again."""
    hints = set()
    for arch in ("gptj", "made-up"):  # a name that llama.cpp knows, and one that it does not
        with pytest.raises(ModelFileError, match=arch) as caught:
            llama.load(tiny.write_model(tmp_path / f"{arch}.gguf", arch=arch))
        hints.add(caught.value.hint)
    assert len(hints) == 1


def test_a_tokenizer_that_aborts_is_an_error(tmp_path: Path) -> None:
    """Prevents: SIGABRT in `check` and `run`."""
    extra = {"tokenizer.ggml.model": "bert"}
    path = tiny.write_model(tmp_path / "odd.gguf", vocabulary=tiny.sentencepiece(), extra=extra)
    with pytest.raises(ModelFileError, match="SIGABRT"):
        llama.load(path)


@pytest.mark.parametrize("arch", ["llama", "mamba", "qwen35"])
def test_a_sound_file_is_loaded(tmp_path: Path, arch: str) -> None:
    """Prevents: a trial that refuses every file."""
    path = tiny.write_model(tmp_path / "m.gguf", arch=arch)
    llama.load_vocabulary(path).close()
    llama.load(path).close()


def test_a_sound_file_is_tried_once(tmp_path: Path, children: list[Use]) -> None:
    """Prevents: a child process at each start; two children for one new file."""
    path, other = tiny.write_model(tmp_path / "m.gguf"), tiny.write_model(tmp_path / "n.gguf", seed=2)
    for use in (llama.load_vocabulary, llama.load, llama.load_vocabulary, llama.load):
        use(path).close()  # type: ignore[attr-defined]
    for use in (llama.load, llama.load_vocabulary):
        use(other).close()  # type: ignore[attr-defined]
    assert children == [Use(str(path), weights=False), Use(str(path)), Use(str(other))]


def test_another_file_or_another_build_is_tried_again(
    tmp_path: Path, children: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: trust in a file that was replaced, or in a llama.cpp that was updated."""
    path = tiny.write_model(tmp_path / "m.gguf")
    llama.load_vocabulary(path).close()
    tiny.write_model(path, n_layer=3)
    llama.load_vocabulary(path).close()
    assert len(children) == 2
    monkeypatch.setattr(library_hash, "of", lambda folder: "another build")
    llama.load_vocabulary(path).close()
    assert len(children) == 3


def test_a_model_of_the_catalog_needs_no_child(
    tmp_path: Path, children: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a slower first start with the default pair, whose checksums are known."""
    path, same = tiny.write_model(tmp_path / "m.gguf"), tiny.write_model(tmp_path / "same.gguf")
    shipped = frozenset([disk.checksum(path)])
    monkeypatch.setattr(crash_test, "shipped_checksums", lambda: shipped)
    llama.load(path).close()
    assert not children
    llama.load(same).close()
    assert len(children) == 1, "hashing gigabytes takes longer than the child"


def test_weights_that_do_not_fit_or_are_not_here_are_not_read(
    tmp_path: Path, children: list[Use], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a `check` that fills the memory; a vocabulary without weights that cannot be looked at."""
    bare = tiny.write_bare(tmp_path / "bare.gguf", vocabulary=tiny.letters())
    assert llama.load_vocabulary(bare).size == 12
    whole = tiny.write_model(tmp_path / "m.gguf")
    monkeypatch.setattr(model_module, "memory_free", lambda: 1000)
    llama.prove(llama.read_header(whole))
    assert children == [Use(str(bare), weights=False), Use(str(whole), weights=False)]


def test_both_files_of_a_pair_are_tried_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a first start that takes twice as long; a child that lives on after Ctrl-C."""
    started: list[subprocess.Popen[str]] = []
    start = crash_test._started

    @contextmanager
    def seen(use: Use) -> Iterator[subprocess.Popen[str]]:
        with start(use) as process:
            started.append(process)
            yield process

    def interrupt(*_: object) -> None:
        assert len(started) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(crash_test, "_started", seen)
    monkeypatch.setattr(crash_test, "_end_of", interrupt)
    headers = [llama.read_header(path) for path in tiny.write_pair(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        llama.prove(*headers)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (crash_test._End("SIGABRT", None, "GGML_ASSERT(x) failed"), ModelFileError),
        (crash_test._End("SIGKILL", None, ""), BackendError),
        (crash_test._End("", ModelFileError("no", hint="x"), ""), ModelFileError),
        (subprocess.TimeoutExpired("child", 1.0), ModelFileError),
    ],
)
def test_every_end_of_the_child_is_an_error(
    tmp_path: Path, end: object, kind: type[SpecllamaError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a file that ended the child and is loaded all the same."""

    def end_of(*_: object) -> object:
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(crash_test, "_started", nullcontext)
    monkeypatch.setattr(crash_test, "_end_of", end_of)
    path = tiny.write_model(tmp_path / "m.gguf")
    for _ in range(2):  # an error is not remembered
        with pytest.raises(kind) as caught:
            llama.load(path)
        assert type(caught.value) is kind
        assert caught.value.hint
