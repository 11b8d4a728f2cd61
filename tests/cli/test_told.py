"""What people are told on the way: lines that break between words, hints that lead on, answers that were cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from specllama.base.errors import SpecllamaError
from specllama.cli.bench.models import _without_auto
from specllama.cli.chat.input import _history
from specllama.cli.screen.output import Output, Stream, wrapped
from specllama.pairs import derived as drafts
from specllama.pairs.ask import Names
from specllama.tuning import kernel_paths as tuner_paths
from tests.cli.conftest import ENDLESS, Pair, Result

Run = Callable[..., Result]


def test_prose_breaks_between_words_and_paths_stay_whole() -> None:
    """Prevents: "thr" at the end of a line and "eads" on the next; a path that cannot be copied."""
    path = "/a/folder/with-a-long-name/and-another/profile.json"
    text = f"kept for `run` and `chat` in {path} and nowhere else"
    lines = wrapped(text, 30).split("\n")
    assert path in lines
    assert " ".join(lines) == text
    assert [line for line in lines if len(line) > 30] == [path]
    assert wrapped(text, 0) == text


def test_notes_and_sentences_are_broken_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: line breaks in a pipe, whose reader looks for a line."""
    out, err = StringIO(), StringIO()
    terminal = Output(Stream(out, True, False, False, True), Stream(err, True, False, False, True))
    monkeypatch.setattr(Stream, "width", property(lambda stream: 20 if stream.is_terminal else 0))
    terminal.note("one two three four five six")
    terminal.warn("one two three four five six", "seven eight nine ten")
    terminal.prose("one two three four five six")
    assert err.getvalue().splitlines() == [
        "one two three four", "five six",
        "warning: one two", "three four five six",
        "hint: seven eight", "nine ten",
    ]  # fmt: skip
    assert out.getvalue().splitlines() == ["one two three four", "five six"]
    piped = StringIO()
    Output(Stream(piped, False, False, False, False), Stream(piped, False, False, False, False)).prose("a b " * 30)
    assert piped.getvalue().count("\n") == 1


def test_a_command_in_a_hint_is_left_whole_for_whoever_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: half a command in the clipboard, and the other half in the next line."""
    err = StringIO()
    terminal = Output(Stream(err, True, False, False, True), Stream(err, True, False, False, True))
    monkeypatch.setattr(Stream, "width", property(lambda stream: 20))
    terminal.warn("it was not tuned", "for figures: specllama tune -m a.gguf -md b.gguf")
    assert err.getvalue().splitlines()[-1] == "hint: for figures: specllama tune -m a.gguf -md b.gguf"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["check", "--pair", "x"], "hint: give the pair as an argument: specllama check x\n"),
        (["bench", "--pair=a b"], "hint: give the pair as an argument: specllama bench 'a b'\n"),
        (["audit", "--pair"], "hint: give the pair as an argument: specllama audit PAIR\n"),
        (["tune", "--quick", "--pair", "x"], "hint: give the pair as an argument: specllama tune x\n"),
    ],
)
def test_a_pair_that_is_no_option_is_led_to_its_place(specllama: Run, words: list[str], hint: str) -> None:
    """Prevents: "did you mean --probe?"."""
    result = specllama(*words)
    assert result.code == 2
    assert hint in result.err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--bogus", "see `specllama run --help`"),
        ("--verbos", "did you mean --verbose?"),
        ("--tempp", "did you mean --temp?"),
        ("--ctx", "did you mean --ctx-size?"),
    ],
)
def test_only_an_option_that_may_have_been_meant_is_suggested(specllama: Run, typed: str, hint: str) -> None:
    """`--bogus`: did you mean `--verbose`? As if the program knew better, and was wrong."""
    told = specllama("run", typed, "hi")
    assert (told.code, told.err) == (2, f"error: no such option: {typed}\nhint: {hint}\n")


def test_an_answer_that_was_cut_says_by_what(specllama: Run, pair: Pair) -> None:
    """Prevents: half a sentence, and nobody knows whether the model meant it."""
    args = ["run", *pair.options, "--raw", "abc", *ENDLESS]
    assert "note: the answer was cut after 3 tokens, as -n wants it\n" in specllama(*args, "-n", "3").err
    told = specllama(*args, "-c", "16", "-n", "-1").err
    assert "note: the answer was cut where the context of " in told


def test_a_history_that_cannot_be_read_is_an_empty_one(tmp_path: Path) -> None:
    """Prevents: a traceback in the middle of the screen; the file is read by a generator, after it was asked for."""
    folder = tmp_path / "history"
    folder.mkdir()  # no file: opening it fails whoever is asked
    assert list(_history(folder).load_history_strings()) == []


def test_a_quick_tuning_looks_at_one_derived_draft_and_says_so(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: twenty seconds that take minutes, because of every draft that somebody made once."""
    derived = []
    for name, n_bytes in (("coarse", 30), ("tiny", 10), ("fine", 20)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(b"x" * n_bytes)
        derived.append(SimpleNamespace(path=path))
    monkeypatch.setattr(drafts, "children_of", lambda parent: derived if parent == pair.draft else [])
    asked: list[list[str]] = []

    def worth_measuring(_subject: object, variants: Sequence[Path]) -> object:
        asked.append([path.stem for path in variants])
        raise SpecllamaError("seen enough")

    monkeypatch.setattr(tuner_paths, "worth_measuring", worth_measuring)
    told = specllama("tune", *pair.options, "--quick").err
    assert "note: of 3 derived drafts only the smallest is looked at (tiny), to be quick" in told
    assert "derived drafts" not in specllama("tune", *pair.options).err
    assert asked == [["tiny"], ["coarse", "tiny", "fine"]]


@pytest.mark.parametrize(
    ("strategy", "told"), [("draft-tli", "-md b.gguf --spec-type draft-tli`)"), ("draft-simple", "-md b.gguf`)")]
)
def test_a_benchmark_without_auto_says_how_the_pair_is_tuned_as_it_drafts(strategy: str, told: str) -> None:
    """Prevents: a tuning of the pair by its ids, after which a benchmark of draft-tli asks for the same again."""
    setup = SimpleNamespace(profile=None, stale="", model_strategy=strategy)
    assert _without_auto(setup, Names(target="a.gguf", draft="b.gguf")).endswith(told)  # type: ignore[arg-type]
