"""The help texts in docs/cli.md are generated, and are those of this version."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.cli.app import COMMANDS
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script's `main`."""
    spec = importlib.util.spec_from_file_location("help_texts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(module, "help_text", functools.cache(module.help_text))
    return lambda *args: module.main(list(args))


@pytest.mark.slow
def test_the_manual_shows_this_versions_help_texts(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: a manual with outdated options."""
    text = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"<!-- help: {name} -->" not in text] == []
    assert run("--check") == 0, capsys.readouterr().err


@pytest.mark.slow
def test_blocks_are_filled_and_then_found_right(run: Callable[..., int], tmp_path: Path) -> None:
    """Prevents: a check that never fails; changes outside the blocks."""
    file = tmp_path / "cli.md"
    file.write_text(TEXT, encoding="utf-8")
    assert run("--check", str(file)) == 1
    assert file.read_text(encoding="utf-8") == TEXT
    assert run(str(file)) == 0
    filled = file.read_text(encoding="utf-8")
    assert "stale text" not in filled
    assert "$ specllama run --help-all\nUsage: specllama run [OPTIONS] [PROMPT]\n" in filled
    assert "$ specllama --help-all\nUsage: specllama [OPTIONS] COMMAND" in filled
    assert filled.startswith("# Title\n")
    assert "<!-- /help -->\nbetween\n<!-- help: -->" in filled
    assert max(map(len, filled.splitlines())) <= 100
    assert run("--check", str(file)) == 0
