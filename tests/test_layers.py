"""Which room may import which: one table, checked against every import, lazy ones included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "specllama"

# Which rooms a room may import: the whole plan of the house, top to bottom (docs/design.md). A room may always import
# itself; the files at the top of the package are the room "top".
MAY_IMPORT: dict[str, str] = {
    "base": "",
    "core": "base",
    "prompts": "base",
    "drafters": "base core",
    "files": "base core",
    "kernels": "base",
    "llama": "base core files kernels",
    "chat": "base core drafters",
    "pairs": "base core prompts drafters files kernels llama chat",
    "tuning": "base core prompts drafters kernels llama chat pairs",
    "derive": "base core drafters files llama pairs tuning",
    "batch": "base core drafters llama chat pairs",
    "bench": "base core prompts drafters llama tuning batch",
    "audit": "base core drafters",
    "cli": "base core prompts drafters files llama chat pairs tuning derive batch bench audit",
    "top": "base core drafters chat pairs tuning batch cli",
}
# Which packages a room may import besides the standard library.
MAY_USE: dict[str, str] = {
    "base": "platformdirs",
    "core": "numpy",
    "drafters": "numpy",
    "files": "huggingface_hub numpy platformdirs tomli tomlkit",
    "kernels": "platformdirs",
    "llama": "llama_cpp numpy platformdirs psutil",
    "chat": "jinja2 llguidance numpy psutil",
    "pairs": "numpy platformdirs",
    "derive": "numpy",
    "batch": "greenlet numpy",
    "bench": "matplotlib numpy psutil",
    "audit": "numpy",
    "cli": "numpy platformdirs prompt_toolkit rich typer",
    "top": "typing_extensions",
}
HEAVY = {
    "llama_cpp",
    "huggingface_hub",
    "llguidance",
    "tomlkit",
}  # never at the top of a module: `--help` must not wait for them


@dataclass(frozen=True)
class Import:
    """One imported module, as `specllama` or the outside world calls it."""

    file: str  # below the package, such as "cli/app.py"
    name: str  # dotted
    line: int
    lazy: bool  # inside a function
    for_types: bool  # under TYPE_CHECKING: never carried out

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, wherever it stands."""
    return _walk(tree_of(path), path.relative_to(PACKAGE).as_posix(), lazy=False, for_types=False)


def _walk(node: ast.AST, file: str, *, lazy: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # an import is a statement
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, alias.name, child.lineno, lazy, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno} has a relative import; write the whole name"
            for alias in child.names:
                yield Import(file, f"{child.module}.{alias.name}", child.lineno, lazy, for_types)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, file, lazy=lazy or is_function, for_types=for_types or is_guard)


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports() -> list[Import]:
    """Every import of the package. Each process of pytest-xdist collects these tests; walking takes a second."""
    return [entry for path in FILES for entry in imports_of(path)]


def home_of(file: str) -> str:
    """The room of a file below the package."""
    return file.split("/")[0] if "/" in file else "top"


def room_of(entry: Import) -> str:
    """The room an import of ours leads to: "core" for `specllama.core.types.Draft`; "" for others' modules."""
    parts = entry.name.split(".")
    if parts[0] != "specllama" or parts[1:] == ["__version__"]:
        return ""
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "top"


def test_every_import_leads_to_a_room_above() -> None:
    """Prevents: circles, library code that needs the program, a loop that only runs with llama.cpp."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(MAY_IMPORT) - {"top"}
    assert not [
        str(entry)
        for entry in imports()
        if (to := room_of(entry)) and (home := home_of(entry.file)) != to and to not in MAY_IMPORT[home].split()
    ]


def test_the_plan_of_the_house_has_one_direction_and_no_idle_permission() -> None:
    """Prevents: a table that allows circles, or what nothing needs."""
    order = list(MAY_IMPORT)
    up = [
        (room, to) for room, line in MAY_IMPORT.items() for to in line.split() if order.index(to) >= order.index(room)
    ]
    assert not up
    used = {(home_of(entry.file), room_of(entry)) for entry in imports()}
    assert not [(room, to) for room, line in MAY_IMPORT.items() for to in line.split() if (room, to) not in used]


def test_every_room_uses_only_the_packages_of_its_line() -> None:
    """Prevents: the law of acceptance depending on a model, a network or a terminal."""
    foreign = [
        str(entry)
        for entry in imports()
        if entry.top not in {*sys.stdlib_module_names, "specllama"}
        and entry.top not in MAY_USE.get(home_of(entry.file), "").split()
    ]
    assert not foreign
    used = {(home_of(entry.file), entry.top) for entry in imports()}
    assert not [(room, name) for room, line in MAY_USE.items() for name in line.split() if (room, name) not in used]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("llama_cpp", {"llama/bindings.py"}),
        ("huggingface_hub", {"files/hub.py"}),
    ],
)
def test_one_file_is_the_door_to_a_package_that_changes(name: str, files: set[str]) -> None:
    """Prevents: a ctypes type, or the network, in a second place with a second idea of it."""
    assert {entry.file for entry in imports() if entry.top == name} == files


def test_a_type_name_has_one_meaning() -> None:
    """Prevents: three classes `Job`, so that a reader has to find out which one is meant."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = node.name if isinstance(node, ast.ClassDef) else target.id if isinstance(target, ast.Name) else ""
            if name[:1].isupper() and not name.isupper():
                homes.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert homes
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_only_the_plots_import_matplotlib_and_only_when_they_draw() -> None:
    """Prevents: an optional dependency that is needed after all, or a second of imports before every answer."""
    users = [entry for entry in imports() if entry.top == "matplotlib" and not entry.for_types]
    assert users
    assert not [str(entry) for entry in users if entry.file != "bench/plots.py" or not entry.lazy]


