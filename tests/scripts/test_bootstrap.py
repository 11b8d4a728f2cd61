"""The set-up of the Makefile: the build plan, the wheels, the progress, the environment."""
# ruff: noqa: E402

from __future__ import annotations

import ast
import io
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))  # as for `python scripts/bootstrap.py`

import environment
import progress
import toolchain
import wheelhouse
from environment import Goal, Venv
from progress import Stage, Ticker
from toolchain import Compiler, NoCompiler, Plan, SetupError

GCC = Compiler(cc="cc", cxx="c++", version="gcc 12.2.0")
CLANG = Compiler(cc="cc", cxx="c++", version="clang 16.0.0")


@pytest.fixture
def plan() -> Plan:
    return Plan(
        bindings="0.3.36",
        flags=("-DGGML_NATIVE=ON",),
        environment={},
        compiler="gcc 12.2.0",
        cpu="x86_64 avx2",
        cpu_model="A CPU",
        system="Linux x86_64 glibc 2.36",
        cc="cc",
        cxx="c++",
    )


def program(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_bootstrap_has_no_newer_syntax() -> None:
    """Prevents: an f-string or an annotation in the file that must run on any Python."""
    tree = ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(encoding="utf-8"), feature_version=(3, 4))
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal)
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert not [argument for function in functions for argument in function.args.args if argument.annotation]
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"os", "sys", "subprocess"}


def test_gcc_keeps_the_stores_that_amx_needs() -> None:
    """Prevents: a build that crashes with an illegal instruction on its first decode (docs/design.md, llama.cpp)."""
    flags = toolchain.cmake_flags(GCC, {}, nvcc=None)
    assert "-DCMAKE_C_FLAGS=-fno-tree-dse -fno-dse" in flags
    assert "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse" in flags
    assert not [flag for flag in toolchain.cmake_flags(CLANG, {}, nvcc=None) if "dse" in flag]


def test_the_users_flags_are_kept_and_come_last() -> None:
    """Prevents: ignored CFLAGS; CMAKE_ARGS that cannot override."""
    env = {"CFLAGS": "-O1", "CMAKE_ARGS": "-DGGML_NATIVE=OFF '-DX=a b'"}
    flags = toolchain.cmake_flags(GCC, env, nvcc=None)
    assert "-DCMAKE_C_FLAGS=-fno-tree-dse -fno-dse -O1" in flags
    assert flags[-2:] == ("-DGGML_NATIVE=OFF", "-DX=a b")


def test_cuda_needs_a_compiler_and_a_gpu_and_can_be_switched_off(tmp_path: Path) -> None:
    """Prevents: an hour of CUDA compilation on a machine with the toolkit but no GPU."""
    nvcc = program(tmp_path / "nvcc", "")
    env = {"PATH": str(tmp_path)}
    assert toolchain.find_nvcc(env, lambda: True) == str(nvcc)
    assert toolchain.find_nvcc(env, lambda: False) is None
    assert toolchain.find_nvcc({**env, "SPECLLAMA_CPU": "1"}, lambda: True) is None
    assert toolchain.find_nvcc({**env, "SPECLLAMA_CPU": "0"}, lambda: True) == str(nvcc)
    assert "-DGGML_CUDA=ON" in toolchain.cmake_flags(GCC, {}, nvcc=str(nvcc))


def test_the_compiler_is_identified_by_its_macros(tmp_path: Path) -> None:
    """Prevents: clang taken for GCC because its name is c++, or because it defines __GNUC__."""
    program(tmp_path / "cc", "")
    gcc = "echo '#define __GNUC__ 12'; echo '#define __VERSION__ \"12.2.0\"'"
    program(tmp_path / "c++", gcc)
    found = toolchain.find_compiler({"PATH": str(tmp_path), "CXX": str(tmp_path / "c++")})
    assert (found.version, found.is_gcc) == ("gcc 12.2.0", True)
    program(tmp_path / "c++", gcc + "; echo '#define __clang__ 1'")
    found = toolchain.find_compiler({"PATH": str(tmp_path), "CXX": str(tmp_path / "c++")})
    assert not found.is_gcc


def test_a_missing_compiler_is_one_sentence_with_the_package(tmp_path: Path) -> None:
    """Prevents: two hundred lines of CMake instead of 'install a compiler'."""
    with pytest.raises(NoCompiler) as caught:
        toolchain.find_compiler({"PATH": str(tmp_path)})
    assert "\n" not in str(caught.value)
    with pytest.raises(NoCompiler, match="nonesuch"):
        toolchain.find_compiler({"PATH": os.environ["PATH"], "CXX": "nonesuch -O2"})


