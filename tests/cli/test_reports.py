"""Reports that took minutes, where stdout cannot take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base.errors import SpecllamaError
from specllama.cli import reports
from specllama.cli.screen.output import open_output
from tests.cli.conftest import Pair
from tests.cli.test_tune import CALM

_BENCH = ["-n", "8", "--spec-draft-n-max", "2", "--temp", "0", "-r", "1", "--prompts", "p.jsonl"]
COMMANDS = {
    "bench": [*_BENCH, "--format", "json"],
    "bench lines": [*_BENCH, "--format", "jsonl"],
    "audit": ["--quick", "--json", "--top-k", "4", "--spec-draft-n-max", "2", "--spec-type", "lookup"],
    "tune": ["--quick", "--json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">/dev/full", "| true"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_stdout_that_cannot_be_written_loses_no_report(
    short_pair: Pair, tmp_path: Path, command: str, redirection: str
) -> None:
    """Prevents: minutes of measuring lost to a full disk, or to a reader that has ended."""
    kept = tmp_path / "kept"
    kept.mkdir()
    rows = [{"id": f"q{i}", "category": "coding", "language": "en", "turns": [f"say {i}"]} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [command.split()[0], *short_pair.options, *COMMANDS[command]]
    shell = ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "sh", sys.executable, "-c", CALM, *words]
    env = {**os.environ, "TMPDIR": str(kept), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=env)
    assert found.returncode == (1 if "full" in redirection else 141), found.stderr
    assert found.stdout == ""
    hint = found.stderr.splitlines()[-1]
    assert hint.startswith("hint: ")
    place = Path(hint.rpartition(" in ")[2])
    assert place.is_relative_to(tmp_path / "state" if command == "tune" else kept)
    lines = place.read_text().splitlines() if command == "bench lines" else [place.read_text()]
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_without_room_in_the_folder_for_temporary_files_the_report_is_in_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a report lost because one disk is full."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    error = SpecllamaError("stdout cannot be written", hint="first")
    with pytest.raises(SpecllamaError) as caught, reports.not_lost(open_output(), ".md", lambda: "the report"):
        raise error
    (place,) = (tmp_path / "state" / "specllama").glob("specllama-*.md")
    assert place.read_text() == "the report\n"
    assert caught.value.hint == f"first; what was measured is in {place}"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.symlink_to("nowhere/file"), "there is no such folder"),
        (lambda path: path.symlink_to("folder"), "it is a folder"),
        (lambda path: path.write_text("before"), ""),
        (lambda path: path.symlink_to("/dev/null"), ""),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before_the_minutes(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    """Prevents: minutes of measuring for a report that has no place."""
    (tmp_path / "folder").mkdir()
    make(tmp_path / "report")
    if not reason:
        assert reports.writable("-o", "report") == Path("report")
        return
    with pytest.raises(SpecllamaError) as caught:
        reports.writable("-o", "report")
    assert str(caught.value) == f"-o report cannot be written: {reason}"
