"""Damaged headers: every one is a model or a sentence. 2,000 of them here; 100,000 where `make test` runs."""

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
# Opening files is most of the work; in memory it takes a tenth of the time.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run(seeds: range, n_each: int) -> dict[str, int]:
    """The outcomes of `n_each` damaged headers a seed, each seed in a process of its own, all at once."""
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
def test_two_thousand_damaged_headers_are_each_a_model_or_a_sentence() -> None:
    """Prevents: a crash, a traceback or an allocation bomb from a damaged file."""
    outcomes = run(range(2), 1000)
    assert sum(outcomes.values()) == 2000
    assert outcomes["sound"] > 100, "too much damage to reach llama.cpp"
    assert outcomes["ModelFileError"] > 1000, "too little damage to mean anything"


@pytest.mark.model  # it needs none, but a minute
def test_a_hundred_thousand_damaged_headers_are_each_a_model_or_a_sentence() -> None:
    """Prevents: the same, for damage that is met once in ten thousand files."""
    outcomes = run(range(100, 102), 50_000)
    assert sum(outcomes.values()) == 100_000
    assert outcomes["sound"] > 5_000


def test_the_damage_is_the_same_again() -> None:
    """Prevents: a crash that nobody can repeat."""
    body = bytearray(range(256)) * 8
    first, again = ([headerfuzz.damage(body, random.Random(3), 2000) for _ in range(20)] for _ in range(2))
    assert first == again
    assert all(damaged != bytes(body) for damaged in first)
