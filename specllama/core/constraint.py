"""What an answer may say: which tokens may follow a path, and tokens that are drafted because no other may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import local
from typing import Protocol, TypeAlias

import numpy as np

from specllama.core.arrays import FloatArray, IntArray
from specllama.core.distribution import Distribution
from specllama.core.no_drafter import NoDrafter
from specllama.core.optional import Constrained, models_of, report_of
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, Drafter, DraftReport, Observation


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next."""

    ids: IntArray  # ascending
    all_but: bool = False  # `ids` are the tokens that may not come next

    def __contains__(self, token: int) -> bool:
        at = int(self.ids.searchsorted(token))
        return (at < self.ids.size and bool(self.ids[at] == token)) != self.all_but

    @property
    def only(self) -> int | None:
        """The token, if it is the only one."""
        return int(self.ids[0]) if self.ids.size == 1 and not self.all_but else None


NOTHING = Allowed(np.empty(0, np.int64))
_scratch = local()  # a new row for every mask would cost more than the mask

AllowedAfter: TypeAlias = Callable[[Sequence[int]], Allowed]


class Constraint(Protocol):
    """Limits one answer token by token; a new one for every answer.

    A path is what may be drafted after the committed tokens, without an end token. What is allowed depends only on the
    answer's tokens before it, so the masked law is defined without drafts.
    """

    def allowed(self, path: Sequence[int]) -> Allowed:
        """What may follow `path`, end tokens included; nothing after a path that is not allowed."""

    def forced(self) -> Sequence[int]:
        """Tokens that come next because no other is allowed in their places; the first ones are enough."""

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed."""


def among(row: FloatArray, allowed: Allowed, ids: IntArray | None = None) -> tuple[FloatArray, IntArray | None]:
    """The row and the ids for `law`, limited to `allowed`; an empty row if nothing is left.

    row: (n,), valid until the next call in this thread; ids: the token of every cell, ascending; None = 0, 1, 2, ...
    """
    if ids is None:
        cells = tokens = allowed.ids[: allowed.ids.searchsorted(row.size)]
    else:
        tokens = np.intersect1d(ids, allowed.ids, assume_unique=True)
        cells = ids.searchsorted(tokens)
    if not allowed.all_but:
        return row[cells], tokens
    if cells.size == row.size:
        return row[:0], tokens[:0]
    masked: FloatArray | None = getattr(_scratch, "row", None)
    if masked is None or masked.shape != row.shape or masked.dtype != row.dtype:
        masked = _scratch.row = np.empty_like(row)
    np.copyto(masked, row)
    masked[cells] = -np.inf
    return masked, ids


class _From(Sequence[Distribution]):
    """The laws from row `start` on."""

    def __init__(self, laws: Sequence[Distribution], start: int) -> None:
        self._laws, self._start = laws, start

    def __len__(self) -> int:
        return len(self._laws) - self._start

    def __getitem__(self, row: int) -> Distribution:  # type: ignore[override]  # no slices
        return self._laws[self._start + row]


class ForcedFirst:
    """The drafter of one constrained answer: forced tokens, then what `drafter` proposes after them.

    Forced tokens are point masses that the masked law accepts with certainty. `drafter` sees them as text that is
    already there, and learns from its own tokens only. Plain decoding stays plain.
    """

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self.name, self.wants = drafter.name, drafter.wants
        self.models = models_of(drafter)
        self._drafter, self._constraint = drafter, constraint
        self._report, self._asked = report_of(drafter), False  # in this step
        self._forces = drafter.name != NoDrafter.name
        self._forced: tuple[int, ...] = ()  # at the head of the last draft
        self._n_text = 0  # committed tokens that the constraint knows, and the prompt

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        self._n_text = len(tokens)
        self._drafter.begin(tokens, features)
        if isinstance(self._drafter, Constrained):
            self._drafter.constrain(self._allowed)

    def _allowed(self, path: Sequence[int]) -> Allowed:
        """What may follow a path of the drafter's own tokens."""
        return self._constraint.allowed((*self._forced, *path))

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        self._forced = tuple(self._constraint.forced()[:limit]) if self._forces else ()
        n = len(self._forced)
        self._asked = limit > n
        if not n:
            return self._drafter.propose(tokens, limit, params, choose)
        own = Draft()
        if self._asked:
            own = self._drafter.propose([*tokens, *self._forced], limit - n, params, choose)
        return Draft(
            (*self._forced, *own.tokens),
            own.probs and (*map(Distribution.point, self._forced), *own.probs),
            own.parents and (*range(-1, n - 1), *(n + parent for parent in own.parents)),
            n + own.n_given,
        )

    def observe(self, seen: Observation) -> None:
        n = len(self._forced)
        if n:
            draft, path = seen.draft, seen.verdict.path
            parents = draft.parents and tuple(max(parent - n, -1) for parent in draft.parents[n:])
            seen = replace(
                seen,
                draft=Draft(draft.tokens[n:], draft.probs and draft.probs[n:], parents, max(draft.n_given - n, 0)),
                verdict=replace(seen.verdict, path=tuple(node - n for node in path[n:])),
                features=None if seen.features is None else seen.features[n:],
                logits=None if seen.logits is None else seen.logits[n:],
                # A row that gives no distribution ends the step within the forced tokens.
                laws=None if seen.laws is None or len(path) < n else _From(seen.laws, n),
            )
        self._drafter.observe(seen)
        self._forced = ()
        self._constraint.advance(seen.tokens[self._n_text :])
        self._n_text = len(seen.tokens)

    def report(self) -> DraftReport:
        """Empty if forced tokens left no room for the drafter."""
        return self._report() if self._asked else DraftReport()

    def close(self) -> None:
        """The caller made the drafter and closes it."""
