"""`specllama batch`: requests from a file, answers in a file, and what happens in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.base.errors import UsageError
from specllama.batch import requests
from specllama.batch.open import caveat_of
from specllama.batch.request import Done, Request
from specllama.batch.requests import Asked
from specllama.chat import format
from specllama.chat.conversation import Message
from specllama.chat.format import AnswerFormat
from specllama.chat.settings import Settings
from specllama.cli.batch import command, source
from specllama.cli.batch.source import SPARE
from specllama.core.noise import SeedMode
from specllama.core.sampling import SamplingParams
from tests import tiny
from tests.cli.conftest import EVIL, SILENT, SPECLLAMA, Pair, Run, forbidden, record_of
from tests.homes import file_size_limit

FIXED = ("--temp", "0", "-n", "8", *SILENT)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def entries(path: Path) -> list[tuple[str, object, int]]:
    """Event, id and line number of each answer, without the first line of the file."""
    start, *rest = lines_of(path)
    assert start["event"] == "start"
    return [(each["event"], each["id"], each["line"]) for each in rest]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Four requests and two bad lines."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        '"hello"',
        "nope",
        '{"id": "x", "prompt": "bye", "max_tokens": 3}',
        '{"prompt": "a", "top": 1}',
        '"b"',
        '"c"',
    ]
    path.write_text("\n".join(lines))
    return path


def test_every_line_has_an_answer_or_an_error(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: a bad line that stops the others, or is left out; success for a file with errors."""
    result = specllama("batch", *talker.options, str(prompts), "-o", "a.jsonl", "--in-order", *FIXED)
    assert (result.code, result.out) == (1, "")
    assert entries(Path("a.jsonl")) == [
        ("answer", 1, 1),
        ("error", None, 2),
        ("answer", "x", 3),
        ("error", 4, 4),
        ("answer", 5, 5),
        ("answer", 6, 6),
    ]
    _, first, bad, short, *_ = lines_of(Path("a.jsonl"))
    assert (len(first["tokens"]), len(short["tokens"]), short["finish_reason"]) == (8, 3, "length")
    assert first["timings"]["predicted_n"] == first["acceptance"]["emitted"] == 8
    assert bad["error"]["kind"] == "PromptError"


