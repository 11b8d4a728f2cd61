"""Text from files, models and networks on the terminal: it is shown, and it can neither control the screen nor hide."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
import threading
import types
import unicodedata
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from specllama.audit.report import AuditReport
from specllama.base.errors import SpecllamaError
from specllama.bench.compare import ReportComparison
from specllama.bench.parallel import ParallelReport
from specllama.bench.report import BenchReport
from specllama.chat.stream import TextStream
from specllama.cli import doctor, tune
from specllama.cli.audit.view import markdown, sentence
from specllama.cli.bench import command as bench_command
from specllama.cli.bench.parallel import parallel_lines
from specllama.cli.bench.view import comparison_lines, csv_lines, report_lines
from specllama.cli.chat.view import ChatView
from specllama.cli.check import drafts as check_drafts
from specllama.cli.check.probe import show_outlook
from specllama.cli.check.view import show_report
from specllama.cli.draft import view as draft_view
from specllama.cli.errors import report as report_error
from specllama.cli.models import view as models_view
from specllama.cli.screen.output import Output, Stream, stream_of, to_json
from specllama.cli.screen.render import Figures
from specllama.cli.screen.status import StatusLine, watching
from specllama.cli.screen.terminal import Screen, StyledText
from specllama.cli.screen.view import AnswerView
from specllama.cli.screen.visible import Raw, in_one_line, visible
from specllama.core.events import Finished, Notice, TokenEvent
from specllama.core.stats import SpecStats
from specllama.derive.search import SearchOutcome
from specllama.derive.tuned import Tuned
from specllama.drafters.controller import CostProfile
from specllama.files.catalog import Catalog
from specllama.files.model import CatalogPair, Model
from specllama.llama.kernel_path import DEFAULT, KernelPath
from specllama.pairs.checkup import Checkup
from specllama.pairs.derived import Derived
from specllama.pairs.find_drafts import FoundDraft
from specllama.pairs.profile import ProfileKey
from specllama.pairs.report import CompatReport
from specllama.tuning.child import Way
from specllama.tuning.forecast import Outlook
from specllama.tuning.tune import Layout
from tests import tiny
from tests.cli.conftest import EVIL, Terminal
from tests.test_layers import FILES, PACKAGE, tree_of

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
SPELLED = "\\u202e\\u2066\\u200b\\u2060\\ufeff\\U000e0041"
FINE = [
    "line\n\ttab 東京 é",
    "👩\u200d🔬 👨\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 ❤\ufe0f 1\ufe0f\u20e3 ☺\ufe0e",  # joined emoji and keycaps
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # the flag of England
    "می\u200cخواهم",  # Persian
    "क्\u200dष क्\u200cष ශ්\u200dරී",  # Hindi, Sinhala
    "עברית 50%\u200f, العربية",
    "ខ្ញុំ\u200bទៅ",  # Khmer
    "葛\U000e0100",
]


@pytest.mark.parametrize("text", FINE)
def test_text_of_every_script_is_shown_as_it_is(text: str) -> None:
    """Prevents: emoji in pieces, Persian with codes inside its words."""
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\x07\x9b1m\x7f\x00\r", "a\\x1b[2Jb\\x07\\x9b1m\\x7f\\x00\\x0d"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("pay\u200bpal\u200d\u200c", "pay\\u200bpal\\u200d\\u200c"),
        ("\ufeffx\u2028y\xad", "\\ufeffx\\u2028y\\xad"),
        ("می\u200c\u200cخ", "می\u200c\\u200cخ"),  # only one of them joins
        ("x\ufe0f\U000e0100", "x\\ufe0f\\U000e0100"),
        ("\U0001f3f4" + "\U000e0061" * 8, "\U0001f3f4" + "\U000e0061" * 6 + "\\U000e0061" * 2),  # a hidden message
        ("\udcff", "\\udcff"),
    ],
)
def test_what_controls_or_hides_is_spelled_out(text: str, shown: str) -> None:
    """Prevents: a model that clears the screen; two names that look the same; a hidden message."""
    assert visible(text) == shown


def test_between_latin_letters_nothing_is_invisible() -> None:
    """Prevents: a forgotten control, format, separator or filler character."""
    fillers = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]
    seen = {
        0x600,
        0x601,
        0x602,
        0x603,
        0x604,
        0x605,
        0x6DD,
        0x70F,
        0x890,
        0x891,
        0x8E2,
        0x110BD,
        0x110CD,
    }  # have a shape
    codes = {code for code in range(0x110000) if unicodedata.category(chr(code)) in UNSEEN} - seen - {9, 10}
    assert len(codes) > 2000
    assert [hex(code) for code in {*codes, *fillers} if visible(f"a{chr(code)}b")[1] == chr(code)] == []


def test_pieces_are_shown_like_the_whole() -> None:
    """Prevents: an emoji or a Persian word that is spelled out because its pieces come one by one."""
    for text in [*FINE, EVIL]:
        paper = io.StringIO()
        stream = Stream(paper, True, False, False, False)
        screen = Screen(stream, stream)
        for char in text:
            screen.add(StyledText(char))
            screen.clear()
        screen.finish()
        assert paper.getvalue() == visible(text)


def test_only_raw_text_is_written_as_it_is() -> None:
    """Prevents: codes of ours that carry text of others with them."""
    paper = io.StringIO()
    stream = Stream(paper, False, False, False, False)
    stream.line("\x1b[5m")
    stream.line("\x1b" + Raw("\x1b[1m") + "\x1b")
    stream.line(Raw("\x1b[2m").join(["\x07", Raw("\x07")]))
    stream.line(f"{Raw(chr(27))}")
    assert paper.getvalue() == "\\x1b[5m\n\\x1b\x1b[1m\\x1b\n\\x07\x1b[2m\x07\n\\x1b\n"


def test_json_is_the_same_value_without_a_hidden_character() -> None:
    """Prevents: JSON on a terminal that is no JSON because its text was spelled out."""
    assert json.loads(to_json([EVIL, "東"])) == [EVIL, "東"]
    assert visible(to_json(EVIL)) == to_json(EVIL)
    assert "東" in to_json("東")


OUTPUT = "cli/screen/output.py"
DOORS = {"Console", "print", "typer.echo", "typer.secho", "typer.confirm", "sys.stdout.write", "sys.stderr.write"}
TRUSTED = {f"cli/{name}.py" for name in ("app", "chat/commands", "doctor")} | {
    f"cli/screen/{name}.py" for name in ("clipboard", "keyboard", "output", "render", "terminal", "visible")
}


@pytest.mark.slow
def test_text_has_one_way_to_the_terminal() -> None:
    """Prevents: a command that writes past `Stream.write`, or declares text of others to be raw."""
    names = {door.rpartition(".")[2] for door in DOORS} | {"Raw"}
    calls = {
        (ast.unparse(node.func), path.relative_to(PACKAGE).as_posix())
        for path in FILES
        if path.name not in ("crash_test.py", "__main__.py")  # programs of their own
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ((name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in names or name.startswith("print"))
    }
    assert {file for name, file in calls if name in DOORS or name.startswith("traceback.print")} == {OUTPUT}
    assert {file for name, file in calls if name == "Raw"} == TRUSTED


def test_a_question_is_one_visible_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a name in models.toml that changes what a person is asked to remove."""
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda text, **_options: asked.append(text))
    Output(stream_of(io.StringIO()), stream_of(io.StringIO())).confirm(EVIL)
    assert asked == [in_one_line(EVIL)]


