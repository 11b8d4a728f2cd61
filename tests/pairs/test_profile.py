"""Profiles: kept, found again, and refused after a change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.base import disk
from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, OWN
from specllama.pairs import profile as profiles
from specllama.pairs.profile import ClassFigures, Habit, Profile, ProfileKey, Threads

CHEAP = CostProfile(verify=((1, 1.0), (2, 1.2), (9, 2.0)), draft=((1, 0.2), (2, 0.2)))
DEAR = CostProfile(verify=((1, 1.0), (2, 2.0), (9, 9.0)), draft=((1, 0.7), (2, 0.7)))
CODE = ClassFigures("code", greedy=True, acceptance=0.9, confidence=0.8, n_max=4, speedup=1.6)
STORY = ClassFigures("story", greedy=False, acceptance=0.6, confidence=0.5, n_max=2, speedup=1.1)
PROFILE = Profile(
    made="2026-01-02T03:04:05+00:00",
    source="quick",
    target_path=AS_IN_FILE,
    draft_path=OWN,
    step_s=0.039,
    costs=CHEAP,
    classes=(CODE, STORY),
)


@pytest.fixture
def subject(home: Path) -> ProfileKey:
    home.mkdir()
    for name in ("target", "draft"):
        (home / name).write_bytes(b"weights")
    return ProfileKey(home / "target", LoadOptions(), home / "draft", LoadOptions(max_block=1))


def test_a_profile_is_found_as_it_was_kept(subject: ProfileKey) -> None:
    """Prevents: a number that is rounded or lost in the file."""
    assert profiles.find(subject) == profiles.FoundProfile()
    full = replace(PROFILE, plain_path=AS_IN_FILE, threads=Threads(2, 1, 2))
    for profile in (PROFILE, full):
        assert profiles.save(subject, profile) == profiles.path_of(subject)
        assert profiles.find(subject) == profiles.FoundProfile(profile)


def test_a_file_that_was_replaced_while_it_was_measured_makes_it_stale(subject: ProfileKey) -> None:
    """Prevents: costs of the old file kept for the new one."""
    seen = {subject.target: disk.seen(subject.target)}
    subject.target.write_bytes(b"WEIGHTS")
    profiles.save(subject, PROFILE, seen)
    assert profiles.find(subject).stale == "the target's file changed since"


def test_a_file_that_was_copied_is_the_measured_one(subject: ProfileKey) -> None:
    """Prevents: minutes of tuning after `touch` or a restored backup; other bytes with the old date that pass."""
    profiles.save(subject, PROFILE)
    for path in (subject.target, subject.draft):
        assert path is not None
        os.utime(path, ns=(1, 1))
    assert profiles.find(subject).profile == PROFILE
    subject.target.write_bytes(b"WEIGHTS")
    os.utime(subject.target, ns=(1, 1))
    assert profiles.find(subject).stale == "the target's file changed since"


def test_a_file_whose_checksum_was_never_known_is_not_read_as_a_whole(
    subject: ProfileKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a start that hashes gigabytes after `touch`, and compares them with nothing."""
    monkeypatch.setattr(disk, "checksum", lambda path: pytest.fail(f"{path} was read"))
    assert subject.draft is not None
    used = replace(PROFILE, source="use")
    profiles.save(subject, used, {path: disk.seen_at_once(path) for path in (subject.target, subject.draft)})
    assert profiles.find(subject).profile == used
    os.utime(subject.target, ns=(1, 1))
    assert profiles.find(subject).profile is None


def test_a_state_folder_that_is_a_file_or_cannot_be_read_is_no_damaged_profile(subject: ProfileKey, home: Path) -> None:
    """Prevents: a damaged profile where HOME is /dev/null and no profile was ever made."""
    (home / "state").write_bytes(b"")
    assert profiles.find(subject) == profiles.FoundProfile()
    (home / "state").unlink()
    profiles.path_of(subject).mkdir(parents=True)
    assert "Is a directory" in profiles.find(subject).stale


