"""`specllama tune`, and how `run` uses a profile."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specllama.base import disk as storage
from specllama.base.jsonable import from_plain
from specllama.cli import tune
from specllama.cli.screen.output import open_output
from specllama.derive import tuned as derive_tuned
from specllama.drafters.controller import PROBE_TOKENS, CostProfile, rows_of
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey
from specllama.tuning import child as tuner_child
from specllama.tuning import tune as tuner
from specllama.tuning.child import Way
from specllama.tuning.tune import Findings, Layout, MeasuredDraft
from tests.cli.conftest import ENDLESS, Pair, Run, Terminal, events_of, record_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("auto")]


# `specllama` in a process of its own, see `quick`.
CALM = """
import sys
from specllama.derive import tuned as derive_tuned
from specllama.tuning import child as tuner_child
from specllama.cli.app import main
tuner_child.LEAST_COST = derive_tuned.LEAST_RATE = 0.0
derive_tuned.recipes_of = lambda *_, **__: []
sys.exit(main(sys.argv[1:]))
"""
HINT = "hint: `specllama tune "
SAVED = "saved for `run` and `chat` in "
# With CHEAP every draft is faster than plain decoding, with DEAR no draft model is.
CHEAP = CostProfile(verify=((1, 1.0), (2, 1.05), (17, 1.5)), draft=((1, 0.05), (2, 0.06)))
DEAR = CostProfile(verify=((1, 1.0), (2, 1.05), (17, 8.0)), draft=((1, 1.5), (2, 2.0)))
PROFILE = Profile(
    made="2026-01-02T03:04:05+00:00",
    target_path=AS_IN_FILE,
    draft_path=DEFAULT,
    step_s=0.04,
    costs=CHEAP,
    classes=(ClassFigures("code", True, 0.9, 0.9, 5, 1.6), ClassFigures("story", False, 0.7, 0.7, 2, 1.2)),
)
ASK = ("--raw", "abcabcabc", "-n", "40", "--seed", "4", *ENDLESS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest measurement, without new drafts.

    Its passes of some hundred microseconds are never plausible on a busy machine, and no draft can pay.
    """
    monkeypatch.setattr(tuner, "QUICK", tuner.TuneEffort(seconds=60.0, n_visits=1, n_tokens=4))
    monkeypatch.setattr(tuner_child, "LEAST_COST", 0.0)
    monkeypatch.setattr(derive_tuned, "LEAST_RATE", 0.0)
    monkeypatch.setattr(derive_tuned, "recipes_of", lambda *_, **__: [])


@pytest.fixture
def keep(pair: Pair, plain_environment: None) -> Callable[[Profile], Path]:
    """Saves a profile of the pair as `Pair.options` load it."""
    return lambda profile: keep_profile(pair, profile)


def keep_profile(pair: Pair, profile: Profile, strategy: str = "draft-simple") -> Path:
    """Save a profile of the pair as `Pair.options` load it."""
    wish = LoadOptions(n_threads=1)
    return profiles.save(ProfileKey(pair.target, wish, pair.draft, wish, strategy), profile)


