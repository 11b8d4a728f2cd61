"""One request to a pool, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specllama.base.errors import SpecllamaError
from specllama.core.constraint import Constraint
from specllama.core.events import Reason
from specllama.core.sampling import SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Chooser, Stopper


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The arguments of one `Engine.generate`. The chooser, stopper and constraint belong to this request alone."""

    id: object  # the caller's own; the pool does not look at it
    tokens: Sequence[int]  # the prompt
    params: SamplingParams
    choose: Chooser
    max_tokens: int = -1  # -1 = until the answer ends or its slot is full
    stopper: Stopper | None = None
    constraint: Constraint | None = None
    drafts: bool = True  # False = plain decoding
    cancel: Cancel = field(default_factory=Cancel)  # ends this request at its next step


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened to a request, in seconds of `base.clock.perf_counter`."""

    started: float  # taken from the caller's requests, into a slot
    first: float | None  # the first token; None without one
    ended: float
    waited_s: float = 0.0  # between start and end: the passes and the turns of others


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A request that has ended: by itself, or with an error.

    A caller whose request cannot be made (a bad line, a prompt too long) gives a Done to the pool instead: it comes
    back unchanged, in its place.
    """

    id: object  # of the request
    tokens: tuple[int, ...] = ()  # the answer, without its end token; what there was before an error
    reason: Reason | None = None  # why it ended: "stop", "length" or "cancelled"; None = `error`
    error: SpecllamaError | None = None
    notices: tuple[str, ...] = ()  # sentences for the user, each once
    stats: SpecStats = field(default_factory=SpecStats)
    times: Times | None = None  # None = it was never in the pool
