"""The drafting strategies: each has a file and a line in `REGISTRY`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.core.no_drafter import NoDrafter
from specllama.core.types import Drafter, DraftPolicy, LanguageModel
from specllama.drafters.chain import ChainDrafter
from specllama.drafters.length import AUTO_LENGTH, DraftLength
from specllama.drafters.lookup import LOOKUP_P_MIN, LookupDrafter
from specllama.drafters.model import FIRST_TOKEN_FIRST, ModelDrafter
from specllama.drafters.shape import FixedShape, TreePolicy, best_shape
from specllama.drafters.tree import TreeDrafter
from specllama.drafters.tree_controller import TreeController


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Settings of all strategies; a strategy ignores those that it does not use."""

    length: DraftLength = AUTO_LENGTH
    p_min: float = 0.0  # confidence below which drafting stops
    temperature: float | None = None  # of the draft; None = the target's
    vocab_size: int | None = None  # of the target
    policy: DraftPolicy | None = None  # decides within the longest draft; None = only the length and p_min do
    # If the draft model has at least so many tokens to read, the first step of an answer has no draft.
    n_at_once: int = FIRST_TOKEN_FIRST
    n_leaves: int = 1  # most leaves of a tree that the target evaluates; 1 = chains
    # Decides which tree; None = the policy, if it is a TreeController, else the best tree of so many nodes as `length`.
    tree: TreePolicy | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """`make` takes the draft model (None without one) and the settings."""

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
    drafter = _make_model_drafter(model, settings)
    drafter.name = TRANSLATED
    return drafter


def _make_lookup_drafter(model: LanguageModel | None, settings: DraftSettings) -> LookupDrafter:
    return LookupDrafter(n_max=settings.length.longest, p_min=settings.p_min or LOOKUP_P_MIN, policy=settings.policy)


def _make_chain_drafter(model: LanguageModel | None, settings: DraftSettings) -> ChainDrafter:
    return ChainDrafter(_make_model_drafter(model, settings), _make_lookup_drafter(model, settings))


def _make_tree_drafter(model: LanguageModel | None, settings: DraftSettings) -> TreeDrafter:
    assert model is not None, "a drafter that needs a draft model was made without one"
    policy = settings.policy if isinstance(settings.policy, TreeController) else None
    return TreeDrafter(
        model,
        settings.tree or policy or FixedShape(best_shape(settings.length.longest)),
        lookup=_make_lookup_drafter(None, settings),
        n_leaves=settings.n_leaves,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        n_at_once=settings.n_at_once,
    )


TREE = "tree"
SIMPLE = "draft-simple"  # its draft speaks the target's token ids
TRANSLATED = "draft-tli"  # its draft has a tokenizer of its own

REGISTRY: dict[str, Strategy] = {
    SIMPLE: Strategy(True, "a smaller model drafts by sampling", _make_model_drafter),
    "lookup": Strategy(False, "copies what followed the same words earlier in the text", _make_lookup_drafter),
    "chain": Strategy(True, "lookup where it matches, the smaller model elsewhere", _make_chain_drafter),
    TREE: Strategy(True, "a smaller model and lookups draft several continuations at once", _make_tree_drafter),
    TRANSLATED: Strategy(True, "a smaller model of another tokenizer drafts the tokens both have", _make_tli_drafter),
    "none": Strategy(False, "plain decoding", lambda _model, _settings: NoDrafter()),
}

# Names in llama.cpp and other programs.
ALIASES = {"ngram": "lookup", "ngram-simple": "lookup", "prompt-lookup": "lookup"}
