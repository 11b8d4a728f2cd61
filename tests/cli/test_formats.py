"""Formats of answers on the command line and in chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Pair, Run, events_of, record_of

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["the", "then"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
}
CLOSED = {**SCHEMA, "additionalProperties": False}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(CLOSED))
    return path


def test_an_answer_fits_its_schema_and_the_record_says_so(specllama: Run, byte_pair: Pair, schema: Path) -> None:
    """Prevents: an option without effect, or a record from which the answer cannot be repeated."""
    args = ["run", *byte_pair.options, "hi", "-n", "200", "--seed", "3", "--json"]
    record = record_of(specllama(*args, "--json-schema", str(schema)))
    value = json.loads(record["text"])
    assert (set(value), record["finish_reason"], record["fits_format"]) == ({"kind", "ok"}, "stop", True)
    assert json.loads(record["settings"]["format"]["json_schema"]) == CLOSED
    assert record["acceptance"]["accepted"] > 0
    again = record_of(specllama(*args, "--json-schema", json.dumps(CLOSED)))
    assert again["text"] == record["text"]
    free = record_of(specllama(*args, "-n", "5"))
    assert free["settings"]["format"] is free["fits_format"] is None


def test_a_cut_answer_says_that_it_does_not_fit(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: half an object that is taken for the answer."""
    args = ["run", *byte_pair.options, "hi", "--regex", "a{9}b?"]
    for options, why, reason in ((["-n", "3"], "(-n)", "length"), (["--stop", "aaa"], "--stop", "stop")):
        result = specllama(*args, *options, "--fail-if-cut")
        assert result.code == 3
        assert f"{why}, so it does not fit the regex" in result.err
        record = record_of(specllama(*args, *options, "--json"))
        assert (record["finish_reason"], record["fits_format"]) == (reason, False)
        chat = specllama("chat", *byte_pair.options, "--regex", "a{9}b?", *options, stdin=b"hi\n")
        assert "no regex" in chat.err
    whole = specllama(*args, "--stop", "b", "--logit-bias", f"{ord('b')}+9", "--fail-if-cut")
    assert (whole.code, whole.out) == (0, "aaaaaaaaa\n")


@pytest.mark.parametrize("command", [["run", "hi"], ["chat"]])
def test_a_bad_format_is_wrong_use_before_anything_is_loaded(
    specllama: Run, command: list[str], tmp_path: Path
) -> None:
    """Prevents: a model that is loaded for seconds before the schema is looked at."""
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "a"')
    for options in (
        ["--json-schema", "{"],
        ["--json-schema", '{"type": "array", "uniqueItems": true}'],
        ["--json-schema", str(tmp_path / "missing.json")],
        ["--grammar", str(tmp_path)],
        ["--regex", "("],
        ["--regex", "a", "--grammar", str(grammar)],
    ):
        result = specllama(*command, "-m", "missing.gguf", *options)
        assert result.code == 2, options
        assert "missing.gguf" not in result.err
        assert "Traceback" not in result.err


def test_a_chat_sets_and_removes_a_format(specllama: Run, byte_pair: Pair, tmp_path: Path) -> None:
    """Prevents: `/set format` without effect, or one that lasts after `none`, `/undo` or `/regen`."""
    saved = tmp_path / "c.json"
    lines = [
        "/set format regex a{3}b",
        "hi",
        "/regen",
        f"/save {saved}",
        "/set format none",
        "/set predict 5",
        "hi",
    ]
    said = answers(specllama, byte_pair, lines)
    assert said[:2] == ["aaab", "aaab"]
    assert said[2] != "aaab"
    assert json.loads(saved.read_text())["settings"]["format"] == {"regex": "a{3}b"}
    assert answers(specllama, byte_pair, ["hi"], "--load", str(saved)) == ["aaab"]


def test_a_line_of_json_has_the_format_of_its_answer(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a field that is ignored, or that also limits the next answer."""
    lines: list[dict[str, object]] = [
        {"message": "hi", "regex": "a{3}"},
        {"message": "hi", "json_schema": {"const": "é"}},
        {"message": "hi"},
        {"message": "hi", "grammar": "start: x", "regex": None},
        {"message": "hi", "regex": "a", "grammar": 'root ::= "a"'},
        {"message": "hi", "regex": 3},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines).encode()
    options = ["--jsonl", "--seed", "1", "--regex", "b{4}"]
    result = specllama("chat", *byte_pair.options, *options, stdin=stdin)
    assert result.code == 1
    events = list(map(json.loads, result.out.splitlines()))
    finished = [event for event in events if event["event"] == "finished"]
    assert [(event["text"], event["fits_format"]) for event in finished] == [
        ("aaa", True),
        ('"é"', True),
        ("bbbb", True),
    ]
    assert sum(event["event"] == "error" for event in events) == 3


def answers(specllama: Run, pair: Pair, lines: list[str], *options: str) -> list[str]:
    """The texts of a chat."""
    stdin = "".join(json.dumps({"command" if line[0] == "/" else "message": line}) + "\n" for line in lines)
    result = specllama("chat", *pair.options, "--jsonl", "--seed", "1", *options, stdin=stdin.encode())
    assert result.code == 0, result.err
    texts: list[str] = []
    for event in events_of(result):
        if event["event"] == "token":
            texts[-1] += event["text"]
        elif event["event"] == "finished" or not texts:
            texts.append("")
    return texts[:-1]
