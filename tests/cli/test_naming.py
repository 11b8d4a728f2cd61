"""The values of `-m` and `-md`, which are the same for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama import llama
from specllama.base.errors import ConfigError
from specllama.files.catalog import load_catalog, user_file
from specllama.pairs import derived as drafts
from specllama.pairs import setup
from specllama.pairs.naming import Wanted, named
from tests.cli.conftest import Pair, Run, record_of


@pytest.fixture(autouse=True)
def catalog(pair: Pair, own_home: Path) -> None:
    """A catalog with the tiny pair, named `toy`; and an empty cache."""
    user_file().parent.mkdir(parents=True)
    user_file().write_text(
        f'[models.big]\nsources = [{{ path = "{pair.target}" }}]\n'
        f'[models.little]\nsources = [{{ path = "{pair.draft}" }}]\n'
        '[pairs.toy]\ntarget = "big"\ndraft = "little"\n'
    )


def test_a_word_is_a_file_a_pair_a_model_a_derived_draft_or_a_repository(tmp_path: Path) -> None:
    """A path looked up as a repository on the network; a name that hides a local file."""
    models = load_catalog().models
    assert (named("big"), named("toy"), named("toy", draft=True)) == (models["big"], models["big"], models["little"])
    assert named("someone/something:Q4_0") == "someone/something:Q4_0"
    for path in ("none.gguf", "./none", "/no/where", "~nobody-here/none", "no/folder/none.gguf"):
        assert named(path) == Path(path)
    (tmp_path / "toy").write_text("")
    assert named("toy") == Path("toy")
    drafts.folder().mkdir(parents=True)
    derived = drafts.folder() / "big.gguf"
    derived.write_text("")
    assert (named("big", draft=True), named("big")) == (derived, models["big"])


@pytest.mark.parametrize(("draft", "kinds"), [(False, "file, pair or model"), (True, "pair, model or derived draft")])
def test_a_name_of_nothing_is_told_with_what_comes_near(draft: bool, kinds: str) -> None:
    """'There is no file' for a misspelt name."""
    with pytest.raises(ConfigError, match=f"there is no .*{kinds} named 'litle'") as caught:
        named("litle", draft=draft)
    assert "did you mean little?" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), [("big", "little"), ("toy", "toy"), ("TARGET", "little")])
@pytest.mark.parametrize("command", ["check", "run", "tune", "bench", "audit"])
def test_every_command_takes_the_same_names(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, command: str, target: str, draft: str
) -> None:
    """A name that one command accepts and another one looks for on the disk."""

    class Enough(Exception):
        pass

    def found(wanted: Wanted, *_: object, **__: object) -> setup.File:
        seen.append(llama.read_header(wanted if isinstance(wanted, Path) else wanted.sources[0].path).path)  # type: ignore[union-attr]
        if len(seen) == 2:
            raise Enough
        return setup.File(llama.read_header(seen[0]), None, "path")

    seen: list[Path] = []
    words = [command, "-m", target.replace("TARGET", str(pair.target)), "-md", draft]
    if command == "check":
        assert record_of(specllama(*words, "--json"))["fits"] is True
        return
    monkeypatch.setattr(setup, "bring", found)
    told = specllama(*words, *(["hi"] if command == "run" else []))
    assert "Enough" in told.err
    assert seen == [pair.target, pair.draft]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["check", "-md", "DRAFT"], "a draft is given (DRAFT) but no target, expected both", "name its target"),
        (["check", "-m", "DRAFT"], "a target is given (DRAFT) but no draft, expected both", "-md MODEL or -hfd"),
        (["check", "toy", "-md", "DRAFT"], "PAIR and --model-draft exclude each other: each names a draft", "leave"),
        (["run", "--pair", "toy", "-m", "DRAFT", "x"], "--pair and --model exclude each other", "leave one"),
    ],
)
def test_half_a_pair_says_what_is_missing(
    specllama: Run, pair: Pair, words: list[str], message: str, hint: str
) -> None:
    """A hint with an option that the command does not have, or a message without what to add."""
    told = specllama(*(word.replace("DRAFT", str(pair.draft)) for word in words))
    assert told.code == 2
    assert f"error: {message.replace('DRAFT', str(pair.draft))}" in told.err
    assert f"hint: {hint}" in told.err or hint in told.err.partition("hint: ")[2]