# Every report with every field filled.

_COSTS = CostProfile(verify=((1, 1.0), (17, 2.6)), draft=((1, 0.1), (2, 0.1)))
_LAYOUT = Layout(Way(), 1.0, _COSTS.verify, _COSTS.draft)
_OWN: dict[Any, Any] = {
    CostProfile: _COSTS,
    Layout: _LAYOUT,
    KernelPath: DEFAULT,
    Path: Path(EVIL.replace("/", "")),
    Any: EVIL,
}


def filled(kind: Any) -> Any:
    """A value of this type whose every text is EVIL, every number 1, every sequence two long."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _OWN:
        return _OWN[kind]
    if origin in (types.UnionType, Union):
        return filled(next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return parts[0]
    if origin is tuple:
        return (filled(parts[0]),) * 2 if parts[-1] is ... else tuple(map(filled, parts))
    if origin is not None and issubclass(origin, Mapping):
        return {EVIL: filled(parts[1])}
    if origin is not None:  # list, Sequence, frozenset
        return (frozenset if origin is frozenset else list)([filled(parts[0])] * 2)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: filled(hints[field.name]) for field in dataclasses.fields(kind) if field.init})
    if issubclass(kind, Enum):
        return list(kind)[-1]
    return {str: EVIL, int: 1, float: 1.0, bool: True, object: EVIL}[kind]


def _say_errors(output: Output) -> None:
    for error in (SpecllamaError(EVIL, hint=EVIL), FileNotFoundError(2, EVIL, EVIL), ValueError(EVIL)):
        report_error(error)


def _say_everything(output: Output) -> None:
    for say in (output.note, output.detail, output.prose, output.line, output.text, output.data, output.row):
        say(EVIL)
    output.warn(EVIL, EVIL)
    if output.out.is_terminal:  # a pipe gets paths as they are
        output.path(Path(EVIL))


def _progress(output: Output) -> None:
    with StatusLine(output) as status:
        status.show(EVIL, 0.5, EVIL)
    with watching(output) as watch:
        watch.begin(EVIL, 100)
        watch.advance(50)
        watch.note(EVIL)
        watch.end()


def _answer(output: Output, kind: Callable[..., AnswerView], **more: object) -> None:
    answer, figures = TextStream(lambda _token: EVIL.encode()), Figures(100, drafts=True)
    view = kind(output, answer, figures, live=True, **more)
    for token in range(3):
        view.take(TokenEvent(token, "draft", token))
        view.refresh()
    view.take(Notice(EVIL))
    view.refresh()
    view.take(Finished("stop", SpecStats()))
    view.close()


REPORTS: dict[str, Callable[[Output], None]] = {
    "check": lambda output: show_report(output, filled(CompatReport)),
    "check --draft-for": lambda output: check_drafts._show(
        output, SimpleNamespace(path=Path(EVIL)), [filled(FoundDraft)]  # type: ignore[arg-type]
    ),
    "check --probe": lambda output: show_outlook(output, filled(Outlook)),
    "models list": lambda output: models_view.show_list(output, filled(Catalog)),
    "models show, pair": lambda output: models_view.show_pair(output, filled(CatalogPair)),
    "models show, model": lambda output: models_view.show_model(output, filled(Model)),
    "doctor": lambda output: (doctor._draw if output.out.steerable else doctor._write)(output, filled(Checkup)),
    "draft list": lambda output: draft_view.show_list(output, [filled(Derived)] * 2),
    "draft make": lambda output: draft_view.show_search(
        output, filled(SearchOutcome), filled(Derived) if output.out.is_terminal else None
    ),
    "tune": lambda output: tune.show(output, filled(ProfileKey), filled(Tuned)),
    "bench": lambda output: bench_command._show(report_lines(filled(BenchReport), full=True), output),
    "bench --parallel": lambda output: bench_command._show(parallel_lines(filled(ParallelReport)), output),
    "bench, csv": lambda output: output.text("\n".join(csv_lines(filled(BenchReport)))),
    "bench compare": lambda output: output.text("\n".join(comparison_lines(filled(ReportComparison), [EVIL, EVIL]))),
    "audit": lambda output: output.text(markdown(filled(AuditReport))),
    "audit, verdict": lambda output: output.line(sentence(filled(AuditReport))),
    "errors": _say_errors,
    "messages": _say_everything,
    "progress": _progress,
}  # fmt: skip
ANSWERS: dict[str, Callable[[Output], None]] = {
    "run": lambda output: _answer(output, AnswerView),
    "chat": lambda output: _answer(output, ChatView, starts_thinking=False),
}


def written(show: Callable[[Output], None], monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    """What `show` writes to a terminal or a pipe, without the sequences that are the program's own."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    came: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while data := os.read(reader, 65536):
                came.append(data)

    if terminal:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
    file = os.fdopen(writer, "w", encoding="utf-8", errors="replace")
    thread = threading.Thread(target=read)
    thread.start()
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setenv("COLUMNS", "500")  # Rich asks stdin, stdout and stderr of the process
    monkeypatch.setattr(models_view.hub, "find", lambda _model: None)
    try:
        stream = stream_of(file)
        show(Output(stream, stream, verbose=True))
    finally:
        file.close()
        thread.join()
        os.close(reader)
    text = re.sub("\r+\n", "\n", b"".join(came).decode())
    assert "\x1b[5m" not in text
    return re.sub(r"\r?\x1b(?:\[\??[\d;]*[A-HJKhlm]|[78D])", "", text)


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("name", [*REPORTS, *ANSWERS])
def test_no_field_of_a_report_controls_or_hides(
    name: str, terminal: bool, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a file name, a field of a header or of models.toml, or a token that sets the title, swallows the
    verdict, forges a line or reorders what a person reads."""
    monkeypatch.setenv("SPECLLAMA_DEBUG", debug)
    if name in ANSWERS and not terminal:
        pytest.skip("a pipe gets the model's bytes as they are")
    text = written({**REPORTS, **ANSWERS}[name], monkeypatch, terminal=terminal)
    hidden = {char for char in text if unicodedata.category(char) in UNSEEN}
    assert hidden <= {"\n", "\t", "\r"}, ascii(text)
    assert "\rx" not in text  # Rich returns to the margin
    assert SPELLED in re.sub(r"\s+", "", text), "the report does not show its texts"


def test_reports_in_files_are_visible_as_well() -> None:
    """Prevents: `cat report.md` that acts on the terminal; rows that a character of a name breaks."""
    for lines in (
        report_lines(filled(BenchReport), full=True),
        csv_lines(filled(BenchReport)),
        comparison_lines(filled(ReportComparison), [EVIL, EVIL]),
        markdown(filled(AuditReport)).split("\n"),
    ):
        assert SPELLED in "\n".join(lines)
        assert {char for line in lines for char in line if unicodedata.category(char) in UNSEEN} <= {"\t", "\n"}


@pytest.mark.slow
def test_a_file_name_and_a_header_on_a_real_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Prevents: `check` of a downloaded file, or `models list` in a cloned repository, that acts on the terminal."""
    target, draft = (tmp_path / f"{name}{EVIL}.gguf" for name in "td")
    for path, pre in ((target, "gpt-2"), (draft, EVIL)):
        tiny.write_bare(path, vocabulary=tiny.sentencepiece(), extra={"tokenizer.ggml.pre": pre, "general.name": pre})
    catalog = """
        [pairs.evil]
        target = "Qwen3-4B-Q4_K_M"
        draft = "Qwen3-0.6B-Q8_0"
        summary = "e\\u001b]0;X\\u0007\\u001b[5m\\u202ev"
    """
    (tmp_path / "models.toml").write_text(catalog)
    for args in (["check", "-m", str(target), "-md", str(draft)], ["models", "list"], ["models", "show", "evil"]):
        shown = terminal(*args)
        assert shown.finish() == 0
        text = shown.raw.decode()
        assert "\x1b[5m" not in text
        assert "\x1b]" not in text
        assert "\u202e" not in text
        assert "\\u202e" in re.sub(r"\s", "", text)
