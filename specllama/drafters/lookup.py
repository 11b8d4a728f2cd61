"""Prompt lookup: proposes what followed an earlier occurrence of the text's end. Needs no model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from specllama.base.errors import UsageError
from specllama.core.arrays import FloatArray
from specllama.core.constraint import AllowedAfter
from specllama.core.sampling import SamplingParams
from specllama.core.types import (
    Chooser,
    Decision,
    Draft,
    DraftPolicy,
    DraftReport,
    Observation,
    Planner,
    common_prefix,
)
from specllama.drafters.controller import NOTHING, Controller
from specllama.drafters.length import ConfidencePolicy
from specllama.drafters.suffix import LookupGuess, Match, SuffixIndex, evidence

# Tokens indexed within one step, about 20 ms. A longer prompt is read over several steps.
INDEXED_AT_ONCE = 4096

# While no match can pay, the index waits until so many tokens are new. After a pass of the model a single token takes
# about 60 us, most of it for memory that the pass has displaced.
MOST_WAITING = 16

# A draft is at most so many times as long as its match, even at high confidence: a match of two tokens says little
# about the tenth token after it.
TOKENS_PER_MATCHED = 3

# Where the most frequent continuation is wrong, another with a share of 0.5 of the rest was right in 0.15 of 451 places
# of 64 answers of the default pair; with a share of 0.29, in 0.10.
OTHERS = 0.3

LOOKUP_P_MIN = 0.4
LENGTH_EDGES = (2, 3, 4, 6, 8, 12, 16)  # matches between two edges are counted together
N_PRIOR = 4.0  # samples that the prior counts as
FADE = 0.99  # factor on the weight of older samples, per sample


class _Record:
    """How often lookups were right, by length of the match and by evidence; every token of an answer is a sample."""

    def __init__(self) -> None:
        # Prior: a match of one token says little, a long one nearly all; n/(n+2) has that shape.
        by_length = [length / (length + 2.0) for length in (1, *LENGTH_EDGES)]
        by_evidence = (0.25, 0.4, 1.0, 1.1)  # measured: 64 answers of the default pair
        self._prior = [[length * evidence for evidence in by_evidence] for length in by_length]
        self._n = [[0.0] * 4 for _ in by_length]
        self._n_right = [[0.0] * 4 for _ in by_length]

    def chance(self, length: int, evidence: int) -> float:
        i = bisect_right(LENGTH_EDGES, length)
        n_right = self._n_right[i][evidence] + N_PRIOR * self._prior[i][evidence]
        return n_right / (self._n[i][evidence] + N_PRIOR)

    def learn(self, length: int, evidence: int, *, right: bool) -> None:
        i = bisect_right(LENGTH_EDGES, length)
        self._n[i][evidence] = self._n[i][evidence] * FADE + 1.0
        self._n_right[i][evidence] = self._n_right[i][evidence] * FADE + right


class LookupDrafter:
    """Drafts the most frequent continuation of the longest match, from prompt, conversation and answer.

    The draft is chosen without chance, a point mass: `probs` is None. Every token of the answer is compared with the
    guess for it, proposed or not. So the confidence is the measured chance that a drawn token equals the guess: the
    acceptance of a point mass, learned without failed drafts.
    """

    name = "lookup"
    wants: frozenset[str] = frozenset()

    def __init__(self, *, n_max: int, p_min: float = LOOKUP_P_MIN, policy: DraftPolicy | None = None) -> None:
        """`policy` None = `ConfidencePolicy(n_max, p_min)`; any other is limited to `n_max` as well."""
        if n_max < 0:
            raise UsageError(f"n_max is {n_max}, expected 0 or more drafted tokens")
        self.n_max = n_max
        self.policy: DraftPolicy = policy or ConfidencePolicy(n_max, p_min)
        self._planner = self.policy if isinstance(self.policy, Planner) else None
        self._controller = policy if isinstance(policy, Controller) else None
        self._index = SuffixIndex()
        self._text: list[int] = []  # the indexed tokens
        self._n_prompt = 0  # of the present answer; the tokens behind it come from the target
        self._record = _Record()
        self._decisions: list[Decision] = []
        self._allowed: AllowedAfter | None = None  # in this answer; None = everything

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Keep the index if `tokens` extend the indexed text, else start anew: removed text must not count."""
        if common_prefix(self._text, tokens) < len(self._text):
            self._index, self._text = SuffixIndex(), []
        self._n_prompt, self._allowed = len(tokens), None

    def constrain(self, allowed: AllowedAfter) -> None:
        self._allowed = allowed

    def waits(self, tokens: Sequence[int]) -> bool:
        """True if no lookup after `tokens` can pay, by a glance at the last two: the index follows later."""
        n, controller = len(self._text), self._controller
        if controller is None or not controller.needs_pair or not 0 < len(tokens) - n <= MOST_WAITING or not n:
            return False
        before, last = tokens[-2:]
        return not self._index.has_pair(before, last) and last not in tokens[n:-1]

    def follow(self, tokens: Sequence[int]) -> bool:
        """Index the new part of `tokens`; False if it is more than one step may read."""
        for token in tokens[len(self._text) : len(self._text) + INDEXED_AT_ONCE]:
            if len(self._text) >= self._n_prompt:
                self._learn(token)
            self._index.append(token)
            self._text.append(token)
        return len(self._text) == len(tokens)

    def _learn(self, token: int) -> None:
        """Compare the guess for this place with the token that was said."""
        match = self._index.match()
        guessed = self._index.favourite(match)
        if guessed is not None:
            n_seen = self._index.n_seen(match) - 1  # the place at the end has no successor
            found = evidence(guessed.n_followed, n_seen, alone=guessed.alone)
            self._record.learn(match.length, found, right=guessed.token == token)

    def offer(self, tokens: Sequence[int], limit: int, max_leaves: int = 1) -> Iterator[LookupGuess]:
        """At most `limit` guesses of what follows `tokens`: a chain, or a trie of `max_leaves` leaves.

        Each is on condition that the guess it follows is right. The likeliest come first, a guess before those that
        follow it, and siblings by frequency.
        """
        guesses = self._chain(tokens, limit) if max_leaves == 1 else self._trie(tokens, limit, max_leaves)
        allowed = self._allowed
        if allowed is None:
            yield from guesses
            return
        kept: dict[int, tuple[int, tuple[int, ...]]] = {-1: (-1, ())}  # by number: the new number and the path
        for i, guess in enumerate(guesses):
            if guess.parent in kept:
                parent, path = kept[guess.parent]
                if guess.token in allowed(path):
                    kept[i] = (len(kept) - 1, (*path, guess.token))
                    yield guess._replace(parent=parent)

    def _chain(self, tokens: Sequence[int], limit: int) -> Iterator[LookupGuess]:
        """`_trie` with one leaf, without its heap: every step asks for it."""
        if not self.follow(tokens):
            return
        n_most = min(limit, TOKENS_PER_MATCHED * self._index.match().length)
        for depth, seen in enumerate(self._index.chain(n_most)):
            yield LookupGuess(seen.token, self._record.chance(seen.length, seen.evidence), depth - 1)

    def _trie(self, tokens: Sequence[int], limit: int, max_leaves: int) -> Iterator[LookupGuess]:
        """`offer`, of anything that followed earlier."""
        if not self.follow(tokens):
            return
        match = self._index.match()
        deepest, n_leaves, numbers = TOKENS_PER_MATCHED * match.length, 1, count()
        # A heap of the next sibling of every family: -chance to be reached and right, a number, the chance to be
        # reached, depth, rank, guesses and the matches with them.
        waiting: list[tuple[float, int, float, int, int, list[tuple[LookupGuess, Match]]]] = []

        def wait(reach: float, depth: int, rank: int, family: list[tuple[LookupGuess, Match]]) -> None:
            if rank < len(family) and depth < deepest:
                heappush(waiting, (-reach * family[rank][0].confidence, next(numbers), reach, depth, rank, family))

        wait(1.0, 0, 0, self._family(match, -1, max_leaves, at_end=True))
        n_guesses = 0
        while waiting and n_guesses < limit:
            _, _, reach, depth, rank, family = heappop(waiting)
            if rank and n_leaves == max_leaves:
                continue
            n_leaves += rank > 0
            guess, after = family[rank]
            yield guess
            wait(reach * (1.0 - guess.confidence), depth, rank + 1, family)
            n_guesses += 1
            if n_guesses < limit:
                below = self._family(after, n_guesses - 1, max_leaves, at_end=False)
                wait(reach * guess.confidence, depth + 1, 0, below)

    def _family(self, match: Match, parent: int, width: int, *, at_end: bool) -> list[tuple[LookupGuess, Match]]:
        """The guesses of what follows `match`, the most frequent first, with the matches that they lead to.

        The chance of the first is that of the record. That of each other one is `OTHERS` of its share of the places
        where none before it followed, and of one place more: for a token that never followed.
        """
        match = self._index.continued(match)
        favourite = self._index.favourite(match)
        if favourite is None:
            return []
        n_seen = self._index.n_seen(match) - at_end  # the place at the end has no successor
        found = evidence(favourite.n_followed, n_seen, alone=favourite.alone)
        chances = [(favourite.token, self._record.chance(match.length, found))]
        if width > 1 and not favourite.alone:
            n_left = n_seen - favourite.n_followed + 1
            for other in self._index.others(match, width - 1):
                chances.append((other.token, OTHERS * other.n_followed / n_left))
                n_left -= other.n_followed
        return [(LookupGuess(token, chance, parent), self._index.advance(match, token)) for token, chance in chances]

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most min(limit, n_max) tokens, as point masses."""
        self._decisions.clear()
        drafted = self._drafted(tokens, limit)
        return Draft(tuple(drafted), n_given=len(drafted))

    def _drafted(self, tokens: Sequence[int], limit: int) -> list[int]:
        limit = min(limit, self.n_max)
        if self._planner is not None:
            if self.waits(tokens):
                self._decisions.append(NOTHING)
                return []
            guesses = list(self.offer(tokens, limit))
            if self._controller is not None and self._controller.needs_pair and self._index.match().length < 2:
                guesses.clear()
            plan = self._planner.plan(limit, offer=[guess.confidence for guess in guesses], depth=len(tokens))
            self._decisions.append(Decision(0, 0.0, plan.n_given > 0, plan))
            return [guess.token for guess in guesses[: plan.n_given]]
        drafted: list[int] = []
        for depth, guess in enumerate(self.offer(tokens, limit)):
            go_on = self.policy.go_on(depth, guess.confidence)
            self._decisions.append(Decision(depth, guess.confidence, go_on))
            if not go_on:
                break
            drafted.append(guess.token)
        return drafted

    def report(self) -> DraftReport:
        return DraftReport(tuple(self._decisions))

    def observe(self, seen: Observation) -> None:
        self.policy.observe(seen)  # the index follows with the next proposal

    def close(self) -> None:
        """Nothing to free."""
