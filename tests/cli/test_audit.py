"""`specllama audit`: what it prints, how it exits, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.audit.faults import AcceptsEverything
from specllama.audit.parts import AuditEffort
from specllama.cli.audit import command
from specllama.core.engine import Engine
from tests import tiny
from tests.cli.conftest import Pair, Result, Terminal, record_of

pytestmark = pytest.mark.slow

Run = Callable[..., Result]
LITTLE = AuditEffort(
    n_prompts=1, n_tokens=6, n_contexts=2, most_branches=60, n_enumerated=1, n_draws=4, n_runs=1, n_steps=3
)
NARROW = ("--top-k", "4", "--spec-draft-n-max", "2")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little of everything as shows anything."""
    monkeypatch.setattr(command, "QUICK", LITTLE)


@pytest.fixture(scope="module")
def short_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Any text can be asked, and little memory is needed."""
    folder = tmp_path_factory.mktemp("short")
    return Pair(*tiny.write_pair(folder, vocabulary=tiny.byte_level(), chat_template=tiny.CHATML, n_ctx=2048))


def test_a_correct_pair_passes_and_the_report_reads_well(specllama: Run, short_pair: Pair) -> None:
    """A report without its verdict, its tables or what it is about; escape bytes in a pipe; text beside the report."""
    result = specllama("audit", *short_pair.options, *NARROW, "--quick")
    assert result.code == 0, result.err
    assert result.out.startswith("# Audit\n\n**Exact: nothing that drafts emit differs from the target's own")
    assert max(map(len, result.out.splitlines())) <= 80, "a report is read in terminals, too"
    for part in ("## Greedy", "## Sampling: the exact law", "## Sampling: real draws", "## KV", "SHA-256", "llama_cpp"):
        assert part in result.out
    for strategy in ("draft-simple", "lookup", "chain"):
        assert f"| {strategy}, token" in result.out
    assert "\x1b" not in result.out + result.err
    assert "Self-test" not in result.out
    widths = [len(line) for line in result.out.split("## KV")[1].splitlines() if line.startswith("|")]
    assert len(set(widths)) == 1, "columns line up"
    assert "greedy answers ..." in result.err


def test_the_json_report_says_what_decided_it(specllama: Run, short_pair: Pair, tmp_path: Path) -> None:
    """A report that cannot be checked, and a file that is not what stdout would have been."""
    args = ("audit", *short_pair.options, *NARROW, "--quick", "--seed", "7")
    record = record_of(specllama(*args, "--json", "--spec-type", "lookup,draft-simple", "--verify-rule", "match,token"))
    assert (record["schema"]["name"], record["seed"], record["passed"]) == ("specllama.audit", 7, True)
    assert record["settings"]["strategies"] == ["lookup", "draft-simple"]
    assert record["settings"]["rules"] == ["match", "token"]
    assert len(record["models"]["target"]["sha256"]) == 64
    assert record["versions"]["llama_cpp"]
    assert record["machine"]["n_cores"] >= 1
    file = tmp_path / "report.json"
    told = specllama(*args, "--format", "json", "--output", str(file), "--spec-type", "lookup")
    assert told.out.count("\n") == 1
    assert told.out.startswith("Exact")
    assert json.loads(file.read_text())["settings"]["strategies"] == ["lookup"]


def test_a_full_disk_behind_output_costs_no_report(specllama: Run, short_pair: Pair, tmp_path: Path) -> None:
    """Ten minutes of auditing thrown away because one disk was full."""
    (tmp_path / "report.md").symlink_to("/dev/full")
    args = ["audit", *short_pair.options, *NARROW, "--quick", "--spec-type", "lookup", "-o", "report.md"]
    result = specllama(*args)
    assert result.code == 1
    assert "error: --output report.md cannot be written: No space left on device\nhint: the report is on" in result.err
    assert result.out.startswith("# Audit\n\n**Exact")


def test_a_broken_program_exits_with_one(specllama: Run, short_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code that a script cannot use."""
    monkeypatch.setattr(Engine, "_verify", staticmethod(AcceptsEverything()))
    result = specllama("audit", *short_pair.options, *NARROW, "--quick", "--spec-type", "draft-simple")
    assert result.code == 1
    assert "**NOT EXACT" in result.out
    assert "## What is wrong\n\n- " in result.out


def test_a_target_alone_is_audited_with_lookups(specllama: Run, short_pair: Pair) -> None:
    """An audit that asks for a draft although lookups need none."""
    alone = ["-m", str(short_pair.target), "-t", "1"]
    record = record_of(specllama("audit", *alone, *NARROW, "--quick", "--json"))
    assert record["settings"]["strategies"] == ["lookup"]
    assert record["models"]["draft"] is None


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--top-k", "0"], "--top-k is 0: the audit takes every branch"),
        (["--spec-type", "magic"], "--spec-type is magic"),
        (["--verify-rule", "token,magic"], "--verify-rule is magic"),
        (["--spec-draft-n-max", "0"], "--spec-draft-n-max is 0"),
        (["--output", "no/such/folder/report.md"], "cannot be written: there is no such folder"),
        (["--output", "."], "cannot be written: it is a folder"),
        (["--format", "xml"], "--format is xml"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(specllama: Run, short_pair: Pair, args: list[str], told: str) -> None:
    """Minutes of work whose report then cannot be written, or options that are silently ignored."""
    result = specllama("audit", *short_pair.options, "--quick", *args)
    assert result.code == 2
    assert told in result.err
    assert result.out == ""


def test_a_draft_that_does_not_fit_or_is_missing_is_an_error(specllama: Run, short_pair: Pair, pair: Pair) -> None:
    """An audit of a pair that `run` would refuse."""
    result = specllama("audit", "-m", str(short_pair.target), "-md", str(pair.draft), "--quick")
    assert result.code == 1
    assert "error:" in result.err
    alone = specllama("audit", "-m", str(short_pair.target), "--spec-type", "chain", "--quick")
    assert alone.code == 2
    assert "needs a draft model" in alone.err


def test_ctrl_c_reports_what_was_done(terminal: Callable[..., Terminal], short_pair: Pair, tmp_path: Path) -> None:
    """A traceback, a hang, or a part that passes for the whole."""
    file = str(tmp_path / "part.json")
    # With its self-test, so that much of it is still to come, however fast the machine is.
    started = terminal(
        "audit", *short_pair.options, "--quick", "--self-test", "--top-k", "4", "-o", file, "--format", "json"
    )
    started.wait_for(lambda t: any(after in t.text for after in ("exact laws", "KV cache", "self-test")))
    started.interrupt()
    assert started.finish() == 130
    assert "Traceback" not in started.text
    data = json.loads((tmp_path / "part.json").read_text())
    assert data["partial"] is True
    assert data["greedy"]
    assert "as far as it came" in started.text
