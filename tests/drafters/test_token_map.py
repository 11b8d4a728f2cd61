"""Maps between vocabularies, and spellings of the tokens that only one has, with llama.cpp's own tokenizers."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.base import disk as storage
from specllama.base.errors import ModelFileError, PairError
from specllama.drafters.token_map import NO_TOKEN, Speller, map_by_text, owners
from specllama.drafters.translated import TranslatedModel
from specllama.files import gguf_rewrite
from specllama.llama import Vocabulary, load_vocabulary
from specllama.pairs import draft_in_target_ids as draft_model
from specllama.pairs.draft_in_target_ids import VOCAB_MAP, in_target_ids, read_vocab_map
from tests import tiny


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


VOCABULARIES = {"bytes": tiny.byte_level(), "spm": tiny.sentencepiece(), "ascii": tiny.ascii_level()}


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    folder = tmp_path_factory.mktemp("vocabs")
    files = {name: tiny.write_bare(folder / f"{name}.gguf", vocabulary=each) for name, each in VOCABULARIES.items()}
    return {name: load_vocabulary(path) for name, path in files.items()}


@dataclass
class Listed:
    """A vocabulary from two lists."""

    names: list[str]
    spellings: list[bytes]
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None

    @property
    def size(self) -> int:
        return len(self.names)

    def texts(self) -> list[str]:
        return self.names

    def pieces(self) -> list[bytes]:
        return self.spellings


@pytest.mark.parametrize("name", VOCABULARIES)
def test_all_pieces_at_once_are_those_asked_for_one_by_one(vocabs: dict[str, Vocabulary], name: str) -> None:
    """Prevents: a long piece, or the one after it, cut by a buffer that is used again."""
    vocab = vocabs[name]
    assert vocab.pieces() == [vocab.piece(token) for token in range(vocab.size)]


def test_long_pieces_are_whole(tmp_path: Path) -> None:
    """Prevents: a token longer than the buffer that is cut."""
    long = "x" * 300
    vocabulary = tiny.letters(10)
    tokens = (*vocabulary.tokens[:3], long, *vocabulary.tokens[4:])
    path = tiny.write_bare(tmp_path / "long.gguf", vocabulary=replace(vocabulary, tokens=tokens))
    assert load_vocabulary(path).pieces()[2:5] == [b"c", long.encode(), b"e"]


def test_tokens_meet_by_the_bytes_that_they_add_to_a_text(vocabs: dict[str, Vocabulary]) -> None:
    """Prevents: 'nothing in common' between a vocabulary that writes Ġ for a space and one that writes ▁."""
    target, draft = vocabs["bytes"], vocabs["spm"]
    to_target = map_by_text(target, draft)
    spm, bpe = VOCABULARIES["spm"], VOCABULARIES["bytes"]
    assert to_target[spm.tokens.index("▁the")] == bpe.tokens.index("Ġthe")
    assert to_target[spm.tokens.index("<0xE9>")] == bpe.tokens.index("é")
    assert to_target[spm.tokens.index("he")] == NO_TOKEN
    for token, ours in enumerate(to_target.tolist()):
        if ours != NO_TOKEN and target.piece(ours):
            assert target.piece(ours) == draft.piece(token)
    known = to_target[to_target != NO_TOKEN]
    assert np.unique(known).size == known.size


def test_a_byte_token_gives_way_to_the_token_that_is_used() -> None:
    """Prevents: two draft tokens for one of the target's, or the one that no text is written with."""
    target = Listed(["<0x0A>", "\n", "a"], [b"\n", b"\n", b"a"])
    draft = Listed(["a", "<0x0A>", "<0x61>", "\n"], [b"a", b"\n", b"a", b"\n"])
    assert map_by_text(target, draft).tolist() == [2, NO_TOKEN, NO_TOKEN, 1]
    many = Listed(["<0x61>", "a", "a", "<0x62>", "<0x62>"], [b"a"] * 3 + [b"b"] * 2)
    assert owners(many) == {b"a": 1, b"b": 3}, "the lowest of those that may have it"


