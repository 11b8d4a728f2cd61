"""Which draft derived from a model is fastest here? Candidates are made, measured and judged one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean

from specllama import llama
from specllama.base import child as children
from specllama.base.child import Tell
from specllama.base.disk import checksum
from specllama.base.errors import ConfigError, SpecllamaError
from specllama.derive import make as derive
from specllama.derive.layers import ALIKE
from specllama.drafters.controller import CostProfile, Points
from specllama.llama.header import Header
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Derived, Measurement, Recipe
from specllama.pairs.profile import ClassFigures, Profile, ProfileKey
from specllama.pairs.tokenizer import read_tokenizer
from specllama.tuning import traces
from specllama.tuning.child import Measured, MeasureJob, RunMeasureJob, Way, load, open_draft, run_child
from specllama.tuning.traces import Trace, TracedAnswer
from specllama.tuning.tune import PATH_MARGIN, Findings, TuneEffort, figures, judged

# What is tried where nothing is asked for: types with quick kernels everywhere, from coarse to fine, and a vocabulary
# that covers nearly all of what is said. A vocabulary that is small already is not worth cutting.
QUANTS = ("Q4_0", "Q4_K_S", "Q2_K")
N_VOCAB = 32_000
LARGE_VOCAB = 64_000
SHARES_DROPPED = (1 / 8, 1 / 4, 3 / 8)  # of the layers
N_RANKED = 24  # tokens of every answer by which layers are ranked

SEARCH = TuneEffort(seconds=6.0, n_visits=1, n_tokens=48)
QUICK = TuneEffort(seconds=2.0, n_visits=1, n_tokens=16)


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried, alone and together."""

    quants: tuple[str, ...] = ()
    n_vocab: int = 0
    dropped: tuple[int, ...] = ()
    finds_layers: bool = False  # and find out which ones to leave out

    @property
    def recipe(self) -> Recipe | None:
        """The one recipe that is meant, if there is only one."""
        if self.finds_layers or len(self.quants) > 1 or self == Space():
            return None
        return Recipe(quant="".join(self.quants), n_vocab=self.n_vocab, dropped=self.dropped)


