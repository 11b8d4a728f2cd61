"""`specllama audit`: checks on this machine that drafts do not change the output of a pair."""

from __future__ import annotations

import platform
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, ClassVar

import typer

from specllama import llama
from specllama.audit import run as auditing
from specllama.audit.parts import FULL, QUICK, AuditPrompt, AuditSubject
from specllama.audit.report import AuditReport
from specllama.base.cpu import this_cpu
from specllama.base.errors import UsageError
from specllama.base.ranges import several, whole, word
from specllama.chat import settings as chat_settings
from specllama.chat.conversation import fitting_prompts
from specllama.chat.format import REGEX, format_of
from specllama.chat.format_masks import FormatConstraint
from specllama.chat.settings import RULES, Settings, require_known
from specllama.cli.args import options as shared
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color, HardwareOptions, LawOptions, PairOptions
from specllama.cli.audit.view import markdown, sentence
from specllama.cli.codes import FAILED
from specllama.cli.loading import Said, hardware_of, names_of
from specllama.cli.record import describe_model, versions
from specllama.cli.reports import not_lost, writable, write_report
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.render import clock
from specllama.cli.screen.status import StatusLine, watching
from specllama.cli.screen.worker import Worker, interruptible
from specllama.core.types import Cancel, Rule
from specllama.drafters import REGISTRY, SIMPLE, TRANSLATED, TREE, DraftSettings
from specllama.drafters.length import AUDIT, DraftLength
from specllama.files.inventory import checksum_of
from specllama.llama.load_plan import physical_cores
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.setup import Models, Setup
from specllama.prompts.load import short_prompts