def test_an_answer_is_that_of_run(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: another template, another system prompt or other settings than with one prompt."""
    options = [*talker.options, "-sys", "be brief", "--seed", "3", "--seed-mode", "same", "-n", "8", *SILENT]
    specllama("batch", *options, str(prompts), "-o", "a.jsonl")
    found = {each["line"]: each for each in lines_of(Path("a.jsonl"))[1:]}
    for n_line, prompt in ((1, "hello"), (5, "b")):
        record = record_of(specllama("run", *options, "--seed", str(3 + n_line - 1), "--json", prompt))
        assert (found[n_line]["text"], found[n_line]["tokens"]) == (record["text"], record["tokens"])
        assert found[n_line]["seed"] == record["settings"]["seed"]


def test_without_a_file_the_answers_go_to_stdout(specllama: Run, talker: Pair) -> None:
    """Prevents: progress among the answers; a pipe of prompts that has to become a file first."""
    args = ["batch", *talker.options, "-", "--input-format", "text", "--in-order", *FIXED]
    result = specllama(*args, stdin=b"hello\n\nbye\n")
    assert result.code == 0
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [(each["event"], each.get("line")) for each in found] == [("start", None), ("answer", 1), ("answer", 3)]
    assert specllama(*args, "-q", stdin=b"hello\n").err == ""


def test_statistics_as_json(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: figures that no program can read."""
    result = specllama("batch", *talker.options, str(prompts), "-o", "a.jsonl", "--json", "-q", *FIXED)
    record = json.loads(result.out)
    assert (result.code, record["answers"], record["errors"], record["cut"], record["requests"]) == (1, 4, 2, 4, 6)
    assert record["stats"]["spec"]["n_emitted"] == 3 * 8 + 3
    start = json.loads(Path("a.jsonl").read_text().splitlines()[0])
    figures = {"requests", "answers", "errors", "cut", "seconds", "parallel", "n_ctx", "stats"}
    assert (record["event"], record.keys() - start.keys()) == ("report", figures)
    assert record["n_ctx"] == record["models"]["target"]["n_ctx"]


def test_a_resume_that_cannot_go_on_does_not_advise_to_go_on(specllama: Run, talker: Pair) -> None:
    """Prevents: a command that ends with the same error each time it is followed."""
    args = ["batch", *talker.options, "-", "--input-format", "text", "-o", "a.jsonl", *FIXED]
    assert specllama(*args, stdin=b"hello\nbye\n").code == 0
    result = specllama(*args, "--resume", stdin=b"hello\nother\n")
    assert (result.code, "--resume" in result.err) == (2, False)


@pytest.fixture
def interrupted_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Call it with n: check n of a format gets a Ctrl-C, and its library hides what that raises. Returns the checks."""
    checked: list[str] = []

    def interrupt(n_check: int) -> list[str]:
        def check(kind: str, text: str, name: str) -> AnswerFormat:
            checked.append(text)
            try:
                if len(checked) == n_check:
                    signal.raise_signal(signal.SIGINT)
            except BaseException:
                raise UsageError("panic") from None
            return AnswerFormat(kind, text, text)

        monkeypatch.setattr(format, "_checked", check)
        return checked

    caches = (format.format_of, requests._known_format)
    for cache in caches:
        cache.cache_clear()
    yield interrupt
    for cache in caches:
        cache.cache_clear()


# Of requests on stdin, the first is checked in the main thread, the others in that of the pool.
@pytest.mark.parametrize(("on_stdin", "n_check"), [(False, 1), (False, 2), (False, 4), (True, 1)])
def test_ctrl_c_in_a_check_of_a_format_ends_the_reading(
    specllama: Run,
    talker: Pair,
    tmp_path: Path,
    interrupted_checks: Callable[[int], list[str]],
    on_stdin: bool,
    n_check: int,
) -> None:
    """Prevents: a Ctrl-C that becomes the error of one request: libraries catch what the handler raises."""
    checked = interrupted_checks(n_check)
    lines = "\n".join(json.dumps({"prompt": "a", "regex": "b" * n}) for n in range(1, 9))
    (tmp_path / "p.jsonl").write_text(lines)
    given = ("-", "--input-format", "jsonl") if on_stdin else ("p.jsonl",)
    result = specllama("batch", *talker.options, *given, "-o", "a.jsonl", *FIXED, stdin=lines.encode())
    assert (result.code, len(checked) <= n_check + 1, Path("a.jsonl").exists()) == (130, True, False)


def test_ctrl_c_in_the_check_of_an_options_format_ends_the_command(
    specllama: Run, talker: Pair, interrupted_checks: Callable[[int], list[str]]
) -> None:
    """Prevents: a Ctrl-C that is told as a bad format."""
    interrupted_checks(1)
    assert specllama("run", *talker.options, "a", "--regex", "option-format").code == 130


@pytest.mark.slow
def test_resume_answers_what_is_missing(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: an answer twice; a request without an answer; an error that a resumed batch forgets."""
    args = ["batch", *talker.options, str(prompts), "-o", "a.jsonl", "--in-order", *FIXED]
    specllama(*args)
    whole = Path("a.jsonl").read_bytes()
    answers = [(each["id"], each.get("tokens")) for each in lines_of(Path("a.jsonl"))[1:]]
    n_bytes = len(whole)
    for cut in (0, 10, whole.index(b"\n") + 1, n_bytes // 2, n_bytes - 1, n_bytes):
        Path("a.jsonl").write_bytes(whole[:cut])
        assert specllama(*args, "--resume").code == 1
        assert [(each["id"], each.get("tokens")) for each in lines_of(Path("a.jsonl"))[1:]] == answers


def test_resume_makes_the_file_if_there_is_none(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: a script that needs two commands."""
    assert specllama("batch", *talker.options, str(prompts), "-o", "a.jsonl", "--resume", *FIXED).code == 1
    assert len(entries(Path("a.jsonl"))) == 6


def test_resume_tells_the_errors_and_answers_what_was_corrected(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: exit code 1 without a reason; a corrected request that the error of its id keeps from an answer."""
    args = ["batch", *talker.options, str(prompts), "-o", "a.jsonl", "--in-order", *FIXED]
    assert "--resume" in specllama(*args).err
    again = specllama(*args, "--resume")
    assert (again.code, "2 of them errors" in again.err, "hint: " in again.err) == (1, True, True)
    prompts.write_text(prompts.read_text().replace('"top"', '"top_k"'))
    specllama(*args, "--resume")
    assert entries(Path("a.jsonl"))[6:] == [("answer", 4, 4)]


@pytest.mark.parametrize("change", ["file", "settings", "request", "order"])
def test_what_does_not_fit_the_answers_is_refused(specllama: Run, talker: Pair, prompts: Path, change: str) -> None:
    """Prevents: answers overwritten, or of two kinds in one file."""
    args = ["batch", *talker.options, str(prompts), "-o", "a.jsonl", *FIXED]
    specllama(*args)
    before = Path("a.jsonl").read_bytes()
    more = {"file": [], "settings": ["--resume", "--top-k", "3"]}.get(change, ["--resume"])
    text = prompts.read_text()
    if change == "request":
        prompts.write_text(text.replace("hello", "hallo"))
    elif change == "order":
        prompts.write_text('"first"\n' + text)
    assert specllama(*args, *more).code == 2
    assert Path("a.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["p.md"], 2),
        (["-"], 2),
        (["missing.jsonl"], 2),
        (["folder.jsonl"], 2),
        (["empty.jsonl"], 1),
        (["p.jsonl", "--resume"], 2),
        (["p.jsonl", "--json"], 2),
        (["p.jsonl", "-o", "folder.jsonl"], 2),
        (["p.jsonl", "-o", "none/a.jsonl"], 2),
        (["p.jsonl", "-o", "/dev/null"], 2),
        (["p.jsonl", "-o", "x" * 300], 2),
        (["p.jsonl", "-o", "link"], 2),
        (["p.jsonl", "-o", "link", "--resume"], 2),
        (["p.jsonl", "-o", "p.jsonl", "--resume"], 2),
        (["p.jsonl", "-o", "p.jsonl"], 2),
        (["p.jsonl", "--parallel", "0"], 2),
        (["p.jsonl", "--template", "no field"], 2),
        (["p.jsonl", "--input-format", "xml"], 2),
        (["p.jsonl", "--input-format", "csv"], 2),
        ([], 2),
    ],
)
def test_wrong_use_is_told_before_a_model_is_loaded(specllama: Run, tmp_path: Path, args: list[str], code: int) -> None:
    """Prevents: a traceback; minutes of loading before a wrong option is told."""
    (tmp_path / "p.jsonl").write_text('"a"\n')
    (tmp_path / "p.md").write_text("a\n")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    result = specllama("batch", "-m", "missing.gguf", *args)
    assert (result.code, result.out, "error: " in result.err) == (code, "", True)
    assert "missing.gguf" not in result.err
    assert (tmp_path / "p.jsonl").read_text() == '"a"\n'


def test_the_context_holds_the_longest_prompt_and_its_answer(specllama: Run, short_pair: Pair, tmp_path: Path) -> None:
    """Prevents: an answer cut by a context that could have been longer; memory for an unused context."""
    requests_ = [
        {"prompt": "x" * 100, "max_tokens": 5},
        {"prompt": "x" * 300, "max_tokens": 40},
        {"prompt": "x" * 9000},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, requests_)))
    ends = forbidden(*(tiny.token_id(tiny.byte_level(), text) for text in ("<|im_end|>", "<|endoftext|>")))
    args = ["batch", *short_pair.options, "p.jsonl", "-n", "4", "--json", "-q", "--in-order", *ends]
    result = specllama(*args, "-o", "a.jsonl")
    assert result.code == 1
    first, second, long = lines_of(Path("a.jsonl"))[1:]
    assert (len(first["tokens"]), len(second["tokens"]), long["error"]["kind"]) == (5, 40, "PromptError")
    record = json.loads(result.out)
    assert lines_of(Path("a.jsonl"))[0]["models"]["target"]["n_ctx"] == record["n_ctx"]
    assert result.err.count("trained for") == 0
    needed = second["timings"]["prompt_n"] + second["timings"]["cache_n"] + 40
    assert needed <= record["n_ctx"] <= needed + SPARE


