"""What a drafted token costs a request that shares its passes with others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specllama.core.types import DraftPolicy, Part
from specllama.drafters.controller import Controller, PassCosts, Points

REMEMBERED = 8  # passes of the target
CLEAR = 4  # a change of the rows of others by less than one in so many changes nothing


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """`PassCosts` of a request beside others, in units of its share of a pass without drafts of its own.

    With o rows of others, N requests and M of them drafting: its share is T(o+1)/N, n rows cost T(o+n) - T(o+1) more,
    and a pass of the draft costs D(M)/M. So the best rate of each request is the best of all of them together.
    """

    own: PassCosts  # of the request alone
    n_requests: int  # N
    n_others: int  # o
    n_drafting: int  # M

    @property
    def verify(self) -> Points:
        return self.own.verify

    def verify_cost(self, n: int, depth: int = 0) -> float:
        plain = self.own.verify_cost(self.n_others + 1, depth)
        more = self.own.verify_cost(self.n_others + n, depth) - plain
        return 1.0 + max(more, 0.0) / plain * self.n_requests

    def draft_cost(self, n: int = 1) -> float:
        together = self.own.draft_cost(self.n_drafting)
        more = self.own.draft_cost(self.n_drafting + n - 1) - together
        share = self.own.verify_cost(self.n_others + 1) / self.n_requests
        return (together / self.n_drafting + max(more, 0.0)) / share


@dataclass(slots=True)
class _Share:
    """The controller of a request and the costs that it decides by."""

    controller: Controller
    own: PassCosts
    costs: PassCosts

    def use(self, n_requests: int, n_others: int, n_drafting: int) -> None:
        """Decide by these from now on, unless they hardly differ."""
        costs = SharedCosts(self.own, n_requests, n_others, n_drafting) if n_requests > 1 else self.own
        if isinstance(costs, SharedCosts) and isinstance(self.costs, SharedCosts):
            same = (costs.n_requests, costs.n_drafting) == (self.costs.n_requests, self.costs.n_drafting)
            if same and abs(n_others - self.costs.n_others) <= max(1, n_others // CLEAR):
                return
        if costs != self.costs:
            self.costs = costs
            self.controller.use(costs)


class RowBudget:
    """Tells the controller of each request what its rows cost beside those of the others.

    A request hears of the numbers of rows in passes before its own step, never of a clock or of what others draw in the
    same step: its law stays its own, and the same requests give the same texts again.
    """

    def __init__(self) -> None:
        self._shares: dict[int, _Share | None] = {}  # by slot; None = it has no controller
        self._n_rows = 0  # of the last pass
        self._drafting = deque[int](maxlen=REMEMBERED)

    def join(self, slot: int, policy: DraftPolicy | None) -> None:
        """A request begins in the slot."""
        share = _Share(policy, policy.costs, policy.costs) if isinstance(policy, Controller) else None
        self._shares[slot] = share
        if share is not None:
            share.use(len(self._shares), self._n_rows, self._n_drafting)

    def leave(self, slot: int) -> None:
        """The request of the slot has ended; nothing happens if none has begun."""
        self._shares.pop(slot, None)

    def passed(self, parts: Sequence[Part], n_drafting: int) -> None:
        """The target has computed `parts`; `n_drafting` requests had evaluated the draft model for it."""
        rows = {part.slot: part.n_rows for part in parts if part.n_rows}
        self._n_rows = sum(rows.values())
        self._drafting.append(n_drafting)
        for slot, n_rows in rows.items():
            if (share := self._shares.get(slot)) is not None:
                share.use(len(self._shares), self._n_rows - n_rows, self._n_drafting)

    @property
    def _n_drafting(self) -> int:
        """The most of the last passes; at the beginning all: together they may draft where one alone would not."""
        few = len(self._drafting) < REMEMBERED
        return max(1, min(len(self._shares) if few else max(self._drafting), len(self._shares)))
