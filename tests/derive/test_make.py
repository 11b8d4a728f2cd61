"""Deriving drafts: what is cut, what is refused, and what llama.cpp computes with the result."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from specllama import llama
from specllama.base import disk as storage
from specllama.base.errors import DiskFull, ModelFileError, UnsupportedModel, UsageError
from specllama.derive import make as derive
from specllama.derive.layers import without_layers
from specllama.files import gguf_rewrite
from specllama.llama import Header
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from tests import tiny

pytestmark = pytest.mark.slow


def _silent(_what: str, _share: float) -> None:
    pass


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes take long to start; they are tested elsewhere."""
    monkeypatch.setattr(derive.child, "run", lambda work, tell: work(tell))


@pytest.fixture
def parent(tmp_path: Path) -> Header:
    """A model with four layers."""
    return llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_layer=4))


def _large(folder: Path, **options: object) -> Path:
    """A model with 938 tokens, most of them plain."""
    return tiny.write_model(folder / "parent.gguf", vocabulary=tiny.word_level(), **options)  # type: ignore[arg-type]


def _cut(path: Path, recipe: Recipe) -> Path:
    destination = path.with_name("cut.gguf")
    derive.cut(llama.read_header(path), recipe, destination)
    return destination


def _logits(path: Path, tokens: Sequence[int]) -> np.ndarray:  # type: ignore[type-arg]
    with tiny.load(path) as model:
        return np.array(model.eval(tokens))


def test_a_copy_without_changes_is_the_same_model(tmp_path: Path) -> None:
    """Prevents: a value or a tensor that is lost or shifted, also from a split model."""
    path = tiny.write_model(tmp_path / "one.gguf", chat_template=tiny.CHATML, extra={"x.list": [1, 2, 3], "x.f": 0.5})
    parts = tiny.write_split(tmp_path / "split", 3)
    for several in (parts, [path]):
        source = gguf_rewrite.read_source(llama.read_header(several[0]).files)
        gguf_rewrite.write(source, tmp_path / "copy.gguf", values={}, tensors=source.tensors)
        assert np.array_equal(_logits(several[0], [1, 2, 3]), _logits(tmp_path / "copy.gguf", [1, 2, 3]))
    before, after = (GGUFReader(each).fields for each in (path, tmp_path / "copy.gguf"))
    for key in before:
        if not key.startswith("GGUF."):
            assert [*map(bytes, before[key].parts)] == [*map(bytes, after[key].parts)], key


def test_what_is_left_of_the_vocabulary_keeps_its_logits(tmp_path: Path) -> None:
    """Prevents: rows of other tokens under the kept ids."""
    parent = _large(tmp_path)
    cut = _cut(parent, Recipe(n_vocab=512))
    kept = llama.read_header(cut)
    to_parent = kept.gguf.numbers(VOCAB_MAP)
    assert to_parent is not None
    assert kept.n_vocab == len(to_parent) == 512
    assert list(to_parent) == sorted(to_parent)
    with tiny.load(parent) as whole, tiny.load(cut) as small:
        text = "the end"
        mine, theirs = small.vocab.tokenize(text, special=False), whole.vocab.tokenize(text, special=False)
        assert [int(to_parent[token]) for token in mine] == theirs
        assert [small.vocab.piece(token) for token in range(512)] == [whole.vocab.piece(int(t)) for t in to_parent]
        assert {int(to_parent[token]) for token in small.end_tokens} == set(whole.end_tokens)
        assert small.vocab.bos is not None
        assert int(to_parent[small.vocab.bos]) == whole.vocab.bos
        np.testing.assert_allclose(small.eval(mine), np.array(whole.eval(theirs))[:, to_parent], atol=1e-5)
        assert small.vocab.tokenize("zq", special=False) == [small.vocab.tokenize(c, special=False)[0] for c in "zq"]


