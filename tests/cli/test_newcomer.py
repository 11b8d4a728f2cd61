"""Each command as a newcomer has it: no variable, no profile, and what is measured is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specllama.bench import machine
from tests.cli.conftest import ENDLESS, Pair, Run, events_of, record_of


@pytest.fixture(autouse=True)
def default(plain_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default draft length, by costs that are measured where they are missing."""
    monkeypatch.delenv("SPECLLAMA_SPEC_DRAFT_N_MAX")


def learned(folder: Path) -> list[Path]:
    return list((folder / "state").rglob("*.use.json"))


def test_run_measures_and_says_what_plain_decoding_says(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: a default that no test runs: another answer, a failure, or a measurement at each start."""
    args = ["run", *pair.options, "--raw", "abcabcabc", "-n", "40", "--temp", "0", *ENDLESS]
    first, second = (record_of(specllama(*args, "--json")) for _ in range(2))
    plain = specllama(*args, "--spec-type", "none", "--json")
    assert first["text"] == second["text"] == record_of(plain)["text"]
    assert len(learned(tmp_path)) == 1
    assert first["profile"]["source"] == second["profile"]["source"] == "use"
    assert first["profile"]["costs"]["verify"][0] == [1, 1.0]
    assert first["acceptance"]["emitted"] == 40


def test_a_chat_measures_and_says_what_plain_decoding_says(specllama: Run, talker: Pair, tmp_path: Path) -> None:
    """Prevents: a chat over a pipe whose answers depend on what was measured."""
    lines = "".join(json.dumps({"message": text}) + "\n" for text in ("hello", "and then")).encode()
    args = ["chat", *talker.options, "-n", "12", "--temp", "0", "--jsonl"]
    answers = []
    for more in ((), ("--spec-type", "none")):
        events = events_of(specllama(*args, *more, stdin=lines))
        assert sum(event["event"] == "turn" for event in events) == 2
        assert [event for event in events if event["event"] == "profile"] == []
        answers.append("".join(event["text"] for event in events if event["event"] == "token"))
    assert answers[0] == answers[1] != ""
    assert len(learned(tmp_path)) == 1


def test_bench_measures_and_compares(
    specllama: Run, talker: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a benchmark that fails, or has no `auto`, where no test replaces the clock."""
    monkeypatch.setattr(machine, "others_load", lambda: None)  # takes a second
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "code", "turns": ["hello"]}\n' * 2)
    bench = ["bench", *talker.options, "--prompts", str(prompts), "-n", "8", "-r", "1", "--budget", "none"]
    report = record_of(specllama(*bench, "--temp", "0", "--spec-draft-n-max", "0,2,auto", "--format", "json"))
    assert len(report["plan"]["arms"]) == 3
    assert len(learned(tmp_path)) == 1
