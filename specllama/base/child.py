"""Work in a child process: llama.cpp may end its process, and what a process held in memory is free when it is gone."""

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

Tell = Callable[[str, float], None]  # what is being done, and the share of it that is done


@dataclass(frozen=True, slots=True)
class _Told:
    """Progress."""

    what: str
    share: float


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error, by the name of its class."""

    kind: str
    message: str
    hint: str

    def error(self) -> SpecllamaError:
        """The error again."""
        kind = getattr(errors, self.kind, BackendError)
        return cast(SpecllamaError, kind(self.message, hint=self.hint))


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of it."""

    result: object


def _end_with_parent() -> None:
    """End when the parent has ended, however it did: the result has no reader any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _child(work: Callable[[Tell], object], connection: Connection) -> None:
    """Entry point of the child. Ignores SIGINT; the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()  # llama.cpp frees the interpreter while it works
    try:
        connection.send(_Done(work(lambda what, share: connection.send(_Told(what, share)))))
    except SpecllamaError as error:
        connection.send(_Failed(type(error).__name__, str(error), error.hint))
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:  # a traceback would land in the middle of the parent's screen
        connection.send(_Failed("BackendError", f"the process that worked failed: {type(error).__name__}: {error}", ""))


@contextmanager
def _shielded() -> Iterator[None]:
    """A child that starts now leaves Ctrl-C to its parent from its first moment on."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(work: Callable[[Tell], T], tell: Tell) -> T:
    """What `work` returns in a child process; it must be a function of a module, or a partial of one.

    Raises what it raises, and BackendError where the child dies.
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
                raise message.error()
            tell(message.what, message.share)
    except EOFError:
        process.join()
        raise BackendError(f"the process that worked ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
