"""Files that are no loadable model: one sentence each, with path, reason and hint, and nothing reaches llama.cpp."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from specllama.base.errors import ModelFileError, UnsupportedModel
from specllama.llama import load, load_vocabulary, read_header
from tests import tiny


def refusal(path: Path, kind: type[ModelFileError | UnsupportedModel] = ModelFileError) -> str:
    """The message and hint with which `path` is refused; both must be there, and the path must be named."""
    with pytest.raises(kind) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return f"{caught.value} / {caught.value.hint}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Prevents: llama.cpp's bare null pointer as the answer to a typing error."""
    assert "no file" in refusal(tmp_path / "nowhere.gguf")


def test_a_directory_is_refused_with_a_file_of_it_as_hint(tmp_path: Path) -> None:
    """Prevents: 'is a directory' without saying what to give instead."""
    model = tiny.write_model(tmp_path / "inside.gguf")
    told = refusal(tmp_path)
    assert "directory" in told
    assert str(model) in told


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"Hello, this is a text.\n", "text file"),
        ("Grüße aus Köln".encode(), "text file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"PK\x03\x04" + bytes(60), "zip"),
        (b"tjgg" + bytes(60), "old GGML"),
        (b"lmgg" + bytes(60), "old GGML"),
        (struct.pack("<Q", 200) + b'{"a":1}', "safetensors"),
        (b"\x00\x01\x02\x03" + bytes(60), "something else"),
        (b"GGUF\x03", "ends inside its header"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 1, 1) + bytes(200), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 1, 1) + bytes(200), "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 1, 1) + bytes(200), "byte order"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1) + bytes(200), "announces"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 1 << 60) + bytes(200), "announces"),
    ],
)
def test_what_is_not_a_readable_gguf_file_is_called_what_it_is(tmp_path: Path, content: bytes, expected: str) -> None:
    """Prevents: an allocation by a damaged count, or 'failed to load model' for a web page saved as a model."""
    path = tmp_path / "thing.gguf"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_a_truncated_file_is_told_with_both_sizes(tmp_path: Path) -> None:
    """Prevents: an interrupted download that loads, or dies with a bus error in the middle of an answer."""
    path = tiny.write_model(tmp_path / "short.gguf")
    whole = path.stat().st_size
    told = refusal(tiny.cut(path, 100))
    assert "truncated" in told
    assert str(whole - 100) in told
    assert "download" in told


def test_a_file_cut_inside_its_header_is_damaged(tmp_path: Path) -> None:
    """Prevents: reading past the end of the file."""
    path = tiny.write_model(tmp_path / "short.gguf")
    assert "damaged" in refusal(tiny.cut(path, path.stat().st_size - 700))


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.pre"])
def test_what_newer_models_bring_blames_the_bindings_age(tmp_path: Path, key: str) -> None:
    """Prevents: 'corrupted file' for a model that only needs newer bindings."""
    told = refusal(tiny.write_model(tmp_path / "new.gguf", extra={key: "nextgen"}))
    assert "nextgen" in told
    assert "update" in told


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    """Prevents: loading one of llama.cpp's ggml-vocab files until the first tensor is missed."""
    assert "no weights" in refusal(tiny.write_bare(tmp_path / "vocab.gguf", vocabulary=tiny.byte_level()))


@pytest.mark.parametrize(("key", "value"), [("general.architecture", "clip"), ("general.type", "adapter")])
def test_a_projector_and_an_adapter_are_no_language_models(tmp_path: Path, key: str, value: str) -> None:
    """Prevents: the mmproj file beside a multimodal model, or a LoRA file, being loaded as the model."""
    assert "not a language model" in refusal(tiny.write_model(tmp_path / "part.gguf", extra={key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 100_000),
        ("llama.expert_count", 100_000),
        ("llama.expert_used_count", 3),
        ("llama.rope.scaling.type", "nonsense"),
        ("llama.attention.head_count", "two"),
        ("llama.attention.head_count_kv", ["one", "two"]),
        ("llama.context_length", 3_000_000_000),
        ("llama.expert_count", True),
        ("llama.attention.causal", 1),
        ("split.count", "two"),
        ("general.name", 7),
    ],
)
def test_numbers_that_would_trip_an_assertion_are_refused(tmp_path: Path, key: str, value: object) -> None:
    """Prevents: GGML_ASSERT ending the process over a damaged number."""
    told = refusal(tiny.write_model(tmp_path / "odd.gguf", extra={key: value}))
    assert key in told


def test_a_missing_tensor_is_quoted_from_llama_cpp(tmp_path: Path) -> None:
    """Prevents: losing the reason that llama.cpp only logs."""
    path = tiny.write_model(tmp_path / "more.gguf", extra={"llama.block_count": 3})
    assert "blk.2" in refusal(path)


