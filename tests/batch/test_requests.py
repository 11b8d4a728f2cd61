"""The requests of a file: JSON lines, lines of text, and tables."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from specllama.base.errors import SpecllamaError, UsageError
from specllama.batch import requests
from specllama.batch.requests import CSV, JSONL, TEXT, Asked, BadLine, RequestReader, RowTemplate
from specllama.chat.format import AnswerFormat
from specllama.chat.settings import Settings
from specllama.core.noise import SeedMode

TRANSLATE = RowTemplate.check("--template", "Translate {{it}}: {text}")


def read(data: bytes, kind: str = JSONL, settings: Settings | None = None, **options: Any) -> list[Asked | BadLine]:
    return list(RequestReader(kind, settings or Settings(), **options).read(io.BytesIO(data), "the file"))


def one(line: str, **options: Any) -> Asked:
    (found,) = read(line.encode(), **options)
    assert isinstance(found, Asked), found
    return found


def prompts(found: list[Asked | BadLine]) -> list[tuple[int, object, str]]:
    """Number, id and last message; the kind of the error of a bad line."""
    return [
        (each.n_line, each.id, each.messages[-1].content)
        if isinstance(each, Asked)
        else (each.n_line, each.id, type(each.error).__name__)
        for each in found
    ]


def errors(found: list[Asked | BadLine]) -> list[SpecllamaError]:
    return [each.error for each in found if isinstance(each, BadLine)]


def test_a_line_is_a_text_or_an_object_and_empty_lines_count() -> None:
    """Prevents: line numbers that an editor does not show; a BOM or CRLF in a prompt."""
    data = b'\xef\xbb\xbf"a"\r\n\r\n{"prompt": "b"}\n{"id": "x", "prompt": "c"}\n{"id": 7, "prompt": "d"}'
    assert prompts(read(data)) == [(1, 1, "a"), (3, 3, "b"), (4, "x", "c"), (5, 7, "d")]
    assert prompts(read(b"\xef\xbb\xbfa\r\n\n \n b", TEXT)) == [(1, 1, "a"), (4, 4, " b")]


def test_messages_and_system_prompts() -> None:
    """Prevents: a conversation whose system prompt is lost, or the option's in place of the request's own."""
    chat = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "s"}'
    assert [(each.role, each.content) for each in one(chat, system="t").messages] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
    ]
    assert [each.content for each in one('"a"', system="t").messages] == ["t", "a"]
    assert [each.content for each in one('{"prompt": "a", "raw": true}', system="t").messages] == ["a"]


@pytest.mark.parametrize("form", ['{{"prompt": "a", {}}}', '{{"prompt": "a", "params": {{{}}}}}'])
def test_settings_have_the_names_of_the_python_api_and_of_the_options(form: str) -> None:
    """Prevents: a request that cannot be copied from a program, or from a command line."""
    found = one(
        form.format(
            '"temperature": 0, "top_k": 3, "max_tokens": 9, "seed": 4, "seed_mode": "same", "stop": "\\\\n", '
            '"logit_bias": {"5": -1}, "regex": "a+"'
        )
    ).settings
    assert (found.params.temperature, found.params.top_k, found.params.logit_bias) == (0.0, 3, {5: -1.0})
    assert (found.n_predict, found.seed, found.seed_mode, found.stops) == (9, 4, SeedMode.SAME, ("\\n",))
    assert found.format is not None
    assert (found.format.kind, found.format.text) == ("regex", "a+")
    same = one(form.format('"temp": 0, "n_predict": 9, "min_p": null')).settings
    assert (same.params.temperature, same.n_predict, same.params.min_p) == (0.0, 9, Settings().params.min_p)


def test_a_schema_may_be_an_object_and_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: seconds for checking the same schema in every line."""
    calls: list[Mapping[str, object]] = []
    original = requests.given_format

    def spy(fields: Mapping[str, object]) -> AnswerFormat | None:
        calls.append(fields)
        return original(fields)

    monkeypatch.setattr(requests, "given_format", spy)
    requests._known_format.cache_clear()
    found = read(b'{"prompt": "a", "json_schema": {"type": "boolean"}}\n' * 3)
    kinds = [each.settings.format and each.settings.format.kind for each in found if isinstance(each, Asked)]
    assert kinds == ["json-schema"] * 3
    assert calls == [{"json_schema": {"type": "boolean"}}]
    found = read(b'{"prompt": "a", "json_schema": {"type": "none"}}\n' * 3)
    assert [type(each) for each in found] == [BadLine] * 3
    assert len(calls) == 2


