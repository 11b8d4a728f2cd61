"""`specllama run` with its streams in pipes: the prompt, the answer, JSON, what is refused and in which order."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama import llama, probe
from specllama.cli import loading, prompting, run
from specllama.cli.app import main
from specllama.cli.options import DraftOptions, HardwareOptions, ModelOptions
from specllama.cli.output import open_output
from specllama.cli.values import strategies
from specllama.drafters import REGISTRY
from specllama.pairs import load_catalog
from specllama.types import Rule
from tests import tiny
from tests.cli.conftest import Pair, Result

Run = Callable[..., Result]
# Never ends by itself: the end tokens of the letters are forbidden.
ENDLESS = ["--logit-bias", "10=-inf", "--logit-bias", "11=-inf", "--logit-bias", "9=-inf"]


def _json(result: Result) -> dict[str, Any]:
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert isinstance(value, dict)
    return value


def _events(result: Result) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


# -------------------------------------------------------------------------------------------------------- the answer


def test_a_pipe_gets_the_bare_answer_and_one_newline(specllama: Run, pair: Pair) -> None:
    """Prompt, statistics or escape sequences in what the next program reads."""
    args = ["run", *pair.options, "--raw", "abc", "--seed", "3", "-n", "12", *ENDLESS]
    text = _json(specllama(*args, "--json"))["text"]
    result = specllama(*args)
    assert (result.code, result.out) == (0, f"{text}\n")
    assert len(text) == 12
    assert result.err.startswith("[ Prompt: ")


def test_an_answer_that_ends_with_a_newline_gets_no_second_one(specllama: Run, byte_pair: Pair) -> None:
    """A blank line at the end of generated files."""
    newline = tiny.token_id(tiny.byte_level(), "Ċ")
    result = specllama("run", *byte_pair.options, "hi", "-n", "3", "--temp", "0", "--logit-bias", f"{newline}=100")
    assert result.out == "\n\n\n"


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_byte_reaches_a_stream_that_is_no_terminal(
    specllama: Run, pair: Pair, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colour codes in a log file (FIELD_CASES 43)."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "20", "--live", *ENDLESS)
    assert result.code == 0
    assert result.out
    assert result.err
    assert "\x1b" not in result.out + result.err


def test_colour_can_be_forced_into_a_pipe_but_no_cursor_moves_there(specllama: Run, pair: Pair) -> None:
    """`--color always` for a pager that does nothing, or that draws live figures into the pager."""
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "20", "--color", "always", "--live", *ENDLESS)
    assert "\x1b[36m" in result.out
    codes = {part.partition("m")[0] for part in result.out.split("\x1b[")[1:]}
    assert all(set(code) <= set("0123456789;") for code in codes)


def test_the_answer_stops_before_a_stop_string(specllama: Run, pair: Pair) -> None:
    """The stop string itself in the output, or in the tokens."""
    args = ["run", *pair.options, "--raw", "abc", "--temp", "0", "-n", "30", "--json", *ENDLESS]
    text = _json(specllama(*args))["text"]
    stop = text[7:9]
    record = _json(specllama(*args, "--stop", stop))
    assert record["finish_reason"] == "stop"
    assert record["text"] == text[: text.index(stop)]
    assert len(record["tokens"]) == len(record["text"])  # a letter a token


def test_quiet_leaves_nothing_on_stderr(specllama: Run, pair: Pair) -> None:
    """A cron job that mails statistics."""
    assert specllama("run", *pair.options, "--raw", "abc", "-n", "3", "-q").err == ""


def test_nothing_was_drafted_reads_as_n_a(specllama: Run, pair: Pair) -> None:
    """'0.0 %' or a division by zero where there was no draft (FIELD_CASES 44)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "5", "--spec-type", "none", *ENDLESS]
    assert "Draft: n/a | n/a tok/step ]" in specllama(*args).err
    record = _json(specllama(*args, "--json"))["acceptance"]
    assert (record["drafted"], record["accepted"], record["rate"], record["alpha"]) == (0, 0, None, None)


