"""`specllama tune`: measure a pair on this machine and save a profile for later answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
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
from specllama.derive import tuned as derive_tuned
from specllama.derive.search import keep_tuned
from specllama.derive.tuned import Tuned
from specllama.drafters import TRANSLATED
from specllama.drafters.controller import LEAST_RATE
from specllama.drafters.length import DraftLength
from specllama.files.inventory import files_of
from specllama.llama import tested_kernels
from specllama.llama.load_plan import physical_cores
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.profile import LOOKUP_ALONE, ClassFigures, Profile, ProfileKey, Threads
from specllama.pairs.setup import Listener, Setup
from specllama.pairs.token_rows import BY_TEXT
from specllama.tuning import tune as tuner

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
    quick: Annotated[bool, Option("--quick", "Measure for a minute instead of five.")] = False
    json: Annotated[bool, Option("--json", "One JSON object: the profile and its path.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Only the findings and errors.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "Also show the cost of every pass and all drafts.")] = False
    color: Color = "auto"


@with_options
def tune(models: PairOptions, hardware: HardwareOptions, options: TuneOptions) -> None:
    """Measure a pair on this machine and save the fastest settings: kernel path, threads, cost of passes, and draft.

    Cheaper drafts are made of the pair's own (weights in Q4_0, 32,000 tokens of vocabulary, both). The fastest is kept
    if it is faster than the pair's own, the others are removed. It ends early if no draft can pay.

    `run` and `chat` then use this profile if the longest draft is `auto` and the models and hardware options are the
    same. It is valid until the files, llama.cpp or the CPU change. Run it while the machine is idle. Ctrl-C keeps
    nothing of it: no profile and no draft.
    """
    output = open_output(
        color=options.color, format="json" if options.json else "human", quiet=options.quiet, verbose=options.verbose
    )
    output.note(f"measuring for up to about {'a minute' if options.quick else 'five minutes'}")
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
    others = derive_tuned.others_of(subject, quick=options.quick)
    known = [] if others is None else others.known
    with watching(output) as watch:  # before they are measured, so that a later change shows
        paths = [path for path in (subject.target, subject.draft, *known) if path is not None]
        measured = {file: storage.seen(file, watch) for path in paths for file in files_of(path)}
    if others is not None and others.recipes:
        size = storage.size_text(others.most_bytes)
        output.note(f"drafts are made in {drafts.folder()} (up to {size} each) and kept only if they are faster")
    with (
        _told_if_stopped(output, subject),
        watching(output) as watch,
        storage.only_one(drafts.LOCK, watch),
        StatusLine(output, logs=True) as status,
    ):
        status.show("asking for kernel paths", 0.0)
        tuned = derive_tuned.tune(subject, others, effort, status.show)
    found, profile = tuned.findings, tuned.profile
    for failure in found.failures:
        output.warn(f"not everything could be measured: {failure}")
    if not found.comparable:
        output.warn(
            f"kernel paths were not compared: the machine was busy, the same pass took up to {found.drift:.1f} times "
            "as long",
            "tune again when the machine is idle",
        )
    place: Path | None = None
    problem: SpecllamaError | None = None
    try:
        place = profiles.save(subject, profile, measured)
    except OSError as error:  # the figures are still shown
        hint = ROOM if error.errno in storage.NO_ROOM else WRITABLE
        where = f"the profile cannot be written to {profiles.path_of(subject)}"
        problem = SpecllamaError(f"{where}: {error.strerror}", hint=hint)
        if tuned.made is not None:  # no profile uses it
            drafts.discard(tuned.made)
    try:
        keep_tuned(subject, found, profile)
    except (SpecllamaError, OSError) as error:
        output.warn(f"the figures for `draft list` cannot be saved: {told(error)}", told(error).hint)
    facts = _facts(tuned, place)
    with not_lost(output, ".json", lambda: to_json(facts), place):
        if options.json:
            output.data(facts)
        else:
            show(output, subject, tuned)
            if place is not None:
                output.note(f"saved for `run` and `chat` in {place}")
    if place is not None and profile.derived is not None:  # else the first answer compares its tokens, for seconds
        with listener.working("comparing the tokens of the draft"), suppress(SpecllamaError, OSError):
            pair_setup.require_fit(pair_setup.by_profile(setup, profile), listener)
    if problem is not None:
        raise problem


@contextmanager
def _told_if_stopped(output: Output, subject: ProfileKey) -> Iterator[None]:
    """After Ctrl-C, say what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = profiles.find(subject).profile
        stays = "the pair has no profile, as before" if kept is None else f"the pair stays as {kept.origin}"
        output.note(f"stopped: no profile and no draft of this tuning is kept; {stays}")
        raise


def _facts(tuned: Tuned, place: Path | None) -> dict[str, object]:
    """The JSON object."""
    found, profile = tuned.findings, tuned.profile
    compared = [
        {"name": each.path.stem, "cost": each.cost, "speed": each.speed}
        for each in tuner.judged(found, profile)
        if each.path is not None
    ]
    return {
        "profile": profile.to_json(),
        "path": place,
        "before": tuned.before.to_json(),
        "draft_can_pay": profile.draft_can_pay,
        "best_case": tuned.best_case,
        "kernel_paths": [layout.to_json() for layout in found.layouts],
        "derived_drafts": compared,
        "removed": tuned.removed,
        "failures": found.failures,
        "drift": found.drift,
        "draft_tokens_per_token": found.drafts[0].n_spelled,
    }


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


