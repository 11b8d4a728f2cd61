"""What specllama keeps for itself about files: a damaged record changes no answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from specllama import llama
from specllama.files import gguf_check
from specllama.llama import LoadOptions, crash_test, library_hash
from specllama.pairs import profile as profiles
from specllama.pairs.profile import ProfileKey
from tests import tiny
from tests.cli.conftest import Run
from tests.cli.test_tune import PROFILE

DEEP = "[" * 50_000 + "]" * 50_000


def whole(text: str) -> Callable[[str], str]:
    return lambda _record: text


def part(value: object) -> Callable[[str], str]:
    """Another value under the keys that hold one."""

    def damaged(text: str) -> str:
        record = json.loads(text)
        return json.dumps({**record, **{key: value for key in ("value", "profile", "files") if key in record}})

    return damaged


DAMAGES = (whole(DEEP), whole("9" * 100_000), part("text"), part({"0": 1}), part([[[]]]))


@pytest.mark.slow
@pytest.mark.usefixtures("own_home", "children")
def test_no_damaged_record_changes_an_answer(specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a traceback, or another answer, because of any one file that specllama wrote for itself."""
    monkeypatch.setattr(library_hash, "of", library_hash.of.__wrapped__)  # as if each command were a process
    monkeypatch.setattr(gguf_check, "_LONG_HEADER", 0)  # records of short headers as well
    monkeypatch.setattr(llama, "memory_free", lambda: 1 << 40)  # a row of the report
    shutil.rmtree(user_cache_path("specllama") / crash_test.SOUND, ignore_errors=True)  # of other tests
    target, draft = tiny.write_pair(tmp_path, vocabulary=tiny.byte_level(), chat_template=tiny.CHATML, n_ctx=512)
    other = tiny.write_model(tmp_path / "other.gguf", vocabulary=tiny.sentencepiece(), n_ctx=512)
    options = LoadOptions(n_threads=1)
    profiles.save(ProfileKey(target, options, draft, options), PROFILE)
    pair, strangers = (("-m", str(target), "-md", str(path)) for path in (draft, other))
    ask = ("-t", "1", "-n", "8", "--temp", "0", "abc")
    commands = [("check", *pair), ("run", *pair, *ask), ("run", *strangers, "--spec-type", "draft-tli", *ask)]

    def answers() -> list[tuple[int, str]]:
        results = [specllama(*command) for command in commands]
        return [(result.code, result.out) for result in results]

    expected = answers()
    assert [code for code, _ in expected] == [0, 0, 0]
    texts = {path: path.read_text() for name in ("cache", "state") for path in (tmp_path / name).rglob("*.json")}
    kinds = {"sums", "headers", "builds", "token rows", "token rows by text", "text maps", "profiles", "sound"}
    assert {path.parent.name for path in texts} == kinds
    for damage in DAMAGES:
        for path, text in texts.items():
            path.write_text(damage(text))
        assert answers() == expected