def test_an_empty_answer_is_empty(specllama: Run, pair: Pair) -> None:
    """A newline or a crash where the model ends at once."""
    result = specllama("run", *pair.options, "--raw", "abc", "--logit-bias", "10=100", "-q")
    assert result == Result(0, "", "")


# -------------------------------------------------------------------------------------------------------- the prompt


def _asked(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, *args: str, stdin: bytes = b"") -> str:
    """The prompt that the model is given."""
    seen: list[str] = []
    original = run.prompt_tokens

    def spy(text: str, *rest: Any) -> list[int]:
        seen.append(text)
        return original(text, *rest)

    monkeypatch.setattr(run, "prompt_tokens", spy)
    result = specllama("run", *pair.options, "-n", "1", *args, stdin=stdin)
    assert result.code == 0, result.err
    return seen[0]


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["abc"], b"", "abc"),
        (["abc"], b"ba\n", "ba\n\nabc"),
        ([], b"ba\nab\n", "ba\nab"),
        (["-"], b"ba\r\n", "ba"),
        (["-f", "prompt.txt"], b"", "cab"),
        (["-f", "prompt.txt", "abc"], b"ba\n", "ba\n\ncab\n\nabc"),
        (["--raw", "abc"], b"ba\n", "ba\nabc"),
        (["--raw", "-f", "prompt.txt"], b"", "cab\n"),
        ([], b"\xef\xbb\xbfab", "ab"),
    ],
)
def test_stdin_comes_first_then_the_file_then_the_argument(
    specllama: Run,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
    stdin: bytes,
    prompt: str,
) -> None:
    """`cat report | specllama run 'Sum it up'` that forgets the report, or puts the question first."""
    (tmp_path / "prompt.txt").write_bytes(b"cab\n")
    assert _asked(specllama, pair, monkeypatch, *args, stdin=stdin) == prompt


