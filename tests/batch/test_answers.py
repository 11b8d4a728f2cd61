"""The file of answers: what survives any end of the program, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specllama.base.errors import DiskFull, PromptError, UsageError
from specllama.batch.answers import SCHEMA, AnswerFile, Kept, kept_in
from specllama.batch.requests import Asked, BadLine
from specllama.chat.settings import Settings
from tests.homes import file_size_limit

HEADER = json.dumps({"event": "start", "schema": SCHEMA, "settings": {"temp": 0.8}})
LINES = [
    json.dumps({"event": "answer", "id": "x", "line": 1, "request": "d1", "text": "é"}, ensure_ascii=False),
    json.dumps({"event": "answer", "id": 2, "line": 2, "request": "d2", "text": ""}),
    json.dumps({"event": "error", "id": None, "line": 3, "request": "d3", "error": {}}),
    json.dumps({"event": "error", "id": 4, "line": 4, "request": "d4", "error": {}}),
]
WHOLE = "".join(f"{line}\n" for line in (HEADER, *LINES)).encode()


def asked(id: str | int, digest: str, n_line: int = 9) -> Asked:
    return Asked(n_line, id, (), False, Settings(), digest)


def written(path: Path, data: bytes = WHOLE) -> Kept:
    path.write_bytes(data)
    return kept_in(path)


def test_what_is_there_is_found_again(tmp_path: Path) -> None:
    """Prevents: an answer twice, or a request without one."""
    kept = written(tmp_path / "a")
    assert (kept.n_errors, kept.n_bytes, kept.header["settings"]) == (2, len(WHOLE), {"temp": 0.8})
    there = [asked("x", "d1"), asked(2, "d2"), BadLine(3, PromptError(""), "d3"), asked(4, "d4")]
    assert not any(map(kept.waits, there))
    missing = [asked("2", "d2"), asked("y", "d1"), BadLine(3, PromptError(""), "d"), BadLine(9, PromptError(""), "d3")]
    assert all(map(kept.waits, missing))


def test_another_request_of_an_answered_id_is_refused(tmp_path: Path) -> None:
    """Prevents: the answer to a question that was changed since."""
    with pytest.raises(UsageError):
        written(tmp_path / "a").waits(asked("x", "other"))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """Prevents: a file whose halves were sampled in two ways."""
    kept = written(tmp_path / "a")
    kept.require({"temp": 0.8})
    for settings in ({"temp": 0.7}, {}, {"temp": 0.8, "top_k": 1}):
        with pytest.raises(UsageError):
            kept.require(settings)
    Kept().require({"temp": 0.7})


def test_a_file_that_was_cut_anywhere_loses_no_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: half a line in the middle of the file after a power failure; a whole answer that is thrown away."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "a"
    for n in range(len(WHOLE) + 1):
        kept = written(path, WHOLE[:n])
        with AnswerFile(path, kept) as file:
            file.add(["end"])
        lines = path.read_bytes().split(b"\n")
        assert lines[-2:] == [b"end", b""]
        assert lines[:-2] == WHOLE.split(b"\n")[: len(lines) - 2]
        n_whole = WHOLE[:n].count(b"\n") + (WHOLE[n : n + 1] == b"\n")
        assert len(lines) - 2 == n_whole
        assert len(kept.done) + len(kept.failed) == max(n_whole - 1, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"{}\n",
        LINES[0].encode(),
        HEADER.encode() + b"\n\nx\n" + LINES[0].encode(),
        HEADER.replace('"settings": {"temp": 0.8}', '"settings": 5').encode() + b"\n" + LINES[0].encode(),
        HEADER.replace("settings", "other").encode() + b"\n" + LINES[0].encode(),
        HEADER.encode() + b"\n" + HEADER.encode() + b"\n" + LINES[0].encode(),
        HEADER.encode() + b'\n{"event": "other"}\n' + LINES[0].encode(),
        HEADER.encode() + b'\n{"event": "answer", "id": [], "request": ""}\n' + LINES[0].encode(),
        b"\0" * 100,
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    """Prevents: notes that are cut because they do not look like answers; a traceback; resuming with any settings."""
    with pytest.raises(UsageError):
        written(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


def test_an_existing_file_and_one_in_use_are_refused(tmp_path: Path) -> None:
    """Prevents: answers that are overwritten; two programs that write one file."""
    path = tmp_path / "a"
    with AnswerFile(path) as file:
        file.add([HEADER])
        with pytest.raises(UsageError):
            AnswerFile(path)
        with pytest.raises(UsageError):
            AnswerFile(path, kept_in(path))
    with AnswerFile(path, kept_in(path)) as file:
        file.add(LINES)
    assert path.read_bytes() == WHOLE
    for missing in (tmp_path / "none" / "a", tmp_path):
        with pytest.raises(UsageError):
            AnswerFile(missing, Kept())


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """Prevents: a traceback; an answer that is cut, or lost with those before it."""
    path = tmp_path / "a"
    with AnswerFile(path) as file:
        file.add([HEADER])
        with file_size_limit(len(HEADER) + 1 + len(LINES[0]) + 10), pytest.raises(DiskFull):
            file.add(LINES)
    kept = kept_in(path)
    assert (list(kept.done), kept.n_bytes) == (["x"], path.stat().st_size)
    with AnswerFile(path, kept) as file:
        file.add(LINES[1:])
    assert path.read_bytes() == WHOLE
