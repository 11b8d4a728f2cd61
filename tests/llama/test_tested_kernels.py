"""What is remembered of the test of our kernels, and libraries that are damaged, foreign or replaced.

In a `World` the test itself is a function.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy.linalg
import pytest

from specllama.base import child, disk
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
    made = World(tmp_path / "cache" / "kernels" / "key" / build.NAME)
    made.library.parent.mkdir(mode=0o755, parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(child, "known", {})
    made.library.touch(mode=0o644)
    monkeypatch.setattr(build, "library", lambda: made.library)
    monkeypatch.setattr(build, "unsupported", lambda: made.unsupported)
    monkeypatch.setattr(build, "build", lambda again: made.library.write_text(f"build {len(made.tested)}"))
    monkeypatch.setattr(crash_test, "kernels_problem", made.test)
    monkeypatch.setattr(crash_test, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(library_hash, "of", lambda folder: {tmp_path: made.llama_cpp}[folder])
    monkeypatch.setattr(tested_kernels, "this_cpu", lambda: made)
    return made


@pytest.mark.parametrize("finds", ["", "a wrong product"])
def test_kernels_are_tested_once_and_used_if_nothing_is_wrong(world: World, finds: str) -> None:
    """Prevents: kernels that were never tested, or failed; a test of a second at every start."""
    world.finds = finds
    assert tested_kernels.usable() is None, "not tested yet"
    for _ in range(2):
        assert tested_kernels.problem() == finds
        child.known.clear()  # as in another process
    assert world.tested == [world.library]
    assert tested_kernels.usable() == (None if finds else world.library)


def test_a_library_of_another_user_is_used_only_if_that_is_the_administrator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: code of another user in this process; no kernels where root has compiled them for all."""
    owner = world.library.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert (tested_kernels.problem() == "") == (owner == 0)
    monkeypatch.setattr(crash_test, "library_folder", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert tested_kernels.problem() == "", "without llama.cpp as well"


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
    """Prevents: no kernels any more, because the machine once had no memory."""
    world.finds = BackendError("no memory")
    assert tested_kernels.problem() == "no memory"
    world.finds = ""
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_record_is_no_verdict(world: World, text: str) -> None:
    """Prevents: a traceback, or a library that counts as tested."""
    place = disk._record_of(tested_kernels._TESTED, [world.library])
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library


def test_a_verdict_that_cannot_be_kept_is_given(world: World) -> None:
    """Prevents: a traceback where the cache cannot be written, or `--kernels on` that computes with llama.cpp's."""
    disk._record_of(tested_kernels._TESTED, [world.library]).mkdir(parents=True)
    assert tested_kernels.problem() == ""
    assert list(child.known.values()) == [""], "for children"
    assert len(world.tested) == 1
    assert tested_kernels.usable() == world.library


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
    world.finds = ""
    for n in (1, 2):
        tested_kernels.renew()
        assert world.library.read_text() == f"build {n}"
        assert tested_kernels.problem() == ""
        world.library.unlink()
    assert len(world.tested) == 3


def test_a_library_that_changes_after_its_test_is_tested_again(world: World) -> None:
    """Prevents: code in this process that was never tested, since the test is remembered by the name alone."""
    world.library.write_bytes(b"code")
    assert tested_kernels.problem() == ""
    before = world.library.stat()
    world.library.write_bytes(b"CODE")
    os.utime(world.library, ns=(before.st_atime_ns, before.st_mtime_ns))
    child.known.clear()  # another process
    assert tested_kernels.usable() is None
    assert tested_kernels.problem() == ""
    assert len(world.tested) == 2
    assert tested_kernels.usable() == world.library


def test_a_cache_that_a_group_can_change_holds_the_library(world: World) -> None:
    """Prevents: no kernels where the folders of a user are made with umask 002: `build` protects its own two only."""
    world.library.parents[2].chmod(0o775)
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("n_above", [0, 1, 2])
def test_a_library_that_others_can_change_is_not_loaded(world: World, n_above: int, mode: int) -> None:
    """Prevents: code of another user in this process, by a cache in a folder for all."""
    assert tested_kernels.problem() == ""
    path = (world.library, *world.library.parents)[n_above]
    path.chmod(path.stat().st_mode | mode)
    assert "other users" in tested_kernels.problem()
    assert tested_kernels.usable() is None
    path.chmod(path.stat().st_mode & ~mode)
    assert tested_kernels.problem() == ""
    assert tested_kernels.usable() == world.library
    if os.geteuid() == 0:
        os.chown(path, 1234, -1)
        assert "other users" in tested_kernels.problem()


NEEDS_COMPILER = pytest.mark.skipif(bool(build.unsupported() or not build.compiler()), reason="no kernels here")
OTHER_ABI = """
extern "C" __attribute__((visibility("default"))) const char *specllama_kernels_self_test(const char *) { return ""; }
extern "C" __attribute__((visibility("default"))) const char *specllama_kernels_attach(long x) { return (char *)x; }
"""
FOREIGN = Path(numpy.linalg._umath_linalg.__file__)


def _other_abi(path: Path) -> None:
    source = path.with_suffix(".cpp")
    source.write_text(OTHER_ABI)
    subprocess.run([*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(path)], check=True)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("text\n"),
        lambda path: path.write_bytes(b""),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("nowhere"),
        lambda path: shutil.copy(FOREIGN, path),
        lambda path: path.write_bytes(FOREIGN.read_bytes()[:9000]),
        _other_abi,
    ],
)
def test_what_is_not_the_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    """Prevents: a crash of every command by a file in the cache; a second for its test at each start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.library().parent.mkdir(parents=True)
    make(build.library())
    assert tested_kernels.problem()
    assert tested_kernels.usable() is None
    monkeypatch.setattr(crash_test, "kernels_problem", lambda _path: pytest.fail("tested again"))
    assert tested_kernels.problem()


@NEEDS_COMPILER
def test_compiling_again_that_fails_keeps_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: `doctor --fix` that leaves no kernels where no compiler is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library().parent.mkdir(parents=True)
    build.library().touch()
    with pytest.raises(BackendError):
        tested_kernels.renew()
    assert build.library().is_file()
