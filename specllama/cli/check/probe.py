"""`specllama check --probe`: load both models, measure for a while, and predict the speed on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted, PairError
from specllama.chat.conversation import fitting_prompts
from specllama.cli.loading import Said
from specllama.cli.screen.output import Output
from specllama.cli.screen.render import clock
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.tables import markdown_table
from specllama.cli.screen.worker import Worker
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel
from specllama.drafters.length import TUNED, DraftLength
from specllama.pairs.setup import Choice, Models, Setup, load_models, prepare
from specllama.prompts.load import sample_prompts
from specllama.tuning.costs import measuring_acceptance
from specllama.tuning.first_use import LONGEST, FirstUse
from specllama.tuning.forecast import Outlook, outlook

BUDGET_S = 20.0
N_TOKENS = 24  # generated for each class of prompts
LONGEST_PROBE = LONGEST - 1  # drafted tokens in the longest measured block
N_DRAFTED = 4  # longest draft while acceptance is measured
_SHOWN_LENGTHS = (1, 2, 3, 4, 5, 6, LONGEST_PROBE)  # and the best one
_TOLERATED_NOISE = 0.25


@dataclass(slots=True)
class _Probe:
    """A measurement in progress."""

    setup: Setup
    models: Models
    prompts: Mapping[str, Sequence[int]]
    budget_s: float
    cancel: Cancel
    keeps: bool  # the costs are saved as the pair's profile
    began: float = field(default_factory=perf_counter)
    outlook: Outlook | None = None  # None until the costs are measured

    def steps(self) -> Iterator[tuple[str, float]]:
        """Measure; yields what is measured, and which share of it is done."""
        work = FirstUse(self.setup, self.models, keeps=self.keeps)
        for share in work:
            yield "measuring costs", share
        profile, draft = work.setup.profile, self.models.draft
        if profile is None or work.noise is None or draft is None:
            raise PairError("the costs of passes could not be measured", hint="use a larger --ctx-size")
        self.outlook = outlook(profile.costs, profile.step_s, {}, noise=work.noise)
        if not profile.draft_can_pay:
            return
        left_s = max(self.budget_s - (perf_counter() - self.began), 0.0)
        accepting = measuring_acceptance(
            self.models.target,
            draft,
            self.prompts,
            SamplingParams(),
            n_max=N_DRAFTED,
            n_tokens=N_TOKENS,
            seconds=left_s,
            cancel=self.cancel,
        )
        while True:
            try:
                yield "measuring acceptance", next(accepting)
            except StopIteration as end:
                self.outlook = outlook(profile.costs, profile.step_s, end.value, noise=work.noise)
                return

    def shown(self, share: float) -> tuple[float, float]:
        """The share that is done, and the seconds left, if `share` of the present part is done."""
        spent_s = perf_counter() - self.began
        if self.outlook is None and share:  # the costs take as long as they need
            left_s = max(self.budget_s - spent_s, spent_s * (1 - share) / share)
        else:
            left_s = max(self.budget_s - spent_s, 0.0)
        return spent_s / (spent_s + left_s), left_s


def probe_pair(choice: Choice, budget_s: float, cancel: Cancel, output: Output) -> Outlook | None:
    """Load and measure both models; the costs become the profile of a pair that was not tuned and has no answers.

    Ends after about `budget_s`, but not before the costs are measured, or when `cancel` is set; None if that was before
    the costs were measured. Raises PairError if they cannot be measured, and the errors of loading.
    """
    listener = Said(output)
    setup = prepare(replace(choice, length=DraftLength.auto(TUNED), any_strategy=True), listener)
    keeps = setup.measures or setup.completes
    if not keeps:  # the profile may use another draft
        known, subject = setup.profile, setup.subject
        setup = replace(prepare(choice, listener), measures=True)
        # What was measured in a busy moment is replaced; what was tuned or learned stays.
        keeps = known is not None and known.is_untaught and setup.subject.key == subject.key
    with load_models(setup, listener, cancel) as models:
        models.watch(cancel)
        assert models.draft is not None, "prepared with a draft"
        prompts = fitting_prompts(
            models.target.vocab,
            setup.target.template,
            sample_prompts(),
            n_known=min(models.target.vocab_size, models.draft.vocab_size),
            n_room=models.target.n_ctx - N_TOKENS,
        )
        probe = _Probe(setup, models, prompts, budget_s, cancel, keeps)
        with suppress(Interrupted), StatusLine(output) as status, Worker(probe.steps(), cancel) as worker:
            doing, done = "measuring costs", 0.0
            for batch in worker.batches(0.1):
                doing, done = batch[-1] if batch else (doing, done)
                if probe.outlook is not None and perf_counter() - probe.began > budget_s:
                    cancel.set()  # also in the middle of a pass
                share, left_s = probe.shown(done)
                status.show(doing, share, f"{clock(left_s)} left")
    return probe.outlook


def warn_of_noise(output: Output, noise: float) -> None:
    """Warn if the measured times vary too much to trust."""
    if noise > _TOLERATED_NOISE:
        spread = f"the measured times spread by {100 * noise:.0f} %"
        output.warn(f"{spread}: other programs use this machine", "measure again when it is idle")


def show_outlook(output: Output, found: Outlook) -> None:
    """Speed by draft length, the figures, and the advice."""
    lengths = [
        [str(point.n_max), *(f"{speed:.2f}" for speed in (point.expected, point.low, point.high))]
        for point in found.points
        if point.n_max in {*_SHOWN_LENGTHS, found.best.n_max}
    ]
    if found.classes:
        output.prose("speed by longest draft, plain decoding = 1; worst and best class of prompts")
        for line in markdown_table(("K", "speed", "worst", "best"), lengths, n_left=0):
            output.line(line)
        accepted = ", ".join(f"{each.name} {100 * each.alpha:.0f} %" for each in found.classes)
        output.prose(f"accepted: {accepted}")
    costs = found.costs
    measured = [f"{cost:.2f} ({n})" for n, cost in costs.verify if 1 < n <= found.measured_rows]
    rows = f"of more rows {', '.join(measured)}; " if measured else ""
    output.prose(f"one pass {1000 * found.step_s:.0f} ms; {rows}a drafted token {costs.draft_cost():.2f}")
    output.prose(f"{found.advice[0].upper()}{found.advice[1:]}.")
