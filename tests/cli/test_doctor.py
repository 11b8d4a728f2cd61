"""`specllama doctor`: exit codes, JSON, and text in terminals and pipes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from specllama.base.cpu import Cpu
from specllama.cli import doctor
from specllama.cli.app import main
from specllama.cli.screen.output import Output, stream_of
from specllama.llama.crash_test import ProbeResult, State
from specllama.pairs.checkup import Checkup, Finding, Level

GOOD = Finding("decode", Level.OK, "went well")
BAD = Finding("CPU", Level.ATTENTION, "it leaves [bold]AVX512[/bold] unused", "build again")


def checkup_of(*findings: Finding) -> Checkup:
    return Checkup(
        findings=findings,
        cpu=Cpu("A CPU", "x86_64", (), frozenset({"FMA", "AVX2"})),
        probe=ProbeResult(State.OK),
        build=None,
        memory_free=1,
        disk_free=2,
        models={"a": Path("/a.gguf")},
        config_files=(Path("/models.toml"),),
    )


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_all_well_is_exit_code_0_and_attention_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents: an exit code that a script cannot use."""
    monkeypatch.setattr(doctor, "look", lambda: checkup_of(GOOD))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("All is well.\n")
    monkeypatch.setattr(doctor, "look", lambda: checkup_of(GOOD, BAD))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "ok        decode: went well",
        "attention CPU: it leaves [bold]AVX512[/bold] unused",
        "hint      CPU: build again",
        "Needs attention: CPU.",
    ]
    assert shown.err == ""


def test_json_is_one_object_with_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents: text among JSON."""
    monkeypatch.setattr(doctor, "look", lambda: checkup_of(GOOD, BAD))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][1] == {"name": "CPU", "level": "attention", "found": BAD.found, "hint": "build again"}
    assert report["cpu"]["features"] == ["AVX2", "FMA"]
    assert report["models"] == {"a": "/a.gguf"}


def test_a_path_that_is_longer_than_its_column_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a path or command that cannot be copied because it was broken."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(doctor, "size_of", lambda _: (50, 24))
    path = "/a/folder/with/a/long/name/that/goes/on/and/on"
    hint = "some words come first, then `specllama run --and -m a/path` with others behind it"
    file = Terminal()
    doctor._draw(
        Output(stream_of(file), stream_of(file)), checkup_of(GOOD, Finding("long", Level.NOTE, f"in {path}", hint))
    )
    lines = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue()).splitlines()
    indent = " " * lines[0].index("went well")
    assert lines[1].endswith("in")
    assert lines[2] == path.rjust(50)
    assert any("`specllama run --and -m a/path`" in line for line in lines)
    assert lines[3].startswith(f"{indent}hint: some words")
    assert all(line.startswith(indent[:-2]) for line in lines[3:-2])


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_a_table_and_text_is_never_markup(
    no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: brackets read as markup; a level shown by colour only."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal()
    doctor._draw(Output(stream_of(file), stream_of(file)), checkup_of(GOOD, BAD))
    text = file.getvalue()
    assert [part for part in ("[bold]AVX512[/bold]", "! attention", "build again") if part not in text] == []
    assert ("\x1b[31m" in text) is coloured
