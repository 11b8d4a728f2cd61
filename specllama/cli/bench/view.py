"""A benchmark's report as Markdown, CSV and lines of JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from specllama.base.disk import size_text
from specllama.base.jsonable import to_plain
from specllama.base.text import counted
from specllama.bench.compare import ReportComparison
from specllama.bench.report import (
    ALL,
    Arm,
    BenchPlan,
    BenchReport,
    BenchRow,
    BenchRun,
    Condition,
    Insight,
    Interval,
    TimeSplit,
)
from specllama.bench.verdict import condition_name, is_held
from specllama.cli.screen.output import to_json
from specllama.cli.screen.render import clock
from specllama.cli.screen.tables import fitted_table, markdown_table
from specllama.cli.screen.visible import in_one_line, visible
from specllama.core.gain import Gain


def _ratio(found: Interval | Gain | None) -> str:
    if found is None:
        return "n/a"
    if found.low is None or found.high is None:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, digits: int = 1, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def _models(report: BenchReport) -> str:
    drafts = ", ".join(str(each.get("file")) for each in report.drafts)
    return f"{report.target.get('file')}" + (f" with {drafts}" if drafts else ", no draft model")


def _machine(report: BenchReport) -> str:
    machine = report.machine
    gpus = "".join(f", {gpu}" for gpu in machine.gpus)
    bandwidth = f", {machine.memory_bytes_s / 1e9:.0f} GB/s" if machine.memory_bytes_s else ""
    build = f"llama.cpp {report.versions.get('llama_cpp')} (llama-cpp-python {report.versions.get('llama_cpp_python')})"
    return (
        f"{machine.cpu}, {counted(machine.n_cores, 'core')}, {size_text(machine.memory)}{bandwidth}{gpus}; {build}; "
        f"specllama {report.versions.get('specllama')}; {report.made}"
    )


def _spent(report: BenchReport) -> str:
    """How the time was spent; empty in reports of earlier versions."""
    spent, budget_s = report.spent, report.plan.budget_s
    if spent is None:
        return ""
    rest = spent.costs_s + spent.warm_up_s + spent.runs_s + spent.insight_s
    of = "" if budget_s is None else f" of a budget of {clock(budget_s)}"
    return (
        f"{clock(rest)} spent{of}, without {clock(spent.loading_s)} of loading: {clock(spent.costs_s)} on the cost of "
        f"passes, {clock(spent.warm_up_s)} on warming up, {clock(spent.runs_s)} on {counted(len(report.runs), 'run')}, "
        f"{clock(spent.insight_s)} on the acceptance"
    )


def _main_row(report: BenchReport, row: BenchRow, picked: set[tuple[int, int]]) -> list[str]:
    (temperature, name), plain = _where(report, row), report.plan.arms[row.arm].plain
    answer = row.latency_speedup.value if row.latency_speedup is not None else None
    shown = [
        f"**{name}**" if (row.condition, row.arm) in picked else name,
        _number(row.decode_tok_s) or "n/a",
        "1" if plain else _ratio(row.speedup),
        "1" if plain else _number(answer, 2) or "n/a",
        f"{1000 * row.ttft_s:.0f} ms",
        _percent(row.alpha),
        "1" if plain else _number(row.mean_length, 2) or "n/a",
        _number(row.predicted, 2),
    ]
    return [temperature, *shown] if len(report.plan.conditions) > 1 else shown


# What the columns of the main table mean; the others need no words.
LEGEND = {
    "speedup": "tokens per second after the first pass, relative to plain decoding, with a 95 % interval; it includes "
    "the draft's prefill, which matters in short answers",
    "answer": "speedup of the whole answer",
    "TTFT": "time to the first token",
    "accepted": "per token",
    "expected": "speedup predicted from the measured costs, after prefill",
}


def main_table(report: BenchReport, width: int | None) -> tuple[list[str], str]:
    """Every setting under every condition, over all classes of prompts, the picked ones in bold; and the legend.

    Columns are removed until the table fits `width`, the least informative first.
    """
    several = len(report.plan.conditions) > 1
    heads = ["temp"] * several + ["setting", "t/s", "speedup", "answer", "TTFT", "accepted", "tok/step", "expected"]
    picked = {(pick.condition, pick.arm) for pick in report.picks if is_held(pick)}
    rows = [
        _main_row(report, row, picked if row.speedup is None or row.speedup.value >= 1.0 else set())
        for row in report.rows_of(ALL)
    ]
    spare = ("TTFT", "answer", "tok/step", "expected")
    heads, lines = fitted_table(heads, rows, spare, width, n_left=1 + several)
    legend = [f"{head}: {LEGEND[head]}." for head in heads if head in LEGEND]
    has_bold = any(cell.startswith("**") for row in rows for cell in row)
    return lines, " ".join([*legend, *["Bold: the best, picked on half of the prompts."] * has_bold])


def report_lines(report: BenchReport, *, full: bool, width: int | None = None) -> list[str]:
    """The report as Markdown: the main table, warnings and the verdict; `full` adds every other table.

    `width`: columns of the terminal; None for a file.
    """
    lines = [*filter(None, (_models(report), _machine(report), report.plan.note, _spent(report))), ""]
    if report.synthetic is not None:
        lines[:0] = ["**SYNTHETIC ACCEPTANCE: the output is not valid.**", ""]
    table, legend = main_table(report, width)
    lines += [*table, "", legend, ""]
    if full:
        lines += _detail_lines(report)
    lines += [f"- warning: {warning}" for warning in report.warnings]
    if report.warnings:
        lines.append("")
    return [*map(in_one_line, lines), in_one_line(f"**{report.verdict}**")]


def _where(report: BenchReport, row: BenchRow) -> list[str]:
    condition = condition_name(report.plan.conditions[row.condition], report.plan.conditions)
    return [condition.removeprefix("temperature "), report.plan.arms[row.arm].name]


def _classes(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows:
        if row.category != ALL:
            band = row.bands[0] if row.bands else None
            expected = f"{band.place} {band.low:.2f}-{band.high:.2f}" if band else ""
            yield [
                *_where(report, row),
                row.category,
                _number(row.decode_tok_s),
                _ratio(row.speedup) if row.speedup else "",
                _ratio(row.gain) if row.gain else "",
                _percent(row.alpha),
                expected,
            ]


def _times(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows_of(ALL):
        split = row.time_split
        yield [
            *_where(report, row),
            *(_number(getattr(split, part.name, None), 1, 100) for part in fields(TimeSplit)),
            _number(row.step_s, 1, 1000),
            _number(row.step_p95_s, 1, 1000),
            _number(row.tpot_s, 1, 1000),
            _number(row.latency_s, 2),
            _number(row.prefill_tok_s),
            _number(row.weight_bytes_s, 1, 1e-9),
            _percent(row.bandwidth_share),
            size_text(row.rss),
            *(["" if row.gpu_bytes is None else size_text(row.gpu_bytes)] if report.machine.gpus else []),
        ]


def _acceptance(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows_of(ALL):
        if row.n_drafted:
            bands = ", ".join(f"{band.source}: {band.low:.2f}-{band.high:.2f} {band.place}" for band in row.bands)
            yield [
                *_where(report, row),
                f"{row.n_accepted}/{row.n_drafted}",
                _percent(row.acceptance_rate),
                _number(row.alpha, 3),
                _number(row.mean_length, 2),
                _percent(row.from_draft),
                " ".join(f"{share:.2f}" for share in row.per_position),
                " ".join(map(str, row.histogram)),
                _number(row.bound, 2),
                _percent(row.bound_share),
                bands,
            ]


def _insight(report: BenchReport, found: Insight) -> Iterator[list[str]]:
    draft = report.plan.drafts[found.draft]
    for kind, buckets in (("entropy", found.by_entropy), ("place", found.by_place)):
        for bucket in buckets:
            label = f"{bucket.label} nats" if kind == "entropy" else bucket.label
            yield [draft, f"{found.temperature:g}", label, str(bucket.n_tokens), _percent(bucket.acceptance)]


def _costs(report: BenchReport) -> Iterator[str]:
    for each in report.costs:
        load = "" if len(report.plan.loads) == 1 else f" (load {each.load + 1})"
        rows = ", ".join(f"{cost:.2f} ({n})" for n, cost in each.profile.verify)
        draft = "" if each.draft is None else f"; a token of {report.plan.drafts[each.draft]} costs c = "
        cost = f"{each.profile.draft_cost():.2f}" if draft else ""
        yield (
            f"- costs{load}: T(1) = {1000 * each.step_s:.1f} ms; T(n)/T(1) (rows n): {rows}{draft}{cost}; "
            f"spread {100 * each.noise:.0f} %"
        )


def _record(report: BenchReport) -> Iterator[str]:
    machine, plan = report.machine, report.plan
    load = "" if machine.load is None else f", other programs used {100 * machine.load:.0f} % of the CPU"
    yield f"- machine: {machine.cpu}; {', '.join(machine.features)}; {machine.system}; power: {machine.power}{load}"
    yield "- versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items())
    for role, facts in (("target", report.target), *(("draft", each) for each in report.drafts)):
        yield f"- {role}: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    classes = dict.fromkeys(prompt.category for prompt in plan.prompts)
    languages = dict.fromkeys(prompt.language for prompt in plan.prompts)
    yield f"- prompts: {len(plan.prompts)} in {', '.join(classes)}; languages {', '.join(languages)}"
    end = "end tokens forbidden, all answers have the same length" if plan.fixed_length else "end tokens allowed"
    yield f"- {end}; {plan.delay_s:g} s before every run; {len(report.runs)} of {plan.n_runs} runs made"
    yield f"- command: {report.command}"


def _detail_lines(report: BenchReport) -> list[str]:
    """Every table below the main one."""
    where = ["temp", "setting"]
    gpu = ["GPU"] if report.machine.gpus else []
    tables = (  # title, columns, number of text columns, rows
        ("By class of prompts (live: the speedup that `run` shows, with quartiles; band: acceptance in the literature)",
         [*where, "class", "t/s", "speedup", "live", "accepted", "band"], 3, list(_classes(report))),
        ("Where the time goes (of decoding, in %; steps and TPOT in ms, latency in s)",
         [*where, "draft", "verify", "sampling", "KV", "other", "step", "p95", "TPOT", "latency", "prompt t/s",
          "weights GB/s", "of memory", "RSS", *gpu], 2, list(_times(report))),
        ("Acceptance (bound: speedup if every drafted token is accepted)",
         [*where, "accepted", "rate", "alpha", "tok/step", "from draft", "per position", "steps by length", "bound",
          "reached", "band"], 2, list(_acceptance(report))),
        ("When the draft is right", ["draft", "temp", "tokens", "n", "accepted"], 3,
         [line for found in report.insights for line in _insight(report, found)]),
    )  # fmt: skip
    lines = []
    for title, heads, n_left, rows in tables:
        if rows:
            lines += [f"{title}:", "", *markdown_table(heads, rows, n_left=n_left), ""]
    return [*lines, *_costs(report), *_record(report), ""]


_INTERVALS = ("speedup", "latency_speedup", "versus_reference", "gain")


def _cell(value: object) -> object:
    """A figure for a spreadsheet; lists are joined by spaces."""
    if isinstance(value, tuple):
        return " ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in value)
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def _csv_record(report: BenchReport, row: BenchRow) -> dict[str, object]:
    arm: Arm = report.plan.arms[row.arm]
    condition: Condition = report.plan.conditions[row.condition]
    record: dict[str, object] = {
        "setting": arm.name,
        "spec_type": arm.spec_type,
        "n_max": arm.length.to_json(),
        "verify_rule": arm.verify_rule,
        "seed_mode": arm.seed_mode,
        "draft": report.plan.drafts[arm.draft] if arm.draft is not None else "",
        **asdict(report.plan.loads[arm.load]),
        **asdict(condition),
    }
    for name in (field.name for field in fields(row) if field.name not in ("arm", "condition")):
        value = getattr(row, name)
        if name in _INTERVALS:
            record |= {name: getattr(value, "value", None)}
            record |= {f"{name}_{end}": getattr(value, end, None) for end in ("low", "high")}
        elif name == "time_split":
            record |= {f"share_{part.name}": getattr(value, part.name, None) for part in fields(TimeSplit)}
        elif name == "bands":
            bands = (f"{band.source} {band.low:.2f}-{band.high:.2f} {band.place}" for band in row.bands)
            record[name] = "; ".join(bands)
        else:
            record[name] = value
    return {**record, "synthetic": report.synthetic, "partial": report.partial}


def csv_lines(report: BenchReport) -> list[str]:
    """A header, then one line for every setting, condition and class of prompts."""
    records = [_csv_record(report, row) for row in report.rows]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if records:
        writer.writerow(records[0])
        writer.writerows([_cell(value) for value in record.values()] for record in records)
    return visible(out.getvalue()).splitlines()


def event_line(event: BenchPlan | BenchRun | BenchReport) -> str:
    """One line of JSON; the report without the runs, which have their own lines."""
    if isinstance(event, BenchReport):
        return to_json({"event": "report", **{key: value for key, value in to_plain(event).items() if key != "runs"}})
    return to_json({"event": "plan" if isinstance(event, BenchPlan) else "run", **to_plain(event)})


def comparison_lines(found: ReportComparison, files: Sequence[str]) -> list[str]:
    """Two reports compared, as Markdown."""
    lines = [f"A: {files[0]}, {found.a}", f"B: {files[1]}, {found.b}", ""]
    if found.rows:
        figures = ("A t/s", "B t/s", "B / A", "A speedup", "B speedup", "A accepted", "B accepted")
        rows = [
            [
                row.condition,
                row.arm,
                _number(row.a_tok_s) or "n/a",
                _number(row.b_tok_s) or "n/a",
                _ratio(row.ratio),
                _number(row.a_speedup, 2),
                _number(row.b_speedup, 2),
                _percent(row.a_alpha),
                _percent(row.b_alpha),
            ]
            for row in found.rows
        ]
        lines += [*markdown_table(("condition", "setting", *figures), rows), ""]
    for what, items in (("only in A", found.only_a), ("only in B", found.only_b), ("different", found.differences)):
        lines += [*(f"- {what}: {item}" for item in items), *[""] * bool(items)]
    return [*map(in_one_line, lines), in_one_line(f"**{found.verdict}**")]
