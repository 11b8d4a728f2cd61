"""Layers on RPC servers. The servers are processes of the tests, on 127.0.0.1, with the CPU as their device."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from specllama import llama
from specllama.base.errors import BackendError, UsageError
from specllama.base.ranges import address
from specllama.llama import LoadOptions, rpc
from specllama.llama.bindings import symbol
from specllama.llama.load_plan import GpuMemory
from specllama.llama.model import _gpu_memory
from specllama.pairs.profile import ProfileKey
from tests import tiny

# Starts llama.cpp's own server, for one thread of the CPU.
_SERVER = """
import ctypes, os, sys
from specllama.base import child, with_parent
child.is_child = True
with_parent.watch()
from specllama.llama.bindings import symbol
from specllama.llama.rpc import _functions
_functions()
void = ctypes.c_void_p
registry = symbol("ggml_backend_reg_by_name", void, ctypes.c_char_p)(b"RPC")
start = symbol("ggml_backend_reg_get_proc_address", void, void, ctypes.c_char_p)(
    registry, b"ggml_backend_rpc_start_server"
)
cpu = symbol("ggml_backend_dev_by_type", void, ctypes.c_int)(0)
kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(void))
kind(start)(sys.argv[1].encode(), None, 1, 1, (void * 1)(cpu))
"""
# Loads a model, decodes, and prints what became of the connections and the devices.
_LOADED = """
import os, sys, socket, json, psutil
from specllama import llama
from specllama.llama import LoadOptions, rpc
from specllama.llama.model import _gpu_memory
server = sys.argv[2]
with llama.load(sys.argv[1], LoadOptions(n_ctx=256, n_threads=1, rpc=(server,))) as far, \\
        llama.load(sys.argv[1], LoadOptions(n_ctx=256, n_threads=1)) as near:
    equal = bool(abs(far.eval([5, 6, 7]) - near.eval([5, 6, 7])).max() < 1e-2)  # of logits around 1
    far.truncate(1)
    alive = []
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == int(server.split(":")[1]):
            ours = socket.socket(fileno=os.dup(each.fd))
            alive.append(bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)))
    facts = {"equal": equal, "alive": alive, "length": far.length, "local": len(rpc.local_devices()),
             "layers": [far.plan.n_gpu_layers, near.plan.n_gpu_layers]}
    print(json.dumps(facts), flush=True)
"""


@pytest.mark.parametrize("text", ["127.0.0.1:50052", "gpu-box.local:1", "a:65535"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    """Prevents: a name that llama.cpp cannot parse, which ends its process."""
    assert address("--rpc", text) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "http://a:1", "-a:1"])
def test_anything_else_is_an_error(text: str) -> None:
    """Prevents: the same, and an option of another program."""
    with pytest.raises(UsageError):
        address("--rpc", text)


def has_backend() -> bool:
    llama.build_info()
    import ctypes

    return bool(symbol("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC"))


def test_a_build_without_the_back_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: layers that silently stay on this machine."""
    if has_backend():
        pytest.skip("this build has it")
    monkeypatch.delenv(rpc.LIBRARY, raising=False)
    with pytest.raises(BackendError, match="RPC") as caught:
        rpc.connect(["127.0.0.1:1"])
    assert "GGML_RPC" in caught.value.hint
    assert not rpc.is_used()


def test_a_pair_with_servers_has_a_profile_of_its_own(tmp_path: Path) -> None:
    """Prevents: costs of this machine for layers that are elsewhere, and profiles of today that are lost."""
    here, there = LoadOptions(), LoadOptions(rpc=("a:1",))
    keys = [ProfileKey(tmp_path, target, tmp_path, here).key for target in (here, there)]
    assert keys[0] != keys[1]
    assert "rpc" not in repr(replace(here)) or keys[0] == ProfileKey(tmp_path, LoadOptions(), tmp_path, here).key


def test_a_loss_names_the_servers_and_other_failures_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a failed assertion of another part that is blamed on the network."""
    monkeypatch.setattr(rpc, "_connected", ["a:1"])
    assert "a:1" in str(rpc._loss("Remote RPC server crashed or returned malformed response"))
    assert "a:1" not in str(rpc._loss("GGML_ASSERT(n > 0) failed"))


def test_memory_of_servers_counts_only_for_models_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a draft that is planned for another machine."""
    far = llama.Device("RPC0", "gpu", "a:1", 10, 10)
    near = llama.Device("CUDA0", "gpu", "", 1, 1)
    monkeypatch.setattr("specllama.llama.model.devices", lambda: (far, near))
    assert [_gpu_memory(remote=remote).n_free for remote in (True, False)] == [11, 1]
    assert isinstance(_gpu_memory(remote=False), GpuMemory)