def test_a_compiler_may_be_removed_after_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: `make run` that fails without a compiler although it needs none."""
    monkeypatch.setattr(toolchain, "find_nvcc", lambda *_, **__: None)
    with_compiler = toolchain.make_plan(os.environ)
    monkeypatch.setattr(toolchain, "_C_NAMES", ("nonesuch",))
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    with pytest.raises(NoCompiler):
        toolchain.make_plan(env)
    without = toolchain.make_plan(env, remembered=Compiler(cc="", cxx="", version=with_compiler.compiler))
    assert without.key == with_compiler.key
    with pytest.raises(NoCompiler):
        wheelhouse.build(without, tmp_path, Path(sys.executable), {})


def test_the_key_changes_with_the_libraries_only(plan: Plan) -> None:
    """Prevents: a wheel of other flags or another CPU; five minutes of compilation for another path."""
    changes = ({"bindings": "0.3.37"}, {"flags": ("-DGGML_NATIVE=OFF",)}, {"environment": {"LDFLAGS": "-s"}},
               {"compiler": "gcc 13.1.0"}, {"cpu": "x86_64 avx2 avx512f"}, {"system": "Linux glibc 2.31"})  # fmt: skip
    assert len({plan.key, *(replace(plan, **change).key for change in changes)}) == 1 + len(changes)
    assert replace(plan, cpu_model="The same", cc="/usr/bin/cc", cxx="/usr/bin/c++").key == plan.key


def test_the_version_comes_from_the_pin_in_pyproject() -> None:
    """Prevents: compiling another version than pip installs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"llama-cpp-python=={toolchain.bindings_version(text)}"' in text
    with pytest.raises(SetupError):
        toolchain.bindings_version('dependencies = ["llama-cpp-python>=0.3"]')


PIP_THAT_BUILDS = """
for word; do [ "$previous" = --wheel-dir ] && folder=$word; previous=$word; done
echo "Collecting llama-cpp-python"; echo "  [1/2] c++ a.o"; echo "  [2/2] c++ b.o"
echo "the wheel for $CMAKE_ARGS" > "$folder/llama_cpp_python-0.3.36-py3-none-any.whl"
"""
PIP_THAT_FAILS = "echo 'error: the moon is full'; exit 7"


def test_a_wheel_is_found_by_its_own_plan_only(plan: Plan, tmp_path: Path) -> None:
    """Prevents: a wheel of another key."""
    python = program(tmp_path / "python", PIP_THAT_BUILDS)
    wheel = wheelhouse.build(plan, tmp_path / "shelf", python, dict(os.environ))
    assert wheel.read_text() == "the wheel for -DGGML_NATIVE=ON\n"
    assert wheelhouse.find(plan, tmp_path / "shelf") == wheel
    record = json.loads(wheel.with_name("build.json").read_text())
    assert (record["parts"]["compiler"], record["cpu_model"]) == ("gcc 12.2.0", "A CPU")
    other = replace(plan, cpu="x86_64 sse2")
    assert wheelhouse.find(other, tmp_path / "shelf") is None
    wheel.parent.rename(tmp_path / "shelf" / other.key)
    assert wheelhouse.find(other, tmp_path / "shelf") is None, "the folder's name is not enough"


def test_a_damaged_wheel_is_replaced_and_files_of_a_killed_build_are_removed(plan: Plan, tmp_path: Path) -> None:
    """Prevents: installing a truncated wheel; a cache that grows with each killed build."""
    python = program(tmp_path / "python", PIP_THAT_BUILDS)
    wheel = wheelhouse.build(plan, tmp_path, python, dict(os.environ))
    wheel.write_bytes(wheel.read_bytes()[:5])
    assert wheelhouse.find(plan, tmp_path) is None
    (tmp_path / ".building-left" / "x").mkdir(parents=True)
    wheelhouse.build(plan, tmp_path, python, dict(os.environ))
    assert wheelhouse.find(plan, tmp_path) == wheel
    assert not (tmp_path / ".building-left").exists()


def test_a_failed_build_shows_the_end_and_the_path_of_its_log(plan: Plan, tmp_path: Path) -> None:
    """Prevents: only 'exit status 7' after five minutes."""
    python = program(tmp_path / "python", PIP_THAT_FAILS)
    with pytest.raises(SetupError) as caught:
        wheelhouse.build(plan, tmp_path / "shelf", python, dict(os.environ))
    assert "the moon is full" in str(caught.value)
    assert str(tmp_path / "shelf" / f"{plan.key}.log") in str(caught.value)
    assert not [path for path in (tmp_path / "shelf").iterdir() if path.is_dir()]