@pytest.mark.parametrize("arch", ["mamba", "llama"])
def test_requests_longer_than_the_usual_context_fit_and_are_told(specllama: Run, tmp_path: Path, arch: str) -> None:
    """Prevents: requests of a recurrent model that end at its usual context; a wrong length in the answers."""
    vocabulary = tiny.byte_level()
    model = tiny.write_model(tmp_path / "m.gguf", arch=arch, vocabulary=vocabulary, n_ctx=6000)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x" * 4500, "raw": True}))
    ends = forbidden(*(tiny.token_id(vocabulary, text) for text in ("<|im_end|>", "<|endoftext|>")))
    args = ["batch", "-m", str(model), "--spec-type", "none", "p.jsonl", "-n", "4", "--json", "-q", *ends]
    result = specllama(*args, "-o", "a.jsonl")
    assert result.code == 0
    (start, answer), record = lines_of(Path("a.jsonl")), json.loads(result.out)
    assert start["models"]["target"]["n_ctx"] == record["n_ctx"]
    needed = answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] + 4
    assert (len(answer["tokens"]), needed > 4096) == (4, True)
    assert needed <= record["n_ctx"] <= needed + SPARE
    assert record["stats"]["kv_bytes"] > 0


def test_what_a_stranger_wrote_reaches_the_terminal_as_plain_text(specllama: Run, talker: Pair, tmp_path: Path) -> None:
    """Prevents: a prompt that moves the cursor, or hides what an error says."""
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"id": EVIL, "prompt": "a", EVIL: 1}) + "\n" + json.dumps({"id": EVIL + "2", "prompt": EVIL})
    )
    result = specllama("batch", *talker.options, "p.jsonl", *FIXED)
    assert result.code == 1
    assert not {"\x1b", "\x9b", "\u202e", "\u200b", "\r"} & set(result.out + result.err)
    assert {json.loads(line)["id"] for line in result.out.splitlines()[1:]} == {EVIL, EVIL + "2"}


