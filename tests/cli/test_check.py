"""`specllama check` on files: verdicts, exit codes, and both forms of the report."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specllama import llama
from specllama.base.errors import Interrupted
from specllama.cli.check import command as check_command
from specllama.cli.check import probe as check_probe
from specllama.cli.check.view import show_report
from specllama.cli.codes import INTERRUPTED
from specllama.cli.screen.output import Output, Stream, open_output
from specllama.core.types import Cancel
from specllama.drafters.controller import CostProfile
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import Evidence, FoundProfile, Profile
from specllama.pairs.report import MEASURE, CheckRow, CompatReport, RowMark
from tests import tiny
from tests.cli.conftest import Pair, Result, Run, Terminal
from tests.hubserver import HubServer

BASE = tiny.letters(20)
pytestmark = pytest.mark.usefixtures("own_home")


def with_text(token: int, text: str) -> tiny.TinyVocabulary:
    """BASE with another text for one token."""
    return replace(BASE, tokens=(*BASE.tokens[:token], text, *BASE.tokens[token + 1 :]))


def bare(path: Path, vocabulary: tiny.TinyVocabulary = BASE, **extra: object) -> Path:
    return tiny.write_bare(path, vocabulary=vocabulary, extra=extra)


def never_load(*_args: object, **_options: object) -> None:
    pytest.fail("weights were loaded")


def check(specllama: Run, target: Path, draft: Path, *args: str) -> Result:
    return specllama("check", "-m", str(target), "-md", str(draft), *args)


def rows_of(result: Result) -> dict[str, dict[str, Any]]:
    return {row["test"]: row for row in json.loads(result.out)["rows"]}


def test_a_pair_that_fits_is_0_without_loading_weights(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: exit codes that a script cannot use; loading weights to read two headers."""
    monkeypatch.setattr(llama, "load_together", never_load)
    result = check(specllama, pair.target, pair.draft)
    assert (result.code, result.err) == (0, "")
    assert "FAIL" not in result.out
    assert result.out.splitlines()[-1].startswith("It fits")


def test_json_holds_the_verdict_the_rule_and_every_test(specllama: Run, pair: Pair) -> None:
    """Prevents: a report that only a person can read."""
    result = check(specllama, pair.target, pair.draft, "--json")
    report = json.loads(result.out)
    assert (result.code, report["fits"], report["reasons"]) == (0, True, [])
    assert "exactness" in report["rule"]
    assert llama.build_info().bindings in rows_of(result)["versions"]["target"]  # case 22
    assert {row["mark"] for row in report["rows"]} <= {"PASS", "WARN", "FAIL"}
    for row in report["rows"]:
        assert row["target"] or row["draft"]
        assert bool(row["reason"]) or row["mark"] == "PASS"


