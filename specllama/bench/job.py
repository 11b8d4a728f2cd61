"""Input and events of a benchmark: the job, the loaded models, progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from specllama.bench.plan import Wishes
from specllama.bench.report import Arm, BenchPlan, BenchReport, BenchRun, Machine
from specllama.core.constraint import Constraint
from specllama.core.sampling import SamplingParams
from specllama.core.types import DraftPolicy, LanguageModel
from specllama.prompts.load import BenchPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The models of one load, with their tokenizer and facts."""

    target: LanguageModel
    drafts: tuple[LanguageModel, ...]  # in the order of plan.drafts
    tokens: Callable[[str], list[int]]  # a message in the chat template
    count: Callable[[str], int]  # number of tokens of a text without template
    piece: Callable[[int], bytes]  # the text of a token
    policy: Callable[[Arm, SamplingParams], DraftPolicy | None]  # the controller of an arm with automatic length
    target_facts: Mapping[str, Any]
    draft_facts: tuple[Mapping[str, Any], ...]
    n_target_bytes: int  # weights
    n_draft_bytes: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    constraint: Callable[[], Constraint | None] = lambda: None  # of the next answer


Open: TypeAlias = Callable[[int], AbstractContextManager[Loaded]]  # loads the models of plan.loads[i]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Everything that is known before the first model is loaded."""

    wishes: Wishes
    prompts: Sequence[BenchPrompt]
    params: SamplingParams = field(default_factory=SamplingParams)  # the condition sets the temperature
    p_min: float = 0.0
    draft_temperature: float | None = None
    seed: int = 0
    synthetic: float | None = None  # see bench/synthetic
    machine: Machine
    made: str
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """The current activity and the share of it that is done."""

    what: str
    share: float
    left_s: float | None = None  # None: not known yet


BenchEvent: TypeAlias = BenchProgress | BenchPlan | BenchRun | BenchReport
Steps: TypeAlias = Generator[BenchEvent, None, None]

T = TypeVar("T")


def following(
    work: Generator[float, None, T], progress: Callable[[float], BenchProgress]
) -> Generator[BenchEvent, None, T]:
    """Runs `work`, yields its progress and returns its result."""
    while True:
        try:
            share = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the value of StopIteration is not typed
        yield progress(share)
