"""A smaller model as a drafter: what all such drafters share, and the one that samples a chain from its law q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from specllama.base.errors import AllForbidden, NumericsError, UsageError
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.constraint import Allowed, AllowedAfter, among
from specllama.core.distribution import Distribution
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.noise import settled_by
from specllama.core.sampling import SamplingParams, law, peak_share
from specllama.core.types import (
    Chooser,
    Decision,
    Draft,
    DraftPlan,
    DraftPolicy,
    DraftReport,
    LanguageModel,
    Narrow,
    Observation,
    Planner,
    Spelling,
)
from specllama.drafters.controller import NOTHING, Controller
from specllama.drafters.length import UNTUNED, ConfidencePolicy

# The first step of an answer drafts only if the draft model has fewer tokens than this to read: the first token waits
# for it. A drafter made by hand may let it wait for a few; the program's answers never wait, see `DraftSettings`.
PREFILL_AT_ONCE, FIRST_TOKEN_FIRST = 12, 0

FORBIDDEN = "the logit bias forbids every token that the draft knows: the answer goes on without drafts"
BROKEN = "the draft's logits cannot be turned into probabilities: these steps have no drafts"

PlanFor: TypeAlias = Callable[[int | None], DraftPlan]  # the plan of a step, given `Planner.plan`'s `lag`
Learn: TypeAlias = Callable[[float, float], None]  # `Planner.learn`

# Before a probe the model must hold so many tokens as context: without context every model guesses badly.
PROBE_CONTEXT = 8

# Without a planner, offered tokens of at least this confidence are taken: that of a fair draft model.
OFFER_TAKEN_FROM = 0.7


def confidence_of(row: FloatArray, q: Distribution, *, greedy: bool) -> float:
    """The largest mass of q; of a greedy draft, whose q is a point, the largest mass at temperature 1.  row: (V,)"""
    return peak_share(row) if greedy else q.peak()


class ModelReader:
    """What every drafter with a draft model does with it: follow the text, make q of a row, probe.

    It takes any `LanguageModel` with the target's token ids. Invariant: outside `propose` the model's KV holds a prefix
    of the committed tokens without the pending one. After a fully accepted block the last drafted token is missing,
    because it was not evaluated; the next evaluation feeds it.
    """

    wants: frozenset[str] = frozenset()

    def __init__(
        self,
        model: LanguageModel,
        *,
        temperature: float | None = None,
        vocab_size: int | None = None,
        n_at_once: int = PREFILL_AT_ONCE,
    ) -> None:
        """`temperature` None = the target's; `vocab_size`: the target's, ids at or above it are never drafted.

        The first step of an answer drafts only if the model has fewer than `n_at_once` tokens to read; 0 = the first
        token never waits for a draft.
        """
        self.model = model
        self.models = (model,)
        self.temperature = temperature
        self.n_vocab = min(model.vocab_size, vocab_size or model.vocab_size)
        self._kv = KeptPrefix.of(model)
        self._narrow = model if isinstance(model, Narrow) else None
        # Not `types.room_after`: at every step its isinstance would take as long as the sampling.
        self._spelling = model if isinstance(model, Spelling) else None
        ids = None if self._narrow is None else self._narrow.known
        self._ids = None if ids is None else ids[: ids.searchsorted(self.n_vocab)]  # of a row's columns; None = all
        self._line: object = None  # marks the text of this answer, which only grows
        self._n_readable = 0  # tokens of it that were found in the model's vocabulary
        self._as_own: tuple[SamplingParams, SamplingParams] | None = None  # argument and result of the last `_own`
        self._n_at_once = n_at_once
        # Of the last committed tokens: p, and what the format of the answer allowed in their places.
        self._said: list[tuple[float, Allowed | None]] = []
        self._n_text = 0  # tokens of the text up to the last of them
        self._allowed: AllowedAfter | None = None  # in this answer; None = everything
        # By the drafted path to it: confidence and law of a token that was not drawn.
        self._undrawn: dict[tuple[int, ...], tuple[float, Distribution]] = {}
        self._settled: Callable[[Distribution, int], Distribution] | None = None  # see `noise.settled_by`
        self._fresh = False  # no proposal yet for this answer
        self._barred = False  # a bias forbids every token of the draft in this answer
        self._decisions: list[Decision] = []
        self._notice = ""
        self._noticed: set[str] = set()

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Cut the KV to a prefix of `tokens`; the first proposal does the prefill."""
        self._line, self._n_readable = object(), 0
        self._kv.rewind(tokens, self._line)
        self._said.clear()
        self._undrawn.clear()
        self._fresh = True
        self._barred = False
        self._noticed.clear()
        self._allowed = None

    def constrain(self, allowed: AllowedAfter) -> None:
        self._allowed = allowed

    def _room_after(self, tokens: Sequence[int]) -> int:
        if self._spelling is not None:
            return self._spelling.room_after(tokens)
        return self.model.n_ctx - self.model.length - len(tokens)

    def _cannot(self, tokens: Sequence[int]) -> str:
        """Why nothing can be drafted after `tokens`; '' = something can."""
        if self._barred:
            return FORBIDDEN
        n_held = self.model.length
        # Without copying what is not read: it grows long while the model does not draft.
        spelling = self._spelling
        if (self.model.n_ctx - len(tokens) if spelling is None else spelling.room_after(tokens[n_held:])) < 0:
            return f"the draft's context of {self.model.n_ctx} tokens is full: the answer goes on without drafts"
        if max(tokens[max(n_held, self._n_readable) :], default=0) >= self.model.vocab_size:
            return "the text holds a token that the draft does not know: the answer goes on without drafts"
        self._n_readable = len(tokens)
        return ""

    def _say(self, notice: str) -> None:
        """Report each notice once per answer."""
        if notice not in self._noticed:
            self._noticed.add(notice)
            self._notice = notice

    def _eval(self, tokens: Sequence[int]) -> FloatArray:
        """Logits after each of `tokens`, over the ids in both vocabularies.  (len(tokens), n)"""
        return self._in_both(self._kv.eval(tokens, self._narrow))

    def _in_both(self, rows: FloatArray) -> FloatArray:
        columns: FloatArray = rows[:, : self.n_vocab if self._ids is None else self._ids.size]
        return columns

    def _cells(self, row: FloatArray, path: Sequence[int]) -> tuple[FloatArray, IntArray | None]:
        """The cells of a row, after the drafted `path`, whose tokens are allowed there, and their ids.  row: (n,)"""
        return (row, self._ids) if self._allowed is None else among(row, self._allowed(path), self._ids)

    def _forced(self, path: Sequence[int]) -> Distribution | None:
        """A point mass on the only token that may follow `path`, which needs no evaluation; None = there are others."""
        token = None if self._allowed is None else self._allowed(path).only
        if token is None:
            return None
        known = token < self.n_vocab if self._ids is None else token in Allowed(self._ids)
        return Distribution.point(token) if known else None

    def _law(
        self, row: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None
    ) -> Distribution | None:
        """q of a row; None if the row gives no distribution: the answer can go on without a draft.

        row: (n,), as `ids` are, from `_cells`.
        """
        if not row.size:
            return None
        try:
            return law(row, history, params, ids)
        except AllForbidden:
            if self._allowed is None:  # a mask changes from step to step, a bias does not
                self._barred = True
                self._say(FORBIDDEN)
        except NumericsError:
            self._say(BROKEN)
        return None

    def _drawn_from(self, q: Distribution, position: int) -> Distribution:
        """What a token at this position of the text is drawn from: q, or with shared noise the point it settles on."""
        return q if self._settled is None else self._settled(q, position)

    def _own(self, params: SamplingParams) -> SamplingParams:
        """The sampler settings of the draft."""
        if self.temperature is None or self.temperature == params.temperature:
            return params
        if self._as_own is None or self._as_own[0] is not params:  # `replace` checks all settings again
            self._as_own = (params, replace(params, temperature=self.temperature))
        return self._as_own[1]

    def _start_step(self, choose: Chooser) -> None:
        self._settled = settled_by(choose)
        self._decisions.clear()
        self._notice = ""

    def _lag(self, tokens: Sequence[int]) -> int | None:
        """Tokens that the model has to read before the pending one; None = it cannot draft now."""
        fresh, self._fresh = self._fresh, False
        self._kv.rewind(tokens, self._line)
        if notice := self._cannot(tokens):
            self._say(notice)
            return None
        lag = len(tokens) - 1 - self.model.length
        return None if fresh and lag >= self._n_at_once else lag

    def _planned(
        self, plan_for: PlanFor, learn: Learn, tokens: Sequence[int], lag: int | None, params: SamplingParams
    ) -> DraftPlan:
        """The answer of a planner. If it wants a probe, it is asked again after that."""
        plan = plan_for(lag)
        self._decisions.append(Decision(0, 0.0, plan.n_given + plan.n_drawn > 0, plan))
        if plan.probe:
            self._probe(learn, tokens, plan.probe, self._own(params))
            plan = plan_for(self._lag(tokens))
            self._decisions.append(Decision(0, 0.0, plan.n_given + plan.n_drawn > 0, plan))
        return plan

    def _probe(self, learn: Learn, tokens: Sequence[int], n_most: int, params: SamplingParams) -> None:
        """Evaluate the end of the committed text without its last token, and learn what would have been accepted.

        `tokens`: the committed text, then tokens that a format forces, on which no draft is judged.
        With y drawn from p, the mean of min(1, q(y)/p(y)) is the acceptance of a draft, sum of min(p, q). A model that
        lags by more than `n_most` tokens reads only the last `n_most`, as if they followed what it holds: an estimate
        of bounded cost. `rewind` drops them afterwards, like everything that is not committed.
        """
        tokens = tokens[: self._n_text]
        n_held = self.model.length
        behind = tokens[max(n_held, len(tokens) - 1 - n_most) : -1]
        n_rows = min(len(behind) - max(0, PROBE_CONTEXT - n_held), len(self._said), self.model.caps.max_block)
        if n_rows <= 0:
            return
        self._kv.feed(behind[:-n_rows])
        for i, row in enumerate(self._eval(behind[-n_rows:]), start=-n_rows):
            p, allowed = self._said[i]
            row, ids = (row, self._ids) if allowed is None else among(row, allowed, self._ids)
            q = self._law(row, params.window(tokens, len(tokens) + i), params, ids)
            if q is None:
                return
            acceptance = min(1.0, self._drawn_from(q, len(tokens) + i).prob(tokens[i]) / p)
            learn(confidence_of(row, q, greedy=params.greedy), acceptance)

    def _follow(self, seen: Observation, learn: Learn | None) -> None:
        """Cut the KV to what was committed. With `learn`, keep p of the new tokens for the next probe, and learn from a
        token that was reached but not drawn.
        """
        self._kv.rewind(seen.tokens, self._line)
        if learn is not None and (laws := seen.laws) is not None:
            path = seen.verdict.path
            rows, drafted = (0, *(node + 1 for node in path)), tuple(seen.draft.tokens[node] for node in path)
            block = (*drafted, seen.verdict.next_token)
            if self._n_text != len(seen.tokens) - len(block):  # an end, or forced tokens, lie between
                self._said.clear()
            self._n_text = len(seen.tokens)
            for i, (row, token) in enumerate(zip(rows, block, strict=True)):
                self._said.append((laws[row].prob(token), self._allowed and self._allowed(drafted[:i])))
            del self._said[: -self.model.caps.max_block]
            if (undrawn := self._undrawn.get(drafted)) is not None:
                confidence, q = undrawn
                learn(confidence, laws[rows[-1]].overlap(q))
        self._undrawn.clear()  # the last step of an answer may have no proposal

    def report(self) -> DraftReport:
        return DraftReport(tuple(self._decisions), self._notice)

    def close(self) -> None:
        """The caller loaded the model and closes it."""


