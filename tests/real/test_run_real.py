"""`specllama run` on the real default pair: few tokens, whole programs, pipes and a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama.files.catalog import load_catalog
from tests.real.conftest import DRAFT, TARGET

pytestmark = pytest.mark.model

Files = Callable[[str], Path]
CODE = "Write a Python function that returns the n-th Fibonacci number."


def _run(*args: str) -> subprocess.CompletedProcess[bytes]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}
    return subprocess.run(
        [sys.executable, "-m", "specllama", "run", *args], env=plain, stdin=subprocess.DEVNULL, capture_output=True
    )


def _json(*args: str) -> dict[str, Any]:
    result = _run(*args, "--json")
    assert result.returncode == 0, result.stderr.decode()
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


@pytest.fixture
def default_pair(model_file: Files) -> None:
    """The files of the default pair are here."""
    model_file(TARGET)
    model_file(DRAFT)


@pytest.mark.usefixtures("default_pair")
def test_the_default_pair_says_what_the_target_says_and_reports_it() -> None:
    """The command of the README, wrong in any part: other text, no drafts, a record that names other files."""
    args = ("--offline", "--temp", "0", "-n", "16", "--spec-draft-n-max", "4", CODE)
    fast, plain = _json(*args), _json(*args, "--spec-type", "none")
    assert fast["text"] == plain["text"]
    assert fast["acceptance"]["rate"] > 0.5
    assert fast["acceptance"]["steps"] < 10
    assert plain["acceptance"]["steps"] == 16
    pair = load_catalog().pair()
    assert fast["models"]["target"]["sha256"] == pair.target.sha256
    assert fast["models"]["draft"]["sha256"] == pair.draft.sha256
    assert plain["models"]["draft"] is None
    assert 0 < fast["overhead"]["share"] < 0.05  # 1 % is measured on a quiet machine, see benchmarks/
