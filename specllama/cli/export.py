"""`specllama export`: write a checked pair as a configuration of other engines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from sys import maxsize
from typing import Annotated, Any, ClassVar

from specllama.base.disk import meant, write_text
from specllama.base.errors import PairError, UsageError
from specllama.base.ranges import several, word
from specllama.base.text import counted
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import CTX_SIZE, MIN_P, SPEC_TYPE, TEMP, TOP_K, TOP_P, Color, PairOptions, Quiet
from specllama.cli.check.command import CheckedPair, compare, pair_choice
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.visible import wrapped
from specllama.core.sampling import SamplingParams
from specllama.drafters import TRANSLATED
from specllama.drafters.controller import CostProfile
from specllama.drafters.length import TUNED, UNTUNED
from specllama.files import hub
from specllama.files.catalog import Catalog, load_catalog
from specllama.files.model import HubSource, Model
from specllama.files.models_toml import REPO
from specllama.llama import Header
from specllama.pairs.ask import Hardware
from specllama.pairs.check import this_machine
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.engines import ENGINES, ExportedModel, ExportedPair, OtherEngine
from specllama.pairs.find_drafts import look_at
from specllama.pairs.naming import Wanted
from specllama.pairs.profile import Profile
from specllama.tuning.forecast import FLAT, speedup

# Where a GGUF file may name the repository that it was made from. `general.base_model` is another one: what the
# original was trained from.
_SOURCES = ("general.source.huggingface.repository", "general.source.repo_url", "general.source.url")
_DEFAULTS = SamplingParams()
_WIDTH = 100  # of a comment


def _repo(name: str, text: object) -> str:
    if not REPO.fullmatch(str(text)):
        raise UsageError(f"{name} is {str(text)!r}, expected user/repo")
    return str(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """For which engines, and where to write."""

    title: ClassVar[str] = "Export"

    to: Annotated[
        Any, Option("--to LIST", f"The engines, separated by commas: {', '.join(ENGINES)}.", several(word(*ENGINES)))
    ] = None
    output: Annotated[str | None, Option("-o --output DIR", "The folder for the files. [stdout for one]")] = None
    original: Annotated[
        str | None, Option("--original USER/REPO", "The repository of the target's own weights.", _repo)
    ] = None
    original_draft: Annotated[str | None, Option("--original-draft USER/REPO", "The same for the draft.", _repo)] = None
    spec_type: Annotated[str, replace(SPEC_TYPE, help="draft-tli exports a pair with different tokenizers.")] = "auto"
    ctx_size: Annotated[int | None, CTX_SIZE] = None
    quiet: Quiet = False
    color: Color = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """The settings of sampling that every engine has."""

    title: ClassVar[str] = "Sampling"

    temp: Annotated[float, TEMP] = _DEFAULTS.temperature
    top_k: Annotated[int, TOP_K] = _DEFAULTS.top_k
    top_p: Annotated[float, TOP_P] = _DEFAULTS.top_p
    min_p: Annotated[float, MIN_P] = _DEFAULTS.min_p


@with_options
def export(models: PairOptions, options: ExportOptions, sampling: FilterOptions) -> None:
    """Write a pair as a configuration of other engines.

    The pair is checked first, as by `specllama check`, without the memory of this machine. The draft length follows
    from the acceptance that tune or earlier answers measured. Each file says how to start the engine, which version of
    it was checked, and what differs there in exactness.

    A file in DIR with other contents is not replaced: nothing is written, and the exit code is 2.

    Exit code 1: the draft does not fit, or an engine cannot run the pair; the other files are written.
    """
    output = open_output(color=options.color, quiet=options.quiet)
    if options.to is None:
        raise UsageError("--to is missing", hint=f"name engines: --to {','.join(ENGINES)}")
    if options.output is None and len(options.to) > 1:
        raise UsageError(f"stdout holds one file, and {len(options.to)} are asked for", hint="add -o DIR")
    folder = None if options.output is None else meant(options.output)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"-o {options.output} is a file, expected a folder")
    pair = _exported(models, options, sampling, output)
    texts: dict[str, str] = {}
    refused: dict[str, list[str]] = {}  # the engines of each reason
    hints: list[str] = []
    for engine in (ENGINES[name] for name in options.to):
        try:
            engine.require(pair)
        except PairError as error:
            refused.setdefault(str(error), []).append(engine.title)
            hints += [error.hint] * (error.hint != "" and error.hint not in hints)
        else:
            texts[engine.file] = file_text(engine, pair)
    if folder is None:
        for text in texts.values():
            output.text(text.removesuffix("\n"))
    else:
        _write(folder, texts, output)
    if refused:
        reasons = [f"{', '.join(titles)}: {reason}" for reason, titles in refused.items()]
        raise PairError("; ".join(reasons), hint="; ".join(hints))


def _write(folder: Path, texts: Mapping[str, str], output: Output) -> None:
    """Write all files, or none if one exists with other contents: it may be edited. Raises UsageError."""
    paths = {folder / name: text for name, text in texts.items()}
    for path, text in paths.items():
        if path.exists() and not (path.is_file() and path.read_bytes().splitlines() == text.encode().splitlines()):
            raise UsageError(f"{path} exists with other contents", hint="name another folder with -o, or remove it")
    for path, text in paths.items():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        output.path(path)


def file_text(engine: OtherEngine, pair: ExportedPair) -> str:
    """The file of an engine: how to start it and what differs there, as comments, then the settings."""
    start = engine.start.format(target=shlex.quote(pair.target.original or ""), file=engine.file)
    head = [
        f"{pair.title}, exported by specllama for {engine.title}. Checked with {engine.checked}.",
        f"Start: {start}",
        f"Draft length {pair.n_draft}: {pair.reason}.",
        "",
        "What differs from specllama:",
        *(f"- {note}" for note in engine.notes(pair)),
    ]
    lines = engine.body(pair).splitlines()
    n_before = 1 if lines[0].startswith("#!") else 0
    return "\n".join([*lines[:n_before], *_comments(head), *lines[n_before:]]) + "\n"


def _comments(lines: Iterable[str]) -> Iterator[str]:
    """As comments, wrapped; no text can leave its comment."""
    for line in lines:
        first, *more = wrapped(line, _WIDTH).splitlines() or [""]
        yield f"# {first}".rstrip()
        yield from (f"#   {each}" for each in more)


def _exported(models: PairOptions, options: ExportOptions, sampling: FilterOptions, output: Output) -> ExportedPair:
    """The pair, if the draft fits. Raises PairError, and as `compare`."""
    choice = pair_choice(models, Hardware(n_ctx=options.ctx_size), options.spec_type, output)
    # The engines run elsewhere.
    compared = compare(choice, output, replace(this_machine(), memory_free=maxsize, gpu_free=maxsize))
    compared.report.require()
    catalog, choice = load_catalog(), compared.choice
    by_name = not (models.model or models.hf_repo)
    named = catalog.pair(models.pair) if by_name else None
    params = SamplingParams(temperature=sampling.temp, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    default = UNTUNED if named is None or named.defaults.n_max is None else named.defaults.n_max
    n_draft, reason = draft_length(compared, default, greedy=params.greedy)
    assert choice.draft is not None
    target, draft = (
        _part(wanted, header, given, catalog, offline=models.offline)
        for wanted, header, given in zip(
            (choice.target, choice.draft), compared.headers, (options.original, options.original_draft), strict=True
        )
    )
    return ExportedPair(
        title=f"Pair {named.name}" if named else f"{target.label}, drafted by {draft.label}",
        target=target,
        draft=draft,
        by_text=choice.model_strategy == TRANSLATED,
        n_draft=n_draft,
        reason=reason,
        params=params,
        n_ctx=choice.context(compared.headers[0]),
    )


def _part(wanted: Wanted, header: Header, given: str | None, catalog: Catalog, *, offline: bool) -> ExportedModel:
    """A model with the names that other engines need. `given`: the repository that the user names."""
    assert not isinstance(wanted, str), "resolved by compare"
    known: Model | None = wanted if isinstance(wanted, Model) and wanted.is_named else None
    known = known or hub.named_among(catalog.models.values(), wanted)
    best = known or wanted
    sources = () if isinstance(best, Path) else best.sources
    gguf: HubSource | Path | None = next((each for each in sources if isinstance(each, HubSource)), None)
    if gguf is None:
        with look_at(wanted, offline=offline) as path:  # a model without a repository is on this disk
            gguf = Path(os.path.abspath(path))  # the script may start in another folder
    return ExportedModel(
        label=header.path.name,
        original=given or (known and known.original) or _original_in(header),
        gguf=gguf,
        n_vocab=header.n_vocab,
        is_cut=VOCAB_MAP in header.gguf.entries,
    )


def _original_in(header: Header) -> str | None:
    """The repository that the file names as its source."""
    for key in _SOURCES:
        text = header.gguf.text(key).removeprefix("https://huggingface.co/").rstrip("/")
        if REPO.fullmatch(text):
            return text
    return None


def draft_length(compared: CheckedPair, default: int, *, greedy: bool) -> tuple[int, str]:
    """How many tokens to draft, and why. `default`: without a measured acceptance."""
    habit = None if compared.profile is None else compared.profile.habit(greedy=greedy)
    if compared.profile is None or habit is None:
        return default, "a default, because no acceptance of this pair was measured here (specllama tune)"
    target, draft = (sum(each.n_elements for each in header.pass_tensors) for header in compared.headers)
    ratio = draft / target
    costs = CostProfile(verify=FLAT, draft=((1, ratio), (2, ratio)))
    best = max(range(1, TUNED + 1), key=lambda n: speedup(costs, habit.acceptance, n))
    origin = compared.profile.origin + _derived(compared.profile)
    return best, (
        f"the best for an acceptance of {habit.acceptance:.2f} ({origin}), if a drafted token costs {ratio:.2f} of a "
        f"pass of the target, and a pass over {counted(best + 1, 'token')} as much as over one"
    )


def _derived(profile: Profile) -> str:
    return "" if profile.derived is None else f", with the derived draft {profile.derived.stem}"
