"""Profiles: what `specllama tune` found out about a pair on this machine, kept until something of it changes."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

from specllama.base import disk as storage
from specllama.base.cpu import this_cpu
from specllama.base.errors import ConfigError, ReportError
from specllama.base.jsonable import from_plain, parsed, to_plain
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import LEAST_RATE, CostProfile
from specllama.llama import LoadOptions, build_info
from specllama.llama.kernel_path import KernelPath
from specllama.llama.load_plan import physical_cores

VERSION = 3  # of the file; another one is not read

LOOKUP_ALONE = "lookup"  # the strategy where there is no draft model

# Of the load options, those that change what a pass costs. The kernel path is not among them: it is what tuning finds.
_WISHES = ("n_threads", "n_threads_batch", "n_gpu_layers", "flash_attn", "type_k", "type_v")


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """What to expect of one class of prompts."""

    name: str
    greedy: bool  # at temperature 0; else at the default settings
    acceptance: float  # of a drafted token, all before it being accepted
    confidence: float  # of the draft, on average
    n_max: int  # the best fixed draft length; 0 = plain decoding is fastest
    speedup: float  # over plain decoding on its own fastest kernel path


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads compute each kind of pass."""

    decode: int  # one row of the target
    verify: int  # several of its rows
    draft: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What passes cost and what drafts are worth, and the way of loading that goes with it."""

    made: str  # UTC, ISO 8601
    quick: bool
    target_path: KernelPath
    draft_path: KernelPath
    step_s: float  # T(1)
    costs: CostProfile
    classes: tuple[ClassFigures, ...]  # empty where there is no draft
    threads: Threads | None = None  # None = as the options say
    derived: Path | None = None  # the draft that is faster here than the one it was derived from; None = that one
    strategy: str = SIMPLE  # whose drafts were measured; see `ProfileKey`
    plain_path: KernelPath | None = None  # where plain decoding alone is fastest; None = made when nobody asked

    @property
    def draft_can_pay(self) -> bool:
        """Would some draft length pay if every token were accepted? Else the draft need not even be loaded."""
        costs = self.costs
        lengths = range(1, costs.verify[-1][0])
        best = max(((k + 1) / (k * costs.draft_cost() + costs.verify_cost(k + 1)) for k in lengths), default=0.0)
        return bool(self.classes) and best > LEAST_RATE

    def prior(self, *, greedy: bool) -> Prior:
        """What to believe of the draft before it was seen at work in an answer: what it was worth when it was tuned."""
        seen = [each for each in self.classes if each.greedy == greedy]
        if not seen:
            return Prior()
        typical = sum(each.acceptance for each in seen) / len(seen)
        sure = sum(each.confidence for each in seen) / len(seen)
        return Prior(typical=typical, base=typical - Prior().slope * sure)

    def to_json(self) -> dict[str, object]:
        """Plain data; kernel paths with their names."""
        paths = {"target_path": self.target_path, "draft_path": self.draft_path, "plain_path": self.plain_path}
        return {**to_plain(self), **{name: path.to_json() if path else None for name, path in paths.items()}}

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """The inverse of `to_json`. Raises ConfigError."""
        try:
            return from_plain(cls, data, "the profile")
        except ReportError as error:
            raise ConfigError(f"the profile cannot be read: {error}", hint="run `specllama tune` again") from None


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What is tuned: files, and how they are wished to be loaded. Another wish is another profile."""

    target: Path
    target_options: LoadOptions
    draft: Path | None = None
    draft_options: LoadOptions | None = None
    model_strategy: str = SIMPLE  # how the draft model drafts: SIMPLE, or TRANSLATED by the texts of its tokens

    @property
    def strategy(self) -> str:
        """Whose drafts are measured; `chain` drafts like either, and looks up besides."""
        return LOOKUP_ALONE if self.draft is None else self.model_strategy

    @property
    def key(self) -> str:
        """Names the profile."""
        facts = [str(self.target.resolve()), _wish(self.target_options)]
        if self.draft is not None and self.draft_options is not None:
            facts += [
                str(self.draft.resolve()),
                _wish(self.draft_options),
                *(["by text"] if self.model_strategy == TRANSLATED else []),
            ]
        return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _wish(options: LoadOptions) -> str:
    return json.dumps([getattr(options, name) for name in _WISHES])


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """The profile of a subject, or why there is none that holds."""

    profile: Profile | None = None
    stale: str = ""  # what has changed since it was made


def path_of(subject: ProfileKey) -> Path:
    """Where the profile is kept. It took minutes to find out, so it is state and no cache."""
    return user_state_path("specllama") / "profiles" / f"{subject.key}.json"


def kept(subject: ProfileKey) -> bool:
    """Was it tuned at all, whether or not the profile still holds?"""
    return path_of(subject).is_file()


def _circumstances(subject: ProfileKey, derived: Path | None) -> dict[str, object]:
    """What must be as it was; the keys are told to people."""
    cpu = this_cpu()
    facts: dict[str, object] = {
        "the target's file": _stamp(subject.target),
        "the installed llama.cpp": build_info().fingerprint,
        "the CPU": f"{cpu.model} {cpu.fingerprint} {physical_cores()}",
    }
    if subject.draft is not None:
        facts["the draft's file"] = _stamp(subject.draft)
    if derived is not None:
        facts[f"the derived draft {derived.stem}"] = _stamp(derived) if derived.is_file() else None
    return facts


def _stamp(path: Path) -> list[int]:
    """Changes when the file does. Hashing gigabytes is not for every start."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def save(subject: ProfileKey, profile: Profile) -> Path:
    """Keep the profile, in one step; the one before it goes. Returns where it is."""
    path = path_of(subject)
    record = {
        "version": VERSION,
        "circumstances": _circumstances(subject, profile.derived),
        "profile": profile.to_json(),
    }
    storage.write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def find(subject: ProfileKey) -> FoundProfile:
    """The subject's profile, if there is one and nothing has changed since. Never raises for what is in the file."""
    try:
        record = parsed(path_of(subject).read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            return FoundProfile(stale="this version of specllama measures otherwise")
        profile = Profile.from_json(record["profile"])
        then, now = record["circumstances"], _circumstances(subject, profile.derived)
        changed = [name for name, fact in now.items() if then.get(name) != fact]
        if changed:
            return FoundProfile(stale=f"{' and '.join(changed)} changed since")
        return FoundProfile(profile)
    except FileNotFoundError:
        return FoundProfile()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return FoundProfile(stale="its file is damaged")