def test_a_seed_is_one_more_for_each_line() -> None:
    """Prevents: equal prompts with equal answers; a seed that depends on the lines that failed before."""
    found = read(b'"a"\n!\n"a"\n{"prompt": "a", "seed": 5}', settings=Settings(seed=2**64 - 1))
    assert [each.settings.seed for each in found if isinstance(each, Asked)] == [2**64 - 1, 1, 5]


@pytest.mark.parametrize(
    "line",
    [
        b"nope",
        b"[1]",
        b"3",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"id": ' + b"9" * 5000 + b', "prompt": "a"}',
        b"{}",
        b'{"prompt": "a", "messages": []}',
        b'{"messages": []}',
        b'{"messages": ["a"]}',
        b'{"messages": [{"role": "tool", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": 1}]}',
        b'{"prompt": " "}',
        b'{"prompt": 1}',
        b'{"prompt": "\\ud800"}',
        b'{"id": 1.5, "prompt": "a"}',
        b'{"id": true, "prompt": "a"}',
        b'{"id": "\\ud800", "prompt": "a"}',
        b'{"prompt": "a", "temprature": 1}',
        b'{"prompt": "a", "temperature": -1}',
        b'{"prompt": "a", "max_tokens": 0}',
        b'{"prompt": "a", "seed": true}',
        b'{"prompt": "a", "stop": [""]}',
        b'{"prompt": "a", "params": 1}',
        b'{"prompt": "a", "regex": "("}',
        b'{"prompt": "a", "json_schema": 1}',
        b'{"prompt": "a", "json_schema": {}, "regex": "a"}',
        b'{"prompt": "a", "raw": 1}',
        b'{"prompt": "a", "raw": true, "system": "s"}',
    ],
)
def test_a_bad_line_is_an_error_and_the_next_one_a_request(line: bytes) -> None:
    """Prevents: one wrong line that ends a night's work, or that is answered with a default in place of its value."""
    bad, good = read(line + b'\n"a"')
    assert isinstance(bad, BadLine)
    assert (bad.n_line, good.n_line, isinstance(good, Asked)) == (1, 2, True)


def test_an_unexpected_error_of_one_line_is_that_of_this_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a bug in the check of one format that ends a night's work."""
    lines = b'{"prompt": "a", "regex": "a"}\n"b"'

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(requests, "_known_format", fails)
    error: Exception = TypeError("a bug")
    bad, good = read(lines)
    assert isinstance(bad, BadLine)
    assert isinstance(good, Asked)
    assert bad.error.__cause__ is error
    error = MemoryError()
    with pytest.raises(MemoryError):
        read(lines)


def test_a_request_names_no_file() -> None:
    """Prevents: a file of prompts from a stranger that reads other files of this machine."""
    (found,) = read(b'{"prompt": "a", "json_schema": "/etc/hostname"}')
    assert isinstance(found, BadLine)
    (found,) = read(b'{"prompt": "a", "format": "grammar /etc/hostname"}')
    assert isinstance(found, BadLine)


def test_a_second_request_of_an_id_is_an_error() -> None:
    """Prevents: two answers whose questions cannot be told apart."""
    data = b'{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n{"id": 4, "prompt": "c"}\n"d"'
    assert prompts(read(data)) == [(1, "x", "a"), (2, None, "UsageError"), (3, 4, "c"), (4, None, "UsageError")]