def test_a_control_token_is_never_taken_for_a_text_that_reads_the_same() -> None:
    """Prevents: a draft that writes `<|im_end|>` as plain text ending the answer (docs/design.md, invariant 8)."""
    target = Listed(["<|im_end|>", "a", "<pad>"], [b"", b"a", b""])
    draft = Listed(["<|im_end|>", "a", "<pad>"], [b"<|im_end|>", b"a", b""])
    assert map_by_text(target, draft).tolist() == [NO_TOKEN, 1, 2]


def test_begin_and_end_tokens_correspond_under_any_name() -> None:
    """Prevents: a draft that can never propose the end, because its own is named differently."""
    target = Listed(["<s>", "</s>", "<end>", "a"], [b"", b"", b"", b"a"], bos=0, eos=1, eot=2)
    draft = Listed(["a", "[B]", "[E]", "</s>"], [b"a", b"", b"", b""], bos=1, eos=2, eot=2)
    assert map_by_text(target, draft).tolist() == [3, 0, 2, 1], "eos has its name already; eot is free for [E]"
    same = Listed(["a", "[B]", "[E]"], [b"a", b"", b""], bos=1, eos=1, eot=2)
    assert map_by_text(target, same).tolist() == [3, 0, 2]
    one_end = Listed(["<s>", "</s>", "a"], [b"", b"", b"a"], bos=0, eos=1, eot=1)
    two_ends = Listed(["a", "[E]", "[T]"], [b"a", b"", b""], eos=1, eot=2)
    assert map_by_text(one_end, two_ends).tolist() == [2, 1, NO_TOKEN], "no two share a token"


@pytest.mark.parametrize(("ours", "theirs"), [("bytes", "spm"), ("spm", "bytes"), ("bytes", "bytes")])
def test_every_token_is_spelled_with_its_own_bytes(vocabs: dict[str, Vocabulary], ours: str, theirs: str) -> None:
    """Prevents: a tokenizer's added space, or U+FFFD for half a character, read to the draft as the text."""
    target, draft = vocabs[ours], vocabs[theirs]
    to_target = map_by_text(target, draft)
    spell = Speller(target, draft, to_target)
    for token in range(target.size):
        cells = spell(token)
        assert cells, "every token takes a cell"
        assert cells == spell(token)
        mapped = np.flatnonzero(to_target == token)
        if mapped.size:
            assert cells == (mapped[0],)
        else:
            data = target.piece(token) or target.text(token).encode()
            assert b"".join(map(draft.piece, cells)) == data


def test_what_cannot_be_spelled_still_takes_a_cell(vocabs: dict[str, Vocabulary]) -> None:
    """Prevents: a committed token without a cell, so that lengths no longer agree, or a StopIteration."""
    target, draft = vocabs["bytes"], vocabs["ascii"]
    spell = Speller(target, draft, map_by_text(target, draft))
    assert spell(VOCABULARIES["bytes"].tokens.index("é")) == (draft.bos,)
    assert [draft.piece(cell) for cell in spell(VOCABULARIES["bytes"].tokens.index("Ġthe"))] == [b" ", b"t", b"h", b"e"]


@dataclass
class Spelling(Listed):
    """`plain`: what its tokenizer writes for a text without special tokens; nothing for the texts it lacks."""

    plain: dict[bytes, list[int]] = field(default_factory=dict)
    add_bos: bool = False

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return [len(self.names) - 1] if special else self.plain.get(text, [])

    def piece(self, token: int) -> bytes:
        return self.spellings[token]

    def text(self, token: int) -> str:
        return self.names[token]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_tokenizer_cannot_write_is_spelled_with_the_longest_tokens(seed: int) -> None:
    """Prevents: a shorter token where a longer one fits, a byte read twice or not at all, a search without end."""
    chance = random.Random(seed)
    word = lambda n: bytes(chance.choice(b"abc") for _ in range(n))  # noqa: E731
    pieces = [word(chance.randrange(4)) for _ in range(8)]  # some of them empty or equal
    texts = [word(n) for n in range(1, 9)]
    draft = Spelling([str(n) for n in range(8)], pieces, bos=chance.choice([None, 0, 7]))
    target = Spelling([f"-{n}" for n in range(8)], texts)
    spell = Speller(target, draft, np.full(8, NO_TOKEN))
    for token, rest in enumerate(texts):
        expected = list[int]()
        while rest:
            best = max((piece for piece in pieces if piece and rest.startswith(piece)), key=len, default=b"")
            expected += [pieces.index(best)] if best else []
            rest = rest[len(best) or 1 :]
        assert spell(token) == (tuple(expected) or (draft.bos or 0,))