def test_an_interrupted_build_leaves_no_half_wheel(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a partial wheel after Ctrl-C."""

    def interrupted(command: list[str], **_: object) -> int:
        (Path(command[command.index("--wheel-dir") + 1]) / "half.whl").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(wheelhouse, "run_logged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wheelhouse.build(plan, tmp_path, Path("python"), {})
    assert [path.name for path in tmp_path.iterdir()] == [f"{plan.key}.log"]


def test_the_build_takes_no_ready_made_wheel(plan: Plan, tmp_path: Path) -> None:
    """Prevents: pip using a wheel that it built with other flags."""
    command = wheelhouse.pip_wheel(Path("python"), plan, tmp_path)
    assert command[command.index("--no-binary") + 1] == "llama-cpp-python"
    assert "--no-cache-dir" in command
    users_env = {"CMAKE_ARGS": "-DOLD", "PIP_INDEX_URL": "x", "TMPDIR": "/small"}
    env = wheelhouse.build_env(replace(plan, flags=("-DA=b c", "-DD")), users_env, tmp_path)
    assert env["CMAKE_ARGS"] == "'-DA=b c' -DD"
    assert (env["PIP_INDEX_URL"], env["TMPDIR"]) == ("x", str(tmp_path))
    assert (env["CC"], env["CXX"]) == ("cc", "c++")


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("  [12/340] /usr/bin/c++ -DGGML_USE_CPU ...", Stage("compiling", 12, 340)),
        ("  [ 42%] Building CXX object src/llama.cpp.o", Stage("compiling", 42, 100)),
        ("Collecting llama-cpp-python==0.3.36", Stage("fetching the source")),
        ("  *** Configuring CMake...", Stage("configuring")),
        ("  -- Found Threads: TRUE", None),
    ],
)
def test_the_stage_is_read_from_the_output(line: str, stage: Stage | None) -> None:
    """Prevents: five minutes without progress."""
    assert wheelhouse.stage_of(line) == stage


def test_the_cache_is_in_the_systems_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents: compiled wheels in the checkout, removed with it."""
    assert wheelhouse.cache_home({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "specllama"
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(wheelhouse.sys, "platform", "darwin")
    assert wheelhouse.cache_home({}) == tmp_path / "Library/Caches" / "specllama"
    monkeypatch.setattr(wheelhouse.sys, "platform", "linux")
    assert wheelhouse.cache_home({}) == tmp_path / ".cache" / "specllama"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_few_plain_lines() -> None:
    """Prevents: escape bytes and a thousand lines in a CI log; a silence that looks like a hang."""
    clock, stream = Clock(), io.StringIO()
    ticker = Ticker("llama.cpp", stream=stream, clock=clock)
    for done in range(1, 341):
        clock.now_s += 1
        ticker.show(Stage("compiling", done, 340))
    ticker.finish("built")
    shown = stream.getvalue()
    assert not set("\x1b\r") & set(shown)
    times_s = [60 * int(minutes) + int(seconds) for minutes, seconds in re.findall(r"(\d+):(\d+)$", shown, re.M)]
    assert (times_s[0], times_s[-1]) == (1, 340)
    assert max(later - earlier for earlier, later in itertools.pairwise(times_s)) <= progress.QUIET_S
    assert len(times_s) < 40


def test_a_terminal_gets_one_updating_line_and_a_dumb_one_no_escape_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a screen full of progress lines; a line that wraps and cannot be redrawn."""
    monkeypatch.setenv("COLUMNS", "40")
    for term in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", term)
        stream = Terminal()
        ticker = Ticker("llama.cpp", stream=stream, clock=Clock())
        ticker.show(Stage("compiling", 1, 340))
        ticker.show(Stage("compiling something with a very long name indeed", 2, 340))
        assert ("\x1b" in stream.getvalue()) == (term == "xterm")
        if term == "xterm":
            assert "\n" not in stream.getvalue()
            assert all(len(part.removesuffix("\x1b[K")) < 40 for part in stream.getvalue().split("\r"))


def test_a_commands_whole_output_goes_to_the_log(tmp_path: Path) -> None:
    """Prevents: a lost error message."""
    log = tmp_path / "log"
    stages: list[str] = []

    def stage_of(line: str) -> Stage | None:
        stages.append(line)
        return None

    command = ["sh", "-c", "echo one; echo two >&2; printf three; exit 3"]
    ticker = Ticker("x", stream=io.StringIO())
    assert progress.run_logged(command, log=log, ticker=ticker, stage_of=stage_of) == 3
    assert log.read_text() == "one\ntwo\nthree"
    assert stages == ["one", "two"]
    assert progress.tail(log, n_lines=2) == "    two\n    three"


def test_a_killed_set_up_takes_its_compilers_with_it(tmp_path: Path) -> None:
    """Prevents: minutes of compiling on all cores after `kill -9` of make."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "compiling.py").write_text(
        f"import subprocess; subprocess.run(['sh', '-c', 'exec >{pipe}; echo on; sleep 60; echo left over'])"
    )
    source = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path; import progress; from toolchain import WITH_PARENT\n"
        f"command = [sys.executable, WITH_PARENT, 'compiling']; log = Path({str(tmp_path / 'log')!r})\n"
        "progress.run_logged(command, log=log, ticker=progress.Ticker('x'), stage_of=lambda line: None)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", source], env=env) as set_up, pipe.open() as said:
        assert said.readline() == "on\n"
        set_up.kill()
        assert said.read() == ""  # returns when no compiler has the pipe any more


