"""`specllama bench` on tiny models: the forms of output, wrong use, interruption, comparison."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.base.errors import NumericsError, ReportError, UsageError
from specllama.base.jsonable import to_plain
from specllama.bench import machine
from specllama.bench import plots as bench_plots
from specllama.bench import run as core
from specllama.bench.compare import compare
from specllama.bench.report import ALL, BenchReport
from specllama.cli import reports
from specllama.cli.bench import command
from specllama.cli.bench.options import BenchDrafting, BenchRuns, BenchSampling
from specllama.cli.bench.view import LEGEND, main_table
from specllama.drafters.controller import CostProfile
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, OWN, KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import Profile
from specllama.pairs.setup import profile_for
from tests.bench_cases import MACHINE, PLAIN, arm_of, lengths, plan_of, prompts_of, report_of, run_of
from tests.benchreports import report
from tests.cli.conftest import Pair, Run, Terminal, record_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("auto")]
N_RUNS = 3  # before an error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips measuring the machine and the passes, which takes seconds."""
    monkeypatch.setattr(machine, "look", lambda: MACHINE)
    monkeypatch.setattr(core, "MOST_COSTS_S", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Four short prompts of two classes."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"q{i}", "category": ("coding", "poem")[i % 2], "turns": [f"say {i}"]} for i in range(4)]
    path.write_text("".join(json.dumps({**row, "language": "en"}) + "\n" for row in rows))
    return path


@pytest.fixture
def args(byte_pair: Pair, prompts: Path) -> list[str]:
    """A benchmark of a fraction of a second."""
    return ["bench", *byte_pair.options, "--prompts", str(prompts), "-n", "8", "--spec-draft-n-max", "2,3", "-r", "1"]


def measured(specllama: Run, *args: str) -> BenchReport:
    """The report of a benchmark."""
    return BenchReport.from_json(record_of(specllama(*args, "--format", "json")))


def arms_of(report: BenchReport) -> list[str]:
    return [arm.name for arm in report.plan.arms]


def table_of(text: str) -> list[list[str]]:
    """The cells of the first Markdown table, without its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| --")]


def test_a_profiles_kernel_path_is_only_for_its_own_draft() -> None:
    """Prevents: another draft loaded with a kernel path for weights that it does not have."""
    path = AS_IN_FILE
    profile = Profile(
        made="", source="quick", target_path=DEFAULT, draft_path=path, step_s=1.0, classes=(),
        costs=CostProfile(verify=((1, 1.0),), draft=((1, 1.0),)),
    )  # fmt: skip
    own, other, derived = (SimpleNamespace(path=Path(name)) for name in ("own", "other", "derived"))
    first: Any = SimpleNamespace(draft=own, target_options=LoadOptions())

    def path_for(file: Any, of: Profile) -> KernelPath:
        found = profile_for(file, first, of)
        assert found is not None
        return found.draft_path

    assert (path_for(own, profile), path_for(other, profile), path_for(None, profile)) == (path, OWN, path)
    of_derived = replace(profile, derived=Path("derived"))
    assert (path_for(own, of_derived), path_for(derived, of_derived)) == (OWN, path)
    assert profile_for(own, first, None) is None  # type: ignore[arg-type]


def test_one_table_and_one_verdict(specllama: Run, args: list[str]) -> None:
    """Prevents: pages of figures without a conclusion; progress among the data."""
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
    """Prevents: figures that are measured and not shown."""
    out = specllama(*args, "--verbose", "--temp", "0").out
    titles = ["By class of prompts", "Where the time goes", "Acceptance", "When the draft is right", "- costs:"]
    facts = ["- machine: a CPU", "- versions: specllama ", "- target: file ", "- command: ", "end tokens forbidden"]
    assert [text for text in (*titles, *facts) if text not in out] == []


def test_json_is_the_whole_report(specllama: Run, args: list[str]) -> None:
    """Prevents: a report that cannot be read back, or without its runs."""
    report = measured(specllama, *args, "--temp", "0")
    assert len(report.runs) == report.plan.n_runs == 3 * 4
    assert report.settings["predict"] == [8]
    assert len(report.target["sha256"]) == len(report.drafts[0]["sha256"]) == 64
    assert {row.category for row in report.rows} == {ALL, "coding", "poem"}
    assert report.plan.drafts
    assert report.versions["llama_cpp_python"]
    assert report.insights


def test_csv_has_a_line_for_every_row(specllama: Run, args: list[str]) -> None:
    """Prevents: values in the wrong columns; lists split into several cells."""
    lines = list(csv.DictReader(io.StringIO(specllama(*args, "--format", "csv", "--temp", "0").out)))
    assert {line["setting"] for line in lines[:3]} == {"plain"}
    assert [line["category"] for line in lines[:3]] == ["all", "coding", "poem"]
    drafted = next(line for line in lines if line["setting"] == "K=2")
    assert float(drafted["speedup_low"]) <= float(drafted["speedup"]) <= float(drafted["speedup_high"])
    assert len(drafted["per_position"].split()) == 2
    assert None not in drafted.values()


def test_jsonl_has_a_line_for_every_event(specllama: Run, args: list[str]) -> None:
    """Prevents: runs without lines of their own."""
    result = specllama(*args, "--format", "jsonl", "--temp", "0")
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in events] == ["plan", *["run"] * 12, "report"]
    assert "runs" not in events[-1]
    assert events[-1]["verdict"]


def test_a_narrow_terminal_gets_fewer_columns_and_never_a_broken_table() -> None:
    """Prevents: table lines that wrap; a table without the speedup."""
    plan = plan_of([PLAIN, arm_of(4)], prompts_of(4), temperatures=(0.0, 0.7))
    runs = [run_of(arm, i, 10.0 + i + arm, condition=c) for arm in (0, 1) for i in range(4) for c in (0, 1)]
    report = report_of(plan, runs)
    whole, legend = main_table(report, None)
    assert main_table(report, 200) == (whole, legend)
    assert all(f"{head}: " in legend for head in LEGEND)
    for width in (80, 60):
        narrow, legend = main_table(report, width)
        assert max(map(len, narrow)) <= width
        assert "speedup" in narrow[0]
        assert len(narrow) == len(whole)
        assert [head for head in LEGEND if f"{head}: " in legend] == [head for head in LEGEND if head in narrow[0]]


@pytest.mark.parametrize(("speeds", "bold"), [((12.0, 12.0), True), ((12.0, 1.2), False), ((12.0, 9.0), False)])
def test_a_setting_below_plain_decoding_is_not_bold(speeds: tuple[float, float], bold: bool) -> None:
    """Prevents: 'the best' in bold beside 0.12, and a legend for what is not there."""
    plan = plan_of([PLAIN, arm_of(4)], prompts_of(4))
    runs = [run_of(0, i, 10.0) for i in range(4)] + [run_of(1, i, speeds[i % 2]) for i in range(4)]
    table, legend = main_table(report_of(plan, runs), None)
    assert any("**K=4**" in line for line in table) == bold
    assert ("Bold" in legend) == bold


def test_plots_go_into_their_folder(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an option without effect; minutes of measuring before the error that nothing can be drawn."""
    drawn: list[tuple[int, Path]] = []

    def write(report: BenchReport, folder: Path) -> bench_plots.WrittenPlots:
        drawn.append((len(report.runs), folder))
        return bench_plots.WrittenPlots((folder / "speedup.png",), ("costs",))

    monkeypatch.setattr(bench_plots, "prepare", lambda folder: None)
    monkeypatch.setattr(bench_plots, "write", write)
    result = specllama(*args, "--plots", str(tmp_path / "plots"), "--temp", "0")
    assert result.code == 0, result.err
    assert drawn == [(12, tmp_path / "plots")]
    assert "wrote 1 plot to " in result.err
    assert "nothing was measured for the plots costs" in result.err

    def missing(folder: Path) -> None:
        raise UsageError("plots are drawn with matplotlib, which is not installed")

    monkeypatch.setattr(bench_plots, "prepare", missing)
    monkeypatch.setattr(core, "bench", lambda *_: pytest.fail("measured"))
    assert specllama(*args, "--plots", "plots").code == 2


@pytest.mark.parametrize("suffix", ["md", "csv", "json", "jsonl"])
def test_the_suffix_of_the_output_file_is_its_form(
    specllama: Run, args: list[str], tmp_path: Path, suffix: str
) -> None:
    """Prevents: Markdown in a .csv file; a report that is written and not shown."""
    path = tmp_path / f"report.{suffix}"
    result = specllama(*args, "-o", str(path), "--temp", "0")
    assert result.code == 0, result.err
    assert table_of(result.out)
    starts = {"md": "By class of prompts", "csv": "setting,spec_type", "json": '"runs"', "jsonl": '"event": "run"'}
    assert starts[suffix] in path.read_text()


def test_without_a_profile_auto_is_left_out_and_the_report_says_why(
    specllama: Run, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an `auto` without a controller; one that is missing without a reason."""
    words = [*args, "--spec-draft-n-max", "auto,2"]
    found = specllama(*words, "--format", "json")
    reason = "auto is left out: this pair is not tuned (`specllama tune -m "
    assert arms_of(BenchReport.from_json(record_of(found))) == ["plain", "K=2"]
    assert found.err.count(f"note: {reason}") == 1
    assert any(warning.startswith(reason) for warning in record_of(found)["warnings"])
    monkeypatch.setattr(profiles, "find", lambda subject: profiles.FoundProfile(stale="the CPU changed since"))
    stale = specllama(*words)
    for told in (stale.err, stale.out):
        assert "auto is left out: the profile of this pair is not used: the CPU changed since (" in told
    assert "left out" not in specllama(*args).err


def test_every_sweep_reaches_the_models(specllama: Run, args: list[str]) -> None:
    """Prevents: a sweep that is in the table and was not run."""
    words = ["--spec-draft-n-max", "2", "--temp", "0", "-ctk", "f16,f32", "--verify-rule", "block,token"]
    report = measured(specllama, *args, *words, "--rollback", "truncation")
    names = [f"{name} ctk={kind}" for kind in ("f16", "f32") for name in ("plain", "K=2 block", "K=2 token")]
    assert arms_of(report) == names
    assert (report.target["rollback"], report.target["rollback_why"]) == ("truncation", "as asked")
    assert {run.arm for run in report.runs} == set(range(6))


def test_a_load_that_cannot_be_opened_is_found_before_anything_is_measured(specllama: Run, args: list[str]) -> None:
    """Prevents: minutes of one load lost because the next one is refused."""
    result = specllama(*args, "-ctk", "f16,q8_0", "--format", "jsonl")
    assert (result.code, result.out) == (2, "")
    assert "q8_0" in result.err
    result = specllama(*args, "--rollback", "auto,saved", "--format", "jsonl")
    assert (result.code, result.out) == (2, "")
    assert "saved" in result.err


def test_two_drafts_are_compared(specllama: Run, args: list[str], byte_pair: Pair) -> None:
    """Prevents: a benchmark of only the last of two drafts."""
    report = measured(specllama, *args, "-md", str(byte_pair.target), "--spec-draft-n-max", "3", "--temp", "0")
    assert arms_of(report) == ["plain", *(f"K=3 {path.stem}" for path in (byte_pair.draft, byte_pair.target))]
    twin = report.rows_of(ALL)[2]
    assert twin.alpha is not None
    assert twin.alpha > 0.9


def test_answers_in_a_format_are_measured_with_the_same_mask(specllama: Run, args: list[str]) -> None:
    """Prevents: a plain row of free text beside drafts of text that is mostly forced."""
    words = ["--regex", "(the ){30}", "--natural-stop", "--temp", "1", "-n", "200"]
    report = measured(specllama, *args, *words)
    assert report.settings["regex"] == "(the ){30}"
    plain, *drafted = report.rows_of(ALL)
    assert len({run.stats.n_emitted for run in report.runs}) == 1
    assert plain.alpha is None
    assert all(row.alpha == 1.0 for row in drafted)


def test_synthetic_acceptance_is_marked_at_both_ends(specllama: Run, args: list[str]) -> None:
    """Prevents: figures of unverified text quoted as figures of answers."""
    out = specllama(*args, "--synthetic", "0.9", "--temp", "0").out
    assert out.startswith("**SYNTHETIC ACCEPTANCE: ")
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
        (["--synthetic", "1", "--verify-rule", "match"], "--synthetic needs the token rule", 2),
        (["--regex", "a+"], "--natural-stop", 2),
        (["--regex", "a+", "--natural-stop", "--synthetic", "1"], "--synthetic", 2),
        (["--regex", "(", "--natural-stop"], "--regex cannot be used", 2),
        (["--category", "songs"], "--category songs is not in ", 2),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl", None),
        (["-o", "report.txt"], "--output report.txt (expected", 2),
        (["-o", "nowhere/report.md"], "there is no such folder", 2),
        (["-c", "16"], "no prompt and its answer fit a context of 16 tokens", 1),
        (["--format", "xml"], "--format is xml", 2),
    ],
)
def test_wrong_use_is_one_error_before_measuring(
    specllama: Run, args: list[str], words: list[str], found: str, code: int | None
) -> None:
    """Prevents: a traceback; minutes of measuring for a report that cannot be written."""
    result = specllama(*args, *words)
    assert result.code == (code or result.code) != 0, result.out + result.err
    assert result.err.removeprefix("loading ...\n").startswith("error: ")
    assert found in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


def test_a_draft_that_is_missing_or_does_not_fit_is_an_error(
    specllama: Run, args: list[str], byte_pair: Pair, pair: Pair
) -> None:
    """Prevents: a benchmark of plain decoding instead of the draft that was asked for."""
    foreign = specllama(*args, "-md", str(pair.draft))
    assert (foreign.code, foreign.out, foreign.err[:7]) == (1, "", "error: ")
    alone = [word for word in args if word not in ("-md", str(byte_pair.draft))]
    missing = specllama(*alone, "--spec-type", "draft-simple")
    assert (missing.code, "needs a draft model" in missing.err) == (2, True)
    assert arms_of(measured(specllama, *alone, "--temp", "0")) == ["plain", "K=2 lookup", "K=3 lookup"]


def test_an_error_between_runs_comes_after_the_report(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a report lost to an error; one that looks complete and exits with 0."""
    real, counted = core._Bench._run, [0]

    def run(self: Any, *args: Any) -> Iterator[Any]:
        counted[0] += 1
        if counted[0] > N_RUNS:
            raise NumericsError("NaN among the logits", hint="use another build")
        return (yield from real(self, *args))

    monkeypatch.setattr(core._Bench, "_run", run)
    file = tmp_path / "report.json"
    found = specllama(*args, "--temp", "0", "-o", str(file))
    assert found.code == 1
    assert "This is a part of the plan: an error ended it (NaN among the logits)." in found.out
    assert found.err.rstrip().endswith("error: NaN among the logits\nhint: use another build")
    assert len(BenchReport.from_json(json.loads(file.read_text())).runs) == N_RUNS


def test_a_closed_pipe_stops_the_runs_and_keeps_the_file(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: `| head` that loses the file of `--output`, or measures for minutes without a reader."""
    n_written = [0]
    real = command.Output.line

    def line(self: Any, text: str = "") -> None:
        n_written[0] += 1
        if n_written[0] > 1 + N_RUNS:
            raise BrokenPipeError(32, "Broken pipe")
        real(self, text)

    monkeypatch.setattr(command.Output, "line", line)
    file = tmp_path / "report.json"
    found = specllama(*args, "--temp", "0", "--format", "jsonl", "-o", str(file))
    assert found.code == 141
    kept = BenchReport.from_json(json.loads(file.read_text()))
    assert len(kept.runs) >= N_RUNS
    assert kept.partial.startswith("its lines could not be written")
    assert kept.verdict.startswith("This is a part of the plan: its lines could not be written")


def full_disk(*_args: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_of_two_errors_at_the_end_both_are_reported(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a full disk for the plots that hides where the report is."""

    def full(*_: object) -> None:
        raise ReportError("plots cannot be written")

    monkeypatch.setattr(bench_plots, "write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "report.json").symlink_to("/dev/full")
    found = specllama(*args, "--temp", "0", "-o", "report.json", "--plots", "plots")
    (kept,) = tmp_path.glob("specllama-*.json")
    report = BenchReport.from_json(json.loads(kept.read_text()))
    assert (found.code, len(report.runs)) == (1, report.plan.n_runs)
    assert table_of(found.out)
    assert found.err.endswith(f"hint: the full report is in {kept}\nerror: plots cannot be written\n")


def test_a_full_disk_everywhere_costs_no_report(
    specllama: Run, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an hour of runs lost to a full disk."""
    monkeypatch.setattr(reports, "NamedTemporaryFile", full_disk)
    (tmp_path / "report.json").symlink_to("/dev/full")
    found = specllama(*args, "--temp", "0", "-o", "report.json")
    assert found.code == 1
    message, hint = found.err.splitlines()[-2:]
    assert message == "error: report.json cannot be written: No space left on device"
    assert hint.endswith("above")
    kept = BenchReport.from_json(json.loads(next(line for line in found.out.splitlines() if line.startswith("{"))))
    assert len(kept.runs) == kept.plan.n_runs > N_RUNS
    assert "plain" in found.out


def test_a_report_compared_with_itself_says_so(specllama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: "no difference" between a file and itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(to_plain(report())))
    with suppress(OSError):
        os.symlink("a.json", "b.json")
    for other in ("a.json", "./a.json", "b.json"):
        result = specllama("bench", "compare", "a.json", other)
        assert result.code == 0
        assert "a.json is compared with itself" in result.err


def test_no_context_is_longer_than_the_model_was_trained_for(specllama: Run, short_pair: Pair, prompts: Path) -> None:
    """Prevents: a warning about a context that no run needs."""
    args = ["--prompts", str(prompts), "-n", "8", "--spec-draft-n-max", "2", "-r", "1", "--temp", "0"]
    report = measured(specllama, "bench", *short_pair.options, *args)
    assert (report.target["n_ctx"], report.drafts[0]["n_ctx"]) == (2048, 2048)


def test_a_short_budget_compares_fewer_settings_by_default() -> None:
    """Prevents: ten settings in two minutes, with too few prompts each."""

    def swept(budget: float | None, n_max: Any = None, temp: Any = None) -> tuple[object, object]:
        asked = BenchDrafting(spec_draft_n_max=n_max), BenchSampling(temp=temp), BenchRuns(budget=budget)
        drafting, sampling = command._swept(*asked)
        return drafting.spec_draft_n_max, sampling.temp

    assert swept(120.0) == (lengths(0, 4, "auto"), (0.0,))
    assert swept(600.0) == swept(None) == (lengths(0, 2, 4, 8, "auto"), (0.0, 0.7))
    assert swept(120.0, n_max=lengths(3), temp=(1.0, 2.0)) == (lengths(3), (1.0, 2.0))


def test_two_reports_are_compared(specllama: Run, args: list[str], tmp_path: Path) -> None:
    """Prevents: a twice as fast report that is called noise; different settings compared."""
    once, twice = str(tmp_path / "once.json"), str(tmp_path / "twice.json")
    assert specllama(*args, "--temp", "0", "-o", once).code == 0
    same = specllama("bench", "compare", once, once)
    assert same.code == 0, same.err
    assert same.out.splitlines()[-1] == "**No difference beyond the noise, in 3 settings.**"
    data: dict[str, Any] = json.loads(Path(once).read_text())
    data["versions"]["llama_cpp"] = "another"
    for run in data["runs"]:
        run["stats"]["decode_s"] /= 2
    Path(twice).write_text(json.dumps(data))
    found = specllama("bench", "compare", once, twice)
    assert "B is faster than A in 3 of 3 settings" in found.out
    assert [row[4].split()[0] for row in table_of(found.out)[1:]] == ["2.00"] * 3
    assert " against another" in found.out
    assert found.out.rstrip().endswith("Note: the reports are from different versions.**")
    record = json.loads(specllama("bench", "compare", once, twice, "--format", "json").out)
    assert [row["ratio"]["value"] for row in record["rows"]] == pytest.approx([2.0] * 3)


def test_two_reports_of_few_prompts_are_not_called_equal() -> None:
    """Prevents: 'no difference beyond the noise' beside a ratio of 0.12 that no interval judges."""
    plan = plan_of([PLAIN, arm_of(4)], prompts_of(2))
    fast, slow = (report_of(plan, [run_of(arm, i, speed) for arm in (0, 1) for i in (0, 1)]) for speed in (10.0, 1.2))
    assert compare(fast, slow).verdict.startswith("Too few prompts for a confidence interval, in 2 settings.")


def test_reports_of_other_machines_builds_and_models_are_said_to_be() -> None:
    """Prevents: a program called slower because the other report is of a faster machine or smaller model."""
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
    assert "Note:" not in compare(a, again).verdict


@pytest.mark.parametrize(
    ("words", "found", "code"),
    [
        (["a.json"], "compare takes two reports (got 1)", 2),
        (["a.json", "b.json", "c.json"], "compare takes two reports (got 3)", 2),
        (["nowhere.json", "b.json"], "No such file or directory\nhint: write a report with: specllama bench", 1),
        ([".", "b.json"], ". cannot be read: Is a directory\nhint: write a report with: specllama bench", 1),
        (["text.json", "text.json"], "text.json is not JSON", 1),
        (["other.json", "other.json"], "other.json: this is not a specllama.bench report", 1),
        (["deep.json", "deep.json"], "deep.json is not JSON", 1),
        (["astray.json", "astray.json"], "rows[0] has an arm, condition or prompt", 1),
        (["endless.json", "endless.json"], "the report.machine.memory_bytes_s is not a finite number", 1),
        (["a.json", "b.json", "-o", "c.json"], "only to stdout", 2),
        (["a.json", "b.json", "--format", "csv"], "--format is csv", 2),
    ],
)
def test_what_cannot_be_compared_is_refused(
    specllama: Run, tmp_path: Path, words: list[str], found: str, code: int
) -> None:
    """Prevents: a traceback for a file that is not a report."""
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


def test_ctrl_c_keeps_and_reports_what_was_measured(
    terminal: Callable[..., Terminal], args: list[str], byte_pair: Pair
) -> None:
    """Prevents: minutes of measuring lost; a terminal without its cursor."""
    words = [*args, "-n", "400", "-r", "200", "--budget", "none", "--temp", "0"]
    shown = terminal(*words, columns=110, rows=40)
    shown.wait_for(lambda seen: "prompt 2 of 4" in seen.text)
    assert "left" in shown.text
    shown.interrupt()
    assert shown.finish() == 130
    assert "This is a part of the plan: it was interrupted." in " ".join(shown.text.split())
    assert "prompt 2 of 4 (" not in shown.text


def test_the_machine_is_examined_without_an_error() -> None:
    """Prevents: a traceback for a sensor that this machine lacks."""
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
