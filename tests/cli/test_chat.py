"""`specllama chat` on a terminal of its own: what a person sees, types, pastes, and interrupts."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.conftest import EVIL, REPOSITORY, SILENT, SPECLLAMA, Pair, Terminal, forbidden

pytestmark = pytest.mark.slow

ENDLESS = forbidden(96, 97, 98, 99)
SUMMARY = re.compile(r"\[ .*t/s.* \]")


Start = Callable[..., Terminal]


@pytest.fixture
def chat(terminal: Callable[..., Terminal], talker: Pair, tmp_path: Path) -> Start:
    """Starts a chat in a terminal that answers where its cursor is; returns when it asks for a message."""

    def start(*args: str, env: dict[str, str] | None = None, **size: int) -> Terminal:
        state = {"XDG_STATE_HOME": str(tmp_path / "state"), "VISUAL": "", "EDITOR": "", **(env or {})}
        shown = terminal("chat", *talker.options, *args, env=state, **size)
        shown.display.write_process_input = lambda data: shown.child.send(data.encode())
        shown.wait_for(lambda t: ">>>" in t.text)
        return shown

    return start


def answered(shown: Terminal, n_answers: int = 1, prompt: str = "\n>>>") -> None:
    """Wait for the summary of an answer and the next prompt."""
    shown.wait_for(lambda t: len(SUMMARY.findall(t.text)) == n_answers and t.text.endswith(prompt))


def ask(shown: Terminal, text: str, n_answers: int = 1) -> None:
    """Type a message and wait until it is answered."""
    shown.child.send(text + "\r")
    answered(shown, n_answers)


def command(shown: Terminal, text: str, seen: str) -> None:
    """Type a command and wait for its output."""
    shown.child.send(text + "\r")
    shown.wait_for(lambda t: seen in t.text and t.text.endswith("\n>>>"))


def saved(shown: Terminal, tmp_path: Path, turns: str = "1 turn") -> list[dict[str, str]]:
    """The messages of the conversation."""
    command(shown, f"/save {tmp_path}/talk.json", f"saved {turns}")
    return json.loads((tmp_path / "talk.json").read_text())["messages"]


def goes_on(shown: Terminal) -> None:
    """Wait for some lines more of an answer."""
    n_before = len(shown.text)
    shown.wait_for(lambda t: "% accepted" in t.text and len(t.text) > n_before + 1000)


def history(tmp_path: Path) -> Path:
    return tmp_path / "state" / "specllama" / "chat_history"


def test_a_conversation_as_a_person_sees_it(chat: Start, tmp_path: Path) -> None:
    """Figures left behind, a KV that is read anew, origins that look alike, a history that others may read."""
    shown = chat("-n", "500", "--temp", "0.9", "--seed", "1", *ENDLESS, rows=30, columns=120)
    assert "target: target.gguf\ndraft: draft.gguf\n" in shown.text
    shown.child.send("hello\r")
    shown.wait_for(lambda t: "% accepted" in t.text and "t/s" in t.text)
    answered(shown)
    assert "correction  bonus" not in shown.text
    for code in (b"\x1b[1;4;31m", b"\x1b[4;35m"):
        assert code in shown.raw
    ask(shown, "and then", 2)
    first, second = SUMMARY.findall(shown.text)
    assert "(24 tokens)" in first
    assert re.search(r"\(3\d tokens, 52\d cached\)", second)
    shown.child.sendeof()
    assert shown.finish() == 0
    assert stat.S_IMODE(history(tmp_path).stat().st_mode) == 0o600
    assert re.findall(r"^\+(.*)$", history(tmp_path).read_text(), re.M) == ["hello", "and then"]


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(chat: Start, tmp_path: Path) -> None:
    """A chat that is lost with its answer, a prompt that does not come back, an exit that is not explained."""
    shown = chat("-c", "90000", *ENDLESS)
    shown.child.send("go\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    shown.interrupt()
    pressed = time.monotonic()
    shown.wait_for(lambda t: "[ stopped | " in t.text)
    assert time.monotonic() - pressed < shown.at_once_s
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    turn = saved(shown, tmp_path)[1]
    assert turn["finish_reason"] == "cancelled"
    assert turn["content"]
    shown.interrupt()
    shown.wait_for(lambda t: t.text.endswith("(Ctrl-D or /exit leaves; Ctrl-C stops an answer)\n>>>"))
    command(shown, "/set predict 5", "predict is 5")
    ask(shown, "go on", 2)
    shown.child.sendeof()
    assert shown.finish() == 0


def test_ctrl_c_in_a_long_prefill_is_back_at_once(chat: Start, tmp_path: Path) -> None:
    """A document that must be read to its end first; the next question answered wrongly (FIELD_CASES 37)."""
    (tmp_path / "long.txt").write_text("abcdefghi" * 9000)
    shown = chat("-c", "90000", "-n", "5", *ENDLESS)
    command(shown, "/read long.txt", "81,000 tokens; it goes in front of your next message")
    shown.child.send("sum it up\r")
    shown.wait_for(lambda t: "reading the prompt" in t.text)
    shown.read(0.4)
    shown.wait_for(lambda t: "reading the prompt" in t.text)  # it is drawn anew ten times a second
    shown.interrupt()
    pressed = time.monotonic()
    shown.wait_for(lambda t: "stopped before the answer began" in t.text)
    assert time.monotonic() - pressed < shown.at_once_s
    command(shown, "/clear", "the conversation is empty")
    ask(shown, "hello")


def test_what_is_pasted_is_one_message_and_quotes_hold_several_lines(chat: Start, tmp_path: Path) -> None:
    """A paste that is sent line by line, or a block that cannot be typed."""
    shown = chat("-n", "3", "--temp", "0", *ENDLESS)
    shown.child.send("\x1b[200~first line\nsecond line\x1b[201~")
    shown.wait_for(lambda t: "... second line" in t.text)
    assert not SUMMARY.search(shown.text)
    ask(shown, "")
    shown.child.send('"""one\r')
    shown.wait_for(lambda t: '>>> """one\n...' in t.text)
    ask(shown, 'two"""', 2)
    messages = saved(shown, tmp_path, "2 turns")
    assert [message["content"] for message in messages[::2]] == ["first line\nsecond line", "one\ntwo"]


