"""`specllama draft`: make, list, remove, and a derived draft in use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import llama
from specllama.base import child as children
from specllama.pairs import derived as drafts
from tests import tiny
from tests.cli.conftest import ENDLESS, Pair, Result, Terminal, record_of

pytestmark = pytest.mark.slow

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_cache(plain_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no children: each would import everything anew. That they work is tested elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(children, "run", lambda work, tell: work(tell))


@pytest.fixture(scope="module")
def word_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose vocabulary is large enough to be cut."""
    folder = tmp_path_factory.mktemp("words")
    options = {"vocabulary": tiny.word_level(), "chat_template": tiny.CHATML, "n_ctx": 4096, "n_layer": 3}
    tiny.write_pair(folder, **options)
    return folder


@pytest.fixture
def words(word_files: Path, tmp_path: Path) -> Pair:
    """A copy of it, which a test may change."""
    return Pair(*(Path(shutil.copy(word_files / name, tmp_path)) for name in ("target.gguf", "draft.gguf")))


def test_a_draft_is_made_listed_used_by_name_and_removed(specllama: Run, words: Pair) -> None:
    """A file that the next command does not find, or another text because another draft was used."""
    made = specllama("draft", "make", str(words.draft), "--quant", "q4_0", "--drop-layers", "1")
    assert made.code == 0, made.err
    path = Path(made.out.strip())
    assert path == drafts.folder() / "draft+q4_0+drop1.gguf"
    assert llama.read_header(path).n_layer == 2
    assert "made draft+q4_0+drop1: weights in Q4_0, without layers 1; " in made.err

    again = specllama("draft", "make", str(words.draft), "--quant", "Q4_0", "--drop-layers", "1")
    assert (again.out, again.err.startswith("there already: ")) == (made.out, True)

    listed = specllama("draft", "list")
    assert listed.out.splitlines()[1].split("\t")[0] == path.stem
    facts = json.loads(specllama("draft", "list", "--json").out)
    (known,) = facts["drafts"]
    assert (known["recipe"]["quant"], known["recipe"]["dropped"], known["stale"]) == ("Q4_0", [1], "")
    assert known["parent"]["path"] == str(words.draft)

    ask = ["run", "-m", str(words.target), "-t", "1", "--raw", "the end", "-n", "12", "--temp", "0", *ENDLESS]
    plain = record_of(specllama(*ask, "--json"))
    drafted = record_of(specllama(*ask, "-md", path.stem, "--json"))
    assert drafted["text"] == plain["text"]
    assert drafted["models"]["draft"]["path"] == str(path)

    assert specllama("draft", "remove", path.stem).code == 2  # nobody can be asked
    assert specllama("draft", "remove", path.stem, "-y").code == 0
    assert "No derived drafts yet." in specllama("draft", "list").out


def test_what_lies_beside_a_model_may_be_anybodys(specllama: Run, words: Pair) -> None:
    """A model that cannot be used because somebody keeps notes beside it."""
    words.draft.with_suffix(".json").write_text('{"mine": 1}')
    used = specllama("run", *words.options, "hi", "-n", "2", "-q")
    assert (used.code, used.err) == (0, "")


def test_a_cut_draft_is_checked_and_used_like_any_other(specllama: Run, words: Pair) -> None:
    """A vocabulary that the pair check refuses because its ids are others."""
    made = specllama("draft", "make", str(words.draft), "--vocab", "600", "-q")
    assert made.out.strip().endswith("draft+v640.gguf")
    checked = specllama("check", "-m", str(words.target), "-md", "draft+v640", "--json")
    assert checked.code == 0, checked.out + checked.err
    ask = ["run", "-m", str(words.target), "-t", "1", "--raw", "the end", "-n", "12", "--temp", "0", *ENDLESS]
    drafted = record_of(specllama(*ask, "-md", "draft+v640", "--json"))
    assert drafted["acceptance"]["drafted"] > 0
    assert drafted["text"] == record_of(specllama(*ask, "--json"))["text"]


