"""The tables of a benchmark's report below the main one: classes, time, acceptance, costs, machine and build."""

from __future__ import annotations

from collections.abc import Iterator

from specllama.base.disk import size_text
from specllama.bench.report import ALL, BenchReport, BenchRow, Insight, Interval
from specllama.bench.verdict import condition_name
from specllama.cli.screen.md_table import table
from specllama.cli.screen.output import in_one_line


def ratio(found: Interval | None) -> str:
    """A ratio and its interval."""
    if found is None:
        return "n/a"
    if found.low is None or found.high is None:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"


def percent(share: float | None) -> str:
    """A share; nothing where nothing was counted."""
    return "" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, digits: int = 1, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def _where(report: BenchReport, row: BenchRow) -> list[str]:
    """The first two columns: condition and setting."""
    condition = condition_name(report.plan.conditions[row.condition], report.plan.conditions)
    return [condition.removeprefix("temperature "), in_one_line(report.plan.arms[row.arm].name)]


def _classes(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows:
        if row.category != ALL:
            band = row.bands[0] if row.bands else None
            expected = f"{band.place} {band.low:.2f}-{band.high:.2f}" if band else ""
            yield [
                *_where(report, row),
                in_one_line(row.category),
                _number(row.decode_tok_s),
                ratio(row.speedup) if row.speedup else "",
                percent(row.alpha),
                expected,
            ]


def _times(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows_of(ALL):
        split = row.time_split
        parts = (split.draft, split.verify, split.sampling, split.kv, split.other) if split else (None,) * 5
        yield [
            *_where(report, row),
            *("" if part is None else f"{100 * part:.1f}" for part in parts),
            _number(row.step_s, 1, 1000),
            _number(row.step_p95_s, 1, 1000),
            _number(row.tpot_s, 1, 1000),
            _number(row.latency_s, 2),
            _number(row.prefill_tok_s),
            _number(row.weight_bytes_s, 1, 1e-9),
            percent(row.bandwidth_share),
            size_text(row.rss),
            *([size_text(row.gpu_bytes)] if row.gpu_bytes is not None else []),
        ]


def _acceptance(report: BenchReport) -> Iterator[list[str]]:
    for row in report.rows_of(ALL):
        if row.n_drafted:
            bands = ", ".join(f"{band.source}: {band.low:.2f}-{band.high:.2f} {band.place}" for band in row.bands)
            yield [
                *_where(report, row),
                f"{row.n_accepted}/{row.n_drafted}",
                percent(row.acceptance_rate),
                _number(row.alpha, 3),
                _number(row.mean_length, 2),
                percent(row.from_draft),
                " ".join(f"{share:.2f}" for share in row.per_position),
                " ".join(map(str, row.histogram)),
                _number(row.bound, 2),
                percent(row.bound_share),
                bands,
            ]


def _insight(report: BenchReport, found: Insight) -> Iterator[list[str]]:
    draft = in_one_line(report.plan.drafts[found.draft])
    for kind, buckets in (("entropy", found.by_entropy), ("place", found.by_place)):
        for bucket in buckets:
            label = f"{bucket.label} nats" if kind == "entropy" else bucket.label
            yield [draft, f"{found.temperature:g}", label, str(bucket.n_tokens), percent(bucket.acceptance)]


def _costs(report: BenchReport) -> Iterator[str]:
    for each in report.costs:
        load = "" if len(report.plan.loads) == 1 else f" (load {each.load + 1})"
        rows = ", ".join(f"{cost:.2f} ({n})" for n, cost in each.profile.verify)
        draft = ""
        if each.draft is not None:
            draft = (
                f"; a token of {in_one_line(report.plan.drafts[each.draft])} costs c = {each.profile.draft_cost():.2f}"
            )
        yield (
            f"- costs{load}: T(1) = {1000 * each.step_s:.1f} ms; T(n)/T(1) (rows n): {rows}{draft}; "
            f"spread {100 * each.noise:.0f} %"
        )


def _record(report: BenchReport) -> Iterator[str]:
    """Machine, build, models and plan, in lines."""
    machine, plan = report.machine, report.plan
    load = "" if machine.load is None else f", others used {100 * machine.load:.0f} % of the CPU"
    yield f"- machine: {machine.cpu}; {', '.join(machine.features)}; {machine.system}; power: {machine.power}{load}"
    yield "- versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items())
    for role, facts in (("target", report.target), *(("draft", each) for each in report.drafts)):
        yield f"- {role}: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    classes = dict.fromkeys(prompt.category for prompt in plan.prompts)
    languages = dict.fromkeys(prompt.language for prompt in plan.prompts)
    yield f"- prompts: {len(plan.prompts)} in {', '.join(classes)}; languages {', '.join(languages)}"
    end = (
        "end tokens forbidden, so that all answers are equally long"
        if plan.fixed_length
        else "answers end by themselves"
    )
    yield f"- {end}; {plan.delay_s:g} s before every run; {len(report.runs)} of {plan.n_runs} runs made"
    yield f"- command: {report.command}"


def detail_lines(report: BenchReport) -> list[str]:
    """Every table below the main one."""
    where = ["temp", "setting"]
    tables = (  # title, columns, how many of them are words, lines
        (
            "By class of prompts (band: what the literature lets expect of the acceptance)",
            [*where, "class", "t/s", "speedup", "accepted", "band"],
            3,
            list(_classes(report)),
        ),
        (
            "Where the time goes (of decoding, in %; steps and TPOT in ms, latency in s)",
            [*where, "draft", "verify", "sampling", "KV", "other", "step", "p95", "TPOT", "latency", "prompt t/s",
             "weights GB/s", "of memory", "RSS", *(["GPU"] if report.machine.gpus else [])],
            2,
            list(_times(report)),
        ),
        (
            "Acceptance (bound: speedup if all that is drafted were accepted)",
            [*where, "accepted", "rate", "alpha", "tok/step", "from draft", "per position", "steps by length", "bound",
             "reached", "band"],
            2,
            list(_acceptance(report)),
        ),
        (
            "When the draft is right",
            ["draft", "temp", "tokens", "n", "accepted"],
            3,
            [line for found in report.insights for line in _insight(report, found)],
        ),
    )  # fmt: skip
    lines = []
    for title, heads, n_left, rows in tables:
        if rows:
            lines += [f"{title}:", "", *table(heads, rows, n_left=n_left), ""]
    return [*lines, *map(in_one_line, (*_costs(report), *_record(report))), ""]