def test_what_the_tokenizer_can_write_is_spelled_as_the_draft_was_trained() -> None:
    """Prevents: the longest tokens where the tokenizer takes others, or text that is read as a control token."""
    draft = Spelling(["a", "b", "ab", "<end>"], [b"a", b"b", b"ab", b"ab"], plain={b"ab": [0, 1]})
    assert Speller(Spelling(["ab"], [b"ab"]), draft, np.full(4, NO_TOKEN))(0) == (0, 1)


def test_a_draft_that_wants_a_begin_token_gets_it(vocabs: dict[str, Vocabulary]) -> None:
    """Prevents: a draft that rambles because its first position is not what it was trained on."""
    spm, bpe = vocabs["spm"], vocabs["bytes"]
    assert Speller(bpe, spm, map_by_text(bpe, spm)).first == (spm.bos,)
    assert Speller(spm, bpe, map_by_text(spm, bpe)).first == ()


def test_two_loaded_models_meet_over_their_common_tokens(tmp_path: Path) -> None:
    """Prevents: a draft whose own ids are taken for the target's."""
    with (
        tiny.load(tiny.write_model(tmp_path / "t.gguf", vocabulary=tiny.byte_level())) as target,
        tiny.load(tiny.write_model(tmp_path / "d.gguf", vocabulary=tiny.sentencepiece(), seed=2)) as draft,
    ):
        assert in_target_ids(target, draft) is draft
        model = in_target_ids(target, draft, strategy="draft-tli")
        assert isinstance(model, TranslatedModel)
        assert (model.vocab_size, model.end_tokens) == (target.vocab_size, {target.vocab.eos})
        text = target.vocab.tokenize("the heat", special=False)
        rows = model.eval(text)
        assert draft.length == 1 + sum(len(cells) for cells in (model._spell(token) for token in text))
        draft.truncate(0)
        cells = [draft.vocab.bos, *(cell for token in text for cell in model._spell(token))]
        draft.feed(cells[:-1])
        expected = draft.eval(cells[-1:])[0]
        to_target = map_by_text(target.vocab, draft.vocab)
        known = np.flatnonzero(to_target != NO_TOKEN)
        np.testing.assert_allclose(rows[-1][to_target[known]], expected[known], atol=1e-4)
        assert np.isneginf(np.delete(rows[-1], to_target[known])).all()


