"""What the Hub's library shows, logs and complains of, made fit for a `FetchWatch` and for one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specllama.base.disk import FetchWatch
from specllama.base.errors import DownloadError

_RETRYING = re.compile(r"Trying to resume|Retrying in")


def bar_class(watch: FetchWatch) -> Any:
    """A class that the library takes for tqdm's and that tells `watch`."""

    class Bar:
        def __init__(self, *_args: object, total: int | None = None, initial: int = 0, **_options: object) -> None:
            self.total, self.n = total, 0
            self.update(initial)

        def update(self, n: float = 1) -> None:
            self.n += int(n)
            watch.advance(int(n))

        def update_transfer(self, n: float) -> None:
            """Bytes on the wire; with this method the library makes one bar for them and for what is written."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return lambda *_args, **_options: None  # everything about looks

    return Bar


class _Forward(logging.Handler):
    """Says once that the library tries again, and drops everything else."""

    def __init__(self, watch: FetchWatch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._told and _RETRYING.search(record.getMessage()):
            self._told = True
            self._watch.note("the connection broke: trying again")


@contextmanager
def forward_log(watch: FetchWatch) -> Iterator[None]:
    """The log of the library, which must be imported by now, goes to `watch` and not to stderr."""
    log = logging.getLogger("huggingface_hub")
    handlers, log.handlers = log.handlers, [_Forward(watch)]
    try:
        yield
    finally:
        log.handlers = handlers


def reason(error: BaseException) -> str:
    """The operating system's word for what went wrong, found in the chain of errors; else the error's first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    lines = str(error).splitlines()
    return lines[0][:120] if lines and lines[0] else type(error).__name__


def nothing_left(name: str, refusals: Sequence[DownloadError]) -> DownloadError:
    """The one error that says why no source had the model `name`."""
    if len(refusals) == 1:
        return refusals[0]
    reasons = "; ".join(str(error) for error in refusals)
    hint = next((error.hint for error in refusals if error.hint), "")
    return DownloadError(f"{name} could not be fetched: {reasons}", hint=hint)
