"""Work in a child process: llama.cpp may end its process, and memory is free once the process is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar, cast

from specllama.base import errors
from specllama.base.errors import BackendError, SpecllamaError

T = TypeVar("T")

Tell = Callable[[str, float], None]  # the current step, and the share that is done
TellShare = Callable[[float], None]  # the share alone

# A terminal, a service manager and `timeout` send these to a whole group of processes.
_PARENTS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


@dataclass(frozen=True, slots=True)
class _Progress:
    what: str
    share: float


@dataclass(frozen=True, slots=True)
class _Failed:
    kind: str  # the name of an error's class
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class _Done:
    result: object


def _end_with_parent() -> None:
    """End when the parent has ended, also when it was killed: the result has no reader any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _child(work: Callable[[Tell], object], connection: Connection) -> None:
    """Entry point of the child. Ignores the signals that also reach the parent; the parent ends it."""
    for number in _PARENTS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()  # llama.cpp frees the interpreter while it works
    try:
        connection.send(_Done(work(lambda what, share: connection.send(_Progress(what, share)))))
    except SpecllamaError as error:
        connection.send(_Failed(type(error).__name__, str(error), error.hint))
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:  # a traceback would land in the middle of the parent's screen
        connection.send(_Failed("BackendError", f"the child process failed: {type(error).__name__}: {error}", ""))


@contextmanager
def _shielded() -> Iterator[None]:
    """Block the parent's signals, which a child that starts now inherits."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(work: Callable[[Tell], T], tell: Tell) -> T:
    """Call `work`, a function of a module or a partial of one, in a child process.

    Raises the error that `work` raises, and BackendError if the child dies.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, theirs), daemon=True)
    with _shielded():
        process.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, _Done):
                return cast(T, message.result)
            if isinstance(message, _Failed):
                kind: type[SpecllamaError] = getattr(errors, message.kind, BackendError)
                raise kind(message.message, hint=message.hint)
            tell(message.what, message.share)
    except EOFError:
        process.join()
        raise BackendError(f"the child process ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
