"""What `specllama draft` shows: a search as a table, the drafts that are here as a table, both as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from specllama.base.disk import size_text
from specllama.cli.screen.output import Output, in_one_line
from specllama.cli.screen.tables import draw_table
from specllama.derive.search import SearchOutcome, Trial
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived

_SEARCH_COLUMNS = ("draft", "size", "cost", "accepted", "speed")
_LIST_COLUMNS = ("name", "size", "recipe", "cost", "speed", "by", "for")


MEASURED_WITH = (
    "cost: of a token, in passes of the target; speed: over plain decoding. By make: as `draft make` measured, with "
    "its own -t and llama.cpp's own kernel path, and drafts everywhere; by tune: as `specllama tune` measured, with "
    "the best threads and paths, and drafts only where they pay. The two differ; the last is shown"
)


def draft_json(derived: Derived) -> dict[str, object]:
    """Everything known about a derived draft."""
    return {"name": derived.name, "path": derived.path, **derived.to_json(), "stale": drafts.stale(derived)}


def trial_json(trial: Trial) -> dict[str, object]:
    """What was measured of one candidate."""
    return {
        "recipe": asdict(trial.recipe),
        "summary": trial.recipe.summary,
        "bytes": trial.n_bytes,
        "cost": trial.costs.draft_cost(),
        "costs": trial.costs.to_json(),
        "noise": trial.noise,
        "acceptance": trial.acceptance,
        "speed": trial.speed,
        "classes": [asdict(each) for each in trial.classes],
    }


def _row(trial: Trial) -> tuple[str, ...]:
    return (
        trial.recipe.summary,
        size_text(trial.n_bytes),
        f"{trial.costs.draft_cost():.2f}",
        f"{100 * trial.acceptance:.0f} %",
        f"{trial.speed:.2f}x",
    )


def show_search(output: Output, found: SearchOutcome, kept: Derived | None) -> None:
    """A table of all candidates, what to make of it, and the path of what is kept."""
    if output.format == "json":
        facts = {"parent": trial_json(found.parent), "trials": [trial_json(trial) for trial in found.trials]}
        best = None if kept is None else draft_json(kept)
        fastest = {"faster_than_parent": found.best is not None, "faster_than_plain": found.fastest.speed > 1.0}
        output.data({**facts, **fastest, "kept": best, "failures": found.failures})
        return
    if not output.quiet:
        trials = [found.parent, *found.trials]
        chosen = found.best or found.parent
        _table(output, _SEARCH_COLUMNS, [_row(trial) for trial in trials], [trial is chosen for trial in trials])
        output.line(verdict(found))
    if kept is not None:
        output.note(use_of(kept))
        output.line(str(kept.path))


def use_of(derived: Derived) -> str:
    """What to do with it."""
    by_name = derived.path.parent == drafts.folder()
    return f"use it: -md {shlex.quote(derived.spoken)}" + ("; or let `specllama tune` decide" if by_name else "")


def verdict(found: SearchOutcome) -> str:
    """What was found, in a sentence."""
    name, parent, best = found.parent.path.stem, found.parent, found.best
    unit = "times the speed of plain decoding, on average of the classes of prompts"
    if best is None:
        told = f"No derived draft is clearly faster than {name} as it is, which promises {parent.speed:.2f} {unit}"
        return f"{told}{_where_it_pays(found.fastest)}."
    told = f"{best.recipe.summary[0].upper()}{best.recipe.summary[1:]}: {best.speed:.2f} {unit}, against "
    return f"{told}{parent.speed:.2f} with {name} as it is{_where_it_pays(best)}."


def _where_it_pays(trial: Trial) -> str:
    """Where drafting is not always a gain: what it is one for."""
    pays = dict.fromkeys(each.name for each in trial.classes if each.speedup > 1.0)
    if trial.speed > 1.0:
        return ""
    if not pays:
        return "; on this machine plain decoding is faster, whatever the prompt"
    return f"; on this machine drafting pays for some prompts only ({', '.join(pays)})"


def show_list(output: Output, found: Sequence[Derived]) -> None:
    """A table; what is no longer true is said below."""
    _table(output, _LIST_COLUMNS, [_list_row(each) for each in found], [False] * len(found))
    if any(each.measurements for each in found):
        output.note(MEASURED_WITH)
    for each in found:
        if reason := drafts.stale(each):
            output.warn(f"{each.name} is stale: {reason}", "make it again: specllama draft make")


def _list_row(derived: Derived) -> tuple[str, ...]:
    last = derived.measurements[-1] if derived.measurements else None
    figures = (f"{last.cost:.2f}", f"{last.speed:.2f}x", last.by, last.target) if last else ("", "", "", "not measured")
    return (derived.name, size_text(derived.n_bytes), derived.recipe.summary, *figures)


def _table(output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[bool]) -> None:
    """A table on a terminal, tabs between columns elsewhere; what is marked is green and has a star."""
    starred = [(*row[:-1], f"{row[-1]} *" if mark else row[-1]) for row, mark in zip(rows, marks, strict=True)]
    if output.out.steerable:
        styles = ["green" if mark else None for mark in marks]
        draw_table(output, columns, starred, figures=("size", "cost", "accepted", "speed"), styles=styles)
        return
    for row in (columns, *starred):
        output.line("\t".join(map(in_one_line, row)))
