"""The crash test of the installed llama.cpp: real child processes, mostly with a fake `llama_cpp` package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from specllama.base import child
from specllama.base.child import Tell
from specllama.base.cpu import Cpu
from specllama.base.errors import BackendError
from specllama.files import gguf_tiny
from specllama.llama import crash_test as probe
from specllama.llama import library_hash
from specllama.llama.crash_test import State
from tests import tiny
from tests.homes import file_size_limit

pytestmark = pytest.mark.slow  # starts programs

# The real bindings, except that {on_import} and {on_decode} can fail, and that logits can have another value.
FAKE_BINDINGS = """
import importlib.util, os, signal, sys, time
{on_import}

folder = os.path.dirname({real!r})
spec = importlib.util.spec_from_file_location("llama_cpp", {real!r}, submodule_search_locations=[folder])
real = sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
load, decode, logits, extra = real.llama_model_load_from_file, real.llama_decode, real.llama_get_logits, []

def llama_model_load_from_file(path, params):
    extra.append(params.use_extra_bufts)
    return load(path, params)

def llama_decode(context, batch):
    with open({notes!r}, "a") as file:
        file.write("extra " if extra[-1] else "plain ")
    {on_decode}
    return decode(context, batch)

def llama_get_logits(context):
    found = logits(context)
    found[0] = {logit}
    return found

real.llama_model_load_from_file, real.llama_decode = llama_model_load_from_file, llama_decode
real.llama_get_logits = llama_get_logits
"""
REAL = importlib.util.find_spec("llama_cpp").origin  # type: ignore[union-attr]
DECODES = 4  # of one child: a rollback, and three widths

DIE = "os.kill(os.getpid(), signal.{})"
PARENT = """
import sys, time
from specllama.llama import crash_test
with crash_test._started(crash_test.Use(sys.argv[1])):
    time.sleep(60)
