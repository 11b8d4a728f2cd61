"""The error classes."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TypeVar

_HINTS: Mapping[int | None, str] = {
    errno.EACCES: "make it readable for you",
    errno.EPERM: "make it readable for you",
    errno.EISDIR: "name a file in it",
    errno.EFBIG: "use a smaller file",
    errno.EIO: "use a copy on another disk",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), "close other programs"),
}


class SpecllamaError(Exception):
    """Base of every error that a user can see.

    `str(error)` is one sentence: what was found and what was expected. `hint` says what to do about it, or is empty.
    The command line prints both, and no traceback.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(SpecllamaError):
    """An invalid option or argument: exit code 2."""


class ConfigError(SpecllamaError):
    """A `models.toml` that cannot be read, or an unknown name."""


class PromptError(SpecllamaError):
    """A prompt that is empty or longer than the context, or a damaged file of prompts."""


class TemplateError(SpecllamaError):
    """A chat template that does not compile, or rejects the conversation."""


class ConversationError(SpecllamaError):
    """A saved conversation that cannot be read or written."""


class ReportError(SpecllamaError):
    """A saved report that cannot be read or written."""


class ModelFileError(SpecllamaError):
    """A model file that is missing, damaged, of another format, or newer than the installed llama.cpp."""


class UnsupportedModel(SpecllamaError):
    """A model that loads but cannot be decoded exactly, such as one that cannot remove tokens from its memory."""


class PairError(SpecllamaError):
    """A draft that does not fit its target."""


class MemoryShort(SpecllamaError):
    """The model and its context need more memory than is free."""


class DownloadError(SpecllamaError):
    """A model file that could not be fetched from any of its sources."""


class SourceUnavailable(DownloadError):
    """One source did not answer, does not have the file, or is off limits (offline)."""


class GatedRepository(DownloadError):
    """The repository requires an accepted licence or a token."""


class ChecksumMismatch(DownloadError):
    """The file is complete, but its SHA-256 is not the expected one."""


class DiskFull(DownloadError):
    """No space for the file, before or while it is written."""


class BackendError(SpecllamaError):
    """llama.cpp failed: a return code, a crash in the probe, a missing library."""


class ContextFull(BackendError):
    """The KV cache has no room for the tokens of this call."""


class Interrupted(BackendError):
    """The cancel flag stopped a `feed` or `eval`; the KV cache holds `length` tokens."""


class RollbackRefused(BackendError):
    """llama.cpp did not remove tokens from its memory."""


class ModelBusy(SpecllamaError):
    """A second answer on a model whose first answer is still open."""


class NumericsError(SpecllamaError):
    """NaN or infinite numbers instead of a distribution, or a row with every token masked."""


class AllForbidden(NumericsError):
    """A logit bias that forbids every token: an error for the target, no draft for the draft model."""


class DraftLawError(SpecllamaError):
    """q is not the distribution of the draft token: q(token) = 0, or q does not sum to 1."""


_Kind = TypeVar("_Kind", bound=SpecllamaError)


def unreadable(what: object, error: OSError | ValueError, kind: type[_Kind], expected: str = "a text file") -> _Kind:
    """The error for a file that cannot be opened or read. `what`: its path, after the option that named it."""
    reason = getattr(error, "strerror", None) or error
    hint = _HINTS.get(getattr(error, "errno", None), "check the path")
    return kind(f"{what} cannot be read: {reason} (expected {expected})", hint=hint)


def error_of_request(error: Exception) -> SpecllamaError:
    """The error of one request among many; one that this program does not expect is a bug to report.

    Raises MemoryError: that is no error of one request.
    """
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, SpecllamaError):
        return error
    known = SpecllamaError(
        f"internal error: {type(error).__name__}: {error}",
        hint="please report it with the output of SPECLLAMA_DEBUG=1",
    )
    known.__cause__ = error
    return known
