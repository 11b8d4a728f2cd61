"""Profiles: what was measured of a pair on this machine, valid until a part of it changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

from platformdirs import user_state_path

from specllama.base import disk
from specllama.base.cpu import this_cpu
from specllama.base.disk import Seen, Silent
from specllama.base.jsonable import UNREADABLE, from_plain, parsed, to_plain, typed
from specllama.base.ranges import AUTO
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import LEAST_RATE, CostProfile
from specllama.drafters.length import TUNED
from specllama.files.inventory import files_of
from specllama.llama import LoadOptions, build_info, tested_kernels
from specllama.llama.kernel_path import KernelPath
from specllama.llama.load_plan import physical_cores

VERSION = 5  # of the file; other versions are not read

LOOKUP_ALONE = "lookup"  # the strategy without a draft model

# After so many answers the costs are measured again when no answer waits: a block that seems too expensive is drafted
# no more, so answers cannot correct its cost. That takes at most 2 s or the time of 20 tokens.
LOOK_AFTER = 32

# "use": measured when the pair was first used; "quick" and "thorough": by `specllama tune`.
ProfileSource: TypeAlias = Literal["use", "quick", "thorough"]

# The load options that change the cost of a pass. The kernel path is missing: tuning chooses it.
_WISHES = ("n_threads", "n_threads_batch", "n_gpu_layers", "flash_attn", "type_k", "type_v", "kernels")


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """The expected figures for one class of prompts."""

    name: str
    greedy: bool  # at temperature 0; else at the default settings
    acceptance: float  # of a drafted token, if all tokens before it are accepted
    confidence: float  # of the draft, mean
    n_max: int  # the best fixed draft length; 0 = plain decoding is fastest
    speedup: float  # over plain decoding on its own fastest kernel path


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads for each kind of pass."""

    decode: int  # one row of the target
    verify: int  # several rows of the target
    draft: int


@dataclass(frozen=True, slots=True)
class Habit:
    """The acceptance of the draft's tokens in answers at temperature 0, or in all others."""

    greedy: bool
    acceptance: float  # of a token that was judged, if all before it are accepted
    confidence: float  # of the draft, mean over the same tokens
    weight: float = 0.0  # in answers; bounded, so that old answers fade


@dataclass(frozen=True, slots=True)
class RowCost:
    """A cost that answers showed, in units of T(1)."""

    n_rows: int
    cost: float
    weight: float  # in answers; bounded


