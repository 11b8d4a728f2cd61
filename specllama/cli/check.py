"""`specllama check`: does a draft fit its target, why not, and will it pay?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from specllama import llama
from specllama.cli.app import unexpected
from specllama.cli.check_drafts import find_drafts
from specllama.cli.check_files import look_at
from specllama.cli.check_view import show_report
from specllama.cli.codes import FAILED
from specllama.cli.fetching import watching
from specllama.cli.grouping import option, takes_groups
from specllama.cli.loading import N_CTX, Wanted
from specllama.cli.options import ModelOptions
from specllama.cli.output import ColorMode, Output, open_output
from specllama.cli.values import KV_TYPES, whole, word
from specllama.errors import SpecllamaError, UsageError
from specllama.llama import LoadOptions
from specllama.pair_check import Candidate, check_pair
from specllama.pairs import load_catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModels(ModelOptions):
    """Which pair; nothing at all means the default pair."""

    title: ClassVar[str] = "Models"

    pair: Annotated[
        str | None, typer.Argument(metavar="PAIR", help="A pair by name; the default pair if nothing is given.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What for, and in which form."""

    title: ClassVar[str] = "Check"

    ctx_size: Annotated[
        int | None,
        option(
            "-c --ctx-size",
            "Tokens of context to have memory for; 0 is what each was trained for. [the pair's, or 4096]",
            metavar="N",
            check=whole(16, special=0),
        ),
    ] = None
    cache_type_k: Annotated[
        str, option("-ctk --cache-type-k", "Type of the target's keys.", metavar="TYPE", check=word(*KV_TYPES))
    ] = "f16"
    cache_type_v: Annotated[
        str, option("-ctv --cache-type-v", "Type of the target's values.", metavar="TYPE", check=word(*KV_TYPES))
    ] = "f16"
    json: Annotated[bool, option("--json", "One JSON object: the verdict, the rule and every test.")] = False
    quiet: Annotated[bool, option("-q --quiet", "The report and errors, nothing else.")] = False
    verbose: Annotated[bool, option("-v --verbose", "The rule as well.")] = False
    color: Annotated[
        ColorMode,
        option(
            "--color",
            "Colours: auto, always or never; NO_COLOR and TERM=dumb are respected.",
            metavar="WHEN",
            check=word("auto", "always", "never"),
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Looking for a draft instead of checking one."""

    title: ClassVar[str] = "Finding a draft"

    draft_for: Annotated[
        str | None,
        option(
            "--draft-for",
            "List drafts for this target, best first: a file, a model, a pair, or user/repo[:quant]. Exit code 1 if "
            "none fits.",
            metavar="TARGET",
        ),
    ] = None
    scan: Annotated[
        str | None,
        option("--scan", "Look for drafts in this folder. [where models lie on this machine]", metavar="DIR"),
    ] = None
    hub: Annotated[bool, option("--hub", "Look for drafts on the Hugging Face Hub.")] = False


@takes_groups
def check(models: CheckedModels, search: SearchOptions, options: CheckOptions) -> None:
    """Check whether a draft fits its target, from the headers of their files alone.

    A draft fits if both models can roll back, share the kind of tokenizer and the text of every token id that both
    have, and fit into memory. The answer's text never depends on it, only how much of a draft is accepted.

    Exit code 0: it fits; 1: it does not; 2: it could not be checked.
    """
    output = open_output(
        color=options.color,
        format="json" if options.json else "human",
        quiet=options.quiet,
        verbose=options.verbose,
    )
    try:
        if search.draft_for is not None:
            fits = find_drafts(search.draft_for, models, search.scan, _wish(options, N_CTX), output, hub=search.hub)
        elif search.scan is not None or search.hub:
            raise UsageError("--scan and --hub look for drafts", hint="say for which target: --draft-for TARGET")
        else:
            fits = _check(models, options, output)
    except Exception as error:  # whatever it is, exit code 1 would mean that the draft does not fit
        known = error if isinstance(error, SpecllamaError) else unexpected(error)
        raise UsageError(str(known), hint=known.hint) from error
    if not fits:
        raise typer.Exit(FAILED)


def _check(models: CheckedModels, options: CheckOptions, output: Output) -> bool:
    """Report; True if the draft fits."""
    target, draft, n_ctx = _wanted(models, output)
    wish = LoadOptions(
        n_ctx=n_ctx if options.ctx_size is None else options.ctx_size,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
    )

    with ExitStack() as looks, watching(output) as watch:

        def candidate(wanted: Wanted, wish: LoadOptions) -> Candidate:
            path = looks.enter_context(look_at(wanted, offline=models.offline, watch=watch))
            return Candidate(llama.header(path, needs_weights=False), wish)

        report = check_pair(candidate(target, wish), lambda: candidate(draft, LoadOptions(max_block=1)))
    if options.json:
        output.data(report.to_json())
    else:
        show_report(output, report)
    return report.fits


def _wish(options: CheckOptions, n_ctx: int) -> LoadOptions:
    """How the target is to be loaded; `n_ctx` where no option says otherwise."""
    asked = n_ctx if options.ctx_size is None else options.ctx_size
    return LoadOptions(n_ctx=asked, type_k=options.cache_type_k, type_v=options.cache_type_v)


def _wanted(models: CheckedModels, output: Output) -> tuple[Wanted, Wanted, int]:
    """Target, draft, and the context that suits them. Raises UsageError and ConfigError."""
    target: Wanted | None = Path(models.model).expanduser() if models.model else models.hf_repo
    draft: Wanted | None = Path(models.model_draft).expanduser() if models.model_draft else models.hf_repo_draft
    if target is not None and draft is not None:
        return target, draft, N_CTX
    if target is not None:
        raise UsageError("a target is given but no draft", hint="add -md FILE or -hfd USER/REPO")
    if draft is not None:
        raise UsageError("a draft is given but no target", hint="add -m FILE or -hf USER/REPO")
    catalog = load_catalog()
    for note in catalog.notes:
        output.note(f"note: {note}")
    pair = catalog.pair(models.pair)
    return pair.target, pair.draft, pair.defaults.n_ctx or N_CTX
