"""`specllama tune`: measure what pays on this machine, and keep it as a profile for later answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from specllama.base import disk as storage
from specllama.base.errors import PairError, SpecllamaError
from specllama.base.ranges import word
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color, HardwareOptions, PairOptions
from specllama.cli.errors import told
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.screen.fetching import watching
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.tables import draw_table
from specllama.derive.search import keep_tuned
from specllama.drafters import TRANSLATED
from specllama.drafters.length import DraftLength
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.overlap_rows import BY_TEXT
from specllama.pairs.profile import ClassFigures, Profile
from specllama.pairs.setup import Listener, Setup
from specllama.tuning import kernel_paths as tuner_paths
from specllama.tuning import tune as tuner
from specllama.tuning.tune import Findings, Layout

_LOCK = "tuning"  # two at a time would measure each other
N_PROFILE_BYTES = 20_000  # more than any has
ELSEWHERE = "make room and make it writable, or set XDG_STATE_HOME; then tune again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How thoroughly, and in which form."""

    title: ClassVar[str] = "Tuning"

    spec_type: Annotated[
        str,
        Option(
            "--spec-type NAME",
            f"Strategy to tune for: {TRANSLATED} for a draft of another tokenizer, auto for what fits.",
            word("auto", TRANSLATED),
        ),
    ] = "auto"
    quick: Annotated[bool, Option("--quick", "A short look, about a minute where nothing else runs.")] = False
    json: Annotated[bool, Option("--json", "One JSON object: the profile and where it is kept.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "The findings and errors, nothing else.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "What every pass costs as well.")] = False
    color: Color = "auto"


@with_options
def tune(models: PairOptions, hardware: HardwareOptions, options: TuneOptions) -> None:
    """Measure a pair on this machine and keep what is fastest: kernel path, threads, costs of passes, worth of the
    draft and of those derived from it (`specllama draft`).

    `run` and `chat` use the profile from then on, wherever the longest draft is `auto` and the models and hardware
    options are the same. It holds until the files, llama.cpp or the CPU change. Best on a machine that does nothing
    else meanwhile; Ctrl-C leaves everything as it was.
    """
    output = open_output(
        color=options.color,
        format="json" if options.json else "human",
        quiet=options.quiet,
        verbose=options.verbose,
    )
    # Tuned is what `auto` would load if it knew nothing.
    listener, drafting = Said(output), Drafting(spec_type=options.spec_type)
    ask = Ask(names=names_of(models), drafting=drafting, hardware=hardware_of(hardware))
    choice = pair_setup.choose(ask, listener)
    setup = pair_setup.prepare(replace(choice, length=DraftLength(choice.length.longest)), listener)
    subject = _fitting(setup, listener).subject
    storage.check_room(profiles.path_of(subject).parent, N_PROFILE_BYTES, "the profile", hint=ELSEWHERE)
    effort = tuner.QUICK if options.quick else tuner.THOROUGH
    parents = [subject.draft, subject.target] if subject.draft is not None else []
    if subject.strategy == TRANSLATED:  # drafts that were derived from the target speak its ids
        parents.pop()
    variants = [derived.path for parent in parents for derived in drafts.children_of(parent)]
    variants = [path for path in variants if path.resolve() != subject.draft]
    if options.quick and len(variants) > 1:
        least = min(variants, key=lambda path: path.stat().st_size)
        output.note(
            f"note: of {len(variants)} derived drafts only the smallest is looked at ({least.stem}), to be quick; "
            "without --quick all of them are"
        )
        variants = [least]
    with watching(output) as watch, storage.only_one(_LOCK, watch), StatusLine(output) as status:
        status.show("asking for kernel paths", 0.0)
        found = tuner.measure(subject, tuner_paths.worth_measuring(subject, variants), effort, status.show)
    for failure in found.failures:
        output.warn(f"not everything could be measured: {failure}")
    if not found.comparable:
        output.warn(
            f"the machine was busy: the same pass took {found.drift:.1f} times as long as before or after, so kernel "
            "paths were not compared",
            "tune again when nothing else runs",
        )
    profile = tuner.choose(found, quick=options.quick)
    place, problem = None, ""
    try:
        place = profiles.save(subject, profile)
    except OSError as error:  # what took minutes is shown all the same
        problem = f"the profile cannot be kept in {profiles.path_of(subject)}: {error.strerror}"
    try:
        keep_tuned(subject, found, profile)
    except (SpecllamaError, OSError) as error:
        output.warn(f"what the derived drafts are worth is not kept for `draft list`: {told(error)}", told(error).hint)
    if options.json:
        facts = {"profile": profile.to_json(), "path": place, "draft_can_pay": profile.draft_can_pay}
        compared = [
            {"name": each.path.stem, "cost": each.cost, "speed": each.speed}
            for each in tuner.judged(found, profile)
            if each.path is not None
        ]
        paths = [layout.to_json() for layout in found.layouts]
        seen = {"kernel_paths": paths, "derived_drafts": compared, "failures": found.failures, "drift": found.drift}
        output.data({**facts, **seen, "draft_tokens_per_token": found.n_spelled})
    else:
        show(output, profile)
        if output.verbose:
            for layout in found.layouts:
                output.line(_measured(layout))
            if profile.strategy == TRANSLATED:
                output.prose(f"The draft reads {found.n_spelled:.2f} tokens of its own for one of the target's.")
        for sentence in _compared(found, profile):
            output.prose(sentence)
        if place is not None:
            output.note(f"kept for `run` and `chat` in {place}")
    if problem:
        raise SpecllamaError(problem, hint=ELSEWHERE)