def test_only_the_benchmark_imports_the_synthetic_coin() -> None:
    """Prevents: an answer of `run` or `chat` whose tokens were never judged."""
    users = {entry.file for entry in imports() if entry.name.startswith("specllama.bench.synthetic")}
    assert users == {"bench/answer.py"}


def test_no_benchmark_needs_the_command_line() -> None:
    """Prevents: figures measured through code of the command line, which no user of the library runs."""
    files = list((PACKAGE.parent / "benchmarks").glob("*.py"))
    wrong = re.compile(r"^\s*(from|import)\b.*\bspecllama(\.cli\b| import .*\bcli\b)", re.MULTILINE)
    assert files
    assert [path.name for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_typer_is_the_only_door_to_click() -> None:
    """Prevents: breaking with typer 0.26 and later, which carry a click of their own."""
    assert not [str(entry) for entry in imports() if entry.top == "click"]


def test_slow_packages_are_imported_where_they_are_used() -> None:
    """Prevents: `specllama --help` waiting half a second for llama.cpp."""
    users = [entry for entry in imports() if entry.top in HEAVY]
    assert not [str(entry) for entry in users if not entry.lazy and not entry.for_types]


@pytest.mark.slow
def test_only_the_command_line_prints() -> None:
    """Prevents: a line from deep inside in the middle of an answer. Programs of their own speak for themselves."""
    children = {"llama/crash_test.py", "llama/rpc.py", "chat/template_child.py", "kernels/__main__.py"}
    speakers = []
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree_of(path)):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_stream = isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr"}
            is_stream = is_stream and ast.unparse(node).startswith("sys.")  # slow, so of few nodes
            if (is_print or is_stream) and not file.startswith("cli/") and file not in children:
                speakers.append(f"{file}:{node.lineno}")
    assert not speakers


@pytest.mark.parametrize("file", ["core/engine.py", "core/verification.py"])
def test_the_heart_stays_small(file: str) -> None:
    """Prevents: a loop or a rule that cannot be read on one screen after another."""
    assert len((PACKAGE / file).read_text("utf-8").splitlines()) <= 200


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    """Prevents: a room whose purpose has to be guessed."""
    silent = [path.name for path in FILES if path.stat().st_size and not ast.get_docstring(tree_of(path))]
    assert not silent


SLOW = {*HEAVY, "jinja2", "psutil", "importlib.metadata", "numpy", "pydantic", "rich"}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "slow"), [(["--help"], SLOW), (["--version"], HEAVY), (["run", "--help"], HEAVY)])
def test_help_imports_nothing_slow(words: list[str], slow: set[str]) -> None:
    """Prevents: a `--help` that takes longer than a blink (0.4 s); what is not imported costs no time."""
    code = (
        "import sys\n"
        "from specllama.cli.app import main\n"
        f"status = main({words!r})\n"
        f"print(*sorted({slow!r} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == ""


def test_the_walker_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a layer test that is green because it looks away."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "cli" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import a.b\n"
        "from c import d as e\n"
        "if TYPE_CHECKING:\n    import f\n"
        "try:\n    import g\nexcept ImportError:\n    pass\n"
        "class K:\n    import h\n    def m(self):\n        if True:\n            from i import j\n"
    )
    found = {entry.name: (entry.lazy, entry.for_types) for entry in imports_of(path)}
    assert found == {
        "a.b": (False, False),
        "c.d": (False, False),
        "f": (False, True),
        "g": (False, False),
        "h": (False, False),
        "i.j": (True, False),
    }
