"""Whether our kernels (specllama/kernels) are usable: tested once per library, llama.cpp build and CPU, in a child.

The child compares the library with plain C++, attaches it, and decodes with a tiny model, whose rows must not depend on
the tokens beside them. If anything is wrong, llama.cpp's own kernels compute.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from specllama.base import disk as storage
from specllama.base.cpu import this_cpu
from specllama.base.errors import SpecllamaError
from specllama.base.jsonable import UNREADABLE, parsed, typed
from specllama.kernels import build
from specllama.llama import crash_test, library_hash

NOT_BUILT = "they are not compiled"
_VERSION = 1  # increase it when the test changes: old results are then ignored
_RECORD = "tested.json"  # beside the library: what is wrong, by llama.cpp build and CPU


def usable() -> Path | None:
    """The library, if it is built and its test has passed."""
    if build.unsupported():
        return None
    library = build.library()
    return library if library.is_file() and _results(library).get(_circumstances()) == "" else None


def problem() -> str:
    """Why our kernels are not used; empty if they are. Tests them where that was not done yet."""
    if reason := build.unsupported():
        return reason
    library = build.library()
    if not library.is_file():
        return NOT_BUILT
    results, here = _results(library), _circumstances()
    if here not in results:
        try:
            results[here] = crash_test.kernels_problem(library)
        except SpecllamaError as error:
            return str(error)  # not kept: the next command tries again
        with contextlib.suppress(OSError):
            storage.write_own(library.with_name(_RECORD), json.dumps(results, indent=1).encode())
    return results[here]


def renew() -> None:
    """Compile the library again, and forget earlier tests. Raises BackendError."""
    if not build.unsupported():
        for old in (build.library(), build.library().with_name(_RECORD)):
            with contextlib.suppress(OSError):
                old.unlink()
    build.build()


def _circumstances() -> str:
    folder = crash_test.library_folder()
    return f"{_VERSION} {library_hash.of(folder) if folder else ''} {this_cpu().fingerprint}"


def _results(library: Path) -> dict[str, str]:
    try:
        return typed(dict[str, str], parsed(library.with_name(_RECORD).read_text(encoding="utf-8")))  # type: ignore[no-any-return]
    except (OSError, *UNREADABLE):
        return {}