def _fitting(setup: Setup, listener: Listener) -> Setup:
    """The pair as it fits: by the texts of the tokens where their ids tell nothing. Raises PairError."""
    try:
        pair_setup.require_fit(setup, listener)
    except PairError as error:
        if not error.hint.startswith(BY_TEXT):
            raise
        setup = replace(setup, model_strategy=TRANSLATED)
        pair_setup.require_fit(setup, listener)
    if setup.model_strategy == TRANSLATED:
        listener.note(f"tuned for {TRANSLATED}: the draft has a tokenizer of its own and drafts tokens that both have")
    return setup


def _measured(layout: Layout) -> str:
    """What a pair of kernel paths came to."""
    told = f"{layout.way.name}: one token {1000 * layout.step_s:.1f} ms"
    if layout.verify is None:
        return f"{told}, too slow to be the target's"
    cost_of = dict(layout.verify)
    return told + "".join(f", {n} tokens {cost_of[n]:.2f} times that" for n in (4, 8) if n in cost_of)


# What `draft make` measured was measured in another way.
WITH = " (measured now, with the threads above and on its own best kernel path, drafting only where it pays)"


def _compared(found: Findings, profile: Profile) -> list[str]:
    """The derived drafts that were looked at, and which draft is used from now on."""
    told = [
        f"Derived draft {each.path.stem}: a token costs {each.cost:.2f} of a pass, {each.speed:.2f}x on average{WITH}."
        for each in tuner.judged(found, profile)
        if each.path is not None
    ]
    if told:
        told.append(f"Used from now on: {profile.derived.stem if profile.derived else 'the draft as published'}.")
    return told


def show(output: Output, profile: Profile) -> None:
    """A table of the classes, then what to make of it."""
    if profile.classes and output.out.steerable:
        _draw(output, profile.classes)
    else:
        for each in profile.classes:
            output.line("\t".join(_columns(each)))
    for sentence in findings(profile):
        output.prose(sentence)
    if output.verbose:
        for name, points in (("checking", profile.costs.verify), ("draft", profile.costs.draft)):
            output.line(f"{name}: " + ", ".join(f"{cost:.2f} ({n})" for n, cost in points) + "  of one pass (rows)")


def _columns(each: ClassFigures) -> tuple[str, str, str, str, str]:
    """Class, temperature, acceptance, best length, speed."""
    length = str(each.n_max) if each.n_max else "none"
    return (
        each.name,
        "0" if each.greedy else "default",
        f"{100 * each.acceptance:.0f} %",
        length,
        f"{each.speedup:.2f}x",
    )


def _draw(output: Output, classes: tuple[ClassFigures, ...]) -> None:
    figures = ("temp", "accepted", "draft", "speed")
    styles = ["green" if each.speedup > 1.0 else None for each in classes]
    draw_table(output, ("prompts", *figures), [_columns(each) for each in classes], figures=figures, styles=styles)


def findings(profile: Profile) -> list[str]:
    """What was found, in sentences."""
    costs = profile.costs
    found = [
        f"A pass over one token takes {1000 * profile.step_s:.0f} ms here, one over four "
        f"{costs.verify_cost(4):.2f} times as long, one over eight {costs.verify_cost(8):.2f} times."
    ]
    if profile.classes:
        spelled = ", what it is spelled with included" if profile.strategy == TRANSLATED else ""
        found.append(f"A drafted token costs {costs.draft_cost():.2f} of a pass{spelled}.")
        found.append(_expected(profile))
    paths = profile.target_path.name
    if profile.classes:
        paths += f" for the target, {profile.draft_path.name} for the draft"
    found.append(f"Kernel path: {paths}.")
    if (threads := profile.threads) is not None:
        several = f"{threads.decode} for one token of the target, {threads.verify} for several"
        found.append(f"Threads: {several}" + (f", {threads.draft} for the draft." if profile.classes else "."))
    return found


def _expected(profile: Profile) -> str:
    """What drafting promises."""
    if not profile.draft_can_pay:
        return (
            "Plain decoding is fastest here: the draft would not pay if every token of it were accepted. Only lookups "
            "will draft, which cost nothing where they find nothing."
        )
    gains = {each.name: each.speedup for each in profile.classes if each.speedup > 1.0}
    if not gains:
        return "Plain decoding is fastest here; the draft is tried now and then, and used where it pays after all."
    best = max(gains, key=lambda name: gains[name])
    plain = [each.name for each in profile.classes if each.speedup <= 1.0]
    rest = f", and plain decoding where drafts do not pay ({', '.join(dict.fromkeys(plain))})" if plain else ""
    return f"Expect up to {gains[best]:.2f} times the speed of plain decoding ({best}){rest}."
