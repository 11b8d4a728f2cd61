"""A generator for `async for`, computed in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from threading import Event, Semaphore
from typing import TypeVar

T = TypeVar("T")
AHEAD = 16  # values that may wait for the reader


async def in_thread(source: Generator[T, None, None], cancel: Callable[[], None]) -> AsyncGenerator[T, None]:
    """The values of `source`, which begins and ends in one thread.

    If the reader leaves early, `cancel` is called, which should make `source` end soon; this waits for its end.
    """
    loop, found = asyncio.get_running_loop(), asyncio.Queue[list[T]]()
    left, room = Event(), Semaphore(AHEAD)

    def compute() -> None:
        with closing(source):
            for value in source:
                room.acquire()
                if left.is_set():
                    return
                loop.call_soon_threadsafe(found.put_nowait, [value])

    worker = loop.run_in_executor(None, compute)
    worker.add_done_callback(lambda _: found.put_nowait([]))
    try:
        while values := await found.get():
            room.release()
            yield values[0]
        await worker
    finally:
        left.set()
        room.release()
        if not worker.done():
            cancel()
            await asyncio.wait([worker])
            worker.exception()  # the reader has left: the error has no reader
