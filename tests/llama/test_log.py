"""llama.cpp's log: kept, quoted, passed on, and never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specllama import llama
from specllama.llama.log import LogBook
from tests import tiny

INFO, ERROR, CONTINUED = b"\2", b"\4", b"\5"
ROOT = Path(__file__).resolve().parents[2]


def test_the_reason_is_the_error_that_explains() -> None:
    """Prevents: 'failed to load model' as the reason why a model failed to load."""
    book = LogBook()
    book.receive(INFO, b"llama_model_loader: - kv 0\n")
    book.receive(ERROR, b"llama_model_load: error loading model: missing tensor 'x'\n")
    book.receive(ERROR, b"llama_model_load_from_file_impl: failed to load model\n")
    assert book.reason() == "error loading model: missing tensor 'x'"


def test_a_generic_error_is_the_reason_if_there_is_no_other() -> None:
    """Prevents: an empty reason although llama.cpp logged an error."""
    book = LogBook()
    book.receive(ERROR, b"x: failed to load model\n")
    assert book.reason() == "failed to load model"
    book.clear()
    assert book.reason() == ""


def test_continued_lines_are_one_line_of_the_first_level() -> None:
    """Prevents: a line for each dot of a progress line; a line lost because its newline comes later."""
    heard: list[tuple[str, str]] = []
    book = LogBook()
    book.sink = lambda level, text: heard.append((level, text))
    book.receive(ERROR, b"loading")
    book.receive(CONTINUED, b".")
    book.receive(CONTINUED, b".\nnext")
    book.receive(INFO, b"other\n\n")
    book.read()
    assert heard == [("error", "loading.."), ("error", "next"), ("info", "other")]


def test_control_bytes_in_a_text_are_no_levels() -> None:
    """Prevents: a name in a model file that forges an error of llama.cpp."""
    heard: list[tuple[str, str]] = []
    book = LogBook()
    book.sink = lambda level, text: heard.append((level, text))
    book.receive(INFO, b"general.name = a\4forged\n\4too\n")
    book.receive(b"\0", b"plain\n")
    assert book.reason() == ""
    assert heard == [("info", "general.name = a\4forged"), ("info", "\4too"), ("info", "plain")]


def test_the_book_forgets_old_lines() -> None:
    """Prevents: a long session that fills the memory with log lines."""
    book = LogBook(n_lines=3)
    for index in range(10):
        book.receive(ERROR, f"line {index}\n".encode())
    assert book.reason() == "line 7; line 8; line 9"


def test_a_sink_gets_the_log_and_its_errors_are_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prevents: `--verbose` without effect; an exception in a C callback printed into the answer."""
    heard: list[str] = []
    path = tiny.write_model(tmp_path / "m.gguf")

    def listen(level: str, text: str) -> None:
        heard.append(text)
        raise RuntimeError("a sink that breaks")

    llama.set_log(listen)
    try:
        tiny.load(path).close()
    finally:
        llama.set_log(None)
    assert any("n_ctx" in line for line in heard)
    assert capfd.readouterr() == ("", "")


def test_llama_cpp_writes_nothing_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prevents: ggml lines in the answer or the live view (FIELD_CASES 31)."""
    with tiny.load(tiny.write_model(tmp_path / "m.gguf")) as model:
        model.feed([1, 2, 3])
        model.eval([4])
    llama.build_info()
    assert capfd.readouterr() == ("", "")


ENDINGS = (
    "model.eval([1, 2])",
    "model.close(); model.close()",
    "keep = model.eval([1, 2]); del model",
    "raise SystemExit(0)",
    "from specllama.llama import set_log; set_log(lambda level, text: None)",
    "vocab = model.vocab; del model; vocab.piece(3); vocab.tokenize('abc', special=True)",
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_program_ends_silently_with_open_models(tmp_path: Path) -> None:
    """Prevents: a crash or a line on stderr at the program's end (FIELD_CASES 30)."""
    path = tiny.write_model(tmp_path / "m.gguf")
    program = f"""
import os
from pathlib import Path
from tests import tiny
for ending in {ENDINGS!r}:
    if (child := os.fork()) == 0:
        model = tiny.load(Path({str(path)!r}))
        exec(ending)
        break
    assert os.waitpid(child, 0)[1] == 0, ending
"""
    assert run(program) == ""


@pytest.mark.slow
def test_a_failed_load_leaves_nothing_on_stderr(tmp_path: Path) -> None:
    """Prevents: llama.cpp's own error lines beside ours (FIELD_CASES 30)."""
    path = tiny.write_model(tmp_path / "m.gguf", extra={"llama.block_count": 3})
    program = f"""
from pathlib import Path
from specllama.base.errors import ModelFileError
from tests import tiny
try:
    tiny.load(Path({str(path)!r}))
except ModelFileError:
    pass
else:
    raise SystemExit("loaded a model with missing layers")
"""
    assert run(program) == ""


@pytest.mark.slow
def test_leaving_while_another_thread_computes_does_not_crash(tmp_path: Path) -> None:
    """Prevents: a model freed at exit while a thread is in llama.cpp."""
    path = tiny.write_model(tmp_path / "m.gguf", n_embd=256, n_ff=1024, n_layer=4, n_ctx=4096)
    program = f"""
import contextlib, threading, time
from pathlib import Path
from specllama.base.errors import BackendError
from tests import tiny
model = tiny.load(Path({str(path)!r}), n_ctx=4096)
def work():
    with contextlib.suppress(BackendError):
        model.feed([1] * 4000)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    assert run(program) == ""


def run(program: str) -> str:
    """Standard error and output of a fresh interpreter, which must end with status 0."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
