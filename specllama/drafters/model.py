"""A smaller model drafts a chain by sampling from its own law q, with the target's sampler settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specllama.distribution import Distribution
from specllama.errors import UsageError
from specllama.sampling import SamplingParams, law
from specllama.types import (
    Chooser,
    Decision,
    Draft,
    DraftPolicy,
    DraftReport,
    FloatArray,
    LanguageModel,
    Observation,
    common_prefix,
)

# A draft prefill longer than this waits until the target's first token is out: it must not delay it.
PREFILL_AT_ONCE = 32


class ConfidencePolicy:
    """Draft up to `n_max` tokens, and stop before a token whose law has no probability of at least `p_min`."""

    def __init__(self, n_max: int, p_min: float) -> None:
        self.n_max = n_max
        self.p_min = p_min

    def go_on(self, depth: int, confidence: float) -> bool:
        """Looks at the law only, never at the token drawn from it: dropping a drawn token would bias the answer."""
        return depth < self.n_max and confidence >= self.p_min

    def observe(self, seen: Observation) -> None:
        """Fixed limits learn nothing."""


class ModelDrafter:
    """Drafts from any `LanguageModel` that speaks the target's token ids.

    Invariant: outside `propose` the model's KV holds a prefix of the committed tokens without the pending one. After a
    fully accepted block it lacks the last drafted token, which was never evaluated; the next `propose` feeds it.
    """

    name = "draft-simple"
    wants: frozenset[str] = frozenset()

    def __init__(
        self,
        model: LanguageModel,
        *,
        n_max: int = 4,
        p_min: float = 0.0,
        temperature: float | None = None,
        vocab_size: int | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        """`temperature` None = the target's; `vocab_size` = the target's, ids at or above it are never drafted.

        `policy` None = `ConfidencePolicy(n_max, p_min)`; a policy of its own still stays within `n_max`.
        """
        if n_max < 0:
            raise UsageError(f"n_max is {n_max}, expected 0 or more drafted tokens")
        if not 0.0 <= p_min <= 1.0:
            raise UsageError(f"p_min is {p_min}, expected a probability from 0 to 1")
        self.model = model
        self.n_max = n_max
        self.temperature = temperature
        self.n_vocab = min(model.vocab_size, vocab_size or model.vocab_size)
        self.policy: DraftPolicy = policy or ConfidencePolicy(n_max, p_min)
        self._held: list[int] = []  # what the model's KV holds
        self._fresh = False  # no proposal yet for this answer
        self._decisions: list[Decision] = []
        self._notice = ""
        self._noticed: set[str] = set()

    @property
    def busy_s(self) -> float:
        """Seconds spent so far inside the model's own calls, where it counts them."""
        return float(getattr(self.model, "busy_s", 0.0))

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Forget what does not lead to `tokens`; the prefill itself waits for the first proposal."""
        self._agree_with(tokens)
        self._fresh = True
        self._noticed.clear()

    def _agree_with(self, tokens: Sequence[int]) -> None:
        """Keep of the KV what is a prefix of `tokens` without the pending one."""
        del self._held[self.model.length :]  # an interrupted feed got only so far
        n_agreed = min(common_prefix(self._held, tokens), len(tokens) - 1)
        if self.model.length > n_agreed:
            self.model.truncate(n_agreed)
        del self._held[n_agreed:]

    def _cannot(self, tokens: Sequence[int]) -> str:
        """Why nothing can be drafted after `tokens`, or '' where it can."""
        if len(tokens) > self.model.n_ctx:
            return f"the draft's context of {self.model.n_ctx} tokens is full: the answer goes on without drafts"
        if any(token >= self.model.vocab_size for token in tokens[len(self._held) :]):
            return "the text holds a token that the draft does not know: the answer goes on without drafts"
        return ""

    def _say(self, notice: str) -> None:
        """Tell each notice once an answer."""
        if notice not in self._noticed:
            self._noticed.add(notice)
            self._notice = notice

    def _eval(self, token: int) -> FloatArray:
        """Logits after `token`, over the ids that the target knows.  (n_vocab,)"""
        row: FloatArray = self.model.eval((token,))[0, : self.n_vocab]
        self._held.append(token)
        return row

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """A chain of at most min(limit, n_max) tokens with the law each was drawn from (None where greedy)."""
        self._decisions.clear()
        self._notice = ""
        fresh, self._fresh = self._fresh, False
        limit = min(limit, self.n_max)
        if limit <= 0:
            return Draft()
        self._agree_with(tokens)
        if notice := self._cannot(tokens):
            self._say(notice)
            return Draft()
        if fresh and len(tokens) - len(self._held) > PREFILL_AT_ONCE:
            return Draft()
        self._feed(tokens[len(self._held) : -1])
        if self.temperature is not None:
            params = replace(params, temperature=self.temperature)
        return self._draw(tokens, min(limit, self.model.n_ctx - len(tokens) + 1), params, choose)

    def _feed(self, tokens: Sequence[int]) -> None:
        """Prefill; an interrupted feed leaves a part, which `_agree_with` finds by the model's length."""
        if tokens:
            self._held.extend(tokens)
            self.model.feed(tokens)

    def _draw(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """Draw token by token. Every decision on the length comes before the draw; a drawn token is kept."""
        history = list(params.window(tokens))
        drawn: list[int] = []
        laws: list[Distribution] = []
        pending = tokens[-1]
        while len(drawn) < limit:
            q = law(self._eval(pending), history + drawn, params)
            confidence = q.peak()
            go_on = self.policy.go_on(len(drawn), confidence)
            self._decisions.append(Decision(len(drawn), confidence, go_on))
            if not go_on:
                break
            pending = choose.pick(q)
            drawn.append(pending)
            laws.append(q)
            if pending in self.model.end_tokens:
                break  # kept, but nothing can follow it
        return Draft(tuple(drawn), None if params.greedy else tuple(laws))

    def report(self) -> DraftReport:
        """Decisions and notice of the last proposal."""
        return DraftReport(tuple(self._decisions), self._notice)

    def observe(self, seen: Observation) -> None:
        """Drop what was rejected, and let the policy learn."""
        self._agree_with(seen.tokens)
        self.policy.observe(seen)

    def close(self) -> None:
        """The model belongs to whoever loaded it."""
