"""Whether our kernels (specllama/kernels) are usable: tested once per library, llama.cpp build and CPU, in a child.

The child compares the library with plain C++, attaches it, and decodes with a tiny model, whose rows must not depend on
the tokens beside them. If anything is wrong, llama.cpp's own kernels compute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specllama.base import child
from specllama.base import disk as storage
from specllama.base.cpu import this_cpu
from specllama.base.errors import SpecllamaError
from specllama.kernels import build
from specllama.kernels.library import ISA_VARIABLE
from specllama.llama import crash_test, library_hash

NOT_BUILT = "they are not compiled"
_VERSION = 1  # increase it when the test changes: old results are then ignored
_TESTED = "kernels/tested"  # the kind of record about a library: what is wrong, by llama.cpp build and CPU


def usable() -> Path | None:
    """The library, if it is built and its test has passed."""
    library = build.library() if not build.unsupported() else None
    return library if library is not None and _known(library) == "" else None


def problem() -> str:
    """Why our kernels are not used; empty if they are. Tests them where that was not done yet."""
    if reason := build.unsupported():
        return reason
    library = build.library()
    known = _known(library)
    if known is None:
        record, here = storage.FileRecord(_TESTED, library), _circumstances()
        try:
            known = crash_test.kernels_problem(library)
        except SpecllamaError as error:
            return str(error)  # not kept: the next command tries again
        child.known[_key(library, here)] = known  # there may be no cache to keep it in
        record.keep({**(record.value(dict[str, str]) or {}), here: known})
    return known


def is_fault(reason: str) -> bool:
    """True if `reason`, from `problem`, is a failure, and not a machine without them or that they are not made for."""
    return bool(reason) and reason not in (NOT_BUILT, build.unsupported())


def renew() -> None:
    """Compile the library again; as another file, it is tested again. Raises BackendError."""
    child.known.clear()
    build.build(again=True)


def _known(library: Path) -> str | None:
    """What is wrong with the library; None if it was not tested yet."""
    if not library.is_file():
        return NOT_BUILT
    if not _is_ours(Path(os.path.realpath(library))):
        return f"other users can change {library}"
    here, results = _circumstances(), storage.FileRecord(_TESTED, library).value(dict[str, str]) or {}
    return results.get(here, child.known.get(_key(library, here)))


def _is_ours(library: Path) -> bool:
    """True if only this user and the administrator can change the file or replace it: its code runs in this process."""
    if sys.platform == "win32":
        return True
    found = [path.stat() for path in (library, *library.parents[:2])]
    return all(each.st_uid in (0, os.geteuid()) and not each.st_mode & build.OTHERS_WRITE for each in found)


def _key(library: Path, here: str) -> tuple[str, ...]:
    return _TESTED, str(library), here


def _circumstances() -> str:
    folder = crash_test.library_folder()
    return f"{_VERSION} {wanted_isa()} {library_hash.of(folder) if folder else ''} {this_cpu().fingerprint}"


def wanted_isa() -> str:
    """The instruction set that the user asks for; empty = the best."""
    return os.environ.get(ISA_VARIABLE, "")
