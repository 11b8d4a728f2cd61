"""The scripts that need models or programs of llama.cpp are at least complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_script_can_be_imported() -> None:
    """Prevents: a script that uses a function which another one no longer has."""
    names = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.py")))
    subprocess.run([sys.executable, "-c", f"import {names}"], cwd=BENCHMARKS, check=True)
