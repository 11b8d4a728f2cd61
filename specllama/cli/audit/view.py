"""The audit's report as Markdown, and its verdict in one sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specllama.audit.chi_square import POWER, SURPRISE
from specllama.audit.report import LAW_BOUND, AuditReport, DrawRow, GreedyRun, KvRow
from specllama.base.text import counted
from specllama.cli.screen.tables import markdown_table
from specllama.cli.screen.visible import in_one_line

WIDTH = 79  # of prose, for terminals


def sentence(report: AuditReport) -> str:
    """The verdict in one sentence."""
    part = " in the finished part (the audit was interrupted)" if report.partial else ""
    if report.bugs:
        many = f" and {len(report.bugs) - 1} more" if len(report.bugs) > 1 else ""
        return f"NOT EXACT{part}: {report.bugs[0]}{many}"
    if not (report.greedy or report.laws):
        return "Nothing was audited: the audit was interrupted before its first result."
    ties = sum(run.difference is not None for run in report.greedy)
    told = f", except for {counted(ties, 'near-tie')} of this build" if ties else ""
    gaps = f" Not shown: {'; '.join(report.gaps)}." if report.gaps else ""
    return f"Exact{part}: the output with drafts equals the target's own{told}.{gaps}"


def _prose(text: str) -> Iterator[str]:
    yield from textwrap.wrap(in_one_line(text), WIDTH)
    yield ""


def _item(text: str) -> Iterator[str]:
    yield from textwrap.wrap(in_one_line(text), WIDTH, initial_indent="- ", subsequent_indent="  ")


def markdown(report: AuditReport) -> str:
    """The whole report; the verdict is last, where a terminal shows it."""
    lines = ["# Audit", ""]
    if report.partial:
        lines += _prose("PARTIAL: the audit was interrupted. The report covers only the finished part.")
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
        lines += ["## Faults", "", *(line for bug in report.bugs for line in _item(bug)), ""]
    lines += ["## Verdict", "", *_prose(f"**{sentence(report)}**")]
    return "\n".join(lines).rstrip()


def _about(report: AuditReport) -> Iterator[str]:
    about: Mapping[str, Any] = report.about
    models, settings = about.get("models", {}), about.get("settings", {})
    for role in ("target", "draft"):
        if model := models.get(role):
            yield from _item(f"{role}: {model['file']} ({model['description']})")
            yield f"  SHA-256 {model['sha256']}"
    if tuned := about.get("tuned"):
        draft = " and the draft that the profile chose" if tuned["draft_chosen"] else ""
        yield from _item(f"loaded as by `specllama run`: with the profile of {tuned['made'][:10]}{draft}")
    if settings:
        law = ", ".join(f"{name} {settings[name]}" for name in ("temp", "top_k", "top_p", "min_p"))
        yield from _item(f"settings: {law}; seed {settings['seed']}")
        yield from _item(f"audited: {', '.join(settings['spec_type'])}; rules {', '.join(settings['verify_rule'])}")
    if versions := about.get("versions"):
        names = ("specllama", "llama_cpp_python", "llama_cpp")
        yield from _item("versions: " + ", ".join(f"{name} {versions[name]}" for name in names))
    if machine := about.get("machine"):
        yield from _item(f"machine: {machine['cpu']}, {counted(machine['n_cores'], 'core')}, {machine['system']}")
    if "made" in about:
        yield from _item(f"made {about['made']}, in {report.wall_s:.0f} s{', quick' * bool(about.get('quick'))}")
    yield ""


def _greedy(runs: Sequence[GreedyRun]) -> Iterator[str]:
    same = sum(run.difference is None and not run.failure for run in runs)
    n_prompts, n_drafted = len({run.prompt for run in runs}), sum(run.n_drafted for run in runs)
    n_seeded, n_masked = sum(run.same_seed for run in runs), sum(run.in_format for run in runs)
    seeded = f", {n_seeded} of them with --seed-mode same and {n_masked} in a format" if n_seeded else ""
    yield from ("## Greedy, and one seed: the same text with and without drafts", "")
    yield from _prose(
        f"{same} of {counted(len(runs), 'answer')}{seeded} ({counted(n_prompts, 'prompt')}, "
        f"K = {min(run.n_max for run in runs)} to {max(run.n_max for run in runs)}) equal the plain ones token by "
        f"token; {sum(run.n_accepted for run in runs)} of {counted(n_drafted, 'drafted token')} were accepted."
    )
    parted = [(run, run.difference) for run in runs if run.difference is not None]
    if not parted:
        return
    yield from _prose(
        "Where two texts differ, the control reads the text without a draft, token by token and in blocks. If blocks "
        "change the difference of the two scores by half of their gap or more, it is a near-tie of this build; "
        "anything else is a bug. The last figure is the gap in the blocks of the answer, read again without a draft. "
        "A negative gap means they pick the other token."
    )
    for run, found in parted:
        yield from _item(
            f"{'near-tie' if found.near_tie else 'BUG'}: {run.kind}, {run.prompt}, {run.strategy}, {run.rule}, "
            f"K = {run.n_max}, token {found.at}: {found.plain_text!r} plain, {found.our_text!r} with drafts; "
            f"gap {found.gap:.4f}, of the top two {found.top_gap:.4f}; blocks change it by {found.moved:.4f}; "
            f"same blocks {found.reread:.4f}"
        )
    yield ""


def _laws(report: AuditReport) -> Iterator[str]:
    n_contexts, n_open = (max(getattr(row, name) for row in report.laws) for name in ("n_contexts", "n_open"))
    yield from ("## Sampling: the exact distribution of the output", "")
    yield from _prose(
        "Every branch of every random choice of the drafter and the verifier is taken, and the probabilities of all "
        "paths are added up. p comes from the target's logits by a second sampler that shares no code with the first. "
        "`error`: the largest error of a probability of the first token. `TV`: the total variation of whole blocks of "
        f"up to K drafted tokens and one more; at most {LAW_BOUND:g} passes. `texts`: free ones + those within an "
        f"answer in a format, whose mask limits p. In {n_open} of "
        f"{counted(n_contexts, 'context')} p has more than one token."
    )
    rows = [
        (
            f"{row.strategy}, {row.rule}",
            f"{row.n_contexts - row.n_masked}+{row.n_masked}",
            *map(str, (row.n_drafted_in, row.longest, row.n_branches)),
            f"{row.distance.first_error:.0e}",
            f"{row.distance.tv:.0e}",
            "exact" if row.sound else "NOT P",
        )
        for row in report.laws
    ]
    yield from markdown_table(("", "texts", "draft", "K", "paths", "error", "TV", ""), rows)
    yield ""


def _draw_row(row: DrawRow, name: str) -> tuple[str, ...]:
    test = row.test
    value, seen = test.p_value, test.visible_tv
    return (
        name,
        str(test.n_draws),
        f"{test.statistic:.1f}",
        str(test.n_free),
        "n/a" if value is None else f"{value:.3g}",
        "n/a" if seen is None else f"{seen:.3f}",
        "as p" if row.sound else "NOT P",
    )


def _draws(report: AuditReport) -> Iterator[str]:
    yield from ("## Sampling: real draws, counted", "")
    yield from _prose(
        "Chi-square tests of the first two tokens of many answers from the same contexts, and of the quantiles of the "
        f"tokens of long answers. A p-value below {SURPRISE:g} is a fault. `seen from` is the power: a bias of this "
        f"TV in every context is detected with a probability of {100 * POWER:.0f} % or more. The exact test above "
        "covers smaller ones."
    )
    rows = [_draw_row(row, f"{row.strategy}, {row.rule}") for row in report.draws]
    rows += [_draw_row(row, "all, along answers") for row in report.along]
    yield from markdown_table(("", "draws", "chi2", "free", "p-value", "seen from", ""), rows)
    yield ""


def _kv(found: Sequence[KvRow]) -> Iterator[str]:
    yield from ("## KV: rejected tokens leave no trace", "")
    yield from _prose(
        "The largest difference of a logit after random accepts and rejects, from a KV cache that read the same blocks "
        "with other tokens in the rejected places (`same`). For comparison: from one that never read the rejected "
        "tokens and has narrower blocks (`unread`), and from one with a single wrong token (`wrong`)."
    )
    rows = []
    for key in dict.fromkeys((row.strategy, row.model) for row in found):
        these = [row for row in found if (row.strategy, row.model) == key]
        n_steps, n_dropped = sum(row.n_steps for row in these), sum(row.n_dropped for row in these)
        figures = ["full"] * 3
        if asked := [row for row in these if not row.full]:
            same, unread = max(row.difference for row in asked), max(row.narrow for row in asked)
            figures = [f"{value:.2g}" for value in (same, unread, min(row.wrong for row in asked))]
        verdict = "clean" if all(row.sound for row in these) else "A TRACE"
        rows.append((f"{key[1]}, {key[0]}", str(n_steps), str(n_dropped), *figures, verdict))
    yield from markdown_table(("", "steps", "dropped", "same", "unread", "wrong", ""), rows)
    yield ""


def _faults(report: AuditReport) -> Iterator[str]:
    faults = report.faults or ()
    yield from ("## Self-test: rules broken on purpose", "")
    yield from _prose(f"{sum(fault.caught for fault in faults)} of {len(faults)} were detected.")
    for fault in faults:
        told = "detected" if fault.caught else "MISSED"
        yield from _item(f"{told} ({fault.section}: {fault.figure}): {fault.fault}")
    yield ""
