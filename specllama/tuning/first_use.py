"""Measure a loaded pair within about a second, so that its first answer drafts as far as it pays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median_low
from time import perf_counter

from specllama.base import disk
from specllama.base.child import TellShare
from specllama.base.errors import Interrupted, SpecllamaError
from specllama.core.types import LanguageModel
from specllama.drafters.controller import LEAST_RATE, UNMEASURED, CostProfile, Points
from specllama.drafters.translated import TranslatedModel
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import profile as profiles
from specllama.pairs.profile import Profile
from specllama.pairs.setup import Models, Setup, by_profile
from specllama.prompts.load import sample_text
from specllama.tuning.child import PLAUSIBLE, known, n_cells
from specllama.tuning.costs import reading, verifying

# At most so many seconds, or the time of so many tokens, whichever is longer.
MOST_S, MOST_TOKENS = 2.0, 20.0
LONGEST = 8  # rows of the target's longest block
N_READ = 16  # rows of the draft's block: the slope up to here is the cost of catching up
MOST_ROUNDS = 3
AGREE = 1.1  # if two medians of one pass differ by more, another round follows
N_PASSES = 11  # of one round, for the progress
# Where an answer waits, T(4) alone is measured. The others are assumed, as T(n) - 1 in units of T(4) - 1: on the
# machines of benchmarks/README.md it is 0.3 to 1.2 for 2 rows and 1.5 to 3.1 for 8. These values lose the least over
# their curves; answers then teach the real ones.
ASSUMED = ((2, 0.6), (8, 2.0))


@dataclass(frozen=True, slots=True)
class FirstCosts:
    """What the passes cost."""

    costs: CostProfile
    step_s: float  # T(1)
    noise: float  # how much T(1) changed, as a share


def can_pay(c: float, verify: Sequence[tuple[int, float]] = ((1, 1.0),)) -> bool:
    """False if no length pays at an acceptance of 100 %, whatever was not measured. `verify`: what was."""

    def least(n: int) -> float:
        return max(1.0, *(PLAUSIBLE * cost for rows, cost in verify if rows <= n))

    return any((n + 1) / (n * c + least(n + 1)) > LEAST_RATE for n in range(1, LONGEST))


class _Passes:
    """Times single passes on top of what the KV caches hold, and leaves them as they were."""

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, tokens: Sequence[int], clock: Callable[[], float]
    ) -> None:
        self._models = {False: target, True: draft}
        self._tokens, self._clock = tokens, clock
        self._samples: dict[tuple[int, bool], list[float]] = defaultdict(list)
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
        if counts:
            self._samples[n_rows, drafts].append(took)

    @property
    def step_s(self) -> float:
        return median_low(self._samples[1, False])

    def cost(self, n_rows: int, *, drafts: bool = False) -> float:
        """In units of T(1)."""
        return median_low(self._samples[n_rows, drafts]) / self.step_s

    @property
    def can_pay(self) -> bool:
        """`can_pay` by the fastest pass of each kind: other programs only make passes slower."""
        least = {key: min(samples) / self.step_s for key, samples in self._samples.items()}
        return can_pay(least[1, True], [(n, cost) for (n, drafts), cost in least.items() if not drafts])

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
    steady. `hurried`: an answer waits, so the time of about five tokens must do.
    """
    passes = _Passes(target, draft, tokens, clock)

    def found(verify: Points, reads: Points) -> FirstCosts:
        return FirstCosts(CostProfile(verify=verify, draft=reads), passes.step_s, passes.noise)

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
    if (yield from ruled_out(1)):
        return found(UNMEASURED, passes.points(drafts=True))
    for n_rows in (4,) if hurried else (4, 2):
        passes.take(n_rows)
        yield
        if (yield from ruled_out(n_rows)):
            return found(passes.points(), passes.points(drafts=True))
    c = passes.cost(1, drafts=True)
    if hurried:
        more = max(passes.cost(4), 1.0) - 1.0
        curve = sorted([(1, 1.0), (4, 1.0 + more), *((n, 1.0 + share * more) for n, share in ASSUMED)])
        # The draft runs on the same kernels, so its curve has the shape of the target's.
        return found(tuple(curve), tuple((n, c * cost) for n, cost in curve))
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
        if passes.noise < AGREE - 1.0 or not passes.affords(sum(map(passes.cost, rows)) + 1.0 + c):
            break
        for n_rows in rows:
            passes.take(n_rows)
            yield
    # A block takes at least the time of one row; below that, another program interrupted.
    verify = tuple((n, max(cost, PLAUSIBLE)) if n > 1 else (1, 1.0) for n, cost in passes.points())
    return found(verify, passes.points(drafts=True))


class FirstUse:
    """The measurement of a loaded pair without a profile. Iterating does one pass at a time and yields the share done.

    The iteration may stop after any pass and go on later, with other texts in the KV caches. At its end `setup` is that
    of the new profile, which is saved; a draft that cannot pay is not in it. If measuring fails, `setup` stays without
    a profile.
    """

    def __init__(
        self, setup: Setup, models: Models, *, hurried: bool = False, clock: Callable[[], float] = perf_counter
    ) -> None:
        """`hurried`: see `measuring`."""
        self.setup = setup
        self.noise: float | None = None  # see `FirstCosts`; None = nothing was measured
        self.done = not setup.measures
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
        if self.done:
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
            costs=CostProfile(verify=costs.verify, draft=reads),
            strategy=setup.subject.strategy,
        )
        self.noise = found.noise
        self.setup = by_profile(setup, profile)
        if not profile.draft_can_pay and found.noise > AGREE - 1.0:
            return  # a busy machine: measured again next time, because nothing would correct it
        with suppress(OSError, SpecllamaError):  # a state folder that cannot be written: measured again next time
            files = [setup.target.path, setup.draft.path]
            profiles.save(setup.subject, profile, {path: disk.seen_at_once(path) for path in files})
