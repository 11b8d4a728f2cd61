"""specllama: exact speculative decoding for pairs of GGUF models. `load` opens a pair; see docs/api.md.

They are imported when they are asked for: the command line shows its help without waiting for numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.api import Answer, Chat, Pair, load
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

_ROOMS = {
    "api": "Answer Chat Pair load",
    "chat.conversation": "Message",
    "core.distribution": "Distribution",
    "core.engine": "Engine",
    "base.errors": "BackendError ChecksumMismatch ConfigError ContextFull ConversationError DiskFull DownloadError "
    "DraftLawError GatedRepository Interrupted MemoryShort ModelBusy ModelFileError NumericsError PairError "
    "PromptError RollbackRefused SourceUnavailable SpecllamaError TemplateError UnsupportedModel UsageError",
    "core.events": "Event Finished Notice PromptProgress StepEvent TokenEvent",
    "core.sampling": "RandomChooser SamplingParams",
    "core.stats": "SpecStats",
    "core.types": "Cancel Caps Chooser Draft Drafter DraftPolicy LanguageModel Observation Rule Stopper Verdict",
    "core.verification": "verify",
    "pairs.ask": "Hardware",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = [
    "Answer",
    "BackendError",
    "Cancel",
    "Caps",
    "Chat",
    "ChecksumMismatch",
    "Chooser",
    "ConfigError",
    "ContextFull",
    "ConversationError",
    "DiskFull",
    "Distribution",
    "DownloadError",
    "Draft",
    "DraftLawError",
    "DraftPolicy",
    "Drafter",
    "Engine",
    "Event",
    "Finished",
    "GatedRepository",
    "Hardware",
    "Interrupted",
    "LanguageModel",
    "MemoryShort",
    "Message",
    "ModelBusy",
    "ModelFileError",
    "Notice",
    "NumericsError",
    "Observation",
    "Pair",
    "PairError",
    "PromptError",
    "PromptProgress",
    "RandomChooser",
    "RollbackRefused",
    "Rule",
    "SamplingParams",
    "SourceUnavailable",
    "SpecStats",
    "SpecllamaError",
    "StepEvent",
    "Stopper",
    "TemplateError",
    "TokenEvent",
    "UnsupportedModel",
    "UsageError",
    "Verdict",
    "load",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'specllama' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"specllama.{_ROOM_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
