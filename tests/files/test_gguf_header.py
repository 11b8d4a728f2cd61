"""Reading GGUF headers: values, limits, and damage."""

from __future__ import annotations

import ctypes
import math
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.errors import ModelFileError, UnsupportedModel
from specllama.files import gguf_header
from specllama.files.gguf_header import TYPES, GgufHeader, MoreNeeded, Unsound, long_texts, walk, walk_from
from specllama.llama.bindings import bindings, symbol
from tests import tiny

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def header(*keys: bytes, n_tensors: int = 0, tensors: bytes = b"", n_keys: int | None = None) -> bytes:
    n = len(keys) if n_keys is None else n_keys
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n) + b"".join(keys) + tensors


def tensor(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def refusal(data: bytes, n_file_bytes: int | None = None) -> str:
    with pytest.raises(Unsound) as caught:
        walk_from(lambda start, stop: data[start:stop], n_file_bytes or len(data), first=64, step=64)
    return str(caught.value)


def test_values_and_tensors_are_read() -> None:
    """Prevents: a reader that accepts every header because it checks nothing."""
    data = header(
        key("a", U32, struct.pack("<I", 7)),
        key("name", STRING, text("käse\0more")),
        key("on", BOOL, b"\1"),
        key("tokens", ARRAY, array(STRING, 3, text("x") + text("") + text("yz"))),
        key("types", ARRAY, array(U32, 2, struct.pack("<II", 1, 3))),
        key("none", ARRAY, array(STRING, 0)),
        n_tensors=2,
        tensors=tensor("w", 32, 5, kind=8) + tensor("b", 5, offset=192),
    )
    found = walk(data + b"weights", len(data) + 7)
    assert found.end == len(data)
    assert found.n_elements == 165
    assert [each.n_bytes for each in found.tensors] == [170, 20]
    assert found.data_end == len(data) + -len(data) % 32 + 192 + 20
    assert found.tensor_bytes == {"q8_0": 170, "f32": 20}
    assert (found.integer("a"), found.text("name"), found.flag("on", False)) == (7, "käse", True)
    assert (found.integer("b", default=3), found.text("b", "x"), found.flag("b", True)) == (3, "x", True)
    assert found.strings("tokens") == [b"x", b"", b"yz"]
    assert found.strings("none") == found.strings("missing") == []
    assert found.numbers("missing") is None
    assert found.numbers("types").tolist() == [1, 3]  # type: ignore[union-attr]
    assert found.per_layer("types", 2) == [1, 3]
    assert found.per_layer("a", 3) == [7, 7, 7]
    assert (found.count("tokens"), found.count("a"), found.count("missing")) == (3, None, None)


@pytest.mark.parametrize(
    ("ask", "found", "expected"),
    [
        (lambda it: it.integer("a", 8, 9), "a is 7", "from 8 to 9"),
        (lambda it: it.integer("name"), "name is 'x'", "from 0 to 2,147,483,647"),
        (lambda it: it.integer("on"), "on is True", "a whole number"),
        (lambda it: it.integer("types"), "types is a list", "a whole number"),
        (lambda it: it.number("a", 0.0, 1.0), "a is 7", "from 0 to 1"),
        (lambda it: it.number("name", 0.0, 1.0), "name is 'x'", "a number"),
        (lambda it: it.number("on", 0.0, 1.0), "on is True", "a number"),
        (lambda it: it.text("a"), "a is 7", "a text"),
        (lambda it: it.flag("a", True), "a is 7", "true or false"),
        (lambda it: it.strings("types"), "types is a list", "a list of texts"),
        (lambda it: it.numbers("a"), "a is 7", "a list of numbers"),
        (lambda it: it.per_layer("types", 2, 0, 2), "types is a list", "from 0 to 2"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(
    ask: Callable[[GgufHeader], object], found: str, expected: str
) -> None:
    """Prevents: a TypeError, or a huge allocation, by a number in the file."""
    data = header(
        key("a", U32, struct.pack("<I", 7)),
        key("name", STRING, text("x")),
        key("on", BOOL, b"\1"),
        key("types", ARRAY, array(U32, 2, struct.pack("<II", 1, 3))),
    )
    with pytest.raises(ModelFileError) as caught:
        ask(walk(data, len(data), Path("m.gguf")))
    assert str(caught.value).startswith("m.gguf is damaged")
    assert found in str(caught.value)
    assert expected in str(caught.value)


def test_known_ends_of_arrays_give_the_same_header() -> None:
    """Prevents: a cached header that differs from the one that was read."""
    data = header(
        key("t", ARRAY, array(STRING, 5000, text("word") * 5000)), key("a", U32, struct.pack("<I", 7)),
        n_tensors=1, tensors=tensor("w", 4),
    )  # fmt: skip
    slow = walk(data, len(data))
    ends = long_texts(slow)
    assert list(ends.values()) == [slow.entries["t"].end]
    fast = walk(data, len(data), text_ends=ends)
    assert (fast.entries, fast.tensors, fast.end) == (slow.entries, slow.tensors, slow.end)


def test_tensor_types_are_those_of_llama_cpp() -> None:
    """Prevents: wrong sizes of weights; a type of a newer llama.cpp that is rejected here."""
    name = symbol("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    n_values = symbol("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    n_bytes = symbol("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    n_types = bindings().GGML_TYPE_COUNT
    there = {kind: (name(kind).decode(), n_values(kind), n_bytes(kind)) for kind in range(n_types) if n_bytes(kind)}
    assert {kind: (each.name, each.n_values, each.n_bytes) for kind, each in TYPES.items()} == there


def test_every_piece_of_a_sound_header_asks_for_more() -> None:
    """Prevents: a header read in pieces that counts as damaged, or a read past the data."""
    data = header(
        key("name", STRING, text("x")), key("t", ARRAY, array(STRING, 2, text("ab") + text("c"))),
        n_tensors=1, tensors=tensor("w", 3),
    )  # fmt: skip
    for n_known in range(len(data)):
        with pytest.raises(MoreNeeded):
            walk(data[:n_known], len(data))
    assert walk(data, len(data)).end == len(data)


def test_a_header_is_read_only_as_far_as_it_goes() -> None:
    """Prevents: downloading gigabytes of weights for a few kilobytes of header."""
    data, asked = header(key("t", ARRAY, array(STRING, 100, text("word") * 100))), []

    def read(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return (data + bytes(10_000))[start:stop]

    assert walk_from(read, 1 << 40, first=500, step=400).end == len(data)
    assert asked == [(0, 500), (500, 900), (900, 1300)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (header(n_keys=1 << 60), f"it announces {1 << 60:,} keys"),
        (header(n_tensors=1 << 60), f"it announces {1 << 60:,} tensors"),
        (header(key("t", ARRAY, array(STRING, 1 << 60))), f"key 't' claims {1 << 60:,} entries"),
        (header(key("t", ARRAY, array(U64, 1 << 22))), "key 't' would end at byte"),
        (header(key("t", ARRAY, array(STRING, 1 << 22, bytes(64)))), "key 't' would end at byte"),
        (header(key("s", STRING, struct.pack("<Q", 1 << 63) + b"x")), "key 's' would end at byte"),
        (header(key("s", STRING, struct.pack("<Q", 99) + b"x")), "key 's' would end at byte"),
        (header(struct.pack("<Q", 1 << 40)), "key 0 has a name of"),
        (header(key("", U32, bytes(4))), "key 0 has a name of 0 bytes"),
        (header(key("k", 13, bytes(8))), "key 'k' is of type 13, which does not exist"),
        (header(key("k", ARRAY, array(ARRAY, 1, bytes(20)))), "key 'k' is of type 9, which does not exist"),
        (header(key("k", U32, bytes(4)), key("k", U32, bytes(4))), "key 'k' occurs twice"),
        (header(n_tensors=1, tensors=tensor("w", *[2] * 5)), "tensor 'w' has 5 dimensions"),
        (header(n_tensors=1, tensors=tensor("w", 1 << 40, 1 << 40)), "tensor 'w' claims"),
        (header(n_tensors=1, tensors=tensor("w", 1 << 31, 1, 0, 1 << 33)), "tensor 'w' has a dimension of 0"),
        (header(key("k", U32, b"")), "key 'k' would end at byte"),
        (header(n_tensors=1, tensors=tensor("w", 4, kind=4)), "tensor 'w' is of type 4"),
        (header(n_tensors=1, tensors=tensor("w", 40, kind=8)), "tensor 'w' has rows of 40"),
        (header(n_tensors=1, tensors=tensor("w", 4, offset=32)), "tensor 'w' begins at 32"),
        (header(n_tensors=2, tensors=tensor("w", 8) + tensor("w", 8, offset=32)), "tensor 'w' occurs twice"),
        (header(n_tensors=1, tensors=tensor("w" * 64, 8)), "tensor 'wwww"),
        (header(key("general.alignment", U32, struct.pack("<I", 24))), "general.alignment is 24"),
        (header(key("general.alignment", U64, struct.pack("<Q", 32))), "general.alignment is not"),
    ],
)
def test_damage_is_refused_by_name(data: bytes, found: str) -> None:
    """Prevents: allocations and reads by the counts of a damaged file."""
    assert refusal(data).startswith(found)


def test_a_file_that_ends_inside_its_header_is_refused() -> None:
    """Prevents: waiting for more data of a truncated file."""
    data = header(key("s", STRING, text("x" * 500)))
    assert "ends inside its header, after 300 bytes" in refusal(data[:300], len(data))


def test_a_header_beyond_the_limit_is_refused() -> None:
    """Prevents: reading a whole disk as one header."""
    data = header(key("t", ARRAY, array(STRING, 5, struct.pack("<Q", 1 << 35))))
    assert "more than any header" in refusal(data, 1 << 40)


def test_a_claim_of_many_entries_costs_no_memory() -> None:
    """Prevents: an allocation of gigabytes for a file of a hundred bytes."""
    data = header(key("t", ARRAY, array(STRING, gguf_header.MAX_ARRAY, bytes(64))), key("u", U32, bytes(4)))
    tracemalloc.start()
    refusal(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", [F32, ARRAY])
def test_nan_is_refused(kind: int) -> None:
    """Prevents: wrong logits by a NaN in a rope frequency or a token's score."""
    nan = struct.pack("<f", math.nan)
    value = nan if kind == F32 else array(F32, 2, struct.pack("<f", 1.0) + nan)
    data = header(key("rope.freq_base", kind, value))
    with pytest.raises(Unsound, match=r"key 'rope\.freq_base' holds NaN"):
        gguf_header.require_sound_values(walk(data, len(data)))


def sentencepiece(texts: list[bytes]) -> GgufHeader:
    items = b"".join(struct.pack("<Q", len(each)) + each for each in texts)
    data = header(
        key(gguf_header.TOKENIZER, STRING, text("llama")),
        key(gguf_header.TOKENS, ARRAY, array(STRING, len(texts), items)),
    )
    return walk(data, len(data))


BYTES = [b"<0x%02X>" % byte for byte in range(256)]


@pytest.mark.parametrize("missing", [0x00, 0x41, 0x80, 0xE2, 0xF4])
def test_a_missing_byte_token_is_refused(missing: int) -> None:
    """Prevents: an answer that ends with SIGABRT at the first character without a token."""
    texts = [name for byte, name in enumerate(BYTES) if byte != missing]
    with pytest.raises(Unsound, match=f"no <0x{missing:02X}>"):
        gguf_header.require_sound_values(sentencepiece(texts))
    if missing:
        gguf_header.require_sound_values(sentencepiece([*texts, bytes([missing])]))


def test_bytes_that_no_text_has_need_no_token() -> None:
    """Prevents: a usable vocabulary that is refused."""
    gguf_header.require_sound_values(sentencepiece([*BYTES[:0xC0], *BYTES[0xC2:0xF5]]))


def test_an_empty_vocabulary_is_refused() -> None:
    """Prevents: 'token 0 is outside the vocabulary of 0 tokens' as an internal error."""
    with pytest.raises(Unsound, match="its vocabulary is empty"):
        gguf_header.require_sound_values(sentencepiece([]))


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("a", "b", "a"), "tokens 0 and 2 of its vocabulary share the text 'a'"),
        (("a\0x", "b", "a\0y"), "tokens 0 and 2 of its vocabulary share the text 'a'"),
        (("[EMPTY_1]", ""), "tokens 0 and 1 of its vocabulary share the text '[EMPTY_1]'"),
    ],
)
def test_tokens_that_share_a_text_are_refused(texts: tuple[str, ...], found: str) -> None:
    """Prevents: a failed assertion in llama.cpp, which ends the program."""
    data = header(key(gguf_header.TOKENS, ARRAY, array(STRING, len(texts), b"".join(map(text, texts)))))
    with pytest.raises(Unsound) as caught:
        gguf_header.require_sound_values(walk(data, len(data)))
    assert str(caught.value) == found


def test_a_file_with_such_a_header_is_refused_before_llama_cpp_reads_it(tmp_path: Path) -> None:
    """Prevents: a check that no caller uses."""
    vocabulary = tiny.letters()
    twice = tiny.TinyVocabulary(**{**vocabulary.__dict__, "tokens": ("a", *vocabulary.tokens[:-1])})
    path = tiny.write_model(tmp_path / "twice.gguf", vocabulary=twice)
    for use in (llama.read_header, llama.load_vocabulary, llama.load):
        with pytest.raises(ModelFileError, match="is damaged: tokens 0 and 1 of its vocabulary share"):
            use(path)


@pytest.mark.parametrize("kind", ["no_vocab", "none", "test"])
def test_tokenizers_that_llama_cpp_asserts_about_are_not_tried(tmp_path: Path, kind: str) -> None:
    """Prevents: a crash by a damaged file with one of these names, as seen with 'no_vocab'."""
    path = tiny.write_model(tmp_path / "odd.gguf", extra={"tokenizer.ggml.model": kind})
    for use in (llama.load_vocabulary, llama.load):
        with pytest.raises(UnsupportedModel, match="has a tokenizer of type"):
            use(path)


def test_a_bare_vocabulary_can_be_read_but_not_loaded(tmp_path: Path) -> None:
    """Prevents: vocabularies that cannot be compared without their weights."""
    path = tiny.write_bare(tmp_path / "bare.gguf", vocabulary=tiny.letters())
    assert llama.load_vocabulary(path).size == 12
    assert llama.read_header(path, needs_weights=False).n_weight_bytes == 0
    with pytest.raises(ModelFileError, match="no weights"):
        llama.read_header(path)