def test_what_tune_measured_is_never_replaced_by_a_measurement_at_first_use(subject: ProfileKey) -> None:
    """Prevents: four minutes of tuning lost because another build, or another machine with this home, ran once."""
    used = replace(PROFILE, source="use", classes=(), step_s=1.0)
    profiles.save(subject, used)
    assert profiles.find(subject) == profiles.FoundProfile(used)
    tuned = profiles.save(subject, PROFILE)
    profiles.save(subject, used)
    assert profiles.find(subject).profile == PROFILE
    record = json.loads(tuned.read_text())
    tuned.write_text(json.dumps({**record, "circumstances": {}}))
    found = profiles.find(subject)
    assert found.profile == used
    assert "the CPU" in found.stale
    tuned.write_text(json.dumps(record))
    assert profiles.find(subject) == profiles.FoundProfile(PROFILE)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_changed_file_makes_it_stale_and_is_named(subject: ProfileKey, home: Path, name: str) -> None:
    """Prevents: costs of one file used for another."""
    profiles.save(subject, PROFILE)
    (home / name).write_bytes(b"other weights")
    found = profiles.find(subject)
    assert (found.profile, found.stale) == (None, f"the {name}'s file changed since")


@pytest.mark.parametrize("change", [lambda part: part.write_bytes(b"WEIGHTS"), lambda part: part.unlink()])
def test_every_part_of_a_split_model_counts(subject: ProfileKey, home: Path, change: Callable[[Path], object]) -> None:
    """Prevents: costs of another model, where only a later part was replaced."""
    parts = [home / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"weights")
    split = replace(subject, target=parts[0])
    profiles.save(split, PROFILE)
    assert profiles.find(split).profile == PROFILE
    change(parts[2])
    assert profiles.find(split).stale == "part 3 of the target's file changed since"


def test_another_build_or_cpu_makes_it_stale_and_is_named(subject: ProfileKey) -> None:
    """Prevents: a profile of another machine, or of an older llama.cpp."""
    path = profiles.save(subject, PROFILE)
    record = json.loads(path.read_text())
    for fact in ("the installed llama.cpp", "the CPU"):
        changed = {**record, "circumstances": {**record["circumstances"], fact: "another"}}
        path.write_text(json.dumps(changed))
        assert profiles.find(subject).stale == f"{fact} changed since"


def test_only_what_changes_the_cost_of_a_pass_is_another_subject(subject: ProfileKey) -> None:
    """Prevents: costs for four threads used with two; or a new profile for each context length."""
    for wish in (LoadOptions(n_threads=1), LoadOptions(type_k="q8_0"), LoadOptions(n_gpu_layers=3)):
        assert replace(subject, target_options=wish).key != subject.key
    for wish in (LoadOptions(n_ctx=99), LoadOptions(max_block=5), LoadOptions(use_extra_bufts=False)):
        assert replace(subject, target_options=wish).key == subject.key
    assert replace(subject, draft=None).key != subject.key
    assert replace(subject, model_strategy="draft-tli").key != subject.key


def test_a_translated_draft_has_its_own_profile(subject: ProfileKey) -> None:
    """Prevents: costs of a draft in its own tokens used for a translated one."""
    by_text = replace(subject, model_strategy="draft-tli")
    assert (subject.strategy, by_text.strategy) == ("draft-simple", "draft-tli")
    assert replace(subject, draft=None).strategy == "lookup"
    profiles.save(by_text, replace(PROFILE, strategy="draft-tli"))
    assert profiles.find(subject) == profiles.FoundProfile()
    assert profiles.find(by_text) == profiles.FoundProfile(replace(PROFILE, strategy="draft-tli"))


