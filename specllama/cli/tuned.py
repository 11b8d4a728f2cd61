"""Messages about profiles: which one is used, that one is stale, that a pair is not tuned; and measuring a pair."""

from __future__ import annotations

import shlex

from specllama.cli.screen.output import Output
from specllama.cli.screen.status import StatusLine
from specllama.drafters import REGISTRY, SIMPLE, TRANSLATED
from specllama.pairs.ask import Names
from specllama.pairs.setup import Models, Setup
from specllama.tuning.expectation import expectation, unused_draft
from specllama.tuning.first_use import AGREE, FirstUse


def measured(
    setup: Setup, models: Models, output: Output, names: Names | None = None, *, hurried: bool = False
) -> Setup:
    """`setup` with a profile, if it has to be made; shows that. `hurried`: an answer waits."""
    work = FirstUse(setup, models, hurried=hurried)
    measure(work, output)
    say_measured(work, output, names)
    return work.finish()


def measure(work: FirstUse, output: Output) -> None:
    """Do what is left of a measurement; shows that."""
    with StatusLine(output) as status:
        for share in work:
            status.show("measuring this pair, once", share)


def say_measured(work: FirstUse, output: Output, names: Names | None = None) -> None:
    """One line about a pair that was just measured."""
    if work.setup.profile is None or work.noise is None:
        return
    if output.format == "human":
        output.note(f"{work.setup.profile.origin}: {expectation(work.setup.profile)}")
        if work.noise > AGREE - 1.0:
            output.detail(f"the machine was busy: the same pass varied by {100 * work.noise:.0f} %")
    elif names is not None:
        say_profile(work.setup, names, output)


def say_profile(setup: Setup, names: Names, output: Output) -> None:
    """One line before an answer about a draft that is not used, or, in text form, about a tuned pair."""
    if setup.too_short:
        output.detail(unused_draft(setup, names))
    elif unused := unused_draft(setup, names):
        if output.format != "json":  # it is among the notices
            output.note(unused)
    elif output.format == "human" and setup.profile is not None and setup.profile.source != "use":
        draft = None if setup.draft is None else setup.draft.path
        derived = f", with the draft {draft.stem}" if draft is not None and draft == setup.profile.derived else ""
        output.note(f"{setup.profile.origin}: {expectation(setup.profile)}{derived}")


def strategy_text(strategy: str) -> str:
    """Who drafts, as a line of its own."""
    return f"spec-type {strategy}: {REGISTRY[strategy].summary}"


def length_text(setup: Setup) -> str:
    """The draft length that `auto` stands for, and why."""
    profile = setup.profile
    if profile is None:
        reason = f"the profile is not used: {setup.stale}" if setup.stale else "these models were not measured"
        return f"auto: up to {setup.length.longest}, by assumed costs ({reason})"
    return f"auto: up to {setup.length.longest}, as {profile.origin} ({expectation(profile)})"


def hint_at_tuning(setup: Setup, names: Names, output: Output) -> None:
    """One line after an answer in text form, if the pair was not tuned. `setup`: as prepared."""
    if output.format != "human" or output.quiet:
        return
    if setup.stale:
        output.note(f"note: the profile of this pair is not used: {setup.stale}")
    elif setup.subject.draft is None or setup.profile is not None:
        return
    output.note(f"hint: `{tune_command(names, setup.model_strategy)}` measures what is fastest on this machine")


def tune_command(names: Names, model_strategy: str = SIMPLE) -> str:
    """The command that tunes these models."""
    words = ["specllama", "tune"]
    flags = (("-m", names.target), ("-hf", names.target_repo), ("-md", names.draft), ("-hfd", names.draft_repo))
    for flag, value in flags:
        words += [flag, value] if value else []
    words += ["--spec-type", TRANSLATED] if model_strategy == TRANSLATED else []
    return shlex.join([*words, *([names.pair] if names.pair else [])])