def test_formats_and_stops_of_a_request(specllama: Run, talker: Pair, tmp_path: Path) -> None:
    """Prevents: settings of a request that are read and not used."""
    lines = [{"prompt": "a", "regex": "yes|no"}, {"prompt": "a", "json_schema": {"type": "boolean"}}, {"prompt": "a"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert specllama("batch", *talker.options, "p.jsonl", "-o", "a.jsonl", "--in-order", *FIXED).code == 0
    assert [each["fits_format"] for each in lines_of(Path("a.jsonl"))[1:]] == [True, True, None]
    first, second, third = (each["text"] for each in lines_of(Path("a.jsonl"))[1:])
    assert first in ("yes", "no")
    assert second in ("true", "false")
    stop = third[3:5]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "stop": stop}))
    assert specllama("batch", *talker.options, "p.jsonl", "-o", "b.jsonl", *FIXED).code == 0
    assert lines_of(Path("b.jsonl"))[1]["text"] == third[: third.index(stop)]


@pytest.mark.parametrize(
    ("settings", "own", "said"),
    [
        (Settings(params=SamplingParams(temperature=0)), True, ""),
        (Settings(params=SamplingParams(temperature=0)), False, "near-ties"),
        (Settings(seed=1, seed_mode=SeedMode.SAME), True, ""),
        (Settings(seed=1, seed_mode=SeedMode.SAME), False, "near-ties"),
        (Settings(seed=1), True, "seed_mode"),
        (Settings(seed=1), False, "specllama's kernels"),
        (Settings(), False, ""),
    ],
)
def test_what_a_fixed_answer_depends_on_is_said(settings: Settings, own: bool, said: str) -> None:
    """Prevents: a promise of equal texts that llama.cpp's kernels, or other draft lengths, do not keep."""
    caveat = caveat_of(settings.params, settings.seed, settings.seed_mode, own_kernels=own)
    assert (said in caveat, bool(caveat)) == (True, bool(said))
    assert ("kernels" in caveat) == (bool(said) and not own)


