"""`specllama check`: does a draft fit its target, why not, and will it pay?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import typer

from specllama import llama
from specllama.base.errors import UsageError
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import SPEC_TYPE, Color, HardwareOptions, PairOptions
from specllama.cli.check.drafts import find_drafts
from specllama.cli.check.probe import LONGEST_PROBE, probe_pair, show_outlook, warn_of_noise
from specllama.cli.check.view import show_report
from specllama.cli.codes import FAILED
from specllama.cli.errors import told
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.screen.fetching import watching
from specllama.cli.screen.output import Output, open_output
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.length import DraftLength
from specllama.llama import LoadOptions
from specllama.pairs.ask import Ask
from specllama.pairs.check import Candidate, check_pair
from specllama.pairs.find_drafts import look_at
from specllama.pairs.naming import Wanted
from specllama.pairs.setup import N_CTX, Choice, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What for, and in which form."""

    title: ClassVar[str] = "Check"

    spec_type: Annotated[
        str,
        replace(SPEC_TYPE, help="Check for this way of drafting; draft-tli fits pairs with different tokenizers."),
    ] = "auto"
    probe: Annotated[
        bool, Option("--probe", "Load both for some seconds, measure, and say whether it pays on this machine.")
    ] = False
    json: Annotated[bool, Option("--json", "One JSON object: the verdict, the rule and every test.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "The report and errors, nothing else.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "The rule as well.")] = False
    color: Color = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Looking for a draft instead of checking one."""

    title: ClassVar[str] = "Finding a draft"

    draft_for: Annotated[
        str | None,
        Option(
            "--draft-for TARGET",
            "List drafts for this target, best first: a file, a model, a pair, or user/repo[:quant]. Exit code 1 if "
            "none fits.",
        ),
    ] = None
    scan: Annotated[
        str | None,
        Option("--scan DIR", "Look for drafts in this folder. [where models lie on this machine]"),
    ] = None
    hub: Annotated[bool, Option("--hub", "Look for drafts on the Hugging Face Hub.")] = False


@with_options
def check(models: PairOptions, search: SearchOptions, hardware: HardwareOptions, options: CheckOptions) -> None:
    """Check whether a draft fits its target, from the headers of their files alone.

    A draft fits if both models can roll back, share the kind of tokenizer and the text of every token id that both
    have, and fit into memory; with --spec-type draft-tli, if enough of their tokens have the same text. The answer's
    text never depends on it, only how much of a draft is accepted.

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
            wish = _wish(hardware, N_CTX if hardware.ctx_size is None else hardware.ctx_size)
            fits = find_drafts(search.draft_for, models, search.scan, wish, output, hub=search.hub)
        elif search.scan is not None or search.hub:
            raise UsageError("--scan and --hub look for drafts", hint="say for which target: --draft-for TARGET")
        else:
            fits = _check(models, hardware, options, output)
    except BrokenPipeError:  # nobody heard the answer
        raise
    except Exception as error:  # whatever it is, exit code 1 would mean that the draft does not fit
        known = told(error)
        raise UsageError(str(known), hint=known.hint) from error
    if not fits:
        raise typer.Exit(FAILED)


def _check(models: PairOptions, hardware: HardwareOptions, options: CheckOptions, output: Output) -> bool:
    """Report; True if the draft fits."""
    choice = _choice(models, hardware, options.spec_type, output)
    with ExitStack() as looks, watching(output) as watch:

        def candidate(wanted: Wanted, wish: LoadOptions) -> Candidate:
            path = looks.enter_context(look_at(wanted, offline=models.offline, watch=watch))
            return Candidate(llama.read_header(path, needs_weights=False), wish)

        wish = _wish(hardware, choice.n_ctx)
        assert choice.draft is not None, "refused by _choice"
        find_draft = partial(candidate, choice.draft, _draft_wish(hardware))
        report = check_pair(candidate(choice.target, wish), find_draft, strategy=choice.model_strategy)
    found = None
    if not options.json:
        show_report(output, report)
    if options.probe and report.fits:
        found = probe_pair(choice, output)
        warn_of_noise(output, found.noise)
    if options.json:
        output.data({**report.to_json(), "probe": None if found is None else found.to_json()})
    elif found is not None:
        show_outlook(output, found)
    return report.fits


def _wish(hardware: HardwareOptions, n_ctx: int) -> LoadOptions:
    """How the target is to be loaded."""
    return LoadOptions(n_ctx=n_ctx, type_k=hardware.cache_type_k, type_v=hardware.cache_type_v)


def _draft_wish(hardware: HardwareOptions) -> LoadOptions:
    """How the draft is to be loaded; its context follows the target's."""
    return LoadOptions(type_k=hardware.cache_type_k_draft, type_v=hardware.cache_type_v_draft, max_block=1)


def _choice(models: PairOptions, hardware: HardwareOptions, spec_type: str, output: Output) -> Choice:
    """The pair as `--probe` loads it. Raises UsageError and ConfigError."""
    ask = Ask(names=names_of(models), hardware=hardware_of(hardware))
    choice = choose(ask, Said(output))
    if choice.draft is None:
        given = models.model or models.hf_repo
        raise UsageError(
            f"a target is given ({given}) but no draft, expected both", hint="add -md MODEL or -hfd USER/REPO"
        )
    return replace(
        choice,
        strategy=SIMPLE,
        length=DraftLength(LONGEST_PROBE),
        any_strategy=False,
        model_strategy=TRANSLATED if TRANSLATED in spec_type.split(",") else SIMPLE,
    )
