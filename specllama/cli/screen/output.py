"""The sink: stdout is the answer or the data, stderr is everything else; each stream is judged on its own."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

import typer

from specllama.base.errors import SpecllamaError

if TYPE_CHECKING:
    from rich.console import Console

ColorMode = Literal["auto", "always", "never"]
Format = Literal["human", "json", "jsonl"]

# TERM values of terminals that print every byte they are sent.
DUMB_TERMS = frozenset({"dumb", "unknown"})
# Control characters that text may bring along safely; everything else of C0, DEL and C1 is spelled out.
PLAIN_CONTROLS = "\n\t"
_SPELLED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in PLAIN_CONTROLS}


def visible(text: str) -> str:
    """`text` for a terminal: control characters are spelled as \\xNN, so that no text can steer the screen."""
    return text.translate(_SPELLED)


def in_one_line(text: str) -> str:
    """`text` as a column of a line: line breaks and tabs are spelled out as well."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` columns, broken at spaces alone, so that paths stay whole; 0 = as it is."""
    if not width:
        return text
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(broken) for broken in lines)


@dataclass(frozen=True, slots=True)
class Stream:
    """One output stream and what may be sent to it."""

    file: TextIO
    is_terminal: bool
    styled: bool  # bold and underline are allowed
    coloured: bool  # colours are allowed
    steerable: bool  # the cursor may be moved

    def write(self, text: str) -> None:
        """Send `text` as it is, at once."""
        self.file.write(text)
        self.file.flush()

    def line(self, text: str) -> None:
        """Send one line; on a terminal its control characters are spelled out."""
        self.write((visible(text) if self.is_terminal else text) + "\n")

    @property
    def width(self) -> int:
        """Columns of the terminal; 0 where there is none, or it does not know."""
        try:
            return os.get_terminal_size(self.file.fileno()).columns if self.is_terminal else 0
        except (OSError, ValueError):
            return 0

    @property
    def is_file(self) -> bool:
        """True where the stream goes into a file, which no one reads while it is written."""
        try:
            return stat.S_ISREG(os.fstat(self.file.fileno()).st_mode)
        except (OSError, ValueError):
            return False

    def encodes(self, sample: str) -> bool:
        """True where the stream's encoding knows every character of `sample`."""
        try:
            sample.encode(self.file.encoding or "utf-8")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def paint(self, text: str, *, fg: str | None = None, bold: bool = False) -> str:
        """`text`, bold or coloured where the stream allows it."""
        if not self.styled:
            return text
        return typer.style(text, fg=fg if self.coloured else None, bold=bold or None)


def _understands_escapes() -> bool:
    """True where a terminal of this process acts on escape sequences."""
    if sys.platform == "win32":  # the old console does not; Windows Terminal says who it is
        return "WT_SESSION" in os.environ
    return os.environ.get("TERM", "").lower() not in DUMB_TERMS


def stream_of(file: TextIO, color: ColorMode = "auto") -> Stream:
    """What may be sent to `file`, judged by itself, NO_COLOR, TERM and `color`.

    NO_COLOR and `never` forbid colours, not bold and underline; TERM=dumb forbids every escape sequence. `always`
    also colours a stream that is not a terminal, but never moves a cursor there.
    """
    is_terminal = file.isatty()
    steerable = is_terminal and _understands_escapes()
    styled = steerable or color == "always"
    coloured = color == "always" or (styled and color == "auto" and not os.environ.get("NO_COLOR"))
    return Stream(file, is_terminal, styled, coloured, steerable)


