"""A benchmark's report as people and programs read it: Markdown, CSV, lines of JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from specllama.base.disk import size_text
from specllama.base.jsonable import to_plain
from specllama.bench.compare import ReportComparison
from specllama.bench.report import ALL, Arm, BenchPlan, BenchReport, BenchRow, BenchRun, Condition, Interval
from specllama.bench.verdict import condition_name
from specllama.cli.bench.small_plots import small_plots
from specllama.cli.bench.tables import detail_lines, percent, ratio
from specllama.cli.screen.md_table import table
from specllama.cli.screen.output import in_one_line, to_json, visible
from specllama.cli.screen.plot import Signs


def _models(report: BenchReport) -> str:
    """What was measured."""
    drafts = [str(each.get("file")) for each in report.drafts]
    return in_one_line(
        f"{report.target.get('file')}" + (f" with {', '.join(drafts)}" if drafts else ", no draft model")
    )


def _machine(report: BenchReport) -> str:
    """Where, in one line."""
    machine = report.machine
    gpus = "".join(f", {gpu}" for gpu in machine.gpus)
    bandwidth = f", {machine.memory_bytes_s / 1e9:.0f} GB/s" if machine.memory_bytes_s else ""
    build = f"llama.cpp {report.versions.get('llama_cpp')} (llama-cpp-python {report.versions.get('llama_cpp_python')})"
    return in_one_line(
        f"{machine.cpu}, {machine.n_cores} cores, {size_text(machine.memory)}{bandwidth}{gpus}; {build}; "
        f"specllama {report.versions.get('specllama')}; {report.made}"
    )


def clock(seconds: float) -> str:
    """A time as people say it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _spent(report: BenchReport) -> str:
    """Where the time went, and what the budget was for."""
    spent, budget_s = report.spent, report.plan.budget_s
    if spent is None:
        return ""
    rest = spent.costs_s + spent.warm_up_s + spent.runs_s + spent.insight_s
    of = "" if budget_s is None else f" of a budget of {clock(budget_s)}"
    return (
        f"{clock(rest)} spent{of}, {clock(spent.loading_s)} of loading not counted: {clock(spent.costs_s)} on what "
        f"passes cost, {clock(spent.warm_up_s)} on warming up, {clock(spent.runs_s)} on {len(report.runs)} runs, "
        f"{clock(spent.insight_s)} on what was accepted and why"
    )


def _main_row(report: BenchReport, row: BenchRow, picked: set[tuple[int, int]]) -> list[str]:
    """One line of the one table."""
    arm, condition = report.plan.arms[row.arm], report.plan.conditions[row.condition]
    name = in_one_line(arm.name)
    shown = [
        f"**{name}**" if (row.condition, row.arm) in picked else name,
        "n/a" if row.decode_tok_s is None else f"{row.decode_tok_s:.1f}",
        "1" if arm.plain else ratio(row.speedup),
        "1" if arm.plain else "n/a" if row.latency_speedup is None else f"{row.latency_speedup.value:.2f}",
        f"{1000 * row.ttft_s:.0f} ms",
        percent(row.alpha),
        "1" if arm.plain else "n/a" if row.mean_length is None else f"{row.mean_length:.2f}",
        "" if row.predicted is None else f"{row.predicted:.2f}",
    ]
    where = [condition_name(condition, report.plan.conditions).removeprefix("temperature ")]
    return (where if len(report.plan.conditions) > 1 else []) + shown


def main_table(report: BenchReport, width: int | None) -> list[str]:
    """Every setting under every condition, over all classes of prompts; the picked ones in bold.

    Where it is wider than `width`, columns go until it fits, those first that say least.
    """
    heads = ["setting", "t/s", "speedup", "answer", "TTFT", "accepted", "tok/step", "expected"]
    if several := len(report.plan.conditions) > 1:
        heads.insert(0, "temp")
    picked = {(pick.condition, pick.arm) for pick in report.picks}
    rows = [_main_row(report, row, picked) for row in report.rows_of(ALL)]
    lines = table(heads, rows, n_left=1 + several)
    for name in ("TTFT", "answer", "tok/step", "expected"):
        if width is None or len(lines[0]) <= width:
            break
        i = heads.index(name)
        heads, rows = heads[:i] + heads[i + 1 :], [row[:i] + row[i + 1 :] for row in rows]
        lines = table(heads, rows, n_left=1 + several)
    return lines


LEGEND = (
    "speedup: tokens per second behind the first pass over those of plain decoding, with its 95 % interval; the draft "
    "reads the prompt there, which weighs in short answers. answer: speedup of the whole answer. TTFT: time to the "
    "first token. accepted: per token. expected: speedup by the costs measured, once the prompt is read. Bold: the "
    "best, picked on half of the prompts."
)