def everything(parent: Header) -> Space:
    """All that can be tried with this parent."""
    n_vocab = N_VOCAB if parent.n_vocab >= LARGE_VOCAB and read_tokenizer(parent).kind in ("bpe", "spm") else 0
    return Space(QUANTS, n_vocab, finds_layers=parent.architecture in ALIKE and not parent.n_swa)


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate, and what it promises."""

    recipe: Recipe
    path: Path
    n_bytes: int
    costs: CostProfile
    traces: tuple[Trace, ...]
    derived: Derived | None = None  # None: the parent itself
    noise: float = 0.0  # of the times behind the costs, see `Measured`

    @property
    def speed(self) -> float:
        """Over plain decoding with drafts of the best length from 1 on: the geometric mean of the classes' speeds."""
        kinds = dict.fromkeys((trace.name, trace.greedy) for trace in self.traces)
        seen = [[trace for trace in self.traces if (trace.name, trace.greedy) == kind] for kind in kinds]
        return exp(fmean(log(traces.best_drafted(each, self.costs)[1]) for each in seen))

    @property
    def classes(self) -> tuple[ClassFigures, ...]:
        """What to expect of each class of prompts."""
        return figures(self.traces, self.costs)

    @property
    def acceptance(self) -> float:
        """Of a drafted token, all classes together."""
        return traces.acceptance(self.traces)


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What the search found."""

    parent: Trial
    trials: tuple[Trial, ...]  # without the parent
    failures: tuple[str, ...]  # candidates that could not be made or measured, and why
    step_s: float
    asked: Recipe | None = None  # the one that was to be made whatever it is worth

    @property
    def kept(self) -> Derived | None:
        """What stays."""
        if self.asked is None:
            return None if self.best is None else self.best.derived
        return next((trial.derived for trial in self.trials if trial.recipe == self.asked), None)

    @property
    def noise(self) -> float:
        """Of the noisiest candidate."""
        return max(trial.noise for trial in (self.parent, *self.trials))

    @property
    def fastest(self) -> Trial:
        """The best of all, the parent included."""
        return max((self.parent, *self.trials), key=lambda trial: trial.speed)

    @property
    def best(self) -> Trial | None:
        """The derived draft worth keeping; None where none is clearly faster than its parent."""
        fastest = self.fastest
        return fastest if fastest.speed > PATH_MARGIN * self.parent.speed else None


@dataclass(slots=True)
class _Search:
    """A search in progress."""

    parent: Header
    subject: ProfileKey  # the target, and the parent as its draft
    way: Way
    effort: TuneEffort
    tell: Tell
    run: RunMeasureJob
    n_steps: int
    made: list[Path] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    errors: list[SpecllamaError] = field(default_factory=list)  # behind them
    verify: Points = ()
    answers: tuple[TracedAnswer, ...] = ()
    first: Measured | None = None
    n_done: int = 0

    def step(self, name: str) -> Tell:
        """Progress within one step of the whole."""
        before = self.n_done
        self.n_done += 1

        def told(what: str, share: float) -> None:
            self.tell(f"{name}: {what}", min((before + share) / self.n_steps, 1.0))

        return told

    def look_at_parent(self) -> Trial:
        """Measure the parent, and the target with it."""
        job = MeasureJob(self.subject, self.way, self.effort.seconds, self.effort.n_tokens)
        found = self.first = self.run(job, self.step("the draft as it is"))
        assert found.verify is not None, "nothing is out beforehand"
        self.verify = tuple((n, cost / found.verify[0][1]) for n, cost in found.verify)
        self.answers = found.answers
        return self._trial(Recipe(), self.parent.path, found, None)

    def _trial(self, recipe: Recipe, path: Path, found: Measured, derived: Derived | None) -> Trial:
        """What was measured, in units of T(1) in the same rounds."""
        assert found.verify is not None
        unit = found.verify[0][1]
        costs = CostProfile(verify=self.verify, draft=tuple((n, cost / unit) for n, cost in found.draft))
        return Trial(recipe, path, path.stat().st_size, costs, found.traces, derived, found.noise)

    def attempt(self, recipe: Recipe) -> Trial | None:
        """Make and measure a candidate; None where that is not possible, which is told at the end."""
        tell = self.step(recipe.name)
        try:
            recipe = derive.checked(self.parent, recipe)
            derived = ready(self.parent, recipe)
            if derived is None:
                path = drafts.place(self.parent.path, recipe)
                self.made.append(path)
                derive.make(self.parent, recipe, path, lambda what, share: tell(what, share / 2))
                derived = drafts.record(path, recipe, self.parent.path)
            job = self._job(derived.path)
            found = self.run(job, lambda what, share: tell(what, 0.5 + share / 2))
        except SpecllamaError as error:
            self.failures.append(f"{recipe.summary}: {error}")
            self.errors.append(error)
            return None
        trial = self._trial(recipe, derived.path, found, derived)
        self.trials.append(trial)
        return trial

    def _job(self, draft: Path) -> MeasureJob:
        assert self.first is not None
        subject = replace(self.subject, draft=draft)
        threads = self.first.threads
        return MeasureJob(
            subject, self.way, self.effort.seconds / 2, 0, answers=self.answers, rows=(1,), threads=threads
        )

    def ranked_layers(self, base: Path) -> list[int]:
        """All layers, those first without which most is accepted."""
        folder = drafts.folder() / f".{base.name}.layers"
        layers = range(self.parent.n_layer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            work = partial(judge_without, self._job(base), tuple(layers), folder)
            accepted = children.run(work, self.step("layers"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return sorted(layers, key=lambda layer: -accepted[layer])


def judge_without(job: MeasureJob, layers: Sequence[int], folder: Path, tell: Tell) -> list[float]:
    """How much of the draft is accepted without each of `layers`; for a child process.  (len(layers),)"""
    assert job.subject.draft is not None
    bench, base, path = load(replace(job, subject=replace(job.subject, draft=None))), job.subject.draft, folder / "one"
    found = []
    for i, layer in enumerate(layers):
        tell(f"without layer {layer}", i / len(layers))
        derive.cut(llama.read_header(base), Recipe(dropped=(layer,)), path)
        with open_draft(job, path) as own:
            bench.put(own)
            found.append(traces.acceptance([t for by in job.answers for t in bench.judge(traces.head(by, N_RANKED))]))
    return found


def ready(parent: Header, recipe: Recipe) -> Derived | None:
    """The draft of this recipe, if it was made before and is still true."""
    path = drafts.place(parent.path, recipe)
    try:
        derived = drafts.read(path) if path.is_file() else None
    except ConfigError:  # what is damaged is made again
        return None
    true = derived is not None and derived.parent.path == parent.path.resolve() and not drafts.stale(derived)
    return derived if true else None


@contextmanager
def _tidy(search: _Search) -> Iterator[None]:
    """Of what the search makes only the best stays; nothing where it is interrupted."""
    try:
        yield
    except BaseException:
        for path in search.made:
            drafts.discard(path)
        raise


def search(
    parent: Header,
    subject: ProfileKey,
    space: Space,
    tell: Tell,
    *,
    way: Way,
    effort: TuneEffort = SEARCH,
    only: Recipe | None = None,
    run: RunMeasureJob = run_child,
) -> SearchOutcome:
    """Look for the best draft within `space`; the best one and what was there before stay, the others go.

    Each kind of change is tried on the best of what came before: quantisation, vocabulary, layers. `only`: measure this
    one and keep it, whatever it is worth. Raises what measuring the parent raises.
    """
    if only is not None:
        space = Space()
    recipes = len(space.quants) + bool(space.n_vocab) + (1 + len(SHARES_DROPPED)) * space.finds_layers
    state = _Search(parent, subject, way, effort, tell, run, n_steps=1 + recipes + bool(space.dropped) + bool(only))
    with _tidy(state):
        best = first = state.look_at_parent()
        if only is not None and state.attempt(only) is None:
            raise state.errors[-1]
        for quant in space.quants:
            best = _better(best, state.attempt(Recipe(quant=quant)))
        if space.n_vocab:
            best = _better(best, state.attempt(replace(best.recipe, n_vocab=space.n_vocab)))
        if space.dropped:
            best = _better(best, state.attempt(replace(best.recipe, dropped=space.dropped)))
        if space.finds_layers:
            best = _without_layers(state, best)
        outcome = SearchOutcome(first, tuple(state.trials), tuple(state.failures), _step_s(state), only)
    kept = outcome.kept
    for path in state.made:
        if kept is None or path != kept.path:
            drafts.discard(path)
    for trial in outcome.trials:
        if trial.derived is not None and trial.derived is kept:
            drafts.measured(trial.derived, measurement(subject, outcome, trial))
    return outcome


def _step_s(state: _Search) -> float:
    assert state.first is not None
    return state.first.step_s


def _better(best: Trial, other: Trial | None) -> Trial:
    return best if other is None or other.speed <= best.speed else other


def _without_layers(state: _Search, best: Trial) -> Trial:
    """Leave out more and more layers as long as that pays."""
    try:
        order = state.ranked_layers(best.path)
    except SpecllamaError as error:
        state.failures.append(f"leaving out layers: {error}")
        return best
    for share in SHARES_DROPPED:
        n_dropped = max(int(share * state.parent.n_layer), 1)
        trial = state.attempt(replace(best.recipe, dropped=tuple(sorted(order[:n_dropped]))))
        if _better(best, trial) is best:
            break
        best = _better(best, trial)
    return best


def measurement(subject: ProfileKey, outcome: SearchOutcome, trial: Trial) -> Measurement:
    """What is kept of a trial."""
    return Measurement(
        target=subject.target.name,
        target_sha256=checksum(subject.target),
        cpu=drafts.cpu_here(),
        made=drafts.now(),
        step_s=outcome.step_s,
        cost=trial.costs.draft_cost(),
        speed=trial.speed,
        parent_cost=outcome.parent.costs.draft_cost(),
        parent_speed=outcome.parent.speed,
        classes=trial.classes,
    )


def keep_tuned(subject: ProfileKey, found: Findings, profile: Profile) -> None:
    """Keep what a tuning found each derived draft worth; one that was removed meanwhile is skipped.

    Raises ConfigError and DiskFull.
    """
    own, *others = judged(found, profile)
    for each in others:
        derived = None if each.path is None or not each.path.is_file() else drafts.read(each.path)
        if derived is None:
            continue
        has_own = subject.draft is not None and derived.parent.path == subject.draft.resolve()
        measurement = Measurement(
            target=subject.target.name,
            target_sha256=checksum(subject.target),
            cpu=drafts.cpu_here(),
            made=profile.made,
            step_s=profile.step_s,
            cost=each.cost,
            speed=each.speed,
            parent_cost=own.cost if has_own else None,
            parent_speed=own.speed if has_own else None,
            classes=each.classes,
            by=drafts.TUNE,
        )
        drafts.measured(derived, measurement)
