"""Compiling the kernels with compilers that fail, hang or are killed: nothing half-built stays, and no process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import BackendError, SpecllamaError
from specllama.kernels import build

pytestmark = [
    pytest.mark.slow,  # starts compilers
    pytest.mark.skipif(bool(build.unsupported()), reason="no kernels on this machine"),
]

NEEDS_SOURCE = 'for word; do case "$word" in *.cpp) [ -f "$word" ] || exit 1; esac; done'
MAKES = f'{NEEDS_SOURCE}; n=; for word; do [ "$n" = -o ] && echo made > "$word"; n=$word; done'
HANGS = 'exec 3> "$PLACE/alive"; (sleep 60; echo left over >&3)'
COMMAND = [sys.executable, "-m", "specllama.kernels"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty cache and a compiler, see `compiler`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    compiler(tmp_path / "cxx", MAKES)
    return tmp_path


def compiler(path: Path, *lines: str) -> None:
    """A shell script in place of a compiler; it notes its arguments."""
    path.write_text("\n".join(("#!/bin/sh", 'echo "$@" >> "$PLACE/calls"', *lines)))
    path.chmod(0o755)


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def left(place: Path) -> list[str]:
    """The names of all files below the kernels' cache, except the lock."""
    found = (place / "cache" / "specllama" / "kernels").rglob("*")
    return [path.name for path in found if not path.is_dir() and path.suffix != ".lock"]


def test_the_library_is_compiled_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a minute at each start; temporary files that stay."""
    assert build.build().read_text() == "made\n"
    n_calls = len(calls(place))
    build.build()
    assert len(calls(place)) == n_calls
    assert left(place) == [build.NAME]
    build.build(again=True)
    assert len(calls(place)) == 2 * n_calls
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() == build.library(), "what is built needs no compiler"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_others_can_change_no_library(place: Path, umask: int) -> None:
    """Prevents: kernels that are compiled and never used, since other users could change them."""
    before = os.umask(umask)
    try:
        made = build.build()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 & (0o022 | umask) for path in (made, *made.parents[:2])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "given"),
    [("a b", "{}/a b"), ("cxx", "{}/cxx -DX -DY='1 2'"), ("c++", None), ("c++", ""), ("open'", "{}/open'")],
)
def test_cxx_is_a_path_or_a_command_with_arguments(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str | None
) -> None:
    """Prevents: `CXX="ccache g++"` that is silently not used."""
    compiler(place / name, MAKES)
    if given is None:
        monkeypatch.delenv("CXX")
    else:
        monkeypatch.setenv("CXX", given.format(shlex.quote(str(place)) if "-D" in given else place))
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    build.build()
    assert all(call.startswith("-DX -DY=1 2 ") == ("-D" in (given or "")) for call in calls(place))


@pytest.mark.parametrize("given", ["no-such-compiler", "no-such-compiler -O2", "'open"])
def test_a_cxx_that_is_not_there_is_named(place: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Prevents: another compiler than the one that was asked for."""
    monkeypatch.setenv("CXX", given)
    with pytest.raises(BackendError, match=given):
        build.build()
    assert left(place) == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["echo one two; echo three four >&2; exit 1"], "three four"),
        (["kill -9 $$"], "ended with"),
        (["yes 'megabytes of warnings' >&2"], "did not end"),
        (["sleep 60"], "did not end"),
        (["sleep 60 &", "exit 1"], "ended with"),
        (['case "$*" in *-shared*) echo lost >&2; exit 1; esac', MAKES], "linked: lost"),
        (['case "$*" in *avx512vnni*path.cpp*) echo "disk full" >&2; exit 1; esac', MAKES], "disk full"),
    ],
)
def test_a_compiler_that_fails_or_hangs_is_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str
) -> None:
    """Prevents: an endless wait, a full memory, half a library, or one that lacks the best instruction set."""
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.5 if reason == "did not end" else 60.0)
    compiler(place / "cxx", *lines)
    with pytest.raises(BackendError, match=reason) as caught:
        build.build()
    assert len(str(caught.value)) < 500
    assert left(place) == []


