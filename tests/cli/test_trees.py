"""Trees on the command line: `--tree`, `/set tree`, their records, the strip, `bench` and `audit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama.bench.plan import Wishes, arms
from specllama.bench.report import Load
from specllama.cli.audit.command import _strategies
from specllama.cli.screen.render import tree
from specllama.core.events import StepEvent
from specllama.drafters.length import AUTO_LENGTH, DraftLength
from specllama.llama import LoadOptions
from specllama.pairs.profile import Profile
from specllama.pairs.setup import LEAVES
from tests.cli.conftest import ENDLESS, SILENT, Pair, Run, events_of, record_of
from tests.cli.test_tune import PROFILE, keep

__all__ = ["keep"]
ASK = ["--raw", "abcabcab", "-n", "40", *ENDLESS]


def branched(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose draft has siblings."""
    steps = [event for event in events if event["event"] == "step" and event["parents"]]
    return [step for step in steps if len(set(step["parents"])) < len(step["parents"])]


@pytest.mark.parametrize("temp", ["0", "1"])
def test_a_tree_of_so_many_nodes_is_drafted_and_recorded(
    specllama: Run, pair: Pair, loaded: list[LoadOptions], temp: str
) -> None:
    """Prevents: `--tree` that drafts chains or another size; a record from which the shape is missing."""
    args = ["run", *pair.options, *ASK, "--temp", temp, "--seed", "3"]
    events = events_of(specllama(*args, "--tree", "10", "--jsonl"))
    settings = events[0]["settings"]
    assert (settings["spec_type"], settings["spec_draft_n_max"]) == ("tree", 10)
    assert [options.max_leaves for options in loaded] == [LEAVES, LEAVES]
    assert branched(events)
    for step in branched(events):
        assert len(step["drafted"]) == len(step["parents"]) <= 10
        assert step["accepted"] == len(step["path"])
    same = record_of(specllama(*args, "--spec-type", "tree", "--draft-max", "10", "--json"))
    assert same["tokens"] == events[-1]["tokens"]
    if temp == "0":
        assert same["text"] == record_of(specllama(*args, "--spec-type", "none", "--json"))["text"]


def test_auto_drafts_trees_where_the_profile_says_that_they_pay(
    specllama: Run, pair: Pair, auto: None, keep: Callable[[Profile], Path]
) -> None:
    """Prevents: `--tree auto` that is the controller of chains, or always the same tree."""
    keep(PROFILE)
    events = events_of(specllama("run", *pair.options, *ASK, "--temp", "1", "--tree", "auto", "--jsonl"))
    settings = events[0]["settings"]
    assert (settings["spec_type"], settings["spec_draft_n_max"]) == ("tree", "auto")
    assert branched(events)
    assert events[0]["profile"] is not None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tree", "4", "--spec-type", "lookup"], "--spec-type"),
        (["--tree", "4", "--spec-draft-n-max", "4"], "--spec-draft-n-max"),
        (["--tree", "65"], "0 to 64"),
        (["--tree", "4", "--spec-draft-p-min", "0.5"], "p-min"),
    ],
)
def test_what_a_tree_cannot_use_is_refused(specllama: Run, pair: Pair, options: list[str], error: str) -> None:
    """Prevents: an option that is silently ignored."""
    result = specllama("run", *pair.options, *ASK, *options)
    assert (result.code, result.out) == (2, "")
    assert error in result.err