"""


class FakeBuild:
    """A `llama_cpp` package in front of the real one."""

    def __init__(self, folder: Path) -> None:
        self.module = folder / "llama_cpp" / "__init__.py"
        self.notes = folder / "decodes"
        self.library = folder / "llama_cpp" / "lib" / "libllama.so"
        self.library.parent.mkdir(parents=True)
        self.library.write_bytes(b"one build")
        self.behave()

    def behave(self, *, on_import: str = "", on_decode: str = "", logit: str = "0.5") -> None:
        text = FAKE_BINDINGS.format(
            on_import=on_import, on_decode=on_decode or "pass", logit=logit, real=REAL, notes=str(self.notes)
        )
        self.module.write_text(text)

    def decodes(self) -> list[str]:
        """ "extra" or "plain" for each decode since the last call."""
        text = self.notes.read_text() if self.notes.exists() else ""
        self.notes.unlink(missing_ok=True)
        return text.split()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(probe.platformdirs, "user_cache_path", lambda name: folder)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return folder


@pytest.fixture
def build(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild(tmp_path / "site")
    monkeypatch.setattr(library_hash, "of", library_hash.of.__wrapped__)  # as if each look were of a new process
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in [name for name in probe.sys.modules if name.split(".")[0] == "llama_cpp"]:
        monkeypatch.delitem(probe.sys.modules, name)  # the real one, if other tests have imported it
    return fake


@pytest.mark.parametrize("command", ["check", "chat", "doctor"])
def test_a_build_that_ends_the_process_is_an_error_of_every_command(
    build: FakeBuild, tmp_path: Path, command: str
) -> None:
    """Prevents: SIGBUS by a truncated library in a command that only reads vocabularies."""
    build.behave(on_import=DIE.format("SIGBUS"))
    target, draft = tiny.write_pair(tmp_path)
    words = [] if command == "doctor" else ["-m", str(target), "-md", str(draft)]
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "specllama", command, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (2 if command == "check" else 1), done.stderr
    assert "SIGBUS" in done.stdout + done.stderr


def _without_a_test(_tell: Tell) -> None:
    probe.installed = lambda: pytest.fail("tested again")
    probe.require_working()


def test_a_child_does_not_test_the_build_again() -> None:
    """Prevents: two decodes of a second in each child where no cache can be written."""
    child.run(_without_a_test, lambda _what, _share: None)


def test_a_good_build_is_tested_once(build: FakeBuild) -> None:
    """Prevents: half a second for a child process at each start."""
    assert probe.installed() == probe.ProbeResult(State.OK)
    assert build.decodes() == ["extra"] * DECODES
    assert probe.installed() == probe.ProbeResult(State.OK)
    assert build.decodes() == []


def test_an_illegal_instruction_on_the_fast_layouts_switches_them_off(build: FakeBuild) -> None:
    """Prevents: a crash without a message by a miscompiled AMX path (FIELD_CASES 36)."""
    build.behave(on_decode="if extra[-1]: " + DIE.format("SIGILL"))
    result = probe.installed()
    assert (result.state, result.use_extra_bufts, result.signal) == (State.FALLBACK, False, "SIGILL")
    assert "SIGILL" in result.detail
    assert "make setup" in result.hint
    assert "-fno-tree-dse -fno-dse" in result.hint
    result.require()
    assert build.decodes() == ["extra", *["plain"] * DECODES]
    assert probe.installed() == result
    assert build.decodes() == []


def test_an_illegal_instruction_on_every_layout_is_an_error_with_a_hint(build: FakeBuild) -> None:
    """Prevents: a crash without an explanation by a build for another CPU."""
    build.behave(on_decode=DIE.format("SIGILL"))
    result = probe.installed()
    assert (result.state, result.signal) == (State.BROKEN, "SIGILL")
    with pytest.raises(BackendError, match="SIGILL") as caught:
        result.require()
    assert "llama-cpp-python==" in caught.value.hint


def test_a_broken_build_is_tested_again_at_the_next_start(build: FakeBuild) -> None:
    """Prevents: an error that stays after its cause outside the libraries is gone."""
    build.behave(on_decode=DIE.format("SIGSEGV"))
    assert probe.installed().state is State.BROKEN
    build.behave()
    assert probe.installed().state is State.OK


def test_a_child_killed_from_outside_does_not_switch_off_the_fast_layouts(build: FakeBuild) -> None:
    """Prevents: AMX that stays off after a moment without memory."""
    build.behave(on_decode="if extra[-1]: " + DIE.format("SIGKILL"))
    result = probe.installed()
    assert (result.state, result.use_extra_bufts) == (State.BROKEN, True)
    assert "memory" in result.hint


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (
            {"on_import": "raise OSError('libgomp.so.1: cannot open shared object file: No such file')"},
            "system library libgomp.so.1",
        ),
        ({"logit": "float('nan')"}, "NaN"),
        (
            {"on_import": "import sys; sys.stderr.write('the moon is full'); sys.stderr.flush(); os._exit(3)"},
            "the moon is full",
        ),
    ],
)
def test_a_failure_without_a_crash_is_explained(build: FakeBuild, behaviour: dict[str, str], words: str) -> None:
    """Prevents: a traceback of ctypes for a missing package; wrong logits that count as good; a lost stderr."""
    build.behave(**behaviour)
    result = probe.installed()
    assert result.state is State.BROKEN
    assert words in f"{result.detail} {result.hint}"


@pytest.mark.slow
def test_a_build_that_hangs_is_broken(build: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a start that hangs."""
    monkeypatch.setattr(probe, "TIMEOUT_S", 1.0)
    build.behave(on_decode="time.sleep(60)")
    result = probe.installed()
    assert result.state is State.BROKEN
    assert "did not finish" in result.detail


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_killed_parent_takes_the_child_with_it(build: FakeBuild, tmp_path: Path) -> None:
    """Prevents: a child that reads a large file for minutes after `kill -9`, or a second Ctrl-C, of its parent."""
    pipe, model = tmp_path / "pipe", tmp_path / "tiny.gguf"
    os.mkfifo(pipe)
    model.write_bytes(gguf_tiny.tiny_gguf())
    writes = f"file = os.open({str(pipe)!r}, os.O_WRONLY); os.write(file, b'begun')"
    build.behave(on_import=f"{writes}; time.sleep(10); os.write(file, b'late')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(probe.sys.path)}
    command = [probe.sys.executable, "-c", PARENT, str(model)]
    with subprocess.Popen(command, env=env) as parent, pipe.open("rb", buffering=0) as file:
        assert file.read(5) == b"begun"
        parent.kill()
        assert file.read(5) == b""  # no process has the pipe any more


def test_without_llama_cpp_no_child_is_started(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: 'No module named llama_cpp' as the only message."""
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, **__: pytest.fail("a child was started"))
    result = probe.installed()
    assert result.state is State.BROKEN
    assert "not installed" in result.detail
    assert result.hint


def test_a_new_build_or_cpu_is_tested_again_and_a_reinstallation_is_not(
    build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a result of another build or CPU (AVX-512); a test after each reinstallation."""
    probe.installed()
    build.decodes()
    os.utime(build.library, (1, 1))
    assert probe.installed().state is State.OK
    assert build.decodes() == []
    build.library.write_bytes(b"two builds")
    probe.installed()
    assert build.decodes() == ["extra"] * DECODES
    other = Cpu(model="another", arch="x86_64", flags=("sse2",), features=frozenset())
    monkeypatch.setattr(probe, "this_cpu", lambda: other)
    probe.installed()
    assert build.decodes() == ["extra"] * DECODES


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", "[" * 50_000, '{"results": [{}]}', '{"hashes": {}, "results": {"a": {"state": "odd"}}}'],
)
def test_a_damaged_cache_file_is_ignored_and_replaced(
    text: str, cache: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a program that cannot start because of its cache."""
    results = iter([probe.ProbeResult(State.OK)])
    monkeypatch.setattr(probe, "check", lambda: next(results))
    cache.mkdir()
    (cache / "probe.json").write_text(text)
    for _ in range(2):
        assert probe.installed().state is State.OK


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, build: FakeBuild) -> None:
    """Prevents: an error in a read-only home folder."""
    cache.write_text("a file where the folder should be")
    assert probe.installed().state is State.OK


def test_a_full_disk_leaves_no_half_written_file(
    cache: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: one more file in the cache at each start while the disk is full."""
    monkeypatch.setattr(probe, "check", lambda: probe.ProbeResult(State.OK))
    with file_size_limit(10):
        assert probe.installed().state is State.OK
    assert [path.name for path in cache.iterdir()] == []


@pytest.mark.slow
def test_the_installed_llama_cpp_decodes_the_tiny_model_on_every_layout(tmp_path: Path) -> None:
    """Prevents: a tiny model that llama.cpp rejects, so that every build looks broken."""
    assert probe.check() == probe.ProbeResult(State.OK)
    model = tmp_path / "tiny.gguf"
    model.write_bytes(gguf_tiny.tiny_gguf())
    assert probe._try(model, use_extra_bufts=False) == probe.ProbeResult(State.OK)


def test_the_tiny_model_holds_the_tensor_types_of_usual_files(tmp_path: Path) -> None:
    """Prevents: a test that never runs the kernels that crash."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_tiny.tiny_gguf())
    tensors = gguf.GGUFReader(path).tensors
    assert {tensor.tensor_type.name for tensor in tensors} == {"F32", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
    assert all(tensor.shape[0] % 256 == 0 for tensor in tensors)


def test_the_parent_never_imports_llama_cpp(build: FakeBuild) -> None:
    """Prevents: a crash of the parent by the tested build."""
    build.behave(on_import=DIE.format("SIGILL"))
    assert probe.installed().signal == "SIGILL"
    assert "llama_cpp" not in probe.sys.modules


def test_the_child_writes_no_core_file_and_has_a_time_limit(
    build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a core file of some hundred megabytes in the working directory; a child that never ends."""
    build.behave(
        on_import="from resource import *\nraise OSError(str((getrlimit(RLIMIT_CORE), getrlimit(RLIMIT_CPU))))"
    )
    monkeypatch.chdir(tmp_path)
    assert "((0, 0), (120, 120))" in probe.installed().detail


def test_a_signal_without_a_name_is_still_a_signal() -> None:
    """Prevents: a ValueError for a real-time signal."""
    assert probe._signal_name(-63) in {"signal 63", "SIGRTMAX-1"}
    assert probe._signal_name(0) == ""
    assert probe._signal_name(3221225501) == "SIGILL"


def test_the_child_is_the_same_interpreter_with_the_same_path(
    build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a test of another environment's llama.cpp."""
    seen: list[list[str]] = []
    start = subprocess.Popen

    def spy(command: list[str], **options: object) -> object:
        seen.append(command)
        return start(command, **options)

    monkeypatch.setattr(probe.subprocess, "Popen", spy)
    build.behave(on_import="import sys; raise OSError(sys.executable + ' ' + __file__)")
    result = probe.installed()
    assert probe.sys.executable in result.detail
    assert str(build.module) in result.detail
    assert "-I" in seen[0]
