"""Files that cannot be loaded: an error with path, reason and hint before llama.cpp reads the file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base.errors import ModelFileError, UnsupportedModel
from specllama.files import gguf_check
from specllama.llama import load, load_vocabulary, read_header
from specllama.llama.rollback import TRUNCATION, Rollback, SavedStates, Truncation
from specllama.llama.ways import by_kind
from tests import tiny


def refusal(path: Path, kind: type[ModelFileError | UnsupportedModel] = ModelFileError) -> str:
    """The one-line message, which names the path, and the hint."""
    with pytest.raises(kind) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return f"{caught.value} / {caught.value.hint}"


def header(version: int, n_tensors: int = 1, n_keys: int = 1, order: str = "<") -> bytes:
    return struct.pack(f"{order}4sIQQ", b"GGUF", version, n_tensors, n_keys) + bytes(200)


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
        (b"\x00\x01\x02\x03" + bytes(60), "unknown format"),
        (b"GGUF\x03", "ends inside its header"),
        (header(1), "version 1"),
        (header(9), "version 9"),
        (header(3, order=">"), "byte order"),
        (header(3, n_tensors=1 << 60), "announces"),
        (header(3, n_keys=1 << 60), "announces"),
    ],
)
def test_other_files_are_named_by_their_format(tmp_path: Path, content: bytes, expected: str) -> None:
    """Prevents: an allocation by a damaged count; 'failed to load model' for a web page saved as a model."""
    path = tmp_path / "thing.gguf"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    """Prevents: llama.cpp's null pointer for a typing error; 'is a directory' without a file to give instead."""
    assert "no file" in refusal(tmp_path / "nowhere.gguf")
    model = tiny.write_model(tmp_path / "inside.gguf")
    message = refusal(tmp_path)
    assert "directory" in message
    assert str(model) in message


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Prevents: `run -m PIPE` that waits without end."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="regular file"):
        read_header(pipe)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    """Prevents: an interrupted download that loads, or ends with a bus error in an answer."""
    path = tiny.write_model(tmp_path / "short.gguf")
    whole = path.stat().st_size
    message = refusal(tiny.cut(path, 100))
    assert "truncated" in message
    assert f"{whole - 100:,}" in message
    assert "damaged" in refusal(tiny.cut(path, whole - 800)), "inside the header"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"general.architecture": "nextgen"}, ("nextgen", "update")),  # the bindings are too old
        ({"tokenizer.ggml.pre": "nextgen"}, ("nextgen", "update")),
        ({"general.architecture": "clip"}, ("not a language model",)),  # the projector of a multimodal model
        ({"general.type": "adapter"}, ("not a language model",)),
        ({"llama.block_count": 3}, ("blk.2",)),  # a missing tensor: llama.cpp's reason
        # Numbers that fail an assertion in llama.cpp, which ends the process.
        ({"llama.block_count": 0}, ("llama.block_count",)),
        ({"llama.block_count": 100_000}, ("llama.block_count",)),
        ({"llama.expert_count": 100_000}, ("llama.expert_count",)),
        ({"llama.expert_used_count": 3}, ("llama.expert_used_count",)),
        ({"llama.expert_count": 4}, ("llama.expert_used_count",)),
        ({"llama.rope.scaling.type": "nonsense"}, ("llama.rope.scaling.type",)),
        ({"llama.attention.head_count": "two"}, ("llama.attention.head_count",)),
        ({"llama.attention.head_count_kv": ["one", "two"]}, ("llama.attention.head_count_kv",)),
        ({"llama.context_length": 3_000_000_000}, ("llama.context_length",)),
        ({"llama.expert_count": True}, ("llama.expert_count",)),
        ({"llama.attention.causal": 1}, ("llama.attention.causal",)),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, ("llama.attention.layer_norm_rms_epsilon",)),
        ({"llama.rope.freq_base": 0.0}, ("llama.rope.freq_base",)),
        ({"llama.rope.freq_base": "text"}, ("llama.rope.freq_base",)),
        ({"llama.embedding_length": 0}, ("llama.embedding_length",)),
        ({"llama.rope.dimension_count": 0}, ("llama.rope.dimension_count",)),  # an endless loop in the first pass
        ({"llama.rope.dimension_count": 7}, ("llama.rope.dimension_count",)),
        ({"llama.rope.dimension_count": 18}, ("llama.rope.dimension_count",)),
        ({"split.count": 2.0}, ("split.count",)),
        ({"tokenizer.ggml.tokens": [1, 2]}, ("tokenizer.ggml.tokens",)),
        ({"tokenizer.ggml.model": 3}, ("tokenizer.ggml.model",)),
        ({"tokenizer.chat_template": 3}, ("tokenizer.chat_template",)),
        ({"split.count": "two"}, ("split.count",)),
        ({"general.name": 7}, ("general.name",)),
    ],
)
def test_metadata_of_another_model_or_a_damaged_one_is_refused(
    tmp_path: Path, extra: dict[str, object], words: tuple[str, ...]
) -> None:
    """Prevents: 'corrupted file' for a model that needs newer bindings; a LoRA loaded as a model; GGML_ASSERT."""
    message = refusal(tiny.write_model(tmp_path / "odd.gguf", extra=extra))
    assert all(word in message for word in words)


