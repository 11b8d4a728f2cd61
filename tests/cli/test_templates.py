"""Prompt templates: what `run --template` sends, what is refused, and how they are listed and edited."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from specllama.base.errors import SpecllamaError
from specllama.cli.screen.editor import edited
from specllama.files import models_toml
from tests.cli.conftest import Pair, Run, record_of

SUMMARY = """
system = "You write $lang."
prompt = "Summarize in $n points, for $$5:\\n$input"
[defaults]
lang = "English"
n = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the templates, with one of them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    place = tmp_path / "config" / "specllama" / "templates"
    place.mkdir(parents=True)
    (place / "summary.toml").write_text(SUMMARY)
    return place


def chatml(system: str, user: str) -> str:
    """The prompt of the talker's chat template."""
    begin = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{begin}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def test_variables_take_typed_values_then_defaults(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a default that wins over what was typed, and values that are read as templates themselves."""
    args = ["run", *byte_pair.options, "--dry-run", "--json", "--template", "summary", "the $text"]
    assert record_of(specllama(*args))["prompt"] == chatml(
        "You write English.", "Summarize in 3 points, for $5:\nthe $text"
    )
    typed = ["--param", "lang=$n = x", "--param", "n="]
    assert record_of(specllama(*args, *typed))["prompt"] == chatml(
        "You write $n = x.", "Summarize in  points, for $5:\nthe $text"
    )


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("prompt = 'Fix it.'", ["code"], ("", "Fix it.\n\ncode")),
        ("prompt = 'Fix it.'", [], ("", "Fix it.")),
        ("system = 'Be brief.'", ["hi"], ("Be brief.", "hi")),
        ('prompt = """\nA\n${input}s\n"""', ["cat"], ("", "A\ncats")),
        ("prompt = 'Say $input.'\ndefaults.input = 'hi'", [], ("", "Say hi.")),
    ],
)
def test_a_template_may_leave_parts_to_the_input(
    specllama: Run, byte_pair: Pair, tmp_path: Path, text: str, words: list[str], expected: tuple[str, str]
) -> None:
    """Prevents: an input that is lost where the template does not name it, and a file that is no template."""
    (tmp_path / "own.toml").write_text(text)
    result = specllama("run", *byte_pair.options, "--dry-run", "--json", "--template", "./own.toml", *words)
    assert record_of(result)["prompt"] == chatml(*expected)


def test_stdin_comes_before_the_argument_in_the_input(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a template that reads only one of them."""
    args = ["run", *byte_pair.options, "--dry-run", "--json", "--template", "summary", "b"]
    assert record_of(specllama(*args, stdin=b"a\n"))["prompt"].endswith("\na\n\nb<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--template", "sumary", "x"], 2, "summary"),
        (["--template", "no/such", "x"], 2, "no/such"),
        (["--template", "summary"], 2, "needs a prompt"),
        (["--template", "summary", "x", "--param", "lnag=x"], 2, "lang, n, input"),
        (["--template", "summary", "x", "--param", "lang"], 2, "KEY=VALUE"),
        (["--template", "summary", "x", "--param", "input=y"], 2, "input"),
        (["--template", "summary", "x", "-sys", "y"], 2, "exclude each other"),
        (["--template", "summary", "x", "--raw"], 2, "--raw"),
        (["x", "--param", "lang=y"], 2, "--template"),
        (["--template", "open", "x"], 2, "--param who=VALUE"),
        (["--template", "dollar", "x"], 1, "$$"),
        (["--template", "unused", "x"], 1, "defaults.b"),
        (["--template", "key", "x"], 1, "promt"),
        (["--template", "number", "x"], 1, "expected a text"),
        (["--template", "empty", "x"], 1, "neither prompt nor system"),
        (["--template", "broken", "x"], 1, "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_before_models_are_loaded(
    specllama: Run, folder: Path, words: list[str], code: int, error: str
) -> None:
    """Prevents: a variable that reaches the model as `$name`, a value that changes nothing, and a traceback."""
    for name, text in {
        "open": "prompt = 'Greet $who.'",
        "dollar": "prompt = 'It costs $5.'",
        "unused": "prompt = '$a'\ndefaults.b = 1",
        "key": "promt = 'x'",
        "number": "prompt = 5",
        "empty": "prompt = ' '",
        "broken": "prompt = ",
    }.items():
        (folder / f"{name}.toml").write_text(text)
    result = specllama("run", *words)
    assert (result.code, result.out) == (code, "")
    assert error in result.err


