"""Measure a loaded pair in the time of a dozen tokens, so that its first answer drafts as far as it pays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from statistics import median_low

from specllama.base import disk
from specllama.base.child import TellShare
from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted, SpecllamaError
from specllama.core.types import LanguageModel
from specllama.drafters.controller import LEAST_COST, LEAST_RATE, UNMEASURED, CostProfile, Points, best_case, rows_of
from specllama.drafters.length import TUNED
from specllama.drafters.translated import TranslatedModel
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.learning import DEEP, looked
from specllama.pairs.profile import Profile
from specllama.pairs.setup import Models, Setup, by_profile
from specllama.prompts.load import sample_text
from specllama.tuning.costs import known, n_cells, reading, verifying

# At most so many seconds, or the time of so many tokens, whichever is longer.
MOST_S, MOST_TOKENS = 2.0, 20.0
LONGEST = 8  # rows of the target's longest block
N_READ = 16  # rows of the draft's block: the slope up to here is the cost of catching up
MOST_ROUNDS = 3
AGREE = 1.1  # if the slowest and the fastest pass over one row differ by more, another round follows
MOST_REPEATED = 3  # further passes over one row while an answer waits, until the two fastest agree
N_PASSES = 11  # of one round, for the progress
# Where an answer waits, T(4) alone is measured. The others are assumed, as T(n) - 1 in units of T(4) - 1: on the
# machines of benchmarks/README.md it is 0.14 to 1.0 for 2 rows and 1.5 to 3.6 for 8. These values lose the least over
# their curves. The real ones are measured when no answer waits.
ASSUMED = ((2, 0.6), (8, 2.0))
# Up to MOST_ROWS the curve is continued with CAUTION times its steepest slope. On those machines, the slope from 8 to
# 16 rows is no steeper.
MOST_ROWS, CAUTION = TUNED + 1, 1.5


@dataclass(frozen=True, slots=True)
class FirstCosts:
    """What the passes cost."""

    costs: CostProfile
    step_s: float  # T(1)
    noise: float  # how much T(1) changed, as a share


def can_pay(c: float, verify: Sequence[tuple[int, float]] = ((1, 1.0),)) -> bool:
    """False if no length pays at an acceptance of 100 %, whatever was not measured. `verify`: what was."""
    least = partial(_at_least, verify)
    return best_case(c, least, LONGEST) > LEAST_RATE


def _at_least(verify: Sequence[tuple[int, float]], n: int) -> float:
    return max(1.0, *(LEAST_COST * cost for rows, cost in verify if rows <= n))


def _curve(measured: Points, assumed: Mapping[int, float], draft: Points) -> CostProfile:
    """The measured points of T(n), with assumed ones between and after them, up to MOST_ROWS."""
    between = {n: cost for n, cost in assumed.items() if n not in dict(measured)}
    # A block takes at least the time of one row; below that, another program interrupted.
    seen = sorted((n, max(cost, LEAST_COST) if n > 1 else 1.0) for n, cost in (*measured, *between.items()))
    slope = max((high - low) / (m - n) for (n, low), (m, high) in pairwise(seen))
    n, last = seen[-1]
    slope = min(max(CAUTION * slope, 0.0), 1.0)  # rows one by one cost no more
    verify = (*seen, (MOST_ROWS, last + slope * (MOST_ROWS - n)))
    return CostProfile(verify=verify, draft=draft, assumed=(*between, MOST_ROWS))


class _Passes:
    """Times single passes on top of what the KV caches hold, and leaves them as they were."""

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, tokens: Sequence[int], clock: Callable[[], float]
    ) -> None:
        self._models = {False: target, True: draft}
        self._tokens, self._clock = tokens, clock
        self._samples: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self._every: dict[tuple[int, bool], list[float]] = defaultdict(list)  # with those that do not count
        self.spent_s = 0.0

    def take(self, n_rows: int, *, drafts: bool = False, counts: bool = True) -> None:
        model = self._models[drafts]
        n_before, make = model.length, reading if drafts else verifying
        run = make(model, n_before, self._tokens[:n_rows])
        began = self._clock()
        try:
            run()
        finally:
            if model.length > n_before:
                model.truncate(n_before)
        took = self._clock() - began
        self.spent_s += took
        self._every[n_rows, drafts].append(took)
        if counts:
            self._samples[n_rows, drafts].append(took)

    @property
    def step_s(self) -> float:
        return median_low(self._samples[1, False])

    def cost(self, n_rows: int, *, drafts: bool = False) -> float:
        """In units of T(1)."""
        return median_low(self._samples[n_rows, drafts]) / self.step_s

    def least(self, *, drafts: bool = False) -> Points:
        """The fastest pass of each kind in units of the fastest T(1): other programs only make passes slower."""
        unit_s = min(self._every[1, False])
        return tuple((n, min(self._every[n, of]) / unit_s) for n, of in sorted(self._every) if of == drafts)

    @property
    def can_pay(self) -> bool:
        """`can_pay` by the fastest passes."""
        return can_pay(dict(self.least(drafts=True))[1], self.least())

    @property
    def unsure(self) -> bool:
        """True if the two fastest passes over one row differ, of the target or of the draft."""
        two = [sorted(self._every[1, drafts])[:2] for drafts in (False, True)]
        return any(second > AGREE * first for first, second in two)

    def points(self, *, drafts: bool = False) -> Points:
        return tuple((n, self.cost(n, drafts=of)) for n, of in sorted(self._samples) if of == drafts)

    @property
    def noise(self) -> float:
        samples = self._samples[1, False]
        return (max(samples) - min(samples)) / self.step_s

    def affords(self, cost: float) -> bool:
        """True if passes of this cost still fit into the time."""
        return self.spent_s + cost * self.step_s <= max(MOST_S, MOST_TOKENS * self.step_s)


def measuring(
    target: LanguageModel,
    draft: LanguageModel,
    tokens: Sequence[int],
    *,
    hurried: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> Generator[None, None, FirstCosts]:
    """Costs of the target's blocks and of the draft. Yields after every pass, and may wait there.

    `tokens`: at least N_READ, known to both. Ends early once the draft cannot pay, and after the first round if T(1) is
    steady and the draft can pay. `hurried`: an answer waits, so the time of about five tokens must do, unless the draft
    seems not to pay or passes vary. So few samples have no median: the fastest of each kind counts.
    """
    passes = _Passes(target, draft, tokens, clock)

    def found(costs: CostProfile) -> FirstCosts:
        return FirstCosts(costs, passes.step_s, passes.noise)

    def measured() -> CostProfile:
        return _curve(passes.points(), {}, passes.points(drafts=True))

    def hurriedly() -> CostProfile:
        verify, ((_, c), *_) = passes.least(), passes.least(drafts=True)
        more = max(dict(verify)[4], 1.0) - 1.0
        costs = _curve(verify, {n: 1.0 + share * more for n, share in ASSUMED}, ((1, 1.0),))
        # The draft runs on the same kernels, so its curve has the shape of the target's.
        return replace(costs, draft=tuple((n, c * cost) for n, cost in costs.verify))

    def single(*, counts: bool = True) -> Generator[None, None, None]:
        for drafts in (False, True):
            passes.take(1, drafts=drafts, counts=counts)
            yield

    def ruled_out(n_rows: int) -> Generator[None, None, bool]:
        """Whether the draft cannot pay, also after its pass and the last one of `n_rows` are repeated."""
        if passes.can_pay:
            return False
        yield from single()
        if n_rows > 1:
            passes.take(n_rows)
            yield
        return not passes.can_pay

    yield from single(counts=False)  # the first passes after loading take longer
    yield from single()
    for _ in range(MOST_REPEATED if hurried else 0):
        if passes.unsure:
            yield from single()
    twice = hurried and not passes.unsure  # each pass was seen twice
    if (twice and not passes.can_pay) or (not twice and (yield from ruled_out(1))):
        return found(CostProfile(verify=UNMEASURED, draft=passes.points(drafts=True), assumed=rows_of(UNMEASURED)))
    for n_rows in (4,) if hurried else (4, 2):
        passes.take(n_rows)
        yield
        if (yield from ruled_out(n_rows)):
            return found(measured())
    c = passes.cost(1, drafts=True)
    if hurried:
        if hurriedly().best_case <= LEAST_RATE:  # what one pass or an assumed cost says would hold for good
            yield from single()
            for n_rows in (4, 2):
                passes.take(n_rows)
                yield
        return found(hurriedly())
    rows = [2, 4]
    # T(8) is at least this if T goes on as it began; the draft's block costs less than its rows one by one.
    if passes.affords(2.0 * passes.cost(4) + 1.0 + N_READ / 2 * c):
        rows.append(LONGEST)
        passes.take(LONGEST)
        yield
    passes.take(N_READ, drafts=True)
    yield
    for _ in range(MOST_ROUNDS):
        yield from single()
        steady = passes.noise < AGREE - 1.0 and measured().best_case > LEAST_RATE
        if steady or not passes.affords(sum(map(passes.cost, rows)) + 1.0 + c):
            break
        for n_rows in rows:
            passes.take(n_rows)
            yield
    return found(measured())


class FirstUse:
    """The measurement of a loaded pair without a profile, or with one of assumed costs.

    Iterating does one pass at a time and yields the share done.

    The iteration may stop after any pass and go on later, with other texts in the KV caches. At its end `setup` is that
    of the new profile, which is saved; a draft that cannot pay is not in it. If measuring fails, `setup` stays without
    a profile.
    """

    def __init__(
        self,
        setup: Setup,
        models: Models,
        *,
        hurried: bool = False,
        keeps: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`hurried`: see `measuring`; completes no profile. `keeps`: saves the profile."""
        self.setup, self._keeps = setup, keeps
        self.noise: float | None = None  # see `FirstCosts`; None = nothing was measured
        self.done = not (setup.measures or (setup.completes and not hurried))
        self._models = models
        self._hurried, self._clock = hurried, clock
        self._steps = self._measure()

    def __iter__(self) -> Iterator[float]:
        return self._steps

    def finish(self, progress: TellShare = lambda share: None) -> Setup:
        """Do what is left and return the new `setup`; frees a draft that is not in it."""
        for share in self:
            progress(share)
        if self.setup.draft is None:
            self._models.drop_draft()
        return self.setup

    def _measure(self) -> Iterator[float]:
        if self.done or (self.setup.looks and self._models.target.length >= DEEP):  # there T(n) is that of attention
            return
        try:
            yield from self._passes()
        except Interrupted:
            raise
        except SpecllamaError:  # no room in the context, or a failed pass: the answers go on without a profile
            pass
        finally:
            self.done = True

    def _passes(self) -> Iterator[float]:
        target, draft = self._models.target, self._models.draft
        assert draft is not None
        n_known = min(target.vocab_size, draft.vocab_size)
        said = [token for token in target.vocab.tokenize(sample_text(), special=False) if token < n_known] or [0]
        text = (said * -(-N_READ // len(said)))[: max(len(said), N_READ)]
        spelled = 1.0
        if isinstance(draft, TranslatedModel):
            spelled, text = n_cells(draft, text) / len(text), list(known(draft, text))
        work, n_done = measuring(target, draft, text, hurried=self._hurried, clock=self._clock), 0
        while True:
            try:
                next(work)
            except StopIteration as end:
                self._keep(end.value, spelled)
                return
            n_done += 1
            yield min(n_done / N_PASSES, 1.0)

    def _keep(self, found: FirstCosts, n_spelled: float) -> None:
        setup, costs = self.setup, found.costs
        assert setup.draft is not None
        # Every pass of the draft is charged with the tokens that spell one of the target's, as `tune` does.
        reads = tuple((n, n_spelled * cost) for n, cost in costs.draft)
        profile = Profile(
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            source="use",
            target_path=KernelPath.of(setup.target_options),
            draft_path=KernelPath.of(setup.draft_options(self._models.target.n_ctx)),
            step_s=found.step_s,
            costs=replace(costs, draft=reads),
            strategy=setup.subject.strategy,
            loads=self._models.loads,
        )
        self.noise = found.noise
        # On a busy machine measured again next time, because nothing would correct it; the second time it holds.
        doubted = not profile.draft_can_pay and found.noise > AGREE - 1.0 and not profiles.is_doubted(setup.subject)
        profile = replace(profile, doubted=doubted)

        def completed(kept: Profile) -> Profile:
            """`kept` with the measured costs, and what answers taught of all else."""
            if not kept.is_partial:  # it is due; a tuned profile knows more rows than are measured here
                if doubted:
                    return replace(kept, evidence=replace(kept.evidence, n_answers=0))
                return looked(kept, profile.costs, self._models.target.length)
            new = replace(profile.costs, attention=kept.costs.attention)
            rest = replace(kept.evidence, verify=(), draft=None, n_answers=0)
            return replace(kept, step_s=profile.step_s, costs=new, evidence=rest, doubted=doubted)

        # A state folder that cannot be written: measured again next time.
        with suppress(OSError, SpecllamaError):
            if not self._keeps:
                pass
            elif setup.profile is not None:
                profile = profiles.update(setup.subject, setup.profile, completed) or completed(setup.profile)
            else:
                files = [setup.target.path, setup.draft.path]
                profiles.save(setup.subject, profile, {path: disk.seen_at_once(path) for path in files})
        setup = by_profile(setup, replace(profile, doubted=False))
        self.setup = replace(setup, completes=self._hurried and profile.is_partial)