def test_a_split_model_loads_from_its_first_part(tmp_path: Path) -> None:
    """Prevents: parts that must be joined by hand; logits other than the whole model's."""
    parts = tiny.write_split(tmp_path / "whole", 3)
    about = read_header(parts[0])
    assert about.parts == tuple(parts)
    assert about.n_file_bytes == sum(part.stat().st_size for part in parts)
    whole = tiny.write_model(tmp_path / "one.gguf")
    with tiny.load(parts[0]) as model, tiny.load(whole) as reference:
        assert (model.eval([1, 2, 3]) == reference.eval([1, 2, 3])).all()


def _truncate_last(parts: list[Path]) -> Path:
    tiny.cut(parts[2], 64)
    return parts[0]


def _remove_last(parts: list[Path]) -> Path:
    parts[2].unlink()
    return parts[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda parts: parts[1], "whole-00001-of-00003.gguf"),  # FIELD_CASES 40
        (lambda parts: parts[0].rename(parts[0].with_name("model.gguf")), "model-00001-of-00003.gguf"),
        (_remove_last, "whole-00003-of-00003.gguf"),
        (_truncate_last, "whole-00003-of-00003.gguf is truncated"),
    ],
)
def test_a_part_that_is_later_renamed_missing_or_truncated_is_named(
    tmp_path: Path, damage: Callable[[list[Path]], Path], words: str
) -> None:
    """Prevents: 'illegal split file idx' or 'invalid split file name'; a check of only the given part."""
    path = damage(tiny.write_split(tmp_path / "whole", 3))
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert words in f"{caught.value} {caught.value.hint}"


def test_many_missing_parts_are_counted(tmp_path: Path) -> None:
    """Prevents: a message of megabytes for one file name."""
    with pytest.raises(ModelFileError, match=r"m-00002-of-01000.*more") as caught:
        gguf_check.part_paths(tmp_path / "m-00001-of-01000.gguf", 0, 1000)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_header_is_checked_once_by_each_version_of_the_checks(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a file that an older version found sound and that a newer one would refuse."""
    path, checked = tiny.write_model(tmp_path / "m.gguf"), list[object]()
    monkeypatch.setattr(gguf_check, "_LONG_HEADER", 0)
    monkeypatch.setattr(gguf_check, "require_sound_values", checked.append)
    for version, expected in ((1, 1), (1, 1), (2, 2)):
        monkeypatch.setattr(gguf_check, "_VERSION", version)
        gguf_check.read_file(path)
        assert len(checked) == expected


@pytest.mark.parametrize("way", [Truncation, SavedStates])
def test_a_model_that_does_not_come_back_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: type[Rollback]
) -> None:
    """Prevents: a memory that refuses to remove tokens, or removes them only in name, and fails in an answer."""
    path = tiny.write_model(tmp_path / "mamba.gguf", arch="mamba")
    tiny.load(path).close()
    if way is Truncation:
        truncation = by_kind(TRUNCATION)
        monkeypatch.setattr(
            "specllama.llama.model._way_back", lambda _, memory, *__, **___: (Truncation(memory), truncation)
        )
    else:
        monkeypatch.setattr(SavedStates, "_restore", lambda self, call, length: True)
    assert "roll its memory back" in refusal(path, UnsupportedModel)


@pytest.mark.parametrize(
    "extra",
    [*({"general.architecture": arch} for arch in ("bert", "llada", "t5")), {"llama.attention.causal": False}],
)
def test_models_that_do_not_write_left_to_right_are_refused(tmp_path: Path, extra: dict[str, object]) -> None:
    """Prevents: an answer by an embedding or diffusion model."""
    refusal(tiny.write_model(tmp_path / "other.gguf", extra=extra), UnsupportedModel)


def test_a_vocabulary_is_read_without_the_weights(tmp_path: Path) -> None:
    """Prevents: `check` loading whole models to compare their tokens."""
    path = tiny.write_model(tmp_path / "more.gguf", vocabulary=tiny.byte_level(), extra={"llama.block_count": 3})
    vocabulary = load_vocabulary(path)
    assert vocabulary.size == 263
    assert vocabulary.texts() == list(tiny.byte_level().tokens)


def test_the_header_gives_sizes_names_and_metadata(tmp_path: Path) -> None:
    """Prevents: pairs and memory judged by wrong numbers."""
    path = tiny.write_model(tmp_path / "m.gguf", n_layer=3, n_embd=64, n_head=4, n_head_kv=2, n_ctx=1024)
    about = read_header(path)
    assert (about.architecture, about.name, about.n_layer, about.n_embd) == ("llama", "tiny llama", 3, 64)
    assert (about.n_head, about.n_head_kv, about.key_length, about.n_ctx_train) == (4, (2, 2, 2), 16, 1024)
    assert (about.n_vocab, about.n_swa, set(about.weight_bytes)) == (12, 0, {"f32"})
    assert about.n_file_bytes > about.n_weight_bytes > 0.5 * about.n_file_bytes
    assert (about.tokenizer, about.chat_template, about.basename, about.finetune) == ("gpt2", None, "", "")


def test_heads_per_layer_may_be_an_array(tmp_path: Path) -> None:
    """Prevents: a wrong KV size for models like OpenELM with different head counts per layer."""
    path = tiny.write_model(tmp_path / "m.gguf", n_layer=2, extra={"llama.attention.head_count_kv": [1, 2]})
    assert read_header(path).n_head_kv == (1, 2)
