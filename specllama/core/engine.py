"""The decoding loop: propose, evaluate, verify, keep, observe. Plain decoding is the same loop without drafts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted, UnsupportedModel
from specllama.core.constraint import Constraint, ForcedFirst
from specllama.core.events import Event, Finished, Notice, Origin, PromptProgress, Reason, StepEvent, TokenEvent
from specllama.core.gain import Cost, unmeasured
from specllama.core.kept_prefix import KeptPrefix, kv_owners, leased, require_fitting
from specllama.core.no_drafter import NoDrafter
from specllama.core.optional import clock_of, models_of, report_of
from specllama.core.row_laws import RowLaws
from specllama.core.sampling import SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Chooser, Draft, Drafter, DraftReport, LanguageModel, Observation, Rule, Stopper
from specllama.core.verification import verify

PREFILL_SLICE = 512  # prompt tokens between two PromptProgress events


@dataclass(frozen=True, slots=True)
class _Request:
    """The settings of one answer; later changes of the engine do not reach it."""

    drafter: Drafter
    report: Callable[[], DraftReport]  # of the drafter
    busy_s: Callable[[], float]  # seconds spent so far inside the models' own calls
    cost: Cost
    rule: Rule
    params: SamplingParams
    choose: Chooser
    max_tokens: int
    stopper: Stopper | None
    cancel: Cancel
    constraint: Constraint | None


class Engine:
    """Generates from `target` with the drafts of `drafter` (None = plain decoding). Not thread-safe.

    Invariant: between steps the target's KV holds `tokens[:-1]` of prompt + answer; the last token is pending. This
    also holds after an answer that was finished, cancelled or abandoned, or that failed.
    """

    _verify, _row_laws = staticmethod(verify), RowLaws  # the audit's self-test replaces them by broken ones

    def __init__(
        self, target: LanguageModel, drafter: Drafter | None = None, *, rule: Rule = Rule.TOKEN, cost: Cost = unmeasured
    ) -> None:
        if not target.caps.rollback:
            raise UnsupportedModel(
                "this model cannot remove tokens from its memory (every rejected draft needs it)",
                hint="choose a target without recurrent layers",
            )
        self.target, self.rule, self.cost = target, rule, cost
        self.drafter: Drafter = NoDrafter() if drafter is None else drafter
        self._prefix = KeptPrefix.of(target)
        kv_owners(target, *models_of(self.drafter))

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        choose: Chooser,
        *,
        max_tokens: int,
        stopper: Stopper | None = None,
        cancel: Cancel | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Event]:
        """Events of one answer, the last one `Finished`. Its tokens follow the target's own law under `params`.

        `max_tokens` < 0: until an end token or a full context. `constraint`: one of its own for every answer. Raises
        PromptError for an empty prompt or one longer than the context, NumericsError for logits that give no
        distribution, BackendError and its kin from the models.
        Target and draft are leased from the first event to the last, or to `close`; a second answer raises ModelBusy.
        """
        require_fitting(prompt, self.target.n_ctx)
        drafter = self.drafter if constraint is None else ForcedFirst(self.drafter, constraint)
        rest = (params, choose, max_tokens, stopper, cancel or Cancel(), constraint)
        report, busy_s = report_of(drafter), clock_of((self.target, *models_of(drafter)))
        return self._answer(list(prompt), _Request(drafter, report, busy_s, self.cost, self.rule, *rest))

    def _answer(self, tokens: list[int], request: _Request) -> Iterator[Event]:
        """Prefill and decode; `tokens` grows from the prompt to prompt + answer."""
        with leased(self.target, *models_of(request.drafter)):
            # Outside `try`: before this, the KV has nothing to do with `tokens`.
            stats = SpecStats(n_prompt=len(tokens), n_cached=self._prefix.rewind(tokens))
            try:
                yield from self._prefill(tokens, stats, request)
                reason = yield from self._decode(tokens, stats, request)
            except Interrupted:
                reason = "cancelled"
            finally:
                # Of a block, only the tokens that were yielded count.
                del tokens[stats.n_prompt + stats.n_emitted :]
                self._prefix.hold(tokens)
        yield Finished(reason, stats)

    def _prefill(self, tokens: list[int], stats: SpecStats, request: _Request) -> Iterator[Event]:
        """Bring the KV from the cached part of `tokens` to `tokens[:-1]`."""
        busy_s = request.busy_s()
        for at in range(stats.n_cached, len(tokens) - 1, PREFILL_SLICE):
            if request.cancel.is_set():
                raise Interrupted("cancelled while the prompt was read")
            yield PromptProgress(at, len(tokens))
            started = perf_counter()
            self.target.feed(tokens[at : min(at + PREFILL_SLICE, len(tokens) - 1)])
            stats.prompt_s += perf_counter() - started
        started = perf_counter()
        request.drafter.begin(tokens)
        stats.prompt_s += perf_counter() - started
        stats.loop_s += max(stats.prompt_s - (request.busy_s() - busy_s), 0.0)

    def _decode(self, tokens: list[int], stats: SpecStats, request: _Request) -> Generator[Event, None, Reason]:
        """Steps until the answer ends; returns the reason. Within a block `tokens` runs ahead of `stats.n_emitted`."""
        ended = False
        while not ended:
            if request.cancel.is_set():
                return "cancelled"
            if stats.n_emitted == request.max_tokens or len(tokens) > self.target.n_ctx:
                return "length"
            event, origin, notice, ended = self._step(tokens, stats, request)
            if event.step == 0:  # not earlier: the first block also reads the prompt's last token
                yield PromptProgress(stats.n_prompt, stats.n_prompt)
            if notice:
                yield Notice(notice)
            for i, token in enumerate(tokens[stats.n_prompt + stats.n_emitted :]):
                stats.n_emitted += 1
                stats.n_from_draft += i < event.accepted
                yield TokenEvent(token, "draft" if i < event.accepted else origin, event.step)
            yield event
        return "stop"

    def _n_seen(self, block: Sequence[int], stopper: Stopper | None) -> tuple[int, bool]:
        """(tokens of the block up to and including the one that ends the answer, whether there is one)."""
        for i, token in enumerate(block):
            if token in self.target.end_tokens or (stopper is not None and stopper.push(token)):
                return i + 1, True
        return len(block), False

    def _step(self, tokens: list[int], stats: SpecStats, request: _Request) -> tuple[StepEvent, Origin, str, bool]:
        """One verify pass. Appends what it emits to `tokens`; returns (event, last token's origin, notice, ended)."""
        drafter = request.drafter
        busy_s, started = request.busy_s(), perf_counter()
        draft, report = Draft(), DraftReport()
        limit = min(self.target.n_ctx - len(tokens), self.target.caps.max_block - 1)  # a row needs a cell
        if request.max_tokens >= 0:
            limit = min(limit, request.max_tokens - stats.n_emitted - 1)  # a step emits one more than it accepts
        if limit:
            draft = drafter.propose(tokens, limit, request.params, request.choose).until(self.target.end_tokens)
            report = request.report()
        if len(draft.tokens) > limit:
            raise ValueError(f"{drafter.name} drafted {len(draft.tokens)} tokens, at most {limit} were asked for")
        drafted, n_context = perf_counter(), self.target.length
        rows = self.target.eval((tokens[-1], *draft.tokens), draft.parents)
        evaluated = perf_counter()
        laws = self._row_laws(
            rows, tokens, draft, request.params, self.target.end_tokens, request.choose, request.constraint
        )
        verdict = laws.settled(self._verify(draft, laws, request.choose, request.rule))
        path = verdict.path
        block = [*(draft.tokens[node] for node in path), verdict.next_token]
        n_seen, ended = self._n_seen(block, request.stopper)
        sampled = perf_counter()

        self.target.keep(len(tokens), path)
        # An end token is seen but not emitted.
        tokens.extend(token for token in block[:n_seen] if token not in self.target.end_tokens)
        logits = rows if "logits" in drafter.wants else None
        drafter.observe(Observation(tokens, draft, verdict, drafter.name, logits=logits, laws=laws))
        done = perf_counter()

        # The counters leave out drafted tokens behind the end of the answer.
        shown = draft.cut(path[n_seen - 1 : n_seen])
        event = StepEvent(
            step=stats.n_steps,
            drafted=shown.tokens,
            accepted=min(n_seen, len(path)),
            drafter=drafter.name,
            decisions=report.decisions,
            draft_s=drafted - started,
            eval_s=evaluated - drafted,
            sample_s=sampled - evaluated,
            kv_s=done - sampled,
            step_s=done - started,
            loop_s=max(done - started - (request.busy_s() - busy_s), 0.0),
            n_rows=len(rows),
            cost=request.cost(len(rows), n_context),
            parents=shown.parents,
            path=None if shown.parents is None else path[:n_seen],
            looked_up=shown.n_given,
        )
        stats.take(event, drafts=drafter.name != NoDrafter.name)
        origin: Origin = "correction" if event.rejected else "bonus" if draft.tokens else "target"
        return event, origin, report.notice, ended