def console_of(stream: Stream) -> Console:
    """A Rich console that keeps to what `stream` allows; markup and highlighting are off."""
    from rich.console import Console

    return Console(
        file=stream.file,
        force_terminal=stream.styled,
        force_interactive=stream.steerable,
        no_color=not stream.coloured,
        color_system="auto" if stream.styled else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's words go. `quiet` drops everything on stderr but errors, `verbose` adds details."""

    out: Stream
    err: Stream
    format: Format = "human"
    quiet: bool = False
    verbose: bool = False

    def line(self, text: str = "") -> None:
        """One line of data on stdout."""
        self.out.line(text)

    def prose(self, text: str) -> None:
        """Sentences on stdout; on a terminal they are broken between words."""
        self.out.line(wrapped(visible(text), self.out.width) if self.out.width else text)

    def data(self, value: object) -> None:
        """One JSON value on one line of stdout, at once; NaN and infinity are refused, they are no JSON."""
        self.out.write(to_json(value) + "\n")

    def note(self, text: str) -> None:
        """Something good to know, on stderr."""
        if not self.quiet:
            self.err.line(wrapped(visible(text), self.err.width))

    def detail(self, text: str) -> None:
        """What only `--verbose` shows, on stderr."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str, hint: str = "") -> None:
        """Something that should be changed although nothing failed, on stderr."""
        if not self.quiet:
            _say(self.err, "warning", "yellow", text, hint)

    @property
    def live(self) -> bool:
        """True where something that moves may be drawn on stderr."""
        return self.err.steerable and not self.quiet

    def out_console(self) -> Console:
        """Rich on stdout, for commands whose data is a table."""
        return console_of(self.out)

    def err_console(self) -> Console:
        """Rich on stderr, for progress."""
        return console_of(self.err)


def open_output(
    *, color: ColorMode = "auto", format: Format = "human", quiet: bool = False, verbose: bool = False
) -> Output:
    """The process's own stdout and stderr as a sink."""
    return Output(stream_of(sys.stdout, color), stream_of(sys.stderr, color), format, quiet, verbose)


def to_json(value: object) -> str:
    """`value` as JSON on one line, text as UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    """Types that JSON lacks, as types it has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_COMMAND = re.compile(r"\b(specllama|pip) \S")  # in a hint, to be copied


def _say(stream: Stream, word: str, fg: str, text: str, hint: str) -> None:
    """`word: text` and, where there is one, `hint: hint`."""
    lines = []
    for label, colour, said in ((word, fg, text), ("hint", "cyan", hint)):
        if said:
            told = f"{label}: {visible(said)}"
            if label != "hint" or not _COMMAND.search(said):  # the terminal's own breaks are not copied, ours would be
                told = wrapped(told, stream.width)
            lines.append(stream.paint(f"{label}:", fg=colour, bold=True) + told.removeprefix(f"{label}:"))
    stream.write("\n".join(lines) + "\n")


def say_error(error: SpecllamaError, stream: Stream | None = None) -> None:
    """What was found and what to do about it, on stderr."""
    _say(stream or stream_of(sys.stderr), "error", "red", str(error), error.hint)


class _Standard(io.TextIOWrapper):
    """A standard stream that was there before, with failures of its own kind."""

    def __init__(self, before: io.TextIOWrapper) -> None:
        super().__init__(
            before.buffer,
            before.encoding,
            before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        self._before = before  # kept, or its end would close the buffer


class _Stderr(_Standard):
    """Stderr that drops what cannot be written: a closed terminal must not cost the answer."""

    def write(self, text: str) -> int:
        """Write `text`, or nothing where that fails."""
        with self._swallowed():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        """Send what is buffered, or nothing where that fails."""
        with self._swallowed():
            super().flush()

    @contextmanager
    def _swallowed(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            _null_as(self.fileno(), os.O_WRONLY)


class _Stdout(_Standard):
    """Stdout whose failures are errors of ours: a full disk is not an internal error."""

    def write(self, text: str) -> int:
        """Write `text`. Raises SpecllamaError where that fails, and BrokenPipeError."""
        if text == "":  # typer's question whether this takes text; it takes no error for an answer
            return 0
        with self._told():
            return super().write(text)

    def flush(self) -> None:
        """Send what is buffered. Raises as `write` does."""
        with self._told():
            super().flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            forget_stdout()
            raise SpecllamaError(f"stdout cannot be written: {reason}") from error


def forget_stdout() -> None:
    """Let what is still buffered for a stdout that cannot be written go nowhere."""
    _null_as(sys.stdout.fileno(), os.O_WRONLY)


def _null_as(number: int, mode: int) -> None:
    """Make descriptor `number` the null device."""
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def prepare_streams() -> None:
    """Make stdout and stderr safe for any text: UTF-8 where they are not a terminal, and never an encoding error.

    A closed stderr swallows what it is sent, a closed stdout refuses it. Both get their descriptors back, or a file
    opened later would have the number that others write to.
    """
    if sys.stdout is None:
        _null_as(1, os.O_RDONLY)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        _null_as(2, os.O_WRONLY)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(encoding=file.encoding if file.isatty() else "utf-8", errors="replace")
    if type(sys.stdout) is io.TextIOWrapper:  # not replaced by a caller of `main`
        sys.stdout = _Stdout(sys.stdout)
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Stderr(sys.stderr)
