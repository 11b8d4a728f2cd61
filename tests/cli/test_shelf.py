"""Kept conversations: private, whole, and none written by two chats; and what `/read` and `/copy` take."""

from __future__ import annotations

import base64
import io
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.base.errors import UsageError
from specllama.chat.session import Turn
from specllama.chat.settings import Settings
from specllama.cli.chat import reading
from specllama.cli.chat.shelf import Shelf, kept_chats, shelf_folder
from specllama.cli.screen.clipboard import MOST_BYTES, copy_to_clipboard
from specllama.cli.screen.markdown import AnswerText
from specllama.cli.screen.output import Stream
from tests.homes import file_size_limit


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def talk(*messages: str) -> Any:
    """A session with these messages."""
    return SimpleNamespace(turns=[Turn(text, "fine", 1, "stop") for text in messages], system="", settings=Settings())


def titles() -> list[list[str]]:
    """The messages of all kept conversations, the newest first."""
    return [[turn.user for turn in kept.saved.turns] for kept in kept_chats()]


def test_a_conversation_is_kept_in_a_private_file_that_grows_with_it() -> None:
    """A talk that others can read, a file a turn, or a file that is written for nothing."""
    shelf = Shelf(wanted=True)
    assert (shelf.keep(talk(), {}), titles()) == ("", [])
    shelf.keep(talk("one"), {})
    assert shelf.path is not None
    first = shelf.path.stat()
    shelf.keep(talk("one"), {})
    assert shelf.path.stat() == first
    shelf.keep(talk("one", "two"), {})
    assert titles() == [["one", "two"]]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (shelf_folder(), shelf.path)] == [0o700, 0o600]
    shelf.begin()
    shelf.keep(talk("other"), {})
    assert sorted(titles()) == [["one", "two"], ["other"]]
    Shelf(wanted=False).keep(talk("secret"), {})
    assert len(titles()) == 2


def test_two_chats_that_continue_the_same_conversation_keep_both() -> None:
    """A chat in one window that overwrites what was said in another."""
    first, second, third = (Shelf(wanted=True) for _ in range(3))
    first.keep(talk("one"), {})
    [kept] = kept_chats()
    second.take(kept.path)
    third.take(kept.path)
    for shelf, text in ((first, "first"), (second, "second"), (third, "third")):
        shelf.keep(talk("one", text), {})
    assert sorted(titles()) == [["one", "first"], ["one", "second"], ["one", "third"]]


def test_a_conversation_that_is_continued_without_a_history_stays_as_it_was() -> None:
    """`--no-history` that renames or changes files."""
    Shelf(wanted=True).keep(talk("one"), {})
    [kept] = kept_chats()
    shelf = Shelf(wanted=False)
    shelf.take(kept.path)
    shelf.keep(talk("one", "two"), {})
    assert [again.path for again in kept_chats()] == [kept.path]
    assert titles() == [["one"]]


def test_a_full_disk_is_told_once_and_the_last_whole_file_stays() -> None:
    """A chat that ends with the disk, a warning after every answer, half a conversation."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("one"), {})
    with file_size_limit(100):
        assert "cannot be written" in shelf.keep(talk("one", "two"), {})
        assert shelf.keep(talk("one", "two", "three"), {}) == ""
    assert titles() == [["one"]]
    assert shelf.keep(talk("one", "two", "three"), {}) == ""
    assert titles() == [["one", "two", "three"]]


def test_words_are_searched_in_all_messages_and_damaged_files_are_left_out() -> None:
    """A list that fails because of one file; a search of titles alone."""
    Shelf(wanted=True).keep(talk("one", "Zwei  Wörter"), {})
    (shelf_folder() / "x.json").write_text("{")
    [kept] = kept_chats()
    assert kept.title == "one"
    assert [kept.holds(words) for words in ("", "WÖRTER one", "fine", "three")] == [True, True, True, False]


def test_read_finds_files_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a space taken for two, a hidden or binary file in the prompt, a folder without an end."""
    monkeypatch.chdir(tmp_path)
    for name in ("a b.txt", "src/x.py", "src/sub/y.py", "src/.hidden", "src/.git/z", "[1].txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("src/bin").write_bytes(b"\0")
    os.mkfifo("src/pipe")

    def names(text: str) -> list[str]:
        return [file.name for file in reading.find(text).files]

    assert names("a b.txt") == names("'a b.txt'") == ["a b.txt"]
    assert names("[1].txt") == ["[1].txt"]
    assert names("src") == ["src/x.py", "src/sub/y.py"]
    assert reading.find("src").n_skipped == 2
    assert names("src/**/*.py") == ["src/sub/y.py", "src/x.py"]
    assert names("src/x.py 'a b.txt' src/x.py") == ["src/x.py", "a b.txt"]
    monkeypatch.setattr(reading, "MOST_FILES", 2)
    for wrong in ("src", "*.md", "nowhere", "src/x.py nowhere"):
        with pytest.raises(UsageError):
            reading.find(wrong)
    monkeypatch.setattr(reading, "MOST_FILES", 9)
    monkeypatch.setattr(reading, "MAX_BYTES", 15)
    with pytest.raises(UsageError, match="15 bytes"):
        reading.find("src")


def test_code_blocks_are_those_of_the_answer_without_fences_and_thinking() -> None:
    """A fence or a thought on the clipboard; the code of a list with its indentation."""
    answer = "<think>```\nno\n```</think>\nSo:\n```py\nif a:\n    b\n```\n\n- x:\n  ~~~\n  c\n  ~~~\nend `d`\n```\nopen"
    whole = AnswerText.of(answer)
    assert whole.blocks == ("if a:\n    b\n", "c\n", "open")
    assert whole.text.startswith("So:\n```py\n")
    assert AnswerText.of("no</think>yes", starts_thinking=True).text == "yes"


def test_the_clipboard_gets_text_that_cannot_act_and_only_from_a_terminal() -> None:
    """An answer whose escape sequence runs when it is pasted into a shell."""
    paper = io.StringIO()
    assert copy_to_clipboard("é\x1b[2J\n", Stream(paper, True, True, True, True))
    sent = paper.getvalue()
    assert (sent[:7], sent[-1]) == ("\x1b]52;c;", "\x07")
    assert base64.b64decode(sent[7:-1]).decode() == "é\\x1b[2J\n"
    assert not copy_to_clipboard("a", Stream(paper, False, False, False, False))
    with pytest.raises(UsageError):
        copy_to_clipboard("a" * (MOST_BYTES + 1), Stream(paper, True, True, True, True))
    assert paper.getvalue() == sent
