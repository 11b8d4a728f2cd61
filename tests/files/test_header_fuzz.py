"""Damaged headers: each loads or raises one of our errors, in the library and in the commands."""

from __future__ import annotations

import ast
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import headerfuzz

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS allows no fork once Metal is loaded")
ROOT = Path(__file__).resolve().parents[2]
# Opening files is most of the work; in memory it is ten times as fast.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run(seeds: range, n_each: int, *mode: str) -> dict[str, int]:
    """The outcomes of `n_each` damaged headers per seed; each seed runs in its own process. mode: see headerfuzz."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        command = [sys.executable, "-m", "tests.headerfuzz"]
        children = []
        for seed in seeds:
            place = Path(folder) / str(seed)
            place.mkdir()
            children.append(
                subprocess.Popen(
                    [*command, str(place), str(seed), str(n_each), *mode],
                    cwd=ROOT,
                    env={**os.environ, "XDG_CACHE_HOME": str(place)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        total: dict[str, int] = {}
        told = [child.communicate() for child in children]
        for seed, child, (out, err) in zip(seeds, children, told, strict=True):
            assert child.returncode == 0, f"seed {seed}: exit code {child.returncode}\n{err[-2000:]}"
            for name, n in ast.literal_eval(out).items():
                total[name] = total.get(name, 0) + n
    return total


@pytest.mark.slow
@ON_LINUX
def test_thousands_of_damaged_headers_load_or_raise_our_errors() -> None:
    """Prevents: a traceback, a huge allocation or a long wait by a damaged file."""
    outcomes = run(range(100, 102), 2_000)
    assert sum(outcomes.values()) == 4_000
    assert outcomes["sound"] > 200, "too much damage to reach llama.cpp"
    assert outcomes["ModelFileError"] > 2_000, "too little damage"
    assert outcomes.get("SIGABRT", 0) < 20, "the header check has become blind"


@pytest.mark.slow
@ON_LINUX
def test_the_commands_survive_damaged_files() -> None:
    """Prevents: a signal or a traceback of `check` or `run`, or a file that fits and does not run."""
    outcomes = run(range(200, 202), 50, "commands")
    assert sum(outcomes.values()) == 100
    assert outcomes["check 0, run 0"] > 5


@pytest.mark.slow
@ON_LINUX
def test_the_program_itself_answers_in_time(tmp_path: Path) -> None:
    """Prevents: a limit that holds in the forks of the other tests and not in the children that the program starts."""
    bodies, rng = headerfuzz.seeds(tmp_path), random.Random(300)
    command = [sys.executable, "-m", "specllama", "check", "-m", "case.gguf", "-md", "case.gguf"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    times = []
    for damaged in (bytes(bodies[0]), *(headerfuzz.other_values(bytes(body), rng) for body in bodies[1:-1:2])):
        (tmp_path / "case.gguf").write_bytes(damaged)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert 0 <= done.returncode <= 2
        assert b"Traceback" not in done.stderr
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert max(times[1:]) < times[0] + headerfuzz.MOST_S, "the first file is sound"


def test_equal_seeds_give_equal_damage() -> None:
    """Prevents: a crash that cannot be repeated."""
    body = bytearray(range(256)) * 8
    first, again = ([headerfuzz.damage(body, random.Random(3), 2000) for _ in range(20)] for _ in range(2))
    assert first == again
    assert all(damaged != bytes(body) for damaged in first)
