"""`specllama chat` without a terminal: messages from a pipe, JSON in and out, commands, refusals."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama import llama
from specllama.chat import saved as chat_file
from specllama.cli.args.options import ModelOptions
from specllama.cli.chat import command
from specllama.cli.chat import complete as chat_complete
from specllama.cli.chat.commands import COMMANDS, _table
from specllama.cli.chat.shelf import shelf_folder
from specllama.cli.codes import INTERRUPTED
from specllama.cli.prompting import MAX_BYTES
from specllama.cli.screen.output import open_output
from specllama.drafters.length import CHAT
from specllama.files.catalog import load_catalog
from specllama.llama import LoadOptions
from specllama.pairs.setup import FREE_SHARE
from tests import tiny
from tests.cli.conftest import SILENT, Pair, Result, Run, record_of


@pytest.fixture
def chat(specllama: Run, talker: Pair) -> Callable[..., Result]:
    """Runs a chat whose stdin holds these lines."""

    def talk(*lines: str, args: tuple[str, ...] = ()) -> Result:
        words = ["chat", *talker.options, *SILENT, "-n", "12", "--temp", "0", *args]
        return specllama(*words, stdin="".join(line + "\n" for line in lines).encode())

    return talk


def _events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def _asked(path: Path) -> list[str]:
    """The user's messages in a saved conversation."""
    return [each["content"] for each in json.loads(path.read_text())["messages"] if each["role"] == "user"]


def test_each_line_is_a_message_and_stdout_holds_the_answers_alone(chat) -> None:
    """Prompts, figures or escapes among the answers of a script."""
    result = chat("hello", '"""two', 'lines"""', "/show info")
    assert result.code == 0
    answers, _, info = result.out.rpartition("\ntarget ")
    assert "turns      2" in info
    assert ">>>" not in answers + result.err
    assert "\x1b" not in result.out + result.err
    assert result.err.count(" | prompt ") == 2


def test_json_in_and_out(chat, specllama: Run, talker: Pair) -> None:
    """A program that cannot tell answers, replies and errors apart, or whose text is taken for a command."""
    result = chat(
        '{"message": "hello"}',
        '"/undo is a word"',
        '{"command": "/stats"}',
        "{",
        '{"command": "/nope"}',
        args=("--jsonl",),
    )
    events = _events(result)
    kinds = [event["event"] for event in events]
    assert (result.code, kinds[0]) == (1, "start")
    assert events[0]["schema"]["name"] == "specllama.chat.events"
    turns = [event for event in events if event["event"] == "turn"]
    assert [turn["kept"] for turn in turns] == [True, True]
    reuse = [turn["reuse"] for turn in turns]
    assert (reuse[0]["n_target"], reuse[0]["n_draft"]) == (0, 0)
    assert reuse[1]["n_prompt"] > reuse[1]["n_target"] > 20
    assert reuse[1]["n_draft"] > 20
    finished = [event for event in events if event["event"] == "finished"]
    assert finished[1]["stats"]["n_cached"] == reuse[1]["n_target"]
    stats = next(event for event in events if event["event"] == "stats")
    assert stats["session"]["acceptance"]["emitted"] == sum(event["stats"]["n_emitted"] for event in finished)
    assert stats["last"] == {key: finished[1][key] for key in ("timings", "acceptance", "gain")}
    record = record_of(specllama("run", *talker.options, "hello", "-n", "2", "--json"))
    assert set(record["settings"]) == set(events[0]["settings"])
    assert set(record) - set(finished[1]) == set(events[0]) - {"event"}
    assert [event["message"] for event in events if event["event"] == "error"] == [
        "a line of stdin is not JSON",
        "unknown command /nope",
    ]


