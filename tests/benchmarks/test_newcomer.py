"""The newcomer's table: what its commands may see of this machine, and its ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import newcomer
from benchmarks.newcomer import FIRST, PLAIN, SECOND, TUNED, Answer, prompts_of, table
from specllama.prompts.load import SAMPLES

ANSWER = Answer(64, 20.0, 4.0, 0.1, tuned=False)


def test_only_the_second_answer_finds_what_another_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a first answer with a profile; a plain one that teaches the next; a changed profile of the user."""
    tuned = tmp_path / "tuned"
    (tuned / "profiles").mkdir(parents=True)
    (tuned / "profiles" / "a.json").write_text("theirs")
    seen = []

    def answered(_prompt: str, _n: int, environment: Mapping[str, str], *options: str) -> Answer:
        profiles = Path(environment["XDG_STATE_HOME"]) / "specllama" / "profiles"
        kept = profiles / "a.json"
        seen.append((options != (), kept.read_text() if kept.exists() else ""))
        assert Path(environment["XDG_CACHE_HOME"]).is_relative_to(tmp_path / "home")
        profiles.mkdir(parents=True, exist_ok=True)
        is_tuned = seen[-1][1] == "theirs"
        kept.write_text("ours")
        return replace(ANSWER, tuned=is_tuned)

    monkeypatch.setattr(newcomer, "answered", answered)
    for at in range(3):
        seen.clear()
        found = newcomer.turn("abc", 4, tmp_path / "home", tuned, at)
        assert set(found) == {PLAIN, FIRST, SECOND, TUNED}
        assert sorted(seen) == [(False, ""), (False, "ours"), (False, "theirs"), (True, "")]
        assert seen.index((False, "")) + 1 == seen.index((False, "ours"))
    assert (tuned / "profiles" / "a.json").read_text() == "theirs"
    (tuned / "profiles" / "a.json").write_text("stale")
    with pytest.raises(SystemExit):
        newcomer.turn("abc", 4, tmp_path / "home", tuned, 0)


def test_ratios_above_one_are_faster_in_speed_and_in_time() -> None:
    """Prevents: a ratio of medians of different rounds; a time whose ratio is upside down."""
    fast = replace(ANSWER, speed=40.0, answer_s=2.0)
    rounds = [
        dict.fromkeys((PLAIN, FIRST, SECOND, TUNED), ANSWER),
        {**dict.fromkeys((PLAIN, FIRST, SECOND), ANSWER), TUNED: fast},
    ]
    rounds += [dict.fromkeys((PLAIN, FIRST, SECOND, TUNED), fast)]
    cells = [cell.strip() for cell in table({"code": rounds})[2].split("|")[1:-1]]
    assert cells[:3] == ["code", "64", "20.0 t/s (1.00), 4.0 s (1.00)"]
    assert cells[5] == "40.0 t/s (1.00), 2.0 s (1.00)"
    assert "20.0 t/s (0.50), 4.0 s (0.50)" in table({"code": [{**rounds[2], FIRST: ANSWER}]})[2]


def test_no_prompt_of_the_table_is_one_that_tune_measures_with() -> None:
    """Prevents: a tuned answer to the prompt that chose its draft."""
    prompts = [prompts_of(name)[newcomer.SECOND_ENGLISH] for name in newcomer.SOURCES]
    assert {prompt.language for prompt in prompts} == {"en"}
    assert not {prompt.id for prompt in prompts} & set(SAMPLES.values())