@pytest.mark.parametrize(
    ("own", "said"), [({"temperature": 0}, "near-ties"), ({"seed": 1}, "seed_mode"), ({"temperature": 1}, "")]
)
def test_what_the_answer_of_a_line_depends_on_is_said_once(
    specllama: Run, talker: Pair, tmp_path: Path, own: dict[str, int], said: str
) -> None:
    """Prevents: no note, because the options have no seed and another temperature; or a note for every line."""
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text, **own}) for text in ("a", "b", "c")))
    result = specllama("batch", *talker.options, "p.jsonl", "-n", "4", "--kernels", "off", *SILENT)
    assert (result.code, result.err.count("near-ties") + result.err.count("seed_mode")) == (0, bool(said))
    assert said in result.err


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", ["target", "draft"])
def test_a_recurrent_model_is_named_where_requests_run_one_at_a_time(
    specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recurrent: str
) -> None:
    """Prevents: a slow batch without its reason; a hint that does not say that the target alone can do more."""
    archs = {"target": "llama", "draft": "llama", recurrent: "mamba"}
    models = {
        name: tiny.write_model(tmp_path / f"{name}.gguf", arch=arch, vocabulary=tiny.ascii_level())
        for name, arch in archs.items()
    }
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "raw": true}\n{"prompt": "b", "raw": true}')
    monkeypatch.setattr("specllama.batch.open.how_many", lambda setup, n_requests: 2)
    args = ["batch", "-m", str(models["target"]), "-md", str(models["draft"]), "-t", "1", "p.jsonl", *FIXED]
    args += ["--spec-type", "draft-simple"]
    result = specllama(*args)
    assert (result.code, len(result.out.splitlines())) == (0, 3)
    (told,) = [line for line in result.err.splitlines() if "recurrent" in line]
    assert f"{recurrent}.gguf" in told
    result = specllama(*args, "--parallel", "2")
    assert (result.code, f"{recurrent}.gguf" in result.err) == (1, True)
    assert ("--spec-type lookup" in result.err) == (recurrent == "draft")
    if recurrent == "draft":
        assert specllama(*args, "--parallel", "2", "--spec-type", "lookup").code == 0


def test_a_full_disk_is_an_error_and_resume_goes_on(specllama: Run, talker: Pair, prompts: Path) -> None:
    """Prevents: a traceback; half an answer in the file; answers that are lost."""
    args = ["batch", *talker.options, str(prompts), "-o", "a.jsonl", *FIXED]
    specllama(*args)
    whole = Path("a.jsonl").stat().st_size
    Path("a.jsonl").unlink()
    with file_size_limit(whole - 500):
        result = specllama(*args)
    assert (result.code, result.err.count("--resume") > 0) == (1, True)
    n_there = len(entries(Path("a.jsonl")))
    assert n_there < 6
    assert specllama(*args, "--resume").code == 1
    assert len(entries(Path("a.jsonl"))) == 6