MOST_TOKENS = 100  # in a distribution: every branch of every draw is taken
# A consonant, then a vowel: what may come depends on the last token, so the state of another text forbids all that
# may come. The answer never has to end.
FORMAT = "Answer: ([b-df-hj-np-tv-z][aeiou])*[b-df-hj-np-tv-z]?"
NO_SETTINGS = ("predict", "stop", "spec", "seed_mode", "think")  # of an audit
ALL_RULES = ",".join(RULES)
FORMATS = ("md", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDrafting:
    """The strategies and rules to audit."""

    title: ClassVar[str] = "Drafting"

    spec_type: Annotated[
        str,
        replace(shared.SPEC_TYPE, help="Strategies to audit, separated by commas; auto: all that this pair can use."),
    ] = "auto"
    verify_rule: Annotated[
        Any,
        replace(
            shared.VERIFY_RULE,
            names="--verify-rule LIST",
            help="Rules to audit, separated by commas.",
            check=several(word(*RULES)),
        ),
    ] = ALL_RULES
    spec_draft_n_max: Annotated[
        int,
        replace(
            shared.DRAFT_N_MAX, help="Compare greedy answers for every longest draft from 1 to N.", check=whole(1, 32)
        ),
    ] = AUDIT
    spec_draft_p_min: Annotated[float, shared.DRAFT_P_MIN] = 0.0
    draft_temp: Annotated[float | None, replace(shared.DRAFT_TEMP, help="Temperature of the draft. [--temp]")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """How thoroughly to audit, and where to report."""

    title: ClassVar[str] = "Audit"

    quick: Annotated[bool, Option("--quick", "Audit for a minute or two.")] = False
    self_test: Annotated[
        bool, Option("--self-test", "Then break the rules one by one and check that the audit detects each fault.")
    ] = False
    seed: Annotated[int, replace(shared.SEED, check=whole(-1, 2**63 - 1))] = 0
    format: Annotated[str, Option("--format FORM", "Form of the report, md or json.", word(*FORMATS))] = "md"
    json: Annotated[bool, Option("--json", "The same as --format json.")] = False
    output: Annotated[
        str | None, Option("-o --output FILE", "Write the report to a file; stdout gets the verdict.")
    ] = None
    quiet: Annotated[bool, Option("-q --quiet", "Only the report and errors.")] = False
    verbose: Annotated[bool, Option("-v --verbose", "Show the models and llama.cpp's log.")] = False
    color: Color = "auto"


@with_options
def audit(
    models: PairOptions, drafting: AuditDrafting, sampling: LawOptions, hardware: HardwareOptions, options: AuditOptions
) -> None:
    """Check on a real pair that drafts do not change the output, with four independent tests.

    Greedy: answers with drafts equal plain ones; where they differ, a control without a draft decides. Exact: the
    distribution of the emitted tokens, over every branch of every random choice, equals the target's. Draws: real
    samples pass a chi-square test. KV cache: rejected tokens leave no trace.

    Exit code 0: no fault found; 1: a fault found. Ctrl-C reports the finished part.
    """
    form = "json" if options.json else options.format
    out = open_output(
        color=options.color, format="json" if form == "json" else "human", quiet=options.quiet, verbose=options.verbose
    )
    file = None if options.output is None else writable("--output", options.output)
    _require_narrow(sampling)
    # None: all that the pair can use.
    names = None if drafting.spec_type == "auto" else tuple(drafting.spec_type.split(","))
    listener = Said(out)
    ask = Ask(names=names_of(models), drafting=_for_loading(names, drafting), hardware=hardware_of(hardware))
    setup = pair_setup.prepare(pair_setup.choose(ask, listener), listener)
    setup = _as_run(setup, out, keep_draft=bool(models.model_draft or models.hf_repo_draft))
    # Long enough for greedy answers and for the control.
    block = max(setup.target_options.max_block, drafting.spec_draft_n_max + 1, AUDIT + 1)
    leaves = pair_setup.LEAVES if setup.draft is not None and (names is None or TREE in names) else 1
    setup = replace(setup, target_options=replace(setup.target_options, max_block=block, max_leaves=leaves))
    require_known(sampling.params.logit_bias, setup.target.header.n_vocab)
    pair_setup.require_fit(setup, listener)
    setup = _with_sums(setup, out)
    cancel = Cancel()
    with interruptible(cancel, lambda: None):
        report = _audit(setup, names, drafting, sampling, options, cancel, out)
        text = to_json(report.to_json()) if form == "json" else markdown(report)
        with ExitStack() as each:  # a verdict that cannot be printed does not keep the report from its file
            if file is not None:
                each.callback(write_report, file, text, out)
            else:
                each.enter_context(not_lost(out, f".{form}", lambda: text))
            out.text(text if file is None else sentence(report))
        if not report.passed:
            raise typer.Exit(FAILED)


def _require_narrow(sampling: LawOptions) -> None:
    """Raise UsageError if a distribution has too many tokens to take every branch."""
    if sampling.temp > 0 and not 0 < sampling.top_k <= MOST_TOKENS:
        raise UsageError(
            f"--top-k is {sampling.top_k} (the audit takes every branch: expected 1 to {MOST_TOKENS})",
            hint="for example --top-k 40",
        )


def _for_loading(names: tuple[str, ...] | None, drafting: AuditDrafting) -> Drafting:
    """What to load: the draft, if one of the strategies needs it."""
    needing = [name for name in names or () if REGISTRY[name].needs_model]
    needing.sort(key=lambda name: name != TRANSLATED)  # a draft in the target's ids serves every strategy
    spec_type = "auto" if names is None else (needing or list(names))[0]
    return Drafting(spec_type=spec_type, length=DraftLength(drafting.spec_draft_n_max))


def _as_run(setup: Setup, out: Output, *, keep_draft: bool) -> Setup:
    """The pair as `run` uses it: with the kernel paths of its profile, and the profile's draft unless one is named."""
    tuned = pair_setup.tuned(setup, any_strategy=False)
    if tuned.stale:
        out.note(f"note: the profile of this pair is not used: {tuned.stale}")
    profile = tuned.profile
    if profile is None:
        return setup
    if keep_draft:
        tuned = replace(tuned, draft=setup.draft, profile=pair_setup.profile_for(setup.draft, setup, profile))
    draft = "" if tuned.draft is None else f", with the draft {tuned.draft.path.stem}"
    out.note(f"auditing the pair as {profile.origin}{draft}")
    return tuned


def _strategies(
    names: tuple[str, ...] | None, *, has_draft: bool, has_trees: bool, model_strategy: str
) -> tuple[str, ...]:
    if names is not None:
        return names
    left_out = {"none", SIMPLE if model_strategy == TRANSLATED else TRANSLATED, TREE * (not has_trees)}
    usual = (name for name in REGISTRY if name not in left_out)
    return tuple(name for name in usual if has_draft or not REGISTRY[name].needs_model)


def _with_sums(setup: Setup, out: Output) -> Setup:
    """The setup with the SHA-256 of its files, for the report."""
    with watching(out) as watch:
        target = replace(setup.target, sha256=checksum_of(setup.target.path, watch))
        draft = setup.draft and replace(setup.draft, sha256=checksum_of(setup.draft.path, watch))
    return replace(setup, target=target, draft=draft)


def _audit(
    setup: Setup,
    names: tuple[str, ...] | None,
    drafting: AuditDrafting,
    sampling: LawOptions,
    options: AuditOptions,
    cancel: Cancel,
    out: Output,
) -> AuditReport:
    """Load and audit. Raises Interrupted if loading was cancelled."""
    effort = QUICK if options.quick else FULL
    with pair_setup.load_models(setup, Said(out), cancel) as models:
        models.watch(cancel)
        target, draft = models.target, models.draft
        prompts = fitting_prompts(
            target.vocab,
            target.chat_template,
            short_prompts(max(effort.n_prompts, effort.n_contexts // 2)),
            n_known=target.vocab_size if draft is None else min(target.vocab_size, draft.vocab_size),
            n_room=min(target.n_ctx, draft.n_ctx if draft else target.n_ctx) - auditing.N_ROOM,
        )
        subject = AuditSubject(
            target=target,
            draft=draft,
            prompts=[AuditPrompt(name, tuple(tokens)) for name, tokens in prompts.items()],
            params=sampling.params,
            strategies=_strategies(
                names,
                has_draft=draft is not None,
                has_trees=target.caps.tree,
                model_strategy=setup.model_strategy,
            ),
            rules=tuple(Rule(name) for name in drafting.verify_rule),
            drafting=DraftSettings(
                length=DraftLength(drafting.spec_draft_n_max),
                p_min=drafting.spec_draft_p_min,
                temperature=drafting.draft_temp,
            ),
            seed=secrets.randbits(32) if options.seed < 0 else options.seed,
            piece=target.vocab.piece,
            constraint=partial(FormatConstraint, format_of(REGEX, FORMAT), target.vocab) if target.end_tokens else None,
            cancel=cancel,
        )
        about = _about(setup, models, subject, options)
        heard: deque[auditing.AuditProgress] = deque(maxlen=1)
        steps = auditing.run(subject, effort, about, self_test=options.self_test, tell=heard.append)
        return _watched(steps, heard, cancel, out)


def _about(setup: Setup, models: Models, subject: AuditSubject, options: AuditOptions) -> dict[str, object]:
    """Everything that decides the result."""
    cpu, profile = this_cpu(), setup.profile
    settings = Settings(
        params=subject.params,
        drafting=subject.drafting,
        seed=subject.seed,
        format=None if subject.constraint is None else format_of(REGEX, FORMAT),
    )
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "settings": {
            **{name: value for name, value in chat_settings.to_json(settings).items() if name not in NO_SETTINGS},
            "spec_type": subject.strategies,
            "verify_rule": [rule.value for rule in subject.rules],
        },
        "versions": versions(llama.build_info()),
        "machine": {
            "cpu": cpu.model,
            "features": sorted(cpu.features),
            "n_cores": physical_cores(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "devices": [device.name for device in llama.build_info().devices],
        },
        "tuned": profile
        and {"made": profile.made, "draft_chosen": setup.draft is not None and setup.draft.path == profile.derived},
        "models": {
            "target": describe_model(setup.target, models.target),
            "draft": describe_model(setup.draft, models.loaded_draft) if setup.draft and models.loaded_draft else None,
        },
    }


def _watched(
    steps: Iterator[auditing.AuditProgress | AuditReport],
    heard: deque[auditing.AuditProgress],
    cancel: Cancel,
    out: Output,
) -> AuditReport:
    """Run the audit in a second thread and show its progress; returns the report.

    `heard`: the latest progress, which the audit also reports between the items of `steps`.
    """
    report: AuditReport | None = None
    with StatusLine(out, logs=True) as status, Worker(steps, cancel) as worker:
        for batch in worker.batches(0.1):
            for item in batch:
                if isinstance(item, AuditReport):
                    report = item
                else:
                    heard.append(item)
            if heard:
                now = heard[0]
                status.show(now.doing, now.share, "" if now.left_s is None else f"{clock(now.left_s)} left")
    assert report is not None, "the last item is the report"
    return report