def test_the_first_answer_of_a_seed_is_that_of_run(chat, specllama: Run, talker: Pair) -> None:
    """A chat that says something else than `run` with the same settings."""
    args = [*talker.options, *SILENT, "-n", "12", "--temp", "1", "--seed", "5"]
    said = chat("hello", args=("--temp", "1", "--seed", "5")).out
    assert said == specllama("run", *args, "hello").out


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("/set temp -1", "temp is -1, expected a number of at least 0", ""),
        ("/set draft-max 40", "spec-draft-n-max is 40, expected a whole number from 0 to", "--spec-draft-n-max"),
        ("/set spec-type wings", "spec-type is wings", "draft-simple"),
        ("/set logit-bias 98=1 999=1", "logit-bias has token 999", "ids"),
        ("/set colors maybe", "colors is maybe, expected one of marks, full, off", ""),
        ("/set tempo 1", "unknown setting tempo", "did you mean temp"),
        ("/set think off", "the chat template has no switch for thinking", ""),
        ("/show me", "/show me is unknown (expected one of info", ""),
        ("/stat", "unknown command /stat", "did you mean /stats?"),
        ("/undo", "the conversation is empty", ""),
        ("/regen", "the conversation is empty", ""),
        ("/edit", "the conversation is empty", ""),
        ("/save", "the file is missing", "/save FILE"),
        ("/load nowhere.json", "nowhere.json cannot be read: No such file", "check the path"),
        ("/read nowhere.txt", "nowhere.txt cannot be read: No such file", "check the path"),
        ("/read a\0b", "null character", "without it"),
        ("/set xyz", "unknown setting xyz", "colors"),
        ("/set colours full", "unknown setting colours", "did you mean colors"),
        ("/model nowhere", "there is no pair nowhere", "/model"),
        ("/model qwen2.5-coder-1.5", "there is no pair", "did you mean qwen2.5-coder-1.5b"),
        ("/save /", "/ cannot be written: Is a directory", ""),
        ("/save ~nobody-here/talk.json", "the folder ~nobody-here does not exist", ""),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(chat, line: str, error: str, hint: str) -> None:
    """A chat that ends, or goes on as if nothing had happened, because of a slip."""
    result = chat(line, "hello")
    assert result.code == 1
    assert error in result.err
    assert hint in result.err
    assert result.out.strip()  # the chat goes on


