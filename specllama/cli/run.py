"""`specllama run`: answer one prompt."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

import typer

from specllama import llama
from specllama.base.errors import Interrupted
from specllama.chat.settings import require_known
from specllama.chat.stream import StopWatch, TextStream
from specllama.cli.args.grouping import with_options
from specllama.cli.args.options import (
    DraftOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
)
from specllama.cli.codes import INTERRUPTED
from specllama.cli.loading import Said, ask_of
from specllama.cli.prompting import prompt_tokens, read_prompt, require_room
from specllama.cli.record import Record, begin
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.render import Figures, summary
from specllama.cli.screen.view import AnswerView, EventView, RecordView, View
from specllama.cli.screen.worker import Worker, interruptible
from specllama.cli.tuned import hint_at_tuning, say_profile
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, PromptProgress, Reason
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel, Rule
from specllama.drafters import DraftSettings
from specllama.pairs import setup as pair_setup
from specllama.pairs.setup import Setup


@dataclass(frozen=True, slots=True)
class RunJob:
    """One answer, settled before any weight is loaded."""

    tokens: list[int]  # of the prompt
    params: SamplingParams
    rule: Rule
    strategy: str
    drafting: DraftSettings
    n_predict: int
    stops: tuple[str, ...]
    seed: int

    def settings(self) -> dict[str, object]:
        """Everything that decides the answer besides the models and the prompt."""
        # JSON has no infinity.
        biases = {str(token): bias if bias > -math.inf else "-inf" for token, bias in self.params.logit_bias.items()}
        return {
            **asdict(self.params),
            "logit_bias": biases,
            "seed": self.seed,
            "n_predict": self.n_predict,
            "stop": self.stops,
            "verify_rule": self.rule.value,
            "spec_type": self.strategy,
            "draft_n_max": self.drafting.length.longest,
            "draft_n_max_auto": self.drafting.policy is not None,
            "draft_p_min": self.drafting.p_min,
            "draft_temperature": self.drafting.temperature,
        }


@with_options
def run(
    prompt: PromptOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: SamplingOptions,
    hardware: HardwareOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt: a small model drafts, the target verifies, the text is the target's own."""
    out = open_output(color=output.color, format=output.format, quiet=output.quiet, verbose=output.verbose)
    llama.set_log(_log_to(out) if out.verbose else None)
    # The order is that of what it costs to find out: wrong use first, weights last.
    text = read_prompt(prompt, out)
    params = sampling.params
    ask, listener = ask_of(models, drafting, hardware), Said(out)
    choice = pair_setup.choose(ask, listener)
    setup = pair_setup.prepare(choice, listener)
    require_known(params.logit_bias, setup.target.header.n_vocab)
    with closing(llama.load_vocabulary(setup.target.header)) as vocab:
        tokens = prompt_tokens(text, prompt, vocab, setup.target.template, out)
        require_room(tokens, choice.n_ctx, sampling.predict)
    pair_setup.require_fit(setup, listener)
    job = RunJob(
        tokens=tokens,
        params=params,
        rule=ask.drafting.rule,
        strategy=setup.strategy,
        drafting=setup.settings(ask.drafting, greedy=params.greedy),
        n_predict=sampling.predict,
        stops=tuple(sampling.stop or ()),
        seed=secrets.randbits(32) if sampling.seed < 0 else sampling.seed,
    )
    say_profile(setup, out)
    reason = _answer(job, setup, out, _wants_live(output.live, out))
    if reason == "cancelled":
        raise typer.Exit(INTERRUPTED)
    if choice.length.is_auto:
        hint_at_tuning(setup, ask.names, out)


def _log_to(out: Output) -> Callable[[str, str], None]:
    """A sink for llama.cpp's log; what it says to its own developers is left out."""

    def say(level: str, line: str) -> None:
        if level != "debug":
            out.detail(line)

    return say


def _wants_live(asked: bool | None, out: Output) -> bool:
    """Whether live figures are drawn on stderr.

    Of their own accord only where they cannot get into anything's way: not beside a pipe, whose reader may draw on the
    same terminal, and not among lines of JSON or of a log.
    """
    if not out.live or out.format == "jsonl" or out.verbose or asked is False:
        return False
    return asked is True or out.out.is_terminal or out.out.is_file


def _answer(job: RunJob, setup: Setup, out: Output, live: bool) -> Reason:
    """Load the models, generate, show; returns why the answer ended."""
    cancel = Cancel()
    with ExitStack() as stack:
        restore = stack.enter_context(silent_keyboard(out.out))
        stack.enter_context(interruptible(cancel, restore))
        try:
            models = stack.enter_context(pair_setup.load_models(setup, Said(out), cancel))
        except Interrupted:
            return "cancelled"
        models.watch(cancel)
        drafter = models.drafter(job.strategy, job.drafting)
        stack.callback(drafter.close)
        record = begin(job.settings(), setup, models)
        piece = models.target.vocab.piece
        events = Engine(models.target, drafter, rule=job.rule).generate(
            job.tokens,
            job.params,
            RandomChooser(job.seed),
            max_tokens=job.n_predict,
            stopper=StopWatch(job.stops, piece) if job.stops else None,
            cancel=cancel,
        )
        answer = TextStream(piece, job.stops)
        figures = Figures(models.target.n_ctx, drafts=job.strategy != "none")
        figures.take(PromptProgress(0, len(job.tokens)))
        out.detail(f"seed {job.seed}")
        if out.format == "jsonl":
            out.data({"event": "start", **record.header, "prompt_tokens": job.tokens})
        finished = _show(events, _view(out, answer, figures, record, live), record, cancel)
        if out.format == "json":
            out.data({**record.header, **record.outcome(finished, answer)})
        elif out.format == "human" and finished.stats.n_steps:
            out.note(summary(finished.stats, drafts=figures.drafts))
            if finished.reason == "length":
                out.note(_cut(finished.stats.n_emitted, job.n_predict, models.target.n_ctx))
        return finished.reason


def _cut(n_emitted: int, n_predict: int, n_ctx: int) -> str:
    """Why an answer ends in the middle."""
    if n_emitted == n_predict:
        return f"note: the answer was cut after {n_emitted} tokens, as -n wants it"
    return f"note: the answer was cut where the context of {n_ctx} tokens was full (--ctx-size)"


def _view(out: Output, answer: TextStream, figures: Figures, record: Record, live: bool) -> View:
    """The view for this form of output."""
    if out.format == "jsonl":
        return EventView(out, answer, record)
    if out.format == "json":
        return RecordView(out, answer, figures, live=live)
    return AnswerView(out, answer, figures, live=live)


def _show(events: Iterator[Event], view: View, record: Record, cancel: Cancel) -> Finished:
    """Generate in a second thread and show what comes; returns the last event."""
    with Worker(events, cancel) as worker:
        try:
            for batch in worker.batches(view.gap_s):
                for event in batch:
                    record.take(event)
                    view.take(event)
                view.refresh()
        finally:
            view.close()
    assert isinstance(event, Finished), "the engine's last event is always Finished"
    return event
