"""Work in a child process: llama.cpp may end its process, and memory is free once the process is gone."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar, cast

from specllama.base import with_parent
from specllama.base.errors import BackendError, SpecllamaError
from specllama.base.signals import ENDING

T = TypeVar("T")

Tell = Callable[[str, float], None]  # the current step, and the share that is done
TellShare = Callable[[float], None]  # the share alone

# What this process has found out and its children need not find out again; goes to them with each job.
known: dict[tuple[str, ...], str] = {}
is_child = False  # of another specllama, which has tested llama.cpp


@dataclass(frozen=True, slots=True)
class _Progress:
    what: str
    share: float


@dataclass(frozen=True, slots=True)
class _Done:
    result: object


def main() -> None:
    """Entry point of the child: does the work that comes on stdin. Ignores the signals that also reach the parent."""
    global is_child
    is_child = True
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    try:
        os.fstat(2)
    except OSError:  # stderr is closed, and the next file would get its number
        os.open(os.devnull, os.O_WRONLY)
    try:
        handed, work = pickle.load(sys.stdin.buffer)
    except EOFError:
        return  # the parent is gone
    known.update(handed)
    with_parent.watch()
    parent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what llama.cpp prints is no message
    answer(work, parent)


def answer(work: Callable[[Tell], object], parent: IO[bytes]) -> None:
    """Send the progress of `work`, then its result or its error."""

    def send(message: object) -> None:
        pickle.dump(message, parent)
        parent.flush()

    try:
        send(_Done(work(lambda what, share: send(_Progress(what, share)))))
    except SpecllamaError as error:
        send(error)
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:  # a traceback would land in the middle of the parent's screen
        send(BackendError(f"the child process failed: {type(error).__name__}: {error}"))


@contextmanager
def _shielded() -> Iterator[None]:
    """Block the signals of ENDING, which a child that starts now inherits.

    A terminal, a service manager and `timeout` send them to a whole group of processes.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def started(code: str, *arguments: str, job: bytes = b"", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child that runs `code` with our import path and finds `job` on its stdin; killed at the end of the block.

    The code calls `with_parent.watch`, so that the child also ends with this process. `options`: of Popen.
    """
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); {code}"
    # `-I` ignores the user's folder and environment.
    command = [sys.executable, "-I", "-c", code, json.dumps(sys.path), *arguments]
    with ExitStack() as at_end:
        with _shielded():  # at its end the signals arrive
            process = at_end.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
            )
            stdin, process.stdin = process.stdin, None  # `communicate` would close it, which ends the child
            assert stdin is not None
            at_end.callback(_close, stdin)
            at_end.callback(process.kill)
        with suppress(OSError):  # it has died
            stdin.write(job)
            stdin.flush()
        yield process


def _close(pipe: IO[bytes]) -> None:
    with suppress(OSError):  # it holds bytes that nothing reads any more
        pipe.close()


def run(work: Callable[[Tell], T], tell: Tell) -> T:
    """Call `work`, a function of a module or a partial of one, in a child process.

    Raises the error that `work` raises, and BackendError if the child dies.
    """
    code = "from specllama.base import child; child.main()"
    with started(code, job=pickle.dumps((known, work))) as process:
        assert process.stdout is not None
        try:
            while True:
                message = pickle.load(process.stdout)
                if isinstance(message, _Done):
                    return cast(T, message.result)
                if isinstance(message, SpecllamaError):
                    raise message
                tell(message.what, message.share)
        except (EOFError, pickle.UnpicklingError):
            raise BackendError(f"the child process ended with code {process.wait()}") from None
