"""The kernel paths of a target and its drafts that are worth measuring, and how they are paired."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from specllama import llama
from specllama.kernels.library import BUFFER_TYPE
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath, candidates
from specllama.pairs.profile import ProfileKey
from specllama.tuning.child import Way


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths to be measured of each file, the default first."""

    target: tuple[KernelPath, ...] = (DEFAULT,)
    draft: tuple[KernelPath, ...] = (DEFAULT,)

    @property
    def ways(self) -> list[Way]:
        """Pairs of a target path and a draft path, each path at least once, the defaults first."""
        pairs = zip_longest(self.target, self.draft)
        return [Way(target or self.target[0], draft or self.draft[0]) for target, draft in pairs]

    def head(self, n: int) -> Paths:
        """The first `n` paths of each file."""
        return Paths(self.target[:n], self.draft[:n])


def split(way: Way, default: Way) -> list[Way]:
    """Each path of a pair that died, with the other model's default, to find the one that dies."""
    if way.target == default.target or way.draft == default.draft:
        return []
    return [Way(way.target, default.draft), Way(default.target, way.draft)]


def worth_measuring(subject: ProfileKey) -> Paths:
    """The paths of target and draft that this build has and the subject's options allow. Raises ModelFileError."""
    wish = subject.target_options
    extra = [name for name in llama.build_info().extra_buffer_types if wish.kernels or name != BUFFER_TYPE]

    def paths_of(path: Path) -> tuple[KernelPath, ...]:
        return candidates(llama.read_header(path), extra) if wish.use_extra_bufts else (AS_IN_FILE,)

    target = paths_of(subject.target)
    return Paths(target, target[:1] if subject.draft is None else paths_of(subject.draft))


def of_draft(subject: ProfileKey, draft: Path) -> tuple[KernelPath, ...]:
    """The paths of another draft, as those of the subject's own. Raises ModelFileError."""
    return worth_measuring(replace(subject, draft=draft)).draft
