"""The default against plain decoding: who shares what in a turn, what a restart does, which answers count as low."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import never_below
from benchmarks.never_below import Row, is_low, read, still_low, table, tries
from benchmarks.rows import append
from specllama import llama
from specllama.drafters.controller import CostProfile
from specllama.pairs.ask import Ask, Hardware, Names
from specllama.prompts.load import BenchPrompt, built_in
from specllama.tuning import first_use
from specllama.tuning.first_use import FirstCosts
from tests import tiny

FLAT = CostProfile(verify=((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8), (16, 3.0)), draft=((1, 0.2), (16, 0.5)))
ROW = Row("default", "coding-en-1", 0.0, 64, 1.0, 2.0, 1.0, 2.0, 0.0, 8, 4)
LOW = replace(ROW, decode_s=2.0)  # 0.5 of plain
PROMPTS = tuple(BenchPrompt(id, id.split("-")[0], "en", ("abc",)) for id in ("coding-en-1", "qa-en-1"))


def _measuring(*_args: object, **_options: object) -> Generator[None, None, FirstCosts]:
    yield
    return FirstCosts(FLAT, 0.1, 0.0)


@pytest.fixture
def loads(tmp_path: Path, sound_build: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loaded files, while the kinds have tiny models, and their measurement takes no time."""
    target, draft = tiny.write_pair(tmp_path)
    other = tiny.write_model(tmp_path / "other.gguf", seed=1, noise=0.5)
    drafts = {"default": str(draft), "hopeless": str(other), "alone": None}
    hardware, names = Hardware(n_ctx=256, n_threads=1, kernels="off"), list[str]()

    def asked(kind: str, folder: Path) -> Ask:
        assert folder == tmp_path / "runs.state"
        return Ask(names=Names(target=str(target), draft=drafts[kind]), hardware=hardware)

    def load(*args: object, **options: object) -> llama.LlamaModel:
        model = real(*args, **options)  # type: ignore[arg-type]
        names.append(model.path.name)
        return model

    real = llama.load
    monkeypatch.setattr(llama, "load", load)
    monkeypatch.setattr(never_below, "asked", asked)
    monkeypatch.setattr(never_below, "built_in", lambda: PROMPTS)
    monkeypatch.setattr(first_use, "measuring", _measuring)
    return names


def _run(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Row]:
    words = ["never_below.py", "--output", str(path), "--predict", "8", "--kinds", "default,hopeless,alone", *options]
    monkeypatch.setattr("sys.argv", words)
    never_below.main()
    return read(path)[1]


@pytest.mark.slow
def test_kinds_with_one_target_share_it_and_the_plain_answer(
    loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a run that takes twice as long; a kind that is compared with the plain answer of another turn."""
    rows = _run(tmp_path / "runs.jsonl", monkeypatch)
    assert sorted(loads) == ["draft.gguf", "other.gguf", "target.gguf"]
    assert len(tries(rows)) == len(rows) == 3 * 2 * 2
    for prompt in PROMPTS:
        for temperature in (0.0, 1.0):
            turn = [row for row in rows if (row.prompt, row.temperature) == (prompt.id, temperature)]
            assert {row.kind for row in turn} == {"default", "hopeless", "alone"}
            assert len({(row.plain_decode_s, row.plain_whole_s) for row in turn}) == 1
    assert {row.n_tokens for row in rows} == {8}
    assert sorted(row.kind for row in rows if row.measure_s) == ["default", "hopeless"]


def test_a_restart_adds_what_is_missing_and_measures_no_pair_again(
    loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: two first answers of a pair; an answer that counts twice, or is lost when a run is stopped."""
    path = tmp_path / "runs.jsonl"
    assert _run(path, monkeypatch, "--minutes", "0") == []
    before = _run(path, monkeypatch, "--prompts", "1", "--temperatures", "0")
    assert [bool(row.measure_s) for row in before if row.kind != "alone"] == [True, True]
    after = _run(path, monkeypatch)
    assert after[: len(before)] == before
    assert len(tries(after)) == len(after) == 3 * 2 * 2
    assert not any(row.measure_s for row in after[len(before) :])
    with pytest.raises(SystemExit):
        _run(path, monkeypatch, "--predict", "9")


@pytest.mark.slow
def test_low_answers_run_twice_more_and_first_answers_measure_again(
    loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a slow first answer that is excused by answers which did not measure the pair."""
    path = tmp_path / "runs.jsonl"
    for row in (LOW, replace(LOW, kind="hopeless", measure_s=0.5)):
        append(path, "run", asdict(row))
    found = tries(_run(path, monkeypatch, "--repeat"))
    assert sorted(map(len, found.values())) == [1] * 10 + [3] * 2
    assert [bool(row.measure_s) for row in found["default", "coding-en-1", 0.0]] == [False] * 3
    assert [bool(row.measure_s) for row in found["hopeless", "coding-en-1", 0.0]] == [True] * 3
    assert len(_run(path, monkeypatch, "--repeat")) == 16


@pytest.mark.parametrize(
    ("seen", "first", "still"),
    [
        ([ROW], False, False),
        ([LOW], True, True),
        ([LOW, ROW], True, True),
        ([LOW, ROW, ROW], True, False),
        ([LOW, LOW, ROW], True, True),
        ([replace(ROW, whole_s=3.0), ROW, ROW], True, False),
        ([replace(LOW, n_tokens=63)], False, False),
    ],
)
def test_a_low_answer_counts_by_its_median_once_it_ran_three_times(
    seen: Sequence[Row], first: bool, still: bool
) -> None:
    """Prevents: a low answer that is dropped because one more try was faster."""
    assert (is_low(seen[0]), still_low(seen)) == (first, still)


def test_a_class_holds_by_its_first_tries() -> None:
    """Prevents: a mean that rises because only slow answers are repeated; a table without the low answers' names."""
    ids = [prompt.id for prompt in built_in(["coding"])]
    rows = [replace(ROW, prompt=id) for id in ids] + [replace(ROW, prompt="qa-en-1")]
    assert _bars(rows) == ["2 of 2 classes", "yes", "yes"]
    slow = [replace(row, decode_s=1.03) for row in rows]
    assert _bars(slow) == ["0 of 2 classes", "no", "no"]
    again = [replace(row, decode_s=0.5) for row in slow if row.prompt == "qa-en-1"]
    assert _bars([*slow, *again, *again]) == ["0 of 2 classes", "no", "no"]
    one_low = [replace(LOW, prompt="qa-en-1"), *rows[:-1]]
    assert _bars(one_low) == ["1 of 2 classes", "no", "yes"]
    assert "0.50" in table(one_low)[-1]
    assert "qa-en-1" in table(one_low)[-1]


def _bars(rows: Sequence[Row]) -> list[str]:
    """The last column of the tables: of all classes, then of each."""
    lines = table(rows)
    end = next(n for n, line in enumerate(lines) if line.startswith("Means"))
    return [line.split("|")[-2].strip() for line in lines[:end] if line.startswith("| default")]
