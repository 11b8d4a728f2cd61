"""`specllama draft`: make, list, remove, and a derived draft in use."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import llama
from specllama.base import child as children
from specllama.base.errors import PairError
from specllama.cli import tune as tune_room
from specllama.derive import search as derive_search
from specllama.derive import tuned as derive_tuned
from specllama.llama.kernel_path import DEFAULT
from specllama.pairs import check
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs.setup import Listener, Setup
from specllama.tuning import child as tuner_child
from specllama.tuning import tune as tuner
from specllama.tuning.kernel_paths import Paths
from tests import tiny
from tests.cli.conftest import ENDLESS, Pair, Run, Terminal, record_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_children(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no child processes, which take long to start. They are tested elsewhere."""
    monkeypatch.setattr(children, "run", lambda work, tell: work(tell))


@pytest.fixture(scope="module")
def word_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a vocabulary large enough to cut."""
    folder = tmp_path_factory.mktemp("words")
    options = {"vocabulary": tiny.word_level(), "chat_template": tiny.CHATML, "n_ctx": 4096, "n_layer": 3}
    tiny.write_pair(folder, **options)
    return folder


@pytest.fixture
def words(word_files: Path, tmp_path: Path) -> Pair:
    """A copy for one test."""
    return Pair(*(Path(shutil.copy(word_files / name, tmp_path)) for name in ("target.gguf", "draft.gguf")))


def test_a_draft_is_made_listed_used_by_name_and_removed(specllama: Run, words: Pair) -> None:
    """Prevents: a file that the next command does not find; another text with another draft."""
    made = specllama("draft", "make", str(words.draft), "--quant", "q4_0", "--drop-layers", "1")
    assert made.code == 0, made.err
    path = Path(made.out.strip())
    assert path == drafts.folder() / "draft+q4_0+drop1.gguf"
    assert llama.read_header(path).n_layer == 2
    assert "made draft+q4_0+drop1: weights in Q4_0, without layers 1; " in made.err

    again = specllama("draft", "make", str(words.draft), "--quant", "Q4_0", "--drop-layers", "1")
    assert (again.out, again.err.startswith("already made: ")) == (made.out, True)

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

    assert specllama("draft", "remove", path.stem).code == 2  # no terminal to ask on
    assert specllama("draft", "remove", path.stem, "-y").code == 0
    assert "No derived drafts yet." in specllama("draft", "list").out


def test_a_foreign_json_file_beside_a_model_is_ignored(specllama: Run, words: Pair) -> None:
    """Prevents: a model that cannot be used because of a user's own file."""
    words.draft.with_suffix(".json").write_text('{"mine": 1}')
    used = specllama("run", *words.options, "hi", "-n", "2", "-q")
    assert (used.code, used.err) == (0, "")


def test_a_draft_with_a_cut_vocabulary_fits(specllama: Run, words: Pair) -> None:
    """Prevents: a pair check that refuses the draft for its different ids."""
    made = specllama("draft", "make", str(words.draft), "--vocab", "600", "-q")
    assert made.out.strip().endswith("draft+v640.gguf")
    checked = specllama("check", "-m", str(words.target), "-md", "draft+v640", "--json")
    assert checked.code == 0, checked.out + checked.err
    ask = ["run", "-m", str(words.target), "-t", "1", "--raw", "the end", "-n", "12", "--temp", "0", *ENDLESS]
    drafted = record_of(specllama(*ask, "-md", "draft+v640", "--json"))
    assert drafted["acceptance"]["drafted"] > 0
    assert drafted["text"] == record_of(specllama(*ask, "--json"))["text"]


def test_a_changed_parent_makes_a_draft_stale(specllama: Run, words: Pair) -> None:
    """Prevents: a draft of a replaced model, listed and used without a warning."""
    specllama("draft", "make", str(words.draft), "--quant", "q4_0", "-q")
    tiny.write_model(words.draft, vocabulary=tiny.word_level(), seed=9)
    listed = specllama("draft", "list")
    used = specllama("run", "-m", str(words.target), "-md", "draft+q4_0", "-t", "1", "hi", "-n", "2")
    for result in (listed, used):
        assert (result.code, "draft+q4_0 is stale: " in result.err) == (0, True)
    remade = specllama("draft", "make", str(words.draft), "--quant", "q4_0")
    assert "\nmade draft+q4_0" in remade.err  # behind the progress
    assert "stale" not in specllama("draft", "list").err


def test_a_damaged_record_is_made_again(specllama: Run, words: Pair) -> None:
    """Prevents: an error that making the draft again does not solve."""
    made = specllama("draft", "make", str(words.draft), "--quant", "q4_0").out.strip()
    Path(made).with_suffix(".json").write_text("{")
    again = specllama("draft", "make", str(words.draft), "--quant", "q4_0")
    assert (again.code, again.out.strip()) == (0, made)
    assert drafts.read(Path(made)) is not None


