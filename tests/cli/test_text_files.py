"""Every file of text that a user can give goes through one reader."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama.base.errors import ReportError, SpecllamaError, unreadable
from specllama.base.jsonable import to_plain
from specllama.batch.requests import RequestReader
from specllama.chat import saved
from specllama.chat.settings import Settings, to_json
from specllama.cli import templates
from specllama.cli.batch.source import RequestFile
from specllama.cli.bench import command as bench
from specllama.cli.chat import reading
from specllama.cli.chat.input import Lines
from specllama.cli.prompting import _read_file, template_of
from specllama.files import models_toml
from specllama.files.gguf_check import read_file
from specllama.prompts import load as prompts
from tests.benchreports import report


def _typed(path: Path) -> str:
    with path.open() as file:
        return Lines(file, None).read()


CHAT = {"schema": {"name": "specllama.chat", "version": 1}, "settings": to_json(Settings()), "messages": []}
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "run --file": (lambda path: _read_file("--file", str(path)), "Grüße"),
    "bench --prompts": (prompts.read, '{"prompt": "Grüße"}\n'),
    "chat --load": (saved.load, json.dumps(CHAT)),
    "chat < FILE": (_typed, "Grüße\n"),
    "models.toml": (models_toml.load, 'default = "Grüße"\n'),
    "bench compare": (lambda path: bench._read(str(path)), json.dumps(to_plain(report()))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_text_and_utf_16_is_named(name: str, tmp_path: Path) -> None:
    """A byte order mark was taken by `-f` and refused by `--load`; UTF-16 got the hint for Latin-1."""
    read, text = READERS[name]
    plain, marked, wide = (tmp_path / each for each in ("plain", "marked", "wide"))
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    wide.write_text(text, encoding="utf-16")
    assert str(read(marked)).replace("marked", "plain") == str(read(plain))
    with pytest.raises(SpecllamaError) as caught:
        read(wide)
    assert "UTF-16" in caught.value.hint


OTHERS: dict[str, Callable[[Path], object]] = {
    "batch": lambda path: list(RequestFile.of(str(path), "text").read(RequestReader("text", Settings()))),
    "/read": lambda path: reading.find(str(path)),
    "/read of several": lambda path: reading.find(f"{path} {path}"),
    "-m": read_file,
    "--chat-template": lambda path: template_of(str(path)),
    "--template": lambda path: templates.find(str(path)),
}


@pytest.mark.parametrize("read", [*(read for name, (read, _) in READERS.items() if "<" not in name), *OTHERS.values()])
@pytest.mark.parametrize("name", ["missing", "folder", "x" * 300])
def test_a_file_that_cannot_be_read_gets_a_hint(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    """Prevents: an error that leaves open what to do; a traceback for a name that is too long."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecllamaError) as caught:
        read(tmp_path / name)
    assert caught.value.hint


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.EFBIG, errno.EIO, errno.ELOOP])
def test_the_hint_depends_on_the_reason(code: int) -> None:
    """Prevents: "check the path" for a file of another user."""
    error = unreadable("a.txt", OSError(code, os.strerror(code)), ReportError)
    assert isinstance(error, ReportError)
    assert os.strerror(code) in str(error)
    assert (error.hint == unreadable("b", OSError(), ReportError).hint) == (code in (errno.ENOENT, errno.ELOOP))
