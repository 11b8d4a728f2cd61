"""The error tree: every error says what was found and carries a `hint` that says what to do."""

from __future__ import annotations


class SpecllamaError(Exception):
    """Base of every error a person can meet.

    `str(error)` is one sentence: what was found and what was expected. `hint` is one more: what to do about it
    (empty where nothing can be done). The command line prints both, never a traceback.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(SpecllamaError):
    """An option or argument that cannot be meant: exit code 2."""


class ConfigError(SpecllamaError):
    """A `models.toml` that cannot be read, or a name that it does not hold."""


class PromptError(SpecllamaError):
    """A prompt that cannot be answered: empty, or longer than the context; or a damaged file of prompts."""


class TemplateError(SpecllamaError):
    """A chat template that does not compile, or that refuses the conversation."""


class ConversationError(SpecllamaError):
    """A saved conversation that cannot be read or written."""


class ReportError(SpecllamaError):
    """A saved report that cannot be read, or one that cannot be written."""


class ModelFileError(SpecllamaError):
    """A model file that is missing, damaged, foreign, or newer than the installed llama.cpp."""


class UnsupportedModel(SpecllamaError):
    """A model that loads but cannot be served exactly, such as one that cannot roll its memory back."""


class PairError(SpecllamaError):
    """A draft that does not fit its target."""


class MemoryShort(SpecllamaError):
    """The model and its context would need more memory than is free."""


class DownloadError(SpecllamaError):
    """A model file that could not be fetched from any of its sources."""


class SourceUnavailable(DownloadError):
    """One source did not answer, does not hold the file, or may not be asked (offline)."""


class GatedRepository(DownloadError):
    """The repository wants a licence accepted or a token."""


class ChecksumMismatch(DownloadError):
    """The bytes are complete but not the ones that were promised."""


class DiskFull(DownloadError):
    """No room for the file, before or while it is written."""


class BackendError(SpecllamaError):
    """llama.cpp refused or failed: a return code, a crash in the probe, a missing library."""


class ContextFull(BackendError):
    """No room in the KV cache for the tokens of this call."""


class Interrupted(BackendError):
    """A `feed` or `eval` was stopped by the cancel flag; the KV holds only what `length` says."""


class RollbackRefused(BackendError):
    """llama.cpp would not remove tokens from its memory."""


class ModelBusy(SpecllamaError):
    """A second answer on a model whose first answer is still open."""


class NumericsError(SpecllamaError):
    """NaN or infinite numbers where a probability law was expected, or a row with every token masked."""


class AllForbidden(NumericsError):
    """A logit bias that forbids every token there is: of the target's an error, of a draft's no draft."""


class DraftLawError(SpecllamaError):
    """q is not the law the draft token was drawn from: q(token) = 0, or q does not sum to 1."""
