"""Kept conversations: private, whole, and none written by two chats; and what `/read` and `/copy` take."""

from __future__ import annotations

import base64
import io
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from specllama.base.disk import is_held
from specllama.base.errors import ConfigError, ConversationError, UsageError
from specllama.chat import saved as chat_file
from specllama.chat.session import Turn
from specllama.chat.settings import Settings
from specllama.cli.chat import reading
from specllama.cli.chat.commands import MOST_LISTED, _row, go_on, perform
from specllama.cli.chat.input import _history
from specllama.cli.chat.rescue import kept_on_hangup, tell_of_kept
from specllama.cli.chat.shelf import Shelf, kept_chats, kept_files, shelf_folder
from specllama.cli.prompting import template_of
from specllama.cli.reports import writable
from specllama.cli.screen.clipboard import MOST_BYTES, copy_to_clipboard
from specllama.cli.screen.markdown import AnswerText
from specllama.cli.screen.output import Stream
from specllama.drafters.length import AUTO_LENGTH
from specllama.pairs.naming import named as resolve
from tests.homes import file_size_limit


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def talk(*messages: str) -> Any:
    """A session with these messages."""
    return SimpleNamespace(turns=[Turn(text, "fine", 1, "stop") for text in messages], system="", settings=Settings())


class Session:
    """A session that takes over a conversation."""

    turns: Any = ()
    system = ""
    settings = Settings()

    def restore(self, turns: Any, system: str, settings: Settings) -> None:
        """As that of ChatSession."""
        self.turns, self.system, self.settings = list(turns), system, settings


def titles() -> list[list[str]]:
    """The messages of all kept conversations, the newest first."""
    return [[turn.user for turn in chat_file.load(kept.path).turns] for kept in kept_chats(kept_files())]


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
    [path] = kept_files()
    taken = second.take(path)
    assert taken.is_open == (sys.platform != "win32")
    second.begin(taken.path)
    with pytest.raises(ConversationError):
        third.take(path)
    for shelf, text in ((first, "first"), (second, "second"), (third, "third")):
        shelf.keep(talk("one", text), {})
    assert sorted(titles()) == [["one", "first"], ["one", "second"], ["one", "third"]]


def test_a_conversation_is_continued_as_it_is_now_not_as_it_was_listed() -> None:
    """Turns that another chat wrote after `/chats` or before the models were loaded, overwritten."""
    first, second = Shelf(wanted=True), Shelf(wanted=True)
    first.keep(talk("one"), {})
    [kept] = kept_chats(kept_files())
    first.keep(talk("one", "two"), {})
    opened = SimpleNamespace(setup=SimpleNamespace(length=AUTO_LENGTH))
    chat: Any = SimpleNamespace(shelf=second, session=Session(), opened=opened, open_for=str, listed=[kept])
    go_on(chat, second.take(kept.path))
    assert [turn.user for turn in chat.session.turns] == ["one", "two"]
    second.keep(chat.session, {})
    assert titles() == [["one", "two"]]


def test_a_conversation_that_does_not_load_leaves_the_current_one_alone() -> None:
    """The current conversation written over the one that was asked for."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("one"), {})
    own = shelf.path
    other = shelf_folder() / "other.json"
    other.write_text("{")
    with pytest.raises(ConversationError):
        shelf.take(other)
    assert shelf.path == own
    shelf.keep(talk("one", "two"), {})
    assert titles() == [["one", "two"]]
    assert len(kept_files()) == 2


def test_a_conversation_without_turns_leaves_no_file() -> None:
    """A message that /undo took back and the disk still holds."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("secret"), {})
    shelf.keep(talk(), {})
    assert (shelf.path, list(kept_files())) == (None, [])


def test_what_is_removed_leaves_the_file_also_without_a_history() -> None:
    """A message that /undo took back after `/set nohistory` and the disk still holds; later words in the file."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("one", "secret"), {})
    shelf.wanted = False
    later = talk("one", "secret", "later")
    later.system = "also later"
    shelf.keep(later, {})
    assert titles() == [["one", "secret"]]
    del later.turns[1:]
    shelf.keep(later, {})
    assert titles() == [["one"]]
    assert shelf.path is not None
    assert "later" not in shelf.path.read_text()
    later.turns.clear()
    shelf.keep(later, {})
    assert (shelf.path, list(kept_files())) == (None, [])


def test_a_conversation_is_open_until_its_chat_goes_on_with_another() -> None:
    """A note about another chat that is not there; none while the models load, or after the file was written anew."""
    first, second = Shelf(wanted=True), Shelf(wanted=True)
    first.keep(talk("one"), {})
    first.begin()
    [path] = kept_files()
    taken = second.take(path)
    assert not taken.is_open
    second.begin(taken.path)
    [path] = kept_files()
    assert is_held(path) == (sys.platform != "win32")
    second.keep(talk("one", "two"), {})
    assert is_held(path) == (sys.platform != "win32")
    second.begin()
    assert not is_held(path)


def test_what_is_no_regular_file_is_not_read() -> None:
    """A pipe in the folder that `--continue` waits on without end."""
    Shelf(wanted=True).keep(talk("one"), {})
    os.mkfifo(shelf_folder() / "pipe.json")
    (shelf_folder() / "link.json").symlink_to(os.devnull)
    assert titles() == [["one"]]


def test_a_list_reads_no_more_files_than_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that takes seconds after a year of conversations."""
    loaded: list[Path] = []
    load = chat_file.load
    monkeypatch.setattr(chat_file, "load", lambda path: loaded.append(path) or load(path))
    for number in range(MOST_LISTED + 5):
        Shelf(wanted=True).keep(talk(f"talk {number}"), {})
    said: list[str] = []
    chat: Any = SimpleNamespace(shelf=Shelf(wanted=True), listed=[], width=80, say=said.append)
    perform(chat, "/chats")
    assert len(loaded) == len(chat.listed) == MOST_LISTED
    assert said[0].splitlines()[-1].startswith("5 older")
    loaded.clear()
    perform(chat, '/chats talk 1"')
    assert (loaded, chat.listed) == ([], [])
    perform(chat, "/chats talk 17")
    assert (len(loaded), [kept.title for kept in chat.listed]) == (1, ["talk 17"])


