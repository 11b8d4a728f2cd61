"""Headers of models on the Hub, without a download."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama import llama
from specllama.base import disk
from specllama.base.errors import ModelFileError, SourceUnavailable
from specllama.files import hub_headers
from specllama.files.hub_headers import header_only
from specllama.files.model import HubSource, Model, WheelSource
from tests import tiny
from tests.homes import Watch
from tests.hubserver import HubServer

REPO = "maker/tiny-GGUF"
N_WEIGHTS = 2_000_000  # bytes that must not be downloaded


def model_of(file: str, repo: str = REPO) -> Model:
    return Model(file.removesuffix(".gguf"), file, None, None, "not stated", (HubSource(repo, file),))


@pytest.fixture
def large(tmp_path: Path, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on the Hub with weights much larger than its header; headers are read in small steps."""
    path = tiny.write_model(tmp_path / "large.gguf", n_embd=256, n_layer=2, n_ff=256)
    assert path.stat().st_size > N_WEIGHTS
    hub_server.repo(REPO).files["large.gguf"] = path.read_bytes()
    monkeypatch.setattr(hub_headers, "FIRST_BYTES", 1000)
    monkeypatch.setattr(hub_headers, "STEP_BYTES", 3000)
    return path


@pytest.mark.slow
def test_a_header_from_the_hub_equals_that_of_the_file(
    home: Path, large: Path, hub_server: HubServer, watch: Watch
) -> None:
    """Prevents: a download of gigabytes for a header; a header that differs from the file's."""
    with header_only(model_of("large.gguf"), watch=watch) as path:
        remote, here = llama.read_header(path), llama.read_header(large)
        assert remote.weight_bytes == here.weight_bytes
        assert remote.gguf.data == here.gguf.data
        assert remote.n_file_bytes == here.n_file_bytes
        assert llama.load_vocabulary(path).texts() == llama.load_vocabulary(large).texts()
        assert path.stat().st_blocks * 512 < N_WEIGHTS, "the weights are a hole"
        disk.FileRecord("test", path).keep(1)
    assert not path.exists()
    assert not (home / "cache" / "specllama" / "test").exists(), "a record of a deleted file"
    assert hub_server.n_sent < 20_000
    assert watch.n_bytes == hub_server.n_sent
    assert watch.n_open == 0


def test_a_server_that_ignores_ranges_is_cut_short(large: Path, hub_server: HubServer) -> None:
    """Prevents: a whole model in memory, or wrong bytes, from a mirror without range requests."""
    hub_server.ignores_ranges = True
    with header_only(model_of("large.gguf")) as path:
        assert llama.read_header(path).weight_bytes == llama.read_header(large).weight_bytes


def test_every_part_of_a_split_model_is_read(tmp_path: Path, hub_server: HubServer) -> None:
    """Prevents: the first part taken for the whole model (case 40)."""
    parts = tiny.write_split(tmp_path / "big", n_parts=3)
    for part in parts:
        hub_server.repo(REPO).files[part.name] = part.read_bytes()
    with header_only(model_of(parts[0].name)) as path:
        assert llama.read_header(path).weight_bytes == llama.read_header(parts[0]).weight_bytes
    del hub_server.repo(REPO).files[parts[2].name]
    with pytest.raises(SourceUnavailable, match="has no file"), header_only(model_of(parts[0].name)):
        pass


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"<!DOCTYPE html>", "is a web page"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "announces"),
        (b"GGUF\3", "ends inside its header"),
    ],
)
def test_other_files_are_named(hub_server: HubServer, body: bytes, found: str) -> None:
    """Prevents: an allocation, an endless download or a traceback by an untrusted repository."""
    hub_server.repo(REPO).files["odd.gguf"] = body
    with pytest.raises(ModelFileError, match=found), header_only(model_of("odd.gguf")) as path:
        llama.read_header(path)


@pytest.mark.parametrize("offline", [True, False])
def test_the_hint_is_to_pull_if_the_header_cannot_be_read(hub_server: HubServer, offline: bool) -> None:
    """Prevents: requests in offline mode; wheels read in part."""
    wheels = Model("x", "x.gguf", 1, "0" * 64, "MIT", (WheelSource("x-part{n}", "1", 2, "x/{n}"),))
    model = model_of("large.gguf") if offline else wheels
    with pytest.raises(SourceUnavailable) as caught, header_only(model, offline=offline):
        pass
    assert caught.value.hint == f"specllama models pull {model.name}"
    assert not hub_server.requests


def test_the_next_source_is_tried_if_one_does_not_answer(large: Path, hub_server: HubServer, watch: Watch) -> None:
    """Prevents: giving up after the first of two mirrors."""
    sources = (HubSource("maker/gone", "large.gguf"), HubSource(REPO, "large.gguf"))
    model = Model("large", "large.gguf", None, None, "x", sources)
    with header_only(model, watch=watch) as path:
        assert llama.read_header(path).n_layer == 2
    assert "next source" in watch.notes[0]
