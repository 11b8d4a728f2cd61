"""`specllama run --json` and `--jsonl`: consistent records from which a run can be repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specllama import llama
from specllama.core.events import StepEvent
from specllama.core.stats import SpecStats
from specllama.core.types import Rule
from tests.cli.conftest import ENDLESS, Pair, Run, events_of, record_of


def test_json_is_one_object_that_holds_everything(specllama: Run, pair: Pair) -> None:
    """Prevents: a record from which the run cannot be repeated."""
    args = ["--raw", "abc", "-n", "20", "--seed", "5", "--draft-max", "3", "--temp", "0.9", "--stop", "zz"]
    record = record_of(specllama("run", *pair.options, *args, *ENDLESS, "--json"))
    assert record["schema"]["name"] == "specllama.run"
    assert len(record["tokens"]) == 20
    assert record["finish_reason"] == "length"
    settings = record["settings"]
    assert (settings["seed"], settings["temp"], settings["spec_draft_n_max"]) == (5, 0.9, 3)
    assert (settings["stop"], settings["verify_rule"], settings["spec_type"]) == (["zz"], "block", "draft-simple")
    assert settings["logit_bias"]["10"] == "-inf"
    assert record["models"]["target"]["file"] == "target.gguf"
    assert record["models"]["draft"]["size"] == pair.draft.stat().st_size
    assert {"specllama", "llama_cpp_python", "llama_cpp", "python"} <= set(record["versions"])
    assert {"prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second"} <= set(record["timings"])
    assert record["timings"]["prompt_n"] == 3
    assert record["timings"]["predicted_n"] == 20
    assert 0 <= record["overhead"]["share"] <= 1
    assert record["overhead"]["steps"] == record["acceptance"]["steps"] - 1  # the first belongs to the prompt
    assert record["overhead"]["s"] <= record["times"]["decode_s"]
    assert record["gain"] is None, "nothing measured the cost of a pass"
    assert "passes" not in record["times"]


def test_the_counters_of_a_record_agree_with_each_other(specllama: Run, pair: Pair) -> None:
    """Prevents: a bonus token counted as accepted; rates of other counts (FIELD_CASES 44)."""
    for seed in range(4):
        args = ["run", *pair.options, "--raw", "abc", "-n", "50", "--seed", str(seed), *ENDLESS, "--json"]
        record = record_of(specllama(*args))
        counts = record["acceptance"]
        assert 0 <= counts["accepted"] <= counts["drafted"]
        assert counts["rate"] == counts["accepted"] / counts["drafted"]
        assert counts["alpha"] == counts["accepted"] / (counts["accepted"] + counts["rejections"])
        assert counts["mean_length"] == 1 + counts["accepted"] / counts["spec_steps"]
        assert counts["emitted"] == 50
        assert sum(counts["accepted_at"]) == counts["accepted"]
        assert counts["from_draft"] == counts["emitted_from_draft"] / 50
        assert record["timings"]["draft_n_accepted"] == counts["accepted"]
        assert counts["emitted_from_draft"] <= counts["accepted"]


def test_the_longest_draft_reaches_the_engine(specllama: Run, pair: Pair) -> None:
    """Prevents: `--draft-max` without effect (FIELD_CASES 21)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "48", "--temp", "0", *ENDLESS, "--json"]
    steps = {n: record_of(specllama(*args, "--draft-max", str(n)))["acceptance"] for n in (0, 1, 8)}
    assert (steps[0]["steps"], steps[0]["drafted"]) == (48, 0)
    assert [len(steps[n]["drafted_at"]) for n in (1, 8)] == [1, 8]
    assert steps[8]["steps"] < steps[1]["steps"] < 48


@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_each_rule_gives_the_greedy_text_of_plain_decoding(specllama: Run, pair: Pair, rule: str) -> None:
    """Prevents: a rule that changes the greedy text."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "40", "--temp", "0", *ENDLESS, "--json"]
    plain = record_of(specllama(*args, "--spec-type", "none"))
    fast = record_of(specllama(*args, "--verify-rule", rule))
    assert fast["text"] == plain["text"]
    assert fast["settings"]["verify_rule"] == rule


def test_the_rule_reaches_the_engine(specllama: Run, pair: Pair) -> None:
    """Prevents: `--verify-rule` recorded without effect. Each rule uses the same random numbers differently."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "60", "--seed", "1", *ENDLESS, "--json"]
    assert len({record_of(specllama(*args, "--verify-rule", rule.value))["text"] for rule in Rule}) == 3