def test_a_stale_parent_is_noticed(specllama: Run, words: Pair) -> None:
    """A draft of a model that was replaced since, listed as if nothing had happened."""
    specllama("draft", "make", str(words.draft), "--quant", "q4_0", "-q")
    tiny.write_model(words.draft, vocabulary=tiny.word_level(), seed=9)
    listed = specllama("draft", "list")
    assert "draft+q4_0 is stale: its parent draft.gguf has changed since" in listed.err
    used = specllama("run", "-m", str(words.target), "-md", "draft+q4_0", "-t", "1", "hi", "-n", "2")
    assert (used.code, "draft+q4_0 is stale: its parent draft.gguf has changed since" in used.err) == (0, True)
    remade = specllama("draft", "make", str(words.draft), "--quant", "q4_0")
    assert remade.err.startswith("made draft+q4_0")
    assert "stale" not in specllama("draft", "list").err


def test_a_damaged_record_is_made_again(specllama: Run, words: Pair) -> None:
    """A hint to make the draft again that ends in the same error."""
    made = specllama("draft", "make", str(words.draft), "--quant", "q4_0").out.strip()
    Path(made).with_suffix(".json").write_text("{")
    again = specllama("draft", "make", str(words.draft), "--quant", "q4_0")
    assert (again.code, again.out.strip()) == (0, made)
    assert drafts.read(Path(made)) is not None


def test_o_writes_elsewhere_and_replaces_nothing_unasked(specllama: Run, words: Pair, tmp_path: Path) -> None:
    """The parent itself overwritten, or a file that somebody else needed."""
    mine = tmp_path / "mine.gguf"
    recipe = ["draft", "make", str(words.draft), "--quant", "q4_0"]
    made = specllama(*recipe, "-o", str(mine))
    assert (made.out, made.err.splitlines()[-1]) == (f"{mine}\n", f"use it: -md {mine}")
    assert drafts.read(mine) is not None
    told = specllama(*recipe, "-o", str(mine))
    assert (told.code, f"{mine} is there already" in told.err) == (2, True)
    assert specllama(*recipe, "-o", str(mine), "--force").code == 0
    before = words.draft.read_bytes()
    assert "the model's own file" in specllama(*recipe, "-o", str(words.draft), "--force").err
    assert words.draft.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--quant", "q9"], 2, "there is no quantisation 'q9'"),
        (["--drop-layers", "7"], 2, "draft.gguf has no layer 7 (expected 0 to 2)"),
        (["--drop-layers", "1-"], 2, "--drop-layers is 1-, expected auto or a list of layers"),
        (["--drop-layers", "0,0"], 2, "layer 0 is listed twice"),
        (["--vocab", "many"], 2, "--vocab is many, expected a number of tokens"),
        (["--vocab", "0"], 2, "--vocab is 0, expected"),
        (["--vocab", "2000k"], 2, "is no smaller than the model's own"),
        (["--quant", ""], 2, "--quant is empty"),
        (["--quant", "q4_0", "-o", "x.bin"], 2, "-o x.bin is no name for a model"),
        (["--quant", "q4_0", "-o", "no/where.gguf"], 2, "there is no folder no"),
        (["--quant", "q4_0,q8_0", "-m", "DRAFT", "--drop-layers", "9"], 2, "has no layer 9"),
        ([], 2, "measuring a draft needs its target"),
        (["--quant", "q4_0", "-o", f"{'a' * 300}.gguf"], 1, "File name too long"),
        (["-m", "~nobody-here/none.gguf"], 1, "there is no file ~nobody-here/none.gguf"),
        (["-m", "none.gguf"], 1, "there is no file none.gguf"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    specllama: Run, words: Pair, args: list[str], code: int, message: str
) -> None:
    """A traceback, or a file that is made although nobody can have meant it."""
    args = [arg.replace("DRAFT", str(words.draft)) for arg in args]
    result = specllama("draft", "make", str(words.draft), *args)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "Traceback" not in result.err
    assert not list(drafts.paths())


