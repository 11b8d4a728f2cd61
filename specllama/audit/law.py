"""The exact law of the block that the engine emits after a context, and its distance from the target's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from typing import TypeAlias, cast

from specllama.audit.enumeration import law_of
from specllama.base.errors import Interrupted
from specllama.core.constraint import Constraint
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, StepEvent, TokenEvent
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Chooser

END = -1  # stands for every end token: the engine does not emit them
Block: TypeAlias = tuple[int, ...]  # tokens of one step; the last is END if the answer ends
LawAt: TypeAlias = Callable[[Block], Mapping[int, float]]  # the target's law after context + block


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of the law of a block from p."""

    first_error: float = 0.0  # largest error of a probability of the first token
    first_tv: float = 0.0
    error: float = 0.0  # the same over every beginning of every block
    tv: float = 0.0  # of texts as long as the longest block

    def worse(self, other: Distance) -> Distance:
        """The maximum of each field."""
        return Distance(*map(max, astuple(self), astuple(other)))


def block_law(
    engine: Engine,
    context: Sequence[int],
    params: SamplingParams,
    *,
    n_max: int,
    cancel: Cancel,
    most: int,
    constraint: Callable[[], Constraint | None] = lambda: None,
) -> tuple[Mapping[Block, float], int, int]:
    """(law of the engine's first step after `context`, number of branches, longest draft), by enumeration.

    Raises TooManyBranches, Interrupted, and the errors of the engine.
    """
    n_branches = n_drafted = 0

    def run(choose: Chooser) -> Block:
        nonlocal n_branches, n_drafted
        n_branches += 1
        emitted: list[int] = []
        events = engine.generate(context, params, choose, max_tokens=n_max + 1, cancel=cancel, constraint=constraint())
        with closing(cast("Generator[Event, None, None]", events)):
            for event in events:
                if isinstance(event, TokenEvent):
                    emitted.append(event.token)
                elif isinstance(event, StepEvent):
                    n_drafted = max(n_drafted, len(event.drafted))
                    # An end token is not emitted: then the only tokens are the accepted ones.
                    return (*emitted, END) if len(emitted) <= event.accepted else tuple(emitted)
                elif isinstance(event, Finished):
                    break
        raise Interrupted("cancelled during an enumeration")

    law = law_of(run, most_branches=most)
    return law, n_branches, n_drafted


def distance(found: Mapping[Block, float], law_at: LawAt) -> Distance:
    """The distance of `found` from the product of the laws of `law_at`.

    The tokens after a block follow p, because the next step is exact. So a text s has the mass of found(b) * P(s) /
    P(b), summed over all blocks b that it starts with. This must be P(s): the sum of found(b) / P(b) must be 1. Only
    rows inside of blocks are needed, which the engine has read.
    """
    inside: dict[Block, set[int]] = {}  # tokens that follow a beginning in some block
    starting: dict[Block, float] = {}  # mass of the blocks with this beginning
    for block, mass in found.items():
        for n in range(len(block)):
            inside.setdefault(block[:n], set()).add(block[n])
            starting[block[: n + 1]] = starting.get(block[: n + 1], 0.0) + mass

    first_errors: list[float] = []
    error = 0.0
    apart: list[float] = []  # twice the parts of the TV

    def visit(node: Block, prob: float, ratio: float) -> None:
        """`ratio`: the sum of found(b) / P(b) over the blocks that `node` starts with."""
        nonlocal error
        law = law_at(node) if prob > 0.0 else {}
        for token in {*law, *inside[node]}:
            child = (*node, token)
            child_prob = prob * law.get(token, 0.0)
            mass = starting.get(child, 0.0) + child_prob * ratio
            error = max(error, abs(mass - child_prob))
            if not node:
                first_errors.append(abs(mass - child_prob))
            here = found.get(child, 0.0)
            if child_prob > 0.0:
                child_ratio = ratio + here / child_prob
                if child in inside:
                    visit(child, child_prob, child_ratio)
                else:
                    apart.append(child_prob * abs(child_ratio - 1.0))
            else:
                apart.append(starting[child])

    visit((), 1.0, 0.0)
    return Distance(max(first_errors), 0.5 * sum(first_errors), error, 0.5 * sum(apart))
