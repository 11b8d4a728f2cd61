"""The kernel paths of a target and its drafts that are worth measuring, and how they are paired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from specllama import llama
from specllama.base import child as children
from specllama.base.child import Tell
from specllama.base.errors import SpecllamaError
from specllama.kernels.library import BUFFER_TYPE
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, OWN, KernelPath, candidates
from specllama.llama.load_plan import placeable
from specllama.pairs.profile import ProfileKey
from specllama.tuning.child import Way

AskKernelPaths = Callable[[Sequence[Path]], list[tuple[KernelPath, ...]]]

MOST_PATHS = 3  # of one file that are measured in full; of more, a coarse comparison selects the best


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths to be measured of each file, the default first."""

    target: tuple[KernelPath, ...] = (DEFAULT,)
    draft: tuple[KernelPath, ...] = (DEFAULT,)
    variants: tuple[tuple[Path, tuple[KernelPath, ...]], ...] = ()  # derived drafts
    failure: str = ""  # why paths by tensor type are missing

    @property
    def ways(self) -> list[Way]:
        """Pairs of a target path and a draft path, each path at least once, the defaults first."""
        pairs = zip_longest(self.target, self.draft)
        return [Way(target or self.target[0], draft or self.draft[0]) for target, draft in pairs]

    def head(self, n: int) -> Paths:
        """The first `n` paths of each file."""
        short = tuple((path, several[:n]) for path, several in self.variants)
        return Paths(self.target[:n], self.draft[:n], short, self.failure)


def split(way: Way, default: Way) -> list[Way]:
    """Each path of a pair that died, with the other model's default, to find the one that dies."""
    if way.target == default.target or way.draft == default.draft:
        return []
    return [Way(way.target, default.draft), Way(default.target, way.draft)]


def _ask(files: Sequence[Path], tell: Tell) -> list[tuple[KernelPath, ...]]:
    """Entry point of the child process: llama.cpp knows which matrices fit."""
    tell("asking for kernel paths", 0.0)
    headers = map(llama.read_header, files)
    return [candidates(llama.matrices(header), header.n_weight_bytes) for header in headers]


def ask_child(files: Sequence[Path]) -> list[tuple[KernelPath, ...]]:
    """The paths of every file, asked in a child process: an unexpected question ends llama.cpp."""
    return children.run(partial(_ask, tuple(files)), lambda _what, _share: None)


def worth_measuring(subject: ProfileKey, variants: Sequence[Path], ask: AskKernelPaths = ask_child) -> Paths:
    """The paths of all files that this build has and the subject's options allow."""
    own = [subject.target] if subject.draft is None else [subject.target, subject.draft]
    several, failure = _several(subject, [*own, *variants], ask)
    draft = several[1] if len(own) > 1 else several[0][:1]
    return Paths(several[0], draft, tuple(zip(variants, several[len(own) :], strict=True)), failure)


def _several(
    subject: ProfileKey, files: Sequence[Path], ask: AskKernelPaths
) -> tuple[list[tuple[KernelPath, ...]], str]:
    build = llama.build_info()
    if not subject.target_options.use_extra_bufts:
        return [(AS_IN_FILE,)] * len(files), ""
    if not build.extra_buffer_types:
        return [(DEFAULT,)] * len(files), ""
    has_ours = BUFFER_TYPE in build.extra_buffer_types and subject.target_options.kernels
    whole: list[tuple[KernelPath, ...]] = [(OWN if has_ours else DEFAULT, AS_IN_FILE)] * len(files)
    has_gpu = any(device.is_gpu for device in build.devices)
    options = [subject.target_options] + [subject.draft_options or subject.target_options] * (len(files) - 1)
    asked = [placeable(each, has_gpu=has_gpu) for each in options]
    if not any(asked):
        return whole, ""
    try:
        paths = ask([file for file, wanted in zip(files, asked, strict=True) if wanted])
    except SpecllamaError as error:
        return whole, str(error)
    found = iter([_without_ours(each) for each in paths] if not subject.target_options.kernels else paths)
    return [next(found) if wanted else both for both, wanted in zip(whole, asked, strict=True)], ""


def _without_ours(paths: tuple[KernelPath, ...]) -> tuple[KernelPath, ...]:
    """The paths for a user who switches our kernels off."""
    return tuple(path for path in paths if not path.own)