def show(output: Output, subject: ProfileKey, tuned: Tuned) -> None:
    """A table of what changed, and what to expect in one sentence."""
    heads, rows = ("what", "before", "after"), _rows(subject, tuned)
    if output.out.steerable:
        draw_table(output, heads, rows, styles=["green" if before != after else None for _, before, after in rows])
    else:
        for row in (heads, *rows):
            output.row(*row)
    output.prose(expected(tuned))
    if output.verbose:
        _show_details(output, tuned)
    if tuned.removed:
        output.note(f"removed, not clearly faster: {', '.join(tuned.removed)}")


def _rows(subject: ProfileKey, tuned: Tuned) -> list[tuple[str, str, str]]:
    """(what, before, after)"""
    both = (tuned.before, tuned.profile)

    def row(what: str, text: Callable[[Profile], str]) -> tuple[str, str, str]:
        return what, text(both[0]), text(both[1])

    rows = [row("target's kernel path", lambda profile: profile.target_path.name)]
    if subject.draft is not None:
        rows.append(row("draft's kernel path", lambda profile: profile.draft_path.name))
        rows.append(row("draft", lambda profile: _draft_text(profile.derived or subject.draft)))
    if tuned.profile.threads is not None:
        rows.append(row("threads", lambda profile: _threads_text(profile.threads, subject)))
    rows.append(row("pass over 1 token", lambda profile: f"{1000 * profile.step_s:.0f} ms"))
    rows.append(row("pass over 4 tokens", lambda profile: f"{profile.costs.verify_cost(4):.2f} of that"))
    if subject.draft is not None:
        rows.append(row("drafted token", lambda profile: f"{profile.costs.draft_cost():.2f} of that"))
    plain = (tuned.before.step_s, tuned.findings.fastest.step_s)
    rows.append(("plain decoding", f"{1 / plain[0]:.1f} tok/s", f"{1 / plain[1]:.1f} tok/s"))
    for before, after in zip(tuned.before.classes, tuned.profile.classes, strict=True):
        what = f"{before.name}, temperature 0" if before.greedy else before.name
        rows.append((what, _speed_text(before, plain[0]), _speed_text(after, plain[1])))
    return rows


def _draft_text(path: Path | None) -> str:
    assert path is not None
    size = f" ({storage.size_text(path.stat().st_size)})" if path.is_file() else ""
    return f"{path.stem}{size}"


def _threads_text(threads: Threads | None, subject: ProfileKey) -> str:
    if threads is None:
        return str(physical_cores())
    drafting = f", {threads.draft} to draft" if subject.draft is not None else ""
    return f"{threads.decode} to decode, {threads.verify} to verify{drafting}"


def _speed_text(each: ClassFigures, plain_s: float) -> str:
    how = f"drafts of {each.n_max}, {100 * each.acceptance:.0f} % accepted" if each.n_max else "plain"
    return f"{each.speedup / plain_s:.1f} tok/s ({how})"


def expected(tuned: Tuned) -> str:
    """What to expect, in one sentence."""
    profile, costs = tuned.profile, tuned.profile.costs
    if profile.strategy == LOOKUP_ALONE:
        return "Only lookups draft, with blocks as long as pay at these costs."
    paid = f"a drafted token costs {costs.draft_cost():.2f} of a pass"
    if not profile.classes and tuned.best_case > LEAST_RATE:
        return f"The acceptance is not known yet: no answers were recorded; {paid}."
    if not profile.classes:
        own, cheapest = tuned.findings.best_case(), tuned.best_case
        derived = f", the cheapest one derived from it {cheapest:.2f}" if cheapest > own else ""
        return (
            f"No draft can pay here: {paid}; even if every token were accepted, the draft would reach {own:.2f} of the "
            f"speed of plain decoding{derived}. Only lookups draft."
        )
    gains = {each.name: each.speedup for each in profile.classes if each.speedup > 1.0}
    if not gains:
        accepted = fmean(each.acceptance for each in profile.classes)
        return (
            f"Plain decoding is fastest here: {paid}, a pass over four {costs.verify_cost(4):.2f}, and "
            f"{100 * accepted:.0f} % are accepted; the draft is tried now and then, and used if it turns out faster."
        )
    best = max(gains, key=lambda name: gains[name])
    plain = dict.fromkeys(each.name for each in profile.classes if each.speedup <= 1.0)
    rest = f", and plain decoding for {', '.join(plain)}" if plain else ""
    return f"Expect up to {gains[best]:.2f} times the speed of plain decoding ({best}){rest}."


def _show_details(output: Output, tuned: Tuned) -> None:
    """The measured passes and drafts."""
    found, profile = tuned.findings, tuned.profile
    for name, points in (("checking", profile.costs.verify), ("draft", profile.costs.draft)):
        output.line(f"{name}: " + ", ".join(f"{cost:.2f} ({n})" for n, cost in points) + "  of one pass (rows)")
    if profile.costs.attention:
        output.line(f"1,000 tokens of context: {1000 * profile.costs.attention:.2f} of one pass more for each row")
    for layout in found.layouts:
        cost_of = dict(layout.verify or ())
        costs = "".join(f", {counted(n, 'token')} {cost_of[n]:.2f} times that" for n in (4, 8) if n in cost_of)
        costs = ", too slow for the target" if layout.verify is None else costs
        output.line(f"{layout.way.name}: one token {1000 * layout.step_s:.1f} ms{costs}")
    if profile.strategy == TRANSLATED:
        output.prose(f"The draft reads {found.drafts[0].n_spelled:.2f} of its tokens for one of the target's.")
    for each in tuner.judged(found, profile):
        if each.classes:
            name = "the pair's own draft" if each.path is None else each.path.stem
            output.line(f"{name}: a token costs {each.cost:.2f} of a pass, {each.speed:.2f}x on average")
