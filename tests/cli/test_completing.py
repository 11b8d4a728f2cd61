"""What the shells are offered for values."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.cli import templates
from specllama.pairs import derived
from tests.cli.conftest import Run, Terminal

PAIR = "qwen2.5-coder-1.5b"


def needs(program: str) -> pytest.MarkDecorator:
    """A mark of tests that run this program."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program}")


@pytest.fixture
def offered(specllama: Run, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The offers for a command line, in the form of a shell."""

    def offer(line: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("_SPECLLAMA_COMPLETE", f"complete_{shell}")
        if shell == "bash":
            words = re.split(" |(?<=[:=])(?=.)|(?=[:=])", line)  # as bash splits them
            monkeypatch.setenv("COMP_WORDS", "\n".join(words))
            monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        else:
            monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
            monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        result = specllama()
        assert (result.code, result.err) == (0, "")
        return [line for line in result.out.splitlines() if line]

    return offer


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("specllama ru", "run"),
        ("specllama run --spec-dr", "--spec-draft-n-max"),
        (f"specllama run --pair {PAIR[:14]}", PAIR),
        (f"specllama check {PAIR[:14]}", PAIR),
        ("specllama models show qwen2.5-coder-0", "qwen2.5-coder-0.5b-instruct-q4_k_m"),
        ("specllama run -m mine", "mine.gguf"),
        ("specllama run -m ./mi", "./mine.gguf"),
        ("specllama run -md small", "smaller-q4"),
        ("specllama draft remove sm", "smaller-q4"),
        ("specllama run --spec-type lookup,dr", "lookup,draft-simple"),
        ("specllama run --verify-rule b", "block"),
        ("specllama bench --verify-rule token,b", "token,block"),
        ("specllama export --to ", "vllm"),
        ("specllama export --to vllm,sg", "vllm,sglang"),
        ("specllama run --color ne", "never"),
        ("specllama run -ctk q8", "q8_0"),
        ("specllama run -hf user/", "user/repo-GGUF"),
        ("specllama run --chat-template ph", "phi3"),
        ("specllama chat --load ta", "talk.json"),
        ("specllama config spec-t", "spec-type"),
        ("specllama config spec-type lo", "lookup"),
        ("specllama config colors f", "full"),
        (f"specllama config pair {PAIR[:14]}", PAIR),
        (f"specllama run --pair={PAIR[:14]}", PAIR),
        ("specllama run --color=", "never"),
        ("specllama run -hf user/repo-GGUF:", "Q4_K_M"),
        ("specllama run -hf user/repo-GGUF:Q", "Q4_K_M"),
        ("specllama run --hf-repo=user/repo-GGUF:Q4", "Q4_K_M"),
        ("specllama run -hf user/repo", "user/repo-GGUF:Q4_K_M"),
        ("specllama run --template su", "summary"),
        ("specllama templates su", "summary"),
        ("specllama batch --input-format js", "jsonl"),
        ("specllama run --no-such x --pair qwen2.5-coder-1", PAIR),
        ("specllama run -mx --pair qwen2.5-coder-1", PAIR),
    ],
)
def test_values_are_offered(offered, monkeypatch, tmp_path: Path, line: str, offers: str) -> None:  # type: ignore[no-untyped-def]
    """Prevents: names that must be typed by heart, and a traceback at the prompt for a half-typed line."""
    for name in (
        *("mine.gguf", "mine.txt", "talk.json", "drafts/smaller-q4.gguf", "config/specllama/templates/summary.toml"),
        "hub/models--user--repo-GGUF/snapshots/1/a-q4_k_m.gguf",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("hub", "drafts", "config"):  # a folder beside the files would leave ./mi to the shell
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path.parent / f"{tmp_path.name}-config"))
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


def test_the_template_of_a_batch_is_no_name(offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Prevents: a prompt template of `run` as an offer that `batch` refuses."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "summary.toml").touch()
    monkeypatch.setattr(templates, "folder", lambda: tmp_path / "templates")
    assert offered("specllama run --template su") == ["summary"]
    assert offered("specllama batch --template su") == []


def test_zsh_and_fish_show_what_a_pair_is(offered) -> None:  # type: ignore[no-untyped-def]
    """Prevents: offers in a form that only bash reads."""
    line = f"specllama run --pair {PAIR[:14]}"
    assert any(PAIR in each and "code on any laptop" in each for each in offered(line, "zsh"))
    assert any(each.startswith(f"{PAIR}\t") for each in offered(line, "fish"))
    line = f"specllama run --pair={PAIR[:14]}"
    assert ['"--pair=qwen' in each for each in offered(line, "zsh")] == [True] * len(offered(line, "fish")) != []
    assert any(each.startswith(f"--pair={PAIR}\t") for each in offered(line, "fish"))
    assert offered("specllama run --file=x", "zsh") == ["_files"]


def test_a_damaged_models_toml_offers_nothing_and_says_nothing(offered, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Prevents: an error message in the middle of a command line."""
    (tmp_path / "models.toml").write_text("[models\n")
    assert offered("specllama run --pair q") == []


SHELLS = {
    "bash": (["--norc", "-i"], 'eval "$(specllama --show-completion bash)"'),
    "zsh": (["-f", "-i"], 'autoload -Uz compinit; compinit -u; eval "$(specllama --show-completion zsh)"'),
    "fish": (["--no-config", "-i"], "specllama --show-completion fish | source"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", [pytest.param(name, marks=needs(name)) for name in SHELLS])
def test_a_shell_completes_with_the_script_that_is_installed(
    shell: str, tmp_path: Path, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: offers that never reach the command line, or are put behind what they should replace."""
    shim = tmp_path / "specllama"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m specllama "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "hub/models--user--repo-GGUF/snapshots/1").mkdir(parents=True)
    (tmp_path / "hub/models--user--repo-GGUF/snapshots/1/a-q4_k_m.gguf").touch()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # a name can be given
    options, start = SHELLS[shell]
    typed = terminal(command=[shell, *options], columns=120, env=env)
    typed.child.sendline(f"{start}; echo re''ady")
    typed.wait_for(lambda seen: "ready" in seen.text.split())
    for line, whole in (
        (f"specllama run --pair={PAIR[:16]}", f"--pair={PAIR}"),
        ("specllama run -hf user/repo-GGUF:", "user/repo-GGUF:Q4_K_M"),
    ):
        typed.child.send(f"\x15{line}\t")  # Ctrl-U: over the line before
        typed.wait_for(lambda seen, whole=whole: whole in seen.text.split())