class ModelDrafter(ModelReader):
    """Drafts a chain. A greedy draft has no laws: its tokens are chosen without chance."""

    name = "draft-simple"

    def __init__(
        self,
        model: LanguageModel,
        *,
        n_max: int = UNTUNED,
        p_min: float = 0.0,
        temperature: float | None = None,
        vocab_size: int | None = None,
        policy: DraftPolicy | None = None,
        n_at_once: int = PREFILL_AT_ONCE,
    ) -> None:
        """The other arguments are those of `ModelReader`.

        `policy` None = `ConfidencePolicy(n_max, p_min)`; any other is limited to `n_max` as well. A `Planner` also
        decides whether the model is evaluated at all.
        """
        if n_max < 0:
            raise UsageError(f"n_max is {n_max}, expected 0 or more drafted tokens")
        if not 0.0 <= p_min <= 1.0:
            raise UsageError(f"p_min is {p_min}, expected a probability from 0 to 1")
        super().__init__(model, temperature=temperature, vocab_size=vocab_size, n_at_once=n_at_once)
        self.n_max = n_max
        self.policy: DraftPolicy = policy or ConfidencePolicy(n_max, p_min)
        self._planner = self.policy if isinstance(self.policy, Planner) else None
        self._controller = policy if isinstance(policy, Controller) else None
        self._rests = False  # in this step: the model is neither read nor fed, and keeps no p for a probe
        # A pass over the whole row for every drafted token is wasted if the policy ignores the confidence.
        self._asks_confidence = not (isinstance(self.policy, ConfidencePolicy) and self.policy.p_min <= 0.0)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """A chain of at most min(limit, n_max) tokens with the law of each draw (None = greedy)."""
        plan = self.plan(tokens, limit, params, choose)
        drawn, laws = self.draw(tokens, (), plan, params, choose)
        return Draft(tuple(drawn), tuple(laws) or None)

    def plan(
        self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser, offer: Sequence[float] = ()
    ) -> DraftPlan:
        """Begin a step: what to draft after `tokens`. May probe the model. `offer`: see `Planner.plan`."""
        self._start_step(choose)
        limit = min(limit, self.n_max)
        lag = self._lag(tokens) if limit > 0 else None
        if self._planner is None:
            n_given = self._n_taken(offer[:limit])
            return DraftPlan(n_given, 0 if lag is None else limit - n_given)
        ask = self._planner.plan
        return self._planned(
            lambda lag: ask(limit, offer=offer, lag=lag, depth=len(tokens)), self._planner.learn, tokens, lag, params
        )

    def rests(self, tokens: Sequence[int], limit: int) -> bool:
        """Begin a step without offers and without the model, if nothing of it can pay; else False."""
        controller = self._controller
        self._rests = controller is not None and controller.rests(min(limit, self.n_max), len(tokens))
        if self._rests:
            self._fresh, self._notice = False, ""
            self._decisions[:] = (NOTHING,)
        return self._rests

    def _n_taken(self, offer: Sequence[float]) -> int:
        """How many offered tokens to take without a planner."""
        for depth, confidence in enumerate(offer):
            if confidence < OFFER_TAKEN_FROM or not self._may_draw(depth, confidence):
                return depth
        return len(offer)

    def draw(
        self, tokens: Sequence[int], given: Sequence[int], plan: DraftPlan, params: SamplingParams, choose: Chooser
    ) -> tuple[list[int], list[Distribution]]:
        """What the model draws after `tokens` and the drafted `given`, within `plan`.

        Returns the tokens and the law of each draw; no laws if the draft is greedy. Every decision on the length comes
        before the draw; a drawn token is kept.
        """
        if plan.n_drawn <= 0:
            return [], []
        unread = [*tokens[self.model.length :], *given]  # the last one is evaluated, those before it are fed
        # The last drawn token is not evaluated and needs no cell.
        limit = min(plan.n_drawn, self._room_after(unread) + 1)
        if limit <= 0 or any(token in self.model.end_tokens for token in given):
            return [], []
        params = self._own(params)
        history = [*params.window(tokens), *given]
        drawn: list[int] = []
        laws: list[Distribution] = []
        while len(drawn) < limit:
            path = (*given, *drawn)
            q, confidence = self._forced(path), 1.0
            if q is None:
                if drawn and not self._may_look(len(path)):
                    break
                self._kv.feed(unread[:-1])
                row, ids = self._cells(self._eval(unread[-1:])[0], path)
                unread.clear()
                q = self._law(row, history + drawn, params, ids)
                if q is None:
                    break
                confidence = confidence_of(row, q, greedy=params.greedy and self._asks_confidence)
            go_on = self._may_draw(len(path), confidence)
            q = self._drawn_from(q, len(tokens) + len(path))
            if not go_on:
                self._undrawn[path] = (confidence, q)
                break
            token = choose.pick(q)
            drawn.append(token)
            unread.append(token)
            laws.append(q)
            if token in self.model.end_tokens:
                break  # nothing can follow it
        return drawn, [] if params.greedy else laws

    def _may_look(self, depth: int) -> bool:
        """May the model be evaluated for token `depth`? Only a planner refuses; that is recorded."""
        if self._planner is None or self._planner.look(depth):
            return True
        self._decisions.append(Decision(depth, 0.0, go_on=False))
        return False

    def _may_draw(self, depth: int, confidence: float) -> bool:
        go_on = self.policy.go_on(depth, confidence)
        self._decisions.append(Decision(depth, confidence, go_on))
        return go_on

    def observe(self, seen: Observation) -> None:
        self.policy.observe(seen)
        if self._rests:
            self._rests = False
            return
        self._follow(seen, None if self._planner is None else self._planner.learn)
