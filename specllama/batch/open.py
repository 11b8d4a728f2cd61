"""A pool for a loaded pair: how many requests at once, their KV, and the engine of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from specllama.base.errors import MemoryShort, UnsupportedModel
from specllama.batch.budget import RowBudget, SharedCosts
from specllama.batch.one_slot import OneSlot
from specllama.batch.pool import Pool
from specllama.batch.request import Request
from specllama.batch.slot_view import SlotView
from specllama.core.engine import Engine
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.no_drafter import NoDrafter
from specllama.core.noise import SeedMode
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, DraftPolicy, LanguageModel, Part
from specllama.drafters.controller import Controller
from specllama.drafters.translated import TranslatedModel
from specllama.llama import LlamaModel, LlamaSlots
from specllama.pairs.ask import Drafting
from specllama.pairs.learning import accepted
from specllama.pairs.setup import Models, Setup, drafter_for

MOST_AT_ONCE = 16  # of auto: more requests make every answer slower for few tokens a second more
NEAR_BEST = 0.95  # auto takes the fewest requests that reach this share of the best rate
MAX_ROWS = 128  # tokens of a pass: in wider ones a token costs as much
MAX_OUTPUTS = 32  # of them with logits, which take 1.2 MB of memory each at 152k tokens, or two for each request


def rate(setup: Setup, n: int) -> float:
    """Tokens per T(1) that `n` requests at once are expected to emit together, by the pair's profile."""
    costs = setup.assumed_costs if setup.profile is None else setup.profile.costs
    policy = setup.policy(greedy=True)
    share = costs.verify_cost(n) / n
    if not isinstance(policy, Controller):
        return 1.0 / share
    policy.use(SharedCosts(costs, n, n - 1, n) if n > 1 else costs)
    return policy.plan(policy.n_max, lag=None if setup.draft is None else 0).rate / share


def how_many(setup: Setup, n_requests: int | None = None) -> int:
    """How many requests to answer at once: the fewest, up to MOST_AT_ONCE, that are nearly the fastest."""
    most = MOST_AT_ONCE if n_requests is None else max(min(n_requests, MOST_AT_ONCE), 1)
    rates = {n: rate(setup, n) for n in range(1, most + 1)}
    return next(n for n in rates if rates[n] >= NEAR_BEST * max(rates.values()))


def caveat_of(params: SamplingParams, seed: int, mode: SeedMode, *, own_kernels: bool) -> str:
    """Why the text of a greedy or seeded request may depend on the other requests; empty if it does not."""
    fixed = params.greedy or (seed >= 0 and mode is SeedMode.SAME)
    if fixed and not own_kernels:
        return (
            "llama.cpp's kernels round with the tokens of a pass: at near-ties an answer may not be that of its "
            "prompt alone"
        )
    if seed >= 0 and not fixed:
        way_out = "same" if own_kernels else "same and specllama's kernels"
        return f"with seed_mode draws, the answer to a seed depends on the other requests; with {way_out} it does not"
    return ""


