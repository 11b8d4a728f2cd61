"""Output streams: stdout carries the answer or the data, stderr everything else; each has its own abilities."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer

from specllama.base.errors import Interrupted, SpecllamaError
from specllama.cli.screen.ending import breakable, hang_up, is_hung_up
from specllama.cli.screen.visible import HIDDEN, Raw, in_one_line, visible, wrapped

if TYPE_CHECKING:
    from rich.console import Console

ColorMode = Literal["auto", "always", "never"]
Format = Literal["human", "json", "jsonl"]

# TERM values of terminals that print escape sequences.
DUMB_TERMS = frozenset({"dumb", "unknown"})


@dataclass(frozen=True, slots=True)
class Stream:
    """One output stream and what it can show."""

    file: TextIO
    is_terminal: bool
    styled: bool  # bold and underline are allowed
    coloured: bool  # colours are allowed
    steerable: bool  # the cursor may be moved

    def write(self, text: str) -> None:
        """Write `text`, made visible unless it is `Raw`."""
        self.file.write(Raw.of(text))
        self.file.flush()

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def labelled(self, label: str, fg: str | None, text: str) -> Raw:
        """`label text`, the label painted, wrapped on a terminal."""
        return self.paint(label, fg=fg, bold=True) + wrapped(f"{label} {text}", self.width).removeprefix(label)

    def hint(self, text: str) -> Raw:
        return self.labelled("hint:", None, text)

    @property
    def reaches_a_terminal(self) -> bool:
        """True on a terminal, and on a pipe to one (`--color always`)."""
        return self.is_terminal or self.styled

    @property
    def width(self) -> int:
        """Columns of the terminal; 0 without a terminal or if its size is unknown."""
        try:
            return os.get_terminal_size(self.file.fileno()).columns if self.is_terminal else 0
        except (OSError, ValueError):
            return 0

    @property
    def is_file(self) -> bool:
        """True if the stream is a regular file."""
        try:
            return stat.S_ISREG(os.fstat(self.file.fileno()).st_mode)
        except (OSError, ValueError):
            return False

    def encodes(self, sample: str) -> bool:
        try:
            sample.encode(self.file.encoding or "utf-8")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def paint(self, text: str, *, fg: str | None = None, bold: bool = False) -> Raw:
        text = visible(text)
        if not self.styled:
            return Raw(text)
        return Raw(typer.style(text, fg=fg if self.coloured else None, bold=bold or None))


def _understands_escapes() -> bool:
    if sys.platform == "win32":  # the old console does not; Windows Terminal sets this variable
        return "WT_SESSION" in os.environ
    return os.environ.get("TERM", "").lower() not in DUMB_TERMS


def stream_of(file: TextIO, color: ColorMode = "auto") -> Stream:
    """`file` and what it can show, according to NO_COLOR, TERM and `color`.

    NO_COLOR and `never` switch off colours, not bold and underline; TERM=dumb switches off every escape sequence.
    `always` also colours a stream that is not a terminal, but never moves a cursor there.
    """
    is_terminal = file.isatty()
    steerable = is_terminal and _understands_escapes()
    styled = steerable or color == "always"
    coloured = color == "always" or (styled and color == "auto" and not os.environ.get("NO_COLOR"))
    return Stream(file, is_terminal, styled, coloured, steerable)


def console_of(stream: Stream) -> Console:
    """A Rich console for `stream`: without markup and highlighting, and all text visible."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), style, control)

        def on_broken_pipe(self) -> None:
            raise  # Rich would exit; called where it handles the error

    return VisibleConsole(
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
    """The output of a command. `quiet` drops everything on stderr except errors, `verbose` adds details."""

    out: Stream
    err: Stream
    format: Format = "human"
    quiet: bool = False
    verbose: bool = False

    def line(self, text: str = "") -> None:
        """One line on stdout, whatever `text` holds: a file name cannot forge another."""
        self.out.line(in_one_line(text))

    def text(self, text: str) -> None:
        """Lines on stdout."""
        self.out.line(text)

    def prose(self, text: str) -> None:
        """Sentences on stdout, in one line, or wrapped on a terminal."""
        self.out.line(wrapped(text, self.out.width))

    def row(self, *cells: str) -> None:
        """One line on stdout for a program: cells between tabs."""
        self.out.line("\t".join(map(in_one_line, cells)))

    def path(self, path: os.PathLike[str]) -> None:
        """A path on stdout; exact on a pipe, for a program that opens it."""
        name, file = os.fspath(path), self.out.file
        if self.out.reaches_a_terminal or not isinstance(file, io.TextIOWrapper):
            self.out.line(name if self.out.reaches_a_terminal else Raw(name))
            return
        file.flush()
        file.buffer.write(os.fsencode(path) + os.linesep.encode())  # the name need not be UTF-8
        file.flush()

    def data(self, value: object) -> None:
        """One JSON value on one line of stdout. Raises ValueError for NaN and infinity."""
        self.out.line(to_json(value))

    def note(self, text: str) -> None:
        """Information on stderr, unless `quiet`."""
        if not self.quiet:
            self.err.line(wrapped(text, self.err.width))

    def detail(self, text: str) -> None:
        """A note that only `--verbose` shows."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str, hint: str = "") -> None:
        """A warning on stderr, unless `quiet`."""
        if not self.quiet:
            _say(self.err, "warning", "magenta", text, hint)

    def confirm(self, question: str) -> None:
        """Ask on stderr; any answer but yes raises typer.Abort."""
        typer.confirm(in_one_line(question), abort=True, err=True)

    @property
    def live(self) -> bool:
        """True if live lines may be drawn on stderr."""
        return self.err.steerable and not self.quiet


def open_output(
    *, color: ColorMode = "auto", format: Format = "human", quiet: bool = False, verbose: bool = False
) -> Output:
    """The process's stdout and stderr as an `Output`."""
    return Output(stream_of(sys.stdout, color), stream_of(sys.stderr, color), format, quiet, verbose)


def to_json(value: object) -> str:
    """`value` as JSON on one line; of its text, only control and hidden characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    return HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f"), text)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _say(stream: Stream, word: str, fg: str, text: str, hint: str) -> None:
    """`word: text` and, where there is one, `hint: hint`."""
    stream.line(stream.labelled(f"{word}:", fg, text))
    if hint:
        stream.line(stream.hint(hint))


def say_error(error: SpecllamaError, stream: Stream | None = None) -> None:
    """Print the error and its hint on stderr."""
    _say(stream or stream_of(sys.stderr), "error", "red", str(error), error.hint)


class TerminalGone(BrokenPipeError):
    """stdout is a terminal that was closed."""


class _Standard(io.TextIOWrapper):
    """A wrapper of an existing standard stream that hands write errors to `failed`.

    Under PYTHONUNBUFFERED the stream below has no buffer, and what a write leaves would be lost without an error: on a
    nearly full disk, on a full pipe that does not block, or after a signal.
    """

    def __init__(self, before: io.TextIOWrapper, failed: Callable[[OSError], None]) -> None:
        below: Any = before.buffer
        super().__init__(
            io.BufferedWriter(below) if isinstance(below, io.RawIOBase) else below,
            before.encoding,
            before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        self._before = before  # kept alive: its destructor would close the buffer
        self._failed = failed

    def write(self, text: str) -> int:
        if text == "":  # typer tests streams with "", and expects no error; b"" must fail
            return 0
        try:
            with breakable():
                return super().write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            with breakable():
                super().flush()
        except OSError as error:
            self._failed(error)


def _stdout_failed(error: OSError) -> None:
    """A full disk is an error with a message, not an internal error; a closed terminal or pipe ends the program."""
    if isinstance(error, BrokenPipeError):
        raise error
    if error.errno == errno.EIO and is_hung_up(1):
        forget_stdout()
        raise TerminalGone(error.errno, error.strerror)
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror
    forget_stdout()
    kind = Interrupted if error.errno == errno.ECANCELED else SpecllamaError
    raise kind(f"stdout cannot be written: {reason}") from error


def _stderr_failed(_error: OSError) -> None:
    """Ignored: a closed terminal must not cost the answer. If stdout is that terminal, act as on its SIGHUP."""
    _null_as(2, os.O_WRONLY)
    if is_hung_up(1):
        hang_up()


def forget_stdout() -> None:
    """Discard what is still buffered for a stdout that cannot be written: the interpreter's last flush would block."""
    if isinstance(sys.stdout, _Standard):  # else it is that of a caller of `main`
        _null_as(sys.stdout.fileno(), os.O_WRONLY)


def _null_as(number: int, mode: int) -> None:
    """Point descriptor `number` at the null device."""
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _can_be_read(file: TextIO) -> bool:
    """False for stdin that is closed, or open for writing only: `nohup` does that."""
    if file.closed or sys.platform == "win32":
        return not file.closed
    import fcntl

    try:
        return fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except io.UnsupportedOperation:  # in memory
        return True
    except OSError:  # closed by its number
        return False


def prepare_streams() -> None:
    """Make the three streams safe for any text: UTF-8 unless they are a terminal, and no encoding errors.

    stdin that cannot be read is empty, a closed stderr ignores what is written, a closed stdout raises. All get their
    descriptors back: otherwise a file opened later would get one of them, and other code's input or output with it.
    """
    if not _is_open(0):
        _null_as(0, os.O_RDONLY)
    if sys.stdin is None or not _can_be_read(sys.stdin):
        sys.stdin = io.TextIOWrapper(io.BytesIO())
    elif not hasattr(sys.stdin, "buffer"):  # text in memory, from a caller of `main`
        sys.stdin = io.TextIOWrapper(io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass")))
    if sys.stdout is None:
        _null_as(1, os.O_RDONLY)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        _null_as(2, os.O_WRONLY)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(encoding=file.encoding if file.isatty() else "utf-8", errors="replace")
    if type(sys.stdout) is io.TextIOWrapper:  # a caller of `main` may have replaced it
        sys.stdout = _Standard(sys.stdout, _stdout_failed)
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Standard(sys.stderr, _stderr_failed)