def test_a_system_prompt_of_config_toml_gives_way_to_the_template(specllama: Run, byte_pair: Pair) -> None:
    """Prevents: a template that fails as soon as a default system prompt is set."""
    specllama("config", "system-prompt", "Rhyme.")
    args = ["run", *byte_pair.options, "--dry-run", "--json", "x"]
    assert "Rhyme." in record_of(specllama(*args))["prompt"]
    assert "Rhyme." not in record_of(specllama(*args, "--template", "summary"))["prompt"]


def test_templates_are_listed_with_their_variables_and_shown(specllama: Run, folder: Path) -> None:
    """Prevents: one damaged file that hides the others."""
    (folder / "broken.toml").write_text("prompt = ")
    (folder / "two words.toml").write_text(SUMMARY)
    listed = specllama("templates")
    assert listed.code == 0
    assert [line.split()[:4] for line in listed.out.splitlines()] == [["summary", "$lang", "$n", "$input"]]
    assert "broken.toml" in listed.err
    assert specllama("templates", "summary").out == SUMMARY.rstrip("\n") + "\n"
    assert specllama("templates", "none").code == 2


def test_edit_makes_a_template_that_can_be_used(
    specllama: Run, byte_pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a first text that no command reads, a file for an edit that was given up, and lost work."""
    monkeypatch.setenv("EDITOR", "true")
    assert specllama("templates", "new", "--edit").code == 0
    assert not (folder / "new.toml").exists()
    monkeypatch.setenv("EDITOR", "sed -i s/friendly/dry/")
    assert specllama("templates", "new", "--edit").code == 0
    args = ["run", *byte_pair.options, "--dry-run", "--template", "new", "abc"]
    assert "Rewrite in a dry tone:\n\nabc" in specllama(*args).out
    monkeypatch.setenv("EDITOR", "sed -i s/prompt/promt/")
    result = specllama("templates", "new", "--edit")
    assert (result.code, "promt" in (folder / "new.toml").read_text()) == (1, True)


@pytest.mark.parametrize(
    ("words", "editor"),
    [
        (["--edit"], "true"),
        (["a/b", "--edit"], "true"),
        (["x", "--edit"], ""),
        (["x", "--edit"], "false"),
        (["x", "--edit"], '"'),
        (["x", "--edit"], "/no/editor"),
    ],
)
def test_what_cannot_be_edited_is_an_error(
    specllama: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], editor: str
) -> None:
    """Prevents: a file outside the folder, half a template of an editor that failed, or an internal error."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    assert specllama("templates", *words).code == (1 if editor in ("false", '"', "/no/editor") else 2)
    assert [path.name for path in folder.iterdir()] == ["summary.toml"]


@pytest.mark.parametrize("command", ["printf '\\377' >>", "rmdir $PLACE; touch $PLACE; printf kept >>"])
def test_a_text_that_cannot_be_saved_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Prevents: lost work after an edit that is not UTF-8, or that the disk refuses."""
    place, script = tmp_path / "place", tmp_path / "editor.sh"
    place.mkdir()
    script.write_text(f'{command} "$1"\n')
    monkeypatch.setenv("PLACE", str(place))
    monkeypatch.setenv("VISUAL", f"sh {script}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SpecllamaError) as caught, edited("before", "x.toml") as after:
        models_toml.write(place / "x.toml", after)
    [kept] = tmp_path.glob("specllama-*/x.toml")
    assert kept.read_bytes().startswith(b"before")
    assert len(kept.read_bytes()) > len(b"before")
    assert str(kept) in caught.value.hint
