"""specllama: exact speculative decoding for pairs of GGUF models. `load` opens a pair; see docs/api.md.

Names are imported on first use, so the command line shows its help without waiting for numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.api import Answer, BatchAnswer, Chat, Pair, load
    from specllama.base.errors import (
        BackendError,
        ChecksumMismatch,
        ConfigError,
        ContextFull,
        ConversationError,
        DiskFull,
        DownloadError,
        DraftLawError,
        GatedRepository,
        Interrupted,
        MemoryShort,
        ModelBusy,
        ModelFileError,
        NumericsError,
        PairError,
        PromptError,
        RollbackRefused,
        SourceUnavailable,
        SpecllamaError,
        TemplateError,
        UnsupportedModel,
        UsageError,
    )
    from specllama.chat.conversation import Message
    from specllama.core.distribution import Distribution
    from specllama.core.engine import Engine
    from specllama.core.events import Event, Finished, Notice, PromptProgress, StepEvent, TokenEvent
    from specllama.core.noise import SharedNoise
    from specllama.core.sampling import RandomChooser, SamplingParams
    from specllama.core.stats import SpecStats
    from specllama.core.types import (
        Cancel,
        Caps,
        Chooser,
        Draft,
        Drafter,
        DraftPolicy,
        LanguageModel,
        Observation,
        Rule,
        Stopper,
        Verdict,
    )
    from specllama.core.verification import verify
    from specllama.pairs.ask import Hardware

__version__ = "0.1.0"

# Searched in this order: what needs no numpy first, `api`, which imports the others, last.
_ROOMS = (
    "base.errors", "core.types", "core.distribution", "core.verification", "core.sampling", "core.noise", "core.stats",
    "core.events", "core.engine", "chat.conversation", "pairs.ask", "api",
)  # fmt: skip

# fmt: off
__all__ = [
    "Answer", "BackendError", "BatchAnswer", "Cancel", "Caps", "Chat", "ChecksumMismatch", "Chooser", "ConfigError",
    "ContextFull", "ConversationError", "DiskFull", "Distribution", "DownloadError", "Draft", "DraftLawError",
    "DraftPolicy", "Drafter", "Engine", "Event", "Finished", "GatedRepository", "Hardware", "Interrupted",
    "LanguageModel", "MemoryShort", "Message", "ModelBusy", "ModelFileError", "Notice", "NumericsError",
    "Observation", "Pair", "PairError", "PromptError", "PromptProgress", "RandomChooser", "RollbackRefused", "Rule",
    "SamplingParams", "SharedNoise", "SourceUnavailable", "SpecStats", "SpecllamaError", "StepEvent", "Stopper",
    "TemplateError", "TokenEvent", "UnsupportedModel", "UsageError", "Verdict", "load", "verify",
]
# fmt: on


if not TYPE_CHECKING:  # a type checker that sees this accepts any name

    def __getattr__(name: str) -> object:
        if name in __all__:
            for room in _ROOMS:
                module = import_module(f"specllama.{room}")
                if hasattr(module, name):
                    value = globals()[name] = getattr(module, name)
                    return value
        raise AttributeError(f"module 'specllama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
