"""Compares two benchmark reports: which settings got faster or slower, and what else changed between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from specllama.base.text import counted
from specllama.bench.report import ALL, BenchReport, BenchRow, BenchRun, Condition, Interval
from specllama.bench.stats import decode_speed, interval
from specllama.bench.verdict import condition_name, span

# Settings that name the models, which are compared by their hashes, or that say how much was measured.
_NOT_COMPARED = {"pair", "model", "model_draft", "hf_repo", "hf_repo_draft", "budget", "repetitions", "n_prompts"}
_MEASURED = ("memory_bytes_s", "load")  # fields of the machine that differ between any two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One setting under one condition in both reports."""

    arm: str
    condition: str
    a_tok_s: float | None
    b_tok_s: float | None
    ratio: Interval | None  # speed of B over speed of A, on the prompts of both reports; None without such prompts
    a_speedup: float | None
    b_speedup: float | None
    a_alpha: float | None
    b_alpha: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportComparison:
    """The result of `bench compare`."""

    a: str  # date of the report
    b: str
    rows: tuple[Compared, ...]
    only_a: tuple[str, ...]  # settings missing in B
    only_b: tuple[str, ...]
    differences: tuple[str, ...]  # in machine, build, models, lengths
    verdict: str


def _by_prompt(report: BenchReport, row: BenchRow) -> dict[tuple[str, int], BenchRun]:
    return {
        (report.plan.prompts[run.prompt].id, run.repetition): run
        for run in report.runs
        if (run.arm, run.condition) == (row.arm, row.condition)
    }


def _ratio(a: BenchReport, b: BenchReport, of_a: BenchRow, of_b: BenchRow) -> Interval | None:
    """B over A, paired by prompt and repetition."""
    mine, theirs = _by_prompt(b, of_b), _by_prompt(a, of_a)
    found: dict[str, list[float]] = {}
    for key, run in mine.items():
        fast, slow = decode_speed(run), decode_speed(theirs[key]) if key in theirs else None
        if fast and slow:
            found.setdefault(key[0], []).append(math.log(fast / slow))
    return interval(list(found.values()))


def _keyed(report: BenchReport) -> Mapping[tuple[str, Condition], BenchRow]:
    """The rows over all classes, by the arm's name and the condition."""
    return {(report.plan.arms[row.arm].name, report.plan.conditions[row.condition]): row for row in report.rows_of(ALL)}


def _text(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _models(report: BenchReport) -> list[object]:
    """The hashes of the model files, or their names."""
    return [each.get("sha256") or each.get("file") for each in (report.target, *report.drafts)]


def _warning(a: BenchReport, b: BenchReport) -> str:
    """Names the differences that may explain the result; empty if there are none."""
    machines = [(each.cpu, each.n_cores, each.n_threads, each.memory, each.gpus) for each in (a.machine, b.machine)]
    several = {
        "two machines": machines[0] != machines[1],
        "different versions": a.versions != b.versions,
        "different models": _models(a) != _models(b),
    }
    named = [name for name, differs in several.items() if differs]
    return f" Note: the reports are from {' and '.join(named)}." if named else ""


def _differences(a: BenchReport, b: BenchReport) -> list[str]:
    def facts(report: BenchReport) -> list[Mapping[str, object]]:
        return [
            report.versions,
            {key: value for key, value in asdict(report.machine).items() if key not in _MEASURED},
            {"models": _models(report), "answers of a fixed length": report.plan.fixed_length},
            {key: value for key, value in report.settings.items() if key not in _NOT_COMPARED},
        ]

    return [
        f"{key}: {_text(mine.get(key))} against {_text(other.get(key))}"
        for mine, other in zip(facts(a), facts(b), strict=True)
        for key in dict.fromkeys([*mine, *other])
        if mine.get(key) != other.get(key)
    ]


def _verdict(rows: tuple[Compared, ...]) -> str:
    known = [(row, row.ratio) for row in rows if row.ratio is not None]
    if not known:
        return "The reports have no setting and prompt in common: nothing to compare."
    if all(ratio.low is None for _, ratio in known):
        return f"Too few prompts for a confidence interval, in {counted(len(known), 'setting')}."
    said = []
    for what in ("faster", "slower"):
        some = [(row, ratio) for row, ratio in known if ratio.sure and (ratio.value > 1.0) == (what == "faster")]
        if some:
            row, ratio = max(some, key=lambda each: abs(each[1].value - 1.0))
            said.append(
                f"B is {what} than A in {len(some)} of {len(known)} settings, most in {row.arm} at {row.condition} "
                f"({ratio.value:.2f} times; {span(ratio)})"
            )
    return "; ".join(said) + "." if said else f"No difference beyond the noise, in {counted(len(known), 'setting')}."


def compare(a: BenchReport, b: BenchReport) -> ReportComparison:
    """Report B against report A, setting by setting."""
    mine, theirs = _keyed(a), _keyed(b)
    rows = tuple(
        Compared(
            arm=key[0],
            condition=condition_name(key[1], a.plan.conditions),
            a_tok_s=mine[key].decode_tok_s,
            b_tok_s=theirs[key].decode_tok_s,
            ratio=_ratio(a, b, mine[key], theirs[key]),
            a_speedup=speedup.value if (speedup := mine[key].speedup) else None,
            b_speedup=speedup.value if (speedup := theirs[key].speedup) else None,
            a_alpha=mine[key].alpha,
            b_alpha=theirs[key].alpha,
        )
        for key in mine
        if key in theirs
    )

    def named(keys: Iterable[tuple[str, Condition]], report: BenchReport) -> tuple[str, ...]:
        return tuple(f"{name} at {condition_name(condition, report.plan.conditions)}" for name, condition in keys)

    return ReportComparison(
        a=a.made,
        b=b.made,
        rows=rows,
        only_a=named((key for key in mine if key not in theirs), a),
        only_b=named((key for key in theirs if key not in mine), b),
        differences=tuple(_differences(a, b)),
        verdict=_verdict(rows) + _warning(a, b),
    )
