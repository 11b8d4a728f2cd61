"""Which file of a repository is meant: quantisation names, split files, `user/repo[:quant]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specllama.base.errors import ModelFileError, SourceUnavailable, UsageError

# The order llama.cpp asks in where no quantisation is named: good quality at a small size, then the safe choice.
PREFERRED = ("Q4_K_M", "Q8_0")

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"[-._]((?:UD-)?(?:IQ|TQ|Q)\d[A-Z0-9_]*|BF16|F16|F32|MXFP4\w*|NVFP4\w*)$", re.IGNORECASE)
_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<tag>[\w./+ -]+))?")
# Files that end in .gguf but are not a language model one can load by itself.
_HELPERS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


@dataclass(frozen=True, slots=True)
class RepoSpec:
    """`user/repo`, `user/repo:quant` or `user/repo:file.gguf`, taken apart."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        tag = self.file or self.quant
        return f"{self.repo}:{tag}" if tag else self.repo


def parse_spec(text: str) -> RepoSpec:
    """`user/repo[:quant]` taken apart. Raises UsageError."""
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a repository; user/repo or user/repo:quant was expected")
    tag = match["tag"] or ""
    tag = "" if tag.lower() == "latest" else tag  # what other tools write for "the usual one"
    return RepoSpec(match["repo"], file=tag) if tag.lower().endswith(".gguf") else RepoSpec(match["repo"], quant=tag)


def split_names(name: str) -> tuple[str, ...]:
    """All parts of the split file that `name` is the first part of; of any other file, itself alone.

    Raises ModelFileError for a later part, saying which one to give.
    """
    match = _SPLIT.fullmatch(name)
    if match is None:
        return (name,)
    stem, part, count = match["stem"], int(match["part"]), int(match["count"])
    names = tuple(f"{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1))
    if part != 1 or not names:
        first = f"{stem}-00001-of-{count:05}.gguf"
        raise ModelFileError(
            f"{name} is part {part} of a model in {count} files, and only the first can be loaded",
            hint=f"give {first}; the others are found beside it",
        )
    return names


def quant_of(name: str) -> str:
    """The quantisation a file name ends with, in capitals ("Q4_K_M"); empty where it names none."""
    match = _SPLIT.fullmatch(name)
    stem = match["stem"] if match else name[: -len(".gguf")]
    found = _QUANT.search(stem)
    return found[1].upper() if found else ""


def model_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that can be loaded: no projectors and the like, of split models the first part."""
    return [name for name in names if name.lower().endswith(".gguf") and _is_model(name)]


def _is_model(name: str) -> bool:
    base = name.rsplit("/", 1)[-1].lower()
    match = _SPLIT.fullmatch(base)
    return not any(helper in base for helper in _HELPERS) and (match is None or int(match["part"]) == 1)


def choose_file(spec: RepoSpec, names: Sequence[str]) -> str:
    """The file of `names` that `spec` means; capitals do not matter.

    Without a quantisation: Q4_K_M, else Q8_0, else the first model. Raises SourceUnavailable with what there is.
    """
    models = model_files(names)
    if not models:
        raise SourceUnavailable(f"{spec.repo} holds no GGUF model")
    if not spec.file and not spec.quant:
        preferred = (name for quant in PREFERRED for name in models if quant_of(name) == quant)
        return next(preferred, models[0])
    matches = _with_file_name(models, spec.file) if spec.file else _with_quant(models, spec.quant)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise SourceUnavailable(f"{spec} means several files", hint=f"name one: {_choices(spec.repo, matches)}")
    there = [quant_of(name) or name for name in models]
    raise SourceUnavailable(f"{spec} is not there", hint=f"there is: {_choices(spec.repo, there)}")


def is_settled_by(wanted: RepoSpec, names: Sequence[str]) -> bool:
    """True if the file meant is certainly among `names`, which may be only some of the repository's."""
    asked = wanted if wanted.file or wanted.quant else RepoSpec(wanted.repo, quant=PREFERRED[0])
    try:
        choose_file(asked, names)
    except SourceUnavailable:
        return False
    return True


def _with_file_name(models: Sequence[str], file: str) -> list[str]:
    """The models of that path or, in whatever folder, of that name."""
    split_names(file.rsplit("/", 1)[-1])  # a later part is told apart from a missing file
    wanted = file.lower()
    return [name for name in models if wanted in (name.lower(), name.lower().rsplit("/", 1)[-1])]


def _with_quant(models: Sequence[str], quant: str) -> list[str]:
    """The models of that quantisation; `UD-` in front (another recipe of the same format) need not be said."""
    wanted = quant.upper()
    exact = [name for name in models if quant_of(name) == wanted]
    return exact or [name for name in models if quant_of(name).removeprefix("UD-") == wanted]


def _choices(repo: str, tags: Iterable[str]) -> str:
    return ", ".join(f"{repo}:{tag}" for tag in dict.fromkeys(tags))
