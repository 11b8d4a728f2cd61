"""A suffix automaton over a growing token list: where the end of the text occurred before, and what followed."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

# Occurrences are counted for so many contexts of a token, the longest first. A text has about ten; only a text that
# repeats itself endlessly has more, and there the short ones do not matter.
COUNTED_CONTEXTS = 24

ROOT = 0
NOWHERE = -1


class Match(NamedTuple):
    """The longest end of the text that occurred before; `length` 0 = none. Valid until the next `append`."""

    state: int
    length: int


class Continuation(NamedTuple):
    """A token that followed a match."""

    token: int
    n_followed: int  # times
    alone: bool  # no other token ever followed


class Favourite(NamedTuple):
    """A token that followed a match, the length of the match, and the `evidence` for the token."""

    token: int
    length: int
    evidence: int


def evidence(n_followed: int, n_seen: int, *, alone: bool) -> int:
    """How often a token followed: 0 = sometimes, 1 = mostly, 2 = the only time, 3 = every time of several."""
    if alone:
        return 2 + (n_followed > 1)
    return int(2 * n_followed >= n_seen)


class LookupGuess(NamedTuple):
    """A token that a lookup proposes, and the chance that it is right if those before it are.

    In a trie it follows guess number `parent` (-1 = the text), and earlier siblings are wrong.
    """

    token: int
    confidence: float
    parent: int = -1


class SuffixIndex:
    """Every substring of the text, in amortised constant time and space per token.

    A state stands for the substrings that end at the same places; `link` leads to the longest shorter one that also
    ends elsewhere. Source: Blumer et al., Theoretical Computer Science 40 (1985). In addition, each state counts its
    occurrences and knows the token that followed it most often, the latest among equals.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [NOWHERE]
        self._length = [0]  # of the longest substring of the state
        self._n_seen = [0]
        self._favourite = [NOWHERE]  # the token that followed most often
        self._last = ROOT  # the state of the whole text

    def append(self, token: int) -> None:
        before = self._last
        self._last = self._add_state({}, self._length[before] + 1, NOWHERE, 0)
        state = before
        while state != NOWHERE and token not in self._next[state]:
            self._next[state][token] = self._last
            state = self._link[state]
        self._link[self._last] = ROOT if state == NOWHERE else self._split(state, token)
        self._count(before, token)

    def _add_state(self, following: dict[int, int], length: int, favourite: int, n_seen: int) -> int:
        """A new state; the caller sets its link."""
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._n_seen.append(n_seen)
        self._favourite.append(favourite)
        return len(self._next) - 1

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the substrings `state` + `token`, separated from longer ones that share a state."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        part = self._add_state(dict(self._next[target]), length, self._favourite[target], self._n_seen[target])
        self._link[part] = self._link[target]
        self._link[target] = part
        while state != NOWHERE and self._next[state].get(token) == target:
            self._next[state][token] = part
            state = self._link[state]
        return part

    def _count(self, state: int, token: int) -> None:
        """Count `token`, which follows the text that ended in `state`, in all its contexts."""
        following, n_seen, favourites, links = self._next, self._n_seen, self._favourite, self._link
        counted = NOWHERE
        for _ in range(COUNTED_CONTEXTS):
            target = following[state][token]
            if target != counted:  # several contexts may lead to one state, which occurred only once more
                n_seen[target] += 1
                counted = target
            favourite = favourites[state]
            if favourite == NOWHERE or n_seen[target] >= n_seen[following[state][favourite]]:
                favourites[state] = token
            state = links[state]
            if state == NOWHERE:
                break

    def has_pair(self, first: int, second: int) -> bool:
        """True if the text holds the two tokens one after the other."""
        state = self._next[ROOT].get(first)
        return state is not None and second in self._next[state]

    def chain(self, n: int) -> Iterator[Favourite]:
        """What followed `continued` of the longest match most often, then what followed that, ...: at most `n` tokens.

        The same as by `favourite` and `advance`, in one loop: it runs at every step.
        """
        state, length = self.match()
        for depth in range(n):
            while length and self._favourite[state] == NOWHERE:
                state = max(self._link[state], ROOT)
                length = self._length[state]
            token = self._favourite[state]
            if token == NOWHERE or not length:
                return
            following, n_seen = self._next[state], self._n_seen[state] - (depth == 0)  # the end has no successor
            state = following[token]
            yield Favourite(token, length, evidence(self._n_seen[state], n_seen, alone=len(following) == 1))
            length += 1

    def match(self) -> Match:
        """The longest end of the text that also occurs earlier."""
        link = max(self._link[self._last], ROOT)
        return Match(link, self._length[link])

    def shorter(self, match: Match) -> Match:
        """The longest end of `match` that occurs at more places than it."""
        link = max(self._link[match.state], ROOT)
        return Match(link, self._length[link])

    def continued(self, match: Match) -> Match:
        """The longest end of `match`, or `match` itself, that was followed by a token."""
        while match.length and self._favourite[match.state] == NOWHERE:
            match = self.shorter(match)
        return match

    def favourite(self, match: Match) -> Continuation | None:
        """The token that followed most often, the latest among equals; None if none did."""
        token = self._favourite[match.state]
        if token == NOWHERE or not match.length:
            return None
        following = self._next[match.state]
        return Continuation(token, self._n_seen[following[token]], len(following) == 1)

    def others(self, match: Match, n: int) -> list[Continuation]:
        """The `n` tokens that followed most often after the favourite; the latest to appear among equals."""
        following = self._next[match.state]
        if len(following) < 2 or not match.length:
            return []
        favourite = self._favourite[match.state]
        counts = ((self._n_seen[state], i, token) for i, (token, state) in enumerate(following.items()))
        best = nlargest(n, (each for each in counts if each[2] != favourite))
        return [Continuation(token, n_followed, alone=False) for n_followed, _, token in best]

    def n_seen(self, match: Match) -> int:
        """Places where the match occurred, with the end of the text."""
        return self._n_seen[match.state]

    def advance(self, match: Match, token: int) -> Match:
        """`match` and `token`, which must have followed it."""
        return Match(self._next[match.state][token], match.length + 1)