def test_digests_follow_what_is_asked_and_not_how_it_is_written() -> None:
    """Prevents: a changed question with the old answer; a file that is answered again because it was formatted."""
    first = one('{"prompt": "a", "id": 1, "top_k": 2, "min_p": 0}')
    assert one(' {"min_p":0, "top_k":2, "prompt":"a", "id": 2}').digest == first.digest
    others = ['{"prompt": "b", "top_k": 2, "min_p": 0}', '{"prompt": "a", "top_k": 3, "min_p": 0}', '"a"']
    others += ['{"prompt": "a", "top_k": 2, "min_p": 0, "system": "s"}']
    assert len({first.digest, *(one(line).digest for line in others)}) == 5


def test_a_template_makes_prompts_of_rows() -> None:
    """Prevents: a field that is taken for a setting, or a hole in a prompt."""
    table = b'id,text,seed\nx,"a\nb",9\n,"c, d",9\n'
    found = read(table, CSV, template=TRANSLATE)
    assert prompts(found) == [(2, "x", "Translate {it}: a\nb"), (4, 4, "Translate {it}: c, d")]
    assert {each.settings.seed for each in found if isinstance(each, Asked)} == {-1}
    found = read(b'{"text": 3, "seed": 1, "other": [], "params": {"seed": 2}}\n{"text": []}\n{}', template=TRANSLATE)
    assert prompts(found) == [(1, 1, "Translate {it}: 3"), (2, 2, "UsageError"), (3, 3, "UsageError")]
    assert isinstance(found[0], Asked)
    assert found[0].settings.seed == 2


def test_a_template_takes_a_text_by_either_name() -> None:
    """Prevents: an error in every line of a file of texts, or in every line that is a JSON text."""
    for name in ("text", "prompt"):
        template = RowTemplate.check("--template", f"T {{{name}}}")
        assert prompts(read(b"a", TEXT, template=template)) == [(1, 1, "T a")]
        assert prompts(read(b'"a"', JSONL, template=template)) == [(1, 1, "T a")]


def test_a_bad_line_keeps_its_id() -> None:
    """Prevents: an error that no program can assign to its request."""
    data = b'{"id":"bad","prompt":"x","temperature":"hot"}\n{"id":2}\n{"prompt":""}\n{"id":"bad","prompt":"a"}\n[]'
    assert [each.id for each in read(data)] == ["bad", 2, 3, None, None]
    assert [each.id for each in read(b"id,prompt\nx,\n,\ny\n", CSV)] == ["x", 3, None]


def test_a_table_has_a_prompt_in_each_row() -> None:
    """Prevents: cells under the wrong head; a row that ends the table."""
    table = b'\xef\xbb\xbf"prompt",id,system\r\na,x,s\r\nb\r\n"c"d,y,\r\n\xff,z,\r\ne,,\r\n'
    found = read(table, CSV)
    assert prompts(found) == [
        (2, "x", "a"),
        (3, None, "PromptError"),
        (4, None, "PromptError"),
        (5, "z", "UsageError"),
        (6, 6, "e"),
    ]
    assert isinstance(found[0], Asked)
    assert found[0].messages[0].content == "s"


@pytest.mark.parametrize(
    ("data", "kind", "template"),
    [
        (b"a,b\n1,2\n", CSV, None),
        (b"a,b\n1,2\n", CSV, TRANSLATE),
        (b"text,text\n1,2\n", CSV, TRANSLATE),
        (b"te\xffxt\n1\n", CSV, TRANSLATE),
        (b'"text"x,b\n1,2\n', CSV, TRANSLATE),
        (b"\n\n,\n", CSV, None),
        (b"a\n", TEXT, RowTemplate.check("--template", "T {review}")),
        ("prompt\na".encode("utf-16"), CSV, None),
        ('"a"'.encode("utf-16"), JSONL, None),
    ],
)
def test_a_file_that_has_no_requests_at_all_is_wrong_use(data: bytes, kind: str, template: RowTemplate | None) -> None:
    """Prevents: a hundred thousand errors where one sentence tells."""
    with pytest.raises(UsageError):
        read(data, kind, template=template)


