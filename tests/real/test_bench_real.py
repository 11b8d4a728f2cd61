"""`specllama bench` on a real model that is its own draft: figures that can only be what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.bench.report import ALL, BenchReport
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model


def test_a_model_that_drafts_for_itself_is_accepted_and_costs_what_it_costs(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Times in the wrong unit, an acceptance of other drafts, a speed that was never reached."""
    model, path = str(model_file(SMALL)), tmp_path / "report.json"
    command = [
        sys.executable, "-m", "specllama", "bench", "-m", model, "-md", model, "--budget", "90s", "-n", "24", "-r", "1",
        "--n-prompts", "2", "--category", "coding,math", "--spec-draft-n-max", "3", "--temp", "0", "-o", str(path),
    ]  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}
    done = subprocess.run(command, env=plain, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "At temperature 0 " in done.stdout
    report = BenchReport.from_json(json.loads(path.read_text(encoding="utf-8")))
    slow, fast = report.rows_of(ALL)
    assert [run.stats.n_emitted for run in report.runs] == [24] * 4
    assert fast.alpha is not None
    assert fast.alpha > 0.85  # near-ties part where blocks are computed otherwise than single tokens
    assert slow.decode_tok_s is not None
    assert fast.decode_tok_s is not None
    assert 1.0 < fast.decode_tok_s < slow.decode_tok_s < 2000.0  # a twin can never pay
    assert fast.predicted is not None
    assert fast.predicted < 1.0
    assert report.costs[0].profile.draft_cost() > 0.5
    assert report.machine.memory_bytes_s is not None
    assert slow.weight_bytes_s is not None
    assert slow.weight_bytes_s < 2.0 * report.machine.memory_bytes_s
    assert slow.rss > 90 << 20
    assert report.picks[0].arm == 0
    found = report.insights[0]
    assert sum(bucket.n_tokens for bucket in found.by_entropy) == 48