def test_stopping_the_set_up_stops_the_compilers(tmp_path: Path) -> None:
    """Prevents: compilers that run on in the background after Ctrl-C."""
    pids: list[int] = []

    def interrupt(line: str) -> Stage | None:
        pids.append(int(line))
        raise KeyboardInterrupt

    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with pytest.raises(KeyboardInterrupt):
        progress.run_logged(command, log=tmp_path / "log", ticker=Ticker("x", stream=io.StringIO()), stage_of=interrupt)
    deadline = time.monotonic() + 30
    while _runs(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pids[0])


def _runs(pid: int) -> bool:
    """True while a process runs; a zombie does not count."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


@pytest.fixture
def goal(tmp_path: Path) -> Goal:
    version = "{}.{}".format(*sys.version_info)
    return Goal("key1", "gcc 12.2.0", "hash1", (), version, str(tmp_path / ".venv"))


@pytest.fixture
def venv(tmp_path: Path, goal: Goal) -> Venv:
    """A .venv after a set-up for `goal`."""
    venv = Venv(tmp_path / ".venv")
    program(venv.path / "bin" / "specllama", "")
    program(venv.python, "")
    (venv.path / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {goal.python}.4\n")
    venv.stamp.write_text(json.dumps(goal.__dict__))
    installed_from(venv, "file:///home/someone/.cache/specllama/wheels/key1/llama_cpp_python-0.3.36-py3-none-any.whl")
    return venv


def installed_from(venv: Venv, url: str) -> None:
    """pip's record of the origin of llama-cpp-python."""
    note = venv.path / "lib/python3.11/site-packages/llama_cpp_python-0.3.36.dist-info/direct_url.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"url": url}))


def test_an_environment_holds_its_goal_and_no_other(venv: Venv, goal: Goal) -> None:
    """Prevents: pip running at each start; a stale environment after a pull or a change of flags."""
    assert venv.holds(goal)
    for change in ({"key": "key2"}, {"pyproject": "hash2"}, {"extras": ("dev",)}, {"place": "/else"}):
        assert not venv.holds(replace(goal, **change)), change


def test_a_manual_installation_over_ours_is_noticed(venv: Venv, goal: Goal) -> None:
    """Prevents: a build that crashes accepted because of the stamp."""
    installed_from(venv, "file:///elsewhere/llama_cpp_python-0.3.36-py3-none-any.whl")
    assert not venv.holds(goal)