def test_o_replaces_a_file_only_with_force(specllama: Run, words: Pair, tmp_path: Path) -> None:
    """Prevents: an overwritten parent, or another overwritten file."""
    mine = tmp_path / "mine.gguf"
    recipe = ["draft", "make", str(words.draft), "--quant", "q4_0"]
    made = specllama(*recipe, "-o", str(mine))
    assert (made.out, made.err.splitlines()[-1]) == (f"{mine}\n", f"use it: -md {mine}")
    assert drafts.read(mine) is not None
    told = specllama(*recipe, "-o", str(mine))
    assert (told.code, f"{mine} exists" in told.err) == (2, True)
    assert specllama(*recipe, "-o", str(mine), "--force").code == 0
    before = words.draft.read_bytes()
    assert specllama(*recipe, "-o", str(words.draft), "--force").code == 2
    assert words.draft.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--quant", "q9"], 2, "the quantization is 'q9'"),
        (["--drop-layers", "7"], 2, "draft.gguf has no layer 7 (expected 0 to 2)"),
        (["--drop-layers", "1-"], 2, "--drop-layers is 1-, expected auto or a list of layers"),
        (["--drop-layers", "0,0"], 2, "layer 0 is listed twice"),
        (["--vocab", "many"], 2, "--vocab is many, expected a number of tokens"),
        (["--vocab", "0"], 2, "--vocab is 0, expected"),
        (["--vocab", "2000k"], 2, "is no smaller than the model's own"),
        (["--quant", ""], 2, "--quant is empty"),
        (["--quant", "q4_0", "-o", "x.bin"], 2, "-o x.bin"),
        (["--quant", "q4_0", "-o", "no/where.gguf"], 2, "no/where.gguf cannot be written: there is no such folder"),
        (["--quant", "q4_0,q8_0", "-m", "DRAFT", "--drop-layers", "9"], 2, "has no layer 9"),
        ([], 2, "measuring a draft needs its target"),
        (["--quant", "q4_0", "-o", f"{'a' * 300}.gguf"], 2, "File name too long"),
        (["-m", "~nobody-here/none.gguf"], 1, "there is no file ~nobody-here/none.gguf"),
        (["-m", "none.gguf"], 1, "there is no file none.gguf"),
    ],
)
def test_wrong_use_is_one_error_and_no_file(
    specllama: Run, words: Pair, args: list[str], code: int, message: str
) -> None:
    """Prevents: a traceback; a file made from invalid options."""
    args = [arg.replace("DRAFT", str(words.draft)) for arg in args]
    result = specllama("draft", "make", str(words.draft), *args)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "Traceback" not in result.err
    assert not list(drafts.paths())


def test_unknown_names_are_errors(specllama: Run, words: Pair) -> None:
    """Prevents: a removal without an effect or an error; a missing parent that is fetched."""
    specllama("draft", "make", str(words.draft), "--quant", "q4_0", "-q")
    told = specllama("draft", "remove", "draft+q9", "-y")
    assert (told.code, "there is no derived draft named 'draft+q9'" in told.err) == (1, True)
    assert "there are: draft+q4_0" in told.err
    assert "there is no file" in specllama("draft", "make", "none.gguf", "--quant", "q4_0").err