def test_the_bytes_and_the_special_tokens_stay_whatever_their_ids(tmp_path: Path) -> None:
    """Prevents: a draft that cannot spell a word or end an answer, because these ids are high."""
    cut = _cut(_large(tmp_path), Recipe(n_vocab=512))
    with tiny.load(cut) as small:
        pieces = {small.vocab.piece(token) for token in range(small.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= pieces
        for name in ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
            assert len(small.vocab.tokenize(name, special=True)) == 1


@pytest.mark.parametrize(("n_vocab", "message"), [(100, "too small"), (100_000, "no smaller")])
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, n_vocab: int, message: str) -> None:
    """Prevents: a file without the tokens for single bytes, or a copy that saves nothing."""
    with pytest.raises(UsageError, match=message):
        _cut(_large(tmp_path), Recipe(n_vocab=n_vocab))


def test_a_vocabulary_that_could_not_spell_its_own_tokens_is_not_cut(tmp_path: Path) -> None:
    """Prevents: a token that the draft cannot spell; or a refusal for bytes that no token has."""
    words = tiny.word_level()
    at = words.tokens.index("ab") + 600
    strange = replace(words, tokens=(*words.tokens[:at], "ÿÿ", *words.tokens[at + 1 :]))
    without = replace(strange, tokens=tuple("zz9" if text == "ÿ" else text for text in strange.tokens))
    with pytest.raises(UnsupportedModel, match="1 of 256"):
        _cut(tiny.write_model(tmp_path / "m.gguf", vocabulary=without), Recipe(n_vocab=512))
    fine = replace(words, tokens=tuple("zz9" if text == "ÿ" else text for text in words.tokens))
    _cut(tiny.write_model(tmp_path / "n.gguf", vocabulary=fine), Recipe(n_vocab=512))


def test_leaving_out_a_layer_leaves_the_others_as_they_are(parent: Header) -> None:
    """Prevents: layers under wrong numbers."""
    cut = _cut(parent.path, Recipe(dropped=(1, 2)))
    assert llama.read_header(cut).n_layer == 2
    source, left = (gguf_rewrite.read_source(each.files) for each in (parent, llama.read_header(cut)))
    by_name = {tensor.name: tensor for tensor in source.tensors}
    for tensor in left.tensors:
        old = tensor.name.replace("blk.1.", "blk.3.")
        assert tensor.n_bytes == by_name[old].n_bytes
        ours, theirs = (
            np.fromfile(each.path, np.uint8, each.n_bytes, offset=each.start) for each in (tensor, by_name[old])
        )
        assert np.array_equal(ours, theirs), tensor.name
    assert _logits(cut, [1, 2]).shape == (2, 12)


def test_arrays_with_an_entry_per_layer_lose_the_same_entries(tmp_path: Path) -> None:
    """Prevents: arrays left whole, as llama.cpp's own pruning leaves them."""
    arrays = {"llama.attention.head_count_kv": [1, 2, 1, 1], "llama.feed_forward_length": [64, 64, 64, 64]}
    extra = {"llama.block_count": 4, **arrays}
    path = tiny.write_bare(tmp_path / "bare.gguf", vocabulary=tiny.letters(), extra=extra)
    about = llama.read_header(path, needs_weights=False)
    bare = gguf_rewrite.read_source(about.files)
    values, _ = without_layers(bare, about, (), (1,))
    gguf_rewrite.write(bare, tmp_path / "out.gguf", values=values, tensors=())
    assert llama.read_header(tmp_path / "out.gguf", needs_weights=False).n_head_kv == (1, 1, 1)


def test_every_recipe_gives_a_model_that_runs(tmp_path: Path) -> None:
    """Prevents: steps of a recipe that do not fit together; an incomplete file at the destination."""
    large = llama.read_header(_large(tmp_path, n_layer=4, n_embd=64))
    told: list[str] = []
    recipe = Recipe(quant="q4_0", n_vocab=500, dropped=(2,))
    destination = tmp_path / "made" / "draft.gguf"
    derive.make(large, recipe, destination, lambda what, share: told.append(f"{what} {share <= 1}"))
    assert [path.name for path in destination.parent.iterdir()] == ["draft.gguf"]
    header = llama.read_header(destination)
    assert (header.n_layer, header.n_vocab) == (3, 512)
    assert "q4_0" in header.weight_bytes
    assert _logits(destination, [1, 2]).shape == (2, 512)
    assert {"cutting True", "storing as Q4_0 True"} <= set(told)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(), "changes nothing"),
        (Recipe(quant="Q9_X"), "Q9_X"),
        (Recipe(dropped=(4,)), "no layer 4 .*0 to 3"),
        (Recipe(dropped=(1, 1)), "layer 1 is listed twice"),
        (Recipe(dropped=(0, 1, 2)), "3 of 4 layers"),
    ],
)
def test_recipes_that_do_not_suit_the_parent_are_refused(
    parent: Header, tmp_path: Path, recipe: Recipe, message: str
) -> None:
    """Prevents: a useless file, or an error from inside llama.cpp."""
    with pytest.raises(UsageError, match=message):
        derive.make(parent, recipe, tmp_path / "out.gguf", _silent)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("sliding_window", "word"), [(16, "sliding windows"), (None, "architecture")])
def test_layers_that_are_not_alike_are_never_left_out(tmp_path: Path, sliding_window: int | None, word: str) -> None:
    """Prevents: each window and rotation of a Gemma moved by one layer, which runs and drafts nonsense."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="gemma3", sliding_window=sliding_window, n_layer=4)
    with pytest.raises(UnsupportedModel, match=word):
        derive.checked(llama.read_header(path), Recipe(dropped=(1,)))


def test_a_full_disk_is_one_error_and_leaves_nothing(
    parent: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: half a model under the final name, or 'basic_ios::clear: iostream error'."""

    def full(*_args: object, **_rest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_rewrite, "write", full)
    with pytest.raises(DiskFull, match="no space left"):
        derive.make(parent, Recipe(dropped=(1,)), tmp_path / "made" / "out.gguf", _silent)
    assert list((tmp_path / "made").iterdir()) == []
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(DiskFull, match="10 bytes left"):
        derive.make(parent, Recipe(quant="Q4_0"), tmp_path / "made" / "out.gguf", _silent)


def test_a_place_that_cannot_be_written_is_named(parent: Header, tmp_path: Path) -> None:
    """Prevents: an internal error for a file in place of a folder."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match=r"out\.gguf cannot be written"):
        derive.make(parent, Recipe(dropped=(1,)), tmp_path / "file" / "out.gguf", _silent)


def test_an_interrupted_making_leaves_what_was_there(parent: Header, tmp_path: Path) -> None:
    """Prevents: Ctrl-C that removes the older draft, or leaves gigabytes behind."""
    destination = tmp_path / "made" / "out.gguf"
    derive.make(parent, Recipe(dropped=(1,)), destination, _silent)
    before = destination.read_bytes()

    def interrupted(_what: str, _share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        derive.make(parent, Recipe(dropped=(1, 2)), destination, interrupted)
    assert destination.read_bytes() == before
    assert [path.name for path in destination.parent.iterdir()] == ["out.gguf"]


def test_names_of_recipes_are_short_and_tell_them_apart() -> None:
    """Prevents: two drafts with one file name, or a name of four hundred characters."""
    many = [Recipe(dropped=tuple(range(n, n + 12))) for n in (0, 1)]
    names = [Recipe(quant="Q4_0", n_vocab=32000, dropped=(4, 7)).name, *(each.name for each in many)]
    assert names[0] == "q4_0+v32000+drop4.7"
    assert len(set(names)) == 3
    assert max(map(len, names)) < 30