def test_names_that_are_not_there_are_errors(specllama: Run, words: Pair) -> None:
    """A removal that says nothing; a parent that is fetched from nowhere."""
    specllama("draft", "make", str(words.draft), "--quant", "q4_0", "-q")
    told = specllama("draft", "remove", "draft+q9", "-y")
    assert (told.code, "there is no derived draft named 'draft+q9'" in told.err) == (1, True)
    assert "there are: draft+q4_0" in told.err
    assert "there is no file" in specllama("draft", "make", "none.gguf", "--quant", "q4_0").err


def test_a_search_tells_what_it_tried_and_tuning_considers_the_draft(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything between the parts that the stand-ins do not see; a profile that names a draft nobody loads."""
    from specllama.derive import search as derive_search
    from specllama.llama.kernel_path import DEFAULT
    from specllama.tuning import child as tuner_child
    from specllama.tuning import kernel_paths as tuner_paths
    from specllama.tuning import tune as tuner
    from specllama.tuning.kernel_paths import Paths

    monkeypatch.setattr(derive_search, "QUICK", tuner.TuneEffort(seconds=0.2, n_visits=1, n_tokens=4))
    monkeypatch.setattr(tuner, "QUICK", tuner.TuneEffort(seconds=0.2, n_visits=1, n_tokens=4))
    monkeypatch.setattr(tuner_child, "PLAUSIBLE", 0.0)  # passes this short are spoiled by any other program
    found = specllama(
        "draft", "make", str(words.draft), "-m", str(words.target), "--quant", "q8_0", "--measure", "--quick", "-t", "1"
    )
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    assert [line.split("\t")[0] for line in lines[:3]] == ["draft", "as it is", "weights in Q8_0"]
    assert lines[-1] == str(drafts.folder() / "draft+q8_0.gguf")
    facts = json.loads(specllama("draft", "list", "--json").out)
    assert facts["drafts"][0]["measurements"][0]["target"] == "target.gguf"

    def one_each(_subject: object, variants: list[Path]) -> Paths:
        return Paths(variants=tuple((path, (DEFAULT,)) for path in variants))

    monkeypatch.setattr(tuner_paths, "worth_measuring", one_each)
    # Whatever the clock says of models this small, the derived one is to be taken.
    monkeypatch.setattr(tuner, "PATH_MARGIN", 0.0)
    tuned = specllama("tune", *words.options, "--quick")
    assert tuned.code == 0, tuned.err
    assert "Used from now on: draft+q8_0." in tuned.out
    by_make, by_tune = json.loads(specllama("draft", "list", "--json").out)["drafts"][0]["measurements"]
    assert (by_make["by"], by_tune["by"], by_tune["target"]) == ("make", "tune", "target.gguf")
    row = specllama("draft", "list").out.splitlines()[1].split("\t")
    assert row[3:] == [f"{by_tune['cost']:.2f}", f"{by_tune['speed']:.2f}x", "tune", "target.gguf"]
    assert f"a token costs {by_tune['cost']:.2f} of a pass, {by_tune['speed']:.2f}x on average" in tuned.out
    record = record_of(specllama("run", *words.options, "hi", "-n", "3", "--json"))
    assert record["profile"]["derived"] == lines[-1]
    for strategy in ("auto", "draft-simple"):
        used = record_of(specllama("run", *words.options, "hi", "-n", "3", "--json", "--spec-type", strategy))
        loaded = used["models"]["draft"]
        assert loaded is None or loaded["path"] == lines[-1]  # None: it cannot pay, and nobody named it
    assert loaded is not None
    told = specllama("run", *words.options, "hi", "-n", "3", "--spec-type", "draft-simple")
    assert told.err.splitlines()[0].endswith(", with the draft draft+q8_0")


def test_on_a_terminal_ctrl_c_leaves_nothing(terminal: Callable[..., Terminal], words: Pair) -> None:
    """Half a draft in the cache, a child that goes on, or a traceback."""
    stopped = terminal("draft", "make", str(words.draft), "-m", str(words.target), "--quant", "q4_0,q8_0")
    stopped.wait_for(lambda t: "%" in t.text)  # of whichever step; each may be over soon
    stopped.interrupt()
    assert stopped.finish() == 130
    assert "Traceback" not in stopped.text
    assert not list(drafts.paths())
