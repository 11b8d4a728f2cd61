"""Choose a file of a repository: quantization names, split files, `user/repo[:quant]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specllama.base.errors import ModelFileError, SourceUnavailable, UsageError
from specllama.base.text import figure

# llama.cpp's order of preference without a quantization: good quality at a small size, then nearly lossless.
PREFERRED = ("Q4_K_M", "Q8_0")
MOST_PARTS = 1000  # of a split model; the largest models on the Hub have about 200

SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"[-._]((?:UD-)?(?:IQ|TQ|Q)\d[A-Z0-9_]*|BF16|F16|F32|MXFP4\w*|NVFP4\w*)$", re.IGNORECASE)
_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<tag>[\w./+ -]+))?")
# Files that end in .gguf but cannot be loaded by themselves.
_HELPERS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


@dataclass(frozen=True, slots=True)
class RepoSpec:
    """`user/repo`, `user/repo:quant` or `user/repo:file.gguf`."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        tag = self.file or self.quant
        return f"{self.repo}:{tag}" if tag else self.repo


def parse_spec(text: str) -> RepoSpec:
    """Raises UsageError."""
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a repository (expected user/repo or user/repo:quant)")
    tag = match["tag"] or ""
    tag = "" if tag.lower() == "latest" else tag  # other tools' name for the default
    return RepoSpec(match["repo"], file=tag) if tag.lower().endswith(".gguf") else RepoSpec(match["repo"], quant=tag)


def split_name(stem: str, part: int, count: int) -> str:
    """The name of part `part` (1 = first) of a split model."""
    return f"{stem}-{part:05}-of-{count:05}.gguf"


def split_names(name: str) -> tuple[str, ...]:
    """All parts of a split file by its first part; any other file alone.

    Raises ModelFileError for a later part, and for more than MOST_PARTS.
    """
    match = SPLIT.fullmatch(name)
    if match is None:
        return (name,)
    stem, part, count = match["stem"], int(match["part"]), int(match["count"])
    if part != 1 or not count:
        raise ModelFileError(
            f"{name} is part {part} of {count} of a split model (expected part 1)",
            hint=f"give {split_name(stem, 1, count)}; the other parts are found beside it",
        )
    if count > MOST_PARTS:
        raise ModelFileError(
            f"{name} is part 1 of {figure(count)} (expected at most {figure(MOST_PARTS)})",
            hint="correct the number in its name",
        )
    return tuple(split_name(stem, i, count) for i in range(1, count + 1))


def quant_of(name: str) -> str:
    """The quantization at the end of a file name, in capitals ("Q4_K_M"); empty if the name has no such part."""
    match = SPLIT.fullmatch(name)
    stem = match["stem"] if match else name[: -len(".gguf")]
    found = _QUANT.search(stem)
    return found[1].upper() if found else ""


def model_files(names: Iterable[str]) -> list[str]:
    """The files that can be loaded by themselves: no projectors, and only the first part of a split model."""
    return [name for name in names if name.lower().endswith(".gguf") and _is_model(name)]


def _is_model(name: str) -> bool:
    base = name.rsplit("/", 1)[-1].lower()
    match = SPLIT.fullmatch(base)
    return not any(helper in base for helper in _HELPERS) and (match is None or int(match["part"]) == 1)


def choose_file(spec: RepoSpec, names: Sequence[str]) -> str:
    """The file of `names` for `spec`, in any case; without a quantization Q4_K_M, else Q8_0, else the first model.

    The beginning of a quantization is enough if one file has it: Q4 for Q4_K_M. Raises SourceUnavailable with the
    available files.
    """
    models = model_files(names)
    if not models:
        raise SourceUnavailable(f"{spec.repo} has no GGUF model")
    if not spec.file and not spec.quant:
        preferred = (name for quant in PREFERRED for name in models if quant_of(name) == quant)
        return next(preferred, models[0])
    matches = _with_file_name(models, spec.file) if spec.file else _with_quant(models, spec.quant)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise SourceUnavailable(f"{spec} matches several files", hint=f"give one: {_choices(spec.repo, matches)}")
    there = [quant_of(name) or name for name in models]
    raise SourceUnavailable(f"{spec} does not exist", hint=f"available: {_choices(spec.repo, there)}")


def is_settled_by(wanted: RepoSpec, names: Sequence[str]) -> bool:
    """True if `names`, which may be only some of the repository's files, contain the file of `wanted`.

    The beginning of a quantization settles nothing: another file may have it as well.
    """
    asked = wanted if wanted.file or wanted.quant else RepoSpec(wanted.repo, quant=PREFERRED[0])
    try:
        found = choose_file(asked, names)
    except SourceUnavailable:
        return False
    return bool(asked.file) or _is_quant(quant_of(found), asked.quant)


def _with_file_name(models: Sequence[str], file: str) -> list[str]:
    """The models of that path, or of that name in any folder."""
    split_names(file.rsplit("/", 1)[-1])  # raises for a later part
    wanted = file.lower()
    return [name for name in models if wanted in (name.lower(), name.lower().rsplit("/", 1)[-1])]


def _with_quant(models: Sequence[str], quant: str) -> list[str]:
    """The models of that quantization, else those whose quantization begins with it."""
    exact = [name for name in models if quant_of(name) == quant.upper()]
    alike = exact or [name for name in models if _is_quant(quant_of(name), quant)]
    return alike or [
        name for name in models if f"{quant_of(name)}_".removeprefix("UD-").startswith(f"{quant.upper()}_")
    ]


def _is_quant(found: str, wanted: str) -> bool:
    """`UD-` in front (another recipe of the same format) is optional."""
    return wanted.upper() in (found, found.removeprefix("UD-"))


def _choices(repo: str, tags: Iterable[str]) -> str:
    return ", ".join(f"{repo}:{tag}" for tag in dict.fromkeys(tags))