def test_an_internal_error_costs_one_line(chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation lost to a bug in one of its commands."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(chat_file, "save", fail)
    result = chat("/save talk.json", "hello")
    assert result.code == 1
    assert "internal error: ZeroDivisionError: by zero" in result.err
    assert result.out.strip()


def test_half_a_surrogate_pair_is_no_message(chat) -> None:
    """A conversation that can never be saved because of one escape in one line of JSON."""
    result = chat('{"message": "\\ud800"}', '"\\udc00"', args=("--jsonl",))
    assert [event["message"] for event in _events(result)[1:]] == ["a message is not UTF-8 text"] * 2


def test_settings_change_the_next_answer(chat) -> None:
    """A setting that is confirmed and then ignored."""
    lines = [
        "hello",
        "/undo",
        "/set spec off",
        "/set parameter num_predict 3",
        "hello",
        "/set verify-rule block",
        "/set",
    ]
    events = _events(
        chat(*(json.dumps({"command" if line[0] == "/" else "message": line}) for line in lines), args=("--jsonl",))
    )
    finished = [event["stats"] for event in events if event["event"] == "finished"]
    assert finished[0]["n_drafted"] > 0 == finished[1]["n_drafted"]
    assert finished[1]["n_emitted"] == 3
    assert "verify-rule        block" in events[-1]["text"]


def test_set_and_the_options_read_a_value_alike(chat) -> None:
    """A stop string that is a newline on the command line and two characters in a chat; 65-5 taken by one of them."""
    values = [
        ("stop", r"\n"),
        ("logit-bias", "65-5"),
        ("predict", "3"),
        ("spec-draft-n-max", "2"),
        ("spec-type", "ngram"),
    ]
    options = [part for name, value in values for part in (f"--{name}", value)]
    chat("/save given.json", args=tuple(options))
    chat(*(f"/set {name} {value}" for name, value in values), "/save set.json")
    given, by_set = (json.loads(Path(f"{name}.json").read_text())["settings"] for name in ("given", "set"))
    assert by_set["stop"] == ["\n"]
    for name, _ in values:
        key = name.replace("-", "_")
        found = given[key].items() & by_set[key].items() if name == "logit-bias" else given[key]
        assert found == (by_set[key].items() if name == "logit-bias" else by_set[key])


def test_a_conversation_is_saved_and_gone_on_with(chat, tmp_path: Path) -> None:
    """A conversation that comes back as another one."""
    path = tmp_path / "talk.json"
    first = chat("hello", f"/save {path}", "and then", args=("--system", "be brief"))
    second = chat("and then", args=("--load", str(path)))
    assert first.out.endswith(second.out)
    assert "saved 1 turn to" in first.err
    assert "last message: hello" in second.err
    path.write_text(path.read_text()[:-40])
    damaged = chat(f"/load {path}", "hello")
    assert "is damaged or not a saved chat: line " in damaged.err


@pytest.mark.parametrize(
    ("typed", "here", "picked"),
    [
        ("\n", ("qwen3-4b", "qwen3-8b", "qwen2.5-coder-1.5b"), "qwen2.5-coder-1.5b"),  # the default
        ("9\nnone\n2\n", ("qwen3-4b", "qwen3-8b"), "qwen3-8b"),
        ("qwen3-4b\n", ("qwen3-4b", "qwen3-8b"), "qwen3-4b"),
        ("", ("qwen3-4b",), None),
        ("", (), None),
    ],
)
def test_with_several_pairs_here_a_person_picks_one(
    monkeypatch: pytest.MonkeyPatch, typed: str, here: tuple[str, ...], picked: str | None
) -> None:
    """Prevents: gigabytes fetched for the default pair where others are on this machine."""
    catalog = load_catalog()
    models = {model.name for name in here for model in catalog.resolve(name)}
    monkeypatch.setattr(command, "_has_editor", lambda _: True)
    monkeypatch.setattr(command.hub, "find", lambda model: Path(model.file) if model.name in models else None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert command._picked(ModelOptions(), open_output()) == picked
    assert command._picked(ModelOptions(model="x"), open_output()) is None


def test_long_values_are_wrapped_in_their_column() -> None:
    """Prevents: `/show parameters` with a word broken at the edge of the window, or a break in a pipe."""
    value = "auto: up to 16, by assumed costs (these models were not measured)"
    for is_terminal in (True, False):
        out = SimpleNamespace(is_terminal=is_terminal)
        chat = SimpleNamespace(width=40, output=SimpleNamespace(out=out))
        lines = _table(chat, [("temp", "0.8"), ("spec-draft-n-max", value)], 18).split("\n")  # type: ignore[arg-type]
        assert (max(map(len, lines)) <= 40, len(lines) == 2) == (is_terminal, not is_terminal)
        assert " ".join(line[19:] for line in lines[1:]) == value
        assert {line[:19].strip() for line in lines[2:]} <= {""}


def test_the_source_of_drafts_is_named(chat) -> None:
    """Prevents: an acceptance rate that does not say whether a model or a lookup drafted."""
    for strategy in ("draft-simple", "lookup"):
        assert f"spec-type {strategy}: " in chat("hello", "/stats", args=("--spec-type", strategy)).out


def test_figures_of_drafts_are_left_out_without_drafts(chat) -> None:
    """Prevents: a table whose half is n/a."""
    assert "n/a" not in chat("hello", "/stats", args=("--spec-type", "none")).out


def test_a_strategy_that_drafts_nothing_says_so(chat) -> None:
    """Prevents: `spec-type is draft-simple` and answers without a draft, because a length of 0 is still set."""
    for lines, told in (
        (("/set draft-max 0", "/set spec-type lookup"), True),
        (("/set draft-max 0", "/set spec off", "/set spec on"), True),
        (("/set draft-max 0", "/set spec-type none"), False),
        (("/set draft-max 2", "/set spec-type lookup"), False),
    ):
        assert ("spec-draft-n-max is 0" in chat(*lines).err.splitlines()[-1]) == told


def test_save_replaces_only_a_file_of_this_chat_unless_told_to(chat, tmp_path: Path) -> None:
    """Prevents: notes, or another conversation, lost to `/save notes.md`."""
    path = tmp_path / "notes.md"
    path.write_text("mine")
    refused = chat("hello", f"/save {path}")
    assert (refused.code, path.read_text()) == (1, "mine")
    assert f"{path} exists; nothing was saved" in refused.err
    assert f"/save! {path}" in refused.err
    assert chat("hello", f"/save! {path}", "and then", f"/save {path}", "/save").code == 0
    assert _asked(path) == ["hello", "and then"]
    assert chat(f"/load {path}", "more", f"/save {path}").code == 0
    assert len(_asked(path)) == 3
    assert chat("other", f"/save {path}").code == 1
    assert len(_asked(path)) == 3


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("a text", "is damaged or not a saved chat: line 1", "/save FILE"),
        (None, "cannot be read", "check the path"),
    ],
)
def test_what_is_no_conversation_is_told_before_models_are_loaded(
    specllama: Run, talker: Pair, monkeypatch: pytest.MonkeyPatch, text: str | None, told: str, hint: str
) -> None:
    """Two gigabytes loaded for a file with a wrong name; an error that does not say what is wanted."""
    monkeypatch.setattr(command, "open_models", lambda *_: pytest.fail("models were loaded"))
    if text is not None:
        Path("talk.txt").write_text(text)
    result = specllama("chat", *talker.options, "--load", "talk.txt")
    assert result.code == 1
    assert f"error: talk.txt {told}" in result.err
    assert hint in result.err.partition("hint: ")[2]