def test_the_next_answer_uses_the_new_profile(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a profile saved under a key that `run` does not look up; a log that is silent for minutes."""
    told = specllama("tune", *byte_pair.options, "--quick")
    assert told.code == 0, told.err
    heads, *rows = (line.split("\t") for line in told.out.splitlines()[:-1])
    assert heads == ["what", "before", "after"]
    assert [row[0] for row in rows[:3]] == ["target's kernel path", "draft's kernel path", "draft"]
    assert rows[0][1:] == rows[1][1:] == ["rearranged weights"] * 2
    assert [row[0] for row in rows[-8:-6]] == ["code", "code, temperature 0"]
    assert {len(row) for row in rows} == {3}
    assert SAVED in told.err
    shares = [int(share) for share in re.findall(r": (\d+) %$", told.err, re.M)]
    assert shares == sorted(shares) != []
    used = specllama("run", *byte_pair.options, "hi", "-n", "3")
    assert used.err.startswith("tuned 20")
    assert HINT not in used.err
    assert record_of(specllama("run", *byte_pair.options, "hi", "-n", "3", "--json"))["profile"] is not None


def test_the_json_of_tuning_is_the_profile(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: text among the data; a profile that cannot be read."""
    result = specllama("tune", *byte_pair.options, "--quick", "--json")
    facts = json.loads(result.out)
    kept = json.loads(Path(facts["path"]).read_text())
    assert from_plain(Profile, facts["profile"]) == from_plain(Profile, kept["profile"])
    assert facts["failures"] == []
    assert [path["target"]["name"] for path in facts["kernel_paths"]] == ["rearranged weights"]  # F32 has only one


def test_a_tuning_that_ends_early_says_why_in_numbers(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """Prevents: "too slow" without a figure; figures of classes that were not measured."""
    dear = ((1, 1.0), (2, 1.9), (4, 3.8), (8, 7.5))
    layouts = (Layout(Way(), 0.05, dear, ((1, 0.9), (2, 1.0))),)
    found = Findings(layouts, (MeasuredDraft(None, layouts),))
    profile, best_case, wish = tuner.choose(found, quick=False), found.best_case(0.5), LoadOptions()
    tuned = derive_tuned.Tuned(found, profile, profile, best_case)
    tune.show(open_output(color="never"), ProfileKey(pair.target, wish, pair.draft, wish), tuned)
    *rows, why = capfd.readouterr().out.splitlines()
    assert rows[-2:] == ["drafted token\t0.90 of that\t0.90 of that", "plain decoding\t20.0 tok/s\t20.0 tok/s"]
    assert re.findall(r"\d\.\d\d", why) == ["0.90", f"{found.best_case():.2f}", f"{best_case:.2f}"]
    assert found.best_case() < best_case < 1.0


def test_figures_that_cannot_be_saved_are_still_shown(
    specllama: Run, byte_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of measuring lost to a full disk, reported as a bug."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(profiles, "save", fail)
    told = specllama("tune", "-m", str(byte_pair.target), "-t", "1", "--quick")
    assert told.code == 1
    assert "plain decoding\t" in told.out
    assert "the profile cannot be written to " in told.err
    assert SAVED not in told.err


def test_a_file_that_is_no_model_is_found_before_kernels_are_compiled(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a minute of compiling before "there is no file"."""
    monkeypatch.setattr("specllama.cli.tune._compile_kernels", lambda *_: pytest.fail("kernels were compiled"))
    assert specllama("tune", "-m", str(tmp_path / "absent.gguf")).code == 1


def test_a_state_folder_that_is_a_file_is_found_before_measuring(
    specllama: Run, byte_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of measuring for a profile that has no place."""
    monkeypatch.setattr(derive_tuned, "tune", lambda *_: pytest.fail("something was measured"))
    (tmp_path / "state").touch()
    told = specllama("tune", *byte_pair.options, "--quick")
    assert (told.code, "XDG_STATE_HOME" in told.err) == (1, True)


def test_a_full_disk_is_found_before_measuring(
    specllama: Run, byte_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of measuring for a profile that cannot be saved."""
    monkeypatch.setattr(derive_tuned, "tune", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    told = specllama("tune", *byte_pair.options, "--quick")
    assert (told.code, told.out) == (1, "")
    assert "error: the profile needs 20 kB, the disk of " in told.err
    assert "XDG_STATE_HOME" in told.err.partition("hint: ")[2]


def test_two_tunings_wait_for_each_other(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: two programs that disturb each other's figures."""
    words = ["tune", *byte_pair.options, "--quick"]
    with storage.only_one(drafts.LOCK, storage.Silent()):
        other = subprocess.Popen([sys.executable, "-c", CALM, *words], stderr=subprocess.PIPE, text=True)
        assert other.stderr is not None
        assert "another specllama is working on drafts: waiting for it\n" in iter(other.stderr.readline, "")
        assert other.poll() is None
    _, err = other.communicate(timeout=120)
    assert (other.returncode, SAVED in err) == (0, True)
    assert record_of(specllama("run", *byte_pair.options, "hi", "-n", "3", "--json"))["profile"] is not None


def test_a_target_alone_is_tuned_for_lookups(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a division by the costs of a missing draft."""
    alone = ["-m", str(byte_pair.target), "-t", "1"]
    assert specllama("tune", *alone, "--quick").code == 0
    record = record_of(specllama("run", *alone, "hi", "-n", "3", "--json"))
    assert (record["settings"]["spec_type"], record["settings"]["spec_draft_n_max"]) == ("lookup", "auto")


def test_on_a_terminal_there_is_a_table_and_ctrl_c_keeps_nothing(
    terminal: Callable[..., Terminal], byte_pair: Pair, tmp_path: Path
) -> None:
    """Prevents: half a profile; a child that continues to measure; a traceback; no word on what is kept."""
    stopped = terminal("tune", *byte_pair.options)
    stopped.wait_for(lambda t: "%" in t.text)  # of any step: a fast machine can finish one between two drawings
    stopped.interrupt()
    assert stopped.finish() == 130
    assert "Traceback" not in stopped.text
    assert "no profile and no draft" in stopped.text
    assert not list((tmp_path / "state").rglob("*.json"))
    whole = terminal(command=[sys.executable, "-c", CALM, "tune", *byte_pair.options, "--quick"], rows=40)
    assert whole.finish() == 0
    assert [word in whole.text for word in ("before", "after", "measuring passes")] == [True, True, False]


def test_an_automatic_length_keeps_the_text_and_records_every_decision(
    specllama: Run, pair: Pair, keep: Callable[[Profile], Path]
) -> None:
    """Prevents: an automatic length that changes the answer, or cannot be checked afterwards."""
    keep(PROFILE)
    args = ["run", *pair.options, *ASK, "--temp", "0"]
    record = record_of(specllama(*args, "--json"))
    assert record["settings"]["spec_type"] == "chain"
    assert record["settings"]["spec_draft_n_max"] == "auto"
    assert from_plain(Profile, record["profile"]) == PROFILE
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == record_of(specllama(*args, "--spec-type", "none", "--json"))["text"]
    steps = [event for event in events_of(specllama(*args, "--jsonl")) if event["event"] == "step"]
    plans = [step["decisions"][0]["plan"] for step in steps[:-1]]
    assert all({"n_given", "n_drawn", "probe", "rate"} <= set(plan) for plan in plans)
    assert [step["cost"] for step in steps] == pytest.approx([CHEAP.verify_cost(step["n_rows"]) for step in steps])


def test_a_profile_tells_the_gain_of_an_answer(specllama: Run, pair: Pair, keep: Callable[[Profile], Path]) -> None:
    """Prevents: acceptance without the speed that it brings; a gain of plain decoding."""
    keep(PROFILE)
    args = ["run", *pair.options, *ASK, "-n", "60", "--temp", "0"]
    gain = record_of(specllama(*args, "--json"))["gain"]
    assert 0 < gain["low"] <= gain["value"] <= gain["high"]
    assert record_of(specllama(*args, "--spec-type", "none", "--json"))["gain"] is None
    assert re.search(r"t/s, \d+\.\dx plain \|", specllama(*args).err)


def test_only_measured_costs_of_the_loaded_kernel_path_tell_the_gain(
    specllama: Run, pair: Pair, keep: Callable[[Profile], Path]
) -> None:
    """Prevents: a gain from assumed costs, or from those of another kernel path; no gain at a fixed length."""

    def costs_of(profile: Profile, *args: str) -> set[float | None]:
        keep(profile)
        events = events_of(specllama("run", *pair.options, *ASK, *args, "--jsonl"))
        return {event["cost"] for event in events if event["event"] == "step"}

    loaded = replace(PROFILE, target_path=KernelPath.of(LoadOptions()))
    assumed = replace(loaded, source="use", costs=replace(CHEAP, assumed=rows_of(CHEAP.verify)))
    assert None in costs_of(assumed) <= {1.0, None}
    assert CHEAP.verify_cost(4) in costs_of(loaded, "--draft-max", "3")
    assert costs_of(PROFILE, "--draft-max", "3") == {None}


def test_the_same_seed_says_the_same_twice(specllama: Run, pair: Pair, keep: Callable[[Profile], Path]) -> None:
    """Prevents: decisions that depend on the clock (docs/design.md, invariant 7)."""
    keep(PROFILE)
    args = ["run", *pair.options, *ASK, "--temp", "1.0"]
    assert specllama(*args).out == specllama(*args).out


def test_the_profiles_kernel_paths_are_loaded(
    specllama: Run, pair: Pair, keep: Callable[[Profile], Path], loaded: list[LoadOptions]
) -> None:
    """Prevents: costs of another kernel path; blocks longer than the target was loaded for; probes of one row."""
    keep(PROFILE)
    models = record_of(specllama("run", *pair.options, *ASK, "--json"))["models"]
    assert models["target"]["kernel_path"] == "weights as in the file"
    assert models["draft"]["kernel_path"] == "rearranged weights"
    target, draft = loaded
    assert (target.use_extra_bufts, draft.use_extra_bufts) == (False, True)
    assert (target.max_block, draft.max_block) == (17, PROBE_TOKENS)


def test_a_draft_that_cannot_pay_is_not_loaded(specllama: Run, pair: Pair, keep: Callable[[Profile], Path]) -> None:
    """Prevents: answers slower than plain decoding although tuning measured it."""
    keep(replace(PROFILE, costs=DEAR))
    record = record_of(specllama("run", *pair.options, *ASK, "--json"))
    assert record["settings"]["spec_type"] == "lookup"
    assert record["models"]["draft"] is None
    assert "only lookups draft" in specllama("run", *pair.options, *ASK).err
    named = record_of(specllama("run", *pair.options, *ASK, "--spec-type", "draft-simple", "--json"))
    assert named["models"]["draft"] is not None


@pytest.mark.parametrize(
    ("args", "strategy", "n_max"),
    [
        (["--draft-max", "3"], "draft-simple", 3),
        (["--spec-draft-p-min", "0.1"], "draft-simple", 4),
        (["--spec-type", "none"], "none", 4),
    ],
)
def test_explicit_options_switch_the_profile_off(
    specllama: Run, pair: Pair, keep: Callable[[Profile], Path], args: list[str], strategy: str, n_max: int
) -> None:
    """Prevents: an option that the profile overrides."""
    keep(PROFILE)
    record = record_of(specllama("run", *pair.options, *ASK, *args, "--json"))
    settings = record["settings"]
    assert (settings["spec_type"], settings["spec_draft_n_max"]) == (strategy, n_max)
    assert record["profile"] is None


def test_without_a_profile_only_lookups_draft_and_text_output_has_a_hint(specllama: Run, pair: Pair) -> None:
    """Prevents: a user who never learns of tuning; a script that gets advice on stderr."""
    args = ["run", *pair.options, *ASK]
    *_, hint = (lines := specllama(*args).err.splitlines())
    assert hint.startswith(f"{HINT}-m {pair.target} -md {pair.draft}` ")
    assert len(lines) == 3  # figures, the note about -n, the hint
    for quiet in (["-q"], ["--json"], ["--jsonl"], ["--draft-max", "4"], ["--spec-type", "none"]):
        assert HINT not in specllama(*args, *quiet).err
    settings = record_of(specllama(*args, "--json"))["settings"]
    assert (settings["spec_draft_n_max"], settings["spec_type"]) == ("auto", "lookup")


def test_a_stale_profile_is_named_and_not_used(specllama: Run, pair: Pair, keep: Callable[[Profile], Path]) -> None:
    """Prevents: costs of another build; a profile that is ignored without a note."""
    path = keep(PROFILE)
    record = json.loads(path.read_text())
    record["circumstances"]["the CPU"] = "another"
    path.write_text(json.dumps(record))
    told = specllama("run", *pair.options, *ASK)
    assert "note: the profile of this pair is not used: the CPU changed since\n" in told.err
    assert HINT in told.err