def test_a_draft_that_cannot_be_moved_is_in_the_cache_and_in_the_report(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of measuring without a report because the disk of -o is full."""
    monkeypatch.setattr(derive_search, "QUICK", tuner.TuneEffort(seconds=0.2, n_visits=1, n_tokens=4))
    monkeypatch.setattr(tuner_child, "LEAST_COST", 0.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copy2", full)
    options = ["--quant", "q8_0", "--measure", "--quick", "-t", "1", "-o", "mine.gguf"]
    found = specllama("draft", "make", str(words.draft), "-m", str(words.target), *options)
    assert found.code == 1
    path = drafts.folder() / "draft+q8_0.gguf"
    assert found.out.splitlines()[-1] == str(path)
    assert path.is_file()
    assert found.err.endswith("; the draft is in the cache: -md draft+q8_0\n")


@pytest.mark.usefixtures("auto")
def test_a_search_lists_its_candidates_and_tuning_considers_the_draft(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: parts that work alone but not together; a profile whose draft is never loaded."""
    _in_a_hurry(monkeypatch)
    options = ["--quant", "q8_0", "--measure", "--quick", "-t", "1"]
    found = specllama("draft", "make", str(words.draft), "-m", str(words.target), *options)
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    assert [line.split("\t")[0] for line in lines[:3]] == ["draft", "as it is", "weights in Q8_0"]
    assert lines[-1] == str(drafts.folder() / "draft+q8_0.gguf")
    facts = json.loads(specllama("draft", "list", "--json").out)
    assert facts["drafts"][0]["measurements"][0]["target"] == "target.gguf"

    # Take the derived draft whatever its time.
    monkeypatch.setattr(tuner, "PATH_MARGIN", 0.0)
    tuned = specllama("tune", *words.options, "--quick")
    assert tuned.code == 0, tuned.err
    assert _after(tuned.out, "draft").startswith("draft+q8_0 (")
    by_make, by_tune = json.loads(specllama("draft", "list", "--json").out)["drafts"][0]["measurements"]
    assert (by_make["by"], by_tune["by"], by_tune["target"]) == ("make", "tune", "target.gguf")
    row = specllama("draft", "list").out.splitlines()[1].split("\t")
    assert row[3:] == [f"{by_tune['cost']:.2f}", f"{by_tune['speed']:.2f}x", "tune", "target.gguf"]
    assert _after(tuned.out, "drafted token") == f"{by_tune['cost']:.2f} of that"
    record = record_of(specllama("run", *words.options, "hi", "-n", "3", "--json"))
    assert record["profile"]["derived"] == lines[-1]
    for strategy in ("auto", "draft-simple"):
        used = record_of(specllama("run", *words.options, "hi", "-n", "3", "--json", "--spec-type", strategy))
        loaded = used["models"]["draft"]
        assert loaded is None or loaded["path"] == lines[-1]  # None: too slow to help, and not named
    assert loaded is not None
    told = specllama("run", *words.options, "hi", "-n", "3", "--spec-type", "draft-simple")
    assert told.err.splitlines()[0].endswith(", with the draft draft+q8_0")


def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest measurement on one kernel path: a tiny model ends it early. Other programs disturb such passes."""
    effort = tuner.TuneEffort(seconds=60.0, n_visits=1, n_tokens=4)
    monkeypatch.setattr(derive_search, "QUICK", effort)
    monkeypatch.setattr(tuner, "QUICK", effort)
    monkeypatch.setattr(tuner_child, "LEAST_COST", 0.0)
    monkeypatch.setattr(derive_tuned, "LEAST_RATE", 0.0)
    monkeypatch.setattr(derive_tuned, "worth_measuring", lambda _subject: Paths())
    monkeypatch.setattr(derive_tuned, "of_draft", lambda _subject, _draft: (DEFAULT,))


def _after(out: str, what: str) -> str:
    """The last column of a row of `tune`."""
    return next(line.split("\t")[-1] for line in out.splitlines() if line.split("\t")[0] == what)


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize(("margin", "kept"), [(0.0, ["draft+q4_0"]), (100.0, [])])
def test_tuning_makes_a_cheaper_draft_and_keeps_it_if_it_wins(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch, margin: float, kept: list[str]
) -> None:
    """Prevents: a draft that tuning made but `run` does not load, or compares with its target for seconds; a draft that
    loses, left in the cache.
    """
    _in_a_hurry(monkeypatch)
    monkeypatch.setattr(tuner, "PATH_MARGIN", margin)
    tuned = specllama("tune", *words.options, "--quick", "--json")
    facts = record_of(tuned)
    assert f"drafts are made in {drafts.folder()} (up to " in tuned.err
    assert [path.stem for path in drafts.paths()] == kept
    assert (facts["profile"]["derived"] is not None, facts["before"]["derived"]) == (bool(kept), None)
    monkeypatch.setattr(check, "_tokenizer", lambda _header: pytest.fail("tokens were compared"))
    used = record_of(specllama("run", *words.options, "hi", "-n", "3", "--json", "--spec-type", "draft-simple"))
    assert Path(used["models"]["draft"]["path"]).stem == (kept or ["draft"])[0]


def test_what_tuning_measured_is_kept_if_the_tokens_cannot_be_compared(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of measuring that are lost by Ctrl-C, or a fault, in the seconds after them."""
    _in_a_hurry(monkeypatch)
    monkeypatch.setattr(tuner, "PATH_MARGIN", 0.0)
    compare = tune_room.pair_setup.require_fit
    for error, code in ((PairError("changed"), 0), (KeyboardInterrupt(), 130)):

        def failing(setup: Setup, listener: Listener, error: BaseException = error) -> None:
            if setup.profile is not None and setup.profile.derived is not None:
                raise error
            compare(setup, listener)

        monkeypatch.setattr(tune_room.pair_setup, "require_fit", failing)
        tuned = specllama("tune", *words.options, "--quick")
        assert (tuned.code, _after(tuned.out, "draft").partition(" ")[0]) == (code, "draft+q4_0")
        assert [path.stem for path in drafts.paths()] == ["draft+q4_0"]


def test_a_new_draft_goes_with_a_profile_that_cannot_be_saved(
    specllama: Run, words: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: the last bytes of a full disk taken by a draft that no profile uses."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _in_a_hurry(monkeypatch)
    monkeypatch.setattr(tuner, "PATH_MARGIN", 0.0)
    monkeypatch.setattr(profiles, "save", full)
    tuned = specllama("tune", *words.options, "--quick")
    assert (tuned.code, _after(tuned.out, "draft").partition(" ")[0]) == (1, "draft+q4_0")
    assert list(drafts.paths()) == []


def test_on_a_terminal_ctrl_c_leaves_nothing(terminal: Callable[..., Terminal], words: Pair) -> None:
    """Prevents: half a draft in the cache; a child that continues; a traceback."""
    stopped = terminal("draft", "make", str(words.draft), "-m", str(words.target), "--quant", "q4_0,q8_0")
    stopped.wait_for(lambda t: "%" in t.text)  # of any step
    stopped.interrupt()
    assert stopped.finish() == 130
    assert "Traceback" not in stopped.text
    assert not list(drafts.paths())
