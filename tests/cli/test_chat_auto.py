"""`/set spec-draft-n-max auto` in a chat: the profile of `tune` switched on and off between turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.pairs.profile import Profile
from tests.cli.conftest import Pair, Result
from tests.cli.test_tune import DEAR, PROFILE, keep_profile

LINES = (
    "hello",
    "/set spec-draft-n-max",
    "/set draft-max 3",
    "/set spec-draft-n-max auto",
    "and then",
    "/show parameters",
)


@pytest.fixture
def keep(talker: Pair, auto: None) -> Callable[[Profile], Path]:
    """Keeps a profile of the pair as `Pair.options` load it."""
    return lambda profile: keep_profile(talker, profile)


@pytest.fixture
def chat(specllama: Callable[..., Result], talker: Pair) -> Callable[..., Result]:
    """Runs a chat whose stdin holds these lines."""

    def talk(*lines: str, args: tuple[str, ...] = ()) -> Result:
        words = ["chat", *talker.options, "-n", "12", "--temp", "0", *args]
        return specllama(*words, stdin="".join(line + "\n" for line in lines).encode())

    return talk


def length(result: Result) -> str:
    """The draft length in the last list of settings."""
    lines = [line for line in result.out.splitlines() if line.startswith("spec-draft-n-max ")]
    return lines[-1].removeprefix("spec-draft-n-max").strip()


@pytest.mark.usefixtures("auto")
def test_without_a_profile_auto_says_what_it_comes_to(chat) -> None:
    """`auto` that only the command line accepts, or that hides its value."""
    result = chat(*LINES)
    assert result.code == 0, result.err
    assert "spec-draft-n-max is auto: up to 16, by assumed costs" in result.out
    assert "spec-draft-n-max is 3\nspec-draft-n-max is auto: " in result.err
    assert length(result).startswith("auto: up to 16")
    assert chat("/set spec-draft-n-max soon").code == 1


def test_with_a_profile_it_decides_until_a_number_does(chat, keep: Callable[[Profile], Path]) -> None:
    """A number that the profile overrules, a profile that is not shown, a policy that ignores p-min."""
    keep(PROFILE)
    result = chat(*LINES, "/set spec-draft-p-min 0.5", "/show parameters")
    assert result.code == 0, result.err
    decided = "auto: up to 16, as tuned 2026-01-02 (1.20 to 1.60 times plain decoding expected)"
    assert f"spec-draft-n-max is {decided}: longest draft" in result.out
    assert f"spec-draft-n-max is 3\nspec-draft-n-max is {decided}\n" in result.err
    assert "spec-draft-p-min is 0.5\nspec-draft-n-max is 16\n" in result.err
    assert f"spec-draft-n-max   {decided}\n" in result.out
    assert length(result) == "16"
    lines = [json.dumps({"command" if line[0] == "/" else "message": line}) for line in LINES]
    events = [json.loads(line) for line in chat(*lines[:3], *lines[:1], *lines[3:], args=("--jsonl",)).out.splitlines()]
    turn, planned = 0, [0, 0, 0]
    for event in events:
        turn += event["event"] == "turn"
        planned[turn if turn < 3 else 2] += event["event"] == "step" and any(
            each.get("plan") for each in event["decisions"]
        )
    assert planned[0] > 0 == planned[1] < planned[2]


def test_auto_loads_the_models_as_their_profile_has_them(chat, keep: Callable[[Profile], Path], tmp_path: Path) -> None:
    """Costs of another kernel path; a draft that is kept although it cannot pay; a lost conversation."""
    keep(replace(PROFILE, costs=DEAR))
    result = chat(
        "hello", "/set spec-draft-n-max auto", "and then", "/show info", "/save talk.json", args=("--draft", "2")
    )
    assert result.code == 0, result.err
    assert "only lookups draft" in result.err
    assert "spec-type  lookup" in result.out
    assert "\ndraft " not in result.out
    assert "turns      2" in result.out
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["settings"]["spec_draft_n_max"] == "auto"
    again = chat("/show parameters", args=("--load", "talk.json", "--draft", "2"))
    assert length(again) == "2"  # what decides belongs to the loaded models