def test_the_line_is_completed_remembered_and_edited(chat: Start, tmp_path: Path) -> None:
    """Tab, Up or /edit that do nothing; a history that is written after /set nohistory."""
    shown = chat("-n", "3", *ENDLESS)
    shown.child.send("/set par\t top-\t")
    shown.wait_for(lambda t: ">>> /set parameter top-" in t.text)
    command(shown, "k 5", "top-k is 5")
    ask(shown, "remember me")
    command(shown, "/set nohistory", "not kept from now on")
    ask(shown, "a secret", 2)
    shown.child.send("\x1b[A\x1b[A\x1b[A")
    shown.wait_for(lambda t: t.text.endswith(">>> remember me"))
    shown.child.send("\x03/edit\r")
    shown.wait_for(lambda t: t.text.endswith(">>> a secret"))
    ask(shown, " more", 3)
    command(shown, "/show info", "turns      2")
    shown.child.sendeof()
    shown.finish()
    kept = history(tmp_path).read_text()
    assert "remember me" in kept
    assert "secret" not in kept


def test_the_editor_edits_the_line_and_the_last_message(chat: Start, tmp_path: Path) -> None:
    """Ctrl-G or /edit without effect, or that loses the message."""
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "%s edited" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o755)
    shown = chat("-n", "3", "--no-history", *ENDLESS, env={"EDITOR": str(editor)})
    shown.child.send("draft\x07")
    shown.wait_for(lambda t: ">>> draft edited" in t.text)
    ask(shown, "")
    ask(shown, "/edit", 2)
    assert saved(shown, tmp_path)[0]["content"] == "draft edited edited"
    assert not history(tmp_path).exists()


def test_a_broken_editor_command_is_named(chat: Start) -> None:
    """Prevents: a traceback for Ctrl-G, or a lost line."""
    shown = chat("-n", "3", "--no-history", *ENDLESS, env={"VISUAL": '"'})
    shown.child.send("draft\x07")
    shown.wait_for(lambda t: "error: " in t.text and t.text.endswith(">>> draft"))
    assert "Traceback" not in shown.text


