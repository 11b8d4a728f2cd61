"""Reports that took minutes to make: no full disk, closed pipe or Ctrl-C loses one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from platformdirs import user_state_path

from specllama.base.disk import meant, write_text
from specllama.base.errors import Interrupted, ReportError, SpecllamaError, UsageError
from specllama.cli.screen.ending import breakable, endings, handling
from specllama.cli.screen.output import Output


def writable(option: str, name: str) -> Path:
    """The file that an option names, checked before the minutes. Raises UsageError."""
    path = meant(name)
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    is_replaced = os.path.isfile(real) or not os.path.exists(real)  # a device is written to
    changed = folder if is_replaced else real
    reason = (
        "it is a folder" if os.path.isdir(real)
        else "there is no such folder" if not os.path.isdir(folder)
        else "permission denied" if not os.access(changed, os.W_OK)
        else _no_place(real)
    )  # fmt: skip
    if reason:
        raise UsageError(f"{option} {name} cannot be written: {reason}", hint="name another file")
    return path


def _no_place(path: str) -> str:
    """Why no file can be at a path, such as a name that is too long; empty if one can."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_report(path: Path, text: str, output: Output) -> None:
    """Write the full report. Raises ReportError after writing it to another place or printing it."""
    try:
        with breakable():
            write_text(path, text + "\n")
    except OSError as error:
        place = _rescued(lambda: text, path.suffix)
        if place is None:
            output.text(text)
        hint = f"the full report is {'above' if place is None else f'in {place}'}"
        raise ReportError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
    output.note(f"the full report is in {path}")


@contextmanager
def not_lost(output: Output, suffix: str, text: Callable[[], str], place: Path | None = None) -> Iterator[None]:
    """If the block cannot print a report, say where it is: in `place`, or in a new file with `text`."""
    try:
        yield
    except BaseException as error:  # Ctrl-C included
        place = place or _rescued(text, suffix)
        if place is None:
            raise
        hint = f"what was measured is in {place}"
        if isinstance(error, SpecllamaError) and not isinstance(error, Interrupted):
            error.hint = "; ".join(filter(None, (error.hint, hint)))
        else:  # a signal, or a closed pipe or terminal: no error
            replace(output, quiet=False).warn("the report was not printed", hint)
        raise


def _rescued(text: Callable[[], str], suffix: str) -> Path | None:
    """`text()` in a new file, in the folder for temporary files or that of our state; None if neither has room."""
    with handling(endings(), lambda *_: None):  # the next Ctrl-C must not lose it
        for folder in (None, user_state_path("specllama")):
            path = None
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                with NamedTemporaryFile(
                    "w", encoding="utf-8", prefix="specllama-", suffix=suffix, dir=folder, delete=False
                ) as file:
                    path = Path(file.name)
                    file.write(text() + "\n")
                return path
            except OSError:
                if path is not None:
                    path.unlink(missing_ok=True)
        return None