def test_a_map_by_text_is_made_once_for_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a second before every first token; or the map of files that are no longer there."""
    target = tiny.load(tiny.write_model(tmp_path / "t.gguf", n_vocab=20))
    first, second = tiny.letters(12), tiny.letters(14)
    path = tiny.write_model(tmp_path / "d.gguf", vocabulary=first)
    made: list[int] = []
    monkeypatch.setattr(draft_model, "map_by_text", lambda *both: made.append(1) or map_by_text(*both))
    for vocabulary, n_made in ((first, 1), (first, 1), (second, 2), (second, 2)):
        if vocabulary is second and len(made) == 1:
            tiny.write_model(path, vocabulary=second)
        with tiny.load(path) as draft:
            model = in_target_ids(target, draft, strategy="draft-tli")
            assert isinstance(model, TranslatedModel)
            n_known = (map_by_text(target.vocab, draft.vocab) != NO_TOKEN).sum()
            assert model.known.size == n_known == len(vocabulary.tokens)
        assert len(made) == n_made
    target.close()


def mapped(path: Path, numbers: object) -> Path:
    return tiny.write_model(path, vocabulary=tiny.letters(8), extra={VOCAB_MAP: numbers})


def test_a_map_in_the_file_leads_to_the_parents_ids(tmp_path: Path) -> None:
    """Prevents: a trimmed draft that proposes its own ids; one of a padded parent leading out of the vocabulary."""
    kept = [1, 3, 4, 6, 8, 17, 18, 19]
    path = mapped(tmp_path / "d.gguf", [*kept[:-1], 99])
    assert read_vocab_map(llama.read_header(path)).tolist() == [*kept[:-1], 99]  # type: ignore[union-attr]
    with tiny.load(tiny.write_model(tmp_path / "t.gguf", n_vocab=20)) as target, tiny.load(path) as draft:
        row = in_target_ids(target, draft).eval([1])[0]
        draft.truncate(0)
        np.testing.assert_allclose(row[kept[:-1]], draft.eval([0])[0][:-1], atol=1e-4)
        assert np.isneginf(np.delete(row, kept[:-1])).all()
    assert read_vocab_map(llama.read_header(tiny.write_model(tmp_path / "plain.gguf"))) is None


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 2, 3, 4, 5, 6, 6], [-1, 1, 2, 3, 4, 5, 6, 7], [0.5] * 8, ["a"] * 8])
def test_a_damaged_map_is_an_error(tmp_path: Path, numbers: list[object]) -> None:
    """Prevents: a traceback, or an id out of range, from an edited file."""
    path = mapped(tmp_path / "d.gguf", numbers)
    with pytest.raises(ModelFileError, match=r"specllama\.vocab_map"):
        read_vocab_map(llama.read_header(path))


def test_a_map_of_ids_that_no_model_can_have_is_an_error(tmp_path: Path) -> None:
    """Prevents: a 64-bit number that turns negative, and so counts the target's tokens from their end."""
    source = gguf_rewrite.read_source(llama.read_header(mapped(tmp_path / "d.gguf", list(range(8)))).files)
    for name, number in (("wide", 2**31), ("negative", 2**64 - 3)):
        numbers = np.array([*range(7), number], "<u8")
        values = {VOCAB_MAP: struct.pack("<IIQ", 9, 10, 8) + numbers.tobytes()}
        path = tmp_path / f"{name}.gguf"
        gguf_rewrite.write(source, path, values=values, tensors=source.tensors)
        with pytest.raises(ModelFileError, match=r"specllama\.vocab_map"):
            read_vocab_map(llama.read_header(path))


@pytest.mark.parametrize("damage", ["text", [], {"0": 0}, [0, 0, 1], [0, -2, 1], [0, 9**9, 1], [0.5, None, "a"]])
def test_a_remembered_map_that_is_damaged_is_made_anew(tmp_path: Path, damage: object) -> None:
    """Prevents: a traceback, or two draft tokens for one of the target's, from an edited cache."""
    files = [tiny.write_model(tmp_path / f"{name}.gguf", n_vocab=8) for name in ("t", "d")]
    with tiny.load(files[0]) as target, tiny.load(files[1]) as draft:
        expected = in_target_ids(target, draft, strategy="draft-tli").known.size  # type: ignore[union-attr]
        by = [1, llama.build_info().fingerprint]
        assert storage.FileRecord("text maps", *files, by=by).value(list)
        map_ = [*damage, *range(3, 8)] if isinstance(damage, list) and damage else damage
        storage.FileRecord("text maps", *files, by=by).keep(map_)
        assert in_target_ids(target, draft, strategy="draft-tli").known.size == expected  # type: ignore[union-attr]


def test_models_without_a_common_token_are_refused(tmp_path: Path) -> None:
    """Prevents: a map of nothing, and an error about numbers."""
    with (
        tiny.load(tiny.write_model(tmp_path / "t.gguf", n_vocab=8)) as target,
        tiny.load(mapped(tmp_path / "d.gguf", list(range(50, 58)))) as draft,
        pytest.raises(PairError, match="no token in common"),
    ):
        in_target_ids(target, draft)
