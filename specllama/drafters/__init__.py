"""Drafting strategies: one file each and one line in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.core.no_drafter import NoDrafter
from specllama.core.types import Drafter, DraftPolicy, LanguageModel
from specllama.drafters.chain import ChainDrafter
from specllama.drafters.length import AUTO_LENGTH, DraftLength
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import FIRST_TOKEN_FIRST, ModelDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What a strategy may be told; one that has no use for a setting ignores it."""

    length: DraftLength = AUTO_LENGTH
    p_min: float = 0.0  # confidence below which drafting stops
    temperature: float | None = None  # of the draft; None = the target's
    vocab_size: int | None = None  # of the target
    policy: DraftPolicy | None = None  # decides within the longest draft; None = that and p_min alone
    # A draft model that has so many tokens to read lets the first step of an answer go without.
    n_at_once: int = FIRST_TOKEN_FIRST


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to draft. `make` takes the draft model (None where there is none) and the settings."""

    needs_model: bool
    summary: str
    make: Callable[[LanguageModel | None, DraftSettings], Drafter]


def _make_model_drafter(model: LanguageModel | None, settings: DraftSettings) -> ModelDrafter:
    assert model is not None, "a drafter that needs a draft model was made without one"
    return ModelDrafter(
        model,
        n_max=settings.length.longest,
        p_min=settings.p_min,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        policy=settings.policy,
        n_at_once=settings.n_at_once,
    )


def _make_tli_drafter(model: LanguageModel | None, settings: DraftSettings) -> ModelDrafter:
    """The same drafter: a `TranslatedModel` is the whole difference."""
    drafter = _make_model_drafter(model, settings)
    drafter.name = TRANSLATED
    return drafter


def _make_lookup_drafter(model: LanguageModel | None, settings: DraftSettings) -> LookupDrafter:
    if settings.p_min:
        return LookupDrafter(n_max=settings.length.longest, p_min=settings.p_min, policy=settings.policy)
    return LookupDrafter(n_max=settings.length.longest, policy=settings.policy)


def _make_chain_drafter(model: LanguageModel | None, settings: DraftSettings) -> ChainDrafter:
    return ChainDrafter(_make_model_drafter(model, settings), _make_lookup_drafter(model, settings))


SIMPLE = "draft-simple"  # its draft speaks the target's token ids
TRANSLATED = "draft-tli"  # its draft has a tokenizer of its own

REGISTRY: dict[str, Strategy] = {
    SIMPLE: Strategy(True, "a smaller model drafts by sampling", _make_model_drafter),
    "lookup": Strategy(False, "copies what followed the same words earlier in the text", _make_lookup_drafter),
    "chain": Strategy(True, "lookup where it matches, the smaller model elsewhere", _make_chain_drafter),
    TRANSLATED: Strategy(True, "a smaller model of another tokenizer drafts the tokens both have", _make_tli_drafter),
    "none": Strategy(False, "plain decoding", lambda _model, _settings: NoDrafter()),
}

# Names by which llama.cpp and others know them.
ALIASES = {"ngram": "lookup", "ngram-simple": "lookup", "prompt-lookup": "lookup"}
