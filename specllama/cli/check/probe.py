"""`specllama check --probe`: load both models, measure for some seconds, and predict the speed on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specllama.base.errors import PairError
from specllama.chat.conversation import fitting_prompts
from specllama.cli.loading import Said
from specllama.cli.screen.output import Output
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.tables import markdown_table
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, room_after
from specllama.pairs.setup import Choice, Models, load_models, prepare
from specllama.prompts.load import sample_prompts
from specllama.tuning.costs import VERIFY_ROWS, finished, measure_acceptance, measuring_costs
from specllama.tuning.forecast import Outlook, outlook

COSTS_S = 8.0  # for the cost of passes; acceptance takes about as long
N_TOKENS = 24  # generated for each class of prompts
LONGEST_PROBE = VERIFY_ROWS[-1] - 1  # drafted tokens in the longest measured block
N_DRAFTED = 4  # longest draft while acceptance is measured
_N_PASSES = 128  # tokens that passes are measured with, half of them as preceding text
_SHOWN_LENGTHS = (1, 2, 3, 4, 6, 8, 12, LONGEST_PROBE)  # and the best one
_TOLERATED_NOISE = 0.25


def probe_pair(choice: Choice, output: Output) -> Outlook:
    """Load and measure both models. Raises PairError if nothing can be drafted, and the errors of loading."""
    setup = prepare(choice, Said(output))
    with load_models(setup, Said(output), Cancel()) as models:
        assert models.draft is not None, "prepared with a draft"
        prompts = fitting_prompts(
            models.target.vocab,
            setup.target.template,
            sample_prompts(),
            n_known=min(models.target.vocab_size, models.draft.vocab_size),
            n_room=models.target.n_ctx - N_TOKENS,
        )
        found = _measure(models, prompts, output)
    if found is None:
        raise PairError("no token was drafted, so there is nothing to measure", hint="use a larger --ctx-size")
    return found


def _measure(models: Models, prompts: Mapping[str, Sequence[int]], output: Output) -> Outlook | None:
    assert models.draft is not None, "prepared with a draft"
    text = [token for tokens in prompts.values() for token in tokens]
    n_tokens = min(_N_PASSES, models.target.n_ctx, models.draft.n_ctx)
    tokens = (text * (n_tokens // len(text) + 1))[:n_tokens]
    while tokens and room_after(models.draft, tokens) < 0:  # one token can be several of the draft's
        tokens.pop()
    with StatusLine(output) as status:
        costs = finished(
            measuring_costs(models.target, models.draft, tokens, seconds=COSTS_S),
            lambda share: status.show("measuring costs", share),
        )
        found = measure_acceptance(
            models.target,
            models.draft,
            prompts,
            SamplingParams(),
            n_max=N_DRAFTED,
            n_tokens=N_TOKENS,
            progress=lambda share: status.show("measuring acceptance", share),
        )
    return outlook(costs.profile, costs.step_s, found, noise=costs.noise)


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
    output.prose("speed by longest draft, plain decoding = 1; worst and best class of prompts")
    for line in markdown_table(("K", "speed", "worst", "best"), lengths, n_left=0):
        output.line(line)
    accepted = ", ".join(f"{each.name} {100 * each.alpha:.0f} %" for each in found.classes)
    costs = found.costs
    rows = ", ".join(f"{costs.verify_cost(n):.2f} ({n})" for n in (2, 4, 8, 16) if n <= costs.verify[-1][0])
    output.prose(f"accepted: {accepted}")
    output.prose(
        f"one pass {1000 * found.step_s:.0f} ms; of more rows {rows}; a drafted token {costs.draft_cost():.2f}"
    )
    output.prose(f"{found.advice[0].upper()}{found.advice[1:]}.")
