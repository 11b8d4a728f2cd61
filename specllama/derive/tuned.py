"""All that `specllama tune` measures: kernel paths, threads, costs, acceptance, and cheaper drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specllama import llama
from specllama.base.child import Tell
from specllama.base.errors import SpecllamaError
from specllama.derive import make as derive
from specllama.derive.candidates import FASTEST_TYPE, MAKING, candidates, least_cost, pass_bytes
from specllama.derive.search import cut_vocabulary
from specllama.drafters import TRANSLATED
from specllama.drafters.controller import LEAST_RATE
from specllama.llama.header import Header
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs.derived import Recipe
from specllama.pairs.profile import Profile, ProfileKey
from specllama.tuning.child import RunMeasureJob, run_child
from specllama.tuning.kernel_paths import of_draft, worth_measuring
from specllama.tuning.tune import ANSWERS, DRAFT, LONG_CONTEXT, Findings, TuneEffort, Tuning, choose, scaled

QUANT = "Q4_0"  # the type with the fastest kernels


@dataclass(frozen=True, slots=True)
class Others:
    """The drafts to measure besides the pair's own."""

    own: Header
    known: tuple[Path, ...]  # derived before
    recipes: tuple[Recipe, ...]  # to make of the pair's own

    @property
    def most_bytes(self) -> int:
        """Room for making the largest draft."""
        return max((derive.room_for(self.own, recipe) for recipe in self.recipes), default=0)

    @property
    def least_cost(self) -> float:
        """The least cost of a pass of any draft, in passes of the pair's own."""
        known = [FASTEST_TYPE * pass_bytes(llama.read_header(path)) / pass_bytes(self.own) for path in self.known]
        return min([1.0, *known, *(least_cost(self.own, recipe) for recipe in self.recipes)])


def others_of(subject: ProfileKey, *, quick: bool) -> Others | None:
    """The drafts that may be cheaper than the subject's own; None without a draft.

    `quick`: at most one, that of the profile if it has one.
    """
    if subject.draft is None:
        return None
    own, translated = llama.read_header(subject.draft), subject.strategy == TRANSLATED
    # Drafts derived from the target use its ids.
    parents = [subject.draft] if translated else [subject.draft, subject.target]
    known = [each.path for parent in parents for each in drafts.children_of(parent)]
    known = [path for path in dict.fromkeys(known) if path.resolve() != subject.draft.resolve()]
    recipes = [each for each in recipes_of(own, translated=translated) if drafts.place(own.path, each) not in known]
    if quick:
        profile = profiles.find(subject).profile
        used = None if profile is None else profile.derived
        known = sorted(known, key=lambda path: (path != used, path.stat().st_size))[:1]
        recipes = [] if known else recipes[:1]
    return Others(own, tuple(known), tuple(recipes))


def recipes_of(own: Header, *, translated: bool) -> list[Recipe]:
    """The recipes that suit this draft."""
    has_type = own.weight_bytes.get(QUANT.lower(), 0) > own.n_weight_bytes / 2
    quant = "" if has_type or pass_bytes(own, Recipe(quant=QUANT)) > pass_bytes(own) else QUANT
    n_vocab = 0 if translated else cut_vocabulary(own)
    recipes = [Recipe(quant=quant), Recipe(quant=quant, n_vocab=n_vocab), Recipe(n_vocab=n_vocab)]
    return [each for each in dict.fromkeys(recipes) if each != Recipe()]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The findings and what is best."""

    findings: Findings
    profile: Profile
    before: Profile  # what the first kernel paths and the pair's own draft give
    best_case: float = 0.0  # of the cheapest draft, see `Findings.best_case`
    made: Path | None = None  # the profile's draft, if it is new
    removed: tuple[str, ...] = ()  # drafts that were made and lost


def tune(
    subject: ProfileKey,
    others: Others | None,
    effort: TuneEffort,
    tell: Tell,
    *,
    run: RunMeasureJob = run_child,
) -> Tuned:
    """Measure everything. What was made and loses is removed, all of it after an error.

    The caller holds `drafts.LOCK`. Raises BackendError if no kernel path works, and what the child raises.
    """
    tuning, quick = Tuning(subject, effort, tell, run), effort.n_visits == 1
    if others is not None:
        tuning.budget.plan(ANSWERS + DRAFT * len(others.known) + (MAKING + DRAFT) * len(others.recipes))
    tuning.budget.plan(0.0 if quick else LONG_CONTEXT)
    tuning.compare(worth_measuring(subject))
    if not quick:
        with tuning.attempt("passes in a long context", LONG_CONTEXT) as has_time:
            if has_time:
                tuning.deepen()
    best_case = 0.0 if others is None else tuning.findings.best_case(others.least_cost)
    if others is None or best_case <= LEAST_RATE:
        return _tuned(tuning.findings, best_case, quick=quick)
    try:
        tuning.hear()
    except SpecllamaError as error:  # the costs stay; without answers no draft can be judged
        tuning.failures.append(f"answers: {error}")
        return _tuned(tuning.findings, best_case, quick=quick)
    with candidates(others.own, tuning, partial(of_draft, subject)) as several:
        for path in others.known:
            with tuning.attempt(path.stem, DRAFT) as has_time:
                if has_time:
                    several.measure(path)
        for recipe in others.recipes:
            with tuning.attempt(recipe.summary, MAKING + DRAFT) as has_time:
                if has_time and _promises(tuning.findings, others.own, recipe, quick=quick):
                    several.attempt(recipe)
        tuned = _tuned(tuning.findings, best_case, quick=quick)
        several.kept = tuned.profile.derived
        made = several.kept if several.kept in several.made else None
        removed = tuple(path.stem for path in several.made if path != several.kept and path.is_file())
    return replace(tuned, made=made, removed=removed)


def _tuned(found: Findings, best_case: float, *, quick: bool) -> Tuned:
    first, own = found.layouts[:1], found.drafts[0]
    before = replace(found, layouts=first, drafts=(replace(own, layouts=first),), threads=None)
    return Tuned(found, choose(found, quick=quick), choose(before, quick=quick), best_case)


def _promises(found: Findings, own: Header, recipe: Recipe, *, quick: bool) -> bool:
    """True if the draft would be chosen, were its pass as cheap as it can be and as much accepted as before the cut."""
    draft, base, whole = found.drafts[0], Recipe(), replace(recipe, n_vocab=0)
    for each in found.drafts[1:]:
        if each.path == drafts.place(own.path, whole):
            draft, base = each, whole
    factor, path = least_cost(own, recipe, base), drafts.place(own.path, recipe)
    layouts = tuple(replace(layout, draft=scaled(layout.draft, factor)) for layout in draft.layouts)
    supposed = replace(draft, path=path, layouts=layouts, is_cut=recipe.n_vocab > 0)
    return choose(replace(found, drafts=(*found.drafts, supposed)), quick=quick).derived == path
