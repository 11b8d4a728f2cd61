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
from tests.cli.conftest import Pair, Run, Terminal, record_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("auto")]

LITTLE = AuditEffort(
    n_prompts=1, n_tokens=6, n_contexts=2, most_branches=60, n_enumerated=1, n_draws=4, n_runs=1, n_steps=3
)
NARROW = ("--top-k", "4", "--spec-draft-n-max", "2")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest audit with results in every part."""
    monkeypatch.setattr(command, "QUICK", LITTLE)


def test_a_correct_pair_passes_with_a_whole_report(specllama: Run, short_pair: Pair) -> None:
    """Prevents: a report without its verdict, tables or subject; escape bytes in a pipe."""
    result = specllama("audit", *short_pair.options, *NARROW, "--quick")
    assert result.code == 0, result.err
    assert result.out.startswith("# Audit\n\n- target: ")
    assert result.out.rpartition("\n\n")[2].startswith("**Exact: ")
    assert max(map(len, result.out.splitlines())) <= 80
    parts = ["## Greedy", "## Sampling: the exact", "## Sampling: real draws", "## KV", "SHA-256", "llama_cpp"]
    parts += [f"| {strategy}, token" for strategy in ("draft-simple", "lookup", "chain")]
    assert [part for part in parts if part not in result.out] == []
    assert "\x1b" not in result.out + result.err
    assert "Self-test" not in result.out
    widths = [len(line) for line in result.out.split("## KV")[1].splitlines() if line.startswith("|")]
    assert len(set(widths)) == 1, "columns line up"
    assert "greedy answers" in result.err


def test_the_json_report_holds_the_settings(specllama: Run, short_pair: Pair, tmp_path: Path) -> None:
    """Prevents: a report that cannot be reproduced; a file with other content than stdout."""
    args = ("audit", *short_pair.options, *NARROW, "--quick", "--seed", "7")
    record = record_of(specllama(*args, "--json", "--spec-type", "lookup,draft-simple", "--verify-rule", "match,token"))
    assert (record["schema"]["name"], record["settings"]["seed"], record["passed"]) == ("specllama.audit", 7, True)
    assert record["settings"]["spec_type"] == ["lookup", "draft-simple"]
    assert record["settings"]["verify_rule"] == ["match", "token"]
    assert len(record["models"]["target"]["sha256"]) == 64
    assert record["versions"]["llama_cpp"]
    assert record["machine"]["n_cores"] >= 1
    file = tmp_path / "report.json"
    told = specllama(*args, "--format", "json", "--output", str(file), "--spec-type", "lookup").out
    assert (told.count("\n"), told[:6]) == (1, "Exact:")
    assert json.loads(file.read_text())["settings"]["spec_type"] == ["lookup"]


def test_a_broken_program_exits_with_one(specllama: Run, short_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: exit code 0 for a failed audit."""
    monkeypatch.setattr(Engine, "_verify", staticmethod(AcceptsEverything()))
    result = specllama("audit", *short_pair.options, *NARROW, "--quick", "--spec-type", "draft-simple")
    assert result.code == 1
    assert "**NOT EXACT" in result.out
    assert "## Faults\n\n- " in result.out


def test_a_target_alone_is_audited_with_lookups(specllama: Run, short_pair: Pair) -> None:
    """Prevents: an audit that requires a draft although lookups need none."""
    alone = ["-m", str(short_pair.target), "-t", "1"]
    record = record_of(specllama("audit", *alone, *NARROW, "--quick", "--json"))
    assert record["settings"]["spec_type"] == ["lookup"]
    assert record["models"]["draft"] is None


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--top-k", "0"], "--top-k is 0"),
        (["--spec-type", "magic"], "--spec-type is magic"),
        (["--verify-rule", "token,magic"], "--verify-rule is magic"),
        (["--spec-draft-n-max", "0"], "--spec-draft-n-max is 0"),
        (["--output", "no/such/folder/report.md"], "cannot be written: there is no such folder"),
    ],
)
def test_wrong_use_is_refused_at_once(specllama: Run, short_pair: Pair, args: list[str], told: str) -> None:
    """Prevents: minutes of work for a report that cannot be written; options that are ignored."""
    result = specllama("audit", *short_pair.options, "--quick", *args)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_a_draft_that_does_not_fit_or_is_missing_is_an_error(specllama: Run, short_pair: Pair, pair: Pair) -> None:
    """Prevents: an audit of a pair that `run` refuses."""
    result = specllama("audit", "-m", str(short_pair.target), "-md", str(pair.draft), "--quick")
    assert (result.code, "error:" in result.err) == (1, True)
    alone = specllama("audit", "-m", str(short_pair.target), "--spec-type", "chain", "--quick")
    assert (alone.code, "needs a draft model" in alone.err) == (2, True)


def test_ctrl_c_reports_the_finished_part(terminal: Callable[..., Terminal], short_pair: Pair, tmp_path: Path) -> None:
    """Prevents: a traceback; a hang; a part that looks complete."""
    file = str(tmp_path / "part.json")
    # With the self-test, so that much is left on a fast machine.
    started = terminal(
        "audit", *short_pair.options, "--quick", "--self-test", "--top-k", "4", "-o", file, "--format", "json"
    )
    started.wait_for(lambda t: any(after in t.text for after in ("exact laws", "KV cache", "self-test")))
    started.interrupt()
    assert started.finish() == 130
    assert "Traceback" not in started.text
    data = json.loads((tmp_path / "part.json").read_text())
    assert (data["partial"], bool(data["greedy"])) == (True, True)
    assert "interrupted" in started.text
