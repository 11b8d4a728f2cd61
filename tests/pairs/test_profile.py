"""Profiles: kept, found again, and refused where something has changed since."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.base.errors import ConfigError
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey, Threads

CHEAP = CostProfile(verify=((1, 1.0), (2, 1.2), (9, 2.0)), draft=((1, 0.2), (2, 0.2)))
DEAR = CostProfile(verify=((1, 1.0), (2, 2.0), (9, 9.0)), draft=((1, 0.7), (2, 0.7)))
CODE = ClassFigures("code", greedy=True, acceptance=0.9, confidence=0.8, n_max=4, speedup=1.6)
STORY = ClassFigures("story", greedy=False, acceptance=0.6, confidence=0.5, n_max=2, speedup=1.1)
PROFILE = Profile(
    made="2026-01-02T03:04:05+00:00",
    quick=True,
    target_path=AS_IN_FILE,
    draft_path=KernelPath(placed=(("q4_K", "CPU_REPACK"),)),
    step_s=0.039,
    costs=CHEAP,
    classes=(CODE, STORY),
)


@pytest.fixture
def subject(home: Path) -> ProfileKey:
    """Two files that are no models: nothing is loaded."""
    home.mkdir()
    for name in ("target", "draft"):
        (home / name).write_bytes(b"weights")
    return ProfileKey(home / "target", LoadOptions(), home / "draft", LoadOptions(max_block=1))


def test_a_profile_is_found_as_it_was_kept(subject: ProfileKey) -> None:
    """A number that is rounded or left out on its way through the file."""
    assert profiles.find(subject) == profiles.FoundProfile()
    assert profiles.save(subject, PROFILE) == profiles.path_of(subject)
    assert profiles.find(subject) == profiles.FoundProfile(PROFILE)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_changed_file_makes_it_stale_and_is_named(subject: ProfileKey, home: Path, name: str) -> None:
    """Costs of another file steering the drafts of this one."""
    profiles.save(subject, PROFILE)
    (home / name).write_bytes(b"other weights")
    found = profiles.find(subject)
    assert (found.profile, found.stale) == (None, f"the {name}'s file changed since")


def test_another_build_or_cpu_makes_it_stale_and_is_named(subject: ProfileKey) -> None:
    """A profile copied to another machine, or made before llama.cpp was built anew."""
    path = profiles.save(subject, PROFILE)
    record = json.loads(path.read_text())
    for fact in ("the installed llama.cpp", "the CPU"):
        changed = {**record, "circumstances": {**record["circumstances"], fact: "another"}}
        path.write_text(json.dumps(changed))
        assert profiles.find(subject).stale == f"{fact} changed since"


def test_only_what_changes_the_cost_of_a_pass_is_another_subject(subject: ProfileKey) -> None:
    """Threads that are tuned for four and used with two; or a new profile for every length of context."""
    for wish in (LoadOptions(n_threads=1), LoadOptions(type_k="q8_0"), LoadOptions(n_gpu_layers=3)):
        assert replace(subject, target_options=wish).key != subject.key
    for wish in (LoadOptions(n_ctx=99), LoadOptions(max_block=5), LoadOptions(use_extra_bufts=False)):
        assert replace(subject, target_options=wish).key == subject.key
    assert replace(subject, draft=None).key != subject.key
    assert replace(subject, model_strategy="draft-tli").key != subject.key
    assert [
        each.strategy for each in (subject, replace(subject, model_strategy="draft-tli"), replace(subject, draft=None))
    ] == [
        "draft-simple",
        "draft-tli",
        "lookup",
    ]


def test_a_profile_says_whose_drafts_it_is_about(subject: ProfileKey) -> None:
    """Costs of a draft in its own tokens for one that is translated; a profile from before that is thrown away."""
    by_text = replace(subject, model_strategy="draft-tli")
    assert not profiles.kept(by_text)
    path = profiles.save(by_text, replace(PROFILE, strategy="draft-tli"))
    assert profiles.kept(by_text)
    assert not profiles.kept(subject)
    assert profiles.find(by_text) == profiles.FoundProfile(replace(PROFILE, strategy="draft-tli"))
    record = json.loads(path.read_text())
    del record["profile"]["strategy"]
    assert Profile.from_json(record["profile"]) == PROFILE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 3}', '{"version": 3, "circumstances": {}}', "[" * 100_000]
)
def test_a_damaged_file_is_no_profile_and_no_error(subject: ProfileKey, text: str) -> None:
    """A traceback at every start because a disk was full once."""
    profiles.save(subject, PROFILE).write_text(text)
    found = profiles.find(subject)
    assert found.profile is None
    assert found.stale


def test_a_profile_with_impossible_numbers_is_refused() -> None:
    """Costs that no controller can work with."""
    data = json.loads(json.dumps(PROFILE.to_json()))
    with pytest.raises(ConfigError, match="cost"):
        Profile.from_json({**data, "costs": {"verify": [[1, 2.0]], "draft": [[1, 0.1]]}})


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": 10**400},
        {"target_path": None},
        {"plain_path": {"extra_bufts": "yes", "placed": []}},
        {"draft_path": {"extra_bufts": True, "placed": [["q4_K", ""]]}},
        {"threads": {"decode": "many", "verify": 1, "draft": 1}},
        {"classes": [{"name": "code", "greedy": True, "acceptance": "x", "confidence": 1, "n_max": 1, "speedup": 1}]},
        {"costs": {"verify": [[1, 10**400]], "draft": [[1, 0.1]]}},
    ],
)
def test_a_profile_with_values_of_other_kinds_is_refused(change: dict[str, object]) -> None:
    """Every start of `run` dying in arithmetic because a file was damaged."""
    data = json.loads(json.dumps(PROFILE.to_json()))
    with pytest.raises(ConfigError, match="profile"):
        Profile.from_json({**data, **change})


def test_the_path_of_plain_decoding_comes_back_and_profiles_that_lack_it_still_hold() -> None:
    """Five minutes of tuning lost to a field that answers do without; or the path lost on its way through the file."""
    data = json.loads(json.dumps(replace(PROFILE, plain_path=AS_IN_FILE).to_json()))
    assert Profile.from_json(data).plain_path == AS_IN_FILE
    del data["plain_path"]
    assert Profile.from_json(data) == PROFILE


def test_a_profile_of_another_version_is_not_read(subject: ProfileKey) -> None:
    """Numbers that meant something else."""
    path = profiles.save(subject, PROFILE)
    path.write_text(path.read_text().replace('"version": 3', '"version": 2'))
    assert "measures otherwise" in profiles.find(subject).stale


def test_the_derived_draft_and_the_threads_come_back_and_a_changed_draft_is_named(
    subject: ProfileKey, home: Path
) -> None:
    """A profile that speeds up with a draft that is no longer the one that was measured, or is gone."""
    derived = home / "draft+q4_0.gguf"
    derived.write_bytes(b"fewer bits")
    tuned = replace(PROFILE, derived=derived, threads=Threads(2, 1, 2))
    profiles.save(subject, tuned)
    assert profiles.find(subject).profile == tuned
    derived.write_bytes(b"other bits")
    os.utime(derived, (1, 1))
    assert profiles.find(subject).stale == "the derived draft draft+q4_0 changed since"
    derived.unlink()
    assert profiles.find(subject).stale == "the derived draft draft+q4_0 changed since"


def test_a_crash_while_it_is_written_leaves_the_old_one(subject: ProfileKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file."""
    profiles.save(subject, PROFILE)

    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        profiles.save(subject, replace(PROFILE, step_s=1.0))
    assert profiles.find(subject).profile == PROFILE
    assert [path.name for path in profiles.path_of(subject).parent.iterdir()] == [profiles.path_of(subject).name]


def test_a_draft_that_could_not_pay_if_all_were_accepted_is_known_by_the_costs() -> None:
    """Half a gigabyte loaded for a draft that never drafts."""
    assert PROFILE.draft_can_pay
    assert not replace(PROFILE, costs=DEAR).draft_can_pay
    assert not replace(PROFILE, classes=()).draft_can_pay


def test_the_prior_is_what_the_draft_was_worth_at_that_temperature() -> None:
    """A controller that begins with another machine's beliefs, or greedy with those of sampling."""
    greedy, sampled = PROFILE.prior(greedy=True), PROFILE.prior(greedy=False)
    assert (greedy.typical, sampled.typical) == (0.9, 0.6)
    assert greedy.at(0.8) == pytest.approx(0.9)
    assert sampled.at(0.5) == pytest.approx(0.6)
    assert replace(PROFILE, classes=()).prior(greedy=True) == Prior()
