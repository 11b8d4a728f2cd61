"""Deriving drafts: what is cut, what is refused, and that llama.cpp computes with the result what it should."""

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
from specllama.files import gguf_rewrite
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from tests import tiny

pytestmark = pytest.mark.slow


def _silent(_what: str, _share: float) -> None:
    pass


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
    """A value or a tensor that is lost or shifted on its way, also out of several parts."""
    path = tiny.write_model(tmp_path / "one.gguf", chat_template=tiny.CHATML, extra={"x.list": [1, 2, 3], "x.f": 0.5})
    parts = tiny.write_split(tmp_path / "split", 3)
    for several in ([path], parts):
        source = gguf_rewrite.read_source(llama.read_header(several[0]).files)
        gguf_rewrite.write(source, tmp_path / "copy.gguf", values={}, tensors=source.tensors)
        assert np.array_equal(_logits(several[0], [1, 2, 3]), _logits(tmp_path / "copy.gguf", [1, 2, 3]))
    source = gguf_rewrite.read_source(llama.read_header(path).files)
    gguf_rewrite.write(source, path.with_name("c.gguf"), values={}, tensors=source.tensors)
    before, after = (GGUFReader(each).fields for each in (path, path.with_name("c.gguf")))
    for key in before:
        if not key.startswith("GGUF."):
            assert [*map(bytes, before[key].parts)] == [*map(bytes, after[key].parts)], key


def test_what_is_left_of_the_vocabulary_keeps_its_logits(tmp_path: Path) -> None:
    """Rows of other tokens under the ids that stay: a draft that proposes nonsense."""
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
    """A draft that cannot spell a word, or does not know the end of an answer, because their ids are high."""
    cut = _cut(_large(tmp_path), Recipe(n_vocab=512))
    with tiny.load(cut) as small:
        pieces = {small.vocab.piece(token) for token in range(small.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= pieces
        for name in ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
            assert len(small.vocab.tokenize(name, special=True)) == 1


@pytest.mark.parametrize(("n_vocab", "message"), [(100, "too small"), (100_000, "no smaller")])
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, n_vocab: int, message: str) -> None:
    """A file without the tokens that spell, or a copy that saves nothing."""
    with pytest.raises(UsageError, match=message):
        _cut(_large(tmp_path), Recipe(n_vocab=n_vocab))


def test_a_vocabulary_that_could_not_spell_its_own_tokens_is_not_cut(tmp_path: Path) -> None:
    """A token of the target that the draft could not even spell; or a refusal for bytes that no token has."""
    words = tiny.word_level()
    at = words.tokens.index("ab") + 600
    strange = replace(words, tokens=(*words.tokens[:at], "ÿÿ", *words.tokens[at + 1 :]))
    without = replace(strange, tokens=tuple("zz9" if text == "ÿ" else text for text in strange.tokens))
    with pytest.raises(UnsupportedModel, match="1 of 256"):
        _cut(tiny.write_model(tmp_path / "m.gguf", vocabulary=without), Recipe(n_vocab=512))
    fine = replace(words, tokens=tuple("zz9" if text == "ÿ" else text for text in words.tokens))
    _cut(tiny.write_model(tmp_path / "n.gguf", vocabulary=fine), Recipe(n_vocab=512))


def test_leaving_out_a_layer_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """Layers under wrong numbers, or arrays with an entry for each layer left whole, as llama.cpp leaves them."""
    arrays = {"llama.attention.head_count_kv": [1, 2, 1, 1], "llama.feed_forward_length": [64, 64, 64, 64]}
    path = tiny.write_model(tmp_path / "m.gguf", n_layer=4)
    cut = _cut(path, Recipe(dropped=(1, 2)))
    assert llama.read_header(cut).n_layer == 2
    source, left = (gguf_rewrite.read_source(llama.read_header(each).files) for each in (path, cut))
    by_name = {tensor.name: tensor for tensor in source.tensors}
    for tensor in left.tensors:
        old = tensor.name.replace("blk.1.", "blk.3.")
        assert tensor.n_bytes == by_name[old].n_bytes
        ours, theirs = (
            np.fromfile(each.path, np.uint8, each.n_bytes, offset=each.start) for each in (tensor, by_name[old])
        )
        assert np.array_equal(ours, theirs), tensor.name
    assert _logits(cut, [1, 2]).shape == (2, 12)
    with_arrays = tiny.write_bare(
        tmp_path / "bare.gguf", vocabulary=tiny.letters(), extra={"llama.block_count": 4, **arrays}
    )
    about = llama.read_header(with_arrays, needs_weights=False)
    bare = gguf_rewrite.read_source(about.files)
    from specllama.derive.layers import without_layers

    values, _ = without_layers(bare, about, (), (1,))
    gguf_rewrite.write(bare, tmp_path / "out.gguf", values=values, tensors=())
    assert llama.read_header(tmp_path / "out.gguf", needs_weights=False).n_head_kv == (1, 1, 1)


def test_every_recipe_gives_a_model_that_runs(tmp_path: Path) -> None:
    """A recipe whose steps do not fit together; a file that is there before it is whole."""
    parent = _large(tmp_path, n_layer=4, n_embd=64)
    told: list[str] = []
    recipe = Recipe(quant="q4_0", n_vocab=500, dropped=(2,))
    destination = tmp_path / "made" / "draft.gguf"
    derive.make(llama.read_header(parent), recipe, destination, lambda what, share: told.append(f"{what} {share <= 1}"))
    assert [path.name for path in destination.parent.iterdir()] == ["draft.gguf"]
    header = llama.read_header(destination)
    assert (header.n_layer, header.n_vocab) == (3, 512)
    assert "q4_0" in header.weight_bytes
    assert _logits(destination, [1, 2]).shape == (2, 512)
    assert {"cutting True", "storing as Q4_0 True"} <= set(told)


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        (Recipe(), UsageError, "changes nothing"),
        (Recipe(quant="Q9_X"), UsageError, "no quantisation 'Q9_X'"),
        (Recipe(dropped=(4,)), UsageError, "no layer 4 .*0 to 3"),
        (Recipe(dropped=(1, 1)), UsageError, "layer 1 is listed twice"),
        (Recipe(dropped=(0, 1, 2)), UsageError, "3 of 4 layers"),
    ],
)
def test_recipes_that_cannot_be_meant_are_refused(
    tmp_path: Path, recipe: Recipe, error: type[Exception], message: str
) -> None:
    """A file that is written and useless, or an error from inside llama.cpp."""
    parent = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_layer=4))
    with pytest.raises(error, match=message):
        derive.make(parent, recipe, tmp_path / "out.gguf", _silent)
    assert not (tmp_path / "out.gguf").exists()