def test_another_tokenizer_does_not_fit_and_the_reason_is_told(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: 'wrong model' without a reason (case 15)."""
    foreign = tiny.write_model(tmp_path / "foreign.gguf", vocabulary=tiny.sentencepiece())
    result = check(specllama, pair.target, foreign)
    assert result.code == 1
    assert "FAIL\ttokenizer\tbpe\tspm" in result.out
    assert "overlap" in result.out


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "foreign", "directory", "newer", "bigendian"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_file_that_cannot_be_read_is_2_and_one_sentence(
    specllama: Run, pair: Pair, tmp_path: Path, damage: str, role: str
) -> None:
    """Prevents: 'does not fit' for an unreadable file; a traceback (cases 15, 34)."""
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
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert str(path) in result.err


def test_a_target_that_cannot_be_used_fails_before_its_draft_is_opened(specllama: Run, tmp_path: Path) -> None:
    """Prevents: fetching a draft for a diffusion model or an encoder (case 20)."""
    diffusion = tiny.write_bare(tmp_path / "diffusion.gguf", arch="llada", vocabulary=BASE)
    for target, draft in ((diffusion, tmp_path / "missing.gguf"), (bare(tmp_path / "t.gguf"), diffusion)):
        result = check(specllama, target, draft)
        assert (result.code, "a diffusion model" in result.out) == (1, True)


def test_a_recurrent_pair_fits_and_the_report_says_how_it_rolls_back(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a refusal of models that saved states serve."""
    target, draft = (tiny.write_model(tmp_path / f"{a}.gguf", arch=a, vocabulary=BASE) for a in ("mamba", "lfm2"))
    result = check(specllama, target, draft, "--json")
    rows = rows_of(result)
    kinds, row = rows["architecture"], rows["rollback"]
    assert (result.code, row["mark"]) == (0, "PASS")
    assert (kinds["target"], kinds["draft"]) == ("mamba, recurrent", "lfm2, hybrid")
    assert (row["target"], row["draft"]) == ("saved states", "kept states")
    assert "not measured yet" in row["reason"]
    assert (rows["trees"]["target"], rows["trees"]["draft"]) == ("chains only", "chains only")
    assert "one state" in rows["trees"]["reason"]
    mixed = rows_of(check(specllama, target, bare(tmp_path / "plain.gguf"), "--json"))["trees"]
    assert (mixed["draft"], mixed["reason"].partition(":")[0]) == ("yes", "target")
    tiny.load(draft, rollback="auto").close()
    assert "measured, 5 rows" in rows_of(check(specllama, target, draft, "--json"))["rollback"]["reason"]


def test_the_report_follows_the_files(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a remembered verdict on a file that has changed (case 22)."""
    target, draft = bare(tmp_path / "t.gguf"), bare(tmp_path / "d.gguf")
    for _ in range(2):
        assert check(specllama, target, draft).code == 0
    bare(draft, with_text(3, "zz"))
    os.utime(draft, ns=(1, 1))
    assert check(specllama, target, draft).code == 1
    bare(target, with_text(3, "zz"))
    os.utime(target, ns=(2, 2))
    assert check(specllama, target, draft).code == 0


def test_a_context_beyond_the_trained_one_is_counted_as_it_will_be_loaded(specllama: Run, tmp_path: Path) -> None:
    """Prevents: memory counted for the trained context although `run` loads a longer one."""
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
    assert "1 MB" in row["reason"]
    long = rows_of(check(specllama, pair.target, pair.draft, "--json", "-c", "131072"))["memory"]
    assert long["target"] != row["target"], "--ctx-size counts"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "{target}", "-md", "{draft}", "-ctk", "q8_0", "-fa", "off"], "multiple of 32"),
        (["-m", "{target}", "-md", "{draft}", "-ctkd", "q8_0"], "multiple of 32"),
        (["-m", "{target}", "-md", "{draft}", "-ctv", "q8_0", "-fa", "off"], "needs flash attention"),
        ([""], "PAIR is empty"),  # `check "$PAIR"` with PAIR unset
        (["-m", "x.gguf"], "no draft"),
        (["-md", "x.gguf"], "no target"),
        (["nosuchpair"], "there is no pair named"),
        (["-m", "x.gguf", "-hf", "a/b"], "exclude each other"),
        (["-c", "1"], "--ctx-size"),
        (["--nosuchoption"], "no such option"),
        (["-hf", "no spec", "-hfd", "a/b"], "is not a repository"),
    ],
)
def test_wrong_use_is_2(specllama: Run, pair: Pair, args: list[str], words: str) -> None:
    """Prevents: a typo that a script reads as 'does not fit'; 'it fits' for options that cannot be loaded."""
    result = specllama("check", *(word.format(target=pair.target, draft=pair.draft) for word in args))
    assert (result.code, result.out) == (2, "")
    assert words in result.err


@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError, 2), (BrokenPipeError, 141)])
def test_a_defect_is_2_and_a_closed_pipe_is_not_an_error(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: int
) -> None:
    """Prevents: a bug that reads as 'does not fit'; `check ... | head -1` that asks for a bug report."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(check_command, "show_report", fail)
    result = check(specllama, pair.target, pair.draft)
    assert (result.code, "error: " in result.err) == (code, error is ZeroDivisionError)


def test_all_parts_of_a_split_model_count(specllama: Run, tmp_path: Path) -> None:
    """Prevents: the size of the first part taken for the model's (case 40)."""
    parts = tiny.write_split(tmp_path / "big", n_parts=3, n_vocab=20)
    whole = tiny.write_model(tmp_path / "whole.gguf", n_vocab=20)
    row = rows_of(check(specllama, parts[0], whole, "--json"))["size"]
    assert row["target"] == row["draft"]
    second = check(specllama, parts[1], whole)
    assert (second.code, str(parts[0]) in second.err) == (2, True)


class Window(io.StringIO):
    """A file that has a number, as the window of a terminal."""

    def fileno(self) -> int:
        return 1


@pytest.mark.slow
def test_on_a_terminal_the_report_is_one_screen(terminal: Callable[..., Terminal], pair: Pair) -> None:
    """Prevents: a verdict that scrolled away; broken lines."""
    shown = terminal("check", "-m", str(pair.target), "-md", str(pair.draft), columns=100, rows=30)
    assert shown.finish() == 0
    lines = shown.display.text_lines
    assert len(lines) <= 30
    assert lines[-1].startswith("It fits")
    assert any(line.split()[:2] == ["PASS", "tokenizer"] for line in lines)


def test_a_narrow_terminal_shows_every_value_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: figures that are cut at the edge of a column."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _number: os.terminal_size((50, 40)))
    file = Window()
    stream = Stream(file, is_terminal=True, styled=False, coloured=False, steerable=True)
    values = [("bpe, gpt-2 style pieces", "bpe, gpt-2 style pieces"), ("1.54 G, 1.12 GB", "494 M, 531 MB")]
    rows = [CheckRow(f"row {n}", RowMark.PASS, *each) for n, each in enumerate(values)]
    show_report(Output(stream, stream), CompatReport("a-target-of-a-long-name", "draft", tuple(rows)))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 50
    text = " ".join(" ".join(lines).split())
    assert lines[-1].startswith("It fits")  # a pair without warnings
    assert [value for each in (*values, ("a-target-of-a-long-name",)) for value in each if value not in text] == []


def test_run_refuses_a_pair_with_the_words_of_check(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: two rules for one question; a draft that is silently left out (case 15)."""
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    reason = json.loads(check(specllama, pair.target, foreign, "--json").out)["reasons"][0]
    result = specllama("run", "-m", str(pair.target), "-md", str(foreign), "--raw", "abc")
    assert (result.code, result.out) == (1, "")
    assert f"error: the draft does not fit the target: {reason}\n" in result.err


def test_a_pair_on_the_hub_is_checked_before_it_is_downloaded(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a download of gigabytes to learn that a draft does not fit."""
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


@dataclass(frozen=True)
class Measured:
    """A first use that is over at once, of a cheap draft."""

    setup: Any
    models: Any
    keeps: bool
    noise: float = 0.0

    def __iter__(self) -> Iterator[float]:
        costs = CostProfile(verify=((1, 1.0), (4, 1.2), (8, 1.5), (17, 3.0)), draft=((1, 0.05),), assumed=(17,))
        paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
        profile = Profile(made="2026-01-02", step_s=0.1, costs=costs, **paths)
        object.__setattr__(self, "setup", replace(self.setup, profile=profile))
        yield 1.0


def test_a_probe_measures_and_says_what_to_expect(
    specllama: Run, short_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a pair that fits and is slower than plain decoding, without a warning."""
    monkeypatch.setattr(check_probe, "FirstUse", Measured)
    args = ["check", *short_pair.options, "--probe", "-c", "2048", "--budget", "1m"]
    human, data = specllama(*args), specllama(*args, "--json")
    assert (human.code, data.code) == (0, 0)
    assert human.out.splitlines()[-1].startswith(("Expect ", "Do not use this draft here"))
    probe = json.loads(data.out)["probe"]
    assert sum(line.startswith("|") for line in human.out.splitlines()) == 2 + 7
    assert set(probe["acceptance"]) == {"code", "summary", "story", "question"}
    assert [point["n_max"] for point in probe["points"]] == list(range(8))
    assert probe["pays"] == (probe["best"]["n_max"] > 0)


def test_a_probe_makes_the_profile_of_a_pair_without_one_and_changes_no_other(
    specllama: Run, short_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: the same passes measured again by the first answer; a profile of `tune` that a probe replaces."""
    monkeypatch.delenv("SPECLLAMA_SPEC_DRAFT_N_MAX")
    args = ["check", *short_pair.options, "--probe", "-c", "2048", "--budget", "1s", "--json"]
    assert specllama(*args).code == 0
    (made,) = (tmp_path / "state").rglob("*.use.json")
    before = made.read_bytes()
    monkeypatch.setattr(check_probe, "FirstUse", Measured)
    assert specllama(*args).code == 0
    assert made.read_bytes() == before


@pytest.mark.parametrize(
    ("cost", "source", "learned", "replaces"),
    [
        (0.05, "use", Evidence(), True),
        (9.0, "use", Evidence(), True),
        (0.05, "use", Evidence(n_answers=1), False),
        (0.05, "quick", Evidence(), False),
    ],
)
def test_a_probe_replaces_what_a_first_use_measured_and_nothing_that_was_learned(
    specllama: Run,
    short_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    cost: float,
    source: Any,
    learned: Evidence,
    replaces: bool,
) -> None:
    """Prevents: the costs of one busy moment that stay for good; answers that a probe forgets."""
    monkeypatch.delenv("SPECLLAMA_SPEC_DRAFT_N_MAX")
    costs = CostProfile(verify=((1, 1.0), (4, 1.2), (8, 1.5), (17, 3.0)), draft=((1, cost),), assumed=(17,))
    paths = {"target_path": KernelPath(), "draft_path": KernelPath()}
    known = Profile(made="2026-01-02", source=source, step_s=0.1, costs=costs, evidence=learned, **paths)
    kept = list[bool]()

    def noted(setup: Any, models: Any, *, keeps: bool) -> Measured:
        kept.append(keeps)
        return Measured(setup, models, keeps)

    monkeypatch.setattr(profiles, "find", lambda _subject: FoundProfile(known))
    monkeypatch.setattr(check_probe, "FirstUse", noted)
    assert specllama("check", *short_pair.options, "--probe", "-c", "2048", "--budget", "1s", "--json").code == 0
    assert kept == [replaces]


def test_a_probe_does_not_advise_to_measure(specllama: Run, short_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a report that advises the very command that printed it."""
    monkeypatch.setattr(check_probe, "FirstUse", Measured)
    args = ["check", *short_pair.options, "-c", "2048", "--json"]
    plain, probed = (json.loads(specllama(*args, *more).out)["rows"] for more in ([], ["--probe", "--budget", "1s"]))
    assert [row["test"] for row in plain if MEASURE in row["remedy"]]
    assert [row["test"] for row in probed if MEASURE in row["remedy"]] == []
    assert [row["mark"] for row in plain] == [row["mark"] for row in probed]


@pytest.mark.parametrize(("at", "verdict"), [(0, None), (1, {}), (9, {"code"})])
def test_a_stopped_probe_says_what_follows_from_what_was_measured(
    specllama: Run, short_pair: Pair, monkeypatch: pytest.MonkeyPatch, at: int, verdict: set[str] | None
) -> None:
    """Prevents: a minute of measuring lost to Ctrl-C."""

    class Stopped(check_probe._Probe):
        def steps(self) -> Iterator[tuple[str, float]]:
            for n, step in enumerate(super().steps()):
                if n == at:
                    signal.raise_signal(signal.SIGINT)
                    while not self.cancel.is_set():
                        time.sleep(0.001)
                    if not at:
                        raise Interrupted("a pass was stopped")
                yield step

    monkeypatch.setattr(check_probe, "FirstUse", Measured)
    monkeypatch.setattr(check_probe, "_Probe", Stopped)
    args = ["check", *short_pair.options, "--probe", "-c", "2048", "--budget", "1m"]
    result = specllama(*args, "--json")
    assert result.code == INTERRUPTED
    probe = json.loads(result.out)["probe"]
    assert (probe and set(probe["acceptance"])) == (None if verdict is None else set(verdict))
    if verdict == {}:
        assert probe["pays"] is True


def test_a_probe_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a bar that stands still, or '0 s left' while it goes on."""
    now = 100.0
    monkeypatch.setattr(check_probe, "perf_counter", lambda: now)
    probe = check_probe._Probe(None, None, {}, 20.0, Cancel(), keeps=True, began=now)  # type: ignore[arg-type]
    now = 105.0
    assert probe.shown(0.5) == (0.25, 15.0)
    now = 140.0  # a slow machine
    assert probe.shown(0.5) == (0.5, 40.0)


@pytest.mark.parametrize(("noise", "warned"), [(0.1, False), (0.6, True)])
def test_a_busy_machine_is_warned_about(capsys: pytest.CaptureFixture[str], noise: float, warned: bool) -> None:
    """Prevents: advice from times that other programs disturbed."""
    check_probe.warn_of_noise(open_output(), noise)
    assert ("60 %" in capsys.readouterr().err) is warned


def test_a_pair_that_does_not_fit_is_not_probed(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: measuring a pair that was refused."""
    monkeypatch.setattr(llama, "load_together", never_load)
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    result = check(specllama, pair.target, foreign, "--probe", "--json")
    assert (result.code, json.loads(result.out)["probe"]) == (1, None)


def test_a_probe_of_a_bare_vocabulary_is_2(specllama: Run, tmp_path: Path) -> None:
    """Prevents: a crash for a file without weights."""
    target, draft = bare(tmp_path / "t.gguf"), bare(tmp_path / "d.gguf")
    result = check(specllama, target, draft, "--probe", "--json")
    assert (result.code, result.out) == (2, "")
    assert "no weights" in result.err
