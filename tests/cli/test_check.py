"""`specllama check` on files: verdicts, exit codes, and both forms of the report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama import llama
from specllama.cli.check import command as check_command
from specllama.cli.check import probe as check_probe
from specllama.cli.screen.output import open_output
from specllama.core.stats import SpecStats
from specllama.drafters.controller import CostProfile
from specllama.tuning.forecast import outlook
from tests import tiny
from tests.cli.conftest import Pair, Result, Terminal
from tests.hubserver import HubServer

Run = Callable[..., Result]
BASE = tiny.letters(20)
SPECIAL = BASE.tokens[-3:]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remembered from elsewhere, nothing left behind."""
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def with_text(token: int, text: str) -> tiny.TinyVocabulary:
    """BASE with another text for one token."""
    return replace(BASE, tokens=(*BASE.tokens[:token], text, *BASE.tokens[token + 1 :]))


def bare(path: Path, vocabulary: tiny.TinyVocabulary = BASE, **extra: object) -> Path:
    """A file with a vocabulary and no weights."""
    return tiny.write_bare(path, vocabulary=vocabulary, extra=extra)


def check(specllama: Run, target: Path, draft: Path, *args: str) -> Result:
    return specllama("check", "-m", str(target), "-md", str(draft), *args)


def rows_of(result: Result) -> dict[str, dict[str, Any]]:
    return {row["test"]: row for row in json.loads(result.out)["rows"]}


def test_a_pair_that_fits_is_0(specllama: Run, pair: Pair) -> None:
    """Prevents: a script that cannot tell yes from no."""
    result = check(specllama, pair.target, pair.draft)
    assert (result.code, result.err) == (0, "")
    assert "FAIL" not in result.out
    assert result.out.splitlines()[-1].startswith("It fits")


