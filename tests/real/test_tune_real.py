"""`specllama tune` on real models: a whole program on a small one, and what a child measures of the default pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base.jsonable import from_plain
from specllama.llama import LoadOptions
from specllama.llama.load_plan import physical_cores
from specllama.pairs.profile import Profile, ProfileKey, Threads
from specllama.tuning import child
from specllama.tuning.child import MeasureJob, Way
from specllama.tuning.traces import acceptance
from tests.real.conftest import DRAFT, SMALL, TARGET

pytestmark = pytest.mark.model
ModelFile = Callable[[str], Path]
# `specllama` with less time for `tune --quick`: the figures are only looked at for their size.
HURRIED = """
import sys
from dataclasses import replace
from specllama.cli.app import main
from specllama.tuning import tune
tune.QUICK = replace(tune.QUICK, seconds=20.0, n_tokens=12)
sys.exit(main(sys.argv[1:]))
"""


def test_quick_tuning_of_a_model_that_drafts_for_itself_is_kept_and_used(model_file: ModelFile, tmp_path: Path) -> None:
    """Prevents: costs in the wrong unit, traces that are off by one, a profile that the next start does not find."""
    models = ("-m", str(model_file(SMALL)), "-md", str(model_file(SMALL)))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", HURRIED, *args, *models]
        env = {**plain, "XDG_STATE_HOME": str(tmp_path)}
        return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    tuned = run("tune", "--quick", "--json")
    assert tuned.returncode == 0, tuned.stderr
    profile = from_plain(Profile, json.loads(tuned.stdout)["profile"])
    assert 0.0005 < profile.step_s < 1.0
    assert 0.5 < profile.costs.draft_cost() < 2.0  # the draft is the target
    assert 1.0 < profile.costs.verify_cost(4) < 6.0
    assert all(each.acceptance > 0.85 for each in profile.classes)  # near-ties part
    assert all(each.speedup >= 0.95 for each in profile.classes)  # a path that slows plain decoding is not taken

    used = run("run", "--temp", "0", "-n", "8", "Count to three.")
    assert used.stderr.startswith("tuned 20"), used.stderr


def test_costs_and_worth_of_the_default_pair_are_what_they_can_be(
    model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a draft's cost or acceptance that belongs to another pass, or to another token, of a real pair."""
    code = "Write a Python function that returns the n-th Fibonacci number."
    monkeypatch.setattr(child, "sample_prompts", lambda: {"code": code})
    key = ProfileKey(model_file(TARGET), LoadOptions(), model_file(DRAFT), LoadOptions())
    n = physical_cores()
    job = MeasureJob(key, Way(), 5.0, (1, 4), 16, threads=Threads(n, n, n))
    found = child.child(job, lambda _what, _share: None)
    assert found.verify is not None
    one, four = (dict(found.verify)[n] for n in (1, 4))
    assert 0.005 < one < 5.0
    assert 1.0 < four / one < 6.0
    assert 0.1 < found.draft[0][1] / one < 3.0  # the draft has 0.44 of the target's bytes
    greedy, sampled = (acceptance([trace]) for trace in found.traces)
    assert greedy > 0.6
    assert sampled > 0.4
