"""Pools over fakes: requests, and engines with any drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specllama.batch.budget import RowBudget
from specllama.batch.pool import Pool
from specllama.batch.request import Done, Request
from specllama.batch.slot_view import SlotView
from specllama.core.engine import Engine
from specllama.core.sampling import RandomChooser
from specllama.core.types import Chooser, Drafter, DraftPolicy, LanguageModel, Part, Rule
from tests.exact.harness import PLAIN
from tests.exact.reference import Answer, History
from tests.fakes import FakeSlots

MakeDrafter = Callable[[LanguageModel], "tuple[Drafter, DraftPolicy | None]"]


@dataclass
class FakeMaker:
    """Engines with what `make` gives for the view of a draft; None = plain decoding. With a budget if it has one."""

    make: MakeDrafter | None = None
    rule: Rule = Rule.TOKEN
    budget: RowBudget | None = None
    begun: list[int] = field(default_factory=list)  # slots
    ended: list[int] = field(default_factory=list)
    passes: list[tuple[tuple[Part, ...], int]] = field(default_factory=list)

    def begin(self, target: SlotView, draft: SlotView | None, request: Request) -> Engine:
        self.begun.append(target.slot)
        drafter, policy = None, None
        if self.make is not None and draft is not None and request.drafts:
            drafter, policy = self.make(draft)
        if self.budget is not None:
            self.budget.join(target.slot, policy)
        return Engine(target, drafter, rule=self.rule)

    def end(self, slot: int) -> None:
        self.ended.append(slot)
        if self.budget is not None:
            self.budget.leave(slot)

    def passed(self, parts: Sequence[Part], n_drafting: int) -> None:
        self.passes.append((tuple(parts), n_drafting))
        if self.budget is not None:
            self.budget.passed(parts, n_drafting)


def request(id: object, tokens: History, choose: Chooser | None = None, **changes: object) -> Request:
    made = {"params": PLAIN, "choose": choose or RandomChooser(0), "max_tokens": 4, **changes}
    return Request(id, tokens, **made)  # type: ignore[arg-type]


def answers(pool: Pool, requests: Iterable[Request | Done]) -> dict[object, Answer]:
    """By id; raises the error of a request."""
    found: dict[object, Answer] = {}
    for done in pool.run(requests):
        if done.error is not None:
            raise done.error
        assert done.reason is not None
        found[done.id] = (done.tokens, done.reason)
    return found


def pool_of(target: FakeSlots, draft: FakeSlots | None = None, maker: FakeMaker | None = None) -> Pool:
    return Pool(target, draft, maker or FakeMaker())
