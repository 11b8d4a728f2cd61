"""The store of derived drafts: provenance is kept, and a stale one is noticed."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from specllama.base import disk
from specllama.base.errors import ConfigError, DiskFull, ModelFileError
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived, Measurement, Recipe
from specllama.pairs.profile import ClassFigures

RECIPE = Recipe(quant="Q4_0", n_vocab=32000, dropped=(4, 7))
MEASUREMENT = Measurement(
    target="target.gguf",
    target_sha256="aa",
    cpu="some CPU",
    made="2026-01-02T03:04:05+00:00",
    step_s=0.04,
    cost=0.2,
    speed=1.5,
    parent_cost=0.4,
    parent_speed=1.2,
    classes=(ClassFigures("code", True, 0.9, 0.9, 5, 1.6),),
)


@pytest.fixture
def parent(home: Path) -> Path:
    home.mkdir()
    (home / "draft-q4_k_m.gguf").write_bytes(b"weights")
    return home / "draft-q4_k_m.gguf"


@pytest.fixture
def derived(parent: Path) -> Derived:
    path = drafts.place(parent, RECIPE)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"fewer")
    return drafts.record(path, RECIPE, parent)


def test_provenance_comes_back_as_it_was_kept(derived: Derived, parent: Path) -> None:
    """Prevents: a checksum, a layer or a measurement lost in the file."""
    assert drafts.read(derived.path) == derived
    assert derived.name == "draft-q4_k_m+q4_0+v32000+drop4.7"
    assert derived.parent.path == parent
    assert "llama-cpp-python" in derived.build
    measured = drafts.measured(derived, MEASUREMENT)
    assert drafts.read(derived.path) == measured
    again = drafts.measured(measured, replace(MEASUREMENT, speed=1.6))
    assert [each.speed for each in again.measurements] == [1.6]
    other = drafts.measured(again, replace(MEASUREMENT, cpu="another"))
    assert len(other.measurements) == 2
    both = drafts.measured(other, replace(MEASUREMENT, by=drafts.TUNE, parent_cost=None))
    assert [each.by for each in both.measurements] == ["make", "make", "tune"]
    assert drafts.read(derived.path) == both


def test_drafts_are_found_by_name_and_by_parent(derived: Derived, parent: Path, tmp_path: Path) -> None:
    """Prevents: a name taken for a file, a file taken for a name, or the children of another model."""
    assert drafts.named(derived.name) == drafts.named(f"{derived.name}.gguf") == derived.path
    for name in ("none", f"x/{derived.name}", "a" * 300):
        assert drafts.named(name) is None
    assert list(drafts.paths()) == [derived.path]
    assert drafts.children_of(parent) == [derived]
    assert drafts.children_of(tmp_path / "other.gguf") == []


def test_a_parent_that_changed_or_is_gone_makes_a_draft_stale(derived: Derived, parent: Path) -> None:
    """Prevents: a draft of an old model used for a new one without a warning."""
    assert drafts.stale(derived) == ""
    parent.write_bytes(b"other weights")
    assert "has changed" in drafts.stale(derived)
    assert drafts.children_of(parent) == []
    parent.unlink()
    assert "is gone" in drafts.stale(derived)
    unreadable = replace(derived, parent=replace(derived.parent, path=Path("/", "a" * 300)))
    assert "File name too long" in drafts.stale(unreadable)
    derived.path.write_bytes(b"something else")
    assert "not the one that was made" in drafts.stale(derived)


def test_every_part_of_a_split_parent_counts(home: Path) -> None:
    """Prevents: a draft of an old model, where only a later part was replaced; parts that are links into a cache."""
    snapshot, blobs = home / "snapshot", home / "blobs"
    for folder in (snapshot, blobs, drafts.folder()):
        folder.mkdir(parents=True)
    for n in (1, 2):
        (blobs / f"blob{n}").write_bytes(b"weights")
        (snapshot / f"m-0000{n}-of-00002.gguf").symlink_to(blobs / f"blob{n}")
    path = drafts.place(snapshot / "m-00001-of-00002.gguf", RECIPE)
    path.write_bytes(b"fewer")
    derived = drafts.record(path, RECIPE, snapshot / "m-00001-of-00002.gguf")
    assert drafts.read(path) == derived
    assert [drafts.stale(derived), drafts.stale(derived, at_once=True)] == ["", ""]
    (blobs / "blob2").write_bytes(b"WEIGHTS")
    assert "has changed" in drafts.stale(derived)
    assert "has changed" in drafts.stale(derived, at_once=True)
    (blobs / "blob2").unlink()
    assert "is gone" in drafts.stale(derived)


def test_no_parent_is_read_before_an_answer(derived: Derived, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: gigabytes hashed at each start, of any file that a record names."""
    monkeypatch.setattr(disk, "checksum", lambda *_: pytest.fail("hashed"))
    assert drafts.stale(derived) == drafts.stale(derived, at_once=True) == ""  # the stamps are as they were
    for file in (parent, derived.path):
        os.utime(file, ns=(1, 1))
    assert drafts.stale(derived, at_once=True) == ""  # as of a copy
    old = replace(derived, seen=None, parent=replace(derived.parent, seen=None))
    assert drafts.stale(old, at_once=True) == ""
    derived.path.write_bytes(b"few")
    assert "not the one that was made" in drafts.stale(old, at_once=True)
    derived.path.write_bytes(b"fewer")
    parent.write_bytes(b"other weights")
    assert "has changed" in drafts.stale(derived, at_once=True)