def test_a_tree_without_a_draft_model_is_refused_and_a_typed_one_wins(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a variable that makes every use of `--tree` fail; plain decoding in place of a tree."""
    monkeypatch.setenv("SPECLLAMA_SPEC_TYPE", "lookup")
    record = record_of(specllama("run", *pair.options, *ASK, "--tree", "4", "--spec-type", "tree", "--json"))
    assert record["settings"]["spec_draft_n_max"] == 4
    assert record_of(specllama("run", *pair.options, *ASK, "--tree", "4", "--json"))["settings"]["spec_type"] == "tree"
    assert specllama("run", *pair.options[:2], *ASK, "--tree", "4").code == 2


def test_a_tree_of_config_toml_gives_way_to_typed_options(specllama: Run, pair: Pair, auto: None) -> None:
    """Prevents: a default that makes the opposite option an error, or leaves half of a tree behind."""

    def drafting(*options: str) -> tuple[object, object]:
        settings = record_of(specllama("run", *pair.options, *ASK, "--json", *options))["settings"]
        return settings["spec_type"], settings["spec_draft_n_max"]

    specllama("config", "tree", "10")
    assert drafting() == ("tree", 10)
    assert drafting("--spec-type", "lookup")[0] == "lookup"
    assert drafting("--draft-max", "3") == ("draft-simple", 3)
    assert drafting("--spec-draft-p-min", "0.5")[0] == "draft-simple"
    specllama("config", "--unset", "tree")
    specllama("config", "spec-draft-p-min", "0.5")
    assert drafting("--tree", "4") == ("tree", 4)


def test_a_chat_changes_to_trees_and_back(specllama: Run, talker: Pair, loaded: list[LoadOptions]) -> None:
    """Prevents: `/set tree` that drafts chains because the models were loaded for chains, or loses the conversation."""
    lines = ["hello", "/set tree 10", "and", "/set spec-type draft-simple", "so", "/set spec-type tree", "then"]
    stdin = "".join(
        json.dumps({"command" if line[0] == "/" else "message": line}) + "\n" for line in [*lines, "/save t.json"]
    )
    args = ["chat", *talker.options, *SILENT, "-n", "24", "--temp", "0.8", "-s", "1", "--jsonl"]
    events = events_of(specllama(*args, stdin=stdin.encode()))
    drafters = [event["drafter"] for event in events if event["event"] == "step"]
    assert list(dict.fromkeys(drafters)) == ["draft-simple", "tree"]
    assert drafters[-1] == "tree"
    assert [options.max_leaves for options in loaded] == [1, 1, LEAVES, LEAVES]
    assert branched(events)
    saved = json.loads(Path("t.json").read_text())
    assert (saved["settings"]["spec_type"], saved["settings"]["spec_draft_n_max"]) == ("tree", 10)
    assert len(saved["messages"]) == 8
    again = events_of(specllama(*args, "--load", "t.json", stdin=b'{"message": "more"}\n'))
    assert {event["drafter"] for event in again if event["event"] == "step"} == {"tree"}
    assert loaded[-1].max_leaves == LEAVES


def test_trees_are_switched_off(specllama: Run, talker: Pair) -> None:
    """Prevents: 'off' refused by the setting that switched trees on."""
    stdin = b"/set tree off\n/set tree 4\n/set tree off\nhello\n"
    result = specllama("chat", *talker.options, *SILENT, "-n", "3", stdin=stdin)
    assert result.code == 0
    assert [line for line in result.err.splitlines() if line.startswith("spec-type is ")] == [
        f"spec-type is {name}" for name in ("draft-simple", "tree", "chain")
    ]


def test_set_tree_without_a_draft_or_with_a_wrong_size_changes_nothing(
    specllama: Run, talker: Pair, loaded: list[LoadOptions]
) -> None:
    """Prevents: models that are freed for a setting that they cannot have."""
    stdin = b"/set tree many\n/set tree 4\nhello\n"
    result = specllama("chat", *talker.options[:2], "-n", "3", stdin=stdin)
    assert (result.code, len(loaded)) == (1, 1)
    assert "tree is many" in result.err
    assert "needs a draft model" in result.err
    assert "tokens" not in result.out


def step(drafted: int, parents: tuple[int, ...] | None, path: tuple[int, ...] | None, accepted: int) -> StepEvent:
    """A step with these nodes."""
    times = {"draft_s": 0.0, "eval_s": 0.1, "sample_s": 0.0, "kv_s": 0.0, "step_s": 0.1, "loop_s": 0.0}
    tokens = tuple(range(drafted))
    return StepEvent(1, tokens, accepted, "tree", (), **times, n_rows=1, cost=1.0, parents=parents, path=path)


def test_the_strip_draws_depth_width_and_path_of_a_tree() -> None:
    """Prevents: a tree that shows only a number."""
    assert tree(step(7, (-1, 0, 1, 0, -1, -1, 4), (0, 1, 2), 3), "○●") == "●○○ ●○○ ●"
    assert tree(step(3, (-1, -1, 1), (), 0), "o*") == "oo o"
    assert tree(step(3, None, None, 2), "o*") == "* * o"
    assert tree(step(0, None, None, 0), "o*") == "-"


@pytest.mark.parametrize(
    ("auto_strategy", "names"),
    [
        ("", ["plain", "K=4 draft-simple", "tree 4"]),
        ("chain", ["plain", "K=4 draft-simple", "tree 4", "auto", "tree auto"]),
    ],
)
def test_a_benchmark_compares_chains_and_trees_of_equal_size(auto_strategy: str, names: list[str]) -> None:
    """Prevents: `auto` of chains alone beside trees; a number of nodes that reads as a depth."""
    wishes = Wishes(
        loads=(Load(),),
        drafts=("draft",),
        strategies=("draft-simple", "tree"),
        lengths=(DraftLength(0), DraftLength(4), AUTO_LENGTH),
        auto_strategy=auto_strategy,
    )
    assert [arm.name for arm in arms(wishes)] == names


@pytest.mark.slow
def test_bench_tree_compares_trees_with_chains_of_that_length(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: a tree that is measured with nothing beside it, or drafts chains."""
    (tmp_path / "p.jsonl").write_text('{"category": "code", "turns": ["abcabcab"]}\n' * 2)
    args = ["bench", *pair.options, "--prompts", "p.jsonl", "-n", "16", "-r", "1", "--budget", "none", "--temp", "0"]
    report = record_of(specllama(*args, "--tree", "10", "--format", "json"))
    arms = report["plan"]["arms"]
    assert [(arm["name"], arm["spec_type"]) for arm in arms] == [
        ("plain", "none"), ("K=10 draft-simple", "draft-simple"), ("tree 10", "tree"),
    ]  # fmt: skip
    assert specllama(*args, "--tree", "10", "--spec-type", "lookup").code == 2


@pytest.mark.parametrize(("has_trees", "audited"), [(True, True), (False, False)])
def test_an_audit_covers_trees_if_the_target_evaluates_them(has_trees: bool, audited: bool) -> None:
    """Prevents: trees that no audit looked at; chains that are reported as trees."""
    found = _strategies(None, has_draft=True, has_trees=has_trees, model_strategy="draft-simple")
    assert ("tree" in found) == audited