def test_a_pass_that_fails_is_no_error_of_a_request(
    specllama: Run, talker: Pair, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a thousand errors in the answers, each taken for an answer by --resume, because the backend failed."""
    from specllama.base.errors import BackendError
    from specllama.batch.request import Done

    original = command.open_pool

    class Failing:
        def __init__(self, pool: Any) -> None:
            self.stats, self.n_ctx, self.n_ctx_draft = pool.stats, pool.n_ctx, pool.n_ctx_draft

        def run(self, asked: Any, **_options: Any) -> Any:
            for each in asked:
                yield Done(each.id, error=BackendError("llama_decode returned -3"))

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._inner = original(*args, **options)

        def __enter__(self) -> Failing:
            return Failing(self._inner.__enter__())

        def __exit__(self, *error: object) -> None:
            self._inner.__exit__(*error)

    monkeypatch.setattr(command, "open_pool", Opened)
    prompts.write_text('"a"\n"b"\n')
    args = ["batch", *talker.options, str(prompts), "-o", "a.jsonl", *FIXED]
    assert specllama(*args).code == 1
    assert entries(Path("a.jsonl")) == []
    monkeypatch.setattr(command, "open_pool", original)
    assert specllama(*args, "--resume").code == 0
    assert len(entries(Path("a.jsonl"))) == 2


def _command(pair: Pair, *more: str) -> list[str]:
    return [*SPECLLAMA, "batch", *pair.options, "p.jsonl", "-o", "a.jsonl", "--temp", "0", *SILENT, "-q", *more]


def _resumed(pair: Pair, *more: str) -> None:
    subprocess.run(_command(pair, "--resume", *more), check=True, timeout=120)


def _wait_for(path: Path, n_lines: int) -> None:
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < n_lines:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_keeps_the_answers_and_resume_goes_on(talker: Pair, tmp_path: Path) -> None:
    """Prevents: an answer that was cut by Ctrl-C and counts as one; a traceback."""
    (tmp_path / "p.jsonl").write_text("\n".join(f'"{n}"' for n in range(24)))
    child = subprocess.Popen(_command(talker, "-n", "200"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _wait_for(tmp_path / "a.jsonl", 4)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"", b"")
    there = lines_of(tmp_path / "a.jsonl")[1:]
    assert 3 <= len(there) < 24
    assert {each["finish_reason"] for each in there} <= {"length", "stop"}
    _resumed(talker, "-n", "200")
    assert sorted(each["line"] for each in lines_of(tmp_path / "a.jsonl")[1:]) == list(range(1, 25))


# Imports once, which takes most of a start, and gives each batch a process of its own.
KILLER = """
import os, random, signal, sys, time
from specllama.cli.app import main
from specllama.cli.batch import command
from specllama.cli.batch.source import SPARE

command.GAP_S = 0.02
chance, n_killed, answers = random.Random(1), 0, sys.argv[sys.argv.index("-o") + 1]
for _ in range(12):
    with open(answers, "rb") as file:
        n_lines = file.read().count(b"\\n") + chance.randrange(1, 12)
    child = os.fork()
    if not child:
        os._exit(main(sys.argv[1:]))
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        with open(answers, "rb") as file:
            if file.read().count(b"\\n") >= n_lines:
                break
        time.sleep(0.002)
    time.sleep(chance.random() / 50)
    os.kill(child, signal.SIGKILL)
    n_killed += os.waitpid(child, 0)[1] == signal.SIGKILL
print(n_killed)
"""


@pytest.mark.slow
def test_killed_at_any_moment_a_batch_goes_on_to_the_same_answers(talker: Pair, tmp_path: Path) -> None:
    """Prevents: an answer lost or given twice after kill -9."""
    (tmp_path / "p.jsonl").write_text("\n".join(f'"{n}"' for n in range(120)))
    _resumed(talker, "-n", "10")
    expected = {each["line"]: each["tokens"] for each in lines_of(tmp_path / "a.jsonl")[1:]}
    (tmp_path / "a.jsonl").write_bytes(b"")
    args = _command(talker, "--resume", "-n", "10")[len(SPECLLAMA) :]
    killer = [sys.executable, "-c", KILLER, *args]
    done = subprocess.run(killer, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) >= 8
    _resumed(talker, "-n", "10")
    found = [(each["line"], each["tokens"]) for each in lines_of(tmp_path / "a.jsonl")[1:]]
    assert len(found) == 120
    assert dict(found) == expected


def test_an_answer_that_cannot_be_written_is_an_error_of_its_request() -> None:
    """Prevents: one answer that ends a batch of a thousand while its line is made."""
    asked, error = Asked(7, "x", (Message("user", "a"),), False, Settings(), ""), LookupError("a bug")

    def piece(token: int) -> bytes:
        raise error

    done = Done(source.Put(asked), tokens=(1, 2), reason="stop")
    line, ended = command.line_of(done, piece)
    assert (json.loads(line)["event"], json.loads(line)["id"], json.loads(line)["line"]) == ("error", "x", 7)
    assert ended.error is not None
    assert (ended.reason, ended.error.__cause__) == (None, error)


def test_an_unexpected_error_of_one_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: one line that ends a batch while its prompt or its constraint is made."""
    vocab, error = SimpleNamespace(size=9), LookupError("a bug")
    asked = [Asked(i, i, (Message("user", text),), False, Settings(), "") for i, text in enumerate(("a", "b", "c"), 1)]

    def tokens(messages: Sequence[Message]) -> list[int]:
        if messages[0].content == "b":
            raise error
        return [1]

    def constraint(form: object, vocab: object) -> None:
        if next(n_made) == 1:
            raise error

    n_made = count()
    monkeypatch.setattr(source, "constraint_of", constraint)
    found = source.prompts(asked, vocab, SimpleNamespace(tokens=tokens), 512)  # type: ignore[arg-type]
    made = list(source.pool_requests(found, vocab))  # type: ignore[arg-type]
    assert [isinstance(each, Request) for each in made] == [True, False, False]
    assert all(isinstance(each, Done) and each.error and each.error.__cause__ is error for each in made[1:])