def test_a_changed_parent_of_the_same_size_is_noticed_by_its_content(derived: Derived, parent: Path) -> None:
    """Prevents: other content of the same length that passes, or a copy that does not."""
    for file, other, reason in (
        (parent, b"WEIGHTS", "has changed"),
        (derived.path, b"FEWER", "not the one that was made"),
    ):
        os.utime(file, ns=(1, 1))
        assert drafts.stale(derived) == ""
        whole = file.read_bytes()
        file.write_bytes(other)
        os.utime(file, ns=(1, 1))
        assert reason in drafts.stale(derived)
        assert reason in drafts.stale(derived, at_once=True)
        file.write_bytes(whole)


def test_a_record_without_a_stamp_is_read(derived: Derived) -> None:
    """Prevents: drafts of an earlier version that cannot be used."""
    data = json.loads(json.dumps(derived.to_json()))
    del data["seen"], data["parent"]["seen"]
    derived.path.with_suffix(".json").write_text(json.dumps(data))
    assert drafts.read(derived.path) == replace(derived, seen=None, parent=replace(derived.parent, seen=None))


@pytest.mark.parametrize("text", ["", "[]", '{"version": 0}', '{"version": 1, "recipe": 3}', "[" * 100_000])
def test_a_damaged_record_is_an_error_with_a_hint_and_spoils_nothing_else(
    derived: Derived, parent: Path, text: str
) -> None:
    """Prevents: a traceback at each tuning after the disk was full once."""
    derived.path.with_suffix(".json").write_text(text)
    with pytest.raises(ConfigError, match=r"\.json") as caught:
        drafts.read(derived.path)
    assert "draft make" in caught.value.hint
    assert drafts.children_of(parent) == []


@pytest.mark.parametrize(
    ("name", "value"), [("measurements", [{**asdict(MEASUREMENT), "cost": 10**400}]), ("n_bytes", -1)]
)
def test_a_record_with_impossible_values_is_an_error(derived: Derived, name: str, value: object) -> None:
    """Prevents: `draft list` that crashes because of one number in one file."""
    derived.path.with_suffix(".json").write_text(json.dumps({**derived.to_json(), name: value}))
    with pytest.raises(ConfigError, match=name):
        drafts.read(derived.path)


def test_what_a_killed_process_left_is_swept_and_nothing_else(derived: Derived) -> None:
    """Prevents: gigabytes in hidden folders that no command names."""
    for name in (".draft.gguf.making", ".draft.gguf.layers"):
        (derived.path.parent / name).mkdir()
        (derived.path.parent / name / "cut.gguf").write_bytes(b"half")
    drafts.sweep()
    assert sorted(path.suffix for path in derived.path.parent.iterdir()) == [".gguf", ".json"]


def test_removing_takes_the_record_with_it(derived: Derived) -> None:
    """Prevents: a record without a draft in the list."""
    assert drafts.remove(derived.path) == len(b"fewer")
    assert list(derived.path.parent.iterdir()) == []
    drafts.discard(derived.path)


def test_a_draft_that_is_moved_keeps_its_record(derived: Derived, tmp_path: Path) -> None:
    """Prevents: provenance that stays in the cache."""
    moved = drafts.moved(drafts.measured(derived, MEASUREMENT), tmp_path / "mine.gguf")
    assert drafts.read(tmp_path / "mine.gguf") == moved
    assert moved.measurements == (MEASUREMENT,)
    assert (tmp_path / "mine.gguf").read_bytes() == b"fewer"
    assert list(derived.path.parent.iterdir()) == []
    assert json.loads((tmp_path / "mine.json").read_text())["parent"]["sha256"] == derived.parent.sha256


def test_a_draft_that_finds_no_room_stays_where_it_is(
    derived: Derived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: minutes of making lost to a full disk; half a model, or a link's target, overwritten by its move."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    (tmp_path / ".mine.gguf.moving").symlink_to(theirs)

    def full(_source: Path, folder: Path) -> None:
        (folder / "half").write_bytes(b"few")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(derived.path.parent.iterdir())
    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(DiskFull) as caught:
        drafts.moved(derived, tmp_path / "mine.gguf")
    assert "-o" in caught.value.hint
    assert (sorted(derived.path.parent.iterdir()), drafts.read(derived.path)) == (before, derived)
    assert [path.name for path in tmp_path.iterdir() if "mine" in path.name] == []
    assert theirs.read_bytes() == b"theirs"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError(errno.EPERM, "no")])
def test_a_move_that_fails_at_its_last_step_changes_nothing(
    derived: Derived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Prevents: the only copy of a draft deleted; the record of a draft that stays replaced."""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"older")
    older = drafts.record(mine, Recipe(quant="Q8_0"), derived.parent.path)
    rename = os.replace

    def failing(source: Path, destination: Path) -> None:
        if destination == mine:
            raise error
        rename(source, destination)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((KeyboardInterrupt, ModelFileError)):
        drafts.moved(derived, mine)
    assert (derived.path.read_bytes(), drafts.read(derived.path)) == (b"fewer", derived)
    assert (mine.read_bytes(), drafts.read(mine)) == (b"older", older)


def test_a_draft_that_is_moved_to_its_own_name_stays(derived: Derived) -> None:
    """Prevents: -o with the draft's name in the cache that deletes it."""
    drafts.moved(derived, derived.path)
    assert (derived.path.read_bytes(), drafts.read(derived.path)) == (b"fewer", derived)


def test_a_hint_about_room_names_what_can_help(derived: Derived, tmp_path: Path) -> None:
    """Prevents: 'write elsewhere with -o' after -o; XDG_CACHE_HOME for a file that is not in the cache."""
    assert "XDG_CACHE_HOME" in drafts.room_hint(derived.path)
    assert "-o" not in drafts.room_hint(derived.path)
    assert "-o" in drafts.room_hint(tmp_path / "mine.gguf")
    assert "XDG_CACHE_HOME" not in drafts.room_hint(tmp_path / "mine.gguf")