def test_only_another_build_is_reinstalled(venv: Venv, goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: old libraries that stay because the version number is the same."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(Venv, "_pip", lambda self, ticker, *arguments: calls.append(arguments))
    monkeypatch.setattr(Venv, "_pip_version", lambda self: (24, 0))
    venv.install(replace(goal, extras=("dev",)), Path("/shelf/key1/x.whl"))
    assert calls == [("install", "--editable", f"{ROOT}[dev]")]
    calls.clear()
    venv.install(replace(goal, key="key2"), Path("/shelf/key2/x.whl"))
    assert calls[0] == ("install", "--no-deps", "--force-reinstall", "/shelf/key2/x.whl")


def test_a_failed_installation_has_no_stamp(venv: Venv, goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a partial installation accepted because of the stamp."""
    monkeypatch.setattr(environment, "run_logged", lambda *_, **__: 1)
    with pytest.raises(SetupError, match="pip install failed"):
        venv.install(goal, Path("x.whl"))
    assert not venv.holds(goal)


@pytest.mark.parametrize(
    ("harm", "remade"),
    [
        (lambda venv: None, False),
        (lambda venv: venv.python.unlink(), True),
        (lambda venv: (venv.path / "pyvenv.cfg").write_text("version = 3.8.1\n"), True),
        (lambda venv: (venv.path / "pyvenv.cfg").unlink(), True),
        (lambda venv: venv.stamp.write_text(venv.stamp.read_text().replace(".venv", "moved")), True),
    ],
)
def test_only_a_venv_that_cannot_run_is_made_again(
    harm: Callable[[Venv], object], remade: bool, venv: Venv, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a broken .venv after an upgrade of Python or a move of the folder; a good one removed."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(environment.subprocess, "run", run)
    harm(venv)
    venv.create(goal)
    again = [str(environment.base_python()), "-m", "venv", "--clear", str(venv.path)]
    assert commands == ([again] if remade else [])


def test_an_environment_is_made_again_by_the_python_behind_it() -> None:
    """Prevents: an environment that points to itself because it replaced its own Python."""
    base = environment.base_python()
    assert Path(sys.prefix) not in base.parents or sys.prefix == sys.base_prefix
    code = "import sys; print(sys.prefix == sys.base_prefix, *sys.version_info[:2])"
    done = subprocess.run([base, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", *map(str, sys.version_info[:2])]


def test_the_extras_of_an_earlier_recipe_are_kept(venv: Venv, goal: Goal, plan: Plan) -> None:
    """Prevents: a new installation for `make run` after `make test`, and another one for `make test`."""
    venv.stamp.write_text(json.dumps({**goal.__dict__, "extras": ["dev"]}))
    assert environment._goal(plan, venv, ()).extras == ("dev",)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_second_start_neither_installs_nor_waits(checkout: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a second `make run` that is slow."""
    steps: list[str] = []
    monkeypatch.setattr(environment, "make_plan", lambda env, remembered: plan)
    monkeypatch.setattr(environment, "_wheel", lambda *_: steps.append("wheel") or Path("x.whl"))
    monkeypatch.setattr(Venv, "create", lambda self, goal: steps.append("create") or self.path.mkdir())
    monkeypatch.setattr(Venv, "_pip", lambda self, ticker, *arguments: steps.append("pip"))

    environment.prepare(os.environ, extras=())
    assert steps[:2] == ["create", "wheel"]
    venv = Venv(checkout / ".venv")
    program(venv.path / "bin" / "specllama", "")
    installed_from(venv, f"file:///wheels/{plan.key}/x.whl")
    steps.clear()
    monkeypatch.setattr(environment, "_alone", lambda env: pytest.fail("took the lock"))
    environment.prepare(os.environ, extras=())
    assert steps == []


def test_two_set_ups_at_once_go_one_after_the_other(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents: two terminals that compile at once and overwrite each other's files."""
    order: list[str] = []

    def second() -> None:
        with environment._alone(os.environ):
            order.append("second")

    with environment._alone(os.environ):
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 60
        while "waiting" not in capsys.readouterr().err and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join(timeout=60)
    assert order == ["first", "second"]


def test_a_problem_is_a_sentence_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents: a traceback for a missing compiler."""

    def fail(*_: object, **__: object) -> None:
        raise NoCompiler("no compiler")

    monkeypatch.setattr(environment, "prepare", fail)
    monkeypatch.setattr(environment.signal, "signal", lambda *_: None)
    assert environment.main([]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specllama: no compiler")


def make_run(folder: Path, prompt: str, *, program_text: str) -> subprocess.CompletedProcess[str]:
    """`make run` with a fake specllama and an stdin that stays open."""
    program(folder / "bin" / "specllama", program_text)
    words = ["run", f"PROMPT={prompt}", f"BIN={folder}/bin", "PYTHON=true", "ARGS=-q"]
    read_end, write_end = os.pipe()
    try:
        return subprocess.run(
            ["make", "-f", str(ROOT / "Makefile"), *words],
            cwd=folder,
            stdin=read_end,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        )
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    "prompt", ["two words", 'it\'s "$HOME" `x` # no', "$(shell touch gone-wrong)", "--help", "two\nlines", "100 %", ""]
)
def test_a_prompt_reaches_the_program_as_it_was_written(prompt: str, tmp_path: Path) -> None:
    """Prevents: make or the shell expanding, cutting or running a prompt."""
    done = make_run(tmp_path, prompt, program_text='for word; do printf "%s\\0" "$word"; done')
    assert done.stdout.split("\0")[:-1] == ["run", "-q", "--", prompt]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_make_run_does_not_wait_for_an_open_stdin(tmp_path: Path) -> None:
    """Prevents: `make run` that hangs under a program with an open pipe, because `run` reads stdin."""
    assert make_run(tmp_path, "x", program_text="cat; echo read to the end").stdout == "read to the end\n"
