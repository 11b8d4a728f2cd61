"""`specllama bench --parallel`: the table as Markdown, CSV and JSON, and what it does not measure."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from specllama.llama import LoadOptions
from specllama.pairs.setup import LEAVES
from tests.cli.conftest import SILENT, Pair, Run


@pytest.mark.slow
def test_the_table_in_every_format(specllama: Run, talker: Pair) -> None:
    """Prevents: a column without a value; a report that only a person can read."""
    args = ["bench", *talker.options, "--parallel", "2,1", "-r", "1", "-n", "8", "--category", "qa", *SILENT]
    result = specllama(*args, "-o", "r.json", "--format", "csv", "-q")
    assert (result.code, result.err) == (0, "")
    report = json.loads(Path("r.json").read_text())
    assert [(row["n_parallel"], row["drafts"]) for row in report["rows"]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert {row["n_answers"] for row in report["rows"]} == {4}
    assert report["n_rounds"] == 1
    assert all(row["kv_bytes"] > 0 and row["latency_s"]["p99"] > 0 for row in report["rows"])
    table = list(csv.DictReader(result.out.splitlines()))
    assert [float(row["latency_s_p99"]) for row in table] == [row["latency_s"]["p99"] for row in report["rows"]]
    assert table[0]["condition_n_predict"] == "8"
    lines = specllama(*args, "-o", "r.md", "--format", "jsonl", "-q").out.splitlines()
    assert [json.loads(line)["n_parallel"] for line in lines] == [1, 1, 2, 2]
    tables = [line for line in Path("r.md").read_text().splitlines() if line.startswith("|")]
    assert len(tables) == 2 * (2 + 4)
    assert len({line.count("|") for line in tables}) == 1


@pytest.mark.slow
def test_no_context_is_longer_than_the_model_was_trained_for(specllama: Run, short_pair: Pair) -> None:
    """Prevents: a warning about a context that no request has."""
    args = ["bench", *short_pair.options, "--parallel", "1", "-r", "1", "-n", "8", "--category", "qa", *SILENT]
    result = specllama(*args, "-o", "r.json", "-q")
    assert (result.code, result.err) == (0, "")
    assert json.loads(Path("r.json").read_text())["target"]["n_ctx"] == 2048


@pytest.mark.slow
def test_a_tree_is_drafted_and_recorded(specllama: Run, talker: Pair, loaded: list[LoadOptions]) -> None:
    """Prevents: chains measured for `--tree`, in a report that says trees."""
    args = ["bench", *talker.options, "--parallel", "1", "-r", "1", "-n", "8", "--category", "qa", *SILENT]
    result = specllama(*args, "--tree", "6", "-o", "r.json", "-q")
    assert (result.code, result.err) == (0, "")
    settings = json.loads(Path("r.json").read_text())["settings"]
    assert (settings["spec_type"], settings["spec_draft_n_max"]) == (["tree"], [6])
    assert [options.max_leaves for options in loaded] == [LEAVES, LEAVES]


@pytest.mark.parametrize(
    "more",
    [
        ["--parallel", "0"],
        ["--parallel", "1", "--plots", "plots"],
        ["--parallel", "1", "--depth", "9"],
        ["--parallel", "1", "--delay", "1"],
        ["--parallel", "1", "--synthetic", "0.5"],
        ["--parallel", "1", "--spec-draft-n-max", "2,4"],
        ["--parallel", "1", "--tree", "4,8"],
        ["--parallel", "1", "--spec-type", "lookup,draft-simple"],
        ["--parallel", "1", "--verify-rule", "block,token"],
        ["--parallel", "1", "--threads", "1,2"],
        ["--parallel", "1", "--model-draft", "a.gguf", "--model-draft", "b.gguf"],
    ],
)
def test_what_is_not_measured_is_refused_before_a_model_is_loaded(specllama: Run, more: list[str]) -> None:
    """Prevents: an option that silently has no effect."""
    result = specllama("bench", "-m", "missing.gguf", *more)
    assert (result.code, result.out) == (2, "")
    assert "missing.gguf" not in result.err
