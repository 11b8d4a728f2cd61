"""When a derived draft's parent is read to see whether it changed: not while somebody waits for an answer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.base import disk as storage
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived, Parent, Recipe, stale


@pytest.fixture
def derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Derived:
    """A draft and its parent, whose sum is known to the record alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parent, draft = tmp_path / "parent.gguf", tmp_path / "draft.gguf"
    parent.write_bytes(b"weights")
    draft.write_bytes(b"fewer")
    made = Parent(parent, storage.checksum(parent), drafts._stamp(parent))
    storage.forget_checksum(parent)
    return Derived(path=draft, recipe=Recipe(), parent=made, n_bytes=5, sha256="", build="", made="now")


def test_no_parent_is_read_before_an_answer(derived: Derived, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: gigabytes of whatever file a record names being hashed in silence, before anything else is said."""
    monkeypatch.setattr(storage, "checksum", lambda *_: pytest.fail("hashed"))
    assert stale(derived) == stale(derived, at_once=True) == ""  # size and time are as they were
    os.utime(derived.parent.path, ns=(1, 1))
    assert stale(derived, at_once=True) == ""  # as of a copy: nobody knows without reading it
    old = replace(derived, parent=replace(derived.parent, stamp=()))
    assert stale(old, at_once=True) == ""
    derived.parent.path.write_bytes(b"other weights")
    assert stale(derived, at_once=True) == "its parent parent.gguf has changed since"


def test_a_changed_parent_is_noticed_by_its_content_where_there_is_time(derived: Derived) -> None:
    """Prevents: a parent of the same length that passes for the old one; or a copy of it that does not."""
    os.utime(derived.parent.path, ns=(1, 1))
    assert stale(derived) == ""
    derived.parent.path.write_bytes(b"WEIGHTS")
    assert stale(derived) == "its parent parent.gguf has changed since"
    assert stale(derived, at_once=True) == "its parent parent.gguf has changed since"  # the sum is known by now


def test_the_stamp_is_kept_in_the_record_and_old_records_are_read(derived: Derived) -> None:
    """Prevents: drafts of an earlier version that can no longer be used."""
    data = derived.to_json()
    assert Derived.from_json(data, derived.path) == derived
    parent = data["parent"]
    assert isinstance(parent, dict)
    del parent["stamp"]
    assert Derived.from_json(data, derived.path).parent.stamp == ()
