"""The exact law of what the engine emits after a context, and how far it is from the chain of the target's laws."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias, cast

from specllama.audit.enumeration import law_of
from specllama.base.errors import Interrupted
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, StepEvent, TokenEvent
from specllama.core.sampling import SamplingParams
from specllama.core.types import Cancel, Chooser

END = -1  # stands for every end token: the engine emits none of them
Block: TypeAlias = tuple[int, ...]  # what one step emits; END last where it ends the answer
LawAt: TypeAlias = Callable[[Block], Mapping[int, float]]  # of the token behind context + block


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the law of a block is from p."""

    first_error: float  # of the first token's probabilities, the largest
    first_tv: float
    error: float  # over every beginning of every block
    tv: float  # of the text as long as the longest block

    def worse(self, other: Distance) -> Distance:
        """The larger of each."""
        return Distance(
            max(self.first_error, other.first_error),
            max(self.first_tv, other.first_tv),
            max(self.error, other.error),
            max(self.tv, other.tv),
        )


NONE = Distance(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BlockLaw:
    """The law of what the first step emits."""

    law: Mapping[Block, float]
    n_branches: int
    n_drafted: int  # the longest draft


def block_law(
    engine: Engine, context: Sequence[int], params: SamplingParams, *, n_max: int, cancel: Cancel, most: int
) -> BlockLaw:
    """Every branch of the engine's first step behind `context`, the draws of the drafter among them.

    Raises TooManyBranches, Interrupted, and what the engine raises.
    """
    n_branches = n_drafted = 0

    def run(choose: Chooser) -> Block:
        nonlocal n_branches, n_drafted
        n_branches += 1
        emitted: list[int] = []
        events = engine.generate(context, params, choose, max_tokens=n_max + 1, cancel=cancel)
        with closing(cast("Generator[Event, None, None]", events)):
            for event in events:
                if isinstance(event, TokenEvent):
                    emitted.append(event.token)
                elif isinstance(event, StepEvent):
                    n_drafted = max(n_drafted, len(event.drafted))
                    # An end token is seen but not emitted: then there is no token beside the accepted ones.
                    return (*emitted, END) if len(emitted) <= event.accepted else tuple(emitted)
                elif isinstance(event, Finished):
                    break
        raise Interrupted("cancelled while branches were taken")

    return BlockLaw(law_of(run, most_branches=most), n_branches, n_drafted)


def distance(found: Mapping[Block, float], law_at: LawAt) -> Distance:
    """How far `found` is from the chain of laws that `law_at` gives.

    What follows a block follows p by the next step's own exactness, so a text s has the mass of the sum over all blocks
    b that it begins with of found(b) * P(s) / P(b). That must be P(s): the sum of found(b) / P(b) is 1. Only rows
    inside of blocks are needed, and those the engine has read.
    """
    inside: dict[Block, set[int]] = {}  # what follows a beginning in some block
    starting: dict[Block, float] = {}  # mass of the blocks that begin so
    for block, mass in found.items():
        for n in range(len(block)):
            inside.setdefault(block[:n], set()).add(block[n])
            starting[block[: n + 1]] = starting.get(block[: n + 1], 0.0) + mass

    first_errors: list[float] = []
    error = 0.0
    apart: list[float] = []  # twice the parts of the TV

    def visit(node: Block, prob: float, ratio: float) -> None:
        """`ratio`: the sum of found(b) / P(b) over the blocks that `node` begins with."""
        nonlocal error
        law = law_at(node) if prob > 0.0 else {}
        for token in {*law, *inside[node]}:
            child = (*node, token)
            child_prob = prob * law.get(token, 0.0)
            told = starting.get(child, 0.0) + child_prob * ratio
            error = max(error, abs(told - child_prob))
            if not node:
                first_errors.append(abs(told - child_prob))
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
