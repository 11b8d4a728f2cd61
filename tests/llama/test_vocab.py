"""Text to tokens and back, with llama.cpp's tokenizers on tiny vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.base.errors import UnsupportedModel
from specllama.llama import Vocabulary, load_vocabulary
from tests import tiny


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tiny.write_model(tmp_path_factory.mktemp("vocab") / "bytes.gguf", vocabulary=tiny.byte_level())
    return load_vocabulary(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tiny.write_model(tmp_path_factory.mktemp("vocab") / "spm.gguf", vocabulary=tiny.sentencepiece())
    return load_vocabulary(path)


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.piece(token, special=False) for token in tokens)


def test_special_text_is_a_control_token_only_on_request(byte_level: Vocabulary) -> None:
    """Prevents: a user's `<|im_end|>` that ends the turn (docs/design.md, invariant 8)."""
    control = tiny.token_id(tiny.byte_level(), "<|im_end|>")
    assert byte_level.tokenize("a<|im_end|>", special=True) == [ord("a"), control]
    plain = byte_level.tokenize("a<|im_end|>", special=False)
    assert control not in plain
    assert text_of(byte_level, plain) == b"a<|im_end|>"


def test_control_tokens_have_text_only_on_request(byte_level: Vocabulary) -> None:
    """Prevents: `<|im_end|>` in answers."""
    control = tiny.token_id(tiny.byte_level(), "<|im_end|>")
    assert byte_level.piece(control) == b""
    assert byte_level.piece(control, special=True) == b"<|im_end|>"
    assert byte_level.text(control) == "<|im_end|>"


def test_all_end_tokens_are_found(byte_level: Vocabulary) -> None:
    """Prevents: stopping only at EOS although the model ends its turns with another token (FIELD_CASES 33)."""
    vocab = tiny.byte_level()
    ends = {tiny.token_id(vocab, "<|im_end|>"), tiny.token_id(vocab, "<|endoftext|>")}
    assert byte_level.end_tokens == ends
    assert {byte_level.eot, byte_level.eos} == ends


