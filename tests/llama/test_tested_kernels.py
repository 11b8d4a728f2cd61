"""What is remembered of the test of our kernels; the test itself is a function here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specllama.base.errors import BackendError
from specllama.kernels import build
from specllama.llama import crash_test, library_hash, tested_kernels


@dataclass
class World:
    """A compiled library, and what its test finds: a text, or an error if it cannot be made."""

    library: Path
    finds: str | BackendError = ""
    unsupported: str = ""
    llama_cpp: str = "one build"
    cpu: str = "one CPU"
    tested: list[Path] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        return self.cpu

    def test(self, library: Path) -> str:
        self.tested.append(library)
        if isinstance(self.finds, BackendError):
            raise self.finds
        return self.finds


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "kernels" / build.NAME)
    made.library.parent.mkdir()
    made.library.touch()
    monkeypatch.setattr(build, "library", lambda: made.library)
    monkeypatch.setattr(build, "unsupported", lambda: made.unsupported)
    monkeypatch.setattr(build, "build", lambda: made.library.touch())
    monkeypatch.setattr(crash_test, "kernels_problem", made.test)
    monkeypatch.setattr(crash_test, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(library_hash, "of", lambda folder: made.llama_cpp)
    monkeypatch.setattr(tested_kernels, "this_cpu", lambda: made)
    return made


@pytest.mark.parametrize("finds", ["", "a wrong product"])
def test_kernels_are_tested_once_and_used_if_nothing_is_wrong(world: World, finds: str) -> None:
    """Prevents: kernels that were never tested, or failed; a test of a second at every start."""
    world.finds = finds
    assert tested_kernels.usable() is None, "not tested yet"
    for _ in range(2):
        assert tested_kernels.problem() == finds
    assert world.tested == [world.library]
    assert tested_kernels.usable() == (None if finds else world.library)


@pytest.mark.parametrize("change", [{"llama_cpp": "another build"}, {"cpu": "another CPU"}])
def test_another_build_or_cpu_is_tested_for_itself(world: World, change: dict[str, str]) -> None:
    """Prevents: the verdict of another machine of a cluster with one home, or of llama.cpp before its update."""
    before = {name: getattr(world, name) for name in change}
    assert tested_kernels.problem() == ""
    world.finds = "wrong here"
    for name, value in change.items():
        setattr(world, name, value)
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == "wrong here"
    for name, value in before.items():
        setattr(world, name, value)
    assert tested_kernels.usable() == world.library
    assert tested_kernels.problem() == "", "both are kept"
    assert len(world.tested) == 2


def test_a_test_that_could_not_be_made_is_made_again(world: World) -> None:
    """Prevents: no kernels for ever, because the machine once had no memory."""
    world.finds = BackendError("no memory")
    assert tested_kernels.problem() == "no memory"
    world.finds = ""
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_record_is_no_verdict(world: World, text: str) -> None:
    """Prevents: a traceback, or a library that counts as tested."""
    world.library.with_name("tested.json").write_text(text)
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library


def test_a_verdict_that_cannot_be_kept_is_given(world: World) -> None:
    """Prevents: a traceback where the cache cannot be written."""
    world.library.with_name("tested.json").mkdir()
    assert tested_kernels.problem() == ""
    assert len(world.tested) == 1


def test_what_is_not_built_or_not_for_this_machine_is_told_without_a_test(world: World) -> None:
    """Prevents: a library that is used where it cannot work."""
    assert tested_kernels.problem() == ""
    world.unsupported = "another machine"
    assert (tested_kernels.usable(), tested_kernels.problem()) == (None, "another machine")
    world.unsupported = ""
    world.library.unlink()
    assert (tested_kernels.usable(), tested_kernels.problem()) == (None, tested_kernels.NOT_BUILT)
    assert len(world.tested) == 1


def test_kernels_that_are_made_anew_are_tested_anew(world: World) -> None:
    """Prevents: an old verdict about new kernels; an error for a library that is not there."""
    world.finds = "wrong"
    assert tested_kernels.problem() == "wrong"
    world.library.write_text("old")
    world.finds = ""
    for _ in range(2):
        tested_kernels.renew()
        assert world.library.read_text() == ""
        assert tested_kernels.problem() == ""
        world.library.unlink()
    assert len(world.tested) == 3
    world.library.write_text("kept")
    world.unsupported = "another machine"
    tested_kernels.renew()
    assert world.library.read_text() == "kept"
