"""Search files or repositories for drafts of a target and rank them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from specllama import llama
from specllama.base.disk import FetchWatch, models_dir
from specllama.base.errors import SpecllamaError
from specllama.drafters import SIMPLE
from specllama.files import hub, hub_cache
from specllama.files.hub_headers import header_only
from specllama.files.model import Model
from specllama.files.repo_files import model_files
from specllama.llama import Header, LoadOptions
from specllama.pairs import profile as profiles
from specllama.pairs.ask import Hardware
from specllama.pairs.check import Candidate, check_pair
from specllama.pairs.model_rows import TOO_LARGE, TOO_SMALL, MachineMemory, family
from specllama.pairs.naming import Wanted
from specllama.pairs.profile import Profile
from specllama.pairs.report import CompatReport
from specllama.pairs.setup import key_of

_N_REPOS = 12  # read from the Hub; each costs some megabytes
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
_DRAFT = LoadOptions(max_block=1)


@contextmanager
def look_at(wanted: Wanted, *, offline: bool = False, watch: FetchWatch | None = None) -> Iterator[Path]:
    """The model's file on this disk, else its header from the Hub. Raises DownloadError and UsageError."""
    if isinstance(wanted, Path):
        yield wanted
        return
    model = wanted if isinstance(wanted, Model) else hub.repo_model(wanted, offline=offline, watch=watch)
    if path := hub.find(model):
        yield path
        return
    with header_only(model, offline=offline, watch=watch) as path:
        yield path


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A possible draft, and whether it fits."""

    name: str
    fits: bool
    reason: str  # empty = no failure and no warning
    n_bytes: int | None = None  # of its weights
    ratio: float | None = None  # to the target, of the bytes that a pass reads
    n_warnings: int = 0
    profile: Profile | None = None  # of the pair on this machine
    gain: float | None = None  # predicted speed over plain decoding
    place: str = ""  # the value of -md

    @property
    def order(self) -> tuple[object, ...]:
        """Best first: those that fit, then those that were measured or have a usual size, then the largest gain."""
        off_size = self.ratio is None or not TOO_SMALL <= self.ratio <= TOO_LARGE
        doubts = (False, 0) if self.profile is not None else (off_size, self.n_warnings)
        return not self.fits, doubts, -(self.gain or 0.0), self.n_bytes or 0, self.name


OpenHeader = Callable[[], AbstractContextManager[Path]]  # opens a file, or its header


def judge(target: Candidate, name: str, look: OpenHeader, machine: MachineMemory, hardware: Hardware) -> FoundDraft:
    """Whether one candidate fits; its gain is not predicted yet. A candidate that cannot be read stops nothing."""
    try:
        with look() as path:
            header = llama.read_header(path)
            ratio = header.n_pass_bytes / max(target.header.n_pass_bytes, 1)
            if target.header.n_weight_bytes and ratio >= 1:
                return FoundDraft(name, False, "it is no smaller than the target", header.n_weight_bytes, ratio)
            report = check_pair(target, lambda: Candidate(header, _DRAFT), machine)
            pair = key_of(target.header, header, target.options, hardware, SIMPLE)
    except SpecllamaError as error:
        return FoundDraft(name, False, str(error))
    profile = profiles.find(pair).profile if report.fits else None
    return FoundDraft(name, report.fits, _reason(report), header.n_weight_bytes, ratio, len(report.warnings), profile)


def _reason(report: CompatReport) -> str:
    if report.failures:
        return report.failures[0].reason
    return f"see: {', '.join(row.test for row in report.warnings)}" if report.warnings else ""


def files_in(folder: Path, target: Header) -> Iterator[Path]:
    """The models below a folder except the target, each file once; of split models the first part."""
    seen = {part.resolve() for part in target.parts}
    for path in sorted(folder.rglob("*.gguf")):
        if model_files([path.name]) and path.is_file() and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def folders_here() -> Sequence[Path]:
    """The folders with models: specllama's own and the cache of the Hub tools."""
    return [folder for folder in (models_dir(), hub_cache.cache_dir()) if folder.is_dir()]


def repos_for(target: Header, n_params: int, watch: FetchWatch) -> list[str]:
    """Repositories of the target's family with a smaller size in their names. Raises SourceUnavailable."""
    names = hub.search(family(target), 10 * _N_REPOS, watch)
    sizes = {name: size for name in names if (size := size_in_name(name)) is not None and size < n_params / 2}
    return sorted(sizes, key=lambda name: (sizes[name], names.index(name)))[:_N_REPOS]


def size_in_name(name: str) -> float | None:
    """The number of parameters in a model's name: 5e8 for "Qwen2.5-0.5B-Instruct-GGUF"."""
    match = _SIZE_IN_NAME.search(name)
    return float(match[1]) * (1e9 if match[2] in "bB" else 1e6) if match else None
