"""Servers of llama.cpp's RPC back end, which compute layers of a model on other machines.

llama.cpp ends its process when a server cannot be reached or is lost. So a child process connects first, and in the
main process a callback tells what was lost. llama.cpp waits for ever for a server that says nothing: the child has a
time limit, and later the system gives up a connection that has broken (`watch_connections`). A server serves one
program at a time, without a password and without encryption.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specllama.base import child as children
from specllama.base import with_parent
from specllama.base.errors import BackendError, SpecllamaError
from specllama.llama.bindings import bindings, devices, symbol

LIBRARY = "GGML_BACKEND_PATH"  # llama.cpp's variable for a back end that is a library of its own
DEVICE = re.compile(r"RPC\d+")  # names of devices on servers
PATIENCE_S = 15.0  # for a child that imports llama.cpp and connects
# A connection without an answer is tested after IDLE_S, then every PROBE_S, and given up after PROBES tests.
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 4

_CHILD = "from specllama.llama import rpc; rpc.child()"
_connected: list[str] = []
_keep_alive: list[object] = []  # callbacks that llama.cpp may call until the process ends


def say(error: SpecllamaError) -> None:
    """The error on stderr, without its hint."""
    text = "".join(each if each.isprintable() else " " for each in str(error))
    os.write(2, f"error: {text}\n".encode("utf-8", "replace"))


def connect(servers: Sequence[str], lost: Callable[[SpecllamaError], None] = say) -> None:
    """Add the devices of these servers, once. Raises BackendError if one cannot be used.

    `lost` gets the error when llama.cpp gives up a server. It runs in any thread, and the process ends after it with
    exit code 1.
    """
    new = [server for server in servers if server not in _connected]
    if not new:
        return
    add, register = _functions()
    if not children.is_child:
        _require_answers(new)

    def end(message: str) -> None:
        try:
            lost(_loss(message))
        finally:
            os._exit(1)  # else llama.cpp ends it with SIGABRT

    _call_at_abort(end)
    for server in new:
        if not (registry := add(server.encode())):
            raise BackendError(f"the RPC server {server} has no devices")
        register(registry)
        _connected.append(server)


def is_used() -> bool:
    """True if this process has devices of servers."""
    return bool(_connected)


def _functions() -> tuple[Any, Any]:
    """Of llama.cpp: add a server, which returns its registry, and register it. Raises BackendError."""
    bindings()
    registry = symbol("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not registry and (library := os.environ.get(LIBRARY)):
        registry = symbol("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(os.fsencode(library))
    if not registry:
        raise BackendError(
            "the installed llama.cpp has no RPC back end",
            hint=f'build it with CMAKE_ARGS="-DGGML_RPC=ON", or set {LIBRARY} to its library',
        )
    find = symbol("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(find(registry, b"ggml_backend_rpc_add_server"))
    return add, symbol("ggml_backend_register", None, ctypes.c_void_p)


def _call_at_abort(receive: Callable[[str], None]) -> None:
    """`receive` gets the reason, without its place in the source, before llama.cpp ends the process."""

    def decoded(message: bytes) -> None:
        receive(re.sub(r"^\S+:\d+: ", "", message.decode("utf-8", "replace").strip()))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(decoded)
    _keep_alive.append(callback)
    symbol("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(callback, ctypes.c_void_p))


def _loss(reason: str) -> BackendError:
    if "RPC" in reason or "connect" in reason:
        where = " or ".join(_connected)
        return BackendError(f"the RPC server {where} was lost", hint="start it again: ggml-rpc-server")
    return BackendError(f"llama.cpp failed: {reason}")


def _require_answers(servers: Sequence[str]) -> None:
    """Connect in a child, which may be ended. Raises BackendError with the reason."""
    try:
        with children.started(_CHILD, *servers, stderr=subprocess.DEVNULL) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    *done, last = ["", *output.decode("utf-8", "replace").splitlines()]
    if last == "ok":
        return
    server = next((server for server in servers if server not in done), servers[-1])
    if "Failed to connect" in last:
        reason, hint = f"no RPC server answers at {server}", "start it: ggml-rpc-server"
    elif "handshake" in last or "malformed" in last:
        reason = f"what answers at {server} is no RPC server of this version of llama.cpp"
        hint = "run ggml-rpc-server of the same version as the installed llama.cpp"
    elif last in servers or not last:
        server = last or server
        reason = f"the RPC server {server} does not answer within {PATIENCE_S:.0f} seconds"
        hint = "it serves one program at a time: end the other one, or check the network"
    else:
        reason, hint = f"the RPC server {server} cannot be used: {last}", ""
    raise BackendError(reason, hint=hint)


def _tell(text: object) -> None:
    """A line for the parent."""
    os.write(1, f"{text}\n".encode())


def child() -> None:
    """Entry point of the child: names each server before it connects, then says ok, or why llama.cpp gave up."""
    children.is_child = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with_parent.watch()

    def end(reason: str) -> None:
        _tell(reason)
        os._exit(1)

    try:
        add, _ = _functions()
        _call_at_abort(end)
        for server in sys.argv[1:]:
            _tell(server)
            add(server.encode())
        _tell("ok")
    except SpecllamaError as error:
        _tell(error)
    os._exit(0)


def local_devices() -> ctypes.Array[ctypes.c_void_p]:
    """The GPUs of this machine as llama.cpp's list, which ends with null; for a model that stays here."""
    count = symbol("ggml_backend_dev_count", ctypes.c_size_t)()
    get = symbol("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    ours = [get(i) for i, device in zip(range(count), devices(), strict=True) if device.is_gpu and is_here(device.name)]
    return (ctypes.c_void_p * (len(ours) + 1))(*ours)


def is_here(device: str) -> bool:
    """True for a device of this machine, by its name."""
    return DEVICE.fullmatch(device) is None


def watch_connections() -> None:
    """Let the system give up connections that have broken, so that llama.cpp does not wait for ever."""
    import psutil

    ports = {int(server.rpartition(":")[2]) for server in _connected}
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.Process().net_connections("tcp"):
            if each.raddr and each.raddr.port in ports and each.fd >= 0:
                with socket.socket(fileno=os.dup(each.fd)) as ours:  # options belong to the connection
                    _keep_testing(ours)


def _keep_testing(ours: socket.socket) -> None:
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    whole_s = _IDLE_S + _PROBES * _PROBE_S
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", 1000 * whole_s),  # for data that was sent
    ):
        if (option := getattr(socket, name, None)) is not None:
            ours.setsockopt(socket.IPPROTO_TCP, option, value)
