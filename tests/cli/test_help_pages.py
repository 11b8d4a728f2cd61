"""The pages of help: examples first, one screen, the rest by topic."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from specllama.chat.settings import SETTINGS
from specllama.cli.app import app
from specllama.cli.bench.options import FORMATS
from specllama.cli.pages import PAGES
from tests.cli.conftest import Run
from tests.test_docs import parse


def all_commands(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Every command and group with its words."""
    yield " ".join(names), command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from all_commands(command.get_command(None, name), *names, name)


COMMANDS = dict(all_commands(get_command(app)))


def test_every_command_has_a_page() -> None:
    """Prevents: a new command whose help has no example, and the page of one that is gone."""
    assert set(PAGES) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_examples_and_fits_a_screen(
    specllama: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: help whose beginning has scrolled away, and examples that do not parse."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = specllama(*name.split(), "--help")
    lines = shown.out.splitlines()
    assert shown.code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    examples = PAGES[name].examples
    assert 2 <= len(examples) <= 3
    start = lines.index("Examples:") + 1
    assert lines[start : start + len(examples)] == [f"  {example}" for example in examples]
    for example in examples:
        words = shlex.split(example.rpartition(" | ")[2])
        assert words[: len(name.split()) + 1] == ["specllama", *name.split()] or not name
        parse(words[1:])


@pytest.mark.parametrize("option", ["--seed-mode", "--json-schema", "--grammar", "--regex", "--rollback"])
def test_an_option_that_needs_a_sample_is_in_an_example(option: str) -> None:
    """Prevents: values and files that the reader has to guess."""
    examples = [example for name, page in PAGES.items() if name != "audit" for example in page.examples]
    assert any(option in example.split() for example in examples)


@pytest.mark.parametrize("example", [each for each in PAGES["bench"].examples if " -o " in each])
def test_the_report_of_an_example_has_a_form(example: str) -> None:
    """Prevents: an example whose file name is refused."""
    words = shlex.split(example)
    assert Path(words[words.index("-o") + 1]).suffix.removeprefix(".") in FORMATS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_common_options_exist_and_help_all_has_every_option(specllama: Run, name: str) -> None:
    """Prevents: an option that no page shows, and a page that names one that is gone."""
    full = specllama(*name.split(), "--help-all").out
    shown = [param for param in COMMANDS[name].params if not param.hidden]
    first_names = [next((word for word in param.opts if word.startswith("--")), param.metavar) for param in shown]
    assert [word for word in first_names if word not in full] == []
    names = {word for param in shown for word in (*param.opts, param.metavar)}
    assert set(PAGES[name].common or ()) <= {*names, "--help-all"}


def test_no_help_begins_with_a_value_that_is_refused() -> None:
    """Prevents: 'Same: ...', which reads as a value to type."""
    wrong = [
        name
        for name, setting in SETTINGS.items()
        for param in COMMANDS["run"].params
        if f"--{name}" in param.opts and param.help.partition(":")[0].lower() in setting.words
    ]
    assert wrong == []


def test_help_by_topic_shows_one_section(specllama: Run) -> None:
    """Prevents: a page to search through for one option."""
    shown = specllama("run", "--help", "sampling").out
    assert "--top-p" in shown
    assert "--model-draft" not in shown
    assert specllama("run", "-h", "Sampling").out == shown
    assert specllama("run", "hello", "--help", "sampling").out == shown
    assert specllama("run", "--help", "no such topic").out == specllama("run", "--help").out
    assert "--help-all" in specllama("run", "--help").out


def test_a_value_or_a_prompt_is_no_request_for_help(specllama: Run) -> None:
    """Prevents: help instead of an error for an option whose value is missing."""
    assert specllama("run", "--stop", "--help").code == 2
    assert specllama("run", "-m", "/no/model.gguf", "--", "--help").code == 1
