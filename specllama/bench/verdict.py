"""The benchmark's verdict in plain words: what is fastest here, how sure that is, for which texts, what to type."""

from __future__ import annotations

from specllama.bench.report import ALL, Arm, BenchReport, BenchRow, Condition, Interval, Pick

CLEAR = 1.02  # a gain below this is none that anybody would notice


def condition_name(condition: Condition, conditions: tuple[Condition, ...]) -> str:
    """What tells a condition from the others: "temperature 0.7, 1024 tokens deep"."""
    words = [f"temperature {condition.temperature:g}"]
    if len({each.n_depth for each in conditions}) > 1:
        words.append(f"{condition.n_depth} tokens deep")
    if len({each.n_prompt for each in conditions}) > 1:
        words.append(f"prompts of {condition.n_prompt} tokens" if condition.n_prompt else "prompts as they are")
    if len({each.n_predict for each in conditions}) > 1:
        words.append(f"{condition.n_predict} tokens out")
    return ", ".join(words)


def span(found: Interval) -> str:
    """The confidence interval in words."""
    if found.low is None or found.high is None:
        return "too few prompts to say how sure that is"
    return f"{found.low:.2f} to {found.high:.2f}"


def _tried(report: BenchReport, pick: Pick) -> BenchRow | None:
    """The best speculative row of a condition where plain decoding won: what drafting would have done."""
    rows = [
        row
        for row in report.rows
        if row.category == ALL and row.condition == pick.condition and row.speedup and row.speedup.value
    ]
    return max(rows, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)


def _by_class(report: BenchReport, pick: Pick) -> str:
    """For which texts the pick does best and worst."""
    rows = [
        row
        for row in report.rows
        if row.arm == pick.arm and row.condition == pick.condition and row.category != ALL and row.versus_reference
    ]
    speeds = {row.category: row.versus_reference.value for row in rows if row.versus_reference}
    if len(speeds) < 2:
        return ""
    best, worst = max(speeds, key=lambda name: speeds[name]), min(speeds, key=lambda name: speeds[name])
    return f"; most on {best} ({speeds[best]:.2f}), least on {worst} ({speeds[worst]:.2f})"


def _for_plain(report: BenchReport, pick: Pick, arm: Arm) -> str:
    """Plain decoding won."""
    tried = _tried(report, pick)
    if tried is None or tried.speedup is None:
        row = next(row for row in report.rows_of() if (row.arm, row.condition) == (pick.arm, pick.condition))
        return f"{arm.name} decoding ran at {row.decode_tok_s or 0.0:.1f} tokens per second; nothing was drafted"
    name, best = report.plan.arms[tried.arm].name, tried.speedup
    reached = f"{name} reached {best.value:.2f} times it ({span(best)})"
    if not best.sure:
        return f"no draft is surely faster or slower than plain decoding: {reached}"
    if best.value > 1.0:
        return f"plain decoding was picked, although {reached} on all prompts"
    return f"plain decoding is fastest: the best draft ({name}) reached {best.value:.2f} times its speed ({span(best)})"


def _for_draft(report: BenchReport, pick: Pick, arm: Arm) -> str:
    """A speculative arm was picked; what counts is what it did on the prompts it was not picked from."""
    found = pick.confirmed
    if found is None:
        return (
            f"{arm.name} was fastest, {pick.picked:.2f} times plain decoding, on the only prompts there were: nothing "
            "confirms it"
        )
    words = f"{found.value:.2f} times plain decoding on {pick.n_confirming} prompts it was not picked from"
    if found.sure and found.value > CLEAR:
        return f"{arm.name} is fastest: {words} (95 % sure: {span(found)}){_by_class(report, pick)}"
    if found.sure and found.value < 1.0:
        return f"nothing is surely faster than plain decoding: {arm.name} looked best, but was {words} ({span(found)})"
    return f"{arm.name} may be faster than plain decoding or not: {words} ({span(found)})"


def _advice(report: BenchReport) -> str:
    """What to type, where all conditions agree."""
    arms = {pick.arm: report.plan.arms[pick.arm] for pick in report.picks}
    if len(arms) != 1:
        return ""
    (arm,) = arms.values()
    if arm.plain:
        tried = [row.speedup for pick in report.picks if (row := _tried(report, pick)) is not None]
        clear = bool(tried) and all(speedup and speedup.sure and speedup.value < 1.0 for speedup in tried)
        return " Use --spec-type none." if clear else ""
    sure = all(pick.confirmed and pick.confirmed.sure and pick.confirmed.value > CLEAR for pick in report.picks)
    if not sure or arm.length.is_auto:
        return ""
    length = f"--spec-draft-n-max {arm.length}"
    return f" Use {length}." if arm.spec_type == "draft-simple" else f" Use --spec-type {arm.spec_type} {length}."


def _synthetic(report: BenchReport, rate: float) -> str:
    """What a run without judging tells."""
    said = []
    for index, condition in enumerate(report.plan.conditions):
        rows = [row for row in report.rows_of() if row.condition == index and row.speedup]
        best = max(rows, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)
        if best is not None and best.speedup is not None:
            where, arm = condition_name(condition, report.plan.conditions), report.plan.arms[best.arm].name
            said.append(f"at {where} {arm} ran at {best.speedup.value:.2f} times plain decoding")
    return (
        f"NO VALID OUTPUT: {100 * rate:.0f} % of the drafted tokens were accepted without being judged, to see what "
        f"the loop itself costs; {'; '.join(said) or 'nothing was drafted'}."
    )


def verdict(report: BenchReport) -> str:
    """The verdict on a report whose rows and picks are there."""
    partly = f"This is a part of what was planned: {report.partial}. " if report.partial else ""
    if report.synthetic is not None:
        return partly + _synthetic(report, report.synthetic)
    sentences = []
    for pick in report.picks:
        arm = report.plan.arms[pick.arm]
        found = _for_plain(report, pick, arm) if arm.plain else _for_draft(report, pick, arm)
        name = condition_name(report.plan.conditions[pick.condition], report.plan.conditions)
        sentences.append(f"At {name} {found}.")
    return partly + " ".join(sentences) + _advice(report)
