"""The output of `specllama draft`: a search, and the list of drafts, as tables and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from specllama.base.disk import size_text
from specllama.cli.screen.output import Output
from specllama.cli.screen.tables import draw_table
from specllama.derive.search import SearchOutcome, Trial
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived

_SEARCH_COLUMNS = ("draft", "size", "cost", "accepted", "speed")
_LIST_COLUMNS = ("name", "size", "recipe", "cost", "speed", "by", "for")

MEASURED_WITH = (
    "cost: a drafted token, in passes of the target; speed: relative to plain decoding. by make: measured by `draft "
    "make` with its -t, llama.cpp's kernel path and drafts at every step; by tune: measured by `specllama tune` with "
    "the best threads and paths, and drafts only if they help. The last measurement is shown"
)


def draft_json(derived: Derived) -> dict[str, object]:
    """A derived draft with its record."""
    return {"name": derived.name, "path": derived.path, **derived.to_json(), "stale": drafts.stale(derived)}


def trial_json(trial: Trial) -> dict[str, object]:
    """The figures of one candidate."""
    return {
        "recipe": asdict(trial.recipe),
        "summary": trial.recipe.summary,
        "bytes": trial.n_bytes,
        "cost": trial.costs.draft_cost(),
        "costs": asdict(trial.costs),
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


def search_json(found: SearchOutcome, kept: Derived | None) -> dict[str, object]:
    """The result of a search."""
    facts = {"parent": trial_json(found.parent), "trials": [trial_json(trial) for trial in found.trials]}
    fastest = {"faster_than_parent": found.best is not None, "faster_than_plain": found.fastest.speed > 1.0}
    return {**facts, **fastest, "kept": kept and draft_json(kept), "failures": found.failures}


def show_search(output: Output, found: SearchOutcome, kept: Derived | None) -> None:
    """A table of all candidates, the verdict, and the path of the draft that is kept."""
    if output.format == "json":
        output.data(search_json(found, kept))
        return
    if not output.quiet:
        trials = [found.parent, *found.trials]
        chosen = found.best or found.parent
        _table(output, _SEARCH_COLUMNS, [_row(trial) for trial in trials], [trial is chosen for trial in trials])
        output.line(verdict(found))
    if kept is not None:
        output.note(use_of(kept))
        output.path(kept.path)


def use_of(derived: Derived) -> str:
    """How to use the draft."""
    by_name = derived.path.parent == drafts.folder()
    return f"use it: -md {shlex.quote(derived.spoken)}" + ("; `specllama tune` also considers it" if by_name else "")


def verdict(found: SearchOutcome) -> str:
    """The result in a sentence."""
    name, parent, best = found.parent.path.stem, found.parent, found.best
    unit = "times the speed of plain decoding, on average over the classes of prompts"
    if best is None:
        told = f"No derived draft is clearly faster than the unchanged {name}, which reaches {parent.speed:.2f} {unit}"
        return f"{told}{_where_it_pays(found.fastest)}."
    told = f"{best.recipe.summary[0].upper()}{best.recipe.summary[1:]}: {best.speed:.2f} {unit}, against "
    return f"{told}{parent.speed:.2f} with the unchanged {name}{_where_it_pays(best)}."


def _where_it_pays(trial: Trial) -> str:
    """If drafting is not faster on average, the classes for which it is."""
    pays = dict.fromkeys(each.name for each in trial.classes if each.speedup > 1.0)
    if trial.speed > 1.0:
        return ""
    if not pays:
        return "; on this machine plain decoding is faster for every class of prompts"
    return f"; on this machine drafting is faster only for {', '.join(pays)}"


def show_list(output: Output, found: Sequence[Derived]) -> None:
    """A table, then a warning for each stale draft."""
    _table(output, _LIST_COLUMNS, [_list_row(each) for each in found], [False] * len(found))
    if any(each.measurements for each in found):
        output.note(MEASURED_WITH)
    for each in found:
        if reason := drafts.stale(each):
            output.warn(f"{each.name} is stale: {reason}", "make it again: specllama draft make")


def _list_row(derived: Derived) -> tuple[str, ...]:
    last = derived.measurements[-1] if derived.measurements else None
    figures = (f"{last.cost:.2f}", f"{last.speed:.2f}x", last.by, last.target) if last else ("", "not measured", "", "")
    return (derived.name, size_text(derived.n_bytes), derived.recipe.summary, *figures)


def _table(output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[bool]) -> None:
    """A table on a terminal, tabs elsewhere; marked rows are green and have a star."""
    starred = [(*row[:-1], f"{row[-1]} *" if mark else row[-1]) for row, mark in zip(rows, marks, strict=True)]
    if output.out.steerable:
        styles = ["green" if mark else None for mark in marks]
        draw_table(
            output, columns, starred, figures=("size", "cost", "accepted", "speed"), styles=styles, prose="recipe"
        )
        return
    for row in (columns, *starred):
        output.row(*row)
