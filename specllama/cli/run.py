"""`specllama run`: answer one prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from specllama import llama
from specllama.base.errors import UsageError
from specllama.base.text import counted, figure
from specllama.chat.conversation import RenderedPrompt
from specllama.chat.format import AnswerFormat
from specllama.chat.format_masks import constraint_of
from specllama.chat.session import THINK
from specllama.chat.settings import require_known
from specllama.chat.stream import StopWatch, TextStream
from specllama.cli import logs
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import (
    DraftOptions,
    FormatOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
)
from specllama.cli.codes import CUT
from specllama.cli.config import look
from specllama.cli.loading import Said, ask_of, settings_of
from specllama.cli.prompting import PromptParts, prompt_parts, rendered, require_room
from specllama.cli.record import begin
from specllama.cli.screen.code_block import BlockWatch
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.render import Figures
from specllama.cli.screen.view import AnswerView, CodeView, EventView, RecordView, View, say_summary
from specllama.cli.screen.worker import Worker, interruptible
from specllama.cli.tuned import hint_at_tuning, measured, say_profile, strategy_text
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, PromptProgress
from specllama.core.noise import SeedMode
from specllama.core.types import Cancel, Stopper
from specllama.files.catalog import load_catalog
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask
from specllama.pairs.find_drafts import look_at
from specllama.pairs.learning import Lesson
from specllama.pairs.setup import Choice, Setup
from specllama.tuning.first_use import FirstUse


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutputOptions(OutputOptions):
    """What is printed of an answer."""

    extract: Annotated[bool, Option("-x --extract", "Print only the first code block of the answer.")] = False
    log: Annotated[
        bool, Option("--log/--no-log", "Keep the prompt and the answer in a file, see `specllama logs`.")
    ] = False
    fail_if_cut: Annotated[
        bool, Option("--fail-if-cut", "Exit code 3 if -n, the context, or --stop within a format cuts the answer.")
    ] = False


@with_options
def run(
    prompt: PromptOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: SamplingOptions,
    formats: FormatOptions,
    hardware: HardwareOptions,
    output: RunOutputOptions,
) -> None:
    """Answer one prompt. Drafts make it faster and do not change the output."""
    out = open_output(color=output.color, format=output.format, quiet=output.quiet, verbose=output.verbose)
    # llama.cpp's debug lines are for its developers.
    llama.set_log((lambda level, line: None if level == "debug" else out.detail(line)) if out.verbose else None)
    # The cheapest check comes first, loading the weights last.
    _refuse_name(prompt, models)
    parts = prompt_parts(prompt, out)
    params = sampling.params
    ask, listener = ask_of(models, drafting, hardware), Said(out)
    choice = pair_setup.choose(ask, listener)
    if prompt.dry_run:
        _show_prompt(parts, choice, listener, out)
        return
    setup = pair_setup.prepare(choice, listener)
    require_known(params.logit_bias, setup.target.header.n_vocab)
    with closing(llama.load_vocabulary(setup.target.header)) as vocab:
        read = rendered(parts, vocab, setup.target.template, out)
        require_room(read.tokens, setup, sampling.predict)
    if not (ask.names.draft or ask.names.draft_repo):
        setup = pair_setup.for_short_answer(
            setup, n_predict=sampling.predict, n_prompt=len(read.tokens), greedy=params.greedy
        )
    pair_setup.require_fit(setup, listener)
    say_profile(setup, ask.names, out)
    cut = _answer(
        read,
        ask,
        sampling,
        formats.format,
        setup,
        out,
        live=_wants_live(output.live, out),
        extract=output.extract,
        log={"prompt": parts.text, "system": parts.system} if output.log else None,
    )
    if choice.length.is_auto:
        hint_at_tuning(setup, ask.names, out)
    if output.fail_if_cut and cut:
        raise typer.Exit(CUT)


def _show_prompt(parts: PromptParts, choice: Choice, listener: Said, out: Output) -> None:
    """The prompt as the target would read it, from the header of its file."""
    wanted = pair_setup.resolve([choice.target], listener, offline=choice.offline)[0]
    with ExitStack() as stack:
        with listener.fetching() as watch:
            path = stack.enter_context(look_at(wanted, offline=choice.offline, watch=watch))
        header = llama.read_header(path, needs_weights=False)
        vocab = stack.enter_context(closing(llama.load_vocabulary(header)))
        read = rendered(parts, vocab, header.chat_template, out)
        pieces = [vocab.piece(token, special=True).decode("utf-8", "replace") for token in read.tokens]
    if out.format == "json":
        out.data({"prompt": read.text, "prompt_tokens": read.tokens, "pieces": pieces})
        return
    out.text(read.text)
    for token, piece in zip(read.tokens, pieces, strict=True):
        out.detail(f"{token:8} {to_json(piece)}")
    room = f", the context holds {figure(n_ctx)}" if (n_ctx := choice.context(header)) else ""
    out.note(f"{counted(len(read.tokens), 'token')}{room}")


def _refuse_name(prompt: PromptOptions, models: ModelOptions) -> None:
    """Raise UsageError for the name of a pair or a model in place of the prompt, where no other model is named."""
    name = prompt.prompt or ""
    if name.split() != [name] or prompt.template or models.pair or models.model or models.hf_repo:
        return
    catalog = load_catalog()
    option = "--pair" if name in catalog.pairs else "-m" if name in catalog.models else ""
    if option:
        what = "pair" if option == "--pair" else "model"
        raise UsageError(
            f"{name} is the name of a {what}, expected a prompt",
            hint=f'did you mean {option} {name}? specllama run {option} {name} "PROMPT"',
        )


def _wants_live(asked: bool | None, out: Output) -> bool:
    """Whether live figures are drawn on stderr.

    By default not beside a pipe, whose reader may draw on the same terminal; never among lines of JSON or of a log.
    """
    if not out.live or out.format == "jsonl" or out.verbose or asked is False:
        return False
    return asked is True or out.out.is_terminal or out.out.is_file


def _answer(
    prompt: RenderedPrompt,
    ask: Ask,
    sampling: SamplingOptions,
    form: AnswerFormat | None,
    setup: Setup,
    out: Output,
    *,
    live: bool,
    extract: bool,
    log: Mapping[str, object] | None,
) -> bool:
    """Load the models, generate and show the answer. Raises SystemExit after a signal.

    Returns True if the answer was cut: by -n, by the context, or by a stop text before it fits the format.

    `log`: what to keep beside the answer; None keeps nothing.
    """
    drafting, tokens, starts_thinking = ask.drafting, prompt.tokens, prompt.text.rstrip().endswith(THINK)
    given, cancel = settings_of(sampling, form), Cancel()
    params, stops = given.params, given.stops
    seed = secrets.randbits(32) if given.seed < 0 else given.seed
    seeded = given.seed >= 0 and given.seed_mode is SeedMode.DRAWS
    with ExitStack() as stack:
        restore = stack.enter_context(silent_keyboard(out.out))
        stack.enter_context(interruptible(cancel, restore))
        models = stack.enter_context(pair_setup.load_models(setup, Said(out), cancel))
        models.watch(cancel)
        setup = measured(setup, models, out, ask.names, hurried=True)
        draft_settings = setup.settings(drafting, greedy=params.greedy)
        settings = replace(given, strategy=setup.strategy, drafting=draft_settings, rule=drafting.rule, seed=seed)
        drafter = models.drafter(setup.strategy, draft_settings)
        stack.callback(drafter.close)
        record = begin(settings, setup, models, ask.names)
        piece = models.target.vocab.piece
        stopper: Stopper | None = StopWatch(stops, piece) if stops else None
        if extract:
            stopper = BlockWatch(stops, piece, starts_thinking=starts_thinking)
        events = Engine(models.target, drafter, rule=drafting.rule, cost=setup.cost).generate(
            tokens,
            params,
            given.seed_mode.chooser(seed),
            max_tokens=sampling.predict,
            stopper=stopper,
            cancel=cancel,
            constraint=constraint_of(form, models.target.vocab),
        )
        answer = TextStream(piece, stops)
        figures = Figures(models.target.n_ctx, drafts=setup.strategy != "none", look=look())
        figures.take(PromptProgress(0, len(tokens)))
        out.detail(f"seed {seed}")
        if out.format == "jsonl":
            out.data({"event": "start", **record.header, "prompt_tokens": tokens})
            view: View = EventView(out, answer, record)
        elif extract:
            view = CodeView(out, answer, figures, live=live, starts_thinking=starts_thinking)
        else:
            kind = RecordView if out.format == "json" else AnswerView
            view = kind(out, answer, figures, live=live)
        # Masks and forced tokens say nothing of free text.
        unlike = seeded or form is not None
        lesson = Lesson(setup, draft_settings.policy, greedy=params.greedy, seeded=unlike, loads=models.loads)
        finished = _show(events, view, [record.take, lesson.take, view.take], cancel)
        setup = lesson.learned()
        if out.format == "json":
            out.data({**record.header, **record.outcome(finished, answer)})
        fits = form is None or extract or form.fits(answer.text)
        cut = finished.reason == "length" or (finished.reason == "stop" and not fits)
        if out.format == "human" and finished.stats.n_steps:
            say_summary(out, finished.stats)
            out.detail(strategy_text(setup.strategy))
            if cut:
                why = f"because the context of {models.target.n_ctx} tokens is full (--ctx-size)"
                if finished.reason == "stop":
                    why = "by --stop"
                elif finished.stats.n_emitted == sampling.predict:
                    why = f"after {counted(finished.stats.n_emitted, 'token')} (-n)"
                what = f", so it does not fit the {form.kind}" if form and not fits else ""
                out.note(f"note: the answer was cut {why}{what}")
        if log is not None:
            logs.keep({**log, **record.header, **record.outcome(finished, answer)}, out)
        # An answer with a fixed seed can be repeated: costs that are complete stay as they are.
        if finished.reason != "cancelled" and not (setup.looks and seeded):
            for _ in FirstUse(setup, models):  # completes a profile that was made while this answer waited
                pass
        return cut


def _show(events: Iterator[Event], view: View, takers: Sequence[Callable[[Event], None]], cancel: Cancel) -> Finished:
    """Generate in a second thread and show each event; returns the last one."""
    with Worker(events, cancel) as worker:
        try:
            for batch in worker.batches(view.gap_s):
                for event in batch:
                    for take in takers:
                        take(event)
                view.refresh()
        finally:
            view.close()
    assert isinstance(event, Finished), "the engine's last event is always Finished"
    return event
