"""Every command in surroundings that are broken: each ends with its answer or with one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.conftest import REPOSITORY, Pair

# For each line of stdin, [world, folder]: runs every command in a fork, with the world made anew for each, and writes
# code and error of each into the folder.
_CHILD = """
import contextlib, io, json, os, sys
import llama_cpp, typer._adapters  # once, not in every fork
from specllama.audit import run
from specllama.bench import run
from specllama.cli import app, audit, bench, chat, check, doctor, draft, errors, models, run, tune
from specllama.llama import crash_test
crash_test.installed = lambda: crash_test.ProbeResult(crash_test.State.OK)
crash_test._started = contextlib.nullcontext
crash_test._end_of = lambda *_: crash_test._End("", None, "")
pair = sys.argv[1:]
commands = {
    "run": ["run", *pair, "--raw", "-n", "2", "--temp", "0", "abc"],
    "chat": ["chat", *pair, "-n", "2"],
    "check": ["check", *pair[:4]],
    "audit": ["audit", "-c", "32", *pair],
    "bench": ["bench", "--prompts", "absent", *pair],
    "tune": ["tune", "-m", "absent"],  # measuring takes long
    "draft": ["draft", "list"],
    "models": ["models", "list"],
    "doctor": ["doctor"],
    "version": ["--version"],
}
PLACES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME")

def live(world):
    here, seen = os.getcwd(), {}
    for name, words in commands.items():
        found = []
        app.report = lambda error: (found.append(f"{errors.told(error)}"), errors.report(error))[1]
        os.chdir(here)
        exec(world)
        try:
            code = app.main(words)
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
        seen[name] = [code, *found]
    with open(f"{here}/found.json", "w") as file:
        json.dump(seen, file)

for line in sys.stdin:
    world, folder = json.loads(line)
    if os.fork() == 0:
        os.chdir(folder)
        for number in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        live(world)
        os._exit(0)
    print(os.wait()[1], flush=True)
"""

WORLDS = {
    "as usual": "",
    "working directory removed": "os.makedirs('gone', exist_ok=True); os.chdir('gone'); os.rmdir(os.getcwd())",
    "stdin is None": "sys.stdin = None",
    "stdin is text in memory": "sys.stdin = io.StringIO('ab')",
    "stdin is closed": "sys.stdin = None; os.close(0)",
    "stdin is closed by its number": "sys.stdin = open(os.open(os.devnull, 0)); os.close(sys.stdin.fileno())",
    "stdin is for writing": "sys.stdin = os.fdopen(os.dup2(os.open(os.devnull, os.O_WRONLY), 0), closefd=False)",
    "stdout is closed": "sys.stdout = None; os.close(1)",
    "stderr is closed": "sys.stderr = None; os.close(2)",
    "nothing is open": "sys.stdin = sys.stdout = sys.stderr = None; os.closerange(0, 3)",
    "stdout and stderr are in memory": "sys.stdout, sys.stderr = io.StringIO(), io.StringIO()",
    "home is a device": "os.environ['HOME'] = '/dev/null'; [os.environ.pop(n, '') for n in PLACES]",
    "state is a file": "open('state', 'w').close(); os.environ['XDG_STATE_HOME'] = os.path.abspath('state')",
    "cache is a file": "open('cache', 'w').close(); os.environ['XDG_CACHE_HOME'] = os.path.abspath('cache')",
}


# The code of each command; no prompt fits the pair in `audit`, and files of `bench` and `tune` are absent.
USUAL = {"run": 0, "chat": 0, "check": 0, "audit": 1, "bench": 1, "tune": 1, "draft": 0, "models": 0, "version": 0}
_MUTE = {"run": 1, "check": 2, "draft": 1, "models": 1, "version": 1}
OTHER = {"stdout is closed": _MUTE, "nothing is open": _MUTE}
ATTENTION = {*OTHER, "home is a device", "cache is a file"}  # of `doctor`; elsewhere the machine decides


@pytest.fixture(scope="module")
def codes_of(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, list[Any]]]]:
    """Runs every command in a world; the exit code of each, and the error it reported."""
    command = [sys.executable, "-c", _CHILD, *pair.options]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def run(world: str) -> dict[str, list[Any]]:
            folder = tmp_path_factory.mktemp("world")
            assert child.stdin is not None
            assert child.stdout is not None
            print(json.dumps([world, str(folder)]), file=child.stdin, flush=True)
            assert child.stdout.readline() == "0\n"
            seen: dict[str, list[Any]] = json.loads((folder / "found.json").read_text())
            return seen

        yield run


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("world", WORLDS)
def test_no_surroundings_change_an_answer_or_are_an_internal_error(
    codes_of: Callable[[str], dict[str, list[Any]]], world: str
) -> None:
    """Prevents: a request to report a bug, or no answer, where a folder was removed or a stream is closed."""
    seen = codes_of(WORLDS[world])
    assert "internal" not in str(seen)
    doctor, *errors = seen.pop("doctor")
    assert doctor == 1 if world in ATTENTION else doctor in (0, 1)
    assert bool(errors) == (world in OTHER)
    assert {name: code for name, (code, *_) in seen.items()} == USUAL | OTHER.get(world, {})
    assert all(bool(code) == bool(errors) for code, *errors in seen.values()), "an error is told once"
