"""Install specllama and the llama.cpp build of this machine in .venv, unless it is up to date."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import wheelhouse
from progress import Stage, Ticker, run_logged, tail
from toolchain import ROOT, WITH_PARENT, Compiler, Plan, SetupError, make_plan

OLDEST_PIP = (23, 1)  # older versions cannot install this project as editable, or build wheels without output


@dataclass(frozen=True)
class Goal:
    """The required state of .venv. It is written into .venv at the end, so that a later start only compares."""

    key: str  # of the llama.cpp build
    compiler: str
    pyproject: str  # hash: a changed dependency or entry point requires a new installation
    extras: tuple[str, ...]
    python: str
    place: str  # the path of .venv, which cannot be moved


class Venv:
    """The virtual environment in the checkout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / "specllama-setup.json"
        self.log = path / "specllama-setup.log"

    def made_for(self) -> Goal | None:
        """The goal of the last installation, if it can be read."""
        try:
            facts = json.loads(self.stamp.read_text(encoding="utf-8"))
            return Goal(**{**facts, "extras": tuple(facts["extras"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def holds(self, goal: Goal) -> bool:
        """True if the environment is up to date."""
        return (
            self.made_for() == goal and (self.path / "bin" / "specllama").exists() and self.installed_key() == goal.key
        )

    def installed_key(self) -> str | None:
        """The key of the installed llama.cpp build, by pip's record of the wheel, which also shows a manual install."""
        for note in self.path.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info/direct_url.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return Path(json.loads(note.read_text(encoding="utf-8"))["url"]).parent.name
        return None

    def create(self, goal: Goal) -> None:
        """Make the environment, also again if its Python differs or does not run, or if it was moved."""
        made_for = self.made_for()
        moved = made_for is not None and made_for.place != goal.place
        if self.python.exists() and self._version() == goal.python and not moved:
            return
        missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
        if missing:
            raise SetupError(
                f"this Python cannot make virtual environments ({', '.join(missing)} is missing); "
                f"on Debian and Ubuntu: sudo apt install python{goal.python}-venv"
            )
        _say(f"making {self.path.name} with Python {sys.version.split()[0]}")
        command = [str(base_python()), "-m", "venv", "--clear", str(self.path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise SetupError(f"{' '.join(command)} failed:\n{done.stdout.rstrip()}")

    def install(self, goal: Goal, wheel: Path) -> None:
        """Install the llama.cpp build and specllama (editable) with their dependencies."""
        self.stamp.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)  # it may be a link
        self.log.touch()
        ticker = Ticker("Python packages")
        if self._pip_version() < OLDEST_PIP:
            self._pip(ticker, "install", "--upgrade", "pip>=" + ".".join(map(str, OLDEST_PIP)))
        if self.installed_key() != goal.key:
            self._pip(ticker, "install", "--no-deps", "--force-reinstall", str(wheel))
        extras = f"[{','.join(goal.extras)}]" if goal.extras else ""
        self._pip(ticker, "install", "--editable", f"{ROOT}{extras}")
        ticker.finish("installed")
        self.stamp.write_text(json.dumps(goal.__dict__, indent=2) + "\n", encoding="utf-8")

    def _pip(self, ticker: Ticker, *arguments: str) -> None:
        # Python compiles what it imports; pip would compile all 5,000 files, which takes as long as fetching them.
        command = [
            *(str(self.python), WITH_PARENT, "pip", *arguments),
            *("--no-compile", "--no-input", "--progress-bar", "off"),
        ]
        # PIP_USER would stop pip in a virtual environment.
        env = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        try:
            status = run_logged(command, log=self.log, ticker=ticker, stage_of=_pip_stage, env=env)
        except BaseException:
            ticker.finish("stopped")
            raise
        if status:
            ticker.finish("failed")
            raise SetupError(f"pip {arguments[0]} failed; the end of its log:\n{tail(self.log)}\nlog: {self.log}")

    def _version(self) -> str:
        with contextlib.suppress(OSError):
            found = re.search(r"^version\S* *= *(\d+\.\d+)", (self.path / "pyvenv.cfg").read_text(), re.MULTILINE)
            return found[1] if found else ""
        return ""

    def _pip_version(self) -> tuple[int, ...]:
        for folder in self.path.glob("lib/python*/site-packages/pip-*.dist-info"):
            return tuple(int(part) for part in re.findall(r"\d+", folder.name)[:2])
        return (0, 0)


def base_python() -> Path:
    """The Python behind this one, which may be that of the environment to replace."""
    plain = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
    return plain if plain.exists() else Path(sys.executable).resolve()


def main(arguments: list[str]) -> int:
    """Exit status of `bootstrap.py`."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also install the tests' and linters' dependencies")
    parser.add_argument("--wheel", action="store_true", help="only build llama.cpp, and print the folder of the wheel")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up of compilers and partial files
    try:
        if options.wheel:
            print(prepare_wheel(os.environ).parent)
        else:
            prepare(os.environ, extras=("dev",) if options.dev else ())
    except SetupError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def prepare(env: Mapping[str, str], *, extras: tuple[str, ...]) -> None:
    """Install .venv with `extras`. Raises SetupError."""
    venv = Venv(ROOT / ".venv")
    plan = make_plan(env, remembered=_remembered(venv))
    goal = _goal(plan, venv, extras)
    if not venv.holds(goal):
        with _alone(env):
            if not venv.holds(goal):
                venv.create(goal)
                venv.install(goal, _wheel(plan, venv, env))
    with contextlib.suppress(OSError):  # without our own kernels llama.cpp's are used
        subprocess.run([str(venv.python), "-m", "specllama.kernels"], cwd=ROOT, check=False)


def prepare_wheel(env: Mapping[str, str]) -> Path:
    """The compiled wheel alone, for installers with their own environments (pipx, uv)."""
    venv = Venv(ROOT / ".venv")
    plan = make_plan(env, remembered=_remembered(venv))
    with _alone(env):
        venv.create(_goal(plan, venv, ()))
        return _wheel(plan, venv, env)


def _wheel(plan: Plan, venv: Venv, env: Mapping[str, str]) -> Path:
    shelf = wheelhouse.cache_home(env) / "wheels"
    return wheelhouse.find(plan, shelf) or wheelhouse.build(plan, shelf, venv.python, env)


def _goal(plan: Plan, venv: Venv, extras: tuple[str, ...]) -> Goal:
    made_for = venv.made_for()
    kept = made_for.extras if made_for else ()  # `make run` after `make test` removes nothing
    return Goal(
        key=plan.key,
        compiler=plan.compiler,
        pyproject=hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        extras=tuple(sorted({*kept, *extras})),
        python="{}.{}".format(*sys.version_info),
        place=str(venv.path),
    )


def _remembered(venv: Venv) -> Compiler | None:
    """The compiler of the last installation; its build stays valid after it is removed."""
    made_for = venv.made_for()
    return Compiler(cc="", cxx="", version=made_for.compiler) if made_for else None


@contextlib.contextmanager
def _alone(env: Mapping[str, str]) -> Iterator[None]:
    """A lock per user: two set-ups would compile twice and install into the same environment."""
    cache = wheelhouse.cache_home(env)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "setup.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another set-up of specllama")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip_stage(line: str) -> Stage | None:
    found = re.match(r"\s*(Collecting|Obtaining|Installing collected packages)\b:? *(\S*)", line)
    if not found:
        return None
    if found[1].startswith("Installing"):
        return Stage("installing")
    return Stage("fetching", detail=found[2])


def _say(text: str) -> None:
    sys.stderr.write(f"specllama: {text}\n")
    sys.stderr.flush()