def built_library() -> Path | None:
    """The back end as a library, compiled from the sources that benchmarks/peers.py has unpacked; None without them."""
    if has_backend():
        return Path()
    version = llama.build_info().bindings
    sources = list(user_cache_path("specllama").glob(f"peers/*/llama_cpp_python-{version}/vendor/llama.cpp/ggml"))
    compiler = shutil.which("g++")
    if not sources or compiler is None or sys.platform != "linux":
        return None
    source = sources[0]
    place = source.parents[2] / f"libggml-rpc-{llama.build_info().fingerprint}.so"
    if not place.exists():
        libraries = llama.build_info().libraries[0].parent
        flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DNDEBUG"]
        flags += [f"-DGGML_{name}" for name in ("BACKEND_DL", "BACKEND_SHARED", "BACKEND_BUILD", "SHARED")]
        flags += [f"-I{source / 'include'}", f"-I{source / 'src'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        files = [str(source / "src" / "ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
        own = place.with_name(f"{os.getpid()}.so")
        subprocess.run([compiler, *flags, *files, "-o", str(own), "-lggml-base", "-lpthread"], check=True)
        own.replace(place)
    return place


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The back end, for the processes that a test starts."""
    library = built_library()
    if library is None:
        pytest.skip("needs a build with GGML_RPC, or the sources of llama.cpp: python benchmarks/peers.py")
    if library != Path():
        monkeypatch.setenv(rpc.LIBRARY, str(library))


def free_port() -> int:
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        port = ours.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server, and its process."""
    where = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", _SERVER, where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if b"transport" in line:
                    break
            threading.Thread(target=server.stdout.read, daemon=True).start()
            time.sleep(0.2)  # it says so before it listens
            yield where, server
        finally:
            server.kill()


@contextmanager
def pretending(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a program that is no RPC server; `answer` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            with suppress(OSError):
                while True:
                    ours, _ = listener.accept()
                    with ours, suppress(OSError):
                        answer(ours)

        threading.Thread(target=work, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def hello(ours: socket.socket, major: int) -> None:
    """The answer of a server with another version of the protocol."""
    ours.recv(64)
    ours.sendall((28).to_bytes(8, "little") + bytes([major, 0, 0, 0]) + bytes(24))
    ours.recv(64)


def refused(where: str) -> BackendError:
    with pytest.raises(BackendError) as caught:
        rpc._require_answers([where])
    assert where in str(caught.value)
    return caught.value


@pytest.mark.slow
def test_a_server_that_cannot_be_used_is_one_sentence(backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a core dump or an endless wait for a server that is gone, busy, of another version, or no server."""
    assert "answers" in str(refused(f"127.0.0.1:{free_port()}"))
    with pretending(lambda ours: hello(ours, 99)) as where:
        assert "version" in str(refused(where))
    with pretending(lambda ours: ours.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)) as where:
        assert "version" in str(refused(where))
    monkeypatch.setattr(rpc, "PATIENCE_S", 4.0)
    with pretending(lambda ours: time.sleep(6.0)) as where:
        assert "4 seconds" in str(refused(where))


@pytest.mark.slow
def test_two_servers_compute_the_target_and_the_draft_stays(backend: None, tmp_path: Path) -> None:
    """Prevents: layers on no server, in `run` or `batch`; a draft that waits for the network."""
    target, draft = tiny.write_pair(tmp_path, vocabulary=tiny.ascii_level(), chat_template=tiny.CHATML, n_ctx=512)
    with ExitStack() as open_servers:
        servers = [open_servers.enter_context(serving())[0] for _ in range(2)]
        common = ["-m", str(target), "-md", str(draft), "--temp", "0", "-n", "16", "-t", "1", "-c", "512", "-v"]
        common += ["--spec-draft-n-max", "4"]
        remote = ["--rpc", ",".join(servers)]
        far, near, many = (
            subprocess.run(
                [sys.executable, "-m", "specllama", *command, *common],
                input="hello\nbye\n" if command[0] == "batch" else None,
                capture_output=True,
                text=True,
                timeout=60,
            )
            for command in (
                ["run", "hello", *remote],
                ["run", "hello"],
                ["batch", "-", "--input-format", "text", "--parallel", "2", *remote],
            )
        )
    assert (far.returncode, near.returncode, many.returncode) == (0, 0, 0), far.stderr + many.stderr
    assert far.stdout
    assert [json.loads(line)["event"] for line in many.stdout.splitlines()] == ["start", "answer", "answer"]
    for done in (far, many):
        assert "offloaded 3/3 layers" in done.stderr
        assert "offloaded 0/3 layers" in done.stderr  # the draft
        assert all(f"[{server}] model buffer" in done.stderr for server in servers)
        assert "accepted" in done.stderr


@pytest.mark.slow
def test_connections_are_watched_and_other_models_stay_here(backend: None, tmp_path: Path) -> None:
    """Prevents: an endless wait for a machine that lost its network; a second model whose layers follow the first."""
    path = tiny.write_model(tmp_path / "m.gguf")
    with serving() as (where, _):
        done = subprocess.run(
            [sys.executable, "-c", _LOADED, str(path), where], capture_output=True, text=True, timeout=60
        )
    expected = '{"equal": true, "alive": [true], "length": 1, "local": 1, "layers": [3, 0]}'
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.slow
def test_a_server_lost_in_an_answer_ends_the_command_with_a_sentence(backend: None, tmp_path: Path) -> None:
    """Prevents: an abort with a core dump, or an answer that waits for ever."""
    vocabulary = tiny.ascii_level()
    target = tiny.write_model(tmp_path / "t.gguf", vocabulary=vocabulary, chat_template=tiny.CHATML, n_ctx=100_000)
    special = [token for token, kind in enumerate(vocabulary.types) if kind != 1]  # ends, and those of the template
    with serving() as (where, server):
        common = ["-m", str(target), "--temp", "1", "-n", "90000", "-t", "1", "-c", "100000", "--rpc", where, "-q"]
        forbidden = [word for token in special for word in ("--logit-bias", f"{token}=-inf")]
        command = [sys.executable, "-m", "specllama", "run", *common, *forbidden, "hello"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as answering:
            assert answering.stdout is not None
            assert answering.stderr is not None
            assert answering.stdout.read(20)  # in the middle of the answer
            server.kill()
            answering.stdout.read()
            said = answering.stderr.read().decode()
            assert answering.wait(timeout=30) == 1
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "hint"]
    assert where in said
