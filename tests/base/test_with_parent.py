"""A module in a process that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specllama.base import with_parent

SLEEPER = """
import os, sys, time
os.write(1, b"child\\n" if os.fork() else b"grandchild\\n")
time.sleep(60)
print("left over")
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


def test_a_killed_parent_takes_the_module_and_its_children_with_it(tmp_path: Path) -> None:
    """Prevents: pip, or a compiler, that works on for minutes after `kill -9` of the program that started it."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-c", PARENT, with_parent.__file__, "sleeper"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as parent:
        assert parent.stdout is not None
        assert sorted(parent.stdout.readline() for _ in range(2)) == ["child\n", "grandchild\n"]
        parent.kill()
        assert parent.stdout.read() == ""  # returns when no process has the pipe any more


def test_a_command_that_a_signal_ends_is_told_as_a_shell_does(tmp_path: Path) -> None:
    """Prevents: exit code 247, and no word why a compiler ended."""
    command = [sys.executable, with_parent.__file__, "--", "sh", "-c", "kill -9 $$"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(60) == 128 + 9
        assert process.stderr is not None
        assert "signal 9" in process.stderr.read()


@pytest.mark.parametrize("code", [0, 7])
def test_the_module_runs_as_if_python_had_started_it(tmp_path: Path, code: int) -> None:
    """Prevents: lost arguments or exit codes; a module of ours or of the working directory."""
    (tmp_path / "echo.py").write_text(
        "import importlib.util, os, sys\n"
        "names = [name for name in ('disk', 'with_parent', 'stray') if importlib.util.find_spec(name)]\n"
        "print(sys.argv[1:], names, os.read(0, 1), __name__)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    (work / "stray.py").touch()
    command = [sys.executable, with_parent.__file__, "echo", str(code), "-x"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=work, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"['{code}', '-x'] [] b'' __main__\n"
        assert process.wait() == code
