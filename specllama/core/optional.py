"""What drafters and models may offer beyond `Drafter` and `LanguageModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specllama.core.types import Drafter, DraftReport, LanguageModel

if TYPE_CHECKING:
    from specllama.core.constraint import AllowedAfter


@runtime_checkable
class Reporting(Protocol):
    """A drafter that explains its proposals."""

    def report(self) -> DraftReport:
        """Decisions and notice of the last `propose`."""


@runtime_checkable
class UsesModels(Protocol):
    """A drafter that evaluates models."""

    @property
    def models(self) -> Sequence[LanguageModel]:
        """They are leased while an answer is open."""


@runtime_checkable
class Constrained(Protocol):
    """A drafter that can avoid tokens which the answer may not hold. They would be rejected: it only drafts better."""

    def constrain(self, allowed: AllowedAfter) -> None:
        """What may follow a drafted path, in the answer that has just begun."""


@runtime_checkable
class Timed(Protocol):
    """A model that counts the time of its calls."""

    @property
    def busy_s(self) -> float:
        """Seconds spent so far inside the model's own calls."""


# `isinstance` with a protocol takes as long as the sampling of a step, so the engine calls these once an answer.


def models_of(drafter: Drafter) -> Sequence[LanguageModel]:
    """The models that the drafter evaluates, as far as it tells."""
    return drafter.models if isinstance(drafter, UsesModels) else ()


def report_of(drafter: Drafter) -> Callable[[], DraftReport]:
    """`drafter.report`, or a function that returns an empty report."""
    return drafter.report if isinstance(drafter, Reporting) else DraftReport


def clock_of(models: Iterable[LanguageModel]) -> Callable[[], float]:
    """A function that returns the seconds spent so far inside the calls of `models`, as far as they count them."""
    timed = [model for model in models if isinstance(model, Timed)]
    return lambda: sum(model.busy_s for model in timed)
