"""The help texts in README.md are generated, and are those of this version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "help_texts.py"
TEXT = """# Title

<!-- help: run -->
stale text
<!-- /help -->
between
<!-- help: -->
<!-- /help -->
"""


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], cwd=REPOSITORY, capture_output=True, text=True)


def test_the_readme_shows_this_versions_help_texts() -> None:
    """A manual that describes options which no longer exist."""
    if "<!-- help:" not in (REPOSITORY / "README.md").read_text(encoding="utf-8"):
        pytest.skip("README.md has no help texts yet")
    result = _run("--check")
    assert result.returncode == 0, result.stderr


def test_blocks_are_filled_and_then_found_right(tmp_path: Path) -> None:
    """A check that never fails, or a script that changes what is not its own."""
    file = tmp_path / "README.md"
    file.write_text(TEXT, encoding="utf-8")
    assert _run("--check", str(file)).returncode == 1
    assert file.read_text(encoding="utf-8") == TEXT
    assert _run(str(file)).returncode == 0
    filled = file.read_text(encoding="utf-8")
    assert "stale text" not in filled
    assert "$ specllama run --help\nUsage: specllama run [OPTIONS] [PROMPT]\n" in filled
    assert "$ specllama --help\nUsage: specllama [OPTIONS] COMMAND" in filled
    assert filled.startswith("# Title\n")
    assert "<!-- /help -->\nbetween\n<!-- help: -->" in filled
    assert max(map(len, filled.splitlines())) <= 100
    assert _run("--check", str(file)).returncode == 0
