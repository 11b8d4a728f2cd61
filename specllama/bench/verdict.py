"""The benchmark's verdict: the fastest setting, its confidence, the classes it suits, and the options to use."""

from __future__ import annotations

from specllama.base.text import counted
from specllama.bench.report import ALL, Arm, BenchReport, Condition, Interval, Pick
from specllama.drafters import TREE

CLEAR = 1.02  # a smaller gain is not noticeable


def condition_name(condition: Condition, conditions: tuple[Condition, ...]) -> str:
    """The temperature and what differs between the conditions: "temperature 0.7, 1024 tokens deep"."""
    words = [f"temperature {condition.temperature:g}"]
    if len({each.n_depth for each in conditions}) > 1:
        words.append(f"{counted(condition.n_depth, 'token')} deep")
    if len({each.n_prompt for each in conditions}) > 1:
        words.append(f"prompts of {condition.n_prompt} tokens" if condition.n_prompt else "prompts as they are")
    if len({each.n_predict for each in conditions}) > 1:
        words.append(f"{counted(condition.n_predict, 'token')} out")
    return ", ".join(words)


def span(found: Interval) -> str:
    """The confidence interval as text."""
    if found.low is None or found.high is None:
        return "too few prompts for a confidence interval"
    return f"{found.low:.2f} to {found.high:.2f}"


def _best_draft(report: BenchReport, condition: int) -> tuple[str, Interval] | None:
    """Name and speedup of the fastest speculative arm under a condition."""
    rows = [row for row in report.rows_of() if row.condition == condition]
    found = [(report.plan.arms[row.arm].name, row.speedup) for row in rows if row.speedup]
    return max(found, key=lambda each: each[1].value, default=None)


def _by_class(report: BenchReport, pick: Pick) -> str:
    """The classes of prompts on which the pick does best and worst."""
    speeds = {
        row.category: row.versus_reference.value
        for row in report.rows
        if (row.arm, row.condition) == (pick.arm, pick.condition) and row.category != ALL and row.versus_reference
    }
    if len(speeds) < 2:
        return ""
    best, worst = max(speeds, key=lambda name: speeds[name]), min(speeds, key=lambda name: speeds[name])
    return f"; most on {best} ({speeds[best]:.2f}), least on {worst} ({speeds[worst]:.2f})"


def _for_plain(report: BenchReport, pick: Pick, arm: Arm) -> str:
    found = _best_draft(report, pick.condition)
    if found is None:
        row = next(row for row in report.rows_of() if (row.arm, row.condition) == (pick.arm, pick.condition))
        return f"{arm.name} decoding ran at {row.decode_tok_s or 0.0:.1f} tokens per second; nothing was drafted"
    name, best = found
    reached = f"{name} reached {best.value:.2f} times its speed ({span(best)})"
    if not best.sure:
        return f"no draft {'is clearly' if best.value > 1.0 else 'was'} faster than plain decoding: {reached}"
    if best.value > 1.0:
        return f"plain decoding was picked, although {reached} on all prompts"
    return f"plain decoding is fastest: the best draft ({name}) reached {best.value:.2f} times its speed ({span(best)})"


def is_held(pick: Pick) -> bool:
    """False if the pick was slower than plain decoding on the prompts that should confirm it."""
    return pick.confirmed is None or pick.confirmed.value >= 1.0


def _for_draft(report: BenchReport, pick: Pick, arm: Arm) -> str:
    found = pick.confirmed
    if found is None:
        return f"{arm.name} was fastest, {pick.picked:.2f} times plain decoding; no prompts were left to confirm it"
    words = f"{found.value:.2f} times plain decoding on {counted(pick.n_confirming, 'other prompt')}"
    if found.sure and found.value > CLEAR:
        return f"{arm.name} is fastest: {words} (95 % confidence: {span(found)}){_by_class(report, pick)}"
    if not is_held(pick):
        return f"nothing is clearly faster than plain decoding: {arm.name} looked best, but was {words} ({span(found)})"
    return f"{arm.name} may or may not be faster than plain decoding: {words} ({span(found)})"


def _advice(report: BenchReport) -> str:
    """The options to use, if all conditions agree."""
    arms = {pick.arm: report.plan.arms[pick.arm] for pick in report.picks}
    if len(arms) != 1:
        return ""
    (arm,) = arms.values()
    if arm.plain:
        drafts = [found[1] for pick in report.picks if (found := _best_draft(report, pick.condition))]
        clear = bool(drafts) and all(speedup.sure and speedup.value < 1.0 for speedup in drafts)
        return " Use --spec-type none." if clear else ""
    sure = all(pick.confirmed and pick.confirmed.sure and pick.confirmed.value > CLEAR for pick in report.picks)
    if sure and arm.spec_type == TREE:
        return f" Use --tree {arm.length}."
    if not sure or arm.length.is_auto:
        return ""
    length = f"--spec-draft-n-max {arm.length}"
    return f" Use {length}." if arm.spec_type == "draft-simple" else f" Use --spec-type {arm.spec_type} {length}."


def _synthetic(report: BenchReport, rate: float) -> str:
    conditions, said = report.plan.conditions, []
    for index, condition in enumerate(conditions):
        if best := _best_draft(report, index):
            where = condition_name(condition, conditions)
            said.append(f"at {where} {best[0]} ran at {best[1].value:.2f} times plain decoding")
    return (
        f"NO VALID OUTPUT: {100 * rate:.0f} % of the drafted tokens were accepted unverified, to measure the cost of "
        f"the loop; {'; '.join(said) or 'nothing was drafted'}."
    )


def verdict(report: BenchReport) -> str:
    """The verdict on a report with rows and picks."""
    partly = f"This is a part of the plan: {report.partial}. " if report.partial else ""
    if report.synthetic is not None:
        return partly + _synthetic(report, report.synthetic)
    sentences = []
    for pick in report.picks:
        arm = report.plan.arms[pick.arm]
        found = _for_plain(report, pick, arm) if arm.plain else _for_draft(report, pick, arm)
        name = condition_name(report.plan.conditions[pick.condition], report.plan.conditions)
        sentences.append(f"At {name} {found}.")
    return partly + " ".join(sentences) + _advice(report)
