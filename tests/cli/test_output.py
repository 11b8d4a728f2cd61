"""Messages that break between words, commands that can be copied, and tables that cannot control the terminal."""

from __future__ import annotations

import os
from io import BytesIO, StringIO, TextIOWrapper
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from specllama.cli.bench.models import _without_auto
from specllama.cli.chat.input import _history
from specllama.cli.screen.output import Output, Stream
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.tables import draw_table
from specllama.cli.screen.visible import wrapped
from specllama.pairs.ask import Names


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


@pytest.fixture
def passing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds between two looks at the clock."""
    monkeypatch.setattr("time.perf_counter", count(0, 2).__next__)


@pytest.mark.usefixtures("passing_time")
def test_progress_in_a_log_is_a_line_every_ten_percent() -> None:
    """Prevents: minutes without a word in a log, or a line for every step."""
    out, err = StringIO(), StringIO()
    log = Stream(err, False, False, False, False)
    for logs in (True, False):
        with StatusLine(Output(Stream(out, False, False, False, False), log), logs=logs) as status:
            for share in range(0, 35, 2):
                status.show("reading" if share < 20 else "writing", share / 100)
    assert err.getvalue().splitlines() == ["reading ...", "reading: 10 %", "writing: 20 %", "writing: 30 %"]


@pytest.mark.usefixtures("passing_time")
def test_each_step_is_named_in_a_log_and_no_line_comes_twice() -> None:
    """Prevents: short steps that no log names; a line for each turn of a share that wavers."""
    out, err = StringIO(), StringIO()
    output = Output(Stream(out, False, False, False, False), Stream(err, False, False, False, False))
    with StatusLine(output, logs=True) as status:
        for what, share in (("a", 0.31), ("b", 0.33), ("b", 0.41), ("b", 0.39), ("b", 0.41), ("c", 0.29)):
            status.show(what, share)
    assert err.getvalue().splitlines() == ["a: 30 %", "b: 30 %", "b: 40 %", "c: 20 %"]


def test_a_command_in_a_hint_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: half a command in the clipboard, and the other half in the next line."""
    err = StringIO()
    terminal = Output(Stream(err, True, False, False, True), Stream(err, True, False, False, True))
    monkeypatch.setattr(Stream, "width", property(lambda stream: 20))
    terminal.warn("it was not tuned", "for figures: specllama tune -m a.gguf -md b.gguf")
    assert err.getvalue().splitlines()[-2:] == ["hint: for figures:", "specllama tune -m a.gguf -md b.gguf"]
    terminal.warn("it was not tuned", "one two `specllama tune -m a.gguf -md b.gguf` three")
    assert err.getvalue().splitlines()[-3:] == ["hint: one two", "`specllama tune -m a.gguf -md b.gguf`", "three"]


def test_a_history_that_is_the_users_link_stays_one(tmp_path: Path) -> None:
    """Prevents: a history that begins again although a link to the null device switches it off."""
    theirs, link = tmp_path / "theirs", tmp_path / "chat_history"
    theirs.touch(mode=0o644)
    link.symlink_to(theirs)
    _history(link, kept=True).store_string("hello")
    assert link.is_symlink()
    assert (theirs.stat().st_mode & 0o777, "+hello" in theirs.read_text()) == (0o644, True)


def test_a_history_that_cannot_be_read_is_an_empty_one(tmp_path: Path) -> None:
    """Prevents: a traceback in the middle of the screen; the file is read by a generator, after it was asked for."""
    folder = tmp_path / "history"
    folder.mkdir()  # opening a folder fails for every user
    assert list(_history(folder, kept=True).load_history_strings()) == []


@pytest.mark.parametrize(
    ("strategy", "told"), [("draft-tli", "-md b.gguf --spec-type draft-tli`)"), ("draft-simple", "-md b.gguf`)")]
)
def test_a_benchmark_without_auto_says_how_the_pair_is_tuned_as_it_drafts(strategy: str, told: str) -> None:
    """Prevents: a tuning of the pair by its ids, after which a benchmark of draft-tli asks for the same again."""
    setup = SimpleNamespace(profile=None, stale="", model_strategy=strategy)
    assert _without_auto(setup, Names(target="a.gguf", draft="b.gguf")).endswith(told)  # type: ignore[arg-type]


def test_a_path_in_a_pipe_is_exact() -> None:
    """Prevents: a name that is not UTF-8 printed with question marks, which no program can open."""
    data = BytesIO()
    stream = Stream(TextIOWrapper(data, "utf-8", "replace"), False, False, False, False)
    output = Output(stream, stream)
    output.line("first")
    output.path(path := Path("caf\udce9.gguf"))
    assert data.getvalue().splitlines() == [b"first", os.fsencode(path)]


@pytest.mark.parametrize("columns", [24, 60, 80])
def test_names_and_figures_in_a_table_are_never_broken(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a name in pieces, which cannot be copied; a figure that is cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    paper = StringIO()
    stream = Stream(paper, True, False, False, False)
    rows = [["a-long-name+q4_0", "1.25 GB", "many words in a sentence that is long"], ["漢字" * 4, "2 GB", "-"]]
    draw_table(Output(stream, stream), ["name", "size", "what"], rows, figures=["size"], prose="what")
    lines = paper.getvalue().splitlines()
    assert all(any(text in line for line in lines) for row in rows for text in row[:2])
    assert " ".join(paper.getvalue().split()).count("sentence") == 1
    assert all(cell_len(line.rstrip()) <= columns for line in lines)
    assert ("name" in lines[0].split()) is (columns > 24)
