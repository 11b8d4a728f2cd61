"""Two benchmark reports side by side: which settings got faster or slower, and what else changed between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from specllama.base.jsonable import to_plain
from specllama.bench.report import ALL, BenchReport, BenchRow, BenchRun, Condition, Interval
from specllama.bench.stats import decode_speed, interval
from specllama.bench.verdict import condition_name, span

# Settings that say where models come from, which is told by their sums, or how much was measured.
_OF_NO_INTEREST = {"pair", "model", "model_draft", "hf_repo", "hf_repo_draft", "budget", "repetitions", "n_prompts"}
_OF_THE_MOMENT = ("memory_bytes_s", "load")  # measured of the machine, so never twice the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One setting under one condition in both reports."""

    arm: str
    condition: str
    a_tok_s: float | None
    b_tok_s: float | None
    ratio: Interval | None  # speed of B over that of A on the prompts both have; None: they have none in common
    a_speedup: float | None
    b_speedup: float | None
    a_alpha: float | None
    b_alpha: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportComparison:
    """What `bench compare` finds."""

    a: str  # when it was made
    b: str
    rows: tuple[Compared, ...]
    only_a: tuple[str, ...]  # settings that the other has not
    only_b: tuple[str, ...]
    differences: tuple[str, ...]  # in machine, build, models, lengths
    verdict: str

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return to_plain(self)


def _by_prompt(report: BenchReport, row: BenchRow) -> dict[tuple[str, int], BenchRun]:
    """The runs behind a row, by prompt and repetition."""
    return {
        (report.plan.prompts[run.prompt].id, run.repetition): run
        for run in report.runs
        if (run.arm, run.condition) == (row.arm, row.condition)
    }


def _ratio(a: BenchReport, b: BenchReport, of_a: BenchRow, of_b: BenchRow) -> Interval | None:
    """B over A, paired by prompt; repetitions are paired in their order, which only averages them."""
    mine, theirs = _by_prompt(b, of_b), _by_prompt(a, of_a)
    found: dict[str, list[float]] = {}
    for key, run in mine.items():
        fast, slow = decode_speed(run), decode_speed(theirs[key]) if key in theirs else None
        if fast and slow:
            found.setdefault(key[0], []).append(math.log(fast / slow))
    return interval(list(found.values()))


def _keyed(report: BenchReport) -> Mapping[tuple[str, Condition], BenchRow]:
    """Rows over all classes by what they are, not by where they stand."""
    return {(report.plan.arms[row.arm].name, report.plan.conditions[row.condition]): row for row in report.rows_of(ALL)}


def _text(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _models(report: BenchReport) -> list[object]:
    """The sums of its files, or their names."""
    return [each.get("sha256") or each.get("file") for each in (report.target, *report.drafts)]


def _warning(a: BenchReport, b: BenchReport) -> str:
    """What is not the same, where that may be why they differ: a sentence, empty where all of it is."""
    machines = [(each.cpu, each.n_cores, each.n_threads, each.memory, each.gpus) for each in (a.machine, b.machine)]
    several = {
        "two machines": machines[0] != machines[1],
        "other versions": a.versions != b.versions,
        "different models": _models(a) != _models(b),
    }
    named = [name for name, differs in several.items() if differs]
    return f" Mind that the reports are of {' and '.join(named)}." if named else ""


def _differences(a: BenchReport, b: BenchReport) -> list[str]:
    """What is not the same in both."""
    found = []

    def note(what: str, mine: object, other: object) -> None:
        if mine != other:
            found.append(f"{what}: {_text(mine)} against {_text(other)}")

    for key in dict.fromkeys([*a.versions, *b.versions]):
        note(key, a.versions.get(key), b.versions.get(key))
    for field in fields(a.machine):
        if field.name not in _OF_THE_MOMENT:
            note(field.name, asdict(a.machine)[field.name], asdict(b.machine)[field.name])
    note("models", _models(a), _models(b))
    note("answers of a fixed length", a.plan.fixed_length, b.plan.fixed_length)
    for key in dict.fromkeys([*a.settings, *b.settings]):
        if key not in _OF_NO_INTEREST:
            note(key, a.settings.get(key), b.settings.get(key))
    return found


def _verdict(rows: tuple[Compared, ...]) -> str:
    """In plain words."""
    known = [row for row in rows if row.ratio is not None]
    if not known:
        return "The reports have no setting and prompt in common, so there is nothing to compare."
    faster = [row for row in known if row.ratio and row.ratio.sure and row.ratio.value > 1.0]
    slower = [row for row in known if row.ratio and row.ratio.sure and row.ratio.value < 1.0]
    if not faster and not slower:
        return f"No difference that is more than noise, in {len(known)} settings."
    said = []
    for what, some in (("faster", faster), ("slower", slower)):
        if some:
            most = max(some, key=lambda row: abs((row.ratio.value if row.ratio else 1.0) - 1.0))
            assert most.ratio is not None
            said.append(
                f"B is {what} than A in {len(some)} of {len(known)} settings, most in {most.arm} at {most.condition} "
                f"({most.ratio.value:.2f} times; {span(most.ratio)})"
            )
    return "; ".join(said) + "."


def compare(a: BenchReport, b: BenchReport) -> ReportComparison:
    """B against A, setting by setting."""
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

    def missing(some: Mapping[tuple[str, Condition], BenchRow], others: Mapping[tuple[str, Condition], BenchRow],
                report: BenchReport) -> tuple[str, ...]:  # fmt: skip
        return tuple(
            f"{name} at {condition_name(condition, report.plan.conditions)}"
            for name, condition in some
            if (name, condition) not in others
        )

    return ReportComparison(
        a=a.made,
        b=b.made,
        rows=rows,
        only_a=missing(mine, theirs, a),
        only_b=missing(theirs, mine, b),
        differences=tuple(_differences(a, b)),
        verdict=_verdict(rows) + _warning(a, b),
    )