@pytest.mark.parametrize("text", ["none", "{", "}", "{}", "{a!r}", "{a:>3}"])
def test_a_template_without_fields_is_wrong_use(text: str) -> None:
    """Prevents: the same prompt for every row; formats that fail in the first row."""
    with pytest.raises(UsageError):
        RowTemplate.check("--template", text)


def test_lines_that_are_too_long_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: memory for a line without an end; the next line lost."""
    monkeypatch.setattr(requests, "MOST_BYTES", 10)
    assert prompts(read(b"x" * 35 + b'\n"a"\n' + b"y" * 11 + b"\n" + b'"b"')) == [
        (1, None, "PromptError"),
        (2, 2, "a"),
        (3, None, "PromptError"),
        (4, 4, "b"),
    ]
    assert prompts(read(b"prompt\n" + b"x" * 35 + b"\na\n", CSV)) == [(2, None, "PromptError"), (3, 3, "a")]


def test_a_quote_that_is_not_closed_names_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: the rest of a table lost in one error that names one line; all of it in memory."""
    data = b'prompt\na\n"b\nc\nd\n'
    found = read(data, CSV)
    assert prompts(found) == [(2, 2, "a"), (3, None, "PromptError")]
    assert "3 to 5" in str(errors(found)[0])
    with pytest.raises(UsageError):
        read(b'"prompt\na\n', CSV)
    monkeypatch.setattr(requests, "MOST_BYTES", 10)
    data = b'prompt\n"b\n' + b"c\n" * 5 + b'd\n"e,\nf"\n'
    found = read(data, CSV)
    assert prompts(found) == [(2, None, "PromptError"), (7, 7, "c"), (8, 8, "d"), (9, 9, "e,\nf")]
    assert "2 to 6" in str(errors(found)[0])


def test_lines_of_a_table_may_end_with_cr() -> None:
    """Prevents: a table of an old spreadsheet that is refused with advice for programmers."""
    assert prompts(read(b'id,prompt\rx,a\ry,"b\rc"\r', CSV)) == [(2, "x", "a"), (3, "y", "b\rc")]
    assert prompts(read(b"prompt\r\na\rb\r\nc\n", CSV)) == [(2, 2, "a"), (3, 3, "b"), (4, 4, "c")]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (b'{"prompt": "a", "params": {"prompt": "b"}}', "beside params"),
        (b'{"prompt": "a", "params": {"prompts": "b"}}', "temperature"),
        (b'{"prompt": "a", "params": {"temprature": 1}}', "temperature"),
        (b'{"prompts": "a", "prompt": "b"}', "prompt?"),
    ],
)
def test_hints_name_fields_that_may_stand_there(line: bytes, hint: str) -> None:
    """Prevents: "unknown field prompt, did you mean prompt?"."""
    (error,) = errors(read(line))
    assert isinstance(error, UsageError)
    assert hint in error.hint


@pytest.mark.parametrize("line", [b'"a\tb"', b'"a'])
def test_a_place_in_json_is_named_once(line: bytes) -> None:
    """Prevents: "at at column 3"."""
    (error,) = errors(read(line))
    assert str(error).split().count("at") == 1


def test_a_long_file_takes_the_memory_of_its_ids() -> None:
    """Prevents: all requests in memory at once."""
    line = json.dumps({"prompt": "x" * 2000}).encode() + b"\n"
    file = io.BytesIO(line * 300)
    tracemalloc.start()
    n = sum(1 for _ in RequestReader(JSONL, Settings()).read(file, "the file"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (n, peak < 300_000) == (300, True)