@contextmanager
def open_pool(
    models: Models,
    setup: Setup,
    drafting: Drafting,
    *,
    n_ctx: int,
    n_slots: int | None = None,
    n_requests: int | None = None,
    cancel: Cancel | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Iterator[Pool]:
    """A pool on the weights of `models`, with a KV of its own; the block's end frees it.

    `n_ctx`: most tokens of a request, prompt and answer. `n_slots`: requests at once; None = by `how_many`, fewer if
    the memory is short, one for recurrent models; `on_note` then gets the reason. `n_requests`: how many there are, if
    that is known. Raises UsageError, MemoryShort, UnsupportedModel and BackendError.
    """
    auto = n_slots is None
    n_slots = n_slots or how_many(setup, n_requests)
    with ExitStack() as stack:
        while True:
            try:
                target, draft = _slots(models, n_slots, n_ctx, stack)
                break
            except (MemoryShort, UnsupportedModel) as error:
                if not auto or n_slots == 1:
                    raise
                if isinstance(error, MemoryShort):
                    n_slots -= 1
                    continue
                n_slots = 1
                if on_note is not None:
                    on_note(str(error))
        pool = Pool(target, draft, _PairMaker(models, setup, drafting), cancel=cancel)
        owners = ((target, models.target), (draft, models.loaded_draft))
        plans = [model.plan if isinstance(each, OneSlot) else each.plan for each, model in owners if each and model]
        needs = [plan.need for plan in plans]
        pool.stats.kv_bytes, pool.stats.compute_bytes = sum(n.kv for n in needs), sum(n.compute for n in needs)
        yield pool


def _slots(
    models: Models, n_slots: int, n_ctx: int, owner: ExitStack
) -> tuple[LlamaSlots | OneSlot, LlamaSlots | OneSlot | None]:
    """The KVs of target and draft; those of the models themselves for recurrent ones. Raises as `LlamaSlots`."""

    def opened(model: LlamaModel, length: int) -> LlamaSlots | OneSlot:
        rows = max(MAX_ROWS, model.caps.max_block)
        outputs = max(MAX_OUTPUTS, 2 * n_slots, model.caps.max_block)
        leaves = model.caps.max_leaves
        if n_slots == 1 and model.has_states:
            slot = OneSlot(model, n_ctx=length, max_rows=rows)
            stack.callback(slot.close)
            return slot
        sizes = {"n_ctx": length, "max_rows": rows, "max_outputs": outputs, "n_leaves": leaves}
        return stack.enter_context(LlamaSlots(model, n_slots=n_slots, **sizes))

    with ExitStack() as stack:
        target, draft = opened(models.target, n_ctx), None
        if (model := models.loaded_draft) is not None:
            try:
                draft = opened(model, min(n_ctx, model.header.n_ctx_train or n_ctx))
            except UnsupportedModel as error:
                error.hint = "run one request at a time (--parallel 1), or draft without a model (--spec-type lookup)"
                raise
        owner.push(stack.pop_all())
    return target, draft


class _PairMaker:
    """An `EngineMaker`: engines as `run` makes them, with a controller each.

    What the drafts of ended requests showed is the prior of the next ones. The saved profile does not learn: the same
    requests give the same texts again.
    """

    def __init__(self, models: Models, setup: Setup, drafting: Drafting) -> None:
        self._draft, self._setup, self._drafting = models.draft, setup, drafting
        self._budget = RowBudget()
        self._drafts: dict[int, tuple[LanguageModel, KeptPrefix]] = {}  # by slot, in the target's ids, with its record
        self._policies: dict[int, tuple[DraftPolicy | None, bool]] = {}  # by slot; and whether the request is greedy

    def begin(self, target: SlotView, draft: SlotView | None, request: Request) -> Engine:
        greedy = request.params.greedy
        settings = self._setup.settings(self._drafting, greedy=greedy)
        strategy = self._setup.strategy if request.drafts else NoDrafter.name
        drafter = drafter_for(target, draft and self._in_target_ids(draft), strategy, settings)
        policy = settings.policy if request.drafts else None
        self._budget.join(target.slot, policy)
        self._policies[target.slot] = policy, greedy
        return Engine(target, drafter, rule=self._drafting.rule)

    def _in_target_ids(self, draft: SlotView) -> LanguageModel:
        if draft.slot not in self._drafts:
            model = self._draft.over(draft) if isinstance(self._draft, TranslatedModel) else draft
            self._drafts[draft.slot] = model, KeptPrefix.of(model)
        return self._drafts[draft.slot][0]

    def end(self, slot: int) -> None:
        self._budget.leave(slot)
        policy, greedy = self._policies.pop(slot, (None, False))
        profile = self._setup.profile
        if isinstance(policy, Controller) and profile is not None:
            learned = accepted(profile, policy.calibration.judged, greedy=greedy)
            self._setup = replace(self._setup, profile=learned)

    def passed(self, parts: Sequence[Part], n_drafting: int) -> None:
        self._budget.passed(parts, n_drafting)