def test_a_conversation_of_a_pair_opens_without_its_draft(chat, specllama: Run, talker: Pair, tmp_path: Path) -> None:
    """A conversation that can be read on one machine only."""
    chat("hello", "/save talk.json")
    result = specllama("chat", "-m", str(talker.target), "-n", "3", "--load", "talk.json", stdin=b"/show info\nand\n")
    assert "note: the settings of drafting are kept: the strategy draft-simple needs a draft model" in result.err
    assert "turns      1" in result.out
    assert result.code == 0


def test_a_file_is_read_into_the_next_message(chat, tmp_path: Path) -> None:
    """`/read` that sends at once, or says nothing of what it costs."""
    (tmp_path / "notes.txt").write_text("words " * 20)
    result = chat("/read notes.txt", "what is it", "/save talk.json")
    assert "notes.txt: 120 bytes, 120 tokens; it goes in front of your next message" in result.err
    asked = _asked(tmp_path / "talk.json")[0]
    assert asked.startswith("notes.txt:\n```\nwords words")
    assert asked.endswith("```\n\nwhat is it")
    (tmp_path / "large.txt").write_text("x" * 5000)
    assert "5000 tokens; the context holds 4096" in chat("/read large.txt").err


def test_a_folder_and_a_pattern_are_read_with_their_cost(chat, tmp_path: Path) -> None:
    """Files of a folder that cost a context without a word; what was attached by mistake and cannot be taken back."""
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.py", "c.md"):
        (tmp_path / "src" / name).write_text(f"text of {name}\n")
    (tmp_path / "src" / "d.bin").write_bytes(b"\0\1")
    result = chat("/read src", "/unread", "/read src/*.py src/c.md", "what", "/save talk.json")
    assert "3 files: 39 bytes, 41 tokens (1 file skipped: not text); they go in front" in result.err
    assert "took back 3 files" in result.err
    asked = _asked(tmp_path / "talk.json")[0]
    assert [line for line in asked.splitlines() if line.endswith(":")] == ["src/a.py:", "src/b.py:", "src/c.md:"]


def test_a_kept_conversation_is_found_and_continued(chat, tmp_path: Path) -> None:
    """A talk of yesterday that cannot be found again; a pipe whose messages are kept."""
    chat("about trees", "/save trees.json")
    chat("about stones", "and sand", "/save stones.json")
    folder = shelf_folder()
    folder.mkdir(parents=True)
    for age_s, name in ((100, "trees"), (50, "stones")):
        (tmp_path / f"{name}.json").rename(folder / f"{name}.json")
        os.utime(folder / f"{name}.json", (time.time() - age_s,) * 2)
    shown = chat("/chats", "/chats TREE about", "/chats 1", "again", "/save talk.json", "/chats nothing", "/chats 9")
    lines = shown.out.splitlines()
    assert [line.split("turn")[1].removeprefix("s").strip() for line in lines[:3]] == [
        "about stones", "about trees", "about trees",
    ]  # fmt: skip
    assert "no other conversation with nothing is kept" in lines
    assert _asked(tmp_path / "talk.json") == ["about trees", "again"]
    assert "the number is 9, expected a whole number from 1 to 2" in shown.err
    chat("more", "/save more.json", args=("--continue",))
    assert _asked(tmp_path / "more.json") == ["about stones", "and sand", "more"]
    assert sorted(path.name for path in folder.iterdir()) == ["stones.json", "trees.json"]
    both = chat("hello", args=("--continue", "--load", "talk.json"))
    assert (both.code, "exclude each other" in both.err) == (2, True)


