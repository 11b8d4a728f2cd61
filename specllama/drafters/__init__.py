"""Drafting strategies: one file each and one line in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.drafters.model import ModelDrafter
from specllama.drafters.none import NoDrafter
from specllama.types import Drafter, LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What a strategy may be told; one that has no use for a setting ignores it."""

    n_max: int = 4  # longest draft
    p_min: float = 0.0  # confidence below which drafting stops
    temperature: float | None = None  # of the draft; None = the target's
    vocab_size: int | None = None  # of the target


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to draft. `make` takes the draft model (None where there is none) and the settings."""

    needs_model: bool
    summary: str
    make: Callable[[LanguageModel | None, DraftSettings], Drafter]


def _make_model_drafter(model: LanguageModel | None, settings: DraftSettings) -> Drafter:
    assert model is not None, "draft-simple was made without a draft model"
    return ModelDrafter(
        model,
        n_max=settings.n_max,
        p_min=settings.p_min,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
    )


REGISTRY: dict[str, Strategy] = {
    "draft-simple": Strategy(True, "a smaller model drafts by sampling", _make_model_drafter),
    "none": Strategy(False, "plain decoding", lambda _model, _settings: NoDrafter()),
}
