"""Prompt lookup: what followed the end of the text where it stood before. Needs no model and costs next to nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from specllama.base.errors import UsageError
from specllama.core.arrays import FloatArray
from specllama.core.sampling import SamplingParams
from specllama.core.types import (
    Chooser,
    Decision,
    Draft,
    DraftPolicy,
    DraftReport,
    LanguageModel,
    Observation,
    Planner,
    common_prefix,
)
from specllama.drafters.fixed_policy import ConfidencePolicy
from specllama.drafters.suffix import Continuation, LookupGuess, Match, SuffixIndex

# Tokens indexed within one step: 20 ms or so. A longer prompt is read over several steps.
INDEXED_AT_ONCE = 4096

# A draft may be so many times as long as the match it is taken from, whatever its confidence: a match of two tokens
# says little about the tenth behind it.
TOKENS_PER_MATCHED = 3

LENGTH_EDGES = (2, 3, 4, 6, 8, 12, 16)  # of matches that are counted together
N_PRIOR = 4.0  # samples that the first guess is worth
FADE = 0.99  # of older samples, a sample


def _evidence(continuation: Continuation, n_seen: int) -> int:
    """What speaks for a continuation: it followed 0 = sometimes, 1 = mostly, 2 = the only time, 3 = every time."""
    if continuation.alone:
        return 2 + (continuation.n_followed > 1)
    return int(2 * continuation.n_followed >= n_seen)


class _Record:
    """How often lookups were right, by length of the match and by evidence; learned from every token of the answers."""

    def __init__(self) -> None:
        # First guesses: a match of one token says little, a long one nearly all; n/(n+2) is a fair shape for it.
        by_length = [length / (length + 2.0) for length in (1, *LENGTH_EDGES)]
        by_evidence = (0.4, 0.8, 0.9, 1.0)
        self._prior = [[length * evidence for evidence in by_evidence] for length in by_length]
        self._n = [[0.0] * 4 for _ in by_length]
        self._n_right = [[0.0] * 4 for _ in by_length]

    def chance(self, length: int, evidence: int) -> float:
        """The chance that such a guess is right."""
        i = bisect_right(LENGTH_EDGES, length)
        n_right = self._n_right[i][evidence] + N_PRIOR * self._prior[i][evidence]
        return n_right / (self._n[i][evidence] + N_PRIOR)

    def learn(self, length: int, evidence: int, *, right: bool) -> None:
        """One guess more was compared with what was said."""
        i = bisect_right(LENGTH_EDGES, length)
        self._n[i][evidence] = self._n[i][evidence] * FADE + 1.0
        self._n_right[i][evidence] = self._n_right[i][evidence] * FADE + right


class LookupDrafter:
    """Drafts the most frequent continuation of the longest match, from prompt, conversation and answer.

    The draft is a point mass: chosen without chance, so `probs` is None. Every token of the answer tests what would
    have been proposed for it, whether or not it was, so that a confidence is a measured chance (of a drawn token to
    equal the guess, which is the acceptance of a point mass) and costs no failed draft to learn.
    """

    name = "lookup"
    wants: frozenset[str] = frozenset()
    models: tuple[LanguageModel, ...] = ()

    def __init__(self, *, n_max: int, p_min: float = 0.4, policy: DraftPolicy | None = None) -> None:
        """`policy` None = `ConfidencePolicy(n_max, p_min)`; a policy of its own still stays within `n_max`."""
        if n_max < 0:
            raise UsageError(f"n_max is {n_max}, expected 0 or more drafted tokens")
        self.n_max = n_max
        self.policy: DraftPolicy = policy or ConfidencePolicy(n_max, p_min)
        self._planner = self.policy if isinstance(self.policy, Planner) else None
        self._index = SuffixIndex()
        self._text: list[int] = []  # what is indexed
        self._n_prompt = 0  # of the present answer; the tokens behind it are the target's own words
        self._record = _Record()
        self._decisions: list[Decision] = []

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Keep the index where `tokens` extend what it holds, else begin it anew: what was unsaid must not help."""
        if common_prefix(self._text, tokens) < len(self._text):
            self._index, self._text = SuffixIndex(), []
        self._n_prompt = len(tokens)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Index what is new in `tokens`; False while there is more of it than one step may read."""
        for token in tokens[len(self._text) : len(self._text) + INDEXED_AT_ONCE]:
            if len(self._text) >= self._n_prompt:
                self._learn(token)
            self._index.append(token)
            self._text.append(token)
        return len(self._text) == len(tokens)

    def _learn(self, token: int) -> None:
        """Compare what would have been proposed with what was said."""
        match = self._index.match()
        guessed = self._index.favourite(match)
        if guessed is not None:
            evidence = _evidence(guessed, self._index.n_seen(match) - 1)  # its last place, the end, has no successor
            self._record.learn(match.length, evidence, right=guessed.token == token)

    def offer(self, tokens: Sequence[int], limit: int) -> Iterator[LookupGuess]:
        """At most `limit` guesses of what follows `tokens`, each given that those before it are right."""
        if self.follow(tokens):
            yield from self._guesses(limit)

    def _guesses(self, limit: int) -> Iterator[LookupGuess]:
        """`offer` behind the text that is indexed."""
        match = self._index.match()
        at_end = True
        for _ in range(min(limit, TOKENS_PER_MATCHED * match.length)):
            match = self._index.continued(match)
            guess = self._index.favourite(match)
            if guess is None:
                return
            evidence = _evidence(guess, self._index.n_seen(match) - at_end)
            yield LookupGuess(guess.token, self._record.chance(match.length, evidence))
            match = self._index.advance(match, guess.token)
            at_end = False

    def alternatives(self, tokens: Sequence[int], n_most: int) -> list[LookupGuess]:
        """The `n_most` best guesses for the one token that follows, the longest match's first; for drafting trees."""
        found: dict[int, LookupGuess] = {}
        match = self._index.match() if self.follow(tokens) else Match(0, 0)
        while match.length and len(found) < n_most:
            ranked = sorted(self._index.continuations(match), key=lambda each: (-each.n_followed, each.token))
            for each in (other for other in ranked if other.token not in found):
                evidence = _evidence(each, self._index.n_seen(match) - 1)
                found[each.token] = LookupGuess(each.token, self._record.chance(match.length, evidence))
            match = self._index.shorter(match)
        return list(found.values())[:n_most]

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most min(limit, n_max) tokens, as point masses."""
        self._decisions.clear()
        limit = min(limit, self.n_max)
        if self._planner is not None:
            guesses = list(self.offer(tokens, limit))
            plan = self._planner.plan(limit, offer=[guess.confidence for guess in guesses])
            self._decisions.append(Decision(0, 0.0, plan.n_given > 0, plan))
            return Draft(tuple(guess.token for guess in guesses[: plan.n_given]))
        drafted: list[int] = []
        for depth, guess in enumerate(self.offer(tokens, limit)):
            go_on = self.policy.go_on(depth, guess.confidence)
            self._decisions.append(Decision(depth, guess.confidence, go_on))
            if not go_on:
                break
            drafted.append(guess.token)
        return Draft(tuple(drafted))

    def report(self) -> DraftReport:
        """Decisions of the last proposal."""
        return DraftReport(tuple(self._decisions))

    def observe(self, seen: Observation) -> None:
        """Let the policy learn. The index follows with the next proposal."""
        self.policy.observe(seen)

    def close(self) -> None:
        """Nothing to free."""