def test_what_takes_a_call_for_each_token_is_remembered_until_the_file_changes(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a tenth of a second for each model at every start; end tokens of the file that was there before."""
    monkeypatch.setattr("specllama.llama.vocab._MANY", 1)
    path = tiny.write_model(tmp_path / "model.gguf", vocabulary=tiny.byte_level())

    def found() -> tuple[frozenset[int], tuple[str, ...]]:
        vocabulary = load_vocabulary(path)
        return vocabulary.end_tokens, vocabulary.special_texts()

    asked = list[str]()
    for name in ("_find_end_tokens", "_find_special"):
        real = getattr(Vocabulary, name)
        monkeypatch.setattr(Vocabulary, name, lambda self, name=name, real=real: asked.append(name) or real(self))
    first = found()
    assert (found(), len(asked)) == (first, 2)
    for record in (home / "cache").rglob("*.json"):
        if record.parent.name in ("end tokens", "special tokens"):
            record.write_text(record.read_text().replace('"value": [', '"value": [99999, '))
    assert (found(), len(asked)) == (first, 4)
    tiny.write_model(path, vocabulary=tiny.letters())
    assert found() != first


def test_begin_tokens_are_added_on_demand_and_never_twice(sentencepiece: Vocabulary, byte_level: Vocabulary) -> None:
    """Prevents: two BOS, or none (FIELD_CASES 32); an unwanted EOS."""
    assert sentencepiece.add_bos
    assert sentencepiece.bos == 1
    without = sentencepiece.tokenize("the", special=True)
    assert 1 not in without
    assert sentencepiece.tokenize("the", special=True, bos=True) == [1, *without]
    assert sentencepiece.tokenize("", special=True, bos=True) == [1]
    assert sentencepiece.tokenize("<s>", special=True)[0] == 1
    assert not byte_level.add_bos
    assert byte_level.tokenize("a", special=True, bos=True) == [byte_level.bos, ord("a")]


def test_the_kinds_and_flags_of_both_tokenizers_are_known(byte_level: Vocabulary, sentencepiece: Vocabulary) -> None:
    """Prevents: the pair check comparing a BPE with a SentencePiece vocabulary as one kind."""
    assert (byte_level.kind, byte_level.add_bos, byte_level.add_eos) == ("bpe", False, False)
    assert (sentencepiece.kind, sentencepiece.add_bos) == ("spm", True)


def test_sentencepiece_spaces_come_back_as_spaces(sentencepiece: Vocabulary) -> None:
    """Prevents: the U+2581 mark in answers."""
    tokens = sentencepiece.tokenize("the the", special=False)
    assert text_of(sentencepiece, tokens) == b" the the"
    assert sentencepiece.text(tokens[0]) == "▁the"


@pytest.mark.parametrize("text", [b"a\x00b", b"\x00", "a\x00b"])
def test_null_bytes_are_text(byte_level: Vocabulary, text: str | bytes) -> None:
    """Prevents: a text that ends at its first null byte."""
    expected = text if isinstance(text, bytes) else text.encode()
    assert text_of(byte_level, byte_level.tokenize(text, special=False)) == expected


@pytest.mark.parametrize("text", [b"\xff\xfe", b"ab\xc3", b"\xf0\x9f\x98", "\udcff", chr(0xD800), b"\xed\xa0\x80"])
def test_what_is_not_utf8_becomes_a_replacement_character(
    byte_level: Vocabulary, sentencepiece: Vocabulary, text: str | bytes
) -> None:
    """Prevents: a C++ exception that ends the process, or an encoding error, by an invalid byte in a pipe."""
    for vocabulary in (byte_level, sentencepiece):
        told = text_of(vocabulary, vocabulary.tokenize(text, special=True)).decode()
        assert "\ufffd" in told or "?" in told


def test_surrogates_of_undecodable_arguments_become_their_bytes(byte_level: Vocabulary) -> None:
    """Prevents: the loss of an emoji in a C locale, where it becomes surrogates."""
    escaped = "😀".encode().decode("ascii", "surrogateescape")
    assert text_of(byte_level, byte_level.tokenize(escaped, special=False)).decode() == "😀"


@pytest.mark.parametrize("text", ["", "a" * 99, " " * 99, "\u00e9 the " * 20, "<|im_end|>" * 9, "\x00" * 99])
def test_no_text_has_fewer_tokens_than_its_bound(byte_level: Vocabulary, sentencepiece: Vocabulary, text: str) -> None:
    """Prevents: a prompt that fits, refused before it is tokenized."""
    for vocabulary in (byte_level, sentencepiece):
        assert vocabulary.least_tokens(text) <= len(vocabulary.tokenize(text, special=True))
        assert vocabulary.least_tokens("a" * 1000) > 0


@pytest.mark.slow
@given(text=st.text())
def test_every_text_comes_back_byte_for_byte(byte_level: Vocabulary, text: str) -> None:
    """Prevents: a byte lost or added by a byte-level vocabulary."""
    data = text.encode("utf-8", "replace")
    assert text_of(byte_level, byte_level.tokenize(text, special=False)) == data


@given(data=st.binary())
def test_any_bytes_are_tokenized(sentencepiece: Vocabulary, data: bytes) -> None:
    """Prevents: a crash in the tokenizer, which Python cannot catch."""
    tokens = sentencepiece.tokenize(data, special=True)
    assert all(0 <= token < sentencepiece.size for token in tokens)


def test_long_texts_are_not_cut(byte_level: Vocabulary) -> None:
    """Prevents: a token buffer that is too small for the text."""
    text = "xyz" * 20_000
    assert text_of(byte_level, byte_level.tokenize(text, special=False)) == text.encode()


@pytest.mark.parametrize("token", [-1, 263, 1 << 31])
def test_tokens_outside_the_vocabulary_are_value_errors(byte_level: Vocabulary, token: int) -> None:
    """Prevents: std::out_of_range in C++, which ends the process."""
    for ask in (byte_level.piece, byte_level.text):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            ask(token)


def test_a_long_piece_is_whole(tmp_path: Path) -> None:
    """Prevents: pieces cut at the size of a fixed buffer."""
    long = "<|" + "x" * 300 + "|>"
    path = tiny.write_model(tmp_path / "m.gguf", vocabulary=tiny.byte_level(extra_tokens=[long]))
    vocabulary = load_vocabulary(path)
    assert vocabulary.piece(vocabulary.size - 1, special=True) == long.encode()


def test_a_closed_vocabulary_says_so(tmp_path: Path) -> None:
    """Prevents: reading freed memory."""
    model = tiny.load(tiny.write_model(tmp_path / "m.gguf"))
    cached = model.vocab.piece(0)
    model.close()
    assert model.vocab.piece(0) == cached
    for ask in (lambda: model.vocab.piece(1), lambda: model.vocab.tokenize("a", special=False), model.vocab.texts):
        with pytest.raises(ValueError, match="closed"):
            ask()


def rwkv(first: int) -> tiny.TinyVocabulary:
    """An end token, the bytes from `first` on, and a few words, in the escapes of RWKV files."""
    tokens = ("<s>", *(f"\\x{byte:02x}" for byte in range(first, 256)), "the", " the")
    return tiny.TinyVocabulary(model="rwkv", tokens=tokens, types=(3, *(1,) * (len(tokens) - 1)), eos=0, bos=0)


def test_the_text_of_an_rwkv_control_token_is_plain_text(tmp_path: Path) -> None:
    """Prevents: a user's `<s>` that ends the text: llama.cpp's RWKV tokenizer takes it for the control token."""
    vocabulary = load_vocabulary(tiny.write_model(tmp_path / "m.gguf", arch="rwkv7", vocabulary=rwkv(0)))
    text = "see <s> the ☃\x00<s><<s>".encode()
    assert vocabulary.kind == "rwkv"
    assert text_of(vocabulary, tokens := vocabulary.tokenize(text, special=False)) == text
    assert 0 not in tokens
    assert 0 in vocabulary.tokenize(text, special=True)
    assert vocabulary.end_tokens == {0}


def test_an_rwkv_vocabulary_without_all_bytes_is_refused(tmp_path: Path) -> None:
    """Prevents: a tokenizer that never ends on a text that begins like a token and goes on otherwise."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="rwkv7", vocabulary=rwkv(1))
    with pytest.raises(UnsupportedModel):
        load_vocabulary(path)
