"""`specllama run` and its models: what is taken, what is refused and how early, limits, and failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama import llama
from specllama.drafters import REGISTRY
from specllama.llama import crash_test as probe
from tests import tiny
from tests.cli.conftest import ENDLESS, Pair, Result, events_of, record_of

Run = Callable[..., Result]


def test_a_target_alone_decodes_plainly(specllama: Run, pair: Pair) -> None:
    """A draft of the default pair that is loaded beside a foreign target."""
    record = record_of(specllama("run", "-m", str(pair.target), "-t", "1", "--raw", "abc", "-n", "3", "--json"))
    assert record["models"]["draft"] is None
    assert record["settings"]["spec_type"] == "none"


@pytest.mark.parametrize("strategy", [name for name, strategy in REGISTRY.items() if name != "none"])
def test_every_strategy_of_the_registry_runs(specllama: Run, pair: Pair, strategy: str) -> None:
    """A strategy that the help text names and the loader knows nothing of: too few rows, or no draft."""
    args = ["run", *pair.options, "--raw", "abcabcabc", "-n", "60", "--temp", "0", *ENDLESS, "--json"]
    record = record_of(specllama(*args, "--spec-type", strategy, "--draft-max", "6"))
    assert record["settings"]["spec_type"] == strategy
    assert (record["models"]["draft"] is not None) == REGISTRY[strategy].needs_model
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == record_of(specllama(*args, "--spec-type", "none"))["text"]


def _never(*_args: object, **_options: object) -> None:
    raise AssertionError("weights were loaded before the input was checked")


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["-md", "{draft}", "--raw", "abc"], 2, "but no target, expected both"),
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
    models = record_of(specllama(*args, "--json"))["models"]
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
    record = record_of(specllama("run", *pair.options, "--raw", "abc", "-c", "256", *ENDLESS, "--json"))
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
    plain = events_of(specllama(*args))[0]["prompt_tokens"]
    told = events_of(specllama(*args, "-sys", "brief"))[0]["prompt_tokens"]
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
