"""Tuned pairs of two tokenizers: `run`, `chat`, `bench` and `audit` use draft-tli by default."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.api import load
from specllama.cli.audit import command as audit_command
from tests.cli.conftest import Pair, Run, record_of
from tests.cli.test_audit import LITTLE, NARROW
from tests.cli.test_tune import DEAR, HINT, PROFILE, keep_profile, quick  # noqa: F401  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home", "auto")]

ASK = ["--raw", "the heat of the heather ", "-n", "40", "-s", "3"]
BY_TEXT = replace(PROFILE, strategy="draft-tli")


def test_tuning_by_text_leaves_a_profile_that_answers_use(specllama: Run, strangers: Pair) -> None:
    """Prevents: a refusal of pairs that `run` accepts; a profile that the next answer does not find."""
    told = specllama("tune", *strangers.options, "--quick")
    assert told.code == 0, told.err
    assert "tuned for draft-tli: " in told.err
    record = record_of(specllama("run", *strangers.options, *ASK, "--json"))
    assert record["profile"]["strategy"] == "draft-tli"
    found = record_of(specllama("tune", *strangers.options, "--quick", "--json", "--spec-type", "draft-tli"))
    assert found["profile"]["strategy"] == "draft-tli"
    assert found["draft_tokens_per_token"] >= 1.0
    keep_profile(strangers, PROFILE)  # not used for draft-tli
    again = record_of(specllama("run", *strangers.options, *ASK, "--json", "--spec-type", "draft-tli"))
    assert again["profile"] == found["profile"]


def test_a_tuned_draft_keeps_the_text(specllama: Run, strangers: Pair) -> None:
    """Prevents: costs of another strategy; a translation that changes the text."""
    keep_profile(strangers, BY_TEXT, "draft-tli")
    args = ["run", *strangers.options, *ASK, "--temp", "0"]
    plain = record_of(specllama(*args, "--spec-type", "none", "--json"))["text"]
    for more, strategy in ([], "chain"), (["--spec-type", "draft-tli"], "draft-tli"):
        record = record_of(specllama(*args, *more, "--json"))
        assert record["settings"]["spec_type"] == strategy
        assert record["settings"]["spec_draft_n_max"] == "auto"
        assert record["acceptance"]["drafted"] > 0
        assert record["text"] == plain
    assert "times plain decoding expected with draft-tli" in specllama(*args).err.splitlines()[0]
    fixed = record_of(specllama(*args, "--draft-max", "3", "--json"))
    assert (fixed["settings"]["spec_type"], fixed["settings"]["spec_draft_n_max"]) == ("draft-tli", 3)
    chat = specllama("chat", *strangers.options, "-n", "8", "--jsonl", stdin=b'{"message": "hello"}\n')
    assert chat.code == 0, chat.err
    assert '"strategy": "draft-tli"' in chat.out
    named = specllama(*args, "--spec-type", "draft-simple")
    assert (named.code, named.out) == (1, "")


def test_a_draft_that_cannot_pay_is_not_loaded(specllama: Run, strangers: Pair) -> None:
    """Prevents: loading a draft that tuning found too slow; a named draft that is not loaded."""
    keep_profile(strangers, replace(BY_TEXT, costs=DEAR), "draft-tli")
    record = record_of(specllama("run", *strangers.options, *ASK, "--json"))
    assert record["settings"]["spec_type"] == "lookup"
    assert record["models"]["draft"] is None
    notes: list[str] = []
    with load(target=strangers.target, draft=strangers.draft, n_threads=1, on_note=notes.append) as pair:
        assert pair.draft is None
    assert record["notices"] == notes
    assert notes
    named = record_of(specllama("run", *strangers.options, *ASK, "--json", "--spec-type", "draft-tli"))
    assert named["models"]["draft"] is not None
    assert named["acceptance"]["drafted"] == 0


def test_with_a_stale_profile_only_lookups_draft(specllama: Run, strangers: Pair) -> None:
    """Prevents: 'does not fit' after a new build of llama.cpp."""
    path = keep_profile(strangers, BY_TEXT, "draft-tli")
    record = json.loads(path.read_text())
    record["circumstances"]["the CPU"] = "another"
    path.write_text(json.dumps(record))
    told = specllama("run", *strangers.options, *ASK)
    assert told.code == 0
    assert "note: the profile of this pair is not used: the CPU changed since\n" in told.err
    assert HINT in told.err
    assert "--spec-type draft-tli`" in told.err
    settings = record_of(specllama("run", *strangers.options, *ASK, "--json"))["settings"]
    assert (settings["spec_type"], settings["spec_draft_n_max"]) == ("lookup", "auto")


def test_bench_and_audit_take_the_pair_as_answers_do(
    specllama: Run, strangers: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a benchmark or audit of another strategy than `run` uses."""
    keep_profile(strangers, BY_TEXT, "draft-tli")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "code", "turns": ["the heat of the heather"]}\n' * 3)
    bench = ["bench", *strangers.options, "--prompts", str(prompts), "-n", "8", "--spec-draft-n-max", "2,auto"]
    found = specllama(*bench, "-r", "1", "--budget", "none", "--temp", "0", "--format", "json")
    assert found.code == 0, found.err
    arms = json.loads(found.out)["plan"]["arms"]
    assert {arm["spec_type"] for arm in arms} == {"none", "draft-tli", "chain"}
    monkeypatch.setattr(audit_command, "QUICK", LITTLE)
    audit = record_of(specllama("audit", *strangers.options, *NARROW, "--quick", "--json"))
    assert audit["passed"]
    assert audit["settings"]["spec_type"] == ["lookup", "chain", "tree", "draft-tli"]
    assert audit["tuned"]["made"] == PROFILE.made