def test_layers_that_are_not_alike_are_never_left_out(tmp_path: Path) -> None:
    """Every window and every rotation of a Gemma moved by one layer: it runs, and drafts rubbish."""
    path = tiny.write_model(tmp_path / "m.gguf", arch="gemma3", sliding_window=16, n_layer=4)
    with pytest.raises(UnsupportedModel, match="sliding windows"):
        derive.checked(llama.read_header(path), Recipe(dropped=(1,)))
    other = tiny.write_model(tmp_path / "n.gguf", arch="gemma3", n_layer=4)
    with pytest.raises(UnsupportedModel, match="may depend on their number"):
        derive.checked(llama.read_header(other), Recipe(dropped=(1,)))


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a model under the final name, or 'basic_ios::clear: iostream error'."""
    parent = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_layer=4))

    def full(*_args: object, **_rest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_rewrite, "write", full)
    monkeypatch.setattr(derive.child, "run", lambda work, tell: work(tell))
    with pytest.raises(DiskFull, match="no space left"):
        derive.make(parent, Recipe(dropped=(1,)), tmp_path / "made" / "out.gguf", _silent)
    assert list((tmp_path / "made").iterdir()) == []
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(DiskFull, match="10 bytes left"):
        derive.make(parent, Recipe(quant="Q4_0"), tmp_path / "made" / "out.gguf", _silent)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """'This should not have happened' for a folder that is none."""
    parent = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_layer=4))
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="file cannot be written"):
        derive.make(parent, Recipe(dropped=(1,)), tmp_path / "file" / "out.gguf", _silent)


def test_an_interrupted_making_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C that costs the draft that was good, or leaves gigabytes behind."""
    parent = llama.read_header(tiny.write_model(tmp_path / "m.gguf", n_layer=4))
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
    """Two drafts under one file name, or a name of four hundred characters."""
    many = [Recipe(dropped=tuple(range(n, n + 12))) for n in (0, 1)]
    names = [Recipe(quant="Q4_0", n_vocab=32000, dropped=(4, 7)).name, *(each.name for each in many)]
    assert names[0] == "q4_0+v32000+drop4.7"
    assert len(set(names)) == 3
    assert max(map(len, names)) < 30