def test_compilers_that_hang_are_ended_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: compilers that write into a folder while it is removed; a limit of other minutes than it says."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(build.subprocess, "Popen", start)
    monkeypatch.setattr(build, "_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(build, "monotonic", iter((0.0, 3600.0, 3600.0)).__next__)
    with pytest.raises(BackendError, match="60 minutes"):
        build.run_all([["sleep", "5"]] * 2, tmp_path)
    assert [each.returncode for each in started] == [-signal.SIGKILL] * 2


def test_the_last_words_of_a_compiler_are_kept_however_late_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a failure without its reason on a busy machine; pipes that stay open after each build."""
    read, free = build._Running._read, os.pipe()
    for each in free:
        os.close(each)
    monkeypatch.setattr(build._Running, "_read", lambda self: (self._process.wait(), time.sleep(0.2), read(self)))
    failures = build.run_all([["sh", "-c", f"echo {'x' * 999}y >&2; exit {code}"] for code in (0, 1)], tmp_path)
    assert failures == ["", "x" * 299 + "y"]
    try:
        assert os.pipe() == free
    finally:
        for each in free:
            os.close(each)


def test_a_file_that_cannot_be_started_is_no_full_disk(place: Path) -> None:
    """Prevents: 'cannot be written' for a compiler of another machine."""
    (place / "cxx").write_bytes(b"\x7fELF, they say")
    with pytest.raises(BackendError, match="Exec format error"):
        build.build()


def test_what_the_compiler_does_not_know_is_left_out(place: Path) -> None:
    """Prevents: no kernels at all with a compiler of some years ago."""
    compiler(place / "cxx", 'case "$*" in *-mavxvnni*) exit 1; esac', MAKES)
    build.build()
    (link,) = (call for call in calls(place) if "-shared" in call)
    assert [Path(word).name for word in link.split() if word.endswith(".o")] == [
        "avx512vnni.o", "avx2.o", "backend.o", "self_test.o",
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_compilers_and_keeps_nothing(place: Path, number: signal.Signals, code: int) -> None:
    """Prevents: compilers that work on for a minute; a folder that stays after `kill -9`."""
    compiler(place / "cxx", HANGS)
    os.mkfifo(place / "alive")
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, cwd=place) as process:
        try:
            with (place / "alive").open() as alive:
                process.send_signal(number)
                assert alive.read() == ""  # returns when no compiler and no child of one has it open
            assert process.wait(60) == code
        finally:
            process.kill()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    if number != signal.SIGKILL:
        assert left(place) == []
    compiler(place / "cxx", MAKES)
    build.build()
    assert left(place) == [build.NAME]
    assert not (build.library().parent.parent / "building").exists()


def test_what_a_compiler_leaves_in_the_background_ends_with_it(place: Path) -> None:
    """Prevents: processes of a compiler's wrapper that outlive it."""
    compiler(place / "cxx", 'exec 3> "$PLACE/alive"; (sleep 60; echo left over >&3) &', MAKES)
    os.mkfifo(place / "alive")
    alive = os.open(place / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        build.build()
        os.set_blocking(alive, True)
        assert os.read(alive, 1) == b""  # returns when no process has it open
    finally:
        os.close(alive)


def test_two_processes_compile_once(place: Path) -> None:
    """Prevents: half a library of one process that the other links; twice the work."""
    build.build()
    n_calls = len(calls(place))
    build.library().unlink()
    compiler(place / "cxx", "sleep 0.1", MAKES)
    both = [subprocess.Popen(COMMAND, stderr=subprocess.PIPE, cwd=place) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(calls(place)) == 2 * n_calls
    assert left(place) == [build.NAME]


def _is_a_file(kernels: Path) -> None:
    kernels.parent.mkdir(parents=True)
    kernels.touch()


def _holds_a_folder(kernels: Path) -> None:
    (kernels / build.library().parent.name / build.NAME / "x").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [_is_a_file, _holds_a_folder])
def test_a_cache_that_cannot_be_written_is_one_sentence(place: Path, spoil: Callable[[Path], None]) -> None:
    """Prevents: an internal error at `make setup`, `tune` and `doctor --fix`."""
    spoil(place / "cache" / "specllama" / "kernels")
    with pytest.raises(SpecllamaError, match="cannot be written") as caught:
        build.build()
    assert caught.value.hint
    done = subprocess.run(COMMAND, capture_output=True, text=True, cwd=place, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_cache_behind_a_link_is_used(place: Path) -> None:
    """Prevents: kernels that are compiled and never found where the cache lies on another disk."""
    (place / "elsewhere").mkdir()
    (place / "cache").symlink_to(place / "elsewhere")
    assert build.build() == build.library()
    assert list((place / "elsewhere").rglob(build.NAME))


def test_few_old_libraries_are_kept(place: Path) -> None:
    """Prevents: a cache that grows with each version of llama.cpp."""
    kernels = place / "cache" / "specllama" / "kernels"
    for n in range(20):
        (kernels / f"{n:020x}").mkdir(parents=True)
        (kernels / f"{n:020x}" / build.NAME).touch()
        os.utime(kernels / f"{n:020x}" / build.NAME, (n, n))
    (kernels / "other").mkdir()
    (kernels / (20 * "f")).touch()  # of someone else; it is no reason to fail
    made = build.build()
    newest = [f"{n:020x}" for n in range(20 - build._N_KEPT + 1, 20)]
    assert {path.name for path in kernels.iterdir() if path.is_dir()} == {*newest, made.parent.name, "other"}
