"""`specllama config` and `config.toml`: what stays, what wins over it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama.cli import doctor
from specllama.cli.config import KEYS, defaults, look
from specllama.cli.screen.look import AnswerLook
from tests.cli.conftest import ENDLESS, Pair, Run, record_of
from tests.cli.test_doctor import checkup_of


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of `config.toml`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "specllama" / "config.toml"


def test_a_value_stays_until_it_is_removed_and_comments_stay_longer(specllama: Run, file: Path) -> None:
    """A setting that is lost, or a file of the user's own that is written anew."""
    assert (defaults(), look()) == ({}, AnswerLook())
    for name, value in (("colors", "full"), ("temp", "0.5"), ("history", "off"), ("spec-draft-n-max", "3")):
        assert specllama("config", name, value).code == 0
    file.write_text("# mine\n" + file.read_text())
    assert specllama("config", "temp", "0.25").code == 0
    assert look() == AnswerLook(colors="full")
    assert defaults() == {"temp": 0.25, "history": False, "spec_draft_n_max": "3"}
    assert specllama("config", "temp").out == "0.25\n"
    assert len(specllama("config").out.splitlines()) == 4
    assert specllama("config", "--unset", "temp").code == 0
    assert specllama("config", "--unset", "temp").code == 0
    assert "temp" not in defaults()
    assert file.read_text().startswith("# mine\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["temp", "hot"], "temp is hot, expected a number"),
        (["colors", "many"], "colors is many, expected one of marks"),
        (["tmep", "1"], "unknown setting tmep"),
        (["tmep"], "unknown setting tmep"),
        (["--unset"], "--unset takes a setting"),
        (["--unset", "tmep"], "unknown setting tmep"),
        (["json", "true"], "unknown setting json"),
        (["", "1"], "SETTING is empty"),
        (["temp", ""], "--unset temp"),
    ],
)
def test_what_no_answer_could_use_is_refused(specllama: Run, file: Path, words: list[str], error: str) -> None:
    """A value that fails at the next answer, far from its cause."""
    result = specllama("config", *words)
    assert (result.code, result.out) == (2, "")
    assert error in result.err
    assert not file.exists()


@pytest.mark.parametrize(
    "text", ["temp = 'hot'\n", "x = 1\n", "temp = [1]\n", "temp = \n", "[temp]\n", "temp = true\n"]
)
def test_a_wrong_file_is_named_before_models_are_loaded(
    specllama: Run, file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, or a typing error that changes nothing without a word."""
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for command in (["run", "hi"], ["chat"], ["config"]):
        result = specllama(*command)
        assert result.code == 1
        assert str(file) in result.err
        assert "True" not in result.err
    monkeypatch.setattr(doctor, "look", lambda: checkup_of())
    result = specllama("doctor")
    assert (result.code, str(file) in result.out) == (1, True)
    assert specllama("models", "list").code == 0


@pytest.mark.parametrize("words", [["run", "--help"], ["chat", "-h"], ["run", "--help-all"]])
def test_help_needs_no_right_file(specllama: Run, file: Path, words: list[str]) -> None:
    """Help that a typing error in a file takes away when it is needed."""
    file.parent.mkdir(parents=True)
    file.write_text("temp = \n")
    assert specllama(*words).code == 0


@pytest.mark.parametrize("text", ["temp = 'hot'\n", "x = 1\n", "temp = [1]\n", "[temp]\ny = 1\n"])
def test_a_wrong_value_can_be_removed(specllama: Run, file: Path, text: str) -> None:
    """A file that only an editor repairs."""
    file.parent.mkdir(parents=True)
    file.write_text(f"colors = 'full'\n{text}")
    assert specllama("config", "--unset", "x" if "x" in text else "temp").code == 0
    assert look() == AnswerLook(colors="full")


def test_a_negative_number_is_a_value(specllama: Run) -> None:
    """`-1` refused as an option; an unknown option taken as a value."""
    assert [specllama("config", "seed", value).code for value in ("-1", "-x", "-1.5")] == [0, 2, 2]
    assert specllama("config", "--color", "never", "seed").out == "-1\n"
    assert "-1.5" in specllama("config", "seed", "-1.5").err


def test_an_option_wins_over_the_environment_and_that_over_the_file(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that overrides what was typed, or does nothing."""
    args = ["run", *pair.options, "--raw", "abc", *ENDLESS]
    for name, value in (("predict", "3"), ("colors", "full"), ("pair", "no-such-pair")):
        specllama("config", name, value)
    assert record_of(specllama(*args, "--json"))["acceptance"]["emitted"] == 3
    assert "\x1b[36m" in specllama(*args, "-n", "20", "--temp", "0", "--color", "always").out
    monkeypatch.setenv("SPECLLAMA_PREDICT", "5")
    assert record_of(specllama(*args, "--json"))["acceptance"]["emitted"] == 5
    assert record_of(specllama(*args, "--json", "-n", "7"))["acceptance"]["emitted"] == 7
    monkeypatch.setenv("SPECLLAMA_MODEL", str(pair.target))
    assert (
        record_of(specllama("run", *pair.options[2:], "--raw", "abc", "--json", *ENDLESS))["acceptance"]["emitted"] == 5
    )


def test_every_key_has_help_and_is_a_parameter_of_run_or_chat() -> None:
    """A key that is accepted and then ignored."""
    from specllama.cli.app import CONFIGURED, _load

    parameters = {param.name for command in CONFIGURED for param in _load(command).params}
    assert all(key.help for key in KEYS.values())
    assert {key.parameter for key in KEYS.values() if key.parameter} <= parameters
