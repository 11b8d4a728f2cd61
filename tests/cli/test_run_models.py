"""`specllama run` and its models: which are accepted, which are refused and when, limits, and failures."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specllama import llama
from specllama.drafters import REGISTRY
from specllama.llama import crash_test as probe
from tests import tiny
from tests.cli.conftest import ENDLESS, SPECLLAMA, Pair, Result, Run, events_of, record_of
from tests.hubserver import HubServer


def test_a_target_alone_decodes_plainly(specllama: Run, pair: Pair) -> None:
    """Prevents: the default pair's draft loaded with another target."""
    record = record_of(specllama("run", "-m", str(pair.target), "-t", "1", "--raw", "abc", "-n", "3", "--json"))
    assert record["models"]["draft"] is None
    assert record["settings"]["spec_type"] == "none"
    assert record["acceptance"]["drafted"] == 0


@pytest.mark.parametrize("strategy", [name for name, strategy in REGISTRY.items() if name != "none"])
def test_every_strategy_of_the_registry_runs(specllama: Run, pair: Pair, strategy: str) -> None:
    """Prevents: a strategy that is not loaded correctly: too few rows, or no draft."""
    args = ["run", *pair.options, "--raw", "abcabcabc", "-n", "60", "--temp", "0", *ENDLESS, "--json"]
    record = record_of(specllama(*args, "--spec-type", strategy, "--draft-max", "6"))
    assert record["settings"]["spec_type"] == strategy
    assert (record["models"]["draft"] is not None) == REGISTRY[strategy].needs_model
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == record_of(specllama(*args, "--spec-type", "none"))["text"]


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["-md", "{draft}", "--raw", "abc"], 2, "but no target, expected both"),
        (["-m", "{target}", "--spec-type", "draft-simple", "--raw", "abc"], 2, "needs a draft model"),
        (["-m", "{target}", "-md", "{foreign}", "--raw", "abc"], 1, "the draft does not fit the target"),
        (["-m", "{target}", "-md", "{missing}", "--raw", "abc"], 1, "missing.gguf"),
        (["-m", "{target}", "-md", "{truncated}", "--raw", "abc"], 1, "truncated.gguf"),
        (["-m", "{encoder}", "-md", "{missing}", "--raw", "abc"], 1, "encoder"),
        (["-m", "{target}", "-md", "{draft}", "-c", "16", "--raw", "abcabcabcabcabcabcabc"], 1, "--ctx-size"),
        (["-m", "{target}", "-md", "{draft}", "-c", "900000000", "--raw", "abc"], 1, "free"),
        (["--pair", "qwen3", "--raw", "abc"], 1, "there is no pair named"),
    ],
)
def test_errors_come_before_weights_are_loaded(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, error: str
) -> None:
    """Prevents: a minute of loading before the error; a draft that is silently left out (FIELD_CASES 15, 20, 27)."""
    monkeypatch.setattr(llama, "load_together", lambda *_args, **_options: pytest.fail("weights were loaded"))
    places = {
        "target": pair.target,
        "draft": pair.draft,
        "missing": tmp_path / "missing.gguf",
        "foreign": tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14),
        "truncated": tiny.cut(tiny.write_model(tmp_path / "truncated.gguf"), 1000),
        "encoder": tiny.write_model(tmp_path / "encoder.gguf", extra={"llama.attention.causal": False}),
    }
    result = specllama("run", *(arg.format(**places) for arg in args))
    assert (result.code, result.out) == (code, "")
    assert error in result.err
    assert result.err.startswith("error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "arch", "extra", "reason"),
    [
        ("-m", "gptj", {}, "unsupported model architecture"),
        ("-md", "jamba", {"jamba.ssm.inner_size": 48}, "GGML_ASSERT("),
    ],
)
def test_a_model_that_llama_cpp_cannot_build_is_an_error_of_one_sentence(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    arch: str,
    extra: dict[str, object],
    reason: str,
) -> None:
    """Prevents: SIGABRT of the program, or a traceback, for a graph that is missing or that asserts."""
    monkeypatch.setattr(tiny, "trust", lambda *parts: None)
    path = tiny.write_model(tmp_path / "odd.gguf", arch=arch, extra=extra)
    files = {"-m": pair.target, "-md": pair.draft, role: path}
    words = [str(word) for item in files.items() for word in item]
    result = subprocess.run([*SPECLLAMA, "run", *words, "--raw", "abc", "-n", "1"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert reason in error
    assert hint.startswith("hint: ")


PARENT = "maker/parent-GGUF"
SPLIT = "part-q8_0-0000{}-of-00002.gguf"
ABSENT = ("-hfd", "maker/absent")
WRONG = [
    *(
        (("run", "hi", "-hf", PARENT, *names), wrong)
        for *names, wrong in (
            (*ABSENT, "maker/absent does not exist"),
            ("-hfd", f"{PARENT}:Q2_K", f"{PARENT}:Q2_K does not exist"),
            ("-hfd", "maker/gated", "maker/gated is gated"),
            ("-hfd", "maker/split", SPLIT.format(2)),
            ("-md", "gone.gguf", "gone.gguf"),
            (*ABSENT, "--offline", "offline"),
        )
    ),
    *(
        ((*command, "-hf", PARENT, *ABSENT), "maker/absent")
        for command in (
            ("chat",),
            ("bench", "--budget", "none"),
            ("audit",),
            ("tune", "--kernels", "off"),
            ("check",),
            ("check", "--probe"),
        )
    ),
    (("bench", "-hf", PARENT, "-md", f"{PARENT}:Q8_0", "-md", "maker/absent"), "maker/absent"),
    (("draft", "make", PARENT, "-m", "maker/absent"), "maker/absent"),
]


@pytest.mark.parametrize(("args", "wrong"), WRONG)
def test_all_names_are_looked_up_before_a_model_is_fetched(
    specllama: Run, hub_server: HubServer, tmp_path: Path, args: tuple[str, ...], wrong: str
) -> None:
    """Prevents: gigabytes of one model fetched before the name of another turns out wrong."""
    body = tiny.write_model(tmp_path / "target.gguf").read_bytes()
    hub_server.repo(PARENT).files["target-q8_0.gguf"] = body
    hub_server.repo("maker/split").files[SPLIT.format(1)] = body
    hub_server.repo("maker/gated").files["gated-q8_0.gguf"] = body
    hub_server.repo("maker/gated").gated = True
    result = specllama(*args)
    assert (result.code, result.out) == (2 if args[0] == "check" else 1, "")
    assert wrong in result.err
    assert hub_server.fetched == []


def test_a_context_of_zero_is_what_the_model_was_trained_for(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: `-c 0` read as an empty context."""
    small = tiny.write_model(tmp_path / "small.gguf", n_ctx=256)
    args = ["run", "-m", str(small), "-md", str(pair.draft), "-t", "1", "--raw", "abc", "-n", "2", "-c", "0"]
    models = record_of(specllama(*args, "--json"))["models"]
    assert (models["target"]["n_ctx"], models["draft"]["n_ctx"]) == (256, 256)


def test_the_drafts_context_is_not_longer_than_it_was_trained_for(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: drafts beyond the draft's own context (FIELD_CASES 26)."""
    short = tiny.write_model(tmp_path / "short.gguf", n_ctx=256, noise=0.05)
    args = ["run", "-m", str(pair.target), "-md", str(short), "-t", "1", "--raw", "abc", "-n", "300", "-c", "1024"]
    result = specllama(*args, *ENDLESS)
    assert (result.code, len(result.out)) == (0, 301)
    assert "note: the draft's context of 256 tokens is full" in result.err


def test_a_full_context_ends_the_answer_with_length(specllama: Run, pair: Pair) -> None:
    """Prevents: a crash if the context is full during an answer (FIELD_CASES 24)."""
    record = record_of(specllama("run", *pair.options, "--raw", "abc", "-c", "256", *ENDLESS, "--json"))
    assert record["finish_reason"] == "length"
    assert len(record["tokens"]) >= 250


def test_gpu_layers_without_a_gpu_build_are_warned_about(specllama: Run, pair: Pair) -> None:
    """Prevents: `-ngl 99` without effect and without a warning (FIELD_CASES 35)."""
    if llama.build_info().gpu_offload:
        pytest.skip("this is a GPU build")
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "2", "-ngl", "99")
    assert result.code == 0
    assert "warning: -ngl 99 has no effect" in result.err
    assert "CMAKE_ARGS" in result.err
    assert "warning" not in specllama("run", *pair.options, "--raw", "abc", "-n", "2").err


def test_a_build_that_crashes_is_worked_around_with_a_warning(
    specllama: Run, pair: Pair, loaded: list[llama.LoadOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an illegal instruction that the crash test had found (FIELD_CASES 36)."""
    found = probe.ProbeResult(probe.State.FALLBACK, False, "SIGILL", "the build crashes.", "Build it again.")
    monkeypatch.setattr(probe, "installed", lambda: found)
    result = specllama("run", *pair.options, "--raw", "abc", "-n", "2")
    assert (result.code, [options.use_extra_bufts for options in loaded]) == (0, [False, False])
    assert result.err.startswith("warning: the build crashes.\nhint: Build it again.\n")


def test_a_broken_build_is_explained(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: the same crash without a workaround or a message."""
    found = probe.ProbeResult(probe.State.BROKEN, False, "SIGILL", "the build crashes.", "Build it again.")
    monkeypatch.setattr(probe, "installed", lambda: found)
    assert specllama("run", *pair.options, "abc") == Result(1, "", "error: the build crashes.\nhint: Build it again.\n")


def test_an_error_during_an_answer_keeps_its_text(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: text lost to NaN logits; a second thread that hangs."""
    original, n_calls = llama.LlamaModel.eval, 0

    def broken(self: llama.LlamaModel, tokens: Any, parents: Any = None) -> Any:
        nonlocal n_calls
        rows = original(self, tokens, parents)
        n_calls += 1
        return rows * math.nan if n_calls > 20 else rows

    monkeypatch.setattr(llama.LlamaModel, "eval", broken)
    result = specllama("run", *pair.options, "--raw", "abc", *ENDLESS)
    assert (result.code, result.out[-1], result.err[:7]) == (1, "\n", "error: ")
    assert len(result.out.strip()) > 2
    assert "logits" in result.err


def test_the_system_prompt_goes_through_the_template(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: `-sys` without effect."""
    args = ["run", *byte_pair.options, "hi", "-n", "1", "--jsonl"]
    plain = events_of(specllama(*args))[0]["prompt_tokens"]
    told = events_of(specllama(*args, "-sys", "brief"))[0]["prompt_tokens"]
    assert told[-len(plain) :] == plain
    assert bytes(token for token in told if token < 256) != bytes(token for token in plain if token < 256)
    assert len(told) > len(plain)


def test_hardware_options_reach_the_right_model(specllama: Run, pair: Pair, loaded: list[llama.LoadOptions]) -> None:
    """Prevents: -td, -tbd, -ngld or -ctkd without effect, or applied to the wrong model."""
    args = ["run", "-m", str(pair.target), "-md", str(pair.draft), "--raw", "abc", "-n", "1"]
    specllama(*args, "-t", "1", "-tb", "2", "-td", "3", "-tbd", "4", "-ngl", "0", "-ngld", "1", "-ctk", "bf16")
    target, draft = loaded
    assert (target.n_threads, target.n_threads_batch, target.n_gpu_layers, target.type_k) == (1, 2, 0, "bf16")
    assert (draft.n_threads, draft.n_threads_batch, draft.n_gpu_layers, draft.type_k) == (3, 4, 1, "f16")
    specllama(*args, "-t", "1", "-tb", "2", "-ctkd", "bf16", "-ctvd", "f32", "-fa", "on")
    target, draft = loaded[2:]
    assert (draft.n_threads, draft.n_threads_batch) == (1, 2)
    assert (target.type_k, target.type_v, draft.type_k, draft.type_v) == ("f16", "f16", "bf16", "f32")
    assert target.flash_attn == draft.flash_attn == "on"