def test_the_chat_that_was_cut_off_is_the_one_that_is_offered() -> None:
    """`/chats 1` for the newest conversation, which another chat has written since."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("cut off"), {})
    cut: Any = SimpleNamespace(shelf=shelf, session=talk("cut off"), opened=SimpleNamespace(names={}))
    with pytest.raises(SystemExit), kept_on_hangup(cut):
        raise SystemExit(129)
    Shelf(wanted=True).keep(talk("newer"), {})
    notes: list[str] = []
    chat: Any = SimpleNamespace(session=talk(), output=SimpleNamespace(note=notes.append), listed=[])
    tell_of_kept(chat)
    tell_of_kept(chat)
    assert ([kept.title for kept in chat.listed], len(notes)) == (["cut off"], 1)


def test_a_command_after_edit_ends_the_edit() -> None:
    """/edit, /chats 1 and a message, which replaces the last turn of the other conversation."""
    chat: Any = SimpleNamespace(edits_last=True, attached=[], note=lambda _: None)
    perform(chat, "/unread")
    assert chat.edits_last is False


def test_the_history_is_kept_if_and_only_if_set_history_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/set history` after `--no-history` that writes nothing, or on a pipe."""
    path = tmp_path / "history"
    history = _history(path, kept=False)
    history.store_string("secret")
    assert not path.exists()
    history.wanted = True  # type: ignore[attr-defined]
    history.store_string("told")
    assert [line for line in path.read_text().splitlines() if line[:1] == "+"] == ["+told"]
    chat: Any = SimpleNamespace(source=None, shelf=Shelf(wanted=False), note=lambda _: None)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError):
        perform(chat, "/set history")
    assert chat.shelf.wanted is False


def test_a_conversation_that_is_continued_without_a_history_stays_as_it_was() -> None:
    """`--no-history` that renames or changes files."""
    Shelf(wanted=True).keep(talk("one"), {})
    [path] = kept_files()
    shelf = Shelf(wanted=False)
    taken = shelf.take(path)
    assert (taken.path, len(taken.saved.turns)) == (None, 1)
    shelf.begin(taken.path)
    shelf.keep(talk("one", "two"), {})
    assert list(kept_files()) == [path]
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
    found = {words: list(kept_chats(kept_files(), words)) for words in ("", "WÖRTER one", "fine", "three", "settings")}
    assert [[kept.title for kept in each] for each in found.values()] == [["one"], ["one"], ["one"], [], []]


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


@pytest.mark.skipif(sys.platform == "win32", reason="other limits of names")
def test_a_name_that_is_too_long_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    """A system call that fails outside the place that words its error."""
    name = "x" * 300
    for text in (name, f"a {name}", f"{name} {name}"):
        with pytest.raises(UsageError, match="cannot be read"):
            reading.find(text)
    with pytest.raises(ConversationError, match="cannot be read"):
        chat_file.load(tmp_path / name)
    with pytest.raises(ConfigError, match="there is no file"):
        resolve(name)
    with pytest.raises(UsageError, match="there is no chat template"):
        template_of(name)
    with pytest.raises(UsageError, match="cannot be written"):
        writable("-o", name)


@pytest.mark.parametrize("width", [34, 50, 80])
def test_a_row_of_chats_fits_the_window(width: int) -> None:
    """A list whose long titles take two rows each."""
    shelf = Shelf(wanted=True)
    shelf.keep(talk("漢字 word " * 20), {})
    [kept] = kept_chats(kept_files())
    assert width - 1 <= cell_len(_row(1, kept, width)) <= width


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_read_into_a_message(tmp_path: Path) -> None:
    """Prevents: a chat that waits without a word for a pipe that nothing is written to."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="regular file"):
        reading.find(str(tmp_path / "pipe"))
