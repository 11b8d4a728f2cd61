"""The text of a TOML file without some of its tables; what people wrote around them stays."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = re.compile(r"\s*\[.*\]\s*(#.*)?")
_REMARK = re.compile(r"\s*(#.*)?")  # a comment or nothing


def _names(line: str) -> tuple[str, ...]:
    """The names in a table's header, outermost first; none where the line is no header after all."""
    try:
        table: object = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    names = []
    while table:
        if isinstance(table, list):
            table = table[0]
        elif isinstance(table, dict):
            name, table = next(iter(table.items()))
            names.append(name)
        else:
            return ()
    return tuple(names)


def without_tables(text: str, doomed: Collection[tuple[str, str]]) -> str:
    """`text` without the tables `[a.b]` of `doomed` and those below them. Comments above a table stay, those in it go.

    Works line by line, so that what looks like a header inside of a long value misleads it: compare what the result
    reads as.
    """
    kept: list[str] = []
    remarks: list[str] = []  # they may belong to the next table
    drops = False
    for line in text.splitlines(keepends=True):
        names = _names(line) if _HEADER.fullmatch(line.rstrip("\r\n")) else ()
        if names:
            drops = names[:2] in doomed
        if _REMARK.fullmatch(line.rstrip("\r\n")):
            remarks.append(line)
        elif drops and not names:
            remarks = []
        else:
            kept += remarks
            remarks = []
            if not drops:
                kept.append(line)
    return "".join(kept + remarks)
