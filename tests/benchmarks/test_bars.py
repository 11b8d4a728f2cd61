"""The table of bars: what is compared with what, and a file of runs that may have been cut off anywhere."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import bars_arms, bars_report, rows
from benchmarks.bars_report import AUTO, BARS, PEER_PLAIN, PLAIN, Run, best_peer, cell
from benchmarks.rows import append, mend, rows_of
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath
from specllama.pairs.ask import Hardware
from specllama.pairs.profile import Profile
from specllama.pairs.setup import Setup

PLAIN_BAR = BARS[0]
PROFILE = Profile(
    made="", target_path=DEFAULT, draft_path=DEFAULT, step_s=0.1,
    costs=CostProfile(verify=((1, 1.0),), draft=((1, 0.2),)), classes=(),
)  # fmt: skip


def _run(arm: str, speed: float, prompt: str = "a", *, group: str = "code", temperature: float = 0.0) -> Run:
    return Run(
        group=group, prompt=prompt, temperature=temperature, arm=arm, n_tokens=60, decode_s=60 / speed,
        n_drafted=4, n_accepted=3, text="", tokens=(1, 2),
    )  # fmt: skip


def test_ratios_are_taken_prompt_by_prompt_where_both_arms_ran() -> None:
    """Prevents: a ratio of medians, or a prompt that only one arm has answered."""
    runs = [_run(PLAIN, 10, "a"), _run(PLAIN, 20, "b"), _run(AUTO, 20, "a"), _run(AUTO, 30, "b"), _run(AUTO, 99, "c")]
    found = cell(runs, PLAIN_BAR, "code")
    assert found is not None
    assert found.ratios == pytest.approx((2.0, 1.5))
    assert found.mean == pytest.approx(3.0**0.5)
    assert found.reached
    assert cell(runs, PLAIN_BAR, "story") is None


def test_plain_decoding_gets_the_path_it_was_fastest_on_and_else_the_loaded_target() -> None:
    """Prevents: plain decoding on the kernel path that suits drafts, or the target loaded twice without need."""
    files = cast(Any, None)  # nothing is looked up in them
    tuned = Setup(files, None, DEFAULT.applied(LoadOptions(n_threads=3)), Hardware(), profile=PROFILE)
    alone = replace(tuned, profile=replace(PROFILE, plain_path=AS_IN_FILE))
    assert KernelPath.of(bars_arms.plain_options(alone, "best")) == AS_IN_FILE
    assert bars_arms.plain_options(alone, "best").n_threads == 3
    for setup, wanted in ((alone, "same"), (tuned, "best"), (replace(tuned, profile=None), "best")):
        assert bars_arms.plain_options(setup, wanted) == tuned.target_options
    same = replace(tuned, profile=replace(PROFILE, plain_path=DEFAULT))
    assert bars_arms.plain_options(same, "best") == same.target_options


def test_a_text_that_auto_changes_is_named_and_only_at_temperature_0() -> None:
    """Prevents: a faster `auto` that gives other tokens and goes unnoticed."""
    other = replace(_run(AUTO, 20, "b"), tokens=(1, 3))
    runs = [_run(PLAIN, 10, "a"), _run(AUTO, 20, "a"), _run(PLAIN, 10, "b"), other, _run(AUTO, 20, "c")]
    assert bars_report.changed_texts(runs) == ["b"]
    assert bars_report.changed_texts([replace(run, temperature=1.0) for run in runs]) == []


def test_without_runs_of_llama_cpp_only_our_plain_decoding_is_compared() -> None:
    """Prevents: empty tables after `--ours`."""
    runs = [_run(PLAIN, 10), _run(AUTO, 20)]
    assert "\n".join(bars_report.bar_tables(runs)).count("| reached |") == 1
    assert "\n".join(bars_report.bar_tables([*runs, _run(PEER_PLAIN, 9)])).count("| reached |") == len(BARS)


def test_temperatures_and_classes_are_never_mixed() -> None:
    runs = [_run(PLAIN, 10, temperature=1.0), _run(AUTO, 20), _run(PLAIN, 10, group="story")]
    assert cell(runs, PLAIN_BAR, "code") is None


def test_the_peers_best_setting_is_known_in_hindsight_by_the_time_of_a_whole_class() -> None:
    """Prevents: the best setting of each prompt, or a mean of speeds that hides slow answers."""
    runs = [
        _run(PEER_PLAIN, 10, "a"), _run(PEER_PLAIN, 10, "b"),
        _run("llama.cpp K=3", 30, "a"), _run("llama.cpp K=3", 5, "b"),
    ]  # fmt: skip
    assert best_peer(runs, "code", 0.0) == PEER_PLAIN  # 0.20 against 0.23 seconds for a token of each


@pytest.mark.parametrize(
    "torn",
    [
        b'{"kind": "run", "run": {"gro',
        b'{"kind": "run", "ru\n',
        b"\0" * 40,
        b"[1]\n",
        b"7\n",
        b'{"text": "\xe3\x81',
        b'{"kind": "run"}\n',
        b"\n",
    ],
)
def test_a_damaged_last_line_is_skipped_and_cut_off(
    torn: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents: hours of runs that cannot be continued after a kill, a full disk or a power failure."""
    path = tmp_path / "runs.jsonl"
    append(path, "settings", {"predict": 64})
    append(path, "run", asdict(_run(AUTO, 10)))
    with path.open("ab") as file:
        file.write(torn)
    assert bars_report.read(rows_of(path)) == ({"predict": 64}, [_run(AUTO, 10)])
    assert "line 3" in capsys.readouterr().err
    mend(path)
    append(path, "run", asdict(_run(PLAIN, 5)))
    assert bars_report.read(rows_of(path))[1] == [_run(AUTO, 10), _run(PLAIN, 5)]
    assert capsys.readouterr().err == ""


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    """Prevents: a run that counts as done, but is removed and never repeated."""
    path = tmp_path / "runs.jsonl"
    append(path, "run", {"a": 1})
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    mend(path)
    append(path, "run", {"a": 2})
    assert [row["run"] for row in rows_of(path)] == [{"a": 1}, {"a": 2}]
    mend(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_damage_in_the_middle_of_a_file_is_an_error(tmp_path: Path) -> None:
    """Prevents: runs silently missing in a table."""
    path = tmp_path / "runs.jsonl"
    path.write_text("half a li\n")
    append(path, "run", {"a": 1})
    with pytest.raises(SystemExit, match="line 1"):
        list(rows_of(path))


def test_other_settings_are_named() -> None:
    """Prevents: one file with answers of two lengths."""
    text = rows.difference({"predict": 64, "cpu": "x"}, {"predict": 96, "cpu": "x"})
    assert text == "predict was 64 and is 96"
    assert rows.difference({"cpu": "x"}, {"cpu": "x"}) == ""
    assert rows.difference({"costs": [[1, 1.0]]}, {"costs": ((1, 1.0),)}) == "", "a file has lists for tuples"


def test_every_table_can_be_printed_of_any_part_of_the_runs() -> None:
    """Prevents: a report that needs all runs."""
    runs = [_run(arm, 10) for arm in (AUTO, PLAIN, PEER_PLAIN)]
    for n in range(len(runs) + 1):
        text = "\n".join([*bars_report.bar_tables(runs[:n]), *bars_report.arm_table(runs[:n])])
        assert text.count("| reached |") == (len(BARS) if n == len(runs) else 1)