def test_a_profile_without_newer_fields_is_read() -> None:
    """Prevents: minutes of tuning lost after an update."""
    data = json.loads(json.dumps(PROFILE.to_json()))
    for name in ("strategy", "plain_path", "threads", "derived", "habits", "evidence"):
        del data[name]
    assert from_plain(Profile, data) == PROFILE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 5}', '{"version": 5, "circumstances": {}}', "[" * 100_000]
)
def test_a_damaged_file_is_no_profile_and_no_error(subject: ProfileKey, text: str) -> None:
    """Prevents: a traceback at each start after the disk was full once."""
    profiles.save(subject, PROFILE).write_text(text)
    found = profiles.find(subject)
    assert found.profile is None
    assert found.stale


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": 10**400},
        {"target_path": None},
        {"plain_path": {"extra_bufts": "yes"}},
        {"threads": {"decode": "many", "verify": 1, "draft": 1}},
        {"classes": [{"name": "code", "greedy": True, "acceptance": "x", "confidence": 1, "n_max": 1, "speedup": 1}]},
        {"costs": {"verify": [[1, 10**400]], "draft": [[1, 0.1]]}},
        {"costs": {"verify": [[1, 2.0]], "draft": [[1, 0.1]]}},
    ],
)
def test_a_profile_with_impossible_values_is_refused(change: dict[str, object]) -> None:
    """Prevents: an arithmetic error at each start after a file was damaged."""
    data = json.loads(json.dumps(PROFILE.to_json()))
    with pytest.raises(ReportError):
        from_plain(Profile, {**data, **change})


def test_a_profile_of_another_version_is_not_read(subject: ProfileKey) -> None:
    """Prevents: numbers with another meaning."""
    path = profiles.save(subject, PROFILE)
    path.write_text(path.read_text().replace('"version": 5', '"version": 4'))
    assert "version" in profiles.find(subject).stale


def test_a_derived_draft_that_changed_or_is_gone_makes_it_stale(subject: ProfileKey, home: Path) -> None:
    """Prevents: costs of a derived draft that is no longer the measured one."""
    derived = home / "draft+q4_0.gguf"
    derived.write_bytes(b"fewer bits")
    tuned = replace(PROFILE, derived=derived)
    profiles.save(subject, tuned)
    assert profiles.find(subject).profile == tuned
    derived.write_bytes(b"other bits")
    os.utime(derived, (1, 1))
    assert profiles.find(subject).stale == "the derived draft draft+q4_0 changed since"
    derived.unlink()
    assert profiles.find(subject).stale == "the derived draft draft+q4_0 changed since"


def test_a_crash_while_it_is_written_leaves_the_old_one(subject: ProfileKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: half a file."""
    profiles.save(subject, PROFILE)

    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        profiles.save(subject, replace(PROFILE, step_s=1.0))
    assert profiles.find(subject).profile == PROFILE
    assert [path.name for path in profiles.path_of(subject).parent.iterdir()] == [profiles.path_of(subject).name]


def test_a_draft_that_cannot_pay_is_known_by_the_costs() -> None:
    """Prevents: half a gigabyte loaded for a draft that never drafts."""
    assert PROFILE.draft_can_pay
    assert not replace(PROFILE, costs=DEAR).draft_can_pay
    alone = replace(PROFILE, strategy="lookup")
    assert not alone.draft_can_pay
    assert replace(alone, source="use").origin == "learned 2026-01-02"


def test_the_prior_is_what_the_draft_was_worth_at_that_temperature() -> None:
    """Prevents: greedy answers that start with the figures of sampling."""
    greedy, sampled = PROFILE.prior(greedy=True), PROFILE.prior(greedy=False)
    assert (greedy.typical, sampled.typical) == (0.9, 0.6)
    assert greedy.at(0.8) == pytest.approx(0.9)
    assert sampled.at(0.5) == pytest.approx(0.6)
    assert PROFILE.prior(greedy=True).known
    assert replace(PROFILE, classes=()).prior(greedy=True) == Prior()
    learned = replace(PROFILE, habits=(Habit(True, 0.5, 0.4, 1.0),))
    assert (learned.prior(greedy=True).typical, learned.prior(greedy=False).typical) == (0.5, 0.6)
