"""A file of JSON rows to which a long measurement appends, so that an interrupted run can be continued."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as written by `append`; None for anything else."""
    try:
        row = json.loads(line)
        return row if isinstance(row[row["kind"]], dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. Skips a damaged last line, from a killed run, with a note; other damage is SystemExit."""
    lines = _lines(path)
    for n, line in enumerate(lines, 1):
        if (row := _row(line)) is not None:
            yield row
        elif n == len(lines):
            print(f"note: {path}, line {n}, is incomplete and was skipped", file=sys.stderr)
        else:
            raise SystemExit(f"{path}, line {n}, is not a JSON row")


def mend(path: Path) -> None:
    """Removes a damaged last line, or adds a missing newline, so that the next row starts on a new line."""
    lines = _lines(path)
    if not lines:
        return
    with path.open("r+b") as file:  # never rewritten: it contains all measurements
        if _row(lines[-1]) is None:
            file.truncate(sum(map(len, lines[:-1])))
        elif not lines[-1].endswith(b"\n"):
            file.seek(0, 2)
            file.write(b"\n")


def append(path: Path, kind: str, what: Mapping[str, Any]) -> None:
    """Appends a row to the file and closes it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, kind: dict(what)}, ensure_ascii=False) + "\n")


def difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings in which two runs differ; empty if there are none."""
    now = json.loads(json.dumps(now))  # as it comes back from a file: tuples are lists there
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in names)
