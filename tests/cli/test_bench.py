"""`specllama bench` on tiny models: every form of output, wrong use, interruption, comparison."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.base.errors import UsageError
from specllama.base.jsonable import to_plain
from specllama.bench import machine
from specllama.bench import plots as bench_plots
from specllama.bench import run as core
from specllama.bench.compare import compare
from specllama.bench.report import ALL, BenchReport
from specllama.cli.bench.view import main_table
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import DEFAULT, KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import Profile
from specllama.pairs.setup import profile_for
from tests.bench_cases import MACHINE, PLAIN, arm_of, plan_of, prompts_of, report_of, run_of
from tests.benchreports import report
from tests.cli.conftest import Pair, Result, Terminal, record_of

pytestmark = pytest.mark.slow

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the machine nor the passes are measured: both take seconds."""
    monkeypatch.setattr(machine, "look", lambda: MACHINE)
    monkeypatch.setattr(core, "MOST_COSTS_S", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Four short prompts of two classes."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"q{i}", "category": ("coding", "poem")[i % 2], "language": "en", "turns": [f"say {i}"]}
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def args(byte_pair: Pair, prompts: Path) -> list[str]:
    """A benchmark of a fraction of a second."""
    return ["bench", *byte_pair.options, "--prompts", str(prompts), "-n", "8", "--spec-draft-n-max", "2,3", "-r", "1"]


def table_of(text: str) -> list[list[str]]:
    """The cells of the first Markdown table, without its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| --")]


def test_a_profiles_kernel_path_is_for_the_draft_that_it_was_found_for() -> None:
    """Another draft in the same sweep loaded with orders for weights that it does not have, which is an error."""
    path = KernelPath(placed=(("q4_K", "CPU_REPACK"),))
    profile = Profile(
        made="", quick=True, target_path=DEFAULT, draft_path=path, step_s=1.0, classes=(),
        costs=CostProfile(verify=((1, 1.0),), draft=((1, 1.0),)),
    )  # fmt: skip
    own, other, derived = (SimpleNamespace(path=Path(name)) for name in ("own", "other", "derived"))
    first: Any = SimpleNamespace(draft=own, target_options=LoadOptions())

    def path_for(file: Any, of: Profile) -> KernelPath:
        found = profile_for(file, first, of)
        assert found is not None
        return found.draft_path

    assert (path_for(own, profile), path_for(other, profile), path_for(None, profile)) == (path, DEFAULT, path)
    of_derived = replace(profile, derived=Path("derived"))
    assert (path_for(own, of_derived), path_for(derived, of_derived)) == (DEFAULT, path)
    assert profile_for(own, first, None) is None  # type: ignore[arg-type]


def test_one_table_and_one_verdict_in_words(specllama: Run, args: list[str]) -> None:
    """Pages of figures, and the reader has to find out what they mean; or progress among the data."""
    result = specllama(*args, "--temp", "0,0.7")
    assert result.code == 0, result.err
    table = table_of(result.out)
    assert table[0] == ["temp", "setting", "t/s", "speedup", "answer", "TTFT", "accepted", "tok/step", "expected"]
    assert [(row[0], row[1].strip("*")) for row in table[1:]] == [
        (temperature, name) for temperature in ("0", "0.7") for name in ("plain", "K=2", "K=3")
    ]
    assert result.out.splitlines()[-1].startswith("**At temperature 0 ")
    assert "By class" not in result.out
    assert "4 of 4 prompts, 1 repetition, exactly 8 tokens an answer" in result.err
    assert "\x1b" not in result.out + result.err


def test_verbose_shows_every_table(specllama: Run, args: list[str]) -> None:
    """Figures that are measured and nowhere to be seen."""
    out = specllama(*args, "--verbose", "--temp", "0").out
    for title in ("By class of prompts", "Where the time goes", "Acceptance", "When the draft is right", "- costs:"):
        assert title in out
    for word in (
        "- machine: a CPU",
        "- versions: specllama ",
        "- target: file ",
        "- command: ",
        "end tokens forbidden",
    ):
        assert word in out


def test_json_is_the_whole_report(specllama: Run, args: list[str]) -> None:
    """A report that cannot be read back, or one without the single runs."""
    report = BenchReport.from_json(record_of(specllama(*args, "--format", "json", "--temp", "0")))
    assert len(report.runs) == report.plan.n_runs == 3 * 4
    assert report.settings["predict"] == [8]
    assert len(report.target["sha256"]) == len(report.drafts[0]["sha256"]) == 64
    assert {row.category for row in report.rows} == {ALL, "coding", "poem"}
    assert report.plan.drafts
    assert report.versions["llama_cpp_python"]
    assert report.insights


def test_csv_has_a_line_for_every_row(specllama: Run, args: list[str]) -> None:
    """Columns that slip, or lists that a spreadsheet takes for cells of their own."""
    lines = list(csv.DictReader(io.StringIO(specllama(*args, "--format", "csv", "--temp", "0").out)))
    assert [(line["setting"], line["category"]) for line in lines[:3]] == [
        ("plain", "all"),
        ("plain", "coding"),
        ("plain", "poem"),
    ]
    drafted = next(line for line in lines if line["setting"] == "K=2")
    assert float(drafted["speedup_low"]) <= float(drafted["speedup"]) <= float(drafted["speedup_high"])
    assert len(drafted["per_position"].split()) == 2
    assert None not in drafted.values()


def test_jsonl_says_what_happens_as_it_happens(specllama: Run, args: list[str]) -> None:
    """Everything at the end, when a program that reads along has long given up."""
    result = specllama(*args, "--format", "jsonl", "--temp", "0")
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in events] == ["plan", *["run"] * 12, "report"]
    assert "runs" not in events[-1]
    assert events[-1]["verdict"]


def test_a_narrow_terminal_gets_fewer_columns_and_never_a_broken_table() -> None:
    """A table whose lines are folded in the middle, or one that loses the speedup."""
    plan = plan_of([PLAIN, arm_of(4)], prompts_of(4), temperatures=(0.0, 0.7))
    runs = [run_of(arm, i, 10.0 + i + arm, condition=c) for arm in (0, 1) for i in range(4) for c in (0, 1)]
    report = report_of(plan, runs)
    whole = main_table(report, None)
    assert main_table(report, 200) == whole
    for width in (80, 60):
        narrow = main_table(report, width)
        assert max(map(len, narrow)) <= width
        assert "speedup" in narrow[0]
        assert len(narrow) == len(whole)
    assert "TTFT" not in main_table(report, 80)[0] or len(whole[0]) <= 80


def test_plots_go_into_their_folder(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that is read and forgotten; or minutes of measuring before it is said that nothing can be drawn."""
    drawn: list[tuple[int, Path]] = []

    def write(report: BenchReport, folder: Path) -> bench_plots.WrittenPlots:
        drawn.append((len(report.runs), folder))
        return bench_plots.WrittenPlots((folder / "speedup.png",), ("costs",))

    monkeypatch.setattr(bench_plots, "prepare", lambda folder: None)
    monkeypatch.setattr(bench_plots, "write", write)
    result = specllama(*args, "--plots", str(tmp_path / "plots"), "--temp", "0")
    assert result.code == 0, result.err
    assert drawn == [(12, tmp_path / "plots")]
    assert "1 plots are in " in result.err
    assert "nothing was measured for the plots costs" in result.err

    def missing(folder: Path) -> None:
        raise UsageError("plots are drawn with matplotlib, which is not installed")

    monkeypatch.setattr(bench_plots, "prepare", missing)
    monkeypatch.setattr(core, "bench", lambda *_: pytest.fail("measured"))
    assert specllama(*args, "--plots", "plots").code == 2


@pytest.mark.parametrize("suffix", ["md", "csv", "json", "jsonl"])
def test_the_output_file_takes_its_form_from_its_name(
    specllama: Run, args: list[str], tmp_path: Path, suffix: str
) -> None:
    """A file called .csv with Markdown in it, or a table that goes to the file and to nobody's eyes."""
    path = tmp_path / f"report.{suffix}"
    result = specllama(*args, "-o", str(path), "--temp", "0")
    assert result.code == 0, result.err
    assert table_of(result.out)
    text = path.read_text()
    found = {
        "md": "By class of prompts",
        "csv": "setting,spec_type",
        "json": '"specllama.bench"',
        "jsonl": '"event": "run"',
    }
    assert found[suffix] in text
    if suffix == "json":
        assert BenchReport.from_json(json.loads(text)).runs


def test_auto_takes_part_only_with_a_profile(specllama: Run, args: list[str]) -> None:
    """An `auto` that is measured without anything that could decide."""
    report = BenchReport.from_json(record_of(specllama(*args, "--spec-draft-n-max", "auto,2", "--format", "json")))
    assert [arm.name for arm in report.plan.arms] == ["plain", "K=2"]


def test_why_auto_takes_no_part_is_one_line_and_in_the_report(
    specllama: Run, args: list[str], byte_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table without `auto`, and nobody knows why; or a line in a benchmark that never wished for it."""
    found = specllama(*args[:-4], "--spec-draft-n-max", "auto,2", "-r", "1", "--format", "json")
    reason = "auto takes no part, for this pair was not tuned here (`specllama tune -m "
    (line,) = (line for line in found.err.splitlines() if "tuned" in line)
    assert line.startswith(f"note: {reason}")
    assert any(warning.startswith(reason) for warning in record_of(found)["warnings"])
    monkeypatch.setattr(profiles, "find", lambda subject: profiles.FoundProfile(stale="the CPU changed since"))
    stale = specllama(*args[:-4], "--spec-draft-n-max", "auto,2", "-r", "1")
    assert "note: auto takes no part, for the profile of this pair is not used: the CPU changed since (" in stale.err
    assert "- warning: auto takes no part, for the profile of this pair is not used" in stale.out
    assert "takes no part" not in specllama(*args).err


def test_every_sweep_reaches_the_models(specllama: Run, args: list[str]) -> None:
    """A sweep that is named in the table and never carried out."""
    words = [
        "--spec-draft-n-max",
        "2",
        "--temp",
        "0",
        "-ctk",
        "f16,f32",
        "--verify-rule",
        "block,token",
        "--format",
        "json",
    ]
    report = BenchReport.from_json(record_of(specllama(*args, *words)))
    assert [arm.name for arm in report.plan.arms] == [
        name
        for kind in ("f16", "f32")
        for name in (f"plain ctk={kind}", f"K=2 block ctk={kind}", f"K=2 token ctk={kind}")
    ]
    assert {run.arm for run in report.runs} == set(range(6))


def test_a_load_that_cannot_be_opened_is_found_before_anything_is_measured(specllama: Run, args: list[str]) -> None:
    """Minutes of one load thrown away because the next one is refused."""
    result = specllama(*args, "-ctk", "f16,q8_0", "--format", "jsonl")
    assert (result.code, result.out) == (1, "")
    assert "q8_0" in result.err


def test_two_drafts_are_compared(specllama: Run, args: list[str], byte_pair: Pair) -> None:
    """Only the last of two drafts."""
    words = ["-md", str(byte_pair.target), "--spec-draft-n-max", "3", "--temp", "0", "--format", "json"]
    report = BenchReport.from_json(record_of(specllama(*args, *words)))
    names = [byte_pair.draft.stem, byte_pair.target.stem]
    assert [arm.name for arm in report.plan.arms] == ["plain", *(f"K=3 {name}" for name in names)]
    twin = report.rows_of(ALL)[2]
    assert twin.alpha is not None
    assert twin.alpha > 0.9


def test_synthetic_acceptance_is_called_what_it_is(specllama: Run, args: list[str]) -> None:
    """Figures of text that nobody judged, pasted somewhere as figures of answers."""
    out = specllama(*args, "--synthetic", "0.9", "--temp", "0").out
    assert out.startswith("**SYNTHETIC ACCEPTANCE: nothing that was generated is valid output.**")
    assert "**NO VALID OUTPUT: 90 % of the drafted tokens" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "found", "code"),
    [
        (["--budget", "9" * 400], ", expected a time such as 10m", 2),
        (["--budget", "89"], "--budget is 89, expected 90s or more", 2),
        (["--budget", "soon"], "--budget is soon, expected a time such as 10m", 2),
        (["--temp", "0,hot"], "--temp is hot, expected a number", 2),
        (["--spec-draft-n-max", "2,x"], "--spec-draft-n-max is x, expected", 2),
        (["-p", "-1"], "--prompt-length is -1", 2),
        (["--synthetic", "2"], "--synthetic is 2, expected a number from 0 to 1", 2),
        (["--synthetic", "1", "--verify-rule", "match"], "--synthetic goes with the token rule alone", 2),
        (["--category", "songs"], "--category songs is not in ", 2),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl", None),
        (["-o", "report.txt"], "does not say in which form", 2),
        (["-o", "nowhere/report.md"], "there is no such folder", 1),
        (["-c", "16"], "no prompt and its answer fit a context of 16 tokens", 1),
        (["--format", "xml"], "--format is xml", 2),
    ],
)
def test_wrong_use_is_told_in_a_sentence(
    specllama: Run, args: list[str], words: list[str], found: str, code: int | None
) -> None:
    """A traceback, or ten minutes of measuring before the report cannot be written."""
    result = specllama(*args, *words)
    assert result.code == (code or result.code) != 0, result.out + result.err
    assert result.err.startswith("error: ")
    assert found in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


def test_a_draft_that_does_not_fit_is_an_error(specllama: Run, args: list[str], pair: Pair) -> None:
    """Plain decoding in place of a draft that was asked for, and a benchmark of nothing."""
    result = specllama(*args, "-md", str(pair.draft))
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert result.out == ""


def test_a_strategy_without_its_model_is_an_error(specllama: Run, args: list[str], byte_pair: Pair) -> None:
    """The same for a strategy."""
    alone = [word for word in args if word not in ("-md", str(byte_pair.draft))]
    result = specllama(*alone, "--spec-type", "draft-simple")
    assert (result.code, "needs a draft model" in result.err) == (2, True)
    report = BenchReport.from_json(record_of(specllama(*alone, "--format", "json", "--temp", "0")))
    assert [arm.name for arm in report.plan.arms] == ["plain", "K=2 lookup", "K=3 lookup"]


# -------------------------------------------------------------------------------------------------------------- compare


@pytest.fixture
def reports(specllama: Run, args: list[str], tmp_path: Path) -> list[str]:
    """Two reports of the same benchmark."""
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    for file in files:
        assert specllama(*args, "--temp", "0", "-o", file).code == 0
    return files


def test_two_reports_are_set_side_by_side(specllama: Run, reports: list[str], tmp_path: Path) -> None:
    """A twice as fast report that is called noise, or settings compared with others."""
    same = specllama("bench", "compare", reports[0], reports[0])
    assert same.code == 0, same.err
    assert same.out.splitlines()[-1] == "**No difference beyond the noise, in 3 settings.**"
    data: dict[str, Any] = json.loads(Path(reports[1]).read_text())
    for run in data["runs"]:
        run["stats"]["decode_s"] /= 2
    data["versions"]["llama_cpp"] = "another"
    Path(reports[1]).write_text(json.dumps(data))
    # Against itself, twice as fast: no noise between the two.
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps(json.loads(Path(reports[1]).read_text())))
    for run in data["runs"]:
        run["stats"]["decode_s"] *= 2
    Path(reports[0]).write_text(json.dumps({**data, "versions": {**data["versions"], "llama_cpp": "one"}}))
    found = specllama("bench", "compare", reports[0], str(twice))
    assert "B is faster than A in 3 of 3 settings" in found.out
    assert [row[4].split()[0] for row in table_of(found.out)[1:]] == ["2.00"] * 3
    assert "- not the same: llama_cpp: one against another" in found.out
    assert found.out.rstrip().endswith("Note: the reports are from different versions.**")
    record = json.loads(specllama("bench", "compare", reports[0], str(twice), "--format", "json").out)
    assert [row["ratio"]["value"] for row in record["rows"]] == pytest.approx([2.0] * 3)


def test_reports_of_other_machines_builds_and_models_are_said_to_be() -> None:
    """A program called slower because the other report is of a faster laptop, or of a smaller model."""
    a = report()
    faster = replace(a, machine=replace(a.machine, cpu="another CPU", features=("AVX9",), load=0.5, memory_bytes_s=1.0))
    found = compare(a, faster)
    assert found.verdict.endswith(" Note: the reports are from two machines.")
    assert found.differences[:2] == (f"cpu: {a.machine.cpu} against another CPU",
                                     f"features: {', '.join(a.machine.features) or 'none'} against AVX9")  # fmt: skip
    other = replace(faster, versions={**a.versions, "specllama": "9"}, target={"file": "x", "sha256": "cc"})
    assert compare(a, other).verdict.endswith(
        " Note: the reports are from two machines and different versions and different models."
    )
    again = replace(a, machine=replace(a.machine, load=0.5, memory_bytes_s=1.0, power="battery"))
    assert "Mind" not in compare(a, again).verdict


@pytest.mark.parametrize(
    ("words", "found", "code"),
    [
        (["a.json"], "compare takes two reports, not 1", 2),
        (["a.json", "b.json", "c.json"], "compare takes two reports, not 3", 2),
        (["nowhere.json", "b.json"], "is the name right? write a report with: specllama bench", 1),
        ([".", "b.json"], ". cannot be read: Is a directory\nhint: write a report with: specllama bench", 1),
        (["text.json", "text.json"], "text.json is not JSON", 1),
        (["other.json", "other.json"], "other.json: this is not a specllama.bench report", 1),
        (["deep.json", "deep.json"], "deep.json is not JSON", 1),
        (["astray.json", "astray.json"], "rows[0] has an arm, condition or prompt", 1),
        (["endless.json", "endless.json"], "the report.machine.memory_bytes_s is not a finite number", 1),
        (["a.json", "b.json", "-o", "c.json"], "a comparison goes to stdout alone", 2),
        (["a.json", "b.json", "--format", "csv"], "--format csv is none of a comparison", 2),
    ],
)
def test_what_cannot_be_compared_is_refused(
    specllama: Run, tmp_path: Path, words: list[str], found: str, code: int
) -> None:
    """A traceback for a file that is no report."""
    (tmp_path / "text.json").write_text("a text")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    good = to_plain(report())
    astray = {**good, "plan": {**good["plan"], "arms": []}}
    endless = {**good, "machine": {**good["machine"], "memory_bytes_s": 10**400}}
    for name, data in (("astray", astray), ("endless", endless)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    result = specllama("bench", "compare", *words)
    assert (result.code, found in result.err) == (code, True), result.err


def test_a_second_word_that_is_no_comparison_is_refused(specllama: Run) -> None:
    """`bench one-pair another-pair` measuring the first and forgetting the second."""
    result = specllama("bench", "one", "another")
    assert (result.code, "unexpected extra argument (another)" in result.err) == (2, True)


# ------------------------------------------------------------------------------------------------------------- terminal


def test_ctrl_c_keeps_and_reports_what_was_measured(
    terminal: Callable[..., Terminal], args: list[str], byte_pair: Pair
) -> None:
    """Minutes of measuring thrown away, or a terminal that is left without its cursor."""
    words = [*args, "-n", "400", "-r", "200", "--budget", "none", "--temp", "0"]
    shown = terminal(*words, columns=110, rows=40)
    shown.wait_for(lambda seen: "prompt 2 of 4" in seen.text)
    assert "left" in shown.text
    shown.interrupt()
    assert shown.finish() == 130
    assert "This is a part of the plan: it was interrupted." in " ".join(shown.text.split())
    assert "prompt 2 of 4 (" not in shown.text


def test_the_machine_is_looked_at_without_an_error() -> None:
    """A sensor that this machine has not, as a traceback before the first run."""
    (slow,) = machine.doubts(MACHINE, machine.swapped_bytes(), [10.0, 10.0, 10.0, 8.0, 8.0, 8.0])
    assert "slowed down by 25 %" in slow
    assert machine.doubts(MACHINE, machine.swapped_bytes(), [10.0, 9.8]) == ()
    told = replace(MACHINE, power="battery", load=0.5)
    battery, busy = machine.doubts(told, machine.swapped_bytes(), [])
    assert "battery" in battery
    assert "50 % of the CPU" in busy
    assert machine.rss() > 1 << 20
    assert machine.power_source() in ("mains", "battery", "unknown")
    bandwidth = machine.memory_bandwidth(1)
    assert bandwidth is not None
    assert bandwidth > 1e8
