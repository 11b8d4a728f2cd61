"""What the shells are offered for values."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specllama.pairs import derived
from tests.cli.conftest import REPOSITORY, Run

PAIR = "qwen2.5-coder-1.5b"


@pytest.fixture
def offered(specllama: Run, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The offers for a command line, in the form of a shell."""

    def offer(line: str, shell: str = "bash") -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_SPECLLAMA_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        result = specllama()
        assert (result.code, result.err) == (0, "")
        return [line for line in result.out.splitlines() if line]

    return offer


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        (f"specllama run --pair {PAIR[:14]}", PAIR),
        (f"specllama check {PAIR[:14]}", PAIR),
        ("specllama models show qwen2.5-coder-0", "qwen2.5-coder-0.5b-instruct-q4_k_m"),
        ("specllama run -m mine", "mine.gguf"),
        ("specllama run -m ./mi", "./mine.gguf"),
        ("specllama run -md small", "smaller-q4"),
        ("specllama draft remove sm", "smaller-q4"),
        ("specllama run --spec-type lookup,dr", "lookup,draft-simple"),
        ("specllama run --verify-rule b", "block"),
        ("specllama run --color ne", "never"),
        ("specllama run -ctk q8", "q8_0"),
        ("specllama run -hf user/", "user/repo-GGUF"),
        ("specllama run --chat-template ph", "phi3"),
        ("specllama chat --load ta", "talk.json"),
        ("specllama run --no-such x --pair qwen2.5-coder-1", PAIR),
        ("specllama run -mx --pair qwen2.5-coder-1", PAIR),
    ],
)
def test_values_are_offered(offered, monkeypatch, tmp_path: Path, line: str, offers: str) -> None:  # type: ignore[no-untyped-def]
    """Prevents: names that must be typed by heart, and a traceback at the prompt for a half-typed line."""
    for name in ("mine.gguf", "mine.txt", "talk.json", "hub/models--user--repo-GGUF/x", "drafts/smaller-q4.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("hub", "drafts"):  # a folder beside the files would leave ./mi to the shell
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path.parent / f"{tmp_path.name}-hub"))
    monkeypatch.setattr(derived, "paths", lambda: iter([tmp_path / "smaller-q4.gguf"]))
    found = offered(line)
    assert offers in found
    assert "mine.txt" not in found


def test_what_the_shell_does_better_is_left_to_it(offered, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Prevents: a folder after which the shell puts a space, and names that it would not quote."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "with space.gguf").touch()
    assert offered("specllama run -m ./mo") == []
    assert offered("specllama run -m models/wi") == []
    assert offered("specllama run -f mo") == []
    assert offered("specllama run -m zzz/zz") == []


def test_zsh_and_fish_show_what_a_pair_is(offered) -> None:  # type: ignore[no-untyped-def]
    """Prevents: offers in a form that only bash reads."""
    line = f"specllama run --pair {PAIR[:14]}"
    assert any(PAIR in each and "code on any laptop" in each for each in offered(line, "zsh"))
    assert any(each.startswith(f"{PAIR}\t") for each in offered(line, "fish"))


def test_a_damaged_models_toml_offers_nothing_and_says_nothing(offered, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Prevents: an error message in the middle of a command line."""
    (tmp_path / "models.toml").write_text("[models\n")
    assert offered("specllama run --pair q") == []


@pytest.mark.slow
def test_bash_completes_with_the_script_that_is_installed(tmp_path: Path) -> None:
    """Prevents: offers that never reach the command line."""
    shim = tmp_path / "specllama"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m specllama "$@"\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    script = subprocess.run(
        [shim], env={**environment, "_SPECLLAMA_COMPLETE": "source_bash"}, capture_output=True, text=True, check=True
    ).stdout
    asked = f"COMP_WORDS=(specllama run --pair {PAIR[:14]}); COMP_CWORD=3; _specllama_completion specllama"
    shell = ["bash", "--norc", "-c", f"{script}\n{asked}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert PAIR in done.stdout.splitlines()
