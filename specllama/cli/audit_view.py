"""The audit's report for people: Markdown that reads well as it stands, and the verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specllama.audit_types import LAW_BOUND, AuditReport, DrawRow, GreedyRun, KvRow
from specllama.chi_square import POWER, SURPRISE
from specllama.cli.md_table import table
from specllama.cli.output import in_one_line


def sentence(report: AuditReport) -> str:
    """What came out, in one sentence."""
    part = " as far as it came (it was interrupted)" if report.partial else ""
    if report.bugs:
        many = f" and {len(report.bugs) - 1} more" if len(report.bugs) > 1 else ""
        return f"NOT EXACT{part}: {report.bugs[0]}{many}"
    if not (report.greedy or report.laws):
        return "Nothing was audited: it was interrupted before anything was done."
    ties = sum(run.difference is not None for run in report.greedy)
    told = f", but for {ties} near-tie{'s' * (ties > 1)} of this build" if ties else ""
    gaps = f" Not shown: {'; '.join(report.gaps)}." if report.gaps else ""
    return f"Exact{part}: nothing that drafts emit differs from the target's own{told}.{gaps}"


def markdown(report: AuditReport) -> str:
    """The whole report."""
    lines = ["# Audit", "", f"**{in_one_line(sentence(report))}**", ""]
    if report.partial:
        lines += ["PARTIAL: the audit was interrupted; what stands here was done, and nothing else.", ""]
    lines += _about(report)
    if report.greedy:
        lines += _greedy(report.greedy)
    if report.laws:
        lines += _laws(report)
    if report.draws or report.along:
        lines += _draws(report)
    if report.kv:
        lines += _kv(report.kv)
    if report.faults is not None:
        lines += _faults(report)
    if report.bugs:
        lines += ["## What is wrong", "", *(f"- {in_one_line(bug)}" for bug in report.bugs), ""]
    return "\n".join(lines).rstrip()


def _about(report: AuditReport) -> Iterator[str]:
    """Of what, with what, where."""
    about: Mapping[str, Any] = report.about
    models, settings = about.get("models", {}), about.get("settings", {})
    for role in ("target", "draft"):
        if model := models.get(role):
            yield f"- {role}: {in_one_line(model['file'])} ({model['description']}), SHA-256 {model['sha256']}"
    if settings:
        law = ", ".join(f"{name} {settings[name]}" for name in ("temperature", "top_k", "top_p", "min_p"))
        audited = f"{', '.join(settings['strategies'])} under {', '.join(settings['rules'])}"
        yield f"- settings: {law}; seed {about['seed']}; {audited}"
    if versions := about.get("versions"):
        yield "- versions: " + ", ".join(
            f"{name} {versions[name]}" for name in ("specllama", "llama_cpp_python", "llama_cpp")
        )
    if machine := about.get("machine"):
        yield f"- machine: {machine['cpu']}, {machine['n_cores']} cores, {machine['system']}"
    if "made" in about:
        yield f"- made {about['made']}, in {report.wall_s:.0f} s{', quick' if about.get('quick') else ''}"
    yield ""


def _greedy(runs: Sequence[GreedyRun]) -> Iterator[str]:
    """Texts with and without drafts."""
    same = sum(run.difference is None for run in runs)
    n_prompts = len({run.prompt for run in runs})
    yield "## Greedy: the same text with and without drafts"
    yield ""
    yield (
        f"{same} of {len(runs)} answers ({n_prompts} prompts, K = {min(run.n_max for run in runs)} to "
        f"{max(run.n_max for run in runs)}) are the plain ones token by token; "
        f"{sum(run.n_accepted for run in runs)} of {sum(run.n_drafted for run in runs)} drafted tokens were accepted."
    )
    yield ""
    parted = [run for run in runs if run.difference]
    if not parted:
        return
    yield (
        "Where texts part, the control reads the same text without any draft, token by token and in blocks. If blocks "
        "move the two logits against each other by half of what they are apart, or more, it is a near-tie of this "
        "build; anything else is a bug. `same blocks`: the gap in the very blocks of the answer, read without a draft; "
        "below 0 they say the other token, too."
    )
    yield ""
    rows = []
    for run in parted:
        found = run.difference
        assert found is not None
        rows.append(
            (
                f"{run.prompt}, {run.strategy}, {run.rule}",
                str(run.n_max),
                str(found.at),
                repr(found.plain_text),
                repr(found.our_text),
                f"{found.gap:.4f}",
                f"{found.top_gap:.4f}",
                f"{found.moved:.4f}",
                f"{found.reread:.4f}",
                "near-tie" if found.near_tie else "BUG",
            )
        )
    head = ("answer", "K", "token", "plain", "with drafts", "gap", "top-2 gap", "blocks move", "same blocks", "")
    yield from table(head, rows)
    yield ""


def _laws(report: AuditReport) -> Iterator[str]:
    """Exact laws."""
    yield "## Sampling: the exact law of what is emitted"
    yield ""
    yield (
        "Every branch of every random choice is taken, of the drafter and of the verifier, and the weights are added "
        "up; p comes from the target's logits by a second sampler that shares no code with the first. Largest error of "
        f"a probability and total variation (TV), of the first token and of whole blocks; at most {LAW_BOUND:g} passes."
    )
    yield ""
    rows = []
    for row in report.laws:
        wide = f", {row.n_wide} left out" if row.n_wide else ""
        rows.append(
            (
                f"{row.strategy}, {row.rule}",
                f"{row.n_contexts} ({row.n_drafted_in} drafted, {row.n_open} open{wide})",
                str(row.longest),
                str(row.n_branches),
                f"{row.distance.first_error:.1e}",
                f"{row.distance.first_tv:.1e}",
                f"{row.distance.error:.1e}",
                f"{row.distance.tv:.1e}",
                "exact" if row.sound else f"NOT EXACT {row.failure}".strip(),
            )
        )
    head = ("", "contexts", "K up to", "branches", "first: error", "first: TV", "block: error", "block: TV", "")
    yield from table(head, rows)
    yield ""


def _draw_row(row: DrawRow, name: str) -> tuple[str, ...]:
    test = row.test
    value, seen = test.p_value, test.visible_tv
    return (
        name,
        str(test.n_draws),
        f"{test.statistic:.1f}",
        str(test.n_free),
        "nothing varied" if value is None else f"{value:.3g}",
        "n/a" if seen is None else f"{seen:.3f}",
        "as p" if row.sound else f"NOT AS p {row.failure}".strip(),
    )


def _draws(report: AuditReport) -> Iterator[str]:
    """Counted draws."""
    yield "## Sampling: real draws, counted"
    yield ""
    yield (
        "Chi-square of the first two tokens of many answers from the same contexts, and of where the tokens of long "
        f"answers lie in their laws. A p-value below {SURPRISE:g} would be no accident. `seen from` is the power: a "
        f"bias of that TV, in every context, would have been seen with a chance of {100 * POWER:.0f} % or more; "
        "smaller ones are for the exact laws above."
    )
    yield ""
    rows = [_draw_row(row, f"{row.strategy}, {row.rule}") for row in report.draws]
    rows += [_draw_row(row, "along answers, all together") for row in report.along]
    yield from table(("", "draws", "chi-square", "free", "p-value", "seen from", ""), rows)
    yield ""


def _kv(found: Sequence[KvRow]) -> Iterator[str]:
    """What rejected tokens left behind."""
    yield "## KV: what was rejected leaves no trace"
    yield ""
    yield (
        "After random accepts and rejects, logits behind the KV against a fresh one that read the same blocks with "
        "other tokens in the rejected places; for comparison, against one that never read them (the width of blocks "
        "differs), and one with a single wrong token. Largest difference of a logit."
    )
    yield ""
    rows = []
    for key in dict.fromkeys((row.strategy, row.model) for row in found):
        same = [row for row in found if (row.strategy, row.model) == key]
        rows.append(
            (
                f"{key[1]}, {key[0]}",
                str(sum(row.n_steps for row in same)),
                str(sum(row.n_dropped for row in same)),
                f"{max(row.difference for row in same):.2g}",
                f"{max(row.narrow for row in same):.2g}",
                f"{min(row.wrong for row in same):.2g}",
                "clean" if all(row.sound for row in same) else "A TRACE",
            )
        )
    head = ("", "steps", "dropped", "same blocks", "never read", "one wrong token", "")
    yield from table(head, rows)
    yield ""


def _faults(report: AuditReport) -> Iterator[str]:
    """What the self-test broke."""
    faults = report.faults or ()
    yield "## Self-test: rules broken on purpose"
    yield ""
    yield f"{sum(fault.caught for fault in faults)} of {len(faults)} were noticed."
    yield ""
    rows = [(fault.fault, fault.section, fault.figure, "noticed" if fault.caught else "MISSED") for fault in faults]
    yield from table(("what was broken", "section", "figure", ""), rows)
    yield ""