@pytest.mark.slow
def test_typed_options_win_over_those_of_a_conversation_and_start_comes_first(chat, tmp_path: Path) -> None:
    """`--load FILE --temp 0` that samples at the temperature of the file; a record that begins with a reply."""
    chat("/set temp 0.5", "/set seed 5", "/set predict 3", "/set system file", "hello", "/save talk.json")
    folder = shelf_folder()
    folder.mkdir(parents=True)
    (folder / "talk.json").write_bytes((tmp_path / "talk.json").read_bytes())
    show = '{"command": "/show system"}'
    for option in (("--continue",), ("--load", "talk.json")):  # the fixture gives --temp 0 -n 12
        start, *replies = _events(chat(show, args=("--jsonl", *option, "-sys", "typed")))
        assert start["event"] == "start"
        assert [start["settings"][name] for name in ("temp", "seed", "predict")] == [0, 6, 12]
        assert replies[-1] == {"event": "reply", "text": "typed"}
    assert _events(chat(show, args=("--jsonl", "--continue")))[-1]["text"] == "file"


def test_without_a_kept_conversation_there_is_nothing_to_continue(chat) -> None:
    """An empty conversation in place of the one that was meant."""
    result = chat("hello", args=("--continue",))
    assert (result.code, result.out) == (2, "")
    assert "no conversation is kept" in result.err


def test_a_pipe_has_no_clipboard(chat) -> None:
    """Escape sequences in the output of a script, or a copy that was made only in words."""
    result = chat("hello", "/copy", "/copy code")
    assert "\x1b" not in result.out + result.err
    assert result.err.count("error: ") == 2


def test_edit_and_regen_and_undo_act_on_the_last_turn(chat, tmp_path: Path) -> None:
    """A history with both the old and the new."""
    chat("one", "two", "/edit three", "/regen", "/save talk.json", args=("--temp", "1"))
    assert _asked(tmp_path / "talk.json") == ["one", "three"]


def test_lines_that_are_no_text_and_blocks_without_an_end_are_refused(specllama: Run, talker: Pair) -> None:
    """A traceback, or the rest of the messages lost."""
    result = specllama("chat", *talker.options, "-n", "3", stdin=b'\xff\xfe\nhello\n"""open\n')
    assert result.code == 1
    assert "a line of stdin is not UTF-8 text: byte 0" in result.err
    assert 'a block of """ has no end' in result.err
    assert result.out.strip()


def test_a_line_without_an_end_is_refused_before_the_memory_is_full(specllama: Run, talker: Pair) -> None:
    """`yes | tr -d '\\n' | specllama chat` that takes all the memory there is; a device that is read without end."""
    lines = b"/read /dev/zero\n" + b"y" * (2 * MAX_BYTES)
    result = specllama("chat", *talker.options, "-n", "3", stdin=lines)
    assert result.code == 1
    assert "/dev/zero is not a regular file" in result.err
    assert result.err.count("a line of stdin is longer than 16.8 MB") == 1


def test_markup_in_messages_and_answers_is_only_text(chat, tmp_path: Path) -> None:
    """`[/bold] [red]` that vanishes or crashes (FIELD_CASES 42)."""
    result = chat("[/bold] [red] a[0]", "/undo", "/set system [red]", "/show system")
    assert "removed: [/bold] [red] a[0]" in result.err
    assert result.out.endswith("[red]\n")


def test_a_context_of_zero_takes_what_the_target_was_trained_for(chat) -> None:
    """`--ctx-size 0` that leaves no room for the draft, or is no context at all."""
    result = chat("/show info", args=("-c", "0"))
    assert "0 of 100000 tokens" in result.out


