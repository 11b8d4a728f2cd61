"""What a benchmark is given and what it says: the job, the loaded models, progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from specllama.bench.plan import Wishes
from specllama.bench.report import Arm, BenchPlan, BenchReport, BenchRun, Machine
from specllama.core.sampling import SamplingParams
from specllama.core.types import DraftPolicy, LanguageModel
from specllama.prompts.load import BenchPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Models that are ready, and what has to be known of them."""

    target: LanguageModel
    drafts: tuple[LanguageModel, ...]  # in the order of the plan's
    tokens: Callable[[str], list[int]]  # a message as the target reads it, its template included
    count: Callable[[str], int]  # tokens of a bare text
    piece: Callable[[int], bytes]  # what a token shows
    policy: Callable[[Arm, SamplingParams], DraftPolicy | None]  # what decides where the length is automatic
    target_facts: Mapping[str, Any]
    draft_facts: tuple[Mapping[str, Any], ...]
    n_target_bytes: int  # weights
    n_draft_bytes: tuple[int, ...]
    warnings: tuple[str, ...] = ()


Open: TypeAlias = Callable[[int], AbstractContextManager[Loaded]]  # the models as a load of the plan wants them


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Everything that is settled before the first model is loaded."""

    wishes: Wishes
    prompts: Sequence[BenchPrompt]
    params: SamplingParams = field(default_factory=SamplingParams)  # the temperature is the condition's
    p_min: float = 0.0
    draft_temperature: float | None = None
    seed: int = 0
    synthetic: float | None = None  # see `bench_synthetic`
    machine: Machine
    made: str
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """What is being done, and how much of everything is done by then."""

    what: str
    share: float
    left_s: float | None = None  # None: nobody knows yet


BenchEvent: TypeAlias = BenchProgress | BenchPlan | BenchRun | BenchReport
Steps: TypeAlias = Generator[BenchEvent, None, None]

T = TypeVar("T")


def following(
    work: Generator[float, None, T], told: Callable[[float], BenchProgress]
) -> Generator[BenchEvent, None, T]:
    """What the work returns, and how far it is meanwhile."""
    while True:
        try:
            share = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # typing does not know what a StopIteration holds
        yield told(share)