def test_a_split_model_loads_from_its_first_part(tmp_path: Path) -> None:
    """Prevents: needing to join the parts by hand; the parts together are the model."""
    parts = tiny.write_split(tmp_path / "whole", 3)
    about = read_header(parts[0])
    assert about.parts == tuple(parts)
    assert about.n_file_bytes == sum(part.stat().st_size for part in parts)
    whole = tiny.write_model(tmp_path / "one.gguf")
    with tiny.load(parts[0]) as model, tiny.load(whole) as reference:
        assert (model.eval([1, 2, 3]) == reference.eval([1, 2, 3])).all()


def test_a_later_part_says_which_part_to_give(tmp_path: Path) -> None:
    """Prevents: 'illegal split file idx' (FIELD_CASES 40)."""
    parts = tiny.write_split(tmp_path / "whole", 3)
    assert f"give part 1: {parts[0]}" in refusal(parts[1])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Prevents: searching for the part that was not downloaded."""
    parts = tiny.write_split(tmp_path / "whole", 3)
    parts[2].unlink()
    assert parts[2].name in refusal(parts[0])


def test_a_truncated_later_part_is_named(tmp_path: Path) -> None:
    """Prevents: checking only the part that was given."""
    parts = tiny.write_split(tmp_path / "whole", 2)
    tiny.cut(parts[1], 64)
    with pytest.raises(ModelFileError, match="truncated") as caught:
        load(parts[0])
    assert str(parts[1]) in str(caught.value)


def test_a_renamed_part_is_explained(tmp_path: Path) -> None:
    """Prevents: 'invalid split file name' for a browser's `model (1).gguf`."""
    parts = tiny.write_split(tmp_path / "whole", 2)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    assert "model-00001-of-00002.gguf" in refusal(renamed)


def test_a_recurrent_model_is_refused_by_its_header(tmp_path: Path) -> None:
    """Prevents: loading gigabytes before saying that the model cannot roll back (FIELD_CASES 20)."""
    told = refusal(tiny.write_model(tmp_path / "mamba.gguf", arch="mamba"), UnsupportedModel)
    assert "roll" in told


def test_a_recurrent_model_that_no_list_names_is_refused_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: trusting our own list of names where llama.cpp knows better."""
    monkeypatch.setattr("specllama.llama.header._RECURRENT", frozenset())
    told = refusal(tiny.write_model(tmp_path / "mamba.gguf", arch="mamba"), UnsupportedModel)
    assert "recurrent" in told


def test_a_memory_that_cannot_roll_back_is_found_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a kind of memory that neither list knows, refusing its first rollback in the middle of an answer."""
    monkeypatch.setattr("specllama.llama.header._RECURRENT", frozenset())
    monkeypatch.setattr("specllama.llama.model.refuse_kind", lambda native, about: None)
    told = refusal(tiny.write_model(tmp_path / "mamba.gguf", arch="mamba"), UnsupportedModel)
    assert "refused a rollback" in told


@pytest.mark.parametrize(
    "extra",
    [*({"general.architecture": arch} for arch in ("bert", "llada", "jamba", "t5")), {"llama.attention.causal": False}],
)
def test_models_that_do_not_write_left_to_right_are_refused(tmp_path: Path, extra: dict[str, object]) -> None:
    """Prevents: an embedding, diffusion or hybrid model getting as far as an answer."""
    refusal(tiny.write_model(tmp_path / "other.gguf", extra=extra), UnsupportedModel)


def test_a_vocabulary_can_be_read_without_the_weights_being_loadable(tmp_path: Path) -> None:
    """Prevents: `check` loading whole models only to compare their tokens."""
    path = tiny.write_model(tmp_path / "more.gguf", vocabulary=tiny.byte_level(), extra={"llama.block_count": 3})
    vocabulary = load_vocabulary(path)
    assert vocabulary.size == 263
    assert vocabulary.texts() == list(tiny.byte_level().tokens)


def test_the_header_tells_sizes_names_and_metadata(tmp_path: Path) -> None:
    """Prevents: pairs and memory being judged by numbers other than the file's."""
    path = tiny.write_model(tmp_path / "m.gguf", n_layer=3, n_embd=64, n_head=4, n_head_kv=2, n_ctx=1024)
    about = read_header(path)
    assert (about.architecture, about.name, about.n_layer, about.n_embd) == ("llama", "tiny llama", 3, 64)
    assert (about.n_head, about.n_head_kv, about.key_length, about.n_ctx_train) == (4, (2, 2, 2), 16, 1024)
    assert (about.n_vocab, about.n_swa, set(about.weight_bytes)) == (12, 0, {"f32"})
    assert about.n_file_bytes > about.n_weight_bytes > 0.5 * about.n_file_bytes
    assert about.metadata["tokenizer.ggml.add_bos_token"] == "false"


def test_heads_per_layer_may_be_an_array(tmp_path: Path) -> None:
    """Prevents: OpenELM-like files, with other head counts in each layer, giving a wrong KV size."""
    path = tiny.write_model(tmp_path / "m.gguf", n_layer=2, extra={"llama.attention.head_count_kv": [1, 2]})
    assert read_header(path).n_head_kv == (1, 2)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    """Prevents: `run -m PIPE` that hangs without a word."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="no regular file"):
        read_header(pipe)
