"""`specllama bench` that ends badly: an error in the middle, lines that nobody takes, nothing to compare with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from specllama.base.errors import NumericsError
from specllama.base.jsonable import to_plain
from specllama.bench import machine
from specllama.bench import run as core
from specllama.bench.report import BenchReport
from tests.bench_cases import MACHINE, lengths
from tests.benchreports import report
from tests.cli.conftest import Pair
from tests.cli.test_bench import Run

N_RUNS = 3


@pytest.fixture
def args(byte_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A benchmark of a fraction of a second that fails behind the third run."""
    monkeypatch.setattr(machine, "look", lambda: MACHINE)
    monkeypatch.setattr(core, "MOST_COSTS_S", 0.01)
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"q{i}", "category": "coding", "language": "en", "turns": [f"say {i}"]} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--prompts", str(path), "-n", "8", "--spec-draft-n-max", "2", "-r", "1", "--temp", "0"]
    return ["bench", *byte_pair.options, *words]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that compute nonsense from the fourth run on."""
    real, counted = core._Bench._run, [0]

    def run(self: Any, *args: Any) -> Iterator[Any]:
        counted[0] += 1
        if counted[0] > N_RUNS:
            raise NumericsError("NaN among the logits", hint="use another build")
        return (yield from real(self, *args))

    monkeypatch.setattr(core._Bench, "_run", run)


@pytest.mark.usefixtures("failing")
def test_an_error_in_the_middle_is_told_behind_the_report(specllama: Run, args: list[str], tmp_path: Path) -> None:
    """Prevents: a table lost to an error, or one that looks whole and ends with 0."""
    file = tmp_path / "report.json"
    found = specllama(*args, "-o", str(file))
    assert found.code == 1
    assert "This is a part of the plan: an error ended it (NaN among the logits)." in found.out
    assert found.err.rstrip().endswith("error: NaN among the logits\nhint: use another build")
    assert len(BenchReport.from_json(json.loads(file.read_text())).runs) == N_RUNS


def test_lines_that_nobody_takes_still_leave_a_report_in_the_file(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: `| head` throwing away what `--output` was asked to keep, or measuring minutes for nobody."""
    from specllama.cli.bench import command

    n_written = [0]
    real = command.Output.line

    def line(self: Any, text: str = "") -> None:
        n_written[0] += 1
        if n_written[0] > 1 + N_RUNS:
            raise BrokenPipeError(32, "Broken pipe")
        real(self, text)

    monkeypatch.setattr(command.Output, "line", line)
    file = tmp_path / "report.json"
    found = specllama(*args, "--format", "jsonl", "-o", str(file))
    assert found.code == 141
    kept = BenchReport.from_json(json.loads(file.read_text()))
    assert len(kept.runs) >= N_RUNS
    assert kept.partial.startswith("its lines could not be written")
    assert kept.verdict.startswith("This is a part of the plan: its lines could not be written")


@pytest.mark.parametrize("room_elsewhere", [True, False])
def test_a_full_disk_behind_output_costs_no_report(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_elsewhere: bool
) -> None:
    """Prevents: an hour of runs thrown away because one disk was full."""
    elsewhere = partial(NamedTemporaryFile, dir=tmp_path / ("" if room_elsewhere else "nowhere"))
    monkeypatch.setattr("specllama.cli.bench.command.NamedTemporaryFile", elsewhere)
    (tmp_path / "report.json").symlink_to("/dev/full")
    found = specllama(*args, "-o", "report.json")
    assert found.code == 1
    message, hint = found.err.splitlines()[-2:]
    assert message == "error: report.json cannot be written: No space left on device"
    if room_elsewhere:
        (kept,) = tmp_path.glob("specllama-*.json")
        assert hint == f"hint: the full report is in {kept}; make room, then move it"
        text = kept.read_text()
    else:
        assert hint == "hint: the full report is above; make room, then move it"
        text = next(line for line in found.out.splitlines() if line.startswith("{"))
    kept_report = BenchReport.from_json(json.loads(text))
    assert len(kept_report.runs) == kept_report.plan.n_runs > N_RUNS
    assert "plain" in found.out


def test_a_report_compared_with_itself_says_so(specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: "no difference" between a file and itself, taken for a finding."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(to_plain(report())))
    with suppress(OSError):
        os.symlink("a.json", "b.json")
    for other in ("a.json", "./a.json", "b.json"):
        result = specllama("bench", "compare", "a.json", other)
        assert result.code == 0
        assert "a.json is compared with itself" in result.err


def test_a_short_budget_compares_less_where_nobody_said_what() -> None:
    """Prevents: ten settings in one minute, none of them with enough prompts to say anything."""
    from specllama.cli.bench.command import _swept
    from specllama.cli.bench.options import BenchDrafting, BenchRuns, BenchSampling

    def swept(budget: float | None, **asked: Any) -> tuple[object, object]:
        drafting = BenchDrafting(spec_draft_n_max=asked.get("n_max"))
        drafting, sampling = _swept(drafting, BenchSampling(temp=asked.get("temp")), BenchRuns(budget=budget))
        return drafting.spec_draft_n_max, sampling.temp

    assert swept(120.0) == (lengths(0, 4, "auto"), (0.0,))
    assert swept(600.0) == swept(None) == (lengths(0, 2, 4, 8, "auto"), (0.0, 0.7))
    assert swept(120.0, n_max=lengths(3), temp=(1.0, 2.0)) == (lengths(3), (1.0, 2.0))
