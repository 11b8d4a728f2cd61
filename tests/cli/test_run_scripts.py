"""What scripts need of `specllama run`: only the code, the prompt without an answer, templates, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specllama.chat.named_templates import NAMED
from specllama.cli import run
from specllama.core.events import Event, Finished, PromptProgress, TokenEvent
from specllama.core.stats import SpecStats
from tests.cli.conftest import ENDLESS, Pair, Run, events_of, record_of

FORBIDS = 'RULE: {{ messages[0]["role"] }} {{ messages[-1]["content"] }} END'


@pytest.fixture
def saying(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Replaces the engine by one that says a text, up to where the stopper ends it; returns what was said."""

    def install(text: str) -> list[str]:
        said: list[str] = []

        class Speaker:
            def __init__(self, target: Any, *_rest: object, **_options: object) -> None:
                self._vocab = target.vocab

            def generate(self, tokens: list[int], *_rest: object, **options: Any) -> Iterator[Event]:
                yield PromptProgress(len(tokens), len(tokens))
                for token in self._vocab.tokenize(text, special=False):
                    said.append(self._vocab.piece(token).decode())
                    yield TokenEvent(token, "target", 0)
                    if options["stopper"] is not None and options["stopper"].push(token):
                        break
                yield Finished("stop", SpecStats())

        monkeypatch.setattr(run, "Engine", Speaker)
        return said

    return install


def test_extract_prints_the_first_code_block_and_ends_there(
    specllama: Run, byte_pair: Pair, saying: Callable[[str], list[str]]
) -> None:
    """Prevents: fences or explanations in a file that should be code, and time for what is thrown away."""
    said = saying("Here it is:\n```python\nprint(1)\n```\nAnd more.\n")
    result = specllama("run", *byte_pair.options, "-x", "hi")
    assert (result.code, result.out) == (0, "print(1)\n")
    assert "".join(said).endswith("print(1)\n```\n")
    assert "no code block" not in result.err


def test_extract_without_a_code_block_prints_all_and_warns(
    specllama: Run, byte_pair: Pair, saying: Callable[[str], list[str]]
) -> None:
    """Prevents: an empty file where the model wrote the code without fences."""
    saying("print(1)")
    result = specllama("run", *byte_pair.options, "--extract", "hi")
    assert (result.code, result.out) == (0, "print(1)\n")
    assert "no code block" in result.err


@pytest.mark.parametrize("options", [[], ["--stop", "A"]])
def test_extract_of_a_real_answer_is_the_answer(specllama: Run, pair: Pair, options: list[str]) -> None:
    """Prevents: another answer with -x than without."""
    args = ["run", *pair.options, "--raw", "abc", "--temp", "0", "-n", "12", *ENDLESS, *options]
    assert specllama(*args, "-x").out == specllama(*args).out


@pytest.mark.parametrize(
    "args",
    [
        ["-x", "--json"],
        ["-x", "--jsonl"],
        ["-x", "--dry-run"],
        ["--dry-run", "--jsonl"],
        ["-sys", "a", "-sysf", "b"],
        ["--raw", "-sysf", "b"],
        ["--raw", "--chat-template", "chatml"],
    ],
)
def test_options_that_contradict_each_other_are_refused(specllama: Run, pair: Pair, args: list[str]) -> None:
    """Prevents: an option that is silently ignored."""
    result = specllama("run", *pair.options, "hi", *args)
    assert (result.code, result.out) == (2, "")


def test_a_dry_run_shows_the_prompt_and_loads_no_weights(
    specllama: Run, byte_pair: Pair, loaded: list[Any], tmp_path: Path
) -> None:
    """Prevents: a prompt that is guessed; tokens other than those that an answer would read."""
    (tmp_path / "system.txt").write_text("be brief\n")
    args = ["run", *byte_pair.options, "-sysf", "system.txt", "hi", "-n", "1"]
    shown = specllama(*args, "--dry-run")
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (shown.code, shown.out) == (0, prompt + "\n")
    record = record_of(specllama(*args, "--dry-run", "--json"))
    assert record["prompt"] == prompt
    assert "".join(record["pieces"]) == prompt
    assert f"{len(record['prompt_tokens'])} tokens" in shown.err
    assert loaded == []
    assert events_of(specllama(*args, "--jsonl"))[0]["prompt_tokens"] == record["prompt_tokens"]


def test_a_dry_run_of_a_raw_prompt_shows_its_tokens(specllama: Run, pair: Pair) -> None:
    """Prevents: a chat template in the dry run of a raw prompt."""
    shown = specllama("run", *pair.options, "--raw", "abc", "--dry-run", "-v")
    assert (shown.code, shown.out) == (0, "abc\n")
    assert [line.split()[-1] for line in shown.err.splitlines() if line.endswith('"')] == ['"a"', '"b"', '"c"']


def test_a_chat_template_is_a_name_or_a_file(specllama: Run, byte_pair: Pair, tmp_path: Path) -> None:
    """Prevents: an answer by the template of the file although another was asked for."""
    (tmp_path / "own.jinja").write_text(FORBIDS)
    args = ["run", *byte_pair.options, "hi", "--dry-run"]
    assert specllama(*args, "--chat-template", "vicuna").out == "USER: hi\nASSISTANT:\n"
    assert specllama(*args, "--chat-template", "own.jinja").out == "RULE: user hi END\n"
    result = specllama(*args, "--chat-template", "none.jinja")
    assert result.code == 2
    assert all(name in result.err for name in NAMED)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    assert specllama(*args, "--chat-template", "bad.jinja").code == 1


def test_chat_uses_the_system_prompt_file_and_the_template(specllama: Run, byte_pair: Pair, tmp_path: Path) -> None:
    """Prevents: options of `run` that `chat` takes and forgets."""
    (tmp_path / "system.txt").write_text("be brief\n")
    (tmp_path / "own.jinja").write_text(FORBIDS)
    options = ["-sysf", "system.txt", "--chat-template", "own.jinja"]
    stdin = b"/show system\n/show template\n"
    result = specllama("chat", *byte_pair.options, *options, stdin=stdin)
    assert (result.code, result.out) == (0, f"be brief\n{FORBIDS}\n")


def test_a_cut_answer_has_its_own_exit_code_only_if_asked(specllama: Run, pair: Pair) -> None:
    """Prevents: scripts that take half an answer for a whole one; an exit code that breaks those that do not care."""
    args = ["run", *pair.options, "--raw", "abc", "--temp", "0", "-n", "12", *ENDLESS]
    text = json.loads(specllama(*args, "--json").out)["text"]
    assert specllama(*args).code == 0
    assert specllama(*args, "--fail-if-cut").code == 3
    assert specllama(*args, "--fail-if-cut", "--json").code == 3
    assert specllama(*args, "--fail-if-cut", "--stop", text[5]).code == 0