@pytest.mark.parametrize(
    ("args", "stdin", "error"),
    [
        ([], b"", "there is no prompt"),
        (["  "], b"", "there is no prompt"),
        ([], b"\n\n", "there is no prompt"),
        (["-f", "missing.txt"], b"", "--file missing.txt cannot be read: No such file or directory"),
        (["-f", "."], b"", "--file . cannot be read: Is a directory"),
        ([], b"caf\xe9", "stdin is not UTF-8 text: byte 3 is 0xe9"),
        (["caf\udce9"], b"", "the prompt is not UTF-8 text"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_wrong_use(
    specllama: Run, pair: Pair, args: list[str], stdin: bytes, error: str
) -> None:
    """A traceback, or an answer to nothing."""
    result = specllama("run", *pair.options, *args, stdin=stdin)
    assert result.code == 2
    assert error in result.err


def test_a_silent_stdin_is_mentioned(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program that waits for ever for a stdin that somebody forgot to close, without a word."""
    monkeypatch.setattr(prompting, "WAIT_S", 0.02)
    reader, writer = os.pipe()
    wait = select.select

    def wait_then_close(*args: Any) -> Any:
        ready = wait(*args)
        os.close(writer)
        return ready

    monkeypatch.setattr(select, "select", wait_then_close)
    with open(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["run", *pair.options, "--raw", "abc", "-n", "1"])
    assert code == 0
    assert capfd.readouterr().err.startswith("note: waiting for the rest of the prompt on stdin")


# -------------------------------------------------------------------------------------------------------------- seeds


def test_two_runs_without_a_seed_differ_and_seed_0_repeats(specllama: Run, pair: Pair) -> None:
    """A fixed default seed, or 0 taken for 'random' (FIELD_CASES 12)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "40", "--json", *ENDLESS]
    first, second = _json(specllama(*args)), _json(specllama(*args))
    assert first["text"] != second["text"]
    zero, again = (_json(specllama(*args, "--seed", "0")) for _ in range(2))
    assert zero["text"] == again["text"]
    assert zero["settings"]["seed"] == 0
    repeated = _json(specllama(*args, "--seed", str(first["settings"]["seed"])))
    assert repeated["text"] == first["text"]


def test_verbose_shows_the_seed_and_the_models(specllama: Run, pair: Pair) -> None:
    """A good answer that cannot be had again."""
    err = specllama("run", *pair.options, "--raw", "abc", "-n", "2", "--seed", "17", "-v").err
    assert "seed 17\n" in err
    assert f"target: {pair.target}" in err
    assert f"draft: {pair.draft}" in err


def test_llama_cpps_log_stays_out_unless_verbose(pair: Pair) -> None:
    """ggml's lines in the middle of an answer, also at the end of the process (FIELD_CASES 30, 31)."""
    command = [sys.executable, "-m", "specllama", "run", *pair.options, "--raw", "abc", "-n", "2", *ENDLESS]
    silent = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert silent.returncode == 0
    assert len(silent.stdout) == 3
    assert len(silent.stderr.splitlines()) == 1
    loud = subprocess.run([*command, "--verbose"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert len(loud.stdout) == 3
    assert "llama_" in loud.stderr


# --------------------------------------------------------------------------------------------------------------- json


def test_json_is_one_object_that_holds_everything(specllama: Run, pair: Pair) -> None:
    """A record from which the run cannot be repeated or judged."""
    args = ["--raw", "abc", "-n", "20", "--seed", "5", "--draft-max", "3", "--temp", "0.9", "--stop", "zz"]
    record = _json(specllama("run", *pair.options, *args, *ENDLESS, "--json"))
    assert record["schema"]["name"] == "specllama.run"
    assert len(record["tokens"]) == 20
    assert record["finish_reason"] == "length"
    settings = record["settings"]
    assert (settings["seed"], settings["temperature"], settings["draft_n_max"]) == (5, 0.9, 3)
    assert (settings["stop"], settings["verify_rule"], settings["spec_type"]) == (["zz"], "token", "draft-simple")
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


def test_the_counters_of_a_record_agree_with_each_other(specllama: Run, pair: Pair) -> None:
    """A bonus token counted as accepted, or rates that belong to other counts (FIELD_CASES 44)."""
    for seed in range(4):
        record = _json(
            specllama("run", *pair.options, "--raw", "abc", "-n", "50", "--seed", str(seed), *ENDLESS, "--json")
        )
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
    """`--draft-max` that is parsed and not passed on (FIELD_CASES 21)."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "48", "--temp", "0", *ENDLESS, "--json"]
    steps = {n: _json(specllama(*args, "--draft-max", str(n)))["acceptance"] for n in (0, 1, 8)}
    assert steps[0]["steps"] == 48
    assert steps[0]["drafted"] == 0
    assert len(steps[1]["drafted_at"]) == 1
    assert len(steps[8]["drafted_at"]) == 8
    assert steps[8]["steps"] < steps[1]["steps"] < 48


@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_each_rule_gives_the_greedy_text_of_plain_decoding(specllama: Run, pair: Pair, rule: str) -> None:
    """`--verify-rule` that reaches nothing, or one that changes the text."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "40", "--temp", "0", *ENDLESS, "--json"]
    plain = _json(specllama(*args, "--spec-type", "none"))
    fast = _json(specllama(*args, "--verify-rule", rule))
    assert fast["text"] == plain["text"]
    assert fast["settings"]["verify_rule"] == rule


def test_the_rule_reaches_the_engine(specllama: Run, pair: Pair) -> None:
    """`--verify-rule` that is recorded and not passed on: each rule spends the same random numbers differently."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "60", "--seed", "1", *ENDLESS, "--json"]
    assert len({_json(specllama(*args, "--verify-rule", rule.value))["text"] for rule in Rule}) == 3


def test_jsonl_is_enough_to_replay_the_run(specllama: Run, pair: Pair) -> None:
    """An event log from which the answer cannot be made again, or that disagrees with itself."""
    args = ["run", *pair.options, "--raw", "abc", "-n", "30", "--seed", "9", *ENDLESS]
    events = _events(specllama(*args, "--jsonl"))
    first, last = events[0], events[-1]
    assert first["event"] == "start"
    assert first["prompt_tokens"] == [0, 1, 2]
    assert last["event"] == "finished"
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
    again = _json(specllama(*args, "--json"))
    assert again["tokens"] == last["tokens"]
    assert again["settings"] == first["settings"]


def test_bytes_that_are_no_text_make_valid_json_and_valid_utf_8(specllama: Run, byte_pair: Pair) -> None:
    """Half a character, a NUL or a lone surrogate that breaks the reader (FIELD_CASES 29)."""
    for seed in range(5):
        args = ["run", *byte_pair.options, "hi", "-n", "60", "--temp", "2", "--seed", str(seed)]
        record = _json(specllama(*args, "--json"))
        record["text"].encode("utf-8")
        assert specllama(*args, "-q").out.removesuffix("\n") == record["text"].removesuffix("\n")


def test_rich_markup_in_an_answer_is_text(specllama: Run, byte_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """`[/bold]` in an answer taken as markup: a crash, or words that vanish (FIELD_CASES 42)."""
    said = "[/bold] [red] a[0] [link=x]"
    monkeypatch.setattr(llama.Vocabulary, "piece", lambda _self, token, *, special=False: said.encode())
    for extra in ([], ["--color", "always"]):
        out = specllama("run", *byte_pair.options, "hi", "-n", "1", *extra).out
        assert said in out


# ------------------------------------------------------------------------------------------------- models and limits


def test_a_target_alone_decodes_plainly(specllama: Run, pair: Pair) -> None:
    """A draft of the default pair that is loaded beside a foreign target."""
    record = _json(specllama("run", "-m", str(pair.target), "-t", "1", "--raw", "abc", "-n", "3", "--json"))
    assert record["models"]["draft"] is None
    assert record["settings"]["spec_type"] == "none"


@pytest.mark.parametrize("strategy", [name for name, strategy in REGISTRY.items() if name != "none"])
def test_every_strategy_of_the_registry_runs(specllama: Run, pair: Pair, strategy: str) -> None:
    """A strategy that the help text names and the loader knows nothing of: too few rows, or no draft."""
    args = ["run", *pair.options, "--raw", "abcabcabc", "-n", "60", "--temp", "0", *ENDLESS, "--json"]
    record = _json(specllama(*args, "--spec-type", strategy, "--draft-max", "6"))
    assert record["settings"]["spec_type"] == strategy
    assert (record["models"]["draft"] is not None) == REGISTRY[strategy].needs_model
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == _json(specllama(*args, "--spec-type", "none"))["text"]


def test_lookup_and_a_draft_together_are_the_chain() -> None:
    """A list of which only the first word counts."""
    for listed in ("lookup,draft-simple", "draft-simple,ngram,none"):
        names = strategies("--spec-type", listed)
        choice = loading.choose(ModelOptions(), DraftOptions(spec_type=names), HardwareOptions(), open_output())
        assert choice.strategy == "chain"


def _never(*_args: object, **_options: object) -> None:
    raise AssertionError("weights were loaded before the input was checked")


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["-md", "{draft}", "--raw", "abc"], 2, "a draft is given but no target"),
        (["-m", "{target}", "--spec-type", "draft-simple", "--raw", "abc"], 2, "needs a draft model"),
        (["-m", "{target}", "-md", "{foreign}", "--raw", "abc"], 1, "the draft does not fit the target"),
        (["-m", "{target}", "-md", "{missing}", "--raw", "abc"], 1, "missing.gguf"),
        (["-m", "{target}", "-md", "{truncated}", "--raw", "abc"], 1, "truncated.gguf"),
        (["-m", "{recurrent}", "-md", "{missing}", "--raw", "abc"], 1, "recurrent"),
        (["-m", "{target}", "-md", "{draft}", "-c", "16", "--raw", "abcabcabcabcabcabcabc"], 1, "--ctx-size"),
        (["-m", "{target}", "-md", "{draft}", "-c", "900000000", "--raw", "abc"], 1, "free"),
        (["--pair", "qwen3", "--raw", "abc"], 1, "there is no pair named"),
    ],
)
def test_what_cannot_work_is_told_before_weights_are_loaded(
    specllama: Run,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    code: int,
    error: str,
) -> None:
    """A minute of loading before 'no'; or a draft that is silently left out (FIELD_CASES 15, 20, 27)."""
    monkeypatch.setattr(llama, "load", _never)
    places = {
        "target": pair.target,
        "draft": pair.draft,
        "missing": tmp_path / "missing.gguf",
        "foreign": tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14),
        "truncated": tiny.cut(tiny.write_model(tmp_path / "truncated.gguf"), 1000),
        "recurrent": tiny.write_model(tmp_path / "recurrent.gguf", arch="mamba"),
    }
    result = specllama("run", *(arg.format(**places) for arg in args))
    assert (result.code, result.out) == (code, "")
    assert error in result.err
    assert result.err.startswith("error: ")


def test_a_context_of_zero_is_what_the_model_was_trained_for(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """`-c 0` as a context without room."""
    small = tiny.write_model(tmp_path / "small.gguf", n_ctx=256)
    args = ["run", "-m", str(small), "-md", str(pair.draft), "-t", "1", "--raw", "abc", "-n", "2", "-c", "0"]
    models = _json(specllama(*args, "--json"))["models"]
    assert (models["target"]["n_ctx"], models["draft"]["n_ctx"]) == (256, 256)


def test_the_drafts_context_is_not_longer_than_it_was_trained_for(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """A draft beyond its own context, which drafts nonsense; the answer goes on with a note (FIELD_CASES 26)."""
    short = tiny.write_model(tmp_path / "short.gguf", n_ctx=256, noise=0.05)
    args = ["run", "-m", str(pair.target), "-md", str(short), "-t", "1", "--raw", "abc", "-n", "300", "-c", "1024"]
    result = specllama(*args, *ENDLESS)
    assert result.code == 0
    assert len(result.out) == 301
    assert "note: the draft's context of 256 tokens is full: the answer goes on without drafts\n" in result.err


def test_a_full_context_ends_the_answer_with_length(specllama: Run, pair: Pair) -> None:
    """A crash where the context ends in the middle of an answer (FIELD_CASES 24)."""
    record = _json(specllama("run", *pair.options, "--raw", "abc", "-c", "256", *ENDLESS, "--json"))
    assert record["finish_reason"] == "length"
    assert len(record["tokens"]) >= 250


def test_gpu_layers_without_a_gpu_build_are_warned_about(specllama: Run, pair: Pair) -> None:
    """`-ngl 99` that does nothing and says nothing (FIELD_CASES 35)."""
    if llama.build_info().gpu_offload:
        pytest.skip("this is a GPU build")
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "2", "-ngl", "99")
    assert result.code == 0
    assert "warning: -ngl 99 has no effect" in result.err
    assert "CMAKE_ARGS" in result.err
    assert "warning" not in specllama("run", *pair.options, "--raw", "abc", "-n", "2").err


def test_a_build_that_crashes_is_worked_around_and_told(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal instruction in the user's face although the probe knew of it (FIELD_CASES 36)."""
    loaded: list[bool] = []
    original = llama.load

    def spy(path: Path, options: llama.LoadOptions, **rest: Any) -> llama.LlamaModel:
        loaded.append(options.use_extra_bufts)
        return original(path, options, **rest)

    found = probe.ProbeResult(probe.State.FALLBACK, False, "SIGILL", "the build crashes.", "Build it again.")
    monkeypatch.setattr(llama, "load", spy)
    run_once = specllama  # the fixture has put its own answer in place; ours comes after it
    monkeypatch.setattr(probe, "installed", lambda: found)
    result = run_once("run", *pair.options, "--raw", "abc", "-n", "2")
    assert result.code == 0
    assert loaded == [False, False]
    assert result.err.startswith("warning: the build crashes.\nhint: Build it again.\n")


def test_a_broken_build_is_explained(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same crash where there is no way around it."""
    found = probe.ProbeResult(probe.State.BROKEN, False, "SIGILL", "the build crashes.", "Build it again.")
    monkeypatch.setattr(probe, "installed", lambda: found)
    assert specllama("run", *pair.options, "abc") == Result(1, "", "error: the build crashes.\nhint: Build it again.\n")


def test_an_error_in_the_middle_of_an_answer_keeps_what_was_said(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits that take the text before them along, or a hang of the second thread."""
    original, n_calls = llama.LlamaModel.eval, 0

    def broken(self: llama.LlamaModel, tokens: Any, parents: Any = None) -> Any:
        nonlocal n_calls
        rows = original(self, tokens, parents)
        n_calls += 1
        return rows * math.nan if n_calls > 20 else rows

    monkeypatch.setattr(llama.LlamaModel, "eval", broken)
    result = specllama("run", *pair.options, "--raw", "abc", *ENDLESS)
    assert result.code == 1
    assert len(result.out.strip()) > 2
    assert result.out.endswith("\n")
    assert result.err.startswith("error: the model's logits cannot be turned into probabilities")


def test_the_system_prompt_goes_through_the_template(specllama: Run, byte_pair: Pair) -> None:
    """`-sys` that is parsed and not passed on."""
    args = ["run", *byte_pair.options, "hi", "-n", "1", "--jsonl"]
    plain = _events(specllama(*args))[0]["prompt_tokens"]
    told = _events(specllama(*args, "-sys", "brief"))[0]["prompt_tokens"]
    assert told[-len(plain) :] == plain
    assert bytes(token for token in told if token < 256) != bytes(token for token in plain if token < 256)
    assert len(told) > len(plain)


def test_hardware_options_reach_the_right_model(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """-td, -tbd, -ngld or -ctkd that end in the wrong model, or nowhere."""
    loaded: list[llama.LoadOptions] = []
    original = llama.load

    def spy(path: Path, options: llama.LoadOptions, **rest: Any) -> llama.LlamaModel:
        loaded.append(options)
        tiny_ones = replace(options, n_threads=1, n_threads_batch=1, type_k="f16", type_v="f16")
        return original(path, tiny_ones, **rest)

    monkeypatch.setattr(llama, "load", spy)
    args = ["run", "-m", str(pair.target), "-md", str(pair.draft), "--raw", "abc", "-n", "1"]
    specllama(*args, "-t", "1", "-tb", "2", "-td", "3", "-tbd", "4", "-ngl", "0", "-ngld", "1", "-ctk", "q8_0")
    target, draft = loaded
    assert (target.n_threads, target.n_threads_batch, target.n_gpu_layers, target.type_k) == (1, 2, 0, "q8_0")
    assert (draft.n_threads, draft.n_threads_batch, draft.n_gpu_layers, draft.type_k) == (3, 4, 1, "f16")
    specllama(*args, "-t", "1", "-tb", "2", "-ctkd", "q8_0", "-ctvd", "q4_0", "-fa", "on")
    target, draft = loaded[2:]
    assert (draft.n_threads, draft.n_threads_batch) == (1, 2)
    assert (target.type_k, target.type_v, draft.type_k, draft.type_v) == ("f16", "f16", "q8_0", "q4_0")
    assert target.flash_attn == draft.flash_attn == "on"


def test_the_default_pair_and_its_settings_are_taken_where_nothing_is_named() -> None:
    """Defaults of a pair that nobody reads."""
    pair, out = load_catalog().pair(None), open_output()
    choice = loading.choose(ModelOptions(), DraftOptions(), HardwareOptions(), out)
    assert (choice.target, choice.draft, choice.strategy) == (pair.target, pair.draft, "draft-simple")
    assert choice.n_max == (pair.defaults.n_max or 4)
    assert choice.n_ctx == (pair.defaults.n_ctx or 4096)
    chosen = loading.choose(ModelOptions(), DraftOptions(spec_draft_n_max=7), HardwareOptions(ctx_size=99), out)
    assert (chosen.n_max, chosen.n_ctx) == (7, 99)
    assert loading.choose(ModelOptions(), DraftOptions(spec_type="none"), HardwareOptions(), out).draft is None