def test_no_weights_are_loaded(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a minute of loading for a look at two headers."""
    monkeypatch.setattr(llama, "load", lambda *_args, **_rest: pytest.fail("weights were loaded"))
    assert check(specllama, pair.target, pair.draft).code == 0


def test_json_holds_the_verdict_the_rule_and_every_test(specllama: Run, pair: Pair) -> None:
    """Prevents: a report that a program has to read off a table."""
    result = check(specllama, pair.target, pair.draft, "--json")
    report = json.loads(result.out)
    assert result.code == 0
    assert report["fits"] is True
    assert report["reasons"] == []
    assert "exactness" in report["rule"]
    assert llama.build_info().bindings in rows_of(result)["versions"]["target"]  # to place it a year later (case 22)
    assert {row["mark"] for row in report["rows"]} <= {"PASS", "WARN", "FAIL"}
    for row in report["rows"]:
        assert row["target"] or row["draft"]
        assert bool(row["reason"]) or row["mark"] == "PASS"


def test_another_tokenizer_does_not_fit_and_the_reason_is_told(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: 'wrong model' and no more (case 15)."""
    foreign = tiny.write_model(tmp_path / "foreign.gguf", vocabulary=tiny.sentencepiece())
    result = check(specllama, pair.target, foreign)
    assert result.code == 1
    assert "FAIL\ttokenizer\tbpe\tspm" in result.out
    assert "the target's tokenizer is bpe, the draft's is spm" in result.out
    assert "overlap" in result.out


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "foreign", "directory", "newer", "bigendian"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_file_that_cannot_be_read_is_2_and_one_sentence(
    specllama: Run, pair: Pair, tmp_path: Path, damage: str, role: str
) -> None:
    """Prevents: 'does not fit' said of a file that nobody could read; or a traceback (cases 15, 34)."""
    path = tmp_path / "odd.gguf"
    if damage == "truncated":
        tiny.cut(tiny.write_model(path), 1000)
    elif damage == "newer":
        tiny.write_bare(path, arch="qwen99", vocabulary=BASE)
    elif damage == "bigendian":
        tiny.overwrite(tiny.write_model(path), 4, b"\0\0\0\3")
    elif damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(b"" if damage == "empty" else b"hello")
    files = (path, pair.draft) if role == "target" else (pair.target, path)
    result = check(specllama, *files, "--json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert str(path) in result.err
    assert len(result.err.splitlines()) <= 2
    assert "hint: " in result.err


def test_a_recurrent_target_fails_before_anybody_looks_for_its_draft(specllama: Run, tmp_path: Path) -> None:
    """Prevents: fetching a draft for a target that can have none (case 20)."""
    target = tiny.write_model(tmp_path / "recurrent.gguf", arch="mamba", vocabulary=BASE)
    result = check(specllama, target, tmp_path / "missing.gguf")
    assert result.code == 1
    assert "cannot roll its memory back" in result.out
    draft_first = check(specllama, bare(tmp_path / "t.gguf"), target)
    assert draft_first.code == 1
    assert "cannot roll its memory back" in draft_first.out


def test_the_report_follows_the_files(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a remembered verdict on a file that has changed (case 22)."""
    target, draft = bare(tmp_path / "t.gguf"), bare(tmp_path / "d.gguf")
    assert check(specllama, target, draft).code == 0
    assert check(specllama, target, draft).code == 0
    bare(draft, with_text(3, "zz"))
    os.utime(draft, ns=(1, 1))
    assert check(specllama, target, draft).code == 1
    bare(target, with_text(3, "zz"))
    os.utime(target, ns=(2, 2))
    assert check(specllama, target, draft).code == 0


def test_a_context_beyond_the_trained_one_is_counted_as_it_will_be_loaded(specllama: Run, tmp_path: Path) -> None:
    """Memory for the trained context only, although `run` loads what is asked for: 'fits', and then it does not."""
    target, draft = tiny.write_pair(tmp_path, n_ctx=512)
    needed, units = [], {"kB": 1e3, "MB": 1e6, "GB": 1e9}
    for n_ctx in ("512", "512000"):
        rows = rows_of(check(specllama, target, draft, "--json", "-c", n_ctx))
        size, unit = re.findall(r"KV ([\d.]+) (kB|MB|GB)", str(rows["memory"]))[0]
        needed.append(float(size) * units[unit])
        assert ("longer than the target was trained for" in str(rows["context"])) is (n_ctx != "512")
    assert needed[1] > 400 * needed[0]


def test_memory_that_is_short_fails_with_the_numbers(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a pair that fits on paper and swaps in practice (case 27)."""
    if llama.build_info().gpu_offload:
        pytest.skip("a GPU has memory of its own")
    monkeypatch.setattr(llama, "memory_free", lambda: 1_000_000)
    result = check(specllama, pair.target, pair.draft, "--json")
    assert result.code == 1
    row = rows_of(result)["memory"]
    assert "only 1 MB are free" in row["reason"]
    long = rows_of(check(specllama, pair.target, pair.draft, "--json", "-c", "131072"))["memory"]
    assert long["target"] != row["target"], "the context that is asked for counts"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([""], "PAIR is empty"),  # `check "$PAIR"` with PAIR unset, which checks another pair
        (["-m", "x.gguf"], "no draft"),
        (["-md", "x.gguf"], "no target"),
        (["nosuchpair"], "there is no pair named"),
        (["-m", "x.gguf", "-hf", "a/b"], "exclude each other"),
        (["-c", "1"], "--ctx-size"),
        (["--nosuchoption"], "no such option"),
        (["-hf", "no spec", "-hfd", "a/b"], "is not a repository"),
    ],
)
def test_wrong_use_is_2(specllama: Run, args: list[str], words: str) -> None:
    """Prevents: a typing error that a script takes for 'does not fit'."""
    result = specllama("check", *args)
    assert (result.code, result.out) == (2, "")
    assert words in result.err


def test_a_defect_of_ours_is_2_too(specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a bug that reads as 'does not fit'."""
    monkeypatch.setattr(llama, "build_info", lambda: 1 / 0)
    result = check(specllama, pair.target, pair.draft)
    assert result.code == 2
    assert "should not have happened" in result.err


def test_a_reader_that_leaves_early_is_no_verdict_and_no_defect(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: `check ... | head -1` that asks for a report of a broken pipe."""

    def leave(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(check_command, "show_report", leave)
    result = check(specllama, pair.target, pair.draft)
    assert (result.code, result.err) == (141, "")


def test_a_split_model_is_looked_at_whole(specllama: Run, tmp_path: Path) -> None:
    """Prevents: the size of the first part taken for the model's (case 40)."""
    parts = tiny.write_split(tmp_path / "big", n_parts=3, n_vocab=20)
    whole = tiny.write_model(tmp_path / "whole.gguf", n_vocab=20)
    row = rows_of(check(specllama, parts[0], whole, "--json"))["size"]
    assert row["target"] == row["draft"]
    second = check(specllama, parts[1], whole)
    assert second.code == 2
    assert str(parts[0]) in second.err


def test_hostile_texts_do_not_reach_the_terminal(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a model file that steers the screen or forges a row (case 42)."""
    evil = "\x1b[31m\nFAIL\tx\t[red]"
    target = bare(tmp_path / "t.gguf", **{"general.name": evil})
    draft = bare(tmp_path / "d.gguf", with_text(3, evil), **{"general.name": evil})
    for extra in ((), ("--color", "always"), ("--json",)):
        result = check(specllama, target, draft, *extra)
        assert result.code == 1
        assert "\x1b[31m" not in result.out.replace("\x1b[31mFAIL", "")
        assert "\nFAIL\tx" not in result.out


@pytest.mark.slow
def test_on_a_terminal_the_report_is_one_screen(terminal: Callable[..., Terminal], pair: Pair) -> None:
    """Prevents: a report whose verdict scrolled away, or lines that break."""
    shown = terminal("check", "-m", str(pair.target), "-md", str(pair.draft), columns=100, rows=30)
    assert shown.finish() == 0
    lines = shown.display.text_lines
    assert len(lines) <= 30
    assert lines[-1].startswith("It fits")
    assert any(line.split()[:2] == ["PASS", "tokenizer"] for line in lines)


def test_run_refuses_a_pair_with_the_words_of_check(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: two rules for one question, or a draft that is silently left out (case 15)."""
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    reason = json.loads(check(specllama, pair.target, foreign, "--json").out)["reasons"][0]
    result = specllama("run", "-m", str(pair.target), "-md", str(foreign), "--raw", "abc")
    assert (result.code, result.out) == (1, "")
    assert f"error: the draft does not fit the target: {reason}\n" in result.err


def test_a_pair_on_the_hub_is_checked_before_it_is_downloaded(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: gigabytes of download to find out that a draft does not fit."""
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repo("maker/big-GGUF").files["big-Q4_K_M.gguf"] = pair.target.read_bytes()
        other = tiny.write_model(tmp_path / "other.gguf", n_vocab=14)
        server.repo("maker/other-GGUF").files["other-Q8_0.gguf"] = other.read_bytes()
        good = specllama("check", "-hf", "maker/big-GGUF", "-md", str(pair.draft), "--json")
        bad = specllama("check", "-hf", "maker/big-GGUF:Q4_K_M", "-hfd", "maker/other-GGUF", "-q")
        offline = specllama("check", "-hf", "maker/big-GGUF", "-hfd", "maker/other-GGUF", "--offline")
    assert (good.code, bad.code, offline.code) == (0, 1, 2)
    assert json.loads(good.out)["target"] == "big-Q4_K_M.gguf"
    assert bad.err == ""
    assert "offline" in offline.err.lower() or "network" in offline.err


def test_a_probe_measures_and_says_what_to_expect(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a pair that fits on paper and is slower than no draft at all, without a word."""
    monkeypatch.setattr(check_probe, "COSTS_S", 0.01)
    # Every byte is a token, and a text to summarise has a thousand of them.
    pair = Pair(*tiny.write_pair(tmp_path, vocabulary=tiny.byte_level(), chat_template=tiny.CHATML, n_ctx=2048))
    args = ["check", *pair.options, "--probe", "-c", "2048"]
    human, data = specllama(*args), specllama(*args, "--json")
    assert (human.code, data.code) == (0, 0)
    advice = human.out.splitlines()[-1]
    assert advice.startswith(("Expect ", "Do not use it on this machine, because "))
    probe = json.loads(data.out)["probe"]
    assert sum(line.startswith("|") for line in human.out.splitlines()) >= 2 + 8
    assert set(probe["acceptance"]) == {"code", "summary", "story", "question"}
    assert [point["n_max"] for point in probe["points"]] == list(range(16))
    assert probe["pays"] == (probe["best"]["n_max"] > 0)


@pytest.mark.parametrize(("noise", "warned"), [(0.1, False), (0.6, True)])
def test_a_busy_machine_is_told_about(capsys: pytest.CaptureFixture[str], noise: float, warned: bool) -> None:
    """Prevents: advice for ever from a minute in which something else was running."""
    costs = CostProfile(verify=((1, 1.0), (2, 1.5)), draft=((1, 0.2),))
    found = outlook(costs, 0.1, {"code": SpecStats(n_accepted=9, n_rejected=1)}, noise=noise)
    assert found is not None
    check_probe.warn_of_noise(open_output(), found.noise)
    assert ("spread by 60 %" in capsys.readouterr().err) is warned


def test_a_pair_that_does_not_fit_is_not_probed(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a minute of measuring what was refused already."""
    monkeypatch.setattr(llama, "load", lambda *_args, **_rest: pytest.fail("weights were loaded"))
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    result = check(specllama, pair.target, foreign, "--probe", "--json")
    assert result.code == 1
    assert json.loads(result.out)["probe"] is None


def test_a_probe_of_a_bare_vocabulary_is_2(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a crash where there is nothing to load."""
    target, draft = bare(tmp_path / "t.gguf"), bare(tmp_path / "d.gguf")
    result = check(specllama, target, draft, "--probe", "--json")
    assert (result.code, result.out) == (2, "")
    assert "no weights" in result.err
