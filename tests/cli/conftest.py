"""Fixtures of the command line: tiny models, `specllama` in this process and in its own terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pexpect
import pyte
import pytest
from platformdirs import user_cache_path
from rich.cells import cell_len

from specllama import llama
from specllama.base.errors import BackendError
from specllama.cli.app import main
from specllama.cli.screen.terminal import END_FRAME
from specllama.llama import Header, LlamaModel, LoadOptions, tested_kernels
from specllama.llama import crash_test as probe
from tests import tiny

REPOSITORY = Path(__file__).parent.parent.parent


def forbidden(*tokens: int) -> list[str]:
    """Options after which these tokens are never said."""
    return [part for token in tokens for part in ("--logit-bias", f"{token}=-inf")]


ENDLESS = forbidden(9, 10, 11)  # an answer of letters never ends by itself
SILENT = forbidden(96, 97)  # of the ASCII vocabulary, tokens of the template: they show nothing
SPECLLAMA = [sys.executable, "-m", "specllama"]
# A title, a blinking text, a line of its own, and what reorders or hides text.
EVIL = "e\x1b]0;X\x07\x1b[5m\x9b5m\rx\nPASS\tx\x7f\u202e\u2066\u200b\u2060\ufeff\U000e0041v"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, profile or models.toml of the developer; nothing is compiled."""
    for name in list(os.environ):
        if name.startswith("SPECLLAMA_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(tested_kernels, "renew", _compiles_nothing)
    monkeypatch.setenv("SPECLLAMA_SPEC_DRAFT_N_MAX", "4")  # what is drafted must not depend on the clock; see `auto`
    monkeypatch.chdir(tmp_path)


def _compiles_nothing() -> None:
    """`tune` in an empty home would compile for a minute."""
    raise BackendError("no test of the command line compiles kernels")


@pytest.fixture
def auto(plain_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default draft length, decided by a test's profile; nothing is measured."""
    monkeypatch.delenv("SPECLLAMA_SPEC_DRAFT_N_MAX")
    monkeypatch.setenv("SPECLLAMA_MEASURE", "never")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without caches, models and settings; compiled kernels are there, and which tiny models are sound."""
    kept, ours = user_cache_path("specllama"), tmp_path / "cache" / "specllama"
    ours.mkdir(parents=True)
    if (kept / "kernels").is_dir():
        (ours / "kernels").symlink_to(kept / "kernels")
    if (kept / probe.SOUND).is_dir():  # without it each test starts a child for each model
        shutil.copytree(kept / probe.SOUND, ours / probe.SOUND)
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@dataclass(frozen=True)
class Pair:
    """Paths of a tiny target and its draft, and the options that load them."""

    target: Path
    draft: Path

    @property
    def options(self) -> list[str]:
        return ["-m", str(self.target), "-md", str(self.draft), "-t", "1"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Nine letters and three special tokens; the prompt is a word such as 'abc'."""
    return Pair(*tiny.write_pair(tmp_path_factory.mktemp("pair"), n_ctx=200_000))


@pytest.fixture(scope="session")
def byte_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every byte is a token, so that the model writes any text, also control characters."""
    folder = tmp_path_factory.mktemp("bytes")
    return Pair(*tiny.write_pair(folder, vocabulary=tiny.byte_level(), chat_template=tiny.CHATML))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair that speaks ASCII through a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    options = {"vocabulary": tiny.ascii_level(), "chat_template": tiny.CHATML, "n_ctx": 100_000, "noise": 0.03}
    return Pair(*tiny.write_pair(folder, **options))


@pytest.fixture(scope="session")
def short_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair that reads any text and needs little memory."""
    folder = tmp_path_factory.mktemp("short")
    return Pair(*tiny.write_pair(folder, vocabulary=tiny.byte_level(), chat_template=tiny.CHATML, n_ctx=2048))


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level target and a SentencePiece draft; they share all bytes and little else."""
    folder = tmp_path_factory.mktemp("strangers")
    target = tiny.write_model(
        folder / "target.gguf", vocabulary=tiny.byte_level(), chat_template=tiny.CHATML, n_ctx=4096, scale=4.0
    )
    draft = tiny.write_model(folder / "draft.gguf", vocabulary=tiny.sentencepiece(), seed=2, n_ctx=4096, scale=1.0)
    return Pair(target, draft)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadOptions]:
    """The options of every model that is loaded; it is loaded with one thread and an f16 KV cache."""
    options_of: list[LoadOptions] = []
    original, calm = llama.load_together, {"n_threads": 1, "n_threads_batch": 1, "type_k": "f16", "type_v": "f16"}

    def spy(models: Sequence[tuple[Header, LoadOptions]], **rest: Any) -> list[LlamaModel]:
        options_of.extend(options for _, options in models)
        return original([(header, replace(options, **calm)) for header, options in models], **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(llama, "load_together", spy)
    return options_of


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run: TypeAlias = Callable[..., Result]


def record_of(result: Result) -> dict[str, Any]:
    """The object that `--json` printed."""
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert isinstance(record, dict)
    return record


def events_of(result: Result) -> list[dict[str, Any]]:
    """The objects that `--jsonl` printed."""
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.fixture
def specllama(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, children: list[object]) -> Run:
    """Runs `specllama ARGS` in this process, without terminals and children; `stdin` is its input."""
    monkeypatch.setattr(probe, "installed", lambda: probe.ProbeResult(probe.State.OK))

    def run(*args: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main(args)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


class TerminalScreen(pyte.Screen):
    """pyte's screen and the rows that scrolled out of it. A wide character that does not fit goes to the next row."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines)
        self._above: list[str] = []

    def draw(self, data: str) -> None:
        if data.isascii():
            super().draw(data)
            return
        for char in data:
            if cell_len(char) == 2 and self.cursor.x == self.columns - 1 and pyte.modes.DECAWM in self.mode:
                self.carriage_return()
                self.linefeed()
            super().draw(char)

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self._above.append(self._row(0))
        super().index()

    def _row(self, y: int) -> str:
        row = self.buffer[y]
        return "".join(row[column].data for column in range(self.columns)).rstrip()

    @property
    def text_lines(self) -> list[str]:
        """All rows, also those that scrolled out, without trailing blanks and blank rows at the end."""
        lines = [*self._above, *map(self._row, range(self.lines))]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class Terminal:
    """A command in a process and a terminal of its own; `screen` is what a person sees."""

    def __init__(self, command: list[str], columns: int, rows: int, env: dict[str, str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
        self.child = pexpect.spawn(
            command[0], command[1:], dimensions=(rows, columns), env=environment, encoding=None, timeout=60, echo=True
        )
        self.child.delaybeforesend, self.child.ptyproc.delayafterclose = None, 0.0  # pauses that no test needs
        self.display = TerminalScreen(columns, rows)
        self._stream = pyte.ByteStream(self.display)
        self._came = b""  # not yet on the screen
        self._started = time.monotonic()
        self.at_once_s = 0.0
        self.raw = b""

    def _gather(self, seconds: float) -> bool:
        """Wait for output of the program; False if nothing came."""
        try:
            self._came += self.child.read_nonblocking(65536, timeout=max(seconds, 0.0))
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        return True

    def _show(self, data: bytes) -> None:
        self.raw += data
        self._stream.feed(data)

    def _show_frame(self) -> None:
        """Show the output up to the end of its first frame, so that no frame is skipped."""
        frame, end, self._came = self._came.partition(END_FRAME.encode())
        self._show(frame + end)

    def read(self, seconds: float = 0.05) -> None:
        """Show the output of the next `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._gather(left):
            pass
        data, self._came = self._came, b""
        self._show(data)

    def wait_for(self, seen: Callable[[Terminal], bool], seconds: float = 60.0) -> None:
        """Read until `seen` is true, and not further; fails after `seconds`."""
        until = time.monotonic() + seconds
        while not seen(self):
            assert time.monotonic() < until, f"never seen; on the screen:\n{self.text}"
            runs = self.child.isalive()
            if self._came or self._gather(0.05):
                self._show_frame()
            else:
                assert runs, f"ended too early; on the screen:\n{self.text}"
        if not self.at_once_s:
            # The time that counts as 'at once' on this machine: half of what the start took.
            self.at_once_s = max(0.5, (time.monotonic() - self._started) / 2)

    def finish(self, seconds: float = 60.0, *, close: bool = True) -> int:
        """Read to the end; the exit code, as a shell reports it."""
        until = time.monotonic() + seconds
        while self.child.isalive():
            assert time.monotonic() < until, f"never ended; on the screen:\n{self.text}"
            self.read()
        self.read(0.2)
        if close:
            self.child.close()
        status = self.child.exitstatus
        return status if status is not None else 128 + self.child.signalstatus

    def interrupt(self) -> None:
        self.child.sendintr()

    @property
    def text(self) -> str:
        return "\n".join(self.display.text_lines)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts `specllama ARGS`, or another command, in a terminal; kills what still runs at the end."""
    started: list[Terminal] = []

    def start(
        *args: str,
        command: list[str] | None = None,
        columns: int = 80,
        rows: int = 24,
        env: dict[str, str] | None = None,
    ) -> Terminal:
        started.append(Terminal(command or [*SPECLLAMA, *args], columns, rows, env or {}))
        return started[-1]

    yield start
    for one in started:
        if one.child.isalive():
            one.child.kill(signal.SIGKILL)
        one.child.close(force=True)