@dataclass(frozen=True, slots=True)
class Evidence:
    """What answers showed since the profile was measured. `pairs.learning` takes it over once it differs clearly."""

    verify: tuple[RowCost, ...] = ()
    draft: RowCost | None = None  # the draft's pass over one row
    attention: RowCost | None = None  # of one row and one token of context
    habits: tuple[Habit, ...] = ()
    n_answers: int = 0  # that taught since the costs were last measured


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """The least seconds that loading took, so that reading from a cold disk does not count for good; 0 = not seen."""

    both: float = 0.0  # target and draft
    target: float = 0.0  # alone

    def of_draft(self, share: float) -> float:
        """What the draft adds; 0 if it is not known. `share`: its bytes among those of both files.

        Never more than the target takes: what a busy machine showed of both would keep the draft from being loaded.
        """
        return min(max(self.both - self.target, 0.0), self.target) if self.target else share * self.both

    def least(self, other: LoadSeconds) -> LoadSeconds:
        """The shorter ones of both."""
        both, target = (self.both, other.both), (self.target, other.target)
        return LoadSeconds(min(filter(None, both), default=0.0), min(filter(None, target), default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of passes, the value of drafts, and the way of loading that they hold for."""

    made: str  # UTC, ISO 8601
    source: ProfileSource = "thorough"
    target_path: KernelPath
    draft_path: KernelPath
    step_s: float  # T(1)
    costs: CostProfile
    classes: tuple[ClassFigures, ...] = ()  # empty without a draft, and if answers have not been recorded
    threads: Threads | None = None  # None = as the options say
    derived: Path | None = None  # a derived draft to use in place of the pair's own
    strategy: str = SIMPLE  # whose drafts were measured; see `ProfileKey`
    plain_path: KernelPath | None = None  # the fastest for plain decoding; None in older profiles
    habits: tuple[Habit, ...] = ()  # learned from answers; they replace those of the classes
    evidence: Evidence = Evidence()
    loads: LoadSeconds = LoadSeconds()
    doubted: bool = False  # measured once on a busy machine that the draft cannot pay: not used

    @property
    def origin(self) -> str:
        """How and when it was made, such as "tuned 2026-11-30"."""
        how = "tuned" if self.source != "use" else "learned" if self.strategy == LOOKUP_ALONE else "measured"
        return f"{how} {self.made[:10]}"

    @property
    def draft_can_pay(self) -> bool:
        """True if some draft length pays when every token is accepted. Else the draft is not loaded."""
        return self.strategy != LOOKUP_ALONE and self.costs.best_case > LEAST_RATE

    @property
    def is_partial(self) -> bool:
        """True if an answer waited for the measurement, so that T(n) of some short blocks was assumed."""
        return self.draft_can_pay and any(n <= TUNED for n in self.costs.assumed)

    @property
    def is_untaught(self) -> bool:
        """True if it was measured at the first use and nothing was learned since."""
        return self.source == "use" and not self.classes and not self.habits and self.evidence == Evidence()

    @property
    def is_due(self) -> bool:
        """True if so many answers have passed that costs are to be measured again.

        Not if it was measured, rather than learned, that the draft cannot pay.
        """
        may_pay = self.draft_can_pay or self.evidence.draft is not None
        return self.strategy != LOOKUP_ALONE and may_pay and self.evidence.n_answers >= LOOK_AFTER

    def habit(self, *, greedy: bool) -> Habit | None:
        """The acceptance at that temperature: learned, else the mean of the classes; None if it is not known."""
        for each in self.habits:
            if each.greedy == greedy:
                return each
        seen = [each for each in self.classes if each.greedy == greedy]
        if not seen:
            return None
        return Habit(greedy, fmean(each.acceptance for each in seen), fmean(each.confidence for each in seen))

    def prior(self, *, greedy: bool) -> Prior:
        """What the controller assumes of the draft at the start of an answer."""
        habit = self.habit(greedy=greedy)
        if habit is None:
            return Prior()
        base = habit.acceptance - Prior().slope * habit.confidence
        return Prior(typical=habit.acceptance, base=base, known=True)

    def to_json(self) -> dict[str, object]:
        """Plain data for `from_plain`, with the names of the kernel paths."""
        paths = {"target_path": self.target_path, "draft_path": self.draft_path, "plain_path": self.plain_path}
        return {**to_plain(self), **{name: path.to_json() if path else None for name, path in paths.items()}}


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """The files and load options that a profile is for."""

    target: Path
    target_options: LoadOptions
    draft: Path | None = None
    draft_options: LoadOptions | None = None
    model_strategy: str = SIMPLE  # how the draft model drafts: SIMPLE, or TRANSLATED by the texts of its tokens

    @property
    def strategy(self) -> str:
        """The strategy whose drafts are measured; `chain` uses the same figures."""
        return LOOKUP_ALONE if self.draft is None else self.model_strategy

    @property
    def key(self) -> str:
        """The name of the profile's file."""
        facts = [str(self.target.resolve()), _wish(self.target_options)]
        if self.draft is not None and self.draft_options is not None:
            facts += [str(self.draft.resolve()), _wish(self.draft_options)]
            facts += ["by text"] if self.model_strategy == TRANSLATED else []
        return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _wish(options: LoadOptions) -> str:
    more = [*([] if options.rollback == AUTO else [options.rollback]), *([options.rpc] if options.rpc else [])]
    return json.dumps([*(getattr(options, name) for name in _WISHES), *more])


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """A valid profile, and why that of `tune` is not used."""

    profile: Profile | None = None
    stale: str = ""  # what changed since `tune` made it


def path_of(subject: ProfileKey, source: ProfileSource = "thorough") -> Path:
    """The profile's file. It is state, not cache: tuning takes minutes. What `tune` measured has a file of its own."""
    name = f"{subject.key}.use.json" if source == "use" else f"{subject.key}.json"
    return user_state_path("specllama") / "profiles" / name


def _files(subject: ProfileKey, derived: Path | None) -> dict[str, Path]:
    """The files that must not change. The keys are shown to the user."""
    models = {"the target's file": subject.target}
    if subject.draft is not None:
        models["the draft's file"] = subject.draft
    if derived is not None:
        models[f"the derived draft {derived.stem}"] = derived
    return {
        f"part {n} of {name}" if n > 1 else name: file
        for name, path in models.items()
        for n, file in enumerate(files_of(path), 1)
    }


def _circumstances() -> dict[str, str]:
    """What else must not change."""
    cpu, kernels = this_cpu(), tested_kernels.usable()
    return {
        "the installed llama.cpp": build_info().fingerprint,
        "the set of specllama's kernels": "" if kernels is None else kernels.parent.name + tested_kernels.wanted_isa(),
        "the CPU": f"{cpu.model} {cpu.fingerprint} {physical_cores()}",
    }


def save(subject: ProfileKey, profile: Profile, seen: Mapping[Path, Seen] | None = None) -> Path:
    """Replace the profile. Returns its path. `seen`: the files when they were measured; others are looked at now."""
    with _writing(subject):
        return _write(subject, profile, seen or {})


def begin(
    subject: ProfileKey, first: Profile, change: Callable[[Profile], Profile], seen: Mapping[Path, Seen]
) -> Profile:
    """Change the kept profile, or `first` if none is kept; returns it. `seen`, and raises: see `save` and `update`."""
    with _writing(subject):
        changed = change(_read(subject, path_of(subject, first.source)).profile or first)
        _write(subject, changed, seen)
        return changed


def _write(subject: ProfileKey, profile: Profile, seen: Mapping[Path, Seen]) -> Path:
    path = path_of(subject, profile.source)
    files = {name: seen.get(file) or disk.seen(file) for name, file in _files(subject, profile.derived).items()}
    record = {
        "version": VERSION,
        "files": to_plain(files),
        "circumstances": _circumstances(),
        "profile": profile.to_json(),
    }
    disk.write_own(path, json.dumps(record, indent=1).encode("utf-8"))
    return path


def update(subject: ProfileKey, profile: Profile, change: Callable[[Profile], Profile]) -> Profile | None:
    """Change the kept profile if it is still the one that `profile` comes from; returns it, None if it is not.

    The files are not looked at again. Raises OSError, and DownloadError if the lock cannot be made.
    """
    path = path_of(subject, profile.source)
    with _writing(subject):
        try:
            record = parsed(path.read_text(encoding="utf-8"))
            kept = from_plain(Profile, record["profile"])
        except UNREADABLE:
            return None
        if (kept.made, kept.source) != (profile.made, profile.source):
            return None
        changed = change(kept)
        disk.write_own(path, json.dumps({**record, "profile": changed.to_json()}, indent=1).encode("utf-8"))
        return changed


@contextmanager
def _writing(subject: ProfileKey) -> Iterator[None]:
    """One process at a time changes the profile."""
    with disk.only_one(f"profile-{subject.key}", Silent()):
        yield


def find(subject: ProfileKey) -> FoundProfile:
    """The profile, if one exists and still holds, that of `tune` first; a stale one of `tune` is named in any case.

    A damaged file raises nothing.
    """
    tuned = _read(subject, path_of(subject))
    if tuned.profile is not None:
        return tuned
    used = _read(subject, path_of(subject, "use")).profile
    return FoundProfile(None if used is None or used.doubted else used, tuned.stale)


def is_doubted(subject: ProfileKey) -> bool:
    """True if the first use of the pair gave a `doubted` profile that still holds."""
    used = _read(subject, path_of(subject, "use")).profile
    return used is not None and used.doubted


def _read(subject: ProfileKey, path: Path) -> FoundProfile:
    try:
        record = parsed(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            return FoundProfile(stale="another version of specllama made it")
        profile = from_plain(Profile, record["profile"])
        seen, then = typed(dict[str, Seen], record["files"]), record["circumstances"]
        files = _files(subject, profile.derived)
        changed = [name for name in {**seen, **files} if not _is_as_seen(files.get(name), seen.get(name))]
        changed += [name for name, fact in _circumstances().items() if then.get(name) != fact]
        if changed:
            return FoundProfile(stale=f"{' and '.join(changed)} changed since")
        return FoundProfile(profile)
    except (FileNotFoundError, NotADirectoryError):
        return FoundProfile()
    except OSError as error:
        return FoundProfile(stale=f"its file cannot be read: {error.strerror}")
    except UNREADABLE:
        return FoundProfile(stale="its file is damaged")


def _is_as_seen(path: Path | None, then: Seen | None) -> bool:
    """Computes the checksum once if only dates or the place on the disk changed: tuning again takes minutes."""
    try:
        return path is not None and then is not None and disk.is_same(path, then.sha256, then.stamp)
    except OSError:
        return False