def test_one_seed_gives_one_text_with_any_drafts(specllama: Run, pair: Pair) -> None:
    """Prevents: `--seed-mode same` without effect on target or draft."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "40", "--seed", "4", "--seed-mode", "same", *ENDLESS, "--json"]
    ways = (("--spec-type", "none"), ("--draft-max", "3"), ("--draft-max", "8", "--verify-rule", "match"))
    records = [record_of(specllama(*args, *way)) for way in ways]
    assert len({record["text"] for record in records}) == 1
    assert records[1]["acceptance"]["accepted"] > 0
    assert records[0]["settings"]["seed_mode"] == "same"
    assert records[0]["text"] != record_of(specllama(*args, "--spec-type", "none", "--seed", "5"))["text"]


def test_jsonl_is_enough_to_replay_the_run(specllama: Run, pair: Pair) -> None:
    """Prevents: an event log from which the answer cannot be rebuilt, or that contradicts itself."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "30", "--seed", "9", *ENDLESS]
    events = events_of(specllama(*args, "--jsonl"))
    first, last = events[0], events[-1]
    assert (first["event"], first["prompt_tokens"], last["event"]) == ("start", [0, 1, 2], "finished")
    tokens = [event for event in events if event["event"] == "token"]
    steps = [event for event in events if event["event"] == "step"]
    assert [token["token"] for token in tokens] == last["tokens"]
    assert "".join(token["text"] for token in tokens) == last["text"]
    assert sum(step["accepted"] for step in steps) == last["acceptance"]["accepted"]
    assert sum(token["origin"] == "draft" for token in tokens) == last["acceptance"]["emitted_from_draft"]
    for step in steps:
        mine = [token for token in tokens if token["step"] == step["step"]]
        accepted = [token["token"] for token in mine if token["origin"] == "draft"]
        assert accepted == step["drafted"][: len(accepted)]
    again = record_of(specllama(*args, "--json"))
    assert again["tokens"] == last["tokens"]
    assert again["settings"] == first["settings"]


@pytest.mark.slow
def test_bytes_that_are_no_text_make_valid_json_and_valid_utf_8(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: half a character, a NUL or a lone surrogate in the output (FIELD_CASES 29)."""
    for seed in range(5):
        args = ["run", *byte_pair.options, "hi", "-n", "60", "--temp", "2", "--seed", str(seed)]
        record = record_of(specllama(*args, "--json"))
        record["text"].encode("utf-8")
        assert specllama(*args, "-q").out.removesuffix("\n") == record["text"].removesuffix("\n")


def test_rich_markup_in_an_answer_is_text(specllama: Run, byte_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: `[/bold]` in an answer read as markup: a crash, or missing words (FIELD_CASES 42)."""
    said = "[/bold] [red] a[0] [link=x]"
    monkeypatch.setattr(llama.Vocabulary, "piece", lambda _self, token, *, special=False: said.encode())
    for extra in ([], ["--color", "always"]):
        out = specllama("run", *byte_pair.options, "hi", "-n", "1", *extra).out
        assert said in out


@pytest.mark.parametrize(
    ("strategy", "has_both"), [("draft-simple", False), ("lookup", False), ("chain", True), ("tree", True)]
)
def test_drafts_are_counted_by_their_source(specllama: Run, pair: Pair, strategy: str, has_both: bool) -> None:
    """Prevents: a chain that does not say whether lookups or the model are worth their time."""
    args = ["run", *pair.options, "--raw", "abcabcabcabc", "-n", "60", "--temp", "0", *ENDLESS, "--jsonl"]
    events = events_of(specllama(*args, "--spec-type", strategy, "--spec-draft-n-max", "5"))
    steps = [event for event in events if event["event"] == "step"]
    counts = events[-1]["acceptance"]
    assert sum(step["looked_up"] for step in steps) == counts["looked_up"]
    assert all(step["looked_up"] <= len(step["drafted"]) for step in steps)
    if has_both:
        assert 0 < counts["looked_up"] < counts["drafted"]
    else:
        assert counts["looked_up"] == (counts["drafted"] if strategy == "lookup" else 0)


def test_accepted_drafts_are_counted_by_their_source() -> None:
    """Prevents: an accepted token of the model counted for the lookups before it, or beside it in a tree."""
    stats = SpecStats()
    times = {"draft_s": 0.0, "eval_s": 0.1, "sample_s": 0.0, "kv_s": 0.0, "step_s": 0.1, "loop_s": 0.0}
    chain = StepEvent(1, (1, 2, 3, 4, 5), 4, "chain", (), **times, n_rows=6, cost=None, looked_up=3)
    for step in (chain, replace(chain, accepted=1), replace(chain, looked_up=0)):
        stats.take(step)
    assert (stats.n_looked_up, stats.n_looked_up_accepted) == (6, 4)
    for path in ((0, 1), (3, 4), ()):  # nodes 0 to 2 were looked up
        stats.take(replace(chain, parents=(-1, 0, 0, -1, 3), path=path, accepted=len(path)))
    assert (stats.n_looked_up, stats.n_looked_up_accepted) == (15, 6)
