"""The engine in a second thread: the main thread draws, handles Ctrl-C, and gets the events in batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import FrameType
from typing import Generic, TypeVar

from specllama.base.errors import Interrupted
from specllama.cli.screen.ending import break_a_write, endings, handling, leave_at_once
from specllama.core.types import Cancel

E = TypeVar("E")  # events of the engine, or of a benchmark

# The longest wait of the main thread: Python runs signal handlers there only, and not while it waits.
LISTEN_S = 0.1
# The tokens of a step come in one burst: this long after the first, all have arrived.
SETTLE_S = 0.01


class _End:
    """The last item of the queue; `error` if the work failed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Worker(Generic[E]):
    """Iterates over `events` in its own thread. A context manager: leaving it early cancels and waits."""

    def __init__(self, events: Iterable[E], cancel: Cancel) -> None:
        self._events = events
        self._cancel = cancel
        self._queue: SimpleQueue[E | _End] = SimpleQueue()
        # A daemon thread: a second Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def _work(self) -> None:
        try:
            for event in self._events:
                self._queue.put(event)
        except BaseException as error:
            self._queue.put(_End(error))
        else:
            self._queue.put(_End())

    def batches(self, gap_s: float = 0.0) -> Iterator[list[E]]:
        """Events in order, at most one batch every `gap_s`; some batches are empty. Re-raises what the work raised.

        Fewer batches mean fewer switches of the interpreter away from the engine's thread.
        """
        earliest = monotonic()
        while True:
            sleep(max(earliest - monotonic(), 0.0))
            batch = self._gather()
            earliest = monotonic() + gap_s
            if batch and isinstance(batch[-1], _End):
                yield [item for item in batch if not isinstance(item, _End)]
                if batch[-1].error is not None:
                    raise batch[-1].error
                return
            yield batch  # type: ignore[misc]  # an _End is always the last item

    def _gather(self) -> list[E | _End]:
        """The next event and those that come with it; nothing if none comes within LISTEN_S."""
        try:
            items = [self._queue.get(timeout=LISTEN_S)]
        except Empty:
            return []
        if not isinstance(items[0], _End):
            sleep(SETTLE_S)
        with contextlib.suppress(Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items

    def __enter__(self) -> Worker[E]:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._cancel.set()
        self._thread.join()


@contextlib.contextmanager
def interruptible(cancel: Cancel, restore: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP set `cancel`, and the end of the block raises SystemExit(128 + signal).

    An `Interrupted` that leaves the block is taken as the effect of the signal. Any other exception goes first: an
    error, or the exit code 1 of an audit that found a fault. A second signal, unless it is SIGHUP, ends a write that
    blocks, so that a report is saved; if nothing is written, it ends the process at once, after `restore`.
    """
    received = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if received:
            break_a_write()
            leave_at_once(number, restore)
        received = number
        cancel.set()

    with handling(endings(), handle):
        try:
            yield
        except Interrupted:
            if not received:
                raise
    if received:
        raise SystemExit(128 + received)
