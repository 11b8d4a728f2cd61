"""`specllama tune --quick` on the real default pair: whole programs, real costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.pairs.profile import Profile
from tests.real.conftest import DRAFT, TARGET

pytestmark = pytest.mark.model


def test_quick_tuning_of_the_default_pair_finds_costs_and_worth_and_is_used(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Costs in the wrong unit, traces that are off by one, a profile that the next start does not find."""
    for name in (TARGET, DRAFT):
        model_file(name)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specllama", *args]
        env = {**plain, "XDG_STATE_HOME": str(tmp_path)}
        return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    tuned = run("tune", "--quick", "--offline", "--json")
    assert tuned.returncode == 0, tuned.stderr
    profile = Profile.from_json(json.loads(tuned.stdout)["profile"])
    assert 0.005 < profile.step_s < 5.0
    assert 0.1 < profile.costs.draft_cost() < 3.0  # the draft has 0.44 of the target's bytes
    assert 1.0 < profile.costs.verify_cost(4) < 6.0
    accepted = {(each.name, each.greedy): each.acceptance for each in profile.classes}
    assert accepted["code", True] > 0.6
    assert accepted["code", False] > accepted["question", False] - 0.1
    assert all(each.speedup >= 0.95 for each in profile.classes)  # a path that slows plain decoding is not taken

    used = run("run", "--offline", "--temp", "0", "-n", "8", "Count to three.")
    assert used.stderr.startswith("tuned 20"), used.stderr
