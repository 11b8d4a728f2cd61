"""Who may import what (DESIGN, section 8.17): read off the syntax tree, and off a real start of the program."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "specllama"

# Rooms of pure reasoning: numpy, the standard library, and each other.
PURE = {"types", "errors", "distribution", "verification", "sampling", "events", "stats"}
LLAMA = {"llama", "llama_ext", "probe"}  # the only importers of llama_cpp
HEAVY = {"llama_cpp", "huggingface_hub"}  # never at the top of a module: `--help` must not wait for them
CLI_ONLY = {"rich", "typer"}


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


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, wherever it stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _walk(tree, path.relative_to(PACKAGE).as_posix(), lazy=False, for_types=False)


def _walk(node: ast.AST, file: str, *, lazy: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, alias.name, child.lineno, lazy, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno} has a relative import; write the whole name"
            for alias in child.names:
                yield Import(file, f"{child.module}.{alias.name}", child.lineno, lazy, for_types)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, file, lazy=lazy or is_function, for_types=for_types or is_guard)


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [entry for path in FILES for entry in imports_of(path)]


def room_of(entry: Import) -> str:
    """The room an import of ours leads to: "types" for `specllama.core.types.Draft`; "" for others' modules."""
    parts = entry.name.split(".")
    return parts[1] if parts[0] == "specllama" and len(parts) > 1 else ""


def in_file(entry: Import, rooms: set[str]) -> bool:
    """True for imports made by one of these rooms, which may be files or folders."""
    return entry.file.removesuffix(".py").split("/")[0] in rooms


def test_the_pure_rooms_import_numpy_and_the_standard_library_only() -> None:
    """Prevents: the law of acceptance depending on a model, a network or a terminal."""
    allowed = {*sys.stdlib_module_names, "numpy"}
    entries = [entry for entry in IMPORTS if in_file(entry, PURE)]
    assert {entry.file.removesuffix(".py") for entry in entries} >= PURE - {"errors"}, "a pure room is gone"
    assert not [str(entry) for entry in entries if entry.top not in allowed and room_of(entry) not in PURE]


def test_the_engine_and_the_drafters_import_the_pure_rooms_only() -> None:
    """Prevents: a loop that only runs with llama.cpp, so that no fake can prove it exact."""
    allowed = {*sys.stdlib_module_names, "numpy"}
    rooms = PURE | {"engine", "prefix", "drafters"}
    entries = [entry for entry in IMPORTS if in_file(entry, {"engine", "prefix", "drafters"})]
    assert entries
    assert not [str(entry) for entry in entries if entry.top not in allowed and room_of(entry) not in rooms]


def test_only_the_rooms_around_llama_cpp_import_it() -> None:
    """Prevents: a ctypes type or a return code where nobody expects one."""
    users = [entry for entry in IMPORTS if entry.top == "llama_cpp"]
    assert users
    assert not [str(entry) for entry in users if not in_file(entry, LLAMA)]


def test_only_llama_imports_the_unstable_symbols() -> None:
    """Prevents: a change in llama.cpp breaking rooms all over the house."""
    unstable = {"llama_ext", "llama_buffers"}
    users = [entry for entry in IMPORTS if room_of(entry) in unstable or entry.name.split(".")[-1] in unstable]
    assert users
    assert not [str(entry) for entry in users if not in_file(entry, {"llama", *unstable})]


def test_only_hub_imports_huggingface_hub() -> None:
    """Prevents: the network being reached from two places, with two ideas of offline."""
    users = [entry for entry in IMPORTS if entry.top == "huggingface_hub"]
    assert not [str(entry) for entry in users if not in_file(entry, {"hub"})]


def test_only_the_command_line_imports_rich_and_typer() -> None:
    """Prevents: a library that prints, or that cannot be used without a terminal."""
    users = [entry for entry in IMPORTS if entry.top in CLI_ONLY]
    assert users
    assert not [str(entry) for entry in users if not in_file(entry, {"cli"})]


def test_only_the_plots_import_matplotlib_and_only_when_they_draw() -> None:
    """Prevents: an optional dependency that is needed after all, or a second of imports before every answer."""
    users = [entry for entry in IMPORTS if entry.top == "matplotlib" and not entry.for_types]
    assert users
    assert not [str(entry) for entry in users if entry.file != "bench_plots.py" or not entry.lazy]


def test_only_the_benchmark_imports_the_synthetic_coin() -> None:
    """Prevents: an answer of `run` or `chat` whose tokens nobody judged."""
    users = [entry for entry in IMPORTS if room_of(entry) == "bench_synthetic"]
    assert {entry.file for entry in users} == {"bench_answer.py"}
    askers = [entry for entry in IMPORTS if room_of(entry) in ("bench_answer", "bench")]
    assert {entry.file for entry in askers} <= {"bench.py", "cli/bench.py"}


def test_nobody_imports_the_command_line() -> None:
    """Prevents: library code that needs the program."""
    users = [entry for entry in IMPORTS if room_of(entry) == "cli" and not in_file(entry, {"cli", "__main__"})]
    assert not [str(entry) for entry in users]


def test_typer_is_the_only_door_to_click() -> None:
    """Prevents: breaking with typer 0.26 and later, which carry a click of their own."""
    assert not [str(entry) for entry in IMPORTS if entry.top == "click"]


def test_slow_packages_are_imported_where_they_are_used() -> None:
    """Prevents: `specllama --help` waiting half a second for llama.cpp."""
    users = [entry for entry in IMPORTS if entry.top in HEAVY]
    assert not [str(entry) for entry in users if not entry.lazy and not entry.for_types]


def test_only_the_command_line_prints() -> None:
    """Prevents: a line from deep inside in the middle of an answer. The probe's child speaks through its stdout."""
    speakers = []
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_stream = isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}
            if (is_print or is_stream) and not file.startswith("cli/") and file != "probe.py":
                speakers.append(f"{file}:{node.lineno}")
    assert not speakers


def test_no_room_outgrows_four_hundred_lines_and_the_heart_stays_small() -> None:
    """Prevents: a file that nobody reads to the end (DESIGN, section 1)."""
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text("utf-8").splitlines()) for path in FILES}
    small = {"engine.py": 200, "verification.py": 200}
    assert not {file: n_lines for file, n_lines in lengths.items() if n_lines > small.get(file, 400)}


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    """Prevents: a room whose purpose has to be guessed."""
    silent = [
        path.name for path in FILES if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not silent


SLOW = {*HEAVY, "jinja2", "psutil", "importlib.metadata", "rich.live", "rich.progress"}


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