def report_lines(report: BenchReport, signs: Signs, *, full: bool, width: int | None = None) -> list[str]:
    """The report as Markdown: the one table, warnings, the verdict; `full`: every other table and small plots, too.

    `width`: columns of the terminal that it is for; None = it is for a file.
    """
    lines = [f"{_models(report)}", f"{_machine(report)}", f"{report.plan.note}"]
    lines += [spent, ""] if (spent := _spent(report)) else [""]
    if report.synthetic is not None:
        lines[:0] = ["**SYNTHETIC ACCEPTANCE: nothing that was generated is valid output.**", ""]
    lines += main_table(report, width)
    lines += ["", LEGEND, ""]
    if full:
        lines += [*detail_lines(report), "```text", *map(visible, small_plots(report, signs)), "```", ""]
    lines += [f"- warning: {in_one_line(warning)}" for warning in report.warnings]
    if report.warnings:
        lines.append("")
    return [*lines, f"**{in_one_line(report.verdict)}**"]


# ------------------------------------------------------------------------------------------------------- for programs

_INTERVALS = ("speedup", "latency_speedup", "versus_reference")


def _cell(value: object) -> object:
    """A figure as a spreadsheet reads it; lists are joined by spaces, auto is a word."""
    if isinstance(value, tuple):
        return " ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in value)
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def _csv_record(report: BenchReport, row: BenchRow) -> dict[str, object]:
    """One row, flat."""
    arm: Arm = report.plan.arms[row.arm]
    condition: Condition = report.plan.conditions[row.condition]
    record: dict[str, object] = {
        "setting": arm.name,
        "spec_type": arm.spec_type,
        "n_max": "auto" if arm.n_max is None else arm.n_max,
        "verify_rule": arm.verify_rule,
        "draft": report.plan.drafts[arm.draft] if arm.draft is not None else "",
        **asdict(report.plan.loads[arm.load]),
        **asdict(condition),
    }
    for field in fields(row):
        value = getattr(row, field.name)
        if field.name in ("arm", "condition"):
            continue
        if field.name in _INTERVALS:
            found: Interval | None = value
            for part in ("value", "low", "high"):
                name = field.name if part == "value" else f"{field.name}_{part}"
                record[name] = getattr(found, part) if found else None
        elif field.name == "time_split":
            for part in ("draft", "verify", "sampling", "kv", "other"):
                record[f"share_{part}"] = getattr(value, part) if value else None
        elif field.name == "bands":
            record["bands"] = "; ".join(
                f"{band.source} {band.low:.2f}-{band.high:.2f} {band.place}" for band in row.bands
            )
        else:
            record[field.name] = value
    return {**record, "synthetic": report.synthetic, "partial": report.partial}


def csv_lines(report: BenchReport) -> list[str]:
    """One line for every setting, condition and class of prompts, with a head."""
    records = [_csv_record(report, row) for row in report.rows]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if records:
        writer.writerow(records[0])
        writer.writerows([_cell(value) for value in record.values()] for record in records)
    return out.getvalue().splitlines()


def event_lines(event: BenchPlan | BenchRun | BenchReport) -> list[str]:
    """One line of JSON for what happened; the report without the runs, which have lines of their own."""
    if isinstance(event, BenchPlan):
        return [to_json({"event": "plan", **to_plain(event)})]
    if isinstance(event, BenchRun):
        return [to_json({"event": "run", **to_plain(event)})]
    return [to_json({"event": "report", **{key: value for key, value in event.to_json().items() if key != "runs"}})]


# -------------------------------------------------------------------------------------------------------------- compare


def comparison_lines(found: ReportComparison, files: Sequence[str]) -> list[str]:
    """Two reports side by side, as Markdown."""
    lines = [in_one_line(f"A: {files[0]}, {found.a}"), in_one_line(f"B: {files[1]}, {found.b}"), ""]
    if found.rows:
        lines += table(
            (
                "condition",
                "setting",
                "A t/s",
                "B t/s",
                "B / A",
                "A speedup",
                "B speedup",
                "A accepted",
                "B accepted",
            ),
            [
                [
                    row.condition,
                    in_one_line(row.arm),
                    *("n/a" if value is None else f"{value:.1f}" for value in (row.a_tok_s, row.b_tok_s)),
                    ratio(row.ratio),
                    *("" if value is None else f"{value:.2f}" for value in (row.a_speedup, row.b_speedup)),
                    percent(row.a_alpha),
                    percent(row.b_alpha),
                ]
                for row in found.rows
            ],
        )
        lines.append("")
    lines += _listed("only in A", found.only_a)
    lines += _listed("only in B", found.only_b)
    lines += _listed("not the same", found.differences)
    return [*lines, f"**{in_one_line(found.verdict)}**"]


def _listed(what: str, items: Iterable[str]) -> list[str]:
    found = [f"- {what}: {in_one_line(item)}" for item in items]
    return [*found, ""] if found else []
