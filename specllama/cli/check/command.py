"""`specllama check`: whether a draft fits its target, why not, and whether it makes answers faster."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import typer

from specllama import llama
from specllama.base.errors import UsageError
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import SPEC_TYPE, Color, HardwareOptions, PairOptions
from specllama.cli.args.values import duration
from specllama.cli.check.drafts import find_drafts
from specllama.cli.check.probe import BUDGET_S, LONGEST_PROBE, probe_pair, show_outlook, warn_of_noise
from specllama.cli.check.view import show_report
from specllama.cli.codes import FAILED
from specllama.cli.errors import told
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.reports import not_lost
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.status import watching
from specllama.cli.screen.worker import interruptible
from specllama.core.types import Cancel
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.drafters.length import DraftLength
from specllama.llama import Header, LoadOptions
from specllama.pairs import profile as profiles
from specllama.pairs.ask import Ask, Hardware
from specllama.pairs.check import Candidate, check_pair
from specllama.pairs.find_drafts import look_at
from specllama.pairs.model_rows import MachineMemory
from specllama.pairs.naming import Wanted
from specllama.pairs.profile import Profile
from specllama.pairs.report import CompatReport
from specllama.pairs.setup import Choice, choose, key_of, resolve
from specllama.tuning.expectation import expectation


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What to check, and in which form to report."""

    title: ClassVar[str] = "Check"

    spec_type: Annotated[
        str, replace(SPEC_TYPE, help="Check for this strategy; draft-tli is for pairs with different tokenizers.")
    ] = "auto"
    probe: Annotated[
        bool, Option("--probe", "Load both models, measure, and predict the speed. Ctrl-C: from what was measured.")
    ] = False
    budget: Annotated[float | None, Option("--budget TIME", "Time for --probe, such as 20s or 2m. [20s]", duration)] = (
        None
    )
    json: Annotated[bool, Option("--json", "One JSON object: the verdict, the rule and every test.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Only the report and errors.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "Also show the rule.")] = False
    color: Color = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Where to look for drafts."""

    title: ClassVar[str] = "Finding a draft"

    draft_for: Annotated[
        str | None,
        Option(
            "--draft-for TARGET",
            "List drafts for this target, best first. TARGET: a file, a model, a pair, or user/repo[:quant]. Exit code "
            "1 if none fits.",
        ),
    ] = None
    scan: Annotated[
        str | None, Option("--scan DIR", "Look for drafts in this folder. [the model folders of this machine]")
    ] = None
    hub: Annotated[bool, Option("--hub", "Look for drafts on the Hugging Face Hub.")] = False


@with_options
def check(models: PairOptions, search: SearchOptions, hardware: HardwareOptions, options: CheckOptions) -> None:
    """Check whether a draft fits its target. Reads only the headers of the files.

    A draft fits if both models can roll back their KV cache, have the same kind of tokenizer and the same text for
    every shared token id, and fit into memory; with --spec-type draft-tli, if enough tokens have the same text. The
    draft changes the acceptance rate, never the output.

    Exit code 0: it fits; 1: it does not fit; 2: it could not be checked.
    """
    output = open_output(
        color=options.color, format="json" if options.json else "human", quiet=options.quiet, verbose=options.verbose
    )
    try:
        if search.draft_for is not None:
            asked = hardware_of(hardware)
            fits = find_drafts(search.draft_for, models, search.scan, _wish(asked, 0), asked, output, hub=search.hub)
        elif search.scan is not None or search.hub:
            raise UsageError("--scan and --hub need --draft-for", hint="add --draft-for TARGET")
        else:
            fits = _check(models, hardware, options, output)
    except BrokenPipeError:
        raise
    except Exception as error:  # exit code 1 would mean that the draft does not fit
        known = told(error)
        raise UsageError(str(known), hint=known.hint) from error
    if not fits:
        raise typer.Exit(FAILED)


@dataclass(frozen=True, slots=True)
class CheckedPair:
    """Two models that were compared by their headers, and what is known of the pair."""

    choice: Choice  # with the models that its names mean
    report: CompatReport
    headers: tuple[Header, ...]  # of target and draft; of the target alone if it cannot be used
    profile: Profile | None  # only of a pair that fits


def compare(choice: Choice, output: Output, machine: MachineMemory | None = None) -> CheckedPair:
    """Compare the models of `choice`, fetching no more than headers. `machine`: None = this one.

    Raises DownloadError, ModelFileError and UsageError.
    """
    assert choice.draft is not None, "refused by pair_choice"
    wanted = resolve([choice.target, choice.draft], Said(output), offline=choice.offline)
    asked, headers, profile = choice.hardware, list[Header](), None
    llama.connect(asked.rpc)
    with ExitStack() as looks, watching(output) as watch:

        def candidate(wanted: Wanted, wish: LoadOptions) -> Candidate:
            path = looks.enter_context(look_at(wanted, offline=choice.offline, watch=watch))
            headers.append(llama.read_header(path, needs_weights=False))
            return Candidate(headers[-1], wish)

        target = candidate(wanted[0], _wish(asked, 0))
        wish = replace(target.options, n_ctx=choice.context(target.header))
        # The draft's context follows the target's.
        draft_wish = replace(wish, type_k=asked.type_k_draft, type_v=asked.type_v_draft, max_block=1, rpc=())
        find_draft = partial(candidate, wanted[1], draft_wish)
        report = check_pair(replace(target, options=wish), find_draft, machine, strategy=choice.model_strategy)
        if report.fits:
            profile = profiles.find(key_of(headers[0], headers[1], wish, asked, choice.model_strategy)).profile
    return CheckedPair(replace(choice, target=wanted[0], draft=wanted[1]), report, tuple(headers), profile)


def _check(models: PairOptions, hardware: HardwareOptions, options: CheckOptions, output: Output) -> bool:
    """Check one pair and report; True if the draft fits."""
    compared = compare(pair_choice(models, hardware_of(hardware), options.spec_type, output), output)
    choice, report, profile = compared.choice, compared.report, compared.profile
    found = None
    report = report.probed if options.probe and report.fits else report
    if not options.json:
        show_report(output, report)
        if profile is not None:
            output.note(f"{profile.origin}: {expectation(profile)}")
    made = None if profile is None else profile.made
    probes, cancel = options.probe and report.fits, Cancel()
    with interruptible(cancel, lambda: None) if probes else nullcontext():
        if probes:
            found = probe_pair(choice, options.budget or BUDGET_S, cancel, output)
            if found is None:
                output.note("stopped before the costs of passes were measured")
            else:
                warn_of_noise(output, found.noise)
        facts = {**report.to_json(), "profile": made, "probe": None if found is None else found.to_json()}
        with nullcontext() if found is None else not_lost(output, ".json", lambda: to_json(facts)):
            if options.json:
                output.data(facts)
            elif found is not None:
                show_outlook(output, found)
    return report.fits


def _wish(asked: Hardware, n_ctx: int) -> LoadOptions:
    return LoadOptions(
        n_ctx=n_ctx,
        n_threads=asked.n_threads,
        n_threads_batch=asked.n_threads_batch,
        n_gpu_layers=asked.n_gpu_layers,
        kernels=asked.kernels != "off",
        type_k=asked.type_k,
        type_v=asked.type_v,
        flash_attn=asked.flash_attn,
        rollback=asked.rollback,
        rpc=asked.rpc,
    )


def pair_choice(models: PairOptions, hardware: Hardware, spec_type: str, output: Output) -> Choice:
    """The pair that the options name, as `--probe` loads it. Raises UsageError and ConfigError."""
    choice = choose(Ask(names=names_of(models), hardware=hardware), Said(output))
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
