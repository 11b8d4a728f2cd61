"""Search for the fastest draft that can be derived from a model: make, measure and compare candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Literal

from specllama import llama
from specllama.base import child
from specllama.base.child import Tell
from specllama.base.cpu import this_cpu
from specllama.base.disk import work_folder
from specllama.derive import make as derive
from specllama.derive.candidates import MAKING, Candidates, candidates
from specllama.derive.layers import ALIKE
from specllama.drafters.controller import CostProfile
from specllama.files.inventory import checksum_of
from specllama.llama.header import Header
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived, Measurement, Recipe
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey
from specllama.pairs.tokenizer import read_tokenizer
from specllama.tuning import traces
from specllama.tuning.child import MeasureJob, RunMeasureJob, load, open_draft, run_child
from specllama.tuning.kernel_paths import Paths
from specllama.tuning.traces import Trace
from specllama.tuning.tune import (
    ANSWERS,
    DRAFT,
    PATH_MARGIN,
    VISIT,
    Findings,
    Judged,
    MeasuredDraft,
    TuneEffort,
    Tuning,
    figures,
    judged,
)

# Tried by default: types with fast kernels on all CPUs, and a vocabulary that covers nearly all of a text.
QUANTS = ("Q4_0", "Q4_K_S", "Q2_K")
N_VOCAB = 32_000
_LARGE_VOCAB = 64_000  # a smaller vocabulary is not cut
_SHARES_DROPPED = (1 / 8, 1 / 4, 3 / 8)  # of the layers
_N_RANKED = 24  # tokens of each answer that rank the layers

# The seconds are for a piece of weight 1: a search takes as long as its recipes need.
SEARCH = TuneEffort(seconds=20.0, n_visits=1, n_tokens=48)
QUICK = TuneEffort(seconds=5.0, n_visits=1, n_tokens=16)
LAYERS = 3.0  # weight of ranking the layers in the time


@dataclass(frozen=True, slots=True)
class Space:
    """The changes to try, alone and combined."""

    quants: tuple[str, ...] = ()
    n_vocab: int = 0
    dropped: tuple[int, ...] = ()
    finds_layers: bool = False  # search for the layers to leave out

    @property
    def recipe(self) -> Recipe | None:
        """The only recipe of the space; None if there are several."""
        if self.finds_layers or len(self.quants) > 1 or self == Space():
            return None
        return Recipe(quant="".join(self.quants), n_vocab=self.n_vocab, dropped=self.dropped)


def cut_vocabulary(parent: Header) -> int:
    """The tokens to keep; 0 if the vocabulary is small, cannot be cut, or was cut."""
    is_large = parent.n_vocab >= _LARGE_VOCAB and VOCAB_MAP not in parent.gguf.entries
    return N_VOCAB if is_large and read_tokenizer(parent).kind in ("bpe", "spm") else 0


def everything(parent: Header) -> Space:
    """All changes that suit this parent."""
    return Space(QUANTS, cut_vocabulary(parent), finds_layers=parent.architecture in ALIKE and not parent.n_swa)


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate and its figures."""

    recipe: Recipe
    path: Path
    n_bytes: int
    costs: CostProfile
    traces: tuple[Trace, ...]
    derived: Derived | None = None  # None = the parent itself
    noise: float = 0.0  # see `Measured`

    @property
    def speed(self) -> float:
        """Over plain decoding, with the best draft length from 1 on: the geometric mean over the classes."""
        kinds = dict.fromkeys((trace.name, trace.greedy) for trace in self.traces)
        seen = [[trace for trace in self.traces if (trace.name, trace.greedy) == kind] for kind in kinds]
        return exp(fmean(log(traces.best_drafted(each, self.costs)[1]) for each in seen))

    @property
    def cost(self) -> float:
        """Of one drafted token, in T(1)."""
        return self.costs.draft_cost()

    @property
    def classes(self) -> tuple[ClassFigures, ...]:
        return figures(self.traces, self.costs)

    @property
    def acceptance(self) -> float:
        """Of a drafted token, over all classes."""
        return traces.acceptance(self.traces)


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The candidates that were tried."""

    parent: Trial
    trials: tuple[Trial, ...]  # without the parent
    failures: tuple[str, ...]  # candidates that could not be made or measured, and why
    step_s: float
    asked: Recipe | None = None  # a recipe that is kept at any speed

    @property
    def kept(self) -> Derived | None:
        if self.asked is None:
            return None if self.best is None else self.best.derived
        return next((trial.derived for trial in self.trials if trial.recipe == self.asked), None)

    @property
    def noise(self) -> float:
        """Of the noisiest candidate."""
        return max(trial.noise for trial in (self.parent, *self.trials))

    @property
    def fastest(self) -> Trial:
        """The fastest of all, with the parent."""
        return max((self.parent, *self.trials), key=lambda trial: trial.speed)

    @property
    def best(self) -> Trial | None:
        """The fastest derived draft; None if none is clearly faster than its parent."""
        fastest = self.fastest
        return fastest if fastest.speed > PATH_MARGIN * self.parent.speed else None


@dataclass(slots=True)
class _Search:
    """A search in progress."""

    parent: Header
    tuning: Tuning
    several: Candidates
    trials: list[Trial] = field(default_factory=list)

    def trial(self, recipe: Recipe, path: Path, found: MeasuredDraft, derived: Derived | None = None) -> Trial:
        """Costs are in units of T(1), measured in the same rounds."""
        findings = self.tuning.findings
        costs = findings.costs(findings.usable[0], found)
        return Trial(recipe, path, path.stat().st_size, costs, found.traces, derived, found.noise)

    def attempt(self, recipe: Recipe) -> Trial | None:
        """Make and measure a candidate. None if that fails, or if no time is left."""
        with self.tuning.attempt(recipe.summary, MAKING + DRAFT) as has_time:
            if has_time:
                self.trials.append(self.must(recipe))
                return self.trials[-1]
        return None

    def must(self, recipe: Recipe) -> Trial:
        derived, found = self.several.attempt(recipe)
        return self.trial(derived.recipe, derived.path, found, derived)

    def ranked_layers(self, base: Path) -> list[int]:
        """All layers, sorted by the acceptance rate without them, highest first."""
        place, layers = drafts.folder() / f".{base.name}.layers", range(self.parent.n_layer)
        seconds, tell = self.tuning.budget.piece(LAYERS)
        job = self.tuning.draft_job(base, KernelPath(), seconds)
        with drafts.written(place), work_folder(place) as folder:
            accepted = child.run(partial(judge_without, job, tuple(layers), folder), tell)
        return sorted(layers, key=lambda layer: -accepted[layer])


def judge_without(job: MeasureJob, layers: Sequence[int], folder: Path, tell: Tell) -> list[float]:
    """The acceptance rate without each of `layers`. Runs in a child process.  (len(layers),)"""
    assert job.subject.draft is not None
    bench, base, path = load(replace(job, subject=replace(job.subject, draft=None))), job.subject.draft, folder / "one"
    header, found = llama.read_header(base), []
    for i, layer in enumerate(layers):
        tell(f"without layer {layer}", i / len(layers))
        derive.cut(header, Recipe(dropped=(layer,)), path)
        with open_draft(job, path) as own:
            bench.put(own)
            found.append(traces.acceptance([t for by in job.answers for t in bench.judge(traces.head(by, _N_RANKED))]))
    return found


def search(
    parent: Header,
    subject: ProfileKey,
    space: Space,
    tell: Tell,
    *,
    path: KernelPath,
    effort: TuneEffort = SEARCH,
    only: Recipe | None = None,
    run: RunMeasureJob = run_child,
) -> SearchOutcome:
    """Search `space` for the fastest draft. The best one and older drafts stay, the other candidates are removed.

    Each kind of change is tried on the best so far: quantization, vocabulary, layers. `only`: measure this recipe and
    keep it at any speed. `path`: of all models. The caller holds `drafts.LOCK`. Raises what measuring the parent does.
    """
    if only is not None:
        space = Space()
    n_recipes = len(space.quants) + bool(space.n_vocab) + bool(space.dropped) + bool(only)
    n_recipes += len(_SHARES_DROPPED) * space.finds_layers
    weight = ANSWERS + n_recipes * (MAKING + DRAFT) + LAYERS * space.finds_layers
    tuning = Tuning(subject, replace(effort, seconds=effort.seconds * (VISIT + weight)), tell, run)
    tuning.budget.plan(weight)
    tuning.compare(Paths((path,), (path,)))
    tuning.hear()
    with candidates(parent, tuning, lambda _path: [path]) as several:
        state = _Search(parent, tuning, several)
        best = first = state.trial(Recipe(), parent.path, tuning.findings.drafts[0])
        if only is not None:
            state.trials.append(state.must(only))
        for quant in space.quants:
            best = _better(best, state.attempt(Recipe(quant=quant)))
        if space.n_vocab:
            best = _better(best, state.attempt(replace(best.recipe, n_vocab=space.n_vocab)))
        if space.dropped:
            best = _better(best, state.attempt(replace(best.recipe, dropped=space.dropped)))
        if space.finds_layers:
            best = _without_layers(state, best)
        findings = tuning.findings
        outcome = SearchOutcome(first, tuple(state.trials), findings.failures, findings.usable[0].step_s, only)
        several.kept = None if outcome.kept is None else outcome.kept.path
    for trial in outcome.trials:
        if trial.derived is not None and trial.derived is outcome.kept:
            kept_figures = _measurement(subject, trial, first, made=drafts.now(), step_s=outcome.step_s, by=drafts.MAKE)
            drafts.measured(trial.derived, kept_figures)
    return outcome


def _better(best: Trial, other: Trial | None) -> Trial:
    return best if other is None or other.speed <= best.speed else other


def _without_layers(state: _Search, best: Trial) -> Trial:
    """Leave out more layers as long as that is faster."""
    order = list[int]()
    with state.tuning.attempt("leaving out layers", LAYERS) as has_time:
        if has_time:
            order = state.ranked_layers(best.path)
    for share in _SHARES_DROPPED if order else ():
        n_dropped = max(int(share * state.parent.n_layer), 1)
        trial = state.attempt(replace(best.recipe, dropped=tuple(sorted(order[:n_dropped]))))
        if _better(best, trial) is best:
            break
        best = _better(best, trial)
    return best


def _measurement(
    subject: ProfileKey,
    draft: Trial | Judged,
    parent: Trial | Judged | None,
    *,
    made: str,
    step_s: float,
    by: Literal["make", "tune"],
) -> Measurement:
    cpu = this_cpu()
    return Measurement(
        target=subject.target.name,
        target_sha256=checksum_of(subject.target),
        cpu=f"{cpu.model} {cpu.fingerprint}",
        made=made,
        step_s=step_s,
        cost=draft.cost,
        speed=draft.speed,
        parent_cost=None if parent is None else parent.cost,
        parent_speed=None if parent is None else parent.speed,
        classes=draft.classes,
        by=by,
    )


def keep_tuned(subject: ProfileKey, found: Findings, profile: Profile) -> None:
    """Keep a tuning's figures of the derived drafts that still exist. Raises ConfigError and DiskFull."""
    own, *others = judged(found, profile)
    for each in others:
        derived = None if each.path is None or not each.path.is_file() else drafts.read(each.path)
        if derived is None:
            continue
        has_own = subject.draft is not None and derived.parent.path == subject.draft.resolve()
        parent, made, step_s = own if has_own else None, profile.made, profile.step_s
        drafts.measured(derived, _measurement(subject, each, parent, made=made, step_s=step_s, by=drafts.TUNE))