def test_a_context_of_zero_takes_no_more_memory_than_both_models_may_have(
    chat, talker: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that takes all the memory there is, so that its draft cannot be loaded."""
    headers = [llama.read_header(path) for path in (talker.target, talker.draft)]
    options = LoadOptions(n_ctx=1024, max_block=CHAT + 1)
    free = sum(llama.memory_needed(header, options).total for header in headers) / FREE_SHARE
    monkeypatch.setattr(llama, "memory_free", lambda: int(free))
    result = chat("/show info", args=("-c", "0"))
    assert int(re.findall(r"0 of (\d+) tokens", result.out)[0]) in range(768, 1281)
    monkeypatch.setattr(llama, "memory_free", lambda: 1000)
    assert "are needed for target.gguf and draft.gguf" in chat("hi", args=("-c", "0")).err


def test_a_full_context_drops_the_oldest_turns(chat) -> None:
    """A chat that ends, or forgets in silence, when its context is full (FIELD_CASES 24)."""
    result = chat(*[f"question {i} " + "x" * 60 for i in range(8)], args=("-c", "256"))
    assert result.code == 0
    assert "note: the context of 256 tokens is full: the oldest" in result.err


def test_json_at_the_end_is_refused(chat) -> None:
    """`--json` that waits for an end which a chat does not have."""
    result = chat("hello", args=("--json",))
    assert (result.code, result.out) == (2, "")
    assert "use --jsonl" in result.err


def test_another_pair_goes_on_with_the_conversation(specllama: Run, talker: Pair, tmp_path: Path) -> None:
    """`/model` that loses what was said, or a wrong one that loses the chat."""
    other = tiny.write_model(tmp_path / "other.gguf", vocabulary=tiny.ascii_level(), chat_template=tiny.CHATML, seed=9)
    model = '[models.other]\nsize = %d\nsha256 = "%s"\nlicence = "none"\nsources = [{ path = "other.gguf" }]\n'
    pair = '[pairs.other]\ntarget = "other"\ndraft = "other"\nsummary = "another"\nmemory_gb = 1\n'
    data = other.read_bytes()
    (tmp_path / "models.toml").write_text(model % (len(data), hashlib.sha256(data).hexdigest()) + pair)
    result = specllama("chat", *talker.options, "-n", "3", stdin=b"hello\n/model other\n/show info\nso\n/save t.json\n")
    assert "other.gguf is loaded" in result.err, result.err
    assert "turns      1" in result.out
    assert _asked(tmp_path / "t.json") == ["hello", "so"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/re", ["/regen", "/read"]),
        ("/set temp", ["temp"]),
        ("/set parameter spec-draft-n", ["spec-draft-n-max"]),
        ("/set verify-rule b", ["block"]),
        ("/set spec-draft-n-max ", ["auto"]),
        ("/set spec-type lo", ["lookup"]),
        ("/set colors ", ["marks", "full", "off"]),
        ("/set format re", ["regex"]),
        ("/set format grammar no", ["notes.txt", "nothing/"]),
        ("/show te", ["template"]),
        ("/help un", ["undo", "unread"]),
        ("/read no", ["notes.txt", "nothing/"]),
        ("/read nothing/x", []),
        ("hello /re", []),
        ("/nope x", []),
    ],
)
def test_completion_offers_what_may_stand_there(tmp_path: Path, line: str, expected: list[str]) -> None:
    """Tab that offers what is then refused, or nothing."""
    (tmp_path / "notes.txt").touch()
    (tmp_path / "nothing").mkdir()
    assert [text for text, _, _ in chat_complete.complete(line)] == expected
    assert all(line.endswith(line[len(line) + start :]) for _, start, _ in chat_complete.complete(line))


def test_every_command_has_a_help_text(chat) -> None:
    """A command that is not in /help."""
    result = chat("/help", *(f"/help {command.names[0]}" for command in COMMANDS))
    assert result.code == 0
    for each in COMMANDS:
        assert result.out.count(each.usage) >= 2


@pytest.mark.parametrize("command", [["chat"], ["run", "abc", "-n", "3"]])
def test_ctrl_c_behind_the_last_progress_of_a_load_is_heard(
    specllama: Callable[..., Result], pair: Pair, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """A Ctrl-C that is ignored: a piped chat went on waiting for a message."""
    load = llama.load_together

    def interrupted(*args: Any, **options: Any) -> list[llama.LlamaModel]:
        models = load(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return models

    monkeypatch.setattr(llama, "load_together", interrupted)
    found = specllama(*command, *pair.options)
    assert (found.code, found.out) == (INTERRUPTED, "")
