"""`specllama tune`: measure a pair on this machine and save a profile for later answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from specllama import llama
from specllama.base import disk as storage
from specllama.base.errors import PairError, SpecllamaError
from specllama.base.ranges import word
from specllama.base.text import counted
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color, HardwareOptions, PairOptions
from specllama.cli.errors import told
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.reports import not_lost
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.status import StatusLine, watching
from specllama.cli.screen.tables import draw_table
from specllama.derive.search import keep_tuned
from specllama.drafters import TRANSLATED
from specllama.drafters.length import DraftLength
from specllama.files.inventory import files_of
from specllama.llama import tested_kernels
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.profile import ClassFigures, Profile
from specllama.pairs.setup import Listener, Setup
from specllama.pairs.token_rows import BY_TEXT
from specllama.tuning import kernel_paths as tuner_paths
from specllama.tuning import tune as tuner
from specllama.tuning.tune import Findings

_LOCK = "tuning"  # two at a time would disturb each other's figures
N_PROFILE_BYTES = 20_000  # an upper bound
ROOM = "free some space, or set XDG_STATE_HOME to a folder on a larger disk; then tune again"
WRITABLE = "make the folder writable, or set XDG_STATE_HOME to one that is; then tune again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What to tune for, how thoroughly, and in which form to report."""

    title: ClassVar[str] = "Tuning"

    spec_type: Annotated[
        str,
        Option(
            "--spec-type NAME",
            f"Strategy to tune for: {TRANSLATED} for a draft with another tokenizer, auto for the one that fits.",
            word("auto", TRANSLATED),
        ),
    ] = "auto"
    quick: Annotated[bool, Option("--quick", "Measure for about a minute.")] = False
    json: Annotated[bool, Option("--json", "One JSON object: the profile and its path.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Only the findings and errors.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "Also show the cost of every pass.")] = False
    color: Color = "auto"


@with_options
def tune(models: PairOptions, hardware: HardwareOptions, options: TuneOptions) -> None:
    """Measure a pair on this machine and save the fastest settings: kernel path, threads, cost of passes, and the
    speed of the draft and of drafts derived from it (`specllama draft`).

    `run` and `chat` then use this profile if the longest draft is `auto` and the models and hardware options are the
    same. It is valid until the files, llama.cpp or the CPU change. Run it while the machine is idle. Ctrl-C changes
    nothing.
    """
    output = open_output(
        color=options.color, format="json" if options.json else "human", quiet=options.quiet, verbose=options.verbose
    )
    # Measure what `auto` loads without a profile.
    listener, drafting = Said(output), Drafting(spec_type=options.spec_type)
    ask = Ask(names=names_of(models), drafting=drafting, hardware=hardware_of(hardware))
    choice = pair_setup.choose(ask, listener)
    for wanted in (choice.target, choice.draft):
        if isinstance(wanted, Path):
            llama.read_header(wanted)  # a bad file fails before a minute of compiling
    _compile_kernels(output, hardware)
    setup = pair_setup.prepare(replace(choice, length=DraftLength(choice.length.longest)), listener)
    subject = _fitting(setup, listener).subject
    _require_folder(profiles.path_of(subject).parent)
    effort = tuner.QUICK if options.quick else tuner.THOROUGH
    parents = [subject.draft, subject.target] if subject.draft is not None else []
    if subject.strategy == TRANSLATED:  # drafts derived from the target use its ids
        parents.pop()
    variants = [derived.path for parent in parents for derived in drafts.children_of(parent)]
    variants = [path for path in variants if path.resolve() != subject.draft]
    if options.quick and len(variants) > 1:
        least = min(variants, key=lambda path: path.stat().st_size)
        output.note(f"note: --quick measures only the smallest of {len(variants)} derived drafts ({least.stem})")
        variants = [least]
    with watching(output) as watch:  # before they are measured, so that a later change shows
        paths = [path for path in (subject.target, subject.draft, *variants) if path is not None]
        measured = {file: storage.seen(file, watch) for path in paths for file in files_of(path)}
    with watching(output) as watch, storage.only_one(_LOCK, watch), StatusLine(output, logs=True) as status:
        status.show("asking for kernel paths", 0.0)
        found = tuner.measure(subject, tuner_paths.worth_measuring(subject, variants), effort, status.show)
    for failure in found.failures:
        output.warn(f"not everything could be measured: {failure}")
    if not found.comparable:
        output.warn(
            f"kernel paths were not compared: the machine was busy, the same pass took up to {found.drift:.1f} times "
            "as long",
            "tune again when the machine is idle",
        )
    profile = tuner.choose(found, quick=options.quick)
    place: Path | None = None
    problem: SpecllamaError | None = None
    try:
        place = profiles.save(subject, profile, measured)
    except OSError as error:  # the figures are still shown
        hint = ROOM if error.errno in storage.NO_ROOM else WRITABLE
        where = f"the profile cannot be written to {profiles.path_of(subject)}"
        problem = SpecllamaError(f"{where}: {error.strerror}", hint=hint)
    try:
        keep_tuned(subject, found, profile)
    except (SpecllamaError, OSError) as error:
        output.warn(f"the figures for `draft list` cannot be saved: {told(error)}", told(error).hint)
    facts = _facts(found, profile, place)
    with not_lost(output, ".json", lambda: to_json(facts), place):
        if options.json:
            output.data(facts)
        else:
            _show_all(output, found, profile)
            if place is not None:
                output.note(f"saved for `run` and `chat` in {place}")
    if problem is not None:
        raise problem


def _facts(found: Findings, profile: Profile, place: Path | None) -> dict[str, object]:
    """The JSON object."""
    compared = [
        {"name": each.path.stem, "cost": each.cost, "speed": each.speed}
        for each in tuner.judged(found, profile)
        if each.path is not None
    ]
    return {
        "profile": profile.to_json(),
        "path": place,
        "draft_can_pay": profile.draft_can_pay,
        "kernel_paths": [layout.to_json() for layout in found.layouts],
        "derived_drafts": compared,
        "failures": found.failures,
        "drift": found.drift,
        "draft_tokens_per_token": found.n_spelled,
    }


def _show_all(output: Output, found: Findings, profile: Profile) -> None:
    show(output, profile)
    if output.verbose:
        for layout in found.layouts:
            cost_of = dict(layout.verify or ())
            costs = "".join(f", {counted(n, 'token')} {cost_of[n]:.2f} times that" for n in (4, 8) if n in cost_of)
            costs = ", too slow for the target" if layout.verify is None else costs
            output.line(f"{layout.way.name}: one token {1000 * layout.step_s:.1f} ms{costs}")
        if profile.strategy == TRANSLATED:
            output.prose(f"The draft reads {found.n_spelled:.2f} of its tokens for one of the target's.")
    for sentence in _compared(found, profile):
        output.prose(sentence)


def _require_folder(folder: Path) -> None:
    """Make the folder of profiles, before the minutes. Raises SpecllamaError and DiskFull."""
    storage.check_room(folder, N_PROFILE_BYTES, "the profile", ROOM)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecllamaError(f"the profile cannot be written to {folder}: {error.strerror}", hint=WRITABLE) from None


def _compile_kernels(output: Output, hardware: HardwareOptions) -> None:
    """Compile our kernels if they are missing; without them llama.cpp's are measured alone."""
    if hardware.kernels == "off" or tested_kernels.problem() != tested_kernels.NOT_BUILT:
        return
    output.note("compiling specllama's kernels; this takes about a minute, once")
    try:
        tested_kernels.renew()
    except SpecllamaError as error:
        output.warn(str(error), error.hint)


def _fitting(setup: Setup, listener: Listener) -> Setup:
    """The pair by token ids if they agree, else by token texts. Raises PairError."""
    try:
        pair_setup.require_fit(setup, listener)
    except PairError as error:
        if not error.hint.startswith(BY_TEXT):
            raise
        setup = replace(setup, model_strategy=TRANSLATED)
        pair_setup.require_fit(setup, listener)
    if setup.model_strategy == TRANSLATED:
        listener.note(f"tuned for {TRANSLATED}: the draft has another tokenizer and drafts the tokens that both have")
    return setup


# `draft make` measures with other settings.
WITH = " (measured now, with the threads above and its own best kernel path, drafting only if it helps)"


def _compared(found: Findings, profile: Profile) -> list[str]:
    """The derived drafts that were measured, and the draft that is used from now on."""
    told = [
        f"Derived draft {each.path.stem}: a token costs {each.cost:.2f} of a pass, {each.speed:.2f}x on average{WITH}."
        for each in tuner.judged(found, profile)
        if each.path is not None
    ]
    if told:
        told.append(f"Used from now on: {profile.derived.stem if profile.derived else 'the draft as published'}.")
    return told


def show(output: Output, profile: Profile) -> None:
    """A table of the classes of prompts, then the findings."""
    if profile.classes and output.out.steerable:
        figures = ("temp", "accepted", "draft", "speed")
        styles = ["green" if each.speedup > 1.0 else None for each in profile.classes]
        rows = [_columns(each) for each in profile.classes]
        draw_table(output, ("prompts", *figures), rows, figures=figures, styles=styles)
    else:
        for each in profile.classes:
            output.row(*_columns(each))
    for sentence in findings(profile):
        output.prose(sentence)
    if output.verbose:
        for name, points in (("checking", profile.costs.verify), ("draft", profile.costs.draft)):
            output.line(f"{name}: " + ", ".join(f"{cost:.2f} ({n})" for n, cost in points) + "  of one pass (rows)")


def _columns(each: ClassFigures) -> tuple[str, str, str, str, str]:
    temperature, length = "0" if each.greedy else "default", str(each.n_max) if each.n_max else "none"
    return each.name, temperature, f"{100 * each.acceptance:.0f} %", length, f"{each.speedup:.2f}x"


def findings(profile: Profile) -> list[str]:
    """The findings in sentences."""
    costs = profile.costs
    found = [
        f"A pass over one token takes {1000 * profile.step_s:.0f} ms here, one over four "
        f"{costs.verify_cost(4):.2f} times as long, one over eight {costs.verify_cost(8):.2f} times."
    ]
    paths = profile.target_path.name
    if profile.classes:
        spelled = ", the translation included" if profile.strategy == TRANSLATED else ""
        found.append(f"A drafted token costs {costs.draft_cost():.2f} of a pass{spelled}.")
        found.append(_expected(profile))
        paths += f" for the target, {profile.draft_path.name} for the draft"
    found.append(f"Kernel path: {paths}.")
    if (threads := profile.threads) is not None:
        drafting = f", {threads.draft} for the draft" if profile.classes else ""
        found.append(f"Threads: {threads.decode} to decode with the target, {threads.verify} to verify{drafting}.")
    return found


def _expected(profile: Profile) -> str:
    if not profile.draft_can_pay:
        return (
            "Plain decoding is fastest here: the draft is too slow even if every token of it is accepted. Only lookups "
            "draft; they cost nothing if they find nothing."
        )
    gains = {each.name: each.speedup for each in profile.classes if each.speedup > 1.0}
    if not gains:
        return "Plain decoding is fastest here; the draft is tried now and then, and used if it turns out faster."
    best = max(gains, key=lambda name: gains[name])
    plain = [each.name for each in profile.classes if each.speedup <= 1.0]
    rest = f", and plain decoding for {', '.join(dict.fromkeys(plain))}" if plain else ""
    return f"Expect up to {gains[best]:.2f} times the speed of plain decoding ({best}){rest}."