def test_forty_columns_are_enough(chat: Start) -> None:
    """Figures, help or tables that are torn at the margin of a narrow window."""
    shown = chat("-n", "500", *ENDLESS, columns=40, rows=20)
    shown.child.send("hello\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    answered(shown)
    command(shown, "/stats", "draft KV")
    lines = shown.text.splitlines()
    table = lines[lines.index(">>> /stats") + 1 :]
    assert re.fullmatch(r" +last +session", table[0])
    assert any(re.fullmatch(r"   1 .* \d+ %", line) for line in table)
    command(shown, "/help", "Alt-Enter")


def test_an_answer_longer_than_the_window_is_there_once(chat: Start, tmp_path: Path) -> None:
    """An answer of many lines that flickers, repeats, or loses some of them to the figures below."""
    newline = tiny.token_id(tiny.ascii_level(), "Ċ")
    shown = chat("-n", "500", "--logit-bias", f"{newline}=2.5", *ENDLESS, "--temp", "1", rows=12)
    ask(shown, "hello")
    lines = shown.text.splitlines()
    begin, end = lines.index(">>> hello") + 1, next(i for i, line in enumerate(lines) if SUMMARY.search(line))
    answer = saved(shown, tmp_path)[1]["content"]
    assert answer.count("\n") > 30
    rows = [line[i : i + 80].rstrip() for line in answer.split("\n") for i in range(0, max(len(line), 1), 80)]
    assert lines[begin:end] == (rows if rows[-1] else rows[:-1])


def test_a_dumb_terminal_gets_plain_lines(chat: Start) -> None:
    """Escape sequences, or no chat at all, in an editor's shell window."""
    shown = chat("-n", "20", *ENDLESS, env={"TERM": "dumb"})
    shown.child.send("hello\n")
    shown.wait_for(lambda t: SUMMARY.search(t.text) is not None)
    shown.child.send("/exit\n")
    assert shown.finish() == 0
    assert b"\x1b" not in shown.raw


def test_a_window_that_is_resized_in_the_middle_of_an_answer_keeps_it_whole(chat: Start, tmp_path: Path) -> None:
    """Words in two halves, rests of the figures, or an answer shown twice after the window changed its size."""
    space = tiny.token_id(tiny.ascii_level(), "Ġ")
    shown = chat("-c", "90000", "--logit-bias", f"{space}=3", *ENDLESS, "--temp", "1", columns=70, rows=20)
    shown.child.send("hello\r")
    goes_on(shown)
    for columns in (45, 90):
        shown.display.resize(columns=columns)
        shown.child.setwinsize(20, columns)
        shown.read(0.2)  # what was written for the window as it was
        goes_on(shown)
    shown.interrupt()
    answered(shown)
    answer = saved(shown, tmp_path)[1]["content"]
    after = shown.text.partition(">>> hello\n")[2].partition("\n[ ")[0]
    assert "% accepted" not in after
    tail = " ".join(answer.split())[-300:].partition(" ")[2]  # the last rows, which no resize has cut
    assert " ".join(after.split()).endswith(tail)
    assert " ".join(after.split()).count(tail[-100:]) == 1


def test_a_chat_whose_terminal_closes_is_kept_and_the_next_one_says_so(chat: Start, tmp_path: Path) -> None:
    """A conversation lost with a connection, an error on a closed stream, a process left over."""
    shown = chat("-c", "90000", *ENDLESS)
    shown.child.send("go\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    shown.child.ptyproc.fileobj.close()
    deadline = time.monotonic() + 20
    folder = tmp_path / "state" / "specllama" / "chats"
    while not (folder / "cut_off").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = chat("-n", "3", *ENDLESS)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.json")] == [0o600]
    assert "the last chat was cut off" in again.text
    command(again, "/chats", " 1 turn ")
    command(again, "/chats 1", "continued: 1 turn, the last: go")
    again.child.send("more\r")
    again.wait_for(lambda t: "% accepted" in t.text)
    again.child.kill(signal.SIGHUP)
    assert again.finish() == 129
    assert "Traceback" not in again.text
    [kept] = folder.glob("*.json")
    messages = json.loads(kept.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["go", "more"]
    assert messages[1]["finish_reason"] == "cancelled"
    assert "continued: 2 turns, the last: more" in chat("-n", "3", "--continue", "--no-history").text
    assert list(folder.glob("*.json")) == [kept]


def test_save_asks_before_it_replaces_a_file(chat: Start, tmp_path: Path) -> None:
    """Prevents: a file of the user lost without a question, and a chat that Ctrl-C at the question ends."""
    (tmp_path / "notes.md").write_text("mine")
    shown = chat("-n", "3", *ENDLESS)
    ask(shown, "hello")
    for n, typed in enumerate(("\r", "n\r", "\x03", "y\r"), 1):
        is_kept = typed != "y\r"
        shown.child.send("/save notes.md\r")
        shown.wait_for(lambda t, n=n: t.text.count("notes.md exists. Replace it? [y/N]:") == n)
        shown.child.send(typed)
        told, n_told = ("nothing was saved", n) if is_kept else ("saved 1 turn to", 1)
        shown.wait_for(lambda t, told=told, n=n_told: t.text.count(told) == n and t.text.endswith("\n>>>"))
        assert ((tmp_path / "notes.md").read_text() == "mine") is is_kept


def test_a_message_typed_during_an_answer_outlives_ctrl_c(chat: Start, tmp_path: Path) -> None:
    """Prevents: the terminal driver discarding what was typed when Ctrl-C stops the answer."""
    shown = chat("-c", "90000", *ENDLESS)
    shown.child.send("go\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    shown.child.send("/set predict 5\rnext")
    shown.interrupt()
    shown.wait_for(lambda t: "predict is 5" in t.text and t.text.endswith("\n>>> next"))
    ask(shown, "", 2)
    assert saved(shown, tmp_path, "2 turns")[2]["content"] == "next"


def test_ctrl_z_leaves_to_the_shell_and_comes_back(
    terminal: Callable[..., Terminal], talker: Pair, tmp_path: Path
) -> None:
    """Prevents: ^Z in a message, figures that the shell writes into, and a shell without echo."""
    program = shlex.join([*SPECLLAMA, "chat", *talker.options, "-n", "4000", *ENDLESS])
    shown = terminal(command=["bash", "--norc", "-i"], env={"PS1": "shell> ", "XDG_STATE_HOME": str(tmp_path)})
    shown.display.write_process_input = lambda data: shown.child.send(data.encode())
    shown.wait_for(lambda t: "shell>" in t.text)
    shown.child.send(program + "\r")
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    shown.child.send("go\x1a")
    shown.wait_for(lambda t: "Stopped" in t.text and t.text.endswith("\nshell>"))
    shown.child.send("fg\r")
    shown.wait_for(lambda t: t.text.endswith("\n>>> go"))
    shown.child.send("\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    shown.child.send("\x1a")
    shown.wait_for(lambda t: t.text.count("Stopped") == 2 and t.text.endswith("\nshell>"))
    assert "% accepted" not in shown.text
    shown.child.send("echo seen\r")
    shown.wait_for(lambda t: "shell> echo seen\nseen\nshell>" in t.text)
    shown.child.send("fg\r")
    shown.wait_for(lambda t: "% accepted" in t.text)
    answered(shown)


@pytest.mark.parametrize("answering", [False, True])
def test_a_chat_whose_terminal_vanishes_without_a_signal_is_kept(talker: Pair, tmp_path: Path, answering: bool) -> None:
    """Prevents: a conversation lost to EIO, which comes without SIGHUP to a session without a controlling terminal."""
    theirs, ours = os.openpty()
    child = subprocess.Popen(
        [*SPECLLAMA, "chat", *talker.options, "-n", "3" if not answering else "-1", "-c", "90000", *ENDLESS],
        stdin=ours,
        stdout=ours,
        stderr=ours,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    os.close(ours)
    seen, wanted = b"", b"accepted" if answering else b"[ cut off"
    os.write(theirs, b"go\r")
    while wanted not in seen:
        assert select.select([theirs], [], [], 120.0)[0], seen
        seen += os.read(theirs, 65536)
    os.close(theirs)
    try:
        assert child.wait(60) == 129
    finally:
        child.kill()
        child.wait()
    folder = tmp_path / "state" / "specllama" / "chats"
    [kept] = folder.glob("*.json")
    assert json.loads(kept.read_text())["messages"][0]["content"] == "go"
    assert (folder / "cut_off").exists()


def test_typed_escape_sequences_are_harmless(chat: Start) -> None:
    """Prevents: a traceback of prompt_toolkit for keys that look like a mouse, such as a pasted colour."""
    shown = chat("-n", "3", *SILENT)
    shown.child.send("\x1b[31m\x1b[<1M\x1b[<1;2;3;4m")
    ask(shown, "hello")
    assert "Exception" not in shown.text
    assert "hello" in shown.text


def test_a_saved_chat_and_file_names_cannot_control_the_terminal(chat: Start, tmp_path: Path) -> None:
    """Prevents: a loaded conversation, or a completion, that sets the title or hides text."""
    shown = chat("-n", "3", *SILENT)
    ask(shown, "hello")
    command(shown, f"/save {tmp_path / 'c.json'}", "saved")
    record = json.loads((tmp_path / "c.json").read_text())
    record["messages"] = [{"role": "system", "content": EVIL}, *record["messages"]]
    record["messages"][1]["content"] = EVIL
    (tmp_path / "c.json").write_text(json.dumps(record))
    command(shown, f"/load {tmp_path / 'c.json'}", "last message: ")
    command(shown, "/show system", "PASS")
    (tmp_path / "c").mkdir()
    for name in ("one", "two"):
        (tmp_path / "c" / f"{name}{EVIL}").touch()
    shown.child.send(f"/read {tmp_path}/c/\t")
    shown.wait_for(lambda t: "onee\\x1b]0;X" in t.text and t.text.endswith("/"))
    shown.child.send("\x15")  # Ctrl-U
    shown.wait_for(lambda t: t.text.rstrip().endswith("\n>>>"))
    shown.child.send("/edit\r")
    shown.wait_for(lambda t: ">>> e\\x1b]0;X" in t.text)
    assert b"\x1b[5m" not in shown.raw
    assert not {"\u202e", "\u2066"} & set(shown.raw.decode())
