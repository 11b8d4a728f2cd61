"""Damaged headers: each loads or raises one of our errors. 2,000 in the slow tests, 100,000 in `make test`."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import headerfuzz

ROOT = Path(__file__).resolve().parents[2]
# Opening files is most of the work; in memory it is ten times as fast.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run(seeds: range, n_each: int) -> dict[str, int]:
    """The outcomes of `n_each` damaged headers per seed; each seed runs in its own process."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        command = [sys.executable, "-m", "tests.headerfuzz"]
        children = []
        for seed in seeds:
            place = Path(folder) / str(seed)
            place.mkdir()
            children.append(
                subprocess.Popen(
                    [*command, str(place), str(seed), str(n_each)],
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
def test_two_thousand_damaged_headers_load_or_raise_our_errors() -> None:
    """Prevents: a crash, a traceback or a huge allocation by a damaged file."""
    outcomes = run(range(2), 1000)
    assert sum(outcomes.values()) == 2000
    assert outcomes["sound"] > 100, "too much damage to reach llama.cpp"
    assert outcomes["ModelFileError"] > 1000, "too little damage"


@pytest.mark.slow
def test_twenty_thousand_damaged_headers_load_or_raise_our_errors() -> None:
    """Prevents: the same, for damage that occurs once in ten thousand files."""
    outcomes = run(range(100, 102), 10_000)
    assert sum(outcomes.values()) == 20_000
    assert outcomes["sound"] > 1_000


def test_equal_seeds_give_equal_damage() -> None:
    """Prevents: a crash that cannot be repeated."""
    body = bytearray(range(256)) * 8
    first, again = ([headerfuzz.damage(body, random.Random(3), 2000) for _ in range(20)] for _ in range(2))
    assert first == again
    assert all(damaged != bytes(body) for damaged in first)
